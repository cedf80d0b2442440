"""Timing: the measurements of `limpet bench` and of the benchmarks, and the page that has their results."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import limpet
from limpet import registry
from limpet.cli import bench
from limpet.cli.common import LoadOptions
from limpet.diffusion.backends import backends
from limpet.errors import LimpetError
from limpet.experiments import speed
from limpet.models.duo import Duo, DuoShape

ROOT = Path(__file__).parents[2]
TRAINED_LIKE = ROOT / "tools/trained_like.py"
trained_like = registry.from_file(f"{TRAINED_LIKE}:trained_like")
SMALL = DuoShape(vocab_size=300, length=16, width=64, blocks=2, heads=2, hidden=64)


@pytest.fixture(scope="module")
def model() -> Duo:
    return Duo(trained_like(SMALL), name="small")


def test_every_contender_is_named_and_its_head_rows_are_counted(model: Duo) -> None:
    costs = speed.side_by_side(model, model.network, nfe=6, batch=3, runs=1, with_released=True)
    assert list(costs) == ["bare", "native", "top-p .9", "CRS", "released native", "released top-p .9"]
    found = {name: cost.head_rows for name, cost in costs.items() if cost is not None}
    assert found["bare"] == found["released native"] == found["released top-p .9"] == 1
    assert found["native"] == found["top-p .9"] < found["CRS"] < 1
    for cost in costs.values():
        assert cost is not None
        assert cost.peak_gib is None
        assert cost.tokens_per_second == pytest.approx(3 * 16 / cost.seconds)
    assert costs["bare"] is not None
    assert costs["bare"].ratio == 1


def test_contenders_alternate_after_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times are those of the long runs alone; here a call of b takes three ticks."""
    monkeypatch.setattr(speed, "WARMUP_CALLS", 1)
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    order = ""

    def contender(name: str, ticks: float) -> speed.TimedCalls:
        def calls(nfe: int) -> Iterator[float]:
            nonlocal order
            for number in range(nfe):
                order += name
                clock[0] += ticks
                yield number / 2

        return calls

    costs = speed.measure({"a": contender("a", 1), "b": contender("b", 3)}, 3, 10, 2, torch.device("cpu"))
    assert order == "ab" + "ababab" * 2
    assert [(cost.seconds, cost.ratios, cost.head_rows) for cost in costs.values() if cost] == [
        (3, (1, 1), 0.5),
        (9, (3, 3), 0.5),
    ]


def test_a_contender_that_does_not_fit_is_none() -> None:
    def large(nfe: int) -> Iterator[float]:
        yield 1.0
        raise torch.OutOfMemoryError

    costs = speed.measure({"a": lambda nfe: iter([1.0] * nfe), "b": large}, 8, 10, 2, torch.device("cpu"))
    assert costs["b"] is None
    assert costs["a"] is not None
    assert costs["a"].head_rows == 1


def test_there_are_as_many_bare_forwards_as_calls(model: Duo) -> None:
    shapes = []
    list(speed.forwards(model, lambda tokens, sigma: shapes.append(model.network(tokens, sigma).shape), batch=2)(5))
    assert shapes == [(2, 16, 300)] * 5


def test_random_predictions_sharpen_as_noise_falls(model: Duo) -> None:
    tokens = torch.randint(300, (8, 16), generator=torch.Generator().manual_seed(0))
    largest, own = [], []
    for t in (1.0, 0.67, 0.33, 0.05):
        probs = model.logits(tokens, t).softmax(-1)
        largest.append(float(probs.amax(-1).mean()))
        own.append(float(probs.gather(-1, tokens[..., None]).mean()))
    assert largest == sorted(largest)
    assert own == sorted(own)
    assert 1 - largest[-1] < (1 - largest[0]) / 10
    assert torch.equal(trained_like(SMALL).vocab_embed.embedding, model.network.vocab_embed.embedding)


# What docs/speed.md says is what was measured

PAGE = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
LIMITS = {("native", 64): 0.68, ("top-p .9", 64): 0.74, ("CRS", 64): 0.78, ("native", 8): 0.95, ("top-p .9", 8): 1.05,
          ("CRS", 8): 0.98}  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results" / name).read_text(encoding="utf-8"))
    return found


def test_the_gpu_table_is_the_committed_run() -> None:
    pytest.importorskip("matplotlib")
    plot = runpy.run_path(str(ROOT / "benchmarks/plot.py"))
    rows, others = (list(plot[name](measured("h200.json"))) for name in ("table", "beside"))
    assert len(rows) > 40
    assert "\n".join(rows) in PAGE
    assert "\n".join(others) in PAGE


def test_a_bar_without_a_time_has_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot, found = runpy.run_path(str(ROOT / "benchmarks/plot.py")), measured("h200.json")
    plot["draw"](found, tmp_path / "drawn.svg")
    rows = [
        found.get(f"batch {batch} nfe {nfe} {name}") for batch in (64, 16) for nfe in (64, 8) for name in plot["ROWS"]
    ]
    drawn = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
    assert drawn.count("out of memory") == sum(row is not None and "seconds" not in row for row in rows) > 0
    assert drawn.count("not measured") == rows.count(None) > 0


def test_the_gpu_run_keeps_its_limits() -> None:
    """At batch 64 the shares of bare forwards and the memory; at batch 16 the times of the released step. All tokens
    are those of the sparse step; distributions pass 17 tests at 1% with Bonferroni's correction."""
    found = measured("h200.json")
    for (name, nfe), most in LIMITS.items():
        cost = found[f"batch 64 nfe {nfe} {name}"]
        assert cost["ratio"] <= most
        assert cost["peak_gib"] <= 4
    routed = found["samplers 64"]
    assert routed["mend"]["ratio"] <= 0.85
    for name, cost in routed.items():  # as native, but for the head rows that committing needs
        if name not in ("bare", "own forward", "CRS") and not name.startswith("mend"):
            assert cost["seconds"] <= 1.15 * routed["native"]["seconds"], name
    assert set(routed) >= {"psi", "psi rule=constant eta=0.5", "ddim", "gibbs", "mend revise_every=1"}
    for name, cost in (*routed.items(), *found["samplers 8"].items()):
        assert cost["peak_gib"] < 4 or name in ("bare", "own forward"), name
    fields = {nfe: found[f"samplers {nfe}"] for nfe in (64, 8)}
    text = " ".join(PAGE.split())
    bare = "{:.1f} ms a call over 64 calls and {:.1f} over 8".format(
        *(1000 * field["bare"]["seconds"] / nfe for nfe, field in fields.items())
    )
    native = "{:.3f} and {:.3f} of them".format(*(field["native"]["ratio"] for field in fields.values()))
    assert f"they took {bare}, and native sampling {native.replace('0.', '.')}" in text
    most = max(
        cost["peak_gib"]
        for field in fields.values()
        for name, cost in field.items()
        if name not in ("bare", "own forward")
    )
    assert f"None takes more than {most:.1f} GiB" in text
    for name, least in (("native", 9), ("top-p .9", 22)):
        times = found[f"batch 16 nfe 64 released {name}"]["seconds"] / found[f"batch 16 nfe 64 {name}"]["seconds"]
        assert times >= least
        assert f"{times:.1f} times" in PAGE
    few = (found[f"batch 16 nfe 8 released {name}"]["seconds"] / found[f"batch 16 nfe 8 {name}"]["seconds"]
           for name in ("native", "top-p .9"))  # fmt: skip
    assert "{:.1f} and {:.1f} times".format(*few) in PAGE
    parts = found["parts"]
    for words, value in (
        ("body at every position", f"{parts['backbone']:.1f}"),
        ("head, 5248 rows, aligned (as the sampler runs it)", f"{parts['head of 5248 rows, aligned']:.2f}"),
        ("selector, 25 of 1024 positions in each of 64 samples", f"{parts['select 25']:.2f}"),
    ):
        assert f"| {words} | {value} |" in PAGE
    assert found["batch 256 nfe 64 CRS"]["peak_gib"] <= 4 * found["batch 64 nfe 64 CRS"]["peak_gib"]
    assert all(case["tokens differ"] == case["argmax differ"] == 0 for case in found["check step"].values())
    paths = [value for key, value in found.items() if key.startswith("check trajectory ")]
    assert len(paths) >= 2
    assert all(path["tokens differ"] == path["committed when"] == 0 for path in paths)
    assert all(text.startswith("raised after ") for text in found.get("check non-finite", {}).values())
    assert found["check select"]["positions that differ"] == 0
    assert found["check distributions"]["smallest"] > 0.01 / 17
    assert parts["select 25"] <= 0.03 * 1000 * found["batch 64 nfe 64 CRS"]["seconds"] / 64


def test_the_cpu_table_is_the_committed_run_and_keeps_its_limits() -> None:
    rows = {row["what"]: row for row in measured("cpu-mini.json")["rows"]}
    for name, row in rows.items():
        assert f"| {name} | {row['ratio']:.3f} | {row['head_rows']:.3f} |" in PAGE
    assert rows["native"]["ratio"] <= 0.85
    assert rows["top-p .9"]["ratio"] <= 0.90
    assert rows["CRS"]["ratio"] <= 0.92
    sparse = {row["step"]: row["times as fast as dense"] for row in measured("cpu-arithmetic.json")["rows"]}["sparse"]
    assert sparse >= 10
    assert f"{sparse:.1f} times as fast" in PAGE


LARGE = runpy.run_path(str(ROOT / "benchmarks/large.py"))


def test_the_page_on_large_models_is_the_committed_run_and_keeps_its_limits() -> None:
    found = measured("large.json")
    assert f"<!-- large -->\n{LARGE['page'](found)}\n<!-- end -->" in PAGE
    cases = {name: found[case] for name, case in LARGE["cases_of"](found).items()}
    assert list(cases) == list(LARGE["MODELS"])
    assert all(LARGE["beyond"](case) <= 0.15 for case in cases.values())
    assert all(case["peak while loading GiB"] <= 1.15 * case["weights GiB"] for case in cases.values())
    assert cases["Duo 1.7B"]["costs"]["CRS"]["ratio"] <= 0.9
    for cost in found.get("floor", {}).values():
        assert cost["costs"][LARGE["FLOOR"]]["ratio"] <= cost["costs"]["CRS"]["ratio"]


def test_the_page_has_the_floor_once_it_is_measured() -> None:
    found = {key: value for key, value in measured("large.json").items() if key != "floor"}
    before, case = LARGE["page"](found), LARGE["cases_of"](found)["Sumi 7B"]
    found["floor"] = {case: {"costs": {"CRS": {"ratio": 0.987}, LARGE["FLOOR"]: {"ratio": 0.912}}}}
    text = " ".join(LARGE["page"](found).split())
    assert text.startswith(" ".join(before.split()))
    assert ".912 of bare for the Sumi 7B, where CRS took .987." in text


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("name", LARGE["MODELS"])
def test_the_floor_makes_the_products_of_the_network_and_no_others(name: str, share: float) -> None:
    """Without attention, which the counter does not know on a CPU, and without a Duo's map of sigma."""
    batch, model = 16, LARGE["MODELS"][name]
    random = model.make(True)
    sizes = LARGE["products_of"](asdict(random.shape), model.gates)
    aligned = sizes._replace(vocab_size=320)  # as the floor's head is
    positions, attention = batch * sizes.length, 2 * sizes.length * sizes.width
    calls = LARGE["floor"](sizes, batch, share)
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        assert list(calls(2)) == [share] * 2
    one = 2 * positions * (aligned.work(share) - (sizes.blocks - 1 + share) * attention)
    assert counted.get_total_flops() == 2 * one
    forward = LARGE["forward_of"](model.at_once(random))
    with torch.inference_mode(), FlopCounterMode(display=False) as counted:
        forward(torch.zeros(batch, sizes.length, dtype=torch.long), torch.ones(batch))
    cond = getattr(random.shape, "cond", 0)
    sigma_map = batch * cond * (256 + cond + (6 * sizes.blocks + 2) * sizes.width)
    assert counted.get_total_flops() == 2 * sigma_map + 2 * positions * (sizes.work(1) - sizes.blocks * attention)


def test_the_page_has_the_backbone_as_it_was_measured() -> None:
    """Also the least time that its arithmetic takes."""
    body = runpy.run_path(str(ROOT / "benchmarks/body.py"))
    found = json.loads((ROOT / "benchmarks/results/body.json").read_text(encoding="utf-8"))
    parts = json.loads((ROOT / "benchmarks/results/h200.json").read_text(encoding="utf-8"))["parts"]
    apart = json.loads((ROOT / "benchmarks/results/float8-products.json").read_text(encoding="utf-8"))["one product"]
    assert f"<!-- body -->\n{body['page'](found, parts, apart)}\n<!-- end -->" in PAGE
    assert (
        min(
            max(apart[f"{kind} distribution variation t {t}"] for t in (0.9, 0.5, 0.1))
            for kind in body["FLOAT8_PRODUCTS"]
        )
        > 0.03
    )
    times, bare = found["times batch 64 nfe 64"], found["times batch 64 nfe 64"]["bare"]["ms a call"]

    def least(name: str) -> float:
        ratio: float = body["least"](found, name.split()[0], times[name]["head_rows"]) / bare
        assert ratio < min(times[name]["ratios"])
        return ratio

    assert least("bfloat16 native") > 0.60
    assert least("bfloat16 CRS") > 0.68
    assert least("float8 native") > 0.47
    few = found["times batch 16 nfe 64"]
    assert few["released native / float8"] > 10
    assert few["released top-p .9 / float8"] > 30
    for name in ("mini", "mini-distilled"):
        assert (
            max(v for what, v in found[f"distributions {name}"].items() if "float8" in what and "variation" in what)
            < 0.03
        )
    assert body["errors"](found["texts mini"]) < 2


def test_a_kernel_is_of_one_kind() -> None:
    kinds = runpy.run_path(str(ROOT / "benchmarks/body.py"))["kinds"]
    found = kinds(
        [{"kernel": name, "ms": ms} for name, ms in (("nvjet_a", 1.0), ("_norm_kernel", 2.0), ("Memset", 4.0))]
    )
    assert {kind: ms for kind, ms in found.items() if ms} == {"matrix products": 1, "sums, gates, norms": 2, "rest": 4}


def test_arithmetic_times_every_backend() -> None:
    seconds = speed.arithmetic(backends("cpu"), (1, 8, 100), steps=3)
    assert set(seconds) == {"dense", "sparse"}
    assert min(seconds.values()) > 0


def test_the_command_prints_one_json_document(model: Duo, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(LoadOptions, "load", lambda options, name: model)
    bench.run(model="small", nfe=(4,), batches=(1, 2), runs=1, loading=LoadOptions("cpu", "float32"), json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["model"] == "small"
    assert [(row["batch"], row["what"]) for row in document["rows"]] == [
        (batch, what) for batch in (1, 2) for what in ("bare", "native", "top-p .9", "CRS")
    ]


def test_the_command_prints_a_table(model: Duo, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(LoadOptions, "load", lambda options, name: model)
    bench.run(model="small", nfe=(4,), batches=(1,), runs=1, loading=LoadOptions("cpu", "float32"), released=True)
    printed = capsys.readouterr().out
    for word in ("of bare", "head rows", "CRS", "released native"):
        assert word in printed


def test_wrong_options_are_one_sentence() -> None:
    with pytest.raises(LimpetError, match="runs is 0; it takes whole numbers from 1"):
        bench.run(runs=0)
    with pytest.raises(LimpetError, match="exact:words is no Duo network, so there are no bare forwards"):
        bench.run(model="exact:words", loading=LoadOptions("cpu"))


def test_a_file_is_a_model_to_bench(tmp_path: Path, capsys) -> None:
    """`limpet bench` takes the models of `limpet sample`; here the trained-like network at a small size."""
    file = tmp_path / "small.py"
    file.write_text(f"""
from limpet import registry
from limpet.models.duo import Duo, DuoShape

trained_like = registry.from_file("{TRAINED_LIKE}:trained_like")

def small(folder=None, *, device=None, precision="float32"):
    return Duo(trained_like(DuoShape({SMALL.vocab_size}, 8, 32, 1, 2, hidden=32)), precision=precision).to(device)
""")
    bench.run(model=f"{file}:small", nfe=(3,), batches=(1,), runs=1, loading=LoadOptions("cpu"), json=True)
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 4


@pytest.mark.long
def test_the_released_size_is_a_file_away() -> None:
    model = limpet.load(f"{TRAINED_LIKE}:released", device="cpu")
    assert (model.vocab_size, model.length) == (50258, 1024)
    assert round(model.info["parameters"] / 1e6, 1) == 169.6


# On a bare machine

BARE = """
import runpy, sys
from importlib.machinery import PathFinder

class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Present
import limpet
{more}
"""
ABSENT = {"tyro", "rich", "matplotlib", "scipy", "fsspec", "ray", "starlette", "uvicorn", "pydantic", "markdown_it",
          "huggingface_hub", "hypothesis", "pytest"}  # fmt: skip
ON_GPUS = ("body", "gpu", "large", "pareto", "stopping")  # benchmarks for machines without optional packages


def test_a_bare_machine_is_enough() -> None:
    """Torch, numpy, safetensors and tokenizers are enough."""
    run_without(
        ABSENT | {"transformers", "triton"}, "limpet.sample(limpet.load('mini', device='cpu'), limpet.CRS(nfe=2), n=1)"
    )


def test_a_bare_machine_with_triton_is_enough_for_benchmarks() -> None:
    pytest.importorskip("triton")
    paths = [str(ROOT / f"benchmarks/{name}.py") for name in ON_GPUS]
    run_without(ABSENT, f"for path in {paths}: runpy.run_path(path)")


def run_without(absent: set[str], more: str) -> None:
    """Run code in a new interpreter that does not find some packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")])}
    script = BARE.format(absent=absent, more=more)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
