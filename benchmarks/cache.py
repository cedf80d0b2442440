"""What `refresh` costs and buys: quality, rows and time beside exact sampling, and how far cached predictions are off.

    python benchmarks/cache.py quality --model mini --seeds 8200 8210
    python benchmarks/cache.py policies --model molecules --sampler "native top_p=.9" --n 16
    python benchmarks/cache.py --page docs/cache.md

`quality` advances all samplers of a batch alternately, one call each, so that other load slows all of them. Its seconds
are the processor's, of this process with one thread. With --same-kernels, calls beside a cache use the arithmetic of
exact ones. `policies` follows an exact trajectory. At every call it also computes what a rule for choosing positions
would have computed from its own cache, and compares the predictions that the exact call reads. Both add to --out, which
is read again by the next run, so a run can be continued."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from measuring import ResultFile
from torch import Tensor

import limpet
from limpet.diffusion.backends import Backend, NetworkCall, Transition, sparse
from limpet.diffusion.rng import CounterRNG
from limpet.evaluation import evaluate, statistics
from limpet.evaluation.sample_sets import SampleSet
from limpet.evaluation.statistics import Estimate
from limpet.experiments import figures
from limpet.experiments.claims import bounds
from limpet.experiments.report_content import Figure, Panel, Series
from limpet.files import read_text
from limpet.generation import CountingDenoiser, Inputs, fixed_tokens, rollout
from limpet.models import Cache, Denoiser, ModelInput, WrappedDenoiser, networks
from limpet.samplers import Sampler, parse

OUT = Path("benchmarks/results/cache.json")
CALLS = 64
SHOWN = {
    "nll": "NLL",
    "entropy": "entropy",
    "valid": "valid",
    "solved": "solved",
    "delta": "delta NLL at equal entropy",
}
CURVES = Path(__file__).resolve().parents[1] / "docs/reports/mini/pareto-mini-gpu/report.json.xz"
ROLES = {"mini": "base", "mini-distilled": "distilled"}  # of models in that report
POLICIES = ("mini, native top_p=.9, 2 samples",)  # that the page shows
MODELS, ALL_CALLS = ("mini", "mini-distilled", "molecules", "sudoku"), (16, 32, 64, 128)

# Of a call and its (B, L) tokens: (B, L) bool, which positions to compute besides those that must be; None for all.
Rule = Callable[["Following", Tensor], Tensor | None]


# Quality, rows and time


def inputs_of(model: Denoiser, samples: range, seed: int) -> Inputs:
    fixed = fixed_tokens(model, len(samples), model.length, None, None)
    return Inputs(fixed, CounterRNG(seed, torch.tensor(samples)))


def quality(model: Denoiser, texts: list[str], samples: range, seed: int, nfe: int) -> dict[str, Any]:
    """Every sampler on one batch, alternately, call by call: seconds, rows and scores of each."""
    samplers = {text: parse(text, nfe=nfe)[1] for text in texts}
    counting = {text: CountingDenoiser(model) for text in texts}
    steps = {text: rollout(counting[text], samplers[text], inputs_of(model, samples, seed)) for text in texts}
    seconds, ends = dict.fromkeys(texts, 0.0), {}
    while steps:
        for text in list(steps):
            begun = time.process_time()
            step = next(steps[text], None)
            seconds[text] += time.process_time() - begun
            if step is None:
                del steps[text]
            else:
                ends[text] = step.tokens
    judge = None if model.checker else limpet.load_judge()
    found = {}
    for text, tokens in ends.items():
        scores = evaluate(SampleSet.from_tokens(model, tokens), judge, ("entropy",), checker=model.checker)
        rows = counting[text].positions / (tokens.numel() * nfe)
        values = {name: float(one[0]) for name, one in scores.values.items() if name in SHOWN}
        found[text] = {"seconds": seconds[text], "rows": rows, "calls": samplers[text].nfe, **values}
    return {"n": len(samples), "precision": model.precision, "threads": torch.get_num_threads(), "samplers": found}


# Predictions beside exact ones


class Following(WrappedDenoiser):
    """An exact model that also computes what one cache would have predicted, and how far that is off."""

    def __init__(self, inner: Denoiser, rule: Rule, waits: int | None) -> None:
        super().__init__(inner)
        self.rule, self.waits, self.call, self.rows, self.positions = rule, waits, 0, 0, 0
        self.tokens = self.values = self.drawn = self.inspected = torch.empty(0)
        self.layers: tuple[Tensor, ...] = ()
        self.changed = torch.tensor(False)  # (B, L) bool: since the sample was last computed whole; kept by a rule
        self.sums = {"drawn": [0.0, 0], "inspected": [0.0, 0]}  # of KL divergences, and their number

    def plan(self, transition: Transition, call: NetworkCall) -> sparse.SparsePlan:
        """The sparse plan, remembered apart for drawn tokens and inspections."""
        quiet = sparse.plan(replace(transition, inspect=torch.zeros_like(transition.inspect)), call)
        self.drawn = torch.zeros_like(transition.inspect)
        self.drawn[tuple(quiet.rows.unbind(-1))] = True
        self.inspected = transition.inspect & ~self.drawn
        return sparse.plan(transition, call)

    def backbone(self, inputs: ModelInput) -> Tensor:
        exact = self.inner.backbone(inputs._replace(rows=lambda: None))
        computed = None if self.call == 0 else self.rule(self, inputs.tokens)
        if computed is not None:
            inspected = self.inspected
            if self.waits:  # each inspection in its turn, from then on as it was
                inspected = inspected & ((torch.arange(inspected.shape[1]) + self.call) % self.waits == 0)
            computed = computed | (inputs.tokens != self.tokens) | self.drawn | inspected
        index = None if computed is None else computed.flatten().nonzero()[:, 0]
        cache = Cache(index, self.layers, [])
        values = self.inner.backbone(inputs._replace(rows=lambda: index, cache=cache))
        self.values = values if computed is None else torch.where(computed[..., None], values, self.values)
        self.tokens, self.layers, self.call = inputs.tokens, tuple(cache.after), self.call + 1
        self.rows += inputs.tokens.numel() if index is None else len(index)
        self.positions += inputs.tokens.numel()
        for name, where in (("drawn", self.drawn), ("inspected", self.inspected)):
            p, q = (self.inner.head(part[where]).double().log_softmax(-1) for part in (exact, self.values))
            self.sums[name][0] += float((p.exp() * (p - q)).nan_to_num(0).sum())
            self.sums[name][1] += int(where.sum())
        return exact


def rules(sampler: Sampler, model: Denoiser) -> Iterator[tuple[str, Rule, int | None]]:
    """Ways to choose which positions are computed besides those that changed or are read: name, rule, waiting."""

    def every(calls: int) -> Rule:
        return lambda on, tokens: None if on.call % calls == 0 else torch.zeros_like(on.drawn)

    def in_turn(calls: int) -> Rule:
        return lambda on, tokens: ((torch.arange(tokens.shape[1]) + on.call) % calls == 0).expand_as(tokens)

    def spaced(count: int) -> Rule:
        """Full calls at even distances of the log-odds of the signal."""
        levels = [min(max(model.schedule.level(t), 1e-4), 1 - 1e-4) for t in sampler.times]  # type: ignore[attr-defined]
        odds = [math.log(level / (1 - level)) for level in levels]
        place = [int(count * (one - odds[0]) / (odds[-1] - odds[0])) for one in odds]
        full = {call for call in range(1, len(place)) if place[call] > place[call - 1]}
        return lambda on, tokens: None if on.call in full else torch.zeros_like(on.drawn)

    def drifted(share: float) -> Rule:
        """All positions of a sample once more than a share of its tokens has changed."""

        def rule(on: Following, tokens: Tensor) -> Tensor:
            on.changed = on.changed | (tokens != on.tokens)
            due = on.changed.double().mean(1, keepdim=True) > share
            on.changed = on.changed & ~due
            return due.expand_as(tokens)

        return rule

    for calls in (2, 4, 8, 16, CALLS):
        yield f"every {calls}", every(calls), None
    for calls in (8, 16):
        yield f"1/{calls} alternately", in_turn(calls), None
    for count in (8, 16):
        yield f"{count} by log-odds", spaced(count), None
    for share in (0.3, 0.6):
        yield f"when {share} changed", drifted(share), None
    for waits in (2, 4):
        yield f"every 8, inspections in turns of {waits}", every(8), waits


def policies(model: Denoiser, text: str, n: int, seed: int) -> dict[str, Any]:
    """The divergence of every rule's predictions from the exact ones, and the rows that it computes."""
    _, sampler = parse(text, nfe=CALLS)
    found = {}
    for name, rule, waits in rules(sampler, model):
        following = Following(model, rule, waits)
        backend = Backend(following.plan, sparse.advance, sparse.BACKEND.select)
        if waits and text.startswith("native"):
            continue  # it inspects nothing
        for _ in rollout(following, sampler, replace(inputs_of(model, range(n), seed), backend=backend)):
            pass
        kl = {kind: total / max(1, count) for kind, (total, count) in following.sums.items()}
        found[name] = {"rows": following.rows / following.positions, **kl}
        print(name, found[name], flush=True)
    return {"n": n, "seed": seed, "precision": model.precision, "rules": found}


# The page


class Group(NamedTuple):
    """One sampler and number of calls of a model: exact, with `refresh` and with fewer calls, on the same seeds."""

    model: str
    calls: int
    sampler: str
    samples: int  # of each seed
    kernels: str  # "" or "same kernels, ", where cached calls had those of exact ones
    seeds: tuple[dict[str, dict[str, float]], ...]  # of each seed: means over its batches, by setting

    def time(self, setting: str) -> float:
        """Processor time as a share of the exact sampler's."""
        totals = [math.fsum(seed[one]["seconds"] for seed in self.seeds) for one in (setting, self.sampler)]
        return totals[0] / totals[1]

    def change(self, setting: str, measure: str) -> Estimate:
        """The difference to the exact sampler, paired by seed; `delta` is that of NLL at equal entropy."""
        return statistics.paired(*(self.values(one, measure) for one in (setting, self.sampler)))

    def values(self, setting: str, measure: str) -> list[float]:
        if measure != "delta":
            return [seed[setting][measure] for seed in self.seeds]
        curve = top_p_curve(self.model, self.calls)
        return [
            one["nll"] - statistics.interpolate(*curve, one["entropy"])[0] for one in (s[setting] for s in self.seeds)
        ]

    @property
    def measure(self) -> str:
        """What decides: NLL at equal entropy, or the share of valid samples."""
        return next(
            name for name in ("valid", "solved", "delta") if name == "delta" or name in self.seeds[0][self.sampler]
        )


@cache
def top_p_curve(model: str, calls: int) -> tuple[list[float], list[float]]:
    """Entropy and NLL of exact sampling at every top-p, of a committed report: 4 seeds x 512 samples."""
    cells = json.loads(read_text(CURVES, ""))["cells"]
    prefix = f"{ROLES[model]}/{calls}/native"
    own = [one for name, one in cells.items() if re.fullmatch(rf"{prefix}( top_p=\S+)?", name)]
    nodes = sorted((one["entropy"]["mean"], one["nll"]["mean"]) for one in own)
    return [entropy for entropy, _ in nodes], [nll for _, nll in nodes]


def groups(found: dict[str, Any]) -> list[Group]:
    """All batches that were measured, joined by model, calls and sampler."""
    batches: dict[tuple[str, ...], dict[str, list[dict[str, Any]]]] = {}
    for name, run in found.items():
        if match := re.fullmatch(r"(same kernels, |)quality (\S+) (\d+) calls (.+) seed (\d+) from \d+", name):
            *key, seed = match.groups()
            batches.setdefault(tuple(key), {}).setdefault(seed, []).append(run)
    joined = []
    for (kernels, model, calls, sampler), seeds in batches.items():
        means = tuple(
            {
                setting: {name: mean(run["samplers"][setting][name] for run in runs) for name in values}
                for setting, values in runs[0]["samplers"].items()
            }
            for runs in seeds.values()
        )
        samples = min(sum(run["n"] for run in runs) for runs in seeds.values())
        joined.append(Group(model, int(calls), sampler, samples, kernels, means))
    return joined


def table(group: Group) -> str:
    """Time and scores of every setting; differences from the exact sampler with errors."""
    measures = [name for name in (*SHOWN, "delta") if name in group.seeds[0][group.sampler]]
    measures += ["delta"] if group.measure == "delta" else []
    size = f"{len(group.seeds)} seed{'s' * (len(group.seeds) > 1)} x {group.samples} samples"
    head = [f"{group.kernels}{group.model}, {group.calls} calls, {size}", "time", *(SHOWN[name] for name in measures)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for setting in group.seeds[0]:
        cells = [setting, f"{group.time(setting):.2f}"]
        for name in measures:
            level = "" if name == "delta" else f"{mean(group.values(setting, name)):.3f}"
            cells.append(
                (level or "0")
                if setting == group.sampler
                else f"{level} ({signed(group.change(setting, name))})".strip()
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdicts(found: list[Group]) -> str:
    """Settings with `refresh` beside fewer calls that take about as long, or somewhat longer; what was not measured."""
    lines = ["| model, calls | `refresh`: time, loss | fewer calls: time, loss | better |", "|---|---|---|---|"]
    for group in found:
        cached = [one for one in group.seeds[0] if "refresh=" in one]
        fewer = [one for one in group.seeds[0] if "nfe=" in one]
        for one, other in product(cached, fewer):
            if group.time(one) / 1.1 <= group.time(other) <= 1.5 * group.time(one):
                name = f"{group.model}, {group.calls}, `{one}`, {other.removeprefix(group.sampler).strip()}"
                cells = name, cost(group, one), cost(group, other), better(group, one, other)
                lines.append("| " + " | ".join(cells) + " |")
    missing = []
    for model in MODELS:
        calls = set(ALL_CALLS) - {one.calls for one in found if one.model == model}
        missing += [f"{model} with {', '.join(map(str, sorted(calls)))} calls"] * bool(calls)
    missed = textwrap.fill(f"Not measured: {'; '.join(missing)}.", 118)
    return "\n".join([*lines, "", missed])


def fewer_calls() -> str:
    """What exact sampling loses at equal entropy with fewer calls than 64, of the report behind the curves."""
    cells = json.loads(read_text(CURVES, ""))["cells"]
    lines = ["| exact, 4 seeds x 512 samples | 16 calls | 32 calls | 128 calls |", "|---|---|---|---|"]
    for model, role in ROLES.items():
        for sampler in ("native top_p=.9", "mend"):
            losses = {
                calls: [
                    nll - statistics.interpolate(*top_p_curve(model, CALLS), entropy)[0]
                    for nll, entropy in zip(*(cell[name]["values"] for name in ("nll", "entropy")), strict=True)
                ]
                for calls in ALL_CALLS
                if (cell := cells.get(f"{role}/{calls}/{sampler}"))
            }
            shown = [
                signed(statistics.paired(losses[calls], losses[CALLS])) if calls in losses else "not measured"
                for calls in (16, 32, 128)
            ]
            lines.append(f"| {model}, `{sampler}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def signed(one: Estimate) -> str:
    """A difference and its error; without the error if there is a single seed."""
    return f"{one.mean:+.3f} ± {one.se:.3f}" if len(one.values) > 1 else f"{one.mean:+.3f}"


def cost(group: Group, setting: str) -> str:
    """Time and loss of a setting."""
    sign = 1 if group.measure == "delta" else -1
    change = group.change(setting, group.measure)
    return f"{group.time(setting):.2f}, {signed(Estimate(sign * change.values))}"


def better(group: Group, one: str, other: str) -> str:
    """Which setting loses less, by one-sided 95% confidence over seeds; open where neither is."""
    sign = 1 if group.measure == "delta" else -1
    losses = statistics.paired(group.values(one, group.measure), group.values(other, group.measure))
    if len(losses.values) < 2:
        return "open"
    low, high = bounds(sign * losses.mean, losses.se, len(losses.values))
    return "`refresh`" if high < 0 else "fewer calls" if low > 0 else "open"


def figure(found: list[Group]) -> Figure:
    """Loss against time, for exact sampling with fewer calls and with `refresh`."""
    panels = []
    for group in found:
        sign = 1 if group.measure == "delta" else -1
        series = []
        for name, word in (("exact, fewer calls", "nfe="), ("refresh", "refresh=")):
            settings = [group.sampler, *(one for one in group.seeds[0] if word in one.removeprefix(group.sampler))]
            changes = [group.change(one, group.measure) for one in settings]
            points = sorted(
                (group.time(one), sign * change.mean, change.se) for one, change in zip(settings, changes, strict=True)
            )
            series.append(Series(name, *(tuple(part) for part in zip(*points, strict=True))))  # type: ignore[arg-type]
        what = "delta NLL at equal entropy" if group.measure == "delta" else f"loss of {SHOWN[group.measure]} samples"
        title = f"{group.model}, {group.sampler}, {group.calls} calls"
        panels.append(Panel(title, "time, of exact", f"{what} (lower is better)", series, legend=not panels))
    return Figure(
        "cache", "What is lost in the time that is left, with the cache and with fewer calls", tuple(panels), columns=2
    )


def policy_table(found: dict[str, Any]) -> str:
    """One table for each model and sampler, with one line for each rule: rows, and the divergences."""
    tables = []
    for name in POLICIES:
        run = found[f"policies {name}"]
        kinds = ["drawn", *(["inspected"] if any(one["inspected"] for one in run["rules"].values()) else [])]
        head = [name, "rows", *kinds]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for rule, one in run["rules"].items():
            cells = [rule, f"{one['rows']:.2f}", *(f"{one[kind]:.4f}" for kind in kinds)]
            lines.append("| " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def page(found: list[Group]) -> str:
    """Everything about quality and time on the page. What has the same kernels is there where nothing else is."""
    own = [group for group in found if not group.kernels]
    others = [one for one in found if one.kernels and one[:3] not in [group[:3] for group in own]]
    return "\n\n".join([verdicts(own), fewer_calls(), *map(table, [*own, *others])])


def mean(values: Iterator[float] | list[float]) -> float:
    return fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["quality", "policies"])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--sampler", action="append", help="quality: the exact one first; default native top_p=.9")
    parser.add_argument("--n", type=int, default=4, help="samples of each seed")
    parser.add_argument("--batch", type=int, default=16, help="quality: samples of one batch")
    parser.add_argument("--nfe", type=int, default=CALLS, help="quality: calls of samplers that do not say")
    parser.add_argument("--same-kernels", action="store_true", help="quality: cached calls use those of exact ones")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8200])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--page", type=Path, help="fill this page from --out, and run nothing")
    options = parser.parse_args()
    if options.page is not None:
        sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
        from blocks import put

        found = json.loads(options.out.read_text(encoding="utf-8"))
        put(options.page, "quality", page(groups(found)))
        put(options.page, "policies", policy_table(found))
        drawn = figures.draw(figure([one for one in groups(found) if not one.kernels]))
        (options.page.parent / "images/cache.svg").write_bytes(drawn["svg"])
        return
    torch.set_num_threads(1)
    if options.same_kernels:
        networks.multiplies_faster = lambda q, k: False
        networks.Linear.with_gelu = lambda own, x: torch.nn.functional.gelu(own(x), approximate="tanh")  # type: ignore[method-assign]
    model, results = limpet.load(options.model, precision=options.precision, device="cpu"), ResultFile(options.out)
    for seed in options.seeds:
        if options.what == "quality":
            texts = options.sampler or ["native top_p=.9", "native top_p=.9 refresh=8", "native top_p=.9 nfe=32"]
            kernels = "same kernels, " if options.same_kernels else ""
            for first in range(0, options.n, options.batch):
                samples = range(first, min(options.n, first + options.batch))
                name = f"{kernels}quality {options.model} {options.nfe} calls {texts[0]} seed {seed} from {first}"
                results.measure(name, quality, model, texts, samples, seed, options.nfe)
        else:
            for text in options.sampler or ["native top_p=.9"]:
                results.measure(
                    f"policies {options.model}, {text}, {options.n} samples", policies, model, text, options.n, seed
                )


if __name__ == "__main__":
    main()
