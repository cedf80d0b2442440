"""What a generation costs, measured beside the same number of bare forwards, and a step's arithmetic beside others'."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.diffusion.backends import Backend, Transition, released, testing
from limpet.diffusion.rng import CounterRNG
from limpet.diffusion.transitions import ancestral
from limpet.generation import Counted
from limpet.models import Denoiser, Needed, Wrapped
from limpet.models.duo import Duo
from limpet.samplers import CRS, Native, Sampler
from limpet.samplers.context import generate, open_context

SAMPLERS: dict[str, Sampler] = {"native": Native(), "top-p .9": Native(top_p=0.9), "CRS": CRS()}
WARM = 4  # calls before the clock starts, so that everything has compiled
SEED = 8200

Forward = Callable[[Tensor, Tensor], Tensor]  # (B, L) tokens, (B,) sigma -> (B, L, V) logits
Calls = Callable[[int], Iterator[float]]  # this many calls of the network, one by one, each with its share of head rows


@dataclass(frozen=True)
class Cost:
    """What some calls of the network cost, the median of a few runs."""

    seconds: float
    ratio: float  # to as many bare forwards
    ratios: tuple[float, ...]  # of each run
    peak_gib: float | None  # allocated on the GPU, weights included; None on a CPU
    tokens_per_second: float  # generated
    head_rows: float  # rows of the head evaluated, as a fraction of calls x tokens


class Bare(Wrapped):
    """A denoiser whose body is a bare forward, head and all: its features are the logits."""

    def __init__(self, model: Duo, forward: Forward) -> None:
        super().__init__(model)
        self.forward = forward

    def body_at(self, tokens: Tensor, t: float | Tensor, needed: Needed) -> Tensor:
        return self.forward(tokens, torch.full(tokens.shape[:1], float(self.schedule.sigma(t)), device=tokens.device))

    def head(self, features: Tensor) -> Tensor:
        return features


def generation(model: Denoiser, sampler: Sampler, batch: int, backend: Backend | None = None) -> Calls:
    """Whole generations of one batch, from noise to the final step."""

    def calls(nfe: int) -> Iterator[float]:
        counted = Counted(model)
        fixed = torch.full((batch, model.length), -1, device=model.device)
        rng = CounterRNG(SEED, torch.arange(batch, device=model.device))
        for _ in generate(sampler.replace(nfe=nfe), open_context(counted, rng, fixed, backend)):
            yield counted.rows / fixed.numel()
            counted.rows = 0

    return calls


def forwards(model: Duo, forward: Forward, batch: int) -> Calls:
    """Forwards with the head at every position, and nothing else."""
    tokens = torch.randint(model.vocab_size, (batch, model.length), device=model.device)
    sigma = torch.full((batch,), 0.7, device=model.device)

    def calls(nfe: int) -> Iterator[float]:
        for _ in range(nfe):
            forward(tokens, sigma)
            yield 1.0

    return calls


def side_by_side(
    model: Duo,
    bare: Forward,
    nfe: int,
    batch: int,
    runs: int,
    with_released: bool = False,
    samplers: Mapping[str, Sampler] = SAMPLERS,
) -> dict[str, Cost | None]:
    """Every sampler beside bare forwards, in turns, so that what slows one down slows the others; None for what does
    not fit in memory. `bare` is what there is without limpet; on a GPU the model's own body and head, at every
    position, stand beside. The released step goes round the bare forward."""
    contenders = {"bare": forwards(model, bare, batch)}
    if model.device.type == "cuda":
        contenders["own forward"] = forwards(model, lambda tokens, _: model.head(model.body(tokens, 0.5)), batch)
    contenders |= {name: generation(model, sampler, batch) for name, sampler in samplers.items()}
    if with_released:
        contenders |= released_generations(model, bare, batch, samplers)
    return measure(contenders, nfe, batch * model.length, runs, model.device)


def released_generations(model: Duo, bare: Forward, batch: int, samplers: Mapping[str, Sampler]) -> dict[str, Calls]:
    """Those of the samplers that were released, with the released step round a bare forward."""
    around = Bare(model, bare)
    return {
        f"released {name}": generation(around, sampler.replace(final_step="sample"), batch, released.BACKEND)
        for name, sampler in samplers.items()
        if type(sampler) is Native
    }


def measure(
    contenders: Mapping[str, Calls], nfe: int, tokens: int, runs: int, device: torch.device
) -> dict[str, Cost | None]:
    """Run the contenders in turns; the first is what the others are compared with. On a CPU a turn is one call, so
    that what slows the machine down for a while slows all of them; on a GPU, where calls are launched and not waited
    for, it is a whole generation."""
    groups = [list(contenders)] if device.type == "cpu" else [[name] for name in contenders]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, float | None] = {}
    rows: dict[str, float] = {}
    too_large: set[str] = set()

    def run(names: list[str], nfe: int) -> dict[str, float]:
        """The seconds of those that fit."""
        taken, shares = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        running = {name: contenders[name](nfe) for name in names}
        for number, name in itertools.product(range(nfe), names):
            if name in too_large:
                continue
            begun = time.perf_counter()
            try:
                shares[name] += next(running[name])
                if number == nfe - 1:
                    peaks[name] = _peak(device)
            except torch.OutOfMemoryError:
                too_large.add(name)
            taken[name] += time.perf_counter() - begun
        rows.update((name, share / nfe) for name, share in shares.items())
        return {name: total for name, total in taken.items() if name not in too_large}

    with torch.inference_mode():
        for turn, group in itertools.product(range(runs), groups):
            if turn == 0:
                run(group, min(nfe, WARM))
            _settle(device)
            for name, total in run(group, nfe).items():
                seconds[name].append(total)
    first = seconds[next(iter(contenders))]

    def cost(name: str, taken: list[float]) -> Cost:
        ratios = tuple(own / base for own, base in zip(taken, first, strict=True))
        middle = statistics.median(taken)
        return Cost(middle, statistics.median(ratios), ratios, peaks[name], tokens / middle, rows[name])

    return {name: None if name in too_large else cost(name, taken) for name, taken in seconds.items()}


def _settle(device: torch.device) -> None:
    """Let the device finish, and forget its highest use of memory."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float | None:
    """Let the device finish; the most memory allocated, in GiB."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def arithmetic(
    backends: Mapping[str, Backend], shape: tuple[int, int, int], steps: int, device: str = "cpu"
) -> dict[str, float]:
    """Seconds that each backend takes over some steps of a native 64-call path, its logits given."""
    batch, length, vocab_size = shape
    generator = torch.Generator(device).manual_seed(SEED)
    logits = 4 * torch.randn(shape, generator=generator, device=device)
    tokens = torch.randint(vocab_size, (batch, length), generator=generator, device=device)
    every = torch.ones_like(tokens, dtype=torch.bool)
    rng = CounterRNG(SEED, torch.arange(batch, device=device))
    taken = dict.fromkeys(backends, 0.0)
    for call in range(63 // steps // 2, 63, 63 // steps):
        transition = Transition(call, tokens, every, ~every, ancestral((call + 1) / 65, (call + 2) / 65))
        input = testing.input_of(transition, vocab_size, rng)
        for name, backend in backends.items():
            testing.step(backend, logits, transition, input)  # memory and kernels are there when the clock starts
            _settle(logits.device)
            begun = time.perf_counter()
            testing.step(backend, logits, transition, input)
            _peak(logits.device)
            taken[name] += time.perf_counter() - begun
    return taken
