"""What `refresh` costs and buys: quality, rows and time beside exact sampling, and how far cached predictions are off.

    python benchmarks/cache.py quality --model mini --seeds 8200 8210
    python benchmarks/cache.py policies --model molecules --sampler "native top_p=.9" --n 16
    python benchmarks/cache.py --page docs/cache.md

`quality` advances all samplers of a seed alternately, one call each, so that other load slows all of them. Its seconds
are the processor's, of this process. `policies` follows an exact trajectory. At every call it also computes what a rule
for choosing positions would have computed from its own cache, and compares the predictions that the exact call reads.
Both add to --out, which is read again by the next run, so a run can be continued."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from measuring import ResultFile
from torch import Tensor

import limpet
from limpet.diffusion.backends import Backend, NetworkCall, Transition, sparse
from limpet.diffusion.rng import CounterRNG
from limpet.evaluation import evaluate
from limpet.evaluation.sample_sets import SampleSet
from limpet.generation import CountingDenoiser, Inputs, fixed_tokens, rollout
from limpet.models import Cache, Denoiser, ModelInput, WrappedDenoiser, networks
from limpet.samplers import Sampler, parse

OUT = Path("benchmarks/results/cache.json")
CALLS = 64
EXACT, CACHED = ("{0}", "{0} nfe=32", "{0} nfe=16"), ("{0} refresh=4", "{0} refresh=8", "{0} refresh=16")
SAMPLERS = {"native top_p=.9": (*EXACT, *CACHED), "mend": ("{0}", "{0} nfe=32", "{0} refresh=8", "{0} refresh=32")}
SHOWN = {"nll": "NLL", "entropy": "entropy", "valid": "valid", "solved": "solved"}

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


def table(found: dict[str, Any], model: str) -> str:
    """Rows, seconds and scores of every sampler: means over seeds, differences from the exact 64 calls with errors."""
    runs = [run["samplers"] for name, run in found.items() if name.startswith(f"quality {model} seed ")]
    sizes = {run["n"] for name, run in found.items() if name.startswith(f"quality {model} seed ")}
    measures = [name for name in SHOWN if name in next(iter(runs[0].values()))]
    head = [
        f"{model}: {len(runs)} seed{'s' * (len(runs) > 1)} x {max(sizes)} samples",
        "rows",
        "time",
        *(SHOWN[name] for name in measures),
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for text in runs[0]:
        base = next(own for own in SAMPLERS if text.startswith(own))
        ratio = [run[text]["seconds"] / run[base]["seconds"] for run in runs]
        cells = [text, f"{mean(run[text]['rows'] for run in runs):.2f}", f"{mean(ratio):.2f}"]
        for name in measures:
            level = f"{mean(run[text][name] for run in runs):.3f}"
            changes = [run[text][name] - run[base][name] for run in runs]
            error = f" ± {statistics.stdev(changes) / math.sqrt(len(changes)):.3f}" if len(changes) > 1 else ""
            cells.append(level if text == base else f"{level} ({mean(changes):+.3f}{error})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def policy_table(found: dict[str, Any]) -> str:
    """One table for each model and sampler, with one line for each rule: rows, and the divergences."""
    tables = []
    for name, run in found.items():
        if not name.startswith("policies "):
            continue
        kinds = ["drawn", *(["inspected"] if any(one["inspected"] for one in run["rules"].values()) else [])]
        head = [name.removeprefix("policies "), "rows", *kinds]
        lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for rule, one in run["rules"].items():
            cells = [rule, f"{one['rows']:.2f}", *(f"{one[kind]:.4f}" for kind in kinds)]
            lines.append("| " + " | ".join(cells) + " |")
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def mean(values: Iterator[float] | list[float]) -> float:
    return statistics.fmean(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["quality", "policies"])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--sampler", action="append", help="quality: default several; policies: native top_p=.9")
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
        models = dict.fromkeys(name.split()[1] for name in found if name.startswith("quality "))
        put(options.page, "quality", "\n\n".join(table(found, model) for model in models))
        put(options.page, "policies", policy_table(found))
        return
    torch.set_num_threads(1)
    if options.same_kernels:
        networks.multiplies_faster = lambda q, k: False
        networks.Linear.with_gelu = lambda own, x: torch.nn.functional.gelu(own(x), approximate="tanh")  # type: ignore[method-assign]
    model, results = limpet.load(options.model, precision=options.precision, device="cpu"), ResultFile(options.out)
    for seed in options.seeds:
        if options.what == "quality":
            for first in range(0, options.n, options.batch):
                samples = range(first, min(options.n, first + options.batch))
                group = options.sampler[0]
                name = f"quality {options.model} {options.nfe} calls {group} seed {seed} from {first}"
                name = f"same kernels, {name}" if options.same_kernels else name
                results.measure(name, quality, model, options.sampler, samples, seed, options.nfe)
        else:
            for text in options.sampler or ["native top_p=.9"]:
                results.measure(
                    f"policies {options.model}, {text}, {options.n} samples", policies, model, text, options.n, seed
                )


if __name__ == "__main__":
    main()
