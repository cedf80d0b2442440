"""What quality costs in seconds: the arms of the studies `pareto` and `interleave` timed beside the released functions, and
both joined.

    python benchmarks/pareto.py time --out benchmarks/results/pareto-h200.json
    python benchmarks/pareto.py time --out benchmarks/results/pareto-cpu.json --threads 2 --few 0 --calls 2 4 8 16 64 \
        --batches 16 --released-batches 16 --released-calls 4 --runs 1
    python benchmarks/pareto.py time --out benchmarks/results/pareto-h200-released.json --few 0 --calls 8 16 \
        --model tools/trained_like.py:released --batches 64 --released-batches 32 16
    python benchmarks/pareto.py time --study interleave --out benchmarks/results/interleave-cpu.json --threads 2 \
        --batches 16 --released-batches 16 --released-calls 4 --runs 1
    python benchmarks/pareto.py join benchmarks/results/{pareto-h200,pareto-h200-released,pareto-cpu,interleave-cpu}.json

`time` needs torch and the package's own source; the last `--model` is a random network of the released size. All that
is timed takes turns in one process, ours at the batch that serves it best, the released functions at the largest that
fits, round the compiled network. Every result is written as soon as it is there; a run that was stopped goes on. `join`
reads the studies' reports, and writes the figure and words of docs/speed.md and README.md: no number there is typed."""

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
from limpet.experiments import Results, speed
from limpet.experiments.claims import below
from limpet.experiments.contents import Figure, Panel, Series, signed
from limpet.models.duo import Duo
from limpet.models.model_files import usable_device
from limpet.paper import studies
from limpet.paper.studies import Preset, interleave, pareto
from limpet.samplers import Native, parse

ROOT = Path(__file__).resolve().parents[1]
TEXTS = 1000  # that all times are for
EVERY = {"pareto": pareto.every, "interleave": interleave.every}  # arms, by study
RANDOM = "trained-like"  # what a random network of the released size is called
TRIED = 8  # calls of the runs that choose a batch


# -- time -------------------------------------------------------------------------------------------------------------


def best_batch(model: Duo, batches: Sequence[int], runs: int) -> int:
    """The batch at which top-p makes most texts a second."""

    def rate(batch: int) -> float:
        path = {"top-p": speed.generation(model, Native(top_p=0.9), batch)}
        cost = speed.measure(path, TRIED, batch, runs, model.device)["top-p"]
        return -math.inf if cost is None else cost.tokens_per_second

    return max(batches, key=rate) if len(batches) > 1 else batches[0]


def released_times(model: Duo, preset: Preset, options: argparse.Namespace) -> dict[str, Any]:
    """The released functions at a preset's most calls, at the largest batch that fits in memory. Every one of their
    calls does the same, so that fewer of them tell what all would take."""
    on_gpu, calls = model.device.type == "cuda", min(preset.most, options.released_calls)
    bare: speed.Forward = torch.compile(model.network, dynamic=False) if on_gpu else model.network

    def taken(
        forward: speed.Forward, masses: Sequence[float], batch: int, calls: int, runs: int
    ) -> dict[str, float | None]:
        samplers = {f"{p:g}": Native(top_p=p) for p in masses}
        paths = speed.released_generations(model, forward, batch, samplers)
        costs = speed.measure(paths, calls, batch * model.length, runs, model.device)
        return {p: per_texts(costs[f"released {p}"], batch, preset.most / calls) for p in samplers}

    for batch in sorted(options.released_batches, reverse=True):
        if None in taken(model.network, (0.9,), batch, 2, 1).values():
            continue  # nothing is compiled for what does not fit
        seconds = taken(bare, (1.0, 0.9), batch, calls, options.runs)
        if None not in seconds.values():
            return {"batch": batch, "calls": preset.most, "timed calls": calls, "compiled": on_gpu, **seconds}
    raise LimpetError(
        f"the released functions fit in memory at none of batches {options.released_batches}: name smaller ones"
    )


def arms(families: Mapping[str, Sequence[str]], nfe: int, few: int) -> list[str]:
    """What is timed at a number of calls: every arm at few, beyond them the first of each family."""
    return [arm for own in families.values() for arm in (own if nfe <= few else own[:1])]


def per_texts(cost: speed.Cost | None, batch: int, times: float = 1) -> float | None:
    return None if cost is None else cost.seconds * times * TEXTS / batch


def timings(model: Duo, preset: Preset, options: argparse.Namespace) -> None:
    """All times for a thousand texts, by NFE/ARM, and the released functions' own at the preset's most calls."""
    on_gpu, started = model.device.type == "cuda", time.monotonic()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}

    def save(name: str, value: Any) -> None:
        found[name] = value
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"[{time.monotonic() - started:6.1f}s] {name}: {json.dumps(value)[:300]}", flush=True)

    device = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
    save("about", {
        "device": device, "torch": torch.__version__, "model": model.name, "precision": model.precision,
        "texts": TEXTS, "runs": options.runs, "every arm up to": options.few, "study": options.study,
    })  # fmt: skip
    if "batch" not in found:
        save("batch", best_batch(model, options.batches, options.runs))
    if "released" not in found:
        save("released", released_times(model, preset, options))
    for nfe, families in EVERY[options.study](preset).items():
        if options.calls and nfe not in options.calls:
            continue
        if f"{nfe} calls" in found or time.monotonic() - started > options.seconds:
            continue
        paths = {
            arm: speed.generation(model, parse(arm)[1], found["batch"]) for arm in arms(families, nfe, options.few)
        }
        costs = speed.measure(paths, nfe, found["batch"] * model.length, options.runs, model.device)
        save(f"{nfe} calls", {arm: per_texts(cost, found["batch"]) for arm, cost in costs.items()})


# -- join -------------------------------------------------------------------------------------------------------------


def brief(seconds: float) -> str:
    """In three figures, or in whole ones."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


class Cheapest(NamedTuple):
    """What reaches the released sampler's quality on one device, with the least time for a thousand texts."""

    where: str
    caption: str
    final_step: str
    released: float  # seconds
    shares: dict[str, float]  # of the texts, by arm
    nfe: int
    less: Estimate  # NLL
    seconds: float

    @property
    def times(self) -> float:
        """As fast as the released functions."""
        return self.released / self.seconds

    @property
    def words(self) -> str:
        """What to ask for."""
        if len(self.shares) == 1:
            return f"`{next(iter(self.shares))}`"
        return ", ".join(f"{share:.0%} `{arm}`" for arm, share in self.shares.items())

    @property
    def row(self) -> str:
        how = "mixed" if len(self.shares) > 1 else "one arm"
        return (
            f"| {self.where} | {self.caption} | {self.final_step} | {brief(self.released)} | {how} | {self.nfe} "
            f"| {self.words} | {signed(self.less, 3)} | {brief(self.seconds)} | {self.times:.0f} |"
        )


def where(times: dict[str, Any]) -> str:
    """What ran on what."""
    model = times["about"]["model"]
    return f"{'the released size' if model == RANDOM else model}, {times['about']['device']}"


def seconds(times: dict[str, Any], nfe: int, own: Sequence[str], arm: str) -> float | None:
    """An arm's, or where it was not timed that of the first of its family's own."""
    timed: dict[str, float | None] = times.get(f"{nfe} calls", {})
    return timed.get(arm, timed.get(own[0]))


def every(times: dict[str, Any], preset: Preset) -> pareto.Arms:
    return EVERY[times["about"]["study"]](preset)


def places(times: dict[str, Any], results: Results, preset: Preset, role: str, final_step: str) -> dict[Any, float]:
    """What each family's mixture at the released sampler's entropy takes, by (calls, family), where it was timed."""
    found = {}
    for nfe, families in every(times, preset).items():
        for family, own in families.items():
            mixture = pareto.mixed(results, preset, role, final_step, nfe, own)
            shares = mixture.shares if mixture else {}
            each = {arm: seconds(times, nfe, own, arm) for arm in shares}
            if shares and None not in each.values():
                found[nfe, family] = sum(share * (each[arm] or 0) for arm, share in shares.items())
    return found


def cheapest(times: dict[str, Any], results: Results, preset: Preset) -> Iterator[Cheapest]:
    """By model and final step that the study has, the cheapest mixture and the cheapest single arm, where there is one."""
    own = every(times, preset)
    for (role, caption), final_step in product(preset.captions.items(), pareto.RELEASED):
        if f"{role}/{pareto.released(preset, final_step)}" not in results.cells:
            continue
        know = (where(times), caption, final_step, times["released"]["0.9"])
        reached = []
        for (nfe, family), taken in places(times, results, preset, role, final_step).items():
            gain = pareto.less(results, preset, role, final_step, nfe, own[nfe][family])
            mixture = pareto.mixed(results, preset, role, final_step, nfe, own[nfe][family])
            if mixture and below("", gain).outcome == "holds":
                reached.append(Cheapest(*know, mixture.shares, nfe, gain, taken))
        alone = [
            Cheapest(*know, {arm: 1.0}, nfe, gain, taken)
            for (nfe, family, arm), gain in pareto.alone(results, preset, own, role, final_step).items()
            if (taken := seconds(times, nfe, own[nfe][family], arm)) is not None
        ]
        itself = pareto.RELEASED[final_step]
        if (taken := seconds(times, preset.most, [itself], itself)) is not None:
            alone.append(Cheapest(*know, {itself: 1.0}, preset.most, Estimate(np.zeros(2)), taken))
        for some in (reached, alone):
            if some:
                yield min(some, key=lambda one: one.seconds)


def fastest(found: Iterable[Cheapest]) -> list[Cheapest]:
    """Of what several studies have on one machine, what is fastest beside the released functions in its own run;
    mixtures and single arms apart."""
    best: dict[Any, Cheapest] = {}
    for one in found:
        key = one.where, one.caption, one.final_step, len(one.shares) > 1
        if key not in best or one.times > best[key].times:
            best[key] = one
    return list(best.values())


def figure(every: Sequence[dict[str, Any]], results: Results, preset: Preset) -> Figure:
    """A panel for each device and model, beside the released sampler with its greedy tail; of networks whose texts were
    judged, and of the study that has that final step."""
    panels: list[Panel] = []
    judged = [times for times in every if times["about"]["model"] in preset.roles.values()]
    own = [times for times in judged if times["about"]["study"] == "pareto"]
    if not own:
        raise LimpetError("no time is of a network whose texts were judged: give one that was taken with --model mini")
    for times, (role, caption) in product(own, preset.captions.items()):
        at = places(times, results, preset, role, "argmax")
        lines = list(pareto.lines(results, preset, pareto.every(preset), role, "argmax", at))
        theirs = Series("released functions", (times["released"]["0.9"],), (0.0,), joined=False, open=True)
        title = f"{caption}, {times['about']['device']}"
        x, y = f"seconds for {TEXTS:,} texts", f"NLL less top-p .9's at {preset.most} calls"
        panels.append(Panel(title, x, y, [*lines, theirs], legend=not panels, axes={"xscale": "log"}))
    caption = (
        f"Time for {TEXTS:,} texts, and their NLL less that of the released sampler (top-p .9, {preset.most} calls, "
        "argmax final step) at its entropy"
    )
    return Figure("pareto", caption, tuple(panels), columns=2)


def timed(times: dict[str, Any]) -> str:
    """Which numbers of calls."""
    calls = sorted(int(name.removesuffix(" calls")) for name in times if name.endswith(" calls"))
    return " and ".join([", ".join(map(str, calls[:-1])), str(calls[-1])]) if len(calls) > 1 else str(calls[0])


def whose(times: dict[str, Any]) -> str:
    """Which arms have a time of their own."""
    few = times["about"]["every arm up to"]
    return f", every arm up to {few} and the first of each family beyond" if few else ", the first arm of each family"


HEAD = (
    "| timed | texts of | final step | released, s | how | calls | arms | NLL less | here, s | times as fast |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def page(found: Sequence[Cheapest], drawn: Figure, preset: Preset, every: Sequence[dict[str, Any]]) -> str:
    """The words of docs/speed.md."""
    made = ", ".join(
        dict.fromkeys(
            f"{where(one)} (batch {one['batch']}, the released functions {one['released']['batch']})" for one in every
        )
    )
    rows = "\n".join(one.row for one in found)
    marks = " ".join(
        f"On {one['about']['device']} {timed(one)} calls of the study {one['about']['study']} were timed{whose(one)}."
        for one in every
    )
    marks = textwrap.fill(marks, 120, break_on_hyphens=False)
    random = (
        " That of the released size is random:\nits times are joined with the calls that the built-in models need."
        if any(one["about"]["model"] == RANDOM for one in every)
        else ""
    )
    return f"""![{drawn.caption}](images/pareto.svg)

Users buy quality, not calls. What does that of the released sampler at top-p .9 and {preset.most} calls cost here? The
table has the cheapest that reaches it: at its entropy, an NLL below its own with one-sided 95% confidence over shards.
Its texts end with a draw, which is its default (final step ancestral), or with an argmax, its greedy tail, which is the
paper's final step and serves these models worse. The same sampler here has its quality, too, by definition. "Mixed":
some of the texts from one arm and the rest from another, which have the means of both, so that the entropy is exactly
the released sampler's. "One arm": an arm that by itself has no less entropy. Seconds are for {TEXTS:,} texts, of the
network and on the machine that stand first: {made}.{random}

{HEAD}
{rows}

{marks}

```
limpet study run pareto --preset mini-gpu
limpet study run interleave --preset mini-gpu
python benchmarks/pareto.py time --out benchmarks/results/pareto-h200.json
python benchmarks/pareto.py join benchmarks/results/pareto-h200.json benchmarks/results/{{pareto,interleave}}-cpu.json
```
"""


def front(found: Sequence[Cheapest], drawn: Figure, preset: Preset) -> str:
    """The words of README.md: on the first device, of each final step what is fastest, one arm where there is one; on the
    others, of the default, what is fastest."""
    own = [one for one in found if one.where == found[0].where]

    def said(final_step: str, some: Sequence[Cheapest] = own) -> str:
        last = {one.caption: one for one in some if one.final_step == final_step}
        return "; ".join(
            f"on `{caption}` {one.nfe} calls of {one.words}, {one.times:.0f} times as fast"
            for caption, one in last.items()
        )

    words = (
        f"[What quality costs](docs/speed.md) on {found[0].where}: {TEXTS:,} texts by the released functions at top-p "
        f".9 and {preset.most} calls take {brief(own[0].released)} s. By default they end with a draw; what reaches "
        f"their NLL at their entropy then: {said('sample')}. With their greedy tail, an argmax, which is the "
        f"paper's final step too and serves these models worse: {said('argmax')}."
    )
    for place in dict.fromkeys(one.where for one in found if one not in own):
        there = sorted((one for one in found if one.where == place), key=lambda one: one.times)
        words += f" On {place}, by default: {said('sample', there)}."
    return f"![{drawn.caption}](docs/images/pareto.svg)\n\n{textwrap.fill(words, 120, break_on_hyphens=False)}\n"


def join(options: argparse.Namespace) -> None:
    from blocks import put
    from limpet.experiments import figures, report

    preset = studies.preset(options.preset)
    every = [json.loads(path.read_text(encoding="utf-8")) for path in options.times]
    results = {
        name: report.read(studies.study(name, preset), options.reports / f"{name}-{preset.name}")
        for name in dict.fromkeys(times["about"]["study"] for times in every)
    }
    found = fastest(one for times in every for one in cheapest(times, results[times["about"]["study"]], preset))
    if not found:
        raise LimpetError("nothing that was timed reaches the released sampler's quality: there is nothing to say")
    drawn = figure(every, results["pareto"], preset)
    image = options.root / "docs/images/pareto.svg"
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(figures.draw(drawn)["svg"])
    for name, words in {
        "docs/speed.md": page(found, drawn, preset, every),
        "README.md": front(found, drawn, preset),
    }.items():
        put(options.root / name, "pareto", words)
    print("\n".join([HEAD, *(one.row for one in found)]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="mini-gpu", help="of the study")
    actions = parser.add_subparsers(dest="action", required=True)
    timer = actions.add_parser("time")
    timer.add_argument("--out", type=Path, required=True)
    timer.add_argument("--study", choices=EVERY, default="pareto", help="whose arms are timed")
    timer.add_argument("--model", default="mini", help="whose shape is timed")
    timer.add_argument("--device")
    timer.add_argument("--precision", default="bfloat16")
    timer.add_argument("--threads", type=int)
    timer.add_argument("--calls", type=int, nargs="+", help="numbers of calls, of those that the study has")
    timer.add_argument("--few", type=int, default=8, help="up to so many calls every arm is timed")
    timer.add_argument("--batches", type=int, nargs="+", default=[256, 512])
    timer.add_argument("--released-batches", type=int, nargs="+", default=[2048, 1024, 512, 256, 128, 64, 16])
    timer.add_argument("--released-calls", type=int, default=16, help="at most so many are timed")
    timer.add_argument("--runs", type=int, default=2)
    timer.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this time")
    joiner = actions.add_parser("join")
    joiner.add_argument("times", type=Path, nargs="+")
    joiner.add_argument("--reports", type=Path, default=ROOT / "docs/reports/mini", help="where the studies' are")
    joiner.add_argument("--root", type=Path, default=ROOT, help="where docs/speed.md and README.md are")
    options = parser.parse_args(arguments)
    if options.action == "join":
        join(options)
        return
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    place = usable_device(options.device)
    model = limpet.load(options.model, device=place, precision=options.precision)
    if not isinstance(model, Duo):
        raise LimpetError(f"{options.model} is no Duo network, so the released functions have nothing to go round")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    timings(model, studies.preset(options.preset), options)


if __name__ == "__main__":
    main()
