"""What sampling costs: whole generations timed beside as many bare forwards, and the arithmetic of single steps."""

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
from limpet.generation import SEED, CountingDenoiser, Inputs, rollout
from limpet.models import Denoiser, ModelInput, WrappedDenoiser
from limpet.models.duo import Duo
from limpet.samplers import CRS, Native, Sampler

SAMPLERS: dict[str, Sampler] = {"native": Native(), "top-p .9": Native(top_p=0.9), "CRS": CRS()}
WARMUP_CALLS = 4  # before the clock starts, so that everything has compiled

Forward = Callable[[Tensor, Tensor], Tensor]  # (B, L) tokens, (B,) sigma -> (B, L, V) logits
# (number of calls) -> after each network call, the share of positions whose head it evaluated
TimedCalls = Callable[[int], Iterator[float]]


@dataclass(frozen=True)
class CallCost:
    """What some network calls cost: the median of a few runs."""

    seconds: float
    ratio: float  # to as many bare forwards
    ratios: tuple[float, ...]  # of each run
    peak_gib: float | None  # allocated on the GPU, weights included; None on a CPU
    tokens_per_second: float  # generated
    head_rows: float  # rows of the head evaluated, as a fraction of calls x tokens


class BareForward(WrappedDenoiser):
    """A denoiser whose backbone is a bare forward with the head: its features are the logits."""

    def __init__(self, model: Duo, forward: Forward) -> None:
        super().__init__(model)
        self.forward = forward

    def backbone(self, inputs: ModelInput) -> Tensor:
        tokens, sigma = inputs.tokens, float(self.schedule.sigma(inputs.t))
        return self.forward(tokens, torch.full(tokens.shape[:1], sigma, device=tokens.device))

    def head(self, features: Tensor) -> Tensor:
        return features


def generation(model: Denoiser, sampler: Sampler, batch: int, backend: Backend | None = None) -> TimedCalls:
    """Whole generations of one batch, from noise to the final step."""

    def calls(nfe: int) -> Iterator[float]:
        counting = CountingDenoiser(model)
        fixed = torch.full((batch, model.length), -1, device=model.device)
        rng = CounterRNG(SEED, torch.arange(batch, device=model.device))
        for _ in rollout(counting, sampler.replace(nfe=nfe), Inputs(fixed, rng, backend=backend)):
            yield counting.rows / fixed.numel()
            counting.rows = 0

    return calls


def forwards(model: Duo, forward: Forward, batch: int) -> TimedCalls:
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
) -> dict[str, CallCost | None]:
    """Time every sampler beside bare forwards, alternately, so that other load slows all of them.

    bare: the forward without limpet. runs: how often each is timed. with_released: also time the released sampler's
    step around the bare forward. On a GPU the model's own backbone and head at every position are timed too. The cost
    of what does not fit in memory is None."""
    contenders = {"bare": forwards(model, bare, batch)}
    if model.device.type == "cuda":
        own = forwards(model, lambda tokens, _: model.head(model.backbone(ModelInput(tokens, 0.5))), batch)
        contenders["own forward"] = own
    contenders |= {name: generation(model, sampler, batch) for name, sampler in samplers.items()}
    if with_released:
        contenders |= released_generations(model, bare, batch, samplers)
    return measure(contenders, nfe, batch * model.length, runs, model.device)


def released_generations(
    model: Duo, bare: Forward, batch: int, samplers: Mapping[str, Sampler]
) -> dict[str, TimedCalls]:
    """The native samplers, with the released step around a bare forward."""
    around = BareForward(model, bare)
    return {
        f"released {name}": generation(around, sampler.replace(final_step="sample"), batch, released.BACKEND)
        for name, sampler in samplers.items()
        if type(sampler) is Native
    }


def measure(
    contenders: Mapping[str, TimedCalls], nfe: int, tokens: int, runs: int, device: torch.device
) -> dict[str, CallCost | None]:
    """Run the contenders alternately and compare them with the first.

    On a CPU they alternate after every call, so that other load slows all of them. On a GPU, where calls are launched
    and not waited for, they alternate after a whole generation."""
    groups = [list(contenders)] if device.type == "cpu" else [[name] for name in contenders]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, float | None] = {}
    rows: dict[str, float] = {}
    too_large: set[str] = set()

    def run(names: list[str], nfe: int) -> dict[str, float]:
        """The seconds of each contender that fits in memory."""
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
                run(group, min(nfe, WARMUP_CALLS))
            _settle(device)
            for name, total in run(group, nfe).items():
                seconds[name].append(total)
    first = seconds[next(iter(contenders))]

    def cost(name: str, taken: list[float]) -> CallCost:
        ratios = tuple(own / base for own, base in zip(taken, first, strict=True))
        middle = statistics.median(taken)
        return CallCost(middle, statistics.median(ratios), ratios, peaks[name], tokens / middle, rows[name])

    return {name: None if name in too_large else cost(name, taken) for name, taken in seconds.items()}


def _settle(device: torch.device) -> None:
    """Wait for the device and reset its peak memory."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float | None:
    """Wait for the device; the peak of allocated memory in GiB, None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def arithmetic(
    backends: Mapping[str, Backend], shape: tuple[int, int, int], steps: int, device: str = "cpu"
) -> dict[str, float]:
    """Seconds that each backend takes for some steps of a native trajectory of 64 calls, without the network."""
    batch, length, vocab_size = shape
    generator = torch.Generator(device).manual_seed(SEED)
    logits = 4 * torch.randn(shape, generator=generator, device=device)
    tokens = torch.randint(vocab_size, (batch, length), generator=generator, device=device)
    every = torch.ones_like(tokens, dtype=torch.bool)
    rng = CounterRNG(SEED, torch.arange(batch, device=device))
    taken = dict.fromkeys(backends, 0.0)
    for call in range(63 // steps // 2, 63, 63 // steps):
        transition = Transition(call, tokens, every, ~every, ancestral((call + 1) / 65, (call + 2) / 65))
        network_call = testing.network_call(transition, vocab_size, rng)
        for name, backend in backends.items():
            testing.step(backend, logits, transition, network_call)  # compiles kernels before the clock starts
            _settle(logits.device)
            begun = time.perf_counter()
            testing.step(backend, logits, transition, network_call)
            _peak(logits.device)
            taken[name] += time.perf_counter() - begun
    return taken
