"""What quality costs: the cells and mixtures of the study, times of a tiny network, and the text from both."""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from limpet import LimpetError, registry
from limpet.evaluation.statistics import Estimate
from limpet.experiments import ModelCache, Results, Store, collect, local, report, resolve, run, speed
from limpet.models.duo import Duo, DuoShape
from limpet.paper.studies import interleave, pareto, preset, study

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "benchmarks/results"
BENCH = runpy.run_path(str(ROOT / "benchmarks/pareto.py"))
GPU, SMOKE = preset("mini-gpu"), preset("smoke")
CRS, TOP_P = (pareto.families(SMOKE, nfe)[name] for nfe, name in ((2, "CRS, argmax"), (8, "top-p, argmax")))
MARKED = "top\n<!-- pareto -->\n<!-- end -->\nbottom\n"


def results_at(points: dict[str, tuple[float, float]], shift: tuple[float, ...] = (0.0, 0.01)) -> Results:
    """Results with cells at (entropy, NLL), the second seed shifted; all other cells are far off."""
    one = study("pareto", SMOKE)
    cells = {}
    for cell in one.sample_cells:
        entropy, nll = points.get(cell.name, (1.0, 9.0))
        cells[cell.name] = {
            "entropy": Estimate(np.array([entropy + d for d in shift])),
            "nll": Estimate(np.array([nll + d for d in shift])),
        }
    return Results(one, {}, cells)


def test_numbers_of_calls_go_beyond_a_presets_own_on_both_sides() -> None:
    assert pareto.calls(GPU) == [2, 4, 6, 8, 16, 32, 64, 128]
    assert pareto.calls(SMOKE) == [2, 3, 4, 8, 16]


def test_cells_of_other_studies_are_shared() -> None:
    """Same sampler, same samples: those of `samplers` of a family, and beyond its calls those of `forms`."""
    own = {cell.name: cell for cell in study("pareto", GPU).sample_cells}
    for other, calls in (("samplers", GPU.nfes), ("forms", (128,))):
        others = {cell.name: cell for cell in study(other, GPU).sample_cells}
        shared = own.keys() & others.keys()
        assert all(own[name] == others[name] for name in shared if own[name].sampler.nfe in calls)
        assert len([name for name in shared if own[name].sampler.nfe in calls]) >= 18
    for role in GPU.captions:
        assert own[f"{role}/64/native top_p=.9"].n == 256
        assert f"{role}/128/native top_p=.9" in own
        for nfe in pareto.calls(GPU):
            texts = [text for family in pareto.families(GPU, nfe).values() for text in family]
            assert len(texts) == len(set(texts))
            assert {f"{role}/{nfe}/{text}" for text in texts} <= own.keys()


def test_units_of_the_study_of_samplers_are_shared() -> None:
    own, others = (
        {(unit.cell.name, unit.seed): unit.key for unit in resolve(study(name, SMOKE), ModelCache("cpu")).units}
        for name in ("pareto", "samplers")
    )
    shared = own.keys() & others.keys()
    assert {name for name, _ in shared} >= {f"base/8/{text}" for text in pareto.RELEASED.values()}
    assert all(own[one] == others[one] for one in shared)
    assert study("pareto", GPU).reference_text == study("samplers", GPU).reference_text  # the key depends on it


def test_interleaved_samplers_are_compared_with_the_released_sampler_alone() -> None:
    """All of them at one and a half to three times the fewest calls, and the released sampler's cell as in `pareto`,
    but for its number of samples."""
    own, whole = ({cell.name: cell for cell in study(name, GPU).sample_cells} for name in ("interleave", "pareto"))
    assert list(interleave.by_calls(GPU)) == [12, 16, 24]
    mixed = interleave.SAMPLERS[interleave.FAMILY]
    compared = {*interleave.SAMPLERS["curve"], *interleave.SAMPLERS["mend"]} - {*mixed}
    names = [name for name in own if "/64/" not in name]
    assert len(names) == 2 * (3 * len(mixed) + len(compared))
    for name in names:
        assert own[name].sampler.interleave
        assert own[name].sampler.grid == "quadratic"
    for name in own.keys() - set(names):
        assert own[name].sampler == whole[name].sampler
        assert not own[name].sampler.interleave


def test_the_fastest_of_several_studies() -> None:
    one = BENCH["Cheapest"]("w", "c", "sample", 9.0, {"a": 1.0}, 8, Estimate(np.zeros(2)), 3.0)
    both = one._replace(shares={"a": 0.5, "b": 0.5}, seconds=2.0)
    assert BENCH["fastest"]([one, one._replace(seconds=1.0), both, one._replace(where="v")]) == [
        one._replace(seconds=1.0), both, one._replace(where="v"),
    ]  # fmt: skip


def test_a_family_is_measured_at_the_released_samplers_entropy() -> None:
    """Three quarters of the way from one sampler to the other; the third above the chord has no share."""
    points = {
        "distilled/8/native top_p=.9 final_step=argmax": (2.75, 1.5),
        "distilled/2/crs": (2.0, 0.5),
        "distilled/2/crs budget=.25": (3.0, 1.3),
        "distilled/2/crs budget=.125": (2.7, 1.4),
    }
    found = pareto.delta(results_at(points), SMOKE, "distilled", "argmax", 2, CRS)
    assert found.values == pytest.approx([-0.4, -0.4])
    mixture = pareto.best_mixture(results_at(points), SMOKE, "distilled", "argmax", 2, CRS)
    assert mixture is not None
    assert mixture.shares == pytest.approx({"crs": 0.25, "crs budget=.25": 0.75})
    points["distilled/8/native top_p=.9 final_step=argmax"] = (3.5, 1.5)  # more than any sampler has
    found = pareto.delta(results_at(points), SMOKE, "distilled", "argmax", 2, CRS)
    assert np.isnan(found.values).all()
    assert found.reasons[0] is not None
    assert pareto.best_mixture(results_at(points), SMOKE, "distilled", "argmax", 2, CRS) is None


def test_a_seeds_difference_of_entropy_counts_along_the_hull() -> None:
    """Under the second seed the entropy is .1 lower, where a nat of entropy costs .8 of NLL; nothing else differs.
    The released sampler at its own calls is at zero without an error."""
    points = {
        "distilled/8/native top_p=.9 final_step=argmax": (2.5, 1.5),
        "distilled/2/crs": (2.05, 0.5),
        "distilled/2/crs budget=.25": (3.05, 1.3),
    }
    results = results_at(points, (0.0, 0.0))
    for text in ("crs", "crs budget=.25"):
        entropy = results.cells[f"distilled/2/{text}"]["entropy"].values
        results.cells[f"distilled/2/{text}"]["entropy"] = Estimate(entropy - np.array([0.0, 0.1]))
    found = pareto.delta(results, SMOKE, "distilled", "argmax", 2, CRS)
    assert found.values == pytest.approx([0.9 - 0.04 - 1.5, 0.9 + 0.04 - 1.5])
    itself = results_at({**points, "distilled/8/native final_step=argmax": (2.9, 3.0)}, (0.0, 0.02))
    assert pareto.delta(itself, SMOKE, "distilled", "argmax", 8, TOP_P).values == pytest.approx([0.0, 0.0])


def test_a_sampler_suffices_if_it_is_as_diverse_and_surely_better() -> None:
    points = {
        "base/8/native top_p=.9 final_step=argmax": (2.0, 1.5),
        "base/2/mend": (2.1, 1.4),
        "base/3/mend": (1.9, 1.0),  # less diverse
        "base/4/mend": (2.1, 1.6),  # worse
    }
    found = BENCH["sufficient"](results_at(points), SMOKE, pareto.by_calls(SMOKE), "base", "argmax")
    assert list(found) == [(2, "Mend", "mend")]
    assert found[2, "Mend", "mend"].values == pytest.approx([-0.1, -0.1])
    wide = results_at(points)
    wide.cells["base/2/mend"]["nll"] = Estimate(np.array([1.2, 1.61]))  # two seeds that disagree decide nothing
    assert not BENCH["sufficient"](wide, SMOKE, pareto.by_calls(SMOKE), "base", "argmax")


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny network, with fewer calls of the released functions."""
    trained_like = registry.from_file(f"{ROOT / 'tools/trained_like.py'}:trained_like")
    shape = DuoShape(vocab_size=300, length=16, width=64, blocks=2, heads=2, hidden=64)
    out = tmp_path_factory.mktemp("times") / "tiny.json"
    options = argparse.Namespace(
        out=out,
        runs=1,
        few=3,
        batches=[2, 4],
        released_batches=[2, 4],
        released_calls=2,
        calls=None,
        seconds=1e9,
        study="pareto",
    )
    BENCH["timings"](Duo(trained_like(shape), name="exact:words"), SMOKE, options)
    return out


def test_the_samplers_that_are_timed(times: Path) -> None:
    """All at few calls, beyond them the first of each family."""
    found = json.loads(times.read_text())
    for nfe in pareto.calls(SMOKE):
        families = pareto.families(SMOKE, nfe)
        wanted = {text for own in families.values() for text in (own if nfe <= 3 else own[:1])}
        assert found[f"{nfe} calls"].keys() == wanted
        assert all(seconds > 0 for seconds in found[f"{nfe} calls"].values())
    assert found["released"]["batch"] == 4
    assert found["released"]["calls"] == 8
    assert found["released"]["timed calls"] == 2
    assert found["released"]["0.9"] > 0
    assert found["batch"] in (2, 4)


def test_the_time_of_fewer_released_calls_is_scaled() -> None:
    cost = speed.CallCost(3.0, 1.0, (1.0,), None, 1.0, 1.0)
    assert BENCH["per_texts"](cost, 4, 64 / 8) == 3 * 8 * 250
    assert BENCH["per_texts"](None, 4) is None


def test_the_released_functions_take_the_largest_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled and compiled; an error if none fits."""

    def fitting(most: int) -> dict[str, Any]:
        def measure(contenders: dict[str, int], calls: int, tokens: int, *_: Any) -> dict[str, speed.CallCost | None]:
            return dict.fromkeys(
                contenders, speed.CallCost(1.0, 1.0, (1.0,), None, 1.0, 1.0) if tokens <= most * 16 else None
            )

        monkeypatch.setattr(speed, "measure", measure)
        options = argparse.Namespace(released_batches=[2, 8, 4], released_calls=2, runs=1)
        model: Any = argparse.Namespace(network=None, device=torch.device("cpu"), length=16)
        found: dict[str, Any] = BENCH["released_times"](model, SMOKE, options)
        return found

    monkeypatch.setattr(
        speed, "released_generations", lambda *arguments: {f"released {name}": None for name in arguments[-1]}
    )
    assert fitting(5) == {"batch": 4, "calls": 8, "timed calls": 2, "compiled": False, "1": 1000.0, "0.9": 1000.0}
    with pytest.raises(LimpetError, match=r"none of batches \[2, 8, 4\]"):
        fitting(1)


def fastest(about: dict[str, Any], results: Results) -> list[Any]:
    return list(BENCH["cheapest"](about, results, SMOKE))


def test_the_cheapest_has_the_least_time_not_the_fewest_calls() -> None:
    """A sampler that was not timed has the time of its family's first."""
    points = {
        "distilled/8/native top_p=.9 final_step=argmax": (2.0, 1.5),
        "distilled/2/crs": (1.5, 0.5),
        "distilled/2/crs budget=.25": (2.5, 1.5),
        "distilled/3/mend": (2.0, 1.0),
        "distilled/3/mend budget=.25": (2.5, 1.2),
    }
    about = {
        "about": {"device": "d", "model": "exact:words", "every sampler up to": 2, "study": "pareto"},
        "released": {"0.9": 100.0},
        "2 calls": {"crs": 4.0},
        "3 calls": {"mend": 3.0},
    }
    mixed, alone = [
        one
        for one in fastest(about, results_at(points, (0.0, 0.0)))
        if (one.caption, one.final_step) == ("words", "argmax")
    ]
    assert (mixed.nfe, mixed.seconds, mixed.shares) == (3, 3.0, {"mend": 1.0})
    assert (alone.nfe, alone.seconds) == (3, 3.0)
    about["2 calls"] = {"crs": 4.0, "crs budget=.25": 1.0}
    mixed, *_ = fastest(about, results_at(points, (0.0, 0.0)))
    assert (mixed.nfe, mixed.seconds, mixed.shares) == (2, 2.5, {"crs": 0.5, "crs budget=.25": 0.5})
    assert mixed.row.endswith("| 2.5 | 40 |")
    assert "50% `crs`, 50% `crs budget=.25`" in mixed.row


def test_text_and_figure_have_the_measured_numbers() -> None:
    points = {
        f"{role}/{at}": (2.0 + 0.5 * place, 1.0 + 0.2 * place)
        for role in SMOKE.captions
        for place, at in enumerate(("2/mend", "2/mend budget=.25"))
    }
    points |= {f"{role}/8/{text}": (2.25, 1.5) for role in SMOKE.captions for text in pareto.RELEASED.values()}
    about = {
        "about": {"device": "d", "model": "exact:words", "every sampler up to": 2, "study": "pareto"},
        "batch": 4,
        "released": {"0.9": 60.0, "batch": 2},
        "2 calls": {"mend": 0.5},
    }
    results = results_at(points, (0.0, 0.0))
    found = fastest(about, results)
    drawn = BENCH["figure"]([about], results, SMOKE)
    text = BENCH["page"](found, drawn, SMOKE, [about])
    mixture = "50% `mend`, 50% `mend budget=.25`"
    assert f"| exact:words, d | words | argmax | 60 | mixed | 2 | {mixture} | -0.400 ± 0.000 | 0.5 | 120 |" in text
    assert "exact:words, d (batch 4, the released functions 2)" in text
    assert "top-p .9 and 8 calls" in text
    larger = {**about, "about": {"device": "d", "model": "trained-like", "every sampler up to": 2, "study": "pareto"}}
    assert BENCH["figure"]([about, larger], results, SMOKE) == drawn  # its texts have no judge
    assert "is random" not in text
    assert "is random" in BENCH["page"](fastest(larger, results), drawn, SMOKE, [larger])
    with pytest.raises(LimpetError, match="texts were judged"):
        BENCH["figure"]([larger], results, SMOKE)
    assert fastest(larger, results)[0].where == "the released size, d"
    words, chain = drawn.panels
    assert [line.name for line in words.series] == [*pareto.OWN, "released functions"]
    lines = {line.name: (line.x, line.y) for line in words.series if line.x}
    assert lines == {"Mend": ((0.5,), pytest.approx((-0.4,))), "released functions": ((60.0,), (0.0,))}
    assert not chain.legend


@pytest.mark.long
def test_the_study_and_its_times_are_joined(times: Path, tmp_path: Path) -> None:
    """From cells to pages, on exact sources."""
    models, store, one = ModelCache(), Store(tmp_path / "store"), study("pareto", SMOKE)
    assert not run(one, store, local(models=models), models).failed
    report.write_report(collect(one, store), tmp_path / "pareto-smoke")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/speed.md").write_text(MARKED)
    BENCH["main"](["--preset", "smoke", "join", str(times), "--reports", str(tmp_path), "--root", str(tmp_path)])
    assert (tmp_path / "docs/images/pareto.svg").read_bytes().startswith(b"<?xml")
    found = fastest(json.loads(times.read_text()), report.read_report(one, tmp_path / "pareto-smoke"))
    text = (tmp_path / "docs/speed.md").read_text()
    assert found
    assert all(cheapest.row in text for cheapest in found)
    assert text.startswith("top\n")
    assert text.endswith("<!-- end -->\nbottom\n")


def test_the_page_has_what_was_measured(tmp_path: Path) -> None:
    """Text and figure follow from the committed times and reports."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs/speed.md", tmp_path / "docs/speed.md")
    times = (str(MEASURED / f"{name}.json") for name in ("pareto-h200", "pareto-cpu", "interleave-cpu"))
    BENCH["main"](["join", *times, "--root", str(tmp_path)])
    assert (tmp_path / "docs/speed.md").read_text() == (ROOT / "docs/speed.md").read_text()


def test_what_the_released_quality_costs_on_a_gpu() -> None:
    """On both built-in models at most a tenth of the released functions' time, and a sixtieth of it with argmax."""
    results = report.read_report(study("pareto", GPU), ROOT / "docs/reports/mini/pareto-mini-gpu")
    times = json.loads((MEASURED / "pareto-h200.json").read_text())
    found = list(BENCH["cheapest"](times, results, GPU))
    for final_step in pareto.RELEASED:
        assert {one.caption for one in found if one.final_step == final_step} == set(GPU.captions.values())
    assert min(one.times for one in found if one.final_step == "argmax") >= 60
    assert min(one.times for one in found if one.final_step == "sample") >= 10
