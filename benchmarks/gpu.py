"""One GPU run: check the fused step against the others, then time it beside bare forwards and the released step.

    python benchmarks/gpu.py --out benchmarks/results/h200.json

It needs torch, Triton and the package's own source beside it; nothing is downloaded. Every result is written as soon
as it is there, a part that fails does not stop the others, and what --out has is not measured again."""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from measuring import ResultFile, milliseconds

from limpet import LimpetError
from limpet.diffusion import selection
from limpet.diffusion.backends import Backend, NetworkCall, Outcome, Transition, fused, sparse, testing
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral
from limpet.diffusion.truncation import Support
from limpet.experiments import speed
from limpet.generation import SEED, CountingDenoiser, Inputs, rollout
from limpet.models import ModelInput, WrappedDenoiser
from limpet.models.duo import Duo, DuoShape
from limpet.models.networks import AlignedHead
from limpet.samplers import CRS, Mend, Native, Sampler, parse
from trained_like import released, trained_like

CUDA = torch.device("cuda")
VOCAB = 50258


def transition(tokens: Tensor, **changes: Any) -> Transition:
    every = torch.ones_like(tokens, dtype=torch.bool)
    fields = {"call": 3, "tokens": tokens, "revise": every, "inspect": every, "coins": ancestral(0.4, 0.7)}
    return Transition(**{**fields, **changes})


def network_call(case: Transition, vocab_size: int = VOCAB, convert: bool = False) -> NetworkCall:
    rng = CounterRNG(SEED, torch.arange(len(case.tokens), device=CUDA))
    return testing.network_call(case, vocab_size, rng, convert)


def inputs_of(model: Any, batch: int, length: int | None = None, backend: Backend | None = None) -> Inputs:
    fixed = torch.full((batch, length or model.length), -1, device=CUDA)
    return Inputs(fixed, CounterRNG(SEED, torch.arange(batch, device=CUDA)), backend=backend)


# -- checks -----------------------------------------------------------------------------------------------------------


def check_step() -> dict[str, Any]:
    """The fused and the sparse step on the same logits and uniforms, at the released vocabulary: how many tokens and
    argmaxes differ, and the largest relative difference of a deficit."""
    found = {}
    generator = torch.Generator(CUDA).manual_seed(1)
    distributions = (
        (1.0, "released", False, 1.0), (0.9, "released", False, 1.0), (0.9, "paper", True, 1.0),
        (0.3, "released", False, 1.0), (1.0, "released", False, 0.8), (0.9, "paper", True, 0.8),
    )  # fmt: skip
    for dtype, spread, (top_p, boundary, convert, temperature) in itertools.product(
        (torch.bfloat16, torch.float32), (2.0, 6.0), distributions
    ):
        logits = (torch.randn(8, 128, VOCAB, generator=generator, device=CUDA) * spread).to(dtype)
        tokens = torch.randint(VOCAB, (8, 128), generator=generator, device=CUDA)
        tokens[:, ::2] = logits[:, ::2].argmax(-1)
        support = Support(top_p, boundary)
        case = transition(tokens, support=support, temperature=temperature, coins=ancestral(0.01, 0.7), against=tokens)
        one, other = (
            testing.step(each.BACKEND, logits, case, network_call(case, convert=convert)) for each in (sparse, fused)
        )
        name = f"{dtype} spread {spread} p {top_p} {boundary} convert {convert}"
        found[name if temperature == 1 else f"{name} temperature {temperature}"] = compared(tokens, one, other)
    return found


def compared(tokens: Tensor, one: Outcome, other: Outcome) -> dict[str, Any]:
    return {
        "rows": tokens.numel(),
        "moved": int((one.tokens != tokens).sum()),
        "tokens differ": int((one.tokens != other.tokens).sum()),
        "argmax differ": int((one.top != other.top).sum()),
        "gain differ": int((one.gain != other.gain).sum()) if one.gain is not None else 0,
        "deficit": float(((one.deficit - other.deficit).abs() / one.deficit.clamp(min=1e-12)).max()),
    }


class NonFiniteModel(WrappedDenoiser):
    """A model with one NaN feature in one call."""

    def __init__(self, inner: Duo, call: int, place: int) -> None:
        super().__init__(inner)
        self.call, self.place, self.calls = call, place, 0

    def backbone(self, inputs: ModelInput) -> Tensor:
        features = self.inner.backbone(ModelInput(inputs.tokens, inputs.t))
        if self.calls == self.call:
            features.view(-1, features.shape[-1])[self.place] = math.nan
        self.calls += 1
        return features


def check_nonfinite() -> dict[str, str]:
    """The errors for non-finite logits in the first call after warmup and in the last call."""
    model, found = Duo(trained_like(DuoShape(length=256, blocks=2))).to(CUDA), {}
    sampler = CRS(nfe=8)
    for call, place in ((sampler.warmup_calls, 300), (7, 511)):
        faulty = NonFiniteModel(model, call, place)
        row, position = divmod(place, model.length)
        expected = f"in call {call} at position {position} of sample {row}"
        try:
            list(rollout(faulty, sampler, inputs_of(faulty, 2)))
            found[expected] = "nothing was raised"
        except LimpetError as error:
            found[expected] = f"raised after {faulty.calls} calls" if expected in str(error) else f"wrong: {error}"
    return found


def check_select() -> dict[str, Any]:
    differ = 0
    generator = torch.Generator(CUDA).manual_seed(2)
    for spacing, digits, count in itertools.product((0, 1, 4, 9), (2, 16), (25, 205, 1024)):
        deficit = torch.rand(64, 1024, generator=generator, device=CUDA, dtype=torch.float64).round(decimals=digits)
        eligible = torch.rand(64, 1024, generator=generator, device=CUDA) < 0.7
        budget = torch.rand(64, generator=generator, device=CUDA, dtype=torch.float64) * 40
        one = selection.select(deficit, eligible, count, budget, spacing)
        differ += int((one != fused.select(deficit, eligible, count, budget, spacing)).sum())
    return {"cases": 24 * 64, "positions that differ": differ}


def check_distributions() -> dict[str, float]:
    """p-values of Pearson's test of a million draws from the exact reverse distribution, and of a large tail."""
    found = {}
    distributions = ((0.5, 0.2, 0.2, 0.1, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0), (0.2,) * 5, (0.05, 0.6, 0.15, 0.1, 0.1))
    for (row, values), top_p, boundary in itertools.product(
        enumerate(distributions), (1.0, 0.65), ("released", "paper")
    ):
        probs = torch.tensor(values, dtype=torch.float64)
        support, shape = Support(top_p, boundary), (1000, 1000)
        p_value = testing.p_value(fused.BACKEND, probs, support, seed=row, device=CUDA, shape=shape)
        found[f"distribution {row} p {top_p} {boundary}"] = p_value
    found["tail of 1e-3 in 50 parts"] = tail()
    return found | {"smallest": min(found.values())}


def tail() -> float:
    """Half of 1e-3 spread over 25000 tokens before a heavy one, half over as many after it; 800 000 draws."""
    weights = torch.full((50001,), 1e-3 / 50000, dtype=torch.float64)
    weights[25000] = 1
    row = weights.log().float().to(CUDA)
    counts = torch.zeros(len(weights))
    for call in range(8):
        tokens = torch.full((100, 1000), 25000, device=CUDA)
        case = transition(tokens, call=call, coins=ancestral(1e-12, 1.0), inspect=tokens < 0)
        outcome = testing.step(
            fused.BACKEND,
            tokens[..., None].float(),
            case,
            network_call(case, len(weights)),
            lambda rows: row.expand(len(rows), -1),
        )
        counts += torch.bincount(outcome.tokens.flatten().cpu(), minlength=len(weights))

    def parts(values: Tensor) -> Tensor:
        return torch.cat(
            [values[:25000].view(25, -1).sum(-1), values[25000:25001], values[25001:].view(25, -1).sum(-1)]
        )

    return testing.chi_square(parts(counts), parts(weights / weights.sum()))


def check_trajectory(precision: str, temperature: float = 1.0, kind: type[CRS] = CRS) -> dict[str, Any]:
    """Whole trajectories by the fused and the sparse backend: where their outputs differ. Matrix products may round
    differently over another number of rows, and a difference stays."""
    model = released(device=CUDA, precision=precision)
    counting = CountingDenoiser(model), CountingDenoiser(model)
    sampler, (batch, length) = kind(nfe=16, temperature=temperature), (2, 256)
    *_, one = rollout(counting[0], sampler, inputs_of(counting[0], batch, length))
    *_, other = rollout(counting[1], sampler, inputs_of(counting[1], batch, length, sparse.BACKEND))
    return {
        "tokens": one.tokens.numel(),
        "tokens differ": int((one.tokens != other.tokens).sum()),
        "committed when": int((one.state.memory[1] != other.state.memory[1]).sum()),
        "head rows": [denoiser.rows / sampler.nfe / (batch * length) for denoiser in counting],
    }


def check_precision() -> dict[str, float]:
    """The network in float32 and in bfloat16, each with its fused backbone and its own, at several noise levels.

    Backbone: the largest difference of features relative to their root mean square. Distribution: the mean over
    positions of the total variation, and of how much of an argmax's probability the other's argmax misses."""
    network = trained_like(DuoShape()).to(CUDA)
    exact, rounded = (Duo(network, precision=precision) for precision in ("float32", "bfloat16"))
    tokens = torch.randint(VOCAB, (2, exact.length), generator=torch.Generator(CUDA).manual_seed(3), device=CUDA)
    found: dict[str, float] = {}
    with torch.inference_mode():
        for t in (0.9, 0.5, 0.1):
            sigma = exact.schedule.sigma(t).float().to(CUDA).expand(2)
            for name, model in (("float32", exact), ("bfloat16", rounded)):
                own = model.network.backbone(tokens, sigma).double()
                fused = model.backbone(ModelInput(tokens, t)).double()
                found[f"body {name} t {t}"] = float((fused - own).abs().max() / own.square().mean().sqrt())
            one, other = (model.logits(tokens, t).double().softmax(-1) for model in (exact, rounded))
            found[f"distribution variation t {t}"] = float((one - other).abs().sum(-1).mean() / 2)
            chosen = one.gather(-1, other.argmax(-1, keepdim=True))[..., 0]
            found[f"argmax misses t {t}"] = float((one.amax(-1) - chosen).mean())
    return found


def check_waits(model: Duo, batch: int) -> dict[str, float]:
    """Sample with every hidden synchronisation made an error; then the share of time in which the device computes."""
    sampler = CRS(nfe=6)

    def trajectory() -> None:
        """Every call, without the check for non-finite logits after them, which waits for the device."""
        for _ in itertools.islice(rollout(model, sampler, inputs_of(model, batch)), sampler.nfe):
            pass

    with torch.inference_mode():
        trajectory()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trajectory()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            trajectory()
            torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type.name == "CUDA")
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70))
    return {"busy": busy / (reached - spans[0][0]), "milliseconds": (reached - spans[0][0]) / 1000}


def confidence(model: Duo) -> dict[str, Any]:
    """Along native and CRS trajectories: t, the mean largest probability, the mean h(z), the median .9 nucleus size."""
    found: dict[str, Any] = {}
    for name in ("native", "CRS"):
        inputs, before = inputs_of(model, 2), None
        rows = []
        for step in rollout(model, speed.SAMPLERS[name].replace(nfe=9), inputs, stop=8):
            with torch.inference_mode():
                probs = model.logits(step.model_input, step.t)[:, ::8].softmax(-1)
                tokens = step.context.noise() if before is None else before
                at_z = probs.gather(-1, tokens[:, ::8, None])
                size = (probs.sort(-1, descending=True).values.cumsum(-1) <= 0.9).sum(-1) + 1
            rows.append([step.t, float(probs.amax(-1).mean()), float(at_z.mean()), int(size.median())])
            before = step.tokens
        found[name] = [[round(value, 4) for value in row] for row in rows]
        found[f"{name} committed"] = float(step.committed.sum(-1).float().mean())
    return found


# -- times ------------------------------------------------------------------------------------------------------------


def parts(model: Duo, batch: int) -> dict[str, Any]:
    """Milliseconds of each part of a step, launches included, and of the row kernel in several shapes."""
    found: dict[str, Any] = {}
    length, rows = model.length, 5248
    with torch.inference_mode():
        tokens = torch.randint(VOCAB, (batch, length), device=CUDA)
        features = model.backbone(ModelInput(tokens, 0.4))
        found["backbone"] = milliseconds(lambda: model.backbone(ModelInput(tokens, 0.4)), 5)
        few = features.flatten(0, 1)[:rows]
        aligned = AlignedHead(model.network.output_layer.linear)
        found[f"head of {rows} rows, plain"] = milliseconds(lambda: model.network.head(few))
        found[f"head of {rows} rows, aligned"] = milliseconds(lambda: aligned(few))
        late = transition(tokens, inspect=tokens < 0, coins=ancestral(0.6, 0.62))
        call = network_call(late)
        found["plan"] = milliseconds(lambda: fused.plan(late, call))
        deficit = torch.rand(batch, length, dtype=torch.float64, device=CUDA)
        count = torch.full((batch,), 25, device=CUDA)
        budget = torch.full((batch,), 12.2, dtype=torch.float64, device=CUDA)
        found["select 25"] = milliseconds(lambda: fused.select(deficit, tokens >= 0, count, budget, 4))
        found["select 205"] = milliseconds(lambda: fused.select(deficit, tokens >= 0, count * 8, budget * 10, 4))
        found["select in torch"] = milliseconds(lambda: selection.select(deficit, tokens >= 0, count, budget, 4), 4)

        logits = aligned(few)
        short = tokens.flatten()[: 6 * length].view(6, length)
        cases = {
            "inspected": transition(short, coins=ancestral(0.5, 0.5)),  # coin one always stays
            "moved": transition(short, inspect=short < 0, coins=ancestral(0.6, 0.999)),
            "top-p": transition(short, inspect=short < 0, coins=ancestral(0.6, 0.999), support=Support(0.9)),
        }
        chosen = fused.BLOCK, fused.WARPS, fused.REGISTERS
        for (name, case), shape in itertools.product(cases.items(), (chosen, (4096, 16, 64), (4096, 8, 128))):
            planned = fused.plan(case, network_call(case))
            fused.BLOCK, fused.WARPS, fused.REGISTERS = shape
            step = lambda p=planned: fused.advance(lambda r: logits[: len(r)], features[:6], p)  # noqa: E731
            found[f"rows {name}, {' '.join(map(str, shape))}"] = milliseconds(step, 6)
        fused.BLOCK, fused.WARPS, fused.REGISTERS = chosen
    return found


# Samplers whose transitions read few predictions, and samplers that read all of them.
FEW_READ = ("mend", "mend revise_every=1", "psi", "psi rule=constant eta=.5", "ddim", "gibbs")
ALL_READ = (
    "gibbs choose=margin positions=12 corrections=2",
    "trapezoidal",
    "gidd-adaptive",
    "gidd-correction",
    "entropy-bound",
    "block-refinement",
)
CACHED = [f"{name} refresh={calls}" for name in ("native", "native top_p=.9", "crs", "mend") for calls in (4, 8, 16)]
SAMPLERS = {64: {**speed.SAMPLERS, **dict(map(parse, FEW_READ))}, 8: dict(map(parse, ALL_READ))}


def sampler_costs(
    model: Duo, bare: speed.Forward, nfe: int, batch: int, runs: int, samplers: Mapping[str, Sampler]
) -> dict[str, Any]:
    """Samplers beside bare forwards and the native sampler."""
    costs = speed.side_by_side(model, bare, nfe, batch, runs, samplers={"native": Native(), **samplers})
    return {name: asdict(cost) if cost else None for name, cost in costs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this time")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 16, 256, 1])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samplers", action="store_true", help="every sampler at the first batch size, nothing else")
    parser.add_argument(
        "--cached", action="store_true", help="samplers with refresh at the first batch size, nothing else"
    )
    options = parser.parse_args()
    results = ResultFile(options.out, options.seconds)
    found, measure = results.values, results.measure
    found |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": options.runs}

    def timings(model: Duo, bare: speed.Forward, batch: int) -> None:
        for nfe in (64, 8):
            if f"batch {batch} nfe {nfe} bare" in found:
                continue
            with_released = batch == 16 or (batch, nfe) == (64, 8)  # at 64 it does not fit
            costs = speed.side_by_side(model, bare, nfe, batch, options.runs, with_released=with_released)
            for name, cost in costs.items():
                results.save(f"batch {batch} nfe {nfe} {name}", asdict(cost) if cost else {"out of memory": True})

    model = released(device=CUDA, precision="bfloat16")
    bare = torch.compile(model.network, dynamic=False)  # one static graph for each batch size
    if options.samplers:
        measure("check step", check_step)
        measure("check trajectory float32", check_trajectory, "float32")
        measure("check trajectory mend", check_trajectory, "float32", kind=Mend)
        for nfe, samplers in SAMPLERS.items():
            measure(f"samplers {nfe}", sampler_costs, model, bare, nfe, options.batches[0], options.runs, samplers)
        return
    if options.cached:
        samplers = dict(map(parse, ["mend", *CACHED]))
        for nfe in (64, 32):
            measure(f"cached {nfe}", sampler_costs, model, bare, nfe, options.batches[0], options.runs, samplers)
        return
    for batch in options.batches:
        measure(f"timings {batch}", timings, model, bare, batch)
        if batch == options.batches[0]:
            measure("waits", check_waits, model, batch)
            measure("parts", parts, model, batch)
            measure("check step", check_step)
            measure("check select", check_select)
            measure("check distributions", check_distributions)
            measure("check trajectory float32", check_trajectory, "float32")
            measure("check trajectory bfloat16", check_trajectory, "bfloat16")
            measure("check trajectory temperature .8", check_trajectory, "float32", 0.8)
            measure("check non-finite", check_nonfinite)
            measure("check precision", check_precision)
            measure("confidence", confidence, model)


if __name__ == "__main__":
    main()
