"""What quality costs in seconds: the samplers of the studies `pareto` and `interleave` timed beside the released
functions, and both joined.

    python benchmarks/pareto.py time --out benchmarks/results/pareto-h200.json
    python benchmarks/pareto.py time --out benchmarks/results/pareto-cpu.json --threads 2 --few 0 --calls 2 4 8 16 64 \
        --batches 16 --released-batches 16 --released-calls 4 --runs 1
    python benchmarks/pareto.py time --out benchmarks/results/pareto-h200-released.json --few 0 --calls 8 16 \
        --model tools/trained_like.py:released --batches 64 --released-batches 32 16
    python benchmarks/pareto.py time --study interleave --out benchmarks/results/interleave-cpu.json --threads 2 \
        --batches 16 --released-batches 16 --released-calls 4 --runs 1
    python benchmarks/pareto.py join benchmarks/results/{pareto-h200,pareto-cpu,interleave-cpu}.json

`time` needs torch and the package's own source; the third command's model is a random network of the released size.
Samplers are timed alternately in one process, ours at their best batch size, the released functions at the largest
that fits, around the compiled network. Every result is written as soon as it is there, and an interrupted run is
resumed. `join` reads the studies' reports and writes the figure and the text of docs/speed.md."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))


import limpet
from limpet import LimpetError
from limpet.evaluation.statistics import Estimate
from limpet.experiments import Figure, Panel, Results, Series, below, format_signed, speed
from limpet.models.duo import Duo
from limpet.models.model_files import usable_device
from limpet.paper import studies
from limpet.paper.studies import Preset, interleave, pareto
from limpet.samplers import Native, parse

ROOT = Path(__file__).resolve().parents[1]
TEXTS = 1000  # that all times are for
SAMPLERS = {"pareto": pareto.by_calls, "interleave": interleave.by_calls}  # by study
RANDOM = "trained-like"  # the name of a random network of the released size
TRIAL_CALLS = 8  # of the runs that choose a batch size


# -- time -------------------------------------------------------------------------------------------------------------


def best_batch(model: Duo, batches: Sequence[int], runs: int) -> int:
    """The batch size at which top-p generates most tokens per second."""

    def rate(batch: int) -> float:
        contenders = {"top-p": speed.generation(model, Native(top_p=0.9), batch)}
        cost = speed.measure(contenders, TRIAL_CALLS, batch, runs, model.device)["top-p"]
        return -math.inf if cost is None else cost.tokens_per_second

    return max(batches, key=rate) if len(batches) > 1 else batches[0]


def released_times(model: Duo, preset: Preset, options: argparse.Namespace) -> dict[str, Any]:
    """The released functions at a preset's most calls and the largest batch that fits in memory. All of their calls
    take the same time, so fewer of them are timed."""
    on_gpu, calls = model.device.type == "cuda", min(preset.max_nfe, options.released_calls)
    bare: speed.Forward = torch.compile(model.network, dynamic=False) if on_gpu else model.network

    def seconds_of(
        forward: speed.Forward, masses: Sequence[float], batch: int, calls: int, runs: int
    ) -> dict[str, float | None]:
        samplers = {f"{p:g}": Native(top_p=p) for p in masses}
        paths = speed.released_generations(model, forward, batch, samplers)
        costs = speed.measure(paths, calls, batch * model.length, runs, model.device)
        return {p: per_texts(costs[f"released {p}"], batch, preset.max_nfe / calls) for p in samplers}

    for batch in sorted(options.released_batches, reverse=True):
        if None in seconds_of(model.network, (0.9,), batch, 2, 1).values():
            continue  # nothing is compiled for what does not fit
        seconds = seconds_of(bare, (1.0, 0.9), batch, calls, options.runs)
        if None not in seconds.values():
            return {"batch": batch, "calls": preset.max_nfe, "timed calls": calls, "compiled": on_gpu, **seconds}
    raise LimpetError(
        f"the released functions fit in memory at none of batches {options.released_batches}: name smaller ones"
    )


def timed_samplers(families: Mapping[str, Sequence[str]], nfe: int, few: int) -> list[str]:
    """The samplers timed at a number of calls: all up to `few` calls, beyond them the first of each family."""
    return [text for own in families.values() for text in (own if nfe <= few else own[:1])]


def per_texts(cost: speed.CallCost | None, batch: int, times: float = 1) -> float | None:
    return None if cost is None else cost.seconds * times * TEXTS / batch


def timings(model: Duo, preset: Preset, options: argparse.Namespace) -> None:
    """The times of a thousand texts by calls and sampler, and those of the released functions at the most calls."""
    on_gpu, started = model.device.type == "cuda", time.monotonic()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def save(name: str, value: Any) -> None:
        found[name] = value
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"[{time.monotonic() - started:6.1f}s] {name}: {json.dumps(value)[:300]}", flush=True)

    device = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    save("about", {
        "device": device, "torch": torch.__version__, "model": model.name, "precision": model.precision,
        "texts": TEXTS, "runs": options.runs, "every sampler up to": options.few, "study": options.study,
    })  # fmt: skip
    if "batch" not in found:
        save("batch", best_batch(model, options.batches, options.runs))
    if "released" not in found:
        save("released", released_times(model, preset, options))
    for nfe, families in SAMPLERS[options.study](preset).items():
        if options.calls and nfe not in options.calls:
            continue
        if f"{nfe} calls" in found or time.monotonic() - started > options.seconds:
            continue
        paths = {
            text: speed.generation(model, parse(text)[1], found["batch"])
            for text in timed_samplers(families, nfe, options.few)
        }
        costs = speed.measure(paths, nfe, found["batch"] * model.length, options.runs, model.device)
        save(f"{nfe} calls", {text: per_texts(cost, found["batch"]) for text, cost in costs.items()})


# -- join -------------------------------------------------------------------------------------------------------------


def brief(seconds: float) -> str:
    """With three significant digits, or as a whole number."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


class Cheapest(NamedTuple):
    """The fastest samplers with the released sampler's quality on one device."""

    where: str
    caption: str
    final_step: str
    released: float  # seconds
    shares: dict[str, float]  # of the texts, by sampler
    nfe: int
    delta: Estimate  # NLL minus the released sampler's
    seconds: float

    @property
    def times(self) -> float:
        """How many times as fast as the released functions."""
        return self.released / self.seconds

    @property
    def samplers(self) -> str:
        """The samplers with their shares."""
        if len(self.shares) == 1:
            return f"`{next(iter(self.shares))}`"
        return ", ".join(f"{share:.0%} `{text}`" for text, share in self.shares.items())

    @property
    def row(self) -> str:
        how = "mixed" if len(self.shares) > 1 else "one sampler"
        return (
            f"| {self.where} | {self.caption} | {self.final_step} | {brief(self.released)} | {how} | {self.nfe} "
            f"| {self.samplers} | {format_signed(self.delta, 3)} | {brief(self.seconds)} | {self.times:.0f} |"
        )


def where(times: dict[str, Any]) -> str:
    """Which model ran on which device."""
    model = times["about"]["model"]
    return f"{'the released size' if model == RANDOM else model}, {times['about']['device']}"


def seconds(times: dict[str, Any], nfe: int, own: Sequence[str], text: str) -> float | None:
    """A sampler's time, or that of the first of its family if it was not timed."""
    known: dict[str, float | None] = times.get(f"{nfe} calls", {})
    return known.get(text, known.get(own[0]))


def samplers_of(times: dict[str, Any], preset: Preset) -> pareto.SamplersByCalls:
    return SAMPLERS[times["about"]["study"]](preset)


def places(times: dict[str, Any], results: Results, preset: Preset, role: str, final_step: str) -> dict[Any, float]:
    """The time of each family's mixture at the released entropy, by (calls, family), where it was timed."""
    found = {}
    for nfe, families in samplers_of(times, preset).items():
        for family, own in families.items():
            mixture = pareto.best_mixture(results, preset, role, final_step, nfe, own)
            shares = mixture.shares if mixture else {}
            each = {text: seconds(times, nfe, own, text) for text in shares}
            if shares and None not in each.values():
                found[nfe, family] = sum(share * (each[text] or 0) for text, share in shares.items())
    return found


def sufficient(
    results: Results, preset: Preset, samplers: pareto.SamplersByCalls, role: str, final_step: str
) -> dict[tuple[int, str, str], Estimate]:
    """The samplers that suffice without mixing, by calls and family, with their delta NLL: their entropy is at least
    the released sampler's, and their NLL is lower with the confidence of every finding."""
    base = f"{role}/{pareto.released_cell(preset, final_step)}"
    found = {}
    for nfe, families in samplers.items():
        for family, text in ((family, text) for family, texts in families.items() for text in texts):
            cells = f"{role}/{nfe}/{text}", base
            lower = results.contrast(*cells)
            if results.contrast(*cells, measure="entropy").mean >= 0 and below("", lower).outcome == "holds":
                found[nfe, family, text] = lower
    return found


def cheapest(times: dict[str, Any], results: Results, preset: Preset) -> Iterator[Cheapest]:
    """By model and final step of the study: the fastest mixture, and the fastest single sampler if there is one."""
    own = samplers_of(times, preset)
    for (role, caption), final_step in product(preset.captions.items(), pareto.RELEASED):
        if f"{role}/{pareto.released_cell(preset, final_step)}" not in results.cells:
            continue
        common = (where(times), caption, final_step, times["released"]["0.9"])
        reached = []
        for (nfe, family), taken in places(times, results, preset, role, final_step).items():
            delta = pareto.delta(results, preset, role, final_step, nfe, own[nfe][family])
            mixture = pareto.best_mixture(results, preset, role, final_step, nfe, own[nfe][family])
            if mixture and below("", delta).outcome == "holds":
                reached.append(Cheapest(*common, mixture.shares, nfe, delta, taken))
        alone = [
            Cheapest(*common, {text: 1.0}, nfe, delta, taken)
            for (nfe, family, text), delta in sufficient(results, preset, own, role, final_step).items()
            if (taken := seconds(times, nfe, own[nfe][family], text)) is not None
        ]
        itself = pareto.RELEASED[final_step]
        if (taken := seconds(times, preset.max_nfe, [itself], itself)) is not None:
            alone.append(Cheapest(*common, {itself: 1.0}, preset.max_nfe, Estimate(np.zeros(2)), taken))
        for some in (reached, alone):
            if some:
                yield min(some, key=lambda one: one.seconds)


def fastest(found: Iterable[Cheapest]) -> list[Cheapest]:
    """Of several studies on one machine, what is fastest relative to the released functions of its own run, mixtures
    and single samplers apart."""
    best: dict[Any, Cheapest] = {}
    for one in found:
        key = one.where, one.caption, one.final_step, len(one.shares) > 1
        if key not in best or one.times > best[key].times:
            best[key] = one
    return list(best.values())


def figure(every: Sequence[dict[str, Any]], results: Results, preset: Preset) -> Figure:
    """A panel for each device and model whose texts were judged, beside the released sampler with an argmax final
    step."""
    panels: list[Panel] = []
    judged = [times for times in every if times["about"]["model"] in preset.roles.values()]
    own = [times for times in judged if times["about"]["study"] == "pareto"]
    if not own:
        raise LimpetError("no time is of a network whose texts were judged: give one that was taken with --model mini")
    for times, (role, caption) in product(own, preset.captions.items()):
        at = places(times, results, preset, role, "argmax")
        lines = list(pareto.lines(results, preset, pareto.by_calls(preset), role, "argmax", at))
        theirs = Series("released functions", (times["released"]["0.9"],), (0.0,), joined=False, open=True)
        title = f"{caption}, {times['about']['device']}"
        x = f"seconds for {TEXTS:,} texts"
        y = f"delta NLL against top-p .9 at {preset.max_nfe} calls (lower is better)"
        panels.append(Panel(title, x, y, [*lines, theirs], legend=not panels, axes={"xscale": "log"}))
    caption = (
        f"Time for {TEXTS:,} texts, and their delta NLL against the released sampler (top-p .9, {preset.max_nfe} "
        "calls, argmax final step) at its entropy"
    )
    return Figure("pareto", caption, tuple(panels), columns=2)


def timed_calls(times: dict[str, Any]) -> str:
    """The numbers of calls that were timed."""
    calls = sorted(int(name.removesuffix(" calls")) for name in times if name.endswith(" calls"))
    return " and ".join([", ".join(map(str, calls[:-1])), str(calls[-1])]) if len(calls) > 1 else str(calls[0])


def timed_families(times: dict[str, Any]) -> str:
    """Which samplers were timed."""
    few = times["about"]["every sampler up to"]
    return (
        f", all samplers up to {few} and the first of each family beyond"
        if few
        else ", the first sampler of each family"
    )


HEAD = (
    "| timed | texts of | final step | released, s | how | calls | samplers | delta NLL | here, s | times as fast |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def page(found: Sequence[Cheapest], drawn: Figure, preset: Preset, every: Sequence[dict[str, Any]]) -> str:
    """The text of docs/speed.md."""
    machines = ", ".join(
        dict.fromkeys(
            f"{where(one)} (batch {one['batch']}, the released functions {one['released']['batch']})" for one in every
        )
    )
    rows = "\n".join(one.row for one in found)
    marks = " ".join(
        f"On {one['about']['device']} {timed_calls(one)} calls of the study {one['about']['study']} were timed"
        f"{timed_families(one)}."
        for one in every
    )
    marks = textwrap.fill(marks, 120, break_on_hyphens=False)
    random = (
        " That of the released size is random:\nits times are joined with the calls that the built-in models need."
        if any(one["about"]["model"] == RANDOM for one in every)
        else ""
    )
    return f"""![{drawn.caption}](images/pareto.svg)

The table has the fastest samplers with the quality of the released sampler at top-p .9 and {preset.max_nfe} calls: at
its entropy, their NLL is lower with one-sided 95% confidence over seeds. The released sampler's default final step is a
sample. The paper's is an argmax, which serves these models worse. The released sampler itself, run here, has its own
quality by definition. "Mixed": a share of the texts from one sampler and the rest from another, so that the mean
entropy is exactly the released sampler's. "One sampler": its entropy alone is at least as high. Seconds are for
{TEXTS:,} texts, of the network and on the machine that stand first: {machines}.{random}

{HEAD}
{rows}

{marks}

```
limpet paper study run pareto --preset mini-gpu
limpet paper study run interleave --preset mini-gpu
python benchmarks/pareto.py time --out benchmarks/results/pareto-h200.json
python benchmarks/pareto.py join benchmarks/results/pareto-h200.json benchmarks/results/{{pareto,interleave}}-cpu.json
```
"""


def join(options: argparse.Namespace) -> None:
    from blocks import put
    from limpet.experiments import figures, report

    preset = studies.preset(options.preset)
    every = [json.loads(path.read_text(encoding="utf-8")) for path in options.times]
    results = {
        name: report.read_report(studies.study(name, preset), options.reports / f"{name}-{preset.name}")
        for name in dict.fromkeys(times["about"]["study"] for times in every)
    }
    found = fastest(one for times in every for one in cheapest(times, results[times["about"]["study"]], preset))
    if not found:
        raise LimpetError("no sampler that was timed reaches the released sampler's quality")
    drawn = figure(every, results["pareto"], preset)
    image = options.root / "docs/images/pareto.svg"
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(figures.draw(drawn)["svg"])
    put(options.root / "docs/speed.md", "pareto", page(found, drawn, preset, every))
    print("\n".join([HEAD, *(one.row for one in found)]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mini-gpu", help="of the study")
    actions = parser.add_subparsers(dest="action", required=True)
    timer = actions.add_parser("time")
    timer.add_argument("--out", type=Path, required=True)
    timer.add_argument("--study", choices=SAMPLERS, default="pareto", help="whose samplers are timed")
    timer.add_argument("--model", default="mini", help="whose shape is timed")
    timer.add_argument("--device")
    timer.add_argument("--precision", default="bfloat16")
    timer.add_argument("--threads", type=int)
    timer.add_argument("--calls", type=int, nargs="+", help="numbers of calls, of those that the study has")
    timer.add_argument("--few", type=int, default=8, help="up to so many calls every sampler is timed")
    timer.add_argument("--batches", type=int, nargs="+", default=[256, 512])
    timer.add_argument("--released-batches", type=int, nargs="+", default=[2048, 1024, 512, 256, 128, 64, 16])
    timer.add_argument("--released-calls", type=int, default=16, help="at most so many are timed")
    timer.add_argument("--runs", type=int, default=2)
    timer.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this time")
    joiner = actions.add_parser("join")
    joiner.add_argument("times", type=Path, nargs="+")
    joiner.add_argument("--reports", type=Path, default=ROOT / "docs/reports/mini", help="where the studies' are")
    joiner.add_argument("--root", type=Path, default=ROOT, help="where docs/speed.md is")
    options = parser.parse_args(arguments)
    if options.action == "join":
        join(options)
        return
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    place = usable_device(options.device)
    model = limpet.load(options.model, device=place, precision=options.precision)
    if not isinstance(model, Duo):
        raise LimpetError(f"{options.model} is no Duo network, so there is no forward for the released functions")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    timings(model, studies.preset(options.preset), options)


if __name__ == "__main__":
    main()
