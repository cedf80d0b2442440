"""Notebooks print what is stored in them, and samples, comparisons and trajectories display themselves."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import limpet
from limpet import CRS, Mend, Native, Samples
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, context_of
from limpet.recording import inline, record
from limpet.recording.page import self_contained

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
WORDS = limpet.load("exact:words")


@pytest.fixture(scope="module")
def samples() -> Samples:
    return limpet.sample(WORDS, CRS(nfe=4, budget=0.25), n=5, seed=3, first=10, prompt="sand ")


def test_everything_has_a_short_representation(samples):
    assert repr(WORDS) == "<Mixture exact:words: 160 tokens of 27, float64 on cpu>"
    assert repr(Mend(nfe=8, budget=0.25, values="argmax")) == "Mend(nfe=8, budget=0.25)"
    assert eval(repr(CRS(nfe=7, final_step="keep", horizon=3))) == CRS(nfe=7, final_step="keep", horizon=3)
    assert repr(samples) == "<5 samples of 160 tokens: exact:words in float64, CRS(nfe=4, budget=0.25), seed 3>"
    context = context_of(WORDS, Inputs(torch.full((2, 160), -1), CounterRNG(0, torch.arange(2))))
    state, info = CRS(nfe=4).step(context, CRS(nfe=4).init(context))
    step = next(limpet.steps(WORDS, "crs nfe=4"))
    for shown in map(repr, (context, state, info, step, record(WORDS, Native(nfe=2)))):
        assert len(shown) < 200
        assert "\n" not in shown


def test_samples_as_a_data_frame(samples):
    frame = samples.to_pandas()
    assert frame["text"].tolist() == samples.texts
    assert set(frame["sampler budget"]) == {0.25}


def test_a_comparison_displays_the_numbers_of_its_table():
    result = limpet.compare(WORDS, {"native": Native(nfe=3), "<b>CRS": CRS(nfe=3)}, n=2, seeds=(1, 2))
    shown, table = result._repr_html_(), result.table()
    assert "<b>" not in shown
    text = html.unescape(re.sub("<[^>]+>", "\n", shown))
    assert all(cell in text for row in (table.head, *table.rows) for cell in row)


def test_samples_display_their_texts_and_no_markup_of_them(samples):
    hostile = replace(samples, _decode=lambda ids: "<script>alert(1)</script>")
    assert "<script" not in hostile._repr_html_()
    shown = html.unescape(samples._repr_html_())
    assert all(text in shown for text in samples.texts)
    many = limpet.sample(WORDS, Native(nfe=2), n=9)
    assert "the first 8" in many._repr_html_()
    assert many.texts[8] not in html.unescape(many._repr_html_())


def test_a_trajectory_displays_the_page_in_a_frame():
    trajectory = record(WORDS, Native(nfe=2))
    pattern = r'^<iframe sandbox="allow-scripts allow-downloads" srcdoc="([^"]*)"'
    (page,) = re.findall(pattern, trajectory._repr_html_())
    assert html.unescape(page) == self_contained([trajectory])
    assert inline(trajectory, trajectory).page == self_contained([trajectory, trajectory])
    assert len(repr(inline(trajectory))) < 80


def test_progress_without_a_terminal_is_a_line(capsys):
    limpet.sample(WORDS, Native(nfe=3), n=2, progress=True)
    assert capsys.readouterr().err == "\r6 of 6 calls\n"


def outputs(cell) -> list[str]:
    """What a cell shows, without progress and without pages in frames."""
    found = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        found += [output["text"]] if output.get("name") == "stdout" else []
        if "iframe" not in str(data):
            found += [data[kind] for kind in ("text/html", "text/markdown", "text/plain") if kind in data]
    return found


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] * (i > 0), id=path.stem) for i, path in enumerate(NOTEBOOKS)],
)
def test_a_notebook_prints_what_is_stored_in_it(path):
    """Cells tagged "rounds" may differ: their network may round differently on another machine."""
    stored = nbformat.read(path, 4)
    nbformat.validate(stored)
    client = NotebookClient(nbformat.read(path, 4), timeout=None, resources={"metadata": {"path": path.parent}})
    for before, after in zip(stored.cells, client.execute().cells, strict=True):
        if "rounds" not in before.metadata.get("tags", ()):
            assert outputs(before) == outputs(after)


def test_notebooks_are_small_and_executed_in_order():
    assert len(NOTEBOOKS) == 3
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 400_000
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
        assert any(outputs(cell) for cell in cells)
