"""What a generation costs, measured beside the same number of bare forwards, and a step's arithmetic beside others'."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from limpet import sampler
from limpet.denoisers import Denoiser
from limpet.denoisers.duo import Block, Duo, Linear, Network, Shape
from limpet.policy import Policy
from limpet.samples import Counted, prepare
from limpet.steps import Backend, Transition, released
from limpet.streams import Stream

POLICIES = {"native": Policy(horizon=0), "top-p .9": Policy(horizon=0, top_p=0.9), "CRS": Policy()}
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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Whole(Denoiser):
    """A denoiser whose body is a bare forward, head and all: its features are the logits."""

    def __init__(self, model: Duo, forward: Forward) -> None:
        self.vocab_size, self.length, self.predicts, self.schedule = (
            model.vocab_size, model.length, model.predicts, model.schedule,
        )  # fmt: skip
        self.model, self.forward = model, forward

    @property
    def device(self) -> torch.device:
        return self.model.device

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.forward(tokens, torch.full(tokens.shape[:1], float(self.schedule.sigma(t)), device=tokens.device))

    def head(self, features: Tensor) -> Tensor:
        return features


def generation(model: Denoiser, policy: Policy, batch: int, advance: Backend | None = None) -> Calls:
    """Whole generations of one batch, from noise to the readout."""

    def calls(nfe: int) -> Iterator[float]:
        counted = Counted(model)
        fixed = torch.full((batch, model.length), -1, device=model.device)
        stream = Stream(SEED, torch.arange(batch, device=model.device))
        for _ in sampler.generate(prepare(counted, policy.but(nfe=nfe), stream, fixed, advance=advance)):
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
    model: Duo, bare: Forward, nfe: int, batch: int, runs: int, with_released: bool = False
) -> dict[str, Cost | None]:
    """Every policy beside bare forwards, in turns, so that what slows one down slows the others; None for what does
    not fit in memory. `bare` is what there is without limpet; on a GPU the model's own body and head, at every
    position, stand beside. The released step goes round the bare forward."""
    contenders = {"bare": forwards(model, bare, batch)}
    if model.device.type == "cuda":
        contenders["own forward"] = forwards(model, lambda tokens, _: model.head(model.body(tokens, 0.5)), batch)
    contenders |= {name: generation(model, policy, batch) for name, policy in POLICIES.items()}
    if with_released:
        whole = Whole(model, bare)
        contenders |= {
            f"released {name}": generation(whole, policy.but(endpoint="ancestral"), batch, released.advance)
            for name, policy in POLICIES.items()
            if policy.horizon == 0
        }
    return measure(contenders, nfe, batch * model.length, runs, model.device)


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
        return Cost(
            seconds=statistics.median(taken),
            ratio=statistics.median(ratios),
            ratios=ratios,
            peak_gib=peaks[name],
            tokens_per_second=tokens / statistics.median(taken),
            head_rows=rows[name],
        )

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
    """Seconds that each backend takes over some steps of a native 64-call path, its logits given: no network at all."""
    batch, length, vocab_size = shape
    generator = torch.Generator(device).manual_seed(SEED)
    logits = 4 * torch.randn(shape, generator=generator, device=device)
    tokens = torch.randint(vocab_size, (batch, length), generator=generator, device=device)
    every = torch.ones_like(tokens, dtype=torch.bool)
    start = Transition(
        tokens=tokens, seen=tokens, revise=every, inspect=~every, vocab_size=vocab_size, signal_t=0.0, signal_s=0.0,
        top_p=1.0, boundary="released", convert=False, stream=Stream(SEED, torch.arange(batch, device=device)), step=0,
    )  # fmt: skip
    taken = dict.fromkeys(backends, 0.0)
    for step in range(63 // steps // 2, 63, 63 // steps):
        transition = replace(start, signal_t=(step + 1) / 65, signal_s=(step + 2) / 65, step=step)
        for name, advance in backends.items():
            advance(lambda rows: rows, logits, transition)  # memory is there, and kernels are, when the clock starts
            _settle(logits.device)
            begun = time.perf_counter()
            advance(lambda rows: rows, logits, transition)
            _peak(logits.device)
            taken[name] += time.perf_counter() - begun
    return taken


def trained_like(shape: Shape, seed: int = 0) -> Network:
    """Random weights whose laws have the confidence of a trained model's, so that a path costs what it would cost.

    The head is the embedding, scaled: logits are then normal with one outlier, the input's own token. The noise level
    reaches the network through one conditioning feature, about 2.7 at clean text and 0 at noise: it raises the last
    scale, so laws sharpen along the path, and lowers the gates of the blocks, so that tokens come to favour
    themselves. The numbers were set until the mean largest probability and the chance of the input's own token ran
    along a path of the released size roughly as the built-in model's do."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        network = Network(shape)
        width, embedding = shape.width, network.vocab_embed.embedding
        first, second = cast(Linear, network.sigma_map.mlp[0]), cast(Linear, network.sigma_map.mlp[2])
        for parameter in network.sigma_map.parameters():
            parameter.zero_()
        first.weight[0, network.sigma_map.FREQUENCIES + 32] = -12.0  # the sine of sigma / 10
        first.bias[0] = 3.0
        second.weight[0, 0] = 1.0
        for block in cast(list[Block], network.blocks):
            cast(Linear, block.mlp[0]).bias.zero_()  # what all positions share would make all laws alike
            cast(Linear, block.mlp[2]).bias.zero_()
            for gate in (slice(2 * width, 3 * width), slice(5 * width, 6 * width)):
                block.adaLN_modulation.bias[gate] = 0.35
                block.adaLN_modulation.weight[gate, 0] = -0.06
        output = network.output_layer
        output.linear.weight.copy_(3.3 * math.sqrt(3) * embedding)  # logits of standard deviation 3.3 at noise
        output.adaLN_modulation.weight[width:, 0] = 0.35
    return network
