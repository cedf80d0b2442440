"""In Python and in notebooks: samples as a sequence and as a file, what things look like, and notebooks that still say
what they said."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import nbformat
import pytest
import torch
from nbclient import NotebookClient

import limpet
from limpet import CRS, LimpetError, Mend, Native, Samples
from limpet.diffusion.rng import CounterRNG
from limpet.recording import inline, record
from limpet.recording.page import self_contained
from limpet.samplers.context import open_context

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
WORDS = limpet.load("exact:words")


@pytest.fixture(scope="module")
def samples() -> Samples:
    return limpet.sample(WORDS, CRS(nfe=4, budget=0.25), n=5, seed=3, first=10, prefix="sand ")


# Samples


def test_samples_are_a_sequence_of_rows(samples):
    assert len(samples) == 5
    assert list(samples) == list(samples.rows()) == [samples[i] for i in range(5)]
    assert samples[-1] == samples[4]
    assert (samples[2]["sample"], samples[2]["text"]) == (12, samples.texts[2])
    with pytest.raises(IndexError, match="there are 5 samples, and none is number 5"):
        samples[5]


def test_a_slice_is_what_would_have_been_sampled_there(samples):
    part = samples[1:3]
    again = limpet.sample(WORDS, CRS(nfe=4, budget=0.25), n=2, seed=3, first=11, prefix="sand ")
    assert (part.first, part.texts) == (11, again.texts)
    assert all(torch.equal(a, b) for a, b in zip(part.memory, again.memory, strict=True))
    assert type(part.memory) is type(again.memory)
    for wrong in (slice(None, None, 2), slice(3, 3), slice(None, None, -1)):
        with pytest.raises(LimpetError, match="that follow each other"):
            samples[wrong]


def test_samples_are_equal_where_their_rows_are(samples):
    assert samples == replace(samples, memory=())
    for other in (
        samples[:4],
        replace(samples, seed=4),
        replace(samples, tokens=samples.tokens.flip(0)),
        replace(samples, sampler=CRS(nfe=4)),
        list(samples),
    ):
        assert samples != other
    with pytest.raises(TypeError, match="unhashable"):
        hash(samples)


def test_samples_come_back_from_json_lines(samples, tmp_path):
    samples.save(tmp_path / "a.jsonl")
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == json.loads(json.dumps(list(samples)))
    back = Samples.load(tmp_path / "a.jsonl")
    assert back == samples
    assert back.texts == samples.texts
    assert back.sampler == samples.sampler
    lines = replace(samples, _decode=lambda ids: "one\u2028two\x85\n")
    lines.save(tmp_path / "c.jsonl")
    assert Samples.load(tmp_path / "c.jsonl") == lines
    chain = limpet.sample(limpet.models.exact.Markov(torch.ones(3), torch.ones(3, 3), 6), Native(nfe=2), n=2)
    chain.save(tmp_path / "b.jsonl")  # no tokenizer, so no texts
    assert Samples.load(tmp_path / "b.jsonl") == chain


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda rows: [], "it is empty"),
        (lambda rows: [rows[0], rows[2]], "line 2 is not of the run of line 1"),
        (lambda rows: [rows[0], rows[1] | {"seed": 9}], "line 2 is not of the run of line 1"),
        (lambda rows: [{"text": "a"}], "KeyError"),
        (lambda rows: [3], "TypeError"),
        (lambda rows: [rows[0] | {"tokens": [[1], 2]}], "does not hold the samples"),
        (
            lambda rows: [rows[0] | {"sampler": {"sampler": "./no.py:Mine"}}],
            "a file that is not run from here: give sampler=",
        ),
        (
            lambda rows: [rows[0] | {"sampler": {"sampler": "gibbs", "predictor": "./no.py:Mine"}}],
            "a file that is not run from here: give sampler=",
        ),
        (lambda rows: [rows[0] | {"sampler": {"sampler": "crs", "horizon": 0}}], "crs has horizon 0"),
    ],
)
def test_what_is_no_run_of_samples_is_one_sentence(samples, tmp_path, spoil, words):
    (tmp_path / "no.py").write_text("raise SystemExit('it was run')")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in spoil(list(samples))))
    with pytest.raises(LimpetError, match=re.escape(words)):
        Samples.load(tmp_path / "a.jsonl")


def test_a_sampler_of_ones_own_is_given_to_what_loads(tmp_path, here):
    @dataclass(frozen=True)
    class Own(Native):
        pass

    made = limpet.sample(WORDS, Own(nfe=2), n=2)
    made.save(tmp_path / "a.jsonl")
    assert Samples.load(tmp_path / "a.jsonl", Own(nfe=2)) == made
    with pytest.raises(LimpetError, match="not under"):
        Samples.load(tmp_path / "a.jsonl", Own(nfe=3))


def test_samples_as_a_data_frame(samples):
    frame = samples.to_pandas()
    assert len(frame) == 5
    assert frame["text"].tolist() == samples.texts
    assert set(frame["sampler budget"]) == {0.25}


# What things look like


def test_short_words_for_everything(samples):
    assert repr(WORDS) == "<Mixture exact:words: 160 tokens of 27, float64 on cpu>"
    assert repr(CRS(nfe=16)) == "CRS(nfe=16)"
    assert repr(Mend(nfe=8, budget=0.25, values="argmax")) == "Mend(nfe=8, budget=0.25)"
    assert eval(repr(CRS(nfe=7, final_step="keep", horizon=3))) == CRS(nfe=7, final_step="keep", horizon=3)
    assert repr(samples) == "<5 samples of 160 tokens: exact:words in float64, CRS(nfe=4, budget=0.25), seed 3>"
    path = open_context(WORDS, CounterRNG(0, torch.arange(2)), torch.full((2, 160), -1))
    state, info = CRS(nfe=4).step(path, CRS(nfe=4).begin(path))
    shown = [repr(one) for one in (path, state, info, record(WORDS, Native(nfe=2)))]
    assert shown[1].startswith("<State after call 1: tokens (2, 160), remembers [")
    assert all(len(words) < 200 and "\n" not in words for words in shown)


def test_a_comparison_in_a_notebook_has_the_numbers_of_the_table(samples):
    result = limpet.compare(WORDS, {"native": Native(nfe=3), "<b>CRS": CRS(nfe=3)}, n=2, shards=(1, 2))
    shown = result._repr_html_()
    assert "<b>" not in shown
    texts = html.unescape(re.sub("<[^>]+>", "\n", shown)).split("\n")
    for text in (*result.table()[0], *(text for row in result.table()[1] for text in row)):
        assert text in texts
    assert repr(result) == "<exact:words: 2 shards of 2 samples, 160 tokens: native, <b>CRS>"


def test_samples_in_a_notebook_are_texts_and_nothing_else(samples):
    hostile = replace(samples, _decode=lambda ids: "<script>alert(1)</script>")
    assert "<script" not in hostile._repr_html_()
    shown = html.unescape(samples._repr_html_())
    assert all(text in shown for text in samples.texts)
    many = limpet.sample(WORDS, Native(nfe=2), n=9)
    assert "the first 8" in many._repr_html_()
    assert many.texts[8] not in html.unescape(many._repr_html_())


def test_a_trajectory_in_a_notebook_is_the_page_in_a_frame():
    path = record(WORDS, Native(nfe=2))
    (srcdoc,) = re.findall(r'^<iframe sandbox="allow-scripts allow-downloads" srcdoc="([^"]*)"', path._repr_html_())
    assert html.unescape(srcdoc) == self_contained([path])
    assert inline(path, path).page == self_contained([path, path])
    assert len(repr(inline(path))) < 80


def test_progress_without_a_terminal_is_a_line(capsys):
    limpet.sample(WORDS, Native(nfe=3), n=2, progress=True)
    assert capsys.readouterr().err == "\r6 of 6 calls\n"
    limpet.compare(WORDS, {"a": Native(nfe=3), "b": Native(nfe=2)}, n=2, shards=(1,), progress=True)
    assert capsys.readouterr().err == "\r6 of 6 calls\n\r4 of 4 calls\n"


# Notebooks


def said(cell) -> list[str]:
    """What a cell shows, but for progress."""
    found = []
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        found += [output["text"]] if output.get("name") == "stdout" else []
        found += [
            data[kind]
            for kind in ("text/html", "text/markdown", "text/plain")
            if kind in data and "iframe" not in data[kind]
        ]
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_says_what_it_said(path):
    """But for cells tagged "rounds", whose network may round otherwise on another machine."""
    kept = nbformat.read(path, 4)
    nbformat.validate(kept)
    made = NotebookClient(nbformat.read(path, 4), timeout=300, resources={"metadata": {"path": path.parent}}).execute()
    assert len(kept.cells) == len(made.cells)
    for before, after in zip(kept.cells, made.cells, strict=True):
        if "rounds" not in before.metadata.get("tags", ()):
            assert said(before) == said(after)


def test_notebooks_are_small_and_whole():
    assert len(NOTEBOOKS) == 3
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 400_000
    for path in NOTEBOOKS:
        cells = [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
        assert any(said(cell) for cell in cells)
