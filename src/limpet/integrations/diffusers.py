"""Committed reveal sampling inside diffusers: schedulers that its stock pipelines take as they are.

A pipeline calls the network and asks the scheduler for the next canvas. The labels that CRS writes over its state are
on that canvas; the state itself, and what was committed when, the scheduler keeps between steps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from limpet.diffusion.process import LINEAR, seen_signal
from limpet.diffusion.rng import SEEDS, CounterRNG, canvas_seed
from limpet.errors import LimpetError, extra
from limpet.models import Denoiser
from limpet.samplers import CRS, Mend
from limpet.samplers.context import State, open_context
from limpet.samplers.params import known, params

diffusers = extra("diffusers", "diffusers")
outputs, configuration = extra("diffusers.utils", "diffusers"), extra("diffusers.configuration_utils", "diffusers")

RUN = {"num_inference_steps": 48, "seed": None}  # what a scheduler is told beside its sampler's parameters


@dataclass
class CommittedRevealOutput(outputs.BaseOutput):  # type: ignore[misc, name-defined]
    """What a step returns."""

    prev_sample: Tensor  # (B, L) the canvas that the network sees next: the state with its labels; at last, the text
    pred_logits: Tensor  # (B, L, V) as the network gave them, for its self-conditioning
    committed: Tensor  # (B, L) bool: where a label is stored


class Said(Denoiser):
    """A denoiser that has been called already: its distributions are what it said then. It is told no time."""

    name, digest, schedule, predicts = "the pipeline's model", "the pipeline's model", LINEAR, "posterior"

    def __init__(self, logits: Tensor) -> None:
        self.said = logits
        self.length, self.vocab_size = int(logits.shape[1]), int(logits.shape[2])

    @property
    def device(self) -> torch.device:
        return self.said.device

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.said

    def head(self, features: Tensor) -> Tensor:
        return features

    def evidence(self, signal: float | Tensor, clean: Tensor) -> Tensor:
        return seen_signal(signal, clean)


def _signature(kind: type[CRS]) -> inspect.Signature:
    """Of `__init__`, for diffusers, which reads off it what is saved and loaded: the sampler's parameters."""
    given = {**RUN, **{name: param.default for name, param in params(kind).items() if name != "nfe"}}
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter("self", place), *(
        inspect.Parameter(name, place, default=default) for name, default in given.items())])  # fmt: skip


def _configured(kind: type[CRS]) -> Any:
    def init(self: Any, *values: Any, **given: Any) -> None:
        known(kind, {name: value for name, value in given.items() if name not in RUN}, type(self).__name__)
        seed = self.config.seed
        if seed is not None and not (type(seed) is int and 0 <= seed < SEEDS):
            raise LimpetError(f"seed is {seed!r}; it takes a whole number from 0, of at most 64 bits, or None")
        self.begin_run(self.config.num_inference_steps)

    init.__signature__ = _signature(kind)  # type: ignore[attr-defined]
    return configuration.register_to_config(init)


class CommittedRevealScheduler(diffusers.SchedulerMixin, diffusers.ConfigMixin):  # type: ignore[misc, name-defined]
    """CRS as a scheduler. Its settings are the sampler's parameters (`limpet samplers crs`) and `seed`: with one, a canvas
    is a function of it, of the row and of the canvas's number; without, each canvas draws its seed from the pipeline's
    generator."""

    sampler: ClassVar[type[CRS]] = CRS
    order = 1
    rng: CounterRNG  # of the canvas
    given: Tensor  # (B, L) the canvas as it was returned
    finished: Tensor  # (B, 1) bool: rows that came back other than that
    __init__ = _configured(CRS)

    def begin_run(self, calls: int) -> None:
        own = {name: self.config[name] for name in params(self.sampler) if name != "nfe"}
        self.walked = self.sampler(nfe=calls, **own)
        self.num_inference_steps, self.timesteps = calls, torch.arange(calls)
        self.canvas = -1
        self.state: State | None = None

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """So many calls of the network a canvas, from 2."""
        self.begin_run(num_inference_steps)
        self.timesteps = self.timesteps.to(device)

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        *,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> CommittedRevealOutput | tuple[Tensor, Tensor, Tensor]:
        """From the logits (B, L, V) of a posterior, and the canvas (B, L) that the network saw, to the next canvas.

        Step 0 begins a canvas. A row that comes back other than it was given has been finished by the pipeline (its
        early stop writes the argmax there), and is left alone."""
        call = int(timestep)
        if call == 0:
            self._begin_canvas(sample, generator)
        if self.state is None or self.state.call != call:
            expected = 0 if self.state is None else self.state.call
            raise LimpetError(f"step {call} of a canvas came after {expected} steps: ask for them in turn, from 0")
        self.finished |= (sample != self.given).any(-1, keepdim=True)
        ctx = open_context(Said(model_output), self.rng, torch.full_like(sample, -1))
        with torch.no_grad():
            self.state, _ = self.walked.step(ctx, self.state)
            ctx.check_finite()
            shown = self.state.tokens if self.state.call == self.walked.nfe else self.walked.seen(self.state)
        self.given = torch.where(self.finished, sample, shown)
        told = CommittedRevealOutput(self.given, model_output, self.state.memory[1] <= call)
        return told if return_dict else (told.prev_sample, told.pred_logits, told.committed)

    def _begin_canvas(self, sample: Tensor, generator: torch.Generator | None) -> None:
        self.canvas += 1
        if self.config.seed is None:
            place = sample.device if generator is None else generator.device
            seed = int(torch.empty((), dtype=torch.long, device=place).random_(generator=generator))
        else:
            seed = canvas_seed(self.config.seed, self.canvas)
        self.rng = CounterRNG(seed, torch.arange(len(sample), device=sample.device))
        ctx = open_context(Said(sample[..., None].expand(-1, -1, 2)), self.rng, torch.full_like(sample, -1))
        self.state = self.walked.begin(ctx)._replace(tokens=sample)
        self.given, self.finished = sample, torch.zeros_like(sample[:, :1], dtype=torch.bool)


class MendScheduler(CommittedRevealScheduler):
    """Mend as a scheduler: CRS whose labels can change their mind."""

    sampler = Mend
    __init__ = _configured(Mend)
