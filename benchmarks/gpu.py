"""One GPU run: check the fused step against the others, then time it beside bare forwards and the released step.

    python benchmarks/gpu.py --out benchmarks/results/h200.json

It needs torch, Triton and the package's own source beside it; nothing is downloaded. Every result is written as soon
as it is there, a part that fails does not take the others with it, and a run that was stopped goes on: what --out has
already is not measured again."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from limpet import LimpetError
from limpet.diffusion import selection
from limpet.diffusion.backends import Backend, Input, Outcome, Transition, fused, sparse, testing
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral
from limpet.diffusion.truncation import Support
from limpet.experiments import speed
from limpet.generation import Counted
from limpet.models import Wrapped
from limpet.models.duo import AlignedHead, Duo, Shape
from limpet.samplers import CRS, Mend, Native, Sampler, parse
from limpet.samplers.context import Context as Walk
from limpet.samplers.context import generate, open_context
from trained_like import released, trained_like

CUDA = torch.device("cuda")
VOCAB = 50258


def transition(tokens: Tensor, **changes: Any) -> Transition:
    every = torch.ones_like(tokens, dtype=torch.bool)
    plain: dict[str, Any] = {
        "call": 3,
        "tokens": tokens,
        "revise": every,
        "inspect": every,
        "coins": ancestral(0.4, 0.7),
    }
    return Transition(**(plain | changes))


def shown(asked: Transition, vocab_size: int = VOCAB, convert: bool = False, seed: int = 8200) -> Input:
    rng = CounterRNG(seed, torch.arange(len(asked.tokens), device=CUDA))
    return testing.input_of(asked, vocab_size, rng, convert)


def path_of(model: Any, batch: int, length: int | None = None, backend: Backend | None = None) -> Walk:
    fixed = torch.full((batch, length or model.length), -1, device=CUDA)
    return open_context(model, CounterRNG(8200, torch.arange(batch, device=CUDA)), fixed, backend)


# -- checks -----------------------------------------------------------------------------------------------------------


def check_step() -> dict[str, Any]:
    """Fused against lazy on the same logits and uniforms, the released vocabulary: how many tokens and argmaxes
    differ, and by how much a deficit does, relatively, at most."""
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
        cut = Support(top_p, boundary)
        case = transition(tokens, support=cut, temperature=temperature, coins=ancestral(0.01, 0.7), against=tokens)
        one, other = (
            testing.step(each.BACKEND, logits, case, shown(case, convert=convert)) for each in (sparse, fused)
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


class Spoiled(Wrapped):
    """A model one of whose logits is nan in one call."""

    def __init__(self, inner: Duo, call: int, place: int) -> None:
        super().__init__(inner)
        self.call, self.place, self.calls = call, place, 0

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Any) -> Tensor:
        features = self.inner.body(tokens, t)
        if self.calls == self.call:
            features.view(-1, features.shape[-1])[self.place] = math.nan
        self.calls += 1
        return features


def check_alarm() -> dict[str, str]:
    """What a distribution that is none comes to, where CRS first looks everywhere and in the last call: one sentence each."""
    model, found = Duo(trained_like(Shape(length=256, blocks=2))).to(CUDA), {}
    sampler = CRS(nfe=8)
    for call, place in ((sampler.warmup_calls, 300), (7, 511)):
        spoiled = Spoiled(model, call, place)
        row, position = divmod(place, model.length)
        wanted = f"in call {call} at position {position} of sample {row}"
        try:
            with torch.inference_mode():
                for _ in generate(sampler, path_of(spoiled, 2)):
                    pass
            told = "nothing was raised"
        except LimpetError as error:
            told = f"raised after {spoiled.calls} calls" if wanted in str(error) else f"wrong: {error}"
        found[wanted] = told
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


def check_laws() -> dict[str, float]:
    """A million draws a case against the exact reverse distribution, and the tail of a large distribution; p-values of Pearson's test."""
    found = {}
    distributions = ((0.5, 0.2, 0.2, 0.1, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0), (0.2,) * 5, (0.05, 0.6, 0.15, 0.1, 0.1))
    for (row, values), top_p, boundary in itertools.product(
        enumerate(distributions), (1.0, 0.65), ("released", "paper")
    ):
        probs = torch.tensor(values, dtype=torch.float64)
        fit = testing.fit(fused.BACKEND, probs, Support(top_p, boundary), seed=row, device=CUDA, shape=(1000, 1000))
        found[f"distribution {row} p {top_p} {boundary}"] = fit
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
            fused.BACKEND, tokens[..., None].float(), case, shown(case, len(weights)),
            lambda rows: row.expand(len(rows), -1),
        )  # fmt: skip
        drawn = outcome.tokens
        counts += torch.bincount(drawn.flatten().cpu(), minlength=len(weights))

    def parts(values: Tensor) -> Tensor:
        return torch.cat(
            [values[:25000].view(25, -1).sum(-1), values[25000:25001], values[25001:].view(25, -1).sum(-1)]
        )

    return testing.chi_square(parts(counts), parts(weights / weights.sum()))


def check_path(precision: str, temperature: float = 1.0, kind: type[CRS] = CRS) -> dict[str, Any]:
    """Whole paths, fused and lazy, after the same body. Matrix products may round differently over another number of
    rows, and a path that has parted does not come back, so what is counted is where they differ in the end."""
    model = released(device=CUDA, precision=precision)
    counted = Counted(model), Counted(model)
    sampler, (batch, length) = kind(nfe=16, temperature=temperature), (2, 256)
    with torch.inference_mode():
        *_, (one, _) = generate(sampler, path_of(counted[0], batch, length))
        *_, (other, _) = generate(sampler, path_of(counted[1], batch, length, sparse.BACKEND))
    return {
        "tokens": one.tokens.numel(),
        "tokens differ": int((one.tokens != other.tokens).sum()),
        "committed when": int((one.memory[1] != other.memory[1]).sum()),
        "head rows": [denoiser.rows / sampler.nfe / (batch * length) for denoiser in counted],
    }


def check_precision() -> dict[str, float]:
    """The network in float32 and in bfloat16, each with its fused body and with its own, along a path's noise levels.

    Body: largest difference of features, relative to their root mean square. Distribution: the mean over positions of the
    total variation between the distributions, and of how much of an argmax's probability the other's argmax misses."""
    network = trained_like(Shape()).to(CUDA)
    exact, rounded = (Duo(network, precision=precision) for precision in ("float32", "bfloat16"))
    tokens = torch.randint(VOCAB, (2, exact.length), generator=torch.Generator(CUDA).manual_seed(3), device=CUDA)
    found: dict[str, float] = {}
    with torch.inference_mode():
        for t in (0.9, 0.5, 0.1):
            sigma = exact.schedule.sigma(t).float().to(CUDA).expand(2)
            for name, model in (("float32", exact), ("bfloat16", rounded)):
                own = model.network.body(tokens, sigma).double()
                fused = model.body(tokens, t).double()
                found[f"body {name} t {t}"] = float((fused - own).abs().max() / own.square().mean().sqrt())
            one, other = (model.logits(tokens, t).double().softmax(-1) for model in (exact, rounded))
            found[f"distribution variation t {t}"] = float((one - other).abs().sum(-1).mean() / 2)
            chosen = one.gather(-1, other.argmax(-1, keepdim=True))[..., 0]
            found[f"argmax misses t {t}"] = float((one.amax(-1) - chosen).mean())
    return found


def check_waits(model: Duo, batch: int) -> dict[str, float]:
    """A path with every hidden synchronisation made an error; then what share of its time the device computes."""
    sampler = CRS(nfe=6)

    def path() -> None:
        """Every call; what follows them, that all distributions were distributions, waits for the device by intent."""
        for _ in itertools.islice(generate(sampler, path_of(model, batch)), sampler.nfe):
            pass

    with torch.inference_mode():
        path()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            path()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            path()
            torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type.name == "CUDA")
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=16, max_name_column_width=70))
    return {"busy": busy / (reached - spans[0][0]), "milliseconds": (reached - spans[0][0]) / 1000}


def confidence(model: Duo) -> dict[str, Any]:
    """Along native and CRS paths: t, the mean largest probability, the mean h(z), the median size of the .9 nucleus."""
    found: dict[str, Any] = {}
    for name in ("native", "CRS"):
        sampler, path = speed.SAMPLERS[name].replace(nfe=9), path_of(model, 2)
        assert isinstance(sampler, Native)
        rows = []
        with torch.inference_mode():
            state = sampler.begin(path)
            while state.call < 8:
                before, (state, info) = state, sampler.step(path, state)
                probs = model.logits(info.input, info.t)[:, ::8].softmax(-1)
                at_z = probs.gather(-1, before.tokens[:, ::8, None])
                size = (probs.sort(-1, descending=True).values.cumsum(-1) <= 0.9).sum(-1) + 1
                rows.append([info.t, float(probs.amax(-1).mean()), float(at_z.mean()), int(size.median())])
        found[name] = [[round(value, 4) for value in row] for row in rows]
        committed = state.memory[1] <= 8 if state.memory else path.no_positions
        found[f"{name} committed"] = float(committed.sum(-1).float().mean())
    return found


# -- times ------------------------------------------------------------------------------------------------------------


def milliseconds(function: Callable[[], object], repeats: int = 12) -> float:
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def parts(model: Duo, batch: int) -> dict[str, Any]:
    """Milliseconds of each part of a step, launches included, and of the row kernel in several shapes."""
    found: dict[str, Any] = {}
    length, rows = model.length, 5248
    with torch.inference_mode():
        tokens = torch.randint(VOCAB, (batch, length), device=CUDA)
        features = model.body(tokens, 0.4)
        found["body"] = milliseconds(lambda: model.body(tokens, 0.4), 5)
        few = features.flatten(0, 1)[:rows]
        aligned = AlignedHead(model.network.output_layer.linear)
        found[f"head of {rows} rows, plain"] = milliseconds(lambda: model.network.head(few))
        found[f"head of {rows} rows, aligned"] = milliseconds(lambda: aligned(few))
        late = transition(tokens, inspect=tokens < 0, coins=ancestral(0.6, 0.62))
        input = shown(late)
        found["plan"] = milliseconds(lambda: fused.plan(late, input))
        deficit = torch.rand(batch, length, dtype=torch.float64, device=CUDA)
        count = torch.full((batch,), 25, device=CUDA)
        budget = torch.full((batch,), 12.2, dtype=torch.float64, device=CUDA)
        found["select 25"] = milliseconds(lambda: fused.select(deficit, tokens >= 0, count, budget, 4))
        found["select 205"] = milliseconds(lambda: fused.select(deficit, tokens >= 0, count * 8, budget * 10, 4))
        found["select in torch"] = milliseconds(lambda: selection.select(deficit, tokens >= 0, count, budget, 4), 4)

        logits = aligned(few)
        short = tokens.flatten()[: 6 * length].view(6, length)
        cases = {
            "looked at": transition(short, coins=ancestral(0.5, 0.5)),  # coin one always stays
            "moved": transition(short, inspect=short < 0, coins=ancestral(0.6, 0.999)),
            "top-p": transition(short, inspect=short < 0, coins=ancestral(0.6, 0.999), support=Support(0.9)),
        }
        chosen = fused.BLOCK, fused.WARPS, fused.REGISTERS
        for (name, case), shape in itertools.product(cases.items(), (chosen, (4096, 16, 64), (4096, 8, 128))):
            planned = fused.plan(case, shown(case))
            fused.BLOCK, fused.WARPS, fused.REGISTERS = shape
            step = lambda p=planned: fused.advance(lambda r: logits[: len(r)], features[:6], p)  # noqa: E731
            found[f"rows {name}, {' '.join(map(str, shape))}"] = milliseconds(step, 6)
        fused.BLOCK, fused.WARPS, fused.REGISTERS = chosen
    return found


# Samplers that the router draws, and samplers that read every distribution.
ARMS = ("mend", "mend turns=1", "psi", "psi rule=constant eta=.5", "ddim", "gibbs")
ROUTER = {**speed.SAMPLERS, **dict(map(parse, ARMS))}
READERS = dict(map(parse, (
    "gibbs choose=margin positions=12 corrections=2", "trapezoidal", "gidd-adaptive", "gidd-correction",
    "entropy-bound", "block-refinement",
)))  # fmt: skip


def field(
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
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    found |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "runs": options.runs}

    def save(name: str, value: Any) -> None:
        found[name] = value
        options.out.write_text(json.dumps(found, indent=1) + "\n")
        print(f"[{time.monotonic() - started:6.1f}s] {name}: {json.dumps(value)}", flush=True)

    def section(name: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        if name in found:
            return
        if time.monotonic() - started > options.seconds:
            print(f"no time for {name}")
            return
        try:
            result = function(*arguments, **named)
            if result is not None:
                save(name, result)
        except Exception:
            traceback.print_exc()
            print(f"FAILED: {name}", flush=True)
        torch.cuda.empty_cache()

    def timings(model: Duo, bare: speed.Forward, batch: int) -> None:
        for nfe in (64, 8):
            if f"batch {batch} nfe {nfe} bare" in found:
                continue
            released = batch == 16 or (batch, nfe) == (64, 8)  # at 64 it shows that it does not fit
            costs = speed.side_by_side(model, bare, nfe, batch, options.runs, with_released=released)
            for name, cost in costs.items():
                save(f"batch {batch} nfe {nfe} {name}", asdict(cost) if cost else {"out of memory": True})

    model = released(device=CUDA, precision="bfloat16")
    bare = torch.compile(model.network, dynamic=False)  # one static graph for each batch size
    if options.samplers:
        section("check step", check_step)
        section("check path float32", check_path, "float32")
        section("check path mend", check_path, "float32", kind=Mend)
        for nfe, samplers in ((64, ROUTER), (8, READERS)):
            section(f"samplers {nfe}", field, model, bare, nfe, options.batches[0], options.runs, samplers)
        return
    for batch in options.batches:
        section(f"timings {batch}", timings, model, bare, batch)
        if batch == options.batches[0]:
            section("waits", check_waits, model, batch)
            section("parts", parts, model, batch)
            section("check step", check_step)
            section("check select", check_select)
            section("check distributions", check_laws)
            section("check path float32", check_path, "float32")
            section("check path bfloat16", check_path, "bfloat16")
            section("check path temperature .8", check_path, "float32", 0.8)
            section("check alarm", check_alarm)
            section("check precision", check_precision)
            section("confidence", confidence, model)


if __name__ == "__main__":
    main()
