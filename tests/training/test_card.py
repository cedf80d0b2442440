"""The cards: the study they come from, the sentences it becomes, and the committed ones in that very form."""

from __future__ import annotations

import json
import lzma
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from limpet import CRS, Native
from limpet.evaluation.statistics import mean_se
from limpet.experiments import ModelCache, Results, RunSummary, Store, resolve
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.registry import from_file
from limpet.training.data import encode, read_documents

card = sys.modules[from_file(f"{Path(__file__).parents[2] / 'tools' / 'card.py'}:main").__module__]


def masked(text: str) -> str:
    """A text without its figures: of any number of digits before the point, as many as are there after it."""
    return re.sub(r"\d[\d,]*(\.\d+)?", lambda found: "#" + re.sub(r"\d", "0", found[1] or ""), text)


def between(text: str, block: str) -> str:
    return text.partition(f"<!-- {block} -->\n")[2].partition("\n<!-- end -->")[0]


@pytest.fixture
def results() -> Results:
    """Invented numbers: GenPPL by sampler and calls, entropy falling with top-p."""
    study, cells = card.study(64), {}
    for cell in study.sample_cells:
        crs, distilled, top_p = isinstance(cell.sampler, CRS), cell.model == "mini-distilled", cell.sampler.top_p
        ppl = 100.0 * (64 / cell.sampler.nfe) ** 0.5 * top_p**5 * (0.2 if crs else 1) * (0.6 if distilled else 1)
        values = ppl * np.array([0.99, 1.0, 1.0, 1.01])
        entropy = 4.6 - 0.5 * (1 - top_p) - (0.1 if crs else 0) + 0 * values
        cells[cell.name] = {"nll": mean_se(np.log(values)), "entropy": mean_se(entropy), "rep-4": mean_se(0 * values)}
    return Results(study, {"computed on": [{"precision": "bfloat16", "device": "cpu x86_64"}]}, cells)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A prepared corpus of a few held-out pages in the minis' own tokens."""
    folder = tmp_path / "data"
    folder.mkdir()
    shutil.copy(BUILTIN_FOLDER / "tokenizer.json", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pages = [page[:4000] for page in read_documents([BUILTIN_FOLDER / "heldout.txt.xz"])[:4]]
    facts = {"documents": 4, "tokens": 1_234_567, "bytes": sum(len(page.encode()) for page in pages), "copies": 0}
    for split in card.SPLITS:
        (folder / f"{split}.xz").write_bytes(lzma.compress(encode(tokenizer, pages).astype("<u2").tobytes()))
    splits = dict.fromkeys(("train", "test", "validation"), facts)
    (folder / "data.json").write_text(json.dumps({"splits": splits}))
    return folder


BOOKS = {"nats": 3.5, "error": 0.001, "perplexity": 33.1, "bits_per_byte": 1.4, "rows": 100, "draws": 4,
         "precision": "float32", "device": "NVIDIA H200"}  # fmt: skip
REAL = {"ppl": 22.7, "entropy": 4.753, "rep-4": 0.0206}


def test_the_study_has_every_row_once():
    study = card.study(64)
    assert [cell.name for cell in study.cells[:6]] == [f"mini, {name}, 64" for name in card.SWEEP]
    assert len(study.cells) == 6 + 2 * 3 + 2 * 3
    by_name = {cell.name: cell.sampler for cell in study.sample_cells}
    assert by_name["mini, native, 64"] == Native(nfe=64, final_step="argmax")
    assert by_name["mini, top-p 0.65, 64"] == Native(nfe=64, top_p=0.65, final_step="argmax")
    assert by_name["mini-distilled, CRS, 8"] == CRS(nfe=8, budget=0.5, warmup=0.33)
    assert {cell.n for cell in study.sample_cells} == {64}
    assert (study.seeds, [judge.name for judge in study.judges]) == ((8200, 8210, 8220, 8230), ["mini-judge"])
    plan = resolve(study, ModelCache("cpu"))
    assert [(judge["name"], judge["convention"]) for judge in plan.document["judges"]] == [("mini-judge", "ids")]


@pytest.mark.parametrize("model", card.NAMES)
def test_the_committed_cards_are_what_it_writes_but_for_the_figures(model, results, data, tmp_path):
    """Training, storage and the split of the books come from files that are here: those to the last digit."""
    text = (BUILTIN_FOLDER / model / "README.md").read_text()
    books = {**BOOKS, "draws": 1} if model == "mini-judge" else BOOKS
    blocks = card.blocks_of(model, card.sample_blocks(results, REAL), [books, books], data)
    known = {*blocks, *(() if model == "mini-judge" else ("frontier",))}  # which tests/docs holds
    assert known == set(re.findall(r"<!-- (?!end)([\w-]+) -->", text))
    for block, content in blocks.items():
        committed = between(text, block)
        if block in ("training", "storage"):
            assert content == committed
        assert masked(content) == masked(committed), block
    page = Path(shutil.copy(BUILTIN_FOLDER / model / "README.md", tmp_path))
    for block, content in blocks.items():
        card.put(page, block, content)
    filled = page.read_text()
    assert all(between(filled, block) == content for block, content in blocks.items())
    assert masked(filled) == masked(text)


def test_the_committed_tables_bear_the_committed_findings_out():
    """From the rounded figures of the tables the ratios of the findings come out, as far as those carry."""
    text = (BUILTIN_FOLDER / "mini" / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| ([\d.]+) ± ", between(text, "samples") + between(text, "calls"), re.M)
    ppl = {(name, int(calls)): float(value) for name, calls, value in rows}
    found = [float(value) for value in re.findall(r"has ([\d.]+) ±", between(text, "findings"))]
    assert ppl["CRS", 64] / ppl["top-p 0.9", 64] == pytest.approx(found[0], abs=0.005)
    assert ppl["mini, CRS", 8] / ppl["mini, native", 8] == pytest.approx(found[1], abs=0.005)
    assert ppl["mini-distilled, native", 8] / ppl["mini, native", 8] == pytest.approx(found[2], abs=0.005)
    assert ppl["CRS", 64] == ppl["mini, CRS", 64]
    distilled = (BUILTIN_FOLDER / "mini-distilled" / "README.md").read_text()
    for block in ("calls", "findings", "data"):
        assert between(distilled, block) == between(text, block)


def test_findings_are_the_figures_of_the_study(results):
    sentences = [sentence for sentence, _ in card.findings(results)]
    for ratio, sentence in zip([0.2 / 0.9**5, 0.2], sentences[:2], strict=True):
        assert f"{ratio:.3f} ± 0.000" in sentence
    # At entropy 4.5 the curve stands at top-p .8: ln(100 .8^5), against CRS's ln 20.
    assert f"{np.log(100 * 0.8**5) - np.log(20):.3f} ± 0.000" in sentences[2]
    assert "0.600 ± 0.000" in sentences[3]
    assert [holds for _, holds in card.findings(results)] == [True] * 4
    worse = {**results.cells, "mini, CRS, 8": results.cells["mini, native, 8"]}
    failed = Results(results.study, results.provenance, worse)
    assert [holds for _, holds in card.findings(failed)] == [True, False, True, True]
    assert "1.000 ± 0.000" in card.sample_blocks(failed, REAL)["findings"].splitlines()[1]
    assert "**It does not hold.**" in card.sample_blocks(failed, REAL)["findings"].splitlines()[1]


def test_a_measurement_is_computed_once(tmp_path):
    calls = []
    for seed in (1, 1, 2):
        found = card.kept(tmp_path, {"seed": seed}, lambda: calls.append(1) or {"value": 0.25})
        assert found == {"value": 0.25}
    assert len(calls) == 2


def test_where_says_each_machine_once():
    cpu, gpu = {"precision": "bfloat16", "device": "cpu x86_64"}, {"precision": "float32", "device": "NVIDIA H200"}
    assert card.where([cpu, cpu]) == "\n\nMeasured in bfloat16 on a CPU."
    assert card.where([gpu, cpu]) == "\n\nMeasured in bfloat16 on a CPU and in float32 on NVIDIA H200."


def test_the_whole_is_measured_and_printed(tmp_path, monkeypatch, capsys, results, data):
    """All but the samples themselves, which the laboratory's own tests make; few rows write no card."""
    ran = []
    monkeypatch.setattr(
        card, "run", lambda study, store, *others, **options: ran.append((study, store)) or RunSummary()
    )
    monkeypatch.setattr(card, "collect", lambda study, store: results)
    before = {name: (BUILTIN_FOLDER / name / "README.md").read_bytes() for name in card.NAMES}
    call = ["--n", "1", "--rows", "2", "--draws", "2", "--data", str(data), "--store", str(tmp_path / "card")]
    assert card.main([*call, "--device", "cpu", "--precision", "float32"]) == 0
    printed = capsys.readouterr()
    assert {name: (BUILTIN_FOLDER / name / "README.md").read_bytes() for name in card.NAMES} == before
    assert [study.cells[0].n for study, _ in ran] == [1]
    assert isinstance(ran[0][1], Store)
    assert printed.out.count("Measured in float32 on a CPU.") == 3
    for name in card.NAMES:
        assert f"# {name}\n" in printed.out
    (bound,) = re.findall(r"# mini\n.*?\| validation \| ([\d.]+) ± ", printed.out, re.S)
    assert 2 < float(bound) < 6
    (ppl,) = re.findall(r"\| held-out text \|  \| ([\d.]+) \|", printed.out)
    assert 5 < float(ppl) < 60
    assert len(list((tmp_path / "card" / "text").iterdir())) == 7
    assert card.main([*call, "--device", "cpu"]) == 0  # all of it kept
    assert "measured" not in capsys.readouterr().err


def test_what_is_missing_is_one_sentence(tmp_path, capsys):
    assert card.main(["--data", str(tmp_path)]) == 2
    assert "no prepared corpus" in capsys.readouterr().err
