"""Committed reveal sampling inside diffusers: schedulers for its DiffusionGemma pipeline.

The pipeline calls the network, and asks the scheduler for the next canvas. The canvas that the network reads has CRS's
committed tokens written in. The scheduler itself keeps the noisy state and the commitments between steps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from limpet.diffusion.process import LINEAR, inferred_signal
from limpet.diffusion.rng import SEED_LIMIT, CounterRNG, canvas_seed
from limpet.errors import LimpetError, import_extra
from limpet.generation import Inputs, context_of, rollout
from limpet.models import Denoiser, ModelInput
from limpet.samplers import CRS, Mend, State, params
from limpet.samplers.params import check_names

diffusers = import_extra("diffusers", "diffusers")
outputs, configuration = (
    import_extra("diffusers.utils", "diffusers"),
    import_extra("diffusers.configuration_utils", "diffusers"),
)

SETTINGS = {"num_inference_steps": 48, "seed": None}  # of a scheduler, beside its sampler's parameters


@dataclass
class CommittedRevealOutput(outputs.BaseOutput):  # type: ignore[misc, name-defined]
    """What a step returns."""

    prev_sample: Tensor  # (B, L) the canvas that the network reads next; after the last step, the output
    pred_logits: Tensor  # (B, L, V) as the network returned them, for its self-conditioning
    committed: Tensor  # (B, L) bool: where a token is committed


class PipelinePrediction(Denoiser):
    """The logits of the pipeline's network as a denoiser. The network is not given the time."""

    name, digest, schedule, predicts = "the pipeline's model", "the pipeline's model", LINEAR, "posterior"

    def __init__(self, logits: Tensor) -> None:
        self.predicted = logits
        self.length, self.vocab_size = int(logits.shape[1]), int(logits.shape[2])
        self.device = logits.device

    def backbone(self, inputs: ModelInput) -> Tensor:
        return self.predicted

    def head(self, features: Tensor) -> Tensor:
        return features

    def evidence_signal(self, signal: float | Tensor, clean_share: Tensor) -> float | Tensor:
        return inferred_signal(signal, clean_share)


def _signature(kind: type[CRS]) -> inspect.Signature:
    """The signature of `__init__`, from which diffusers reads what to save and load."""
    defaults = {**SETTINGS, **{name: param.default for name, param in params(kind).items() if name != "nfe"}}
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [inspect.Parameter(name, place, default=default) for name, default in defaults.items()]
    return inspect.Signature([inspect.Parameter("self", place), *own])


def _init(kind: type[CRS]) -> Any:
    """The `__init__` of a scheduler for this sampler."""

    def init(self: Any, *values: Any, **named: Any) -> None:
        check_names(kind, {name: value for name, value in named.items() if name not in SETTINGS}, type(self).__name__)
        seed = self.config.seed
        if seed is not None and not (type(seed) is int and 0 <= seed < SEED_LIMIT):
            raise LimpetError(f"seed is {seed!r}; it takes a whole number from 0, of at most 64 bits, or None")
        self.restart(self.config.num_inference_steps)

    init.__signature__ = _signature(kind)  # type: ignore[attr-defined]
    return configuration.register_to_config(init)


class CommittedRevealScheduler(diffusers.SchedulerMixin, diffusers.ConfigMixin):  # type: ignore[misc, name-defined]
    """CRS as a scheduler. Its settings are the parameters of the sampler (`limpet samplers crs`) and `seed`.

    With a seed, a canvas is a function of the seed, the row and the number of the canvas. Without one, each canvas
    draws its seed from the pipeline's generator."""

    kind: ClassVar[type[CRS]] = CRS
    order = 1
    rng: CounterRNG  # of the canvas
    returned: Tensor  # (B, L) the canvas as the last step returned it
    finished: Tensor  # (B, 1) bool: rows that the pipeline has changed since
    __init__ = _init(CRS)

    def restart(self, calls: int) -> None:
        """Begin again, with this many calls for each canvas."""
        own = {name: self.config[name] for name in params(self.kind) if name != "nfe"}
        self.sampler = self.kind(nfe=calls, **own)
        self.num_inference_steps, self.timesteps = calls, torch.arange(calls)
        self.canvas = -1
        self.state: State | None = None

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Set the number of network calls for each canvas, at least 2."""
        self.restart(num_inference_steps)
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
        """The next canvas, from the logits (B, L, V) of a posterior and the canvas (B, L) that the network read.

        Step 0 begins a canvas. A row that differs from what the last step returned has been finished by the pipeline,
        whose early stop writes the argmax there; such a row stays as it is."""
        call = int(timestep)
        if call == 0:
            self._begin_canvas(sample, generator)
        if self.state is None or self.state.call != call:
            expected = 0 if self.state is None else self.state.call
            raise LimpetError(f"step {call} of a canvas came after {expected} steps: ask for them in order, from 0")
        self.finished |= (sample != self.returned).any(-1, keepdim=True)
        (step,) = rollout(PipelinePrediction(model_output), self.sampler, self._inputs(sample), self.state, call + 1)
        self.state = step.state
        is_last = self.state.call == self.sampler.nfe
        canvas = self.state.tokens if is_last else self.sampler.model_input(self.state)
        self.returned = torch.where(self.finished, sample, canvas)
        output = CommittedRevealOutput(self.returned, model_output, self.state.memory[1] <= call)
        return output if return_dict else (output.prev_sample, output.pred_logits, output.committed)

    def _inputs(self, canvas: Tensor) -> Inputs:
        return Inputs(torch.full_like(canvas, -1), self.rng)

    def _begin_canvas(self, canvas: Tensor, generator: torch.Generator | None) -> None:
        self.canvas += 1
        if self.config.seed is None:
            device = canvas.device if generator is None else generator.device
            seed = int(torch.empty((), dtype=torch.long, device=device).random_(generator=generator))
        else:
            seed = canvas_seed(self.config.seed, self.canvas)
        self.rng = CounterRNG(seed, torch.arange(len(canvas), device=canvas.device))
        context = context_of(PipelinePrediction(canvas[..., None].expand(-1, -1, 2)), self._inputs(canvas))
        self.state = self.sampler.init(context)._replace(tokens=canvas)
        self.returned, self.finished = canvas, torch.zeros_like(canvas[:, :1], dtype=torch.bool)


class MendScheduler(CommittedRevealScheduler):
    """Mend as a scheduler: CRS that can revise committed tokens."""

    kind = Mend
    __init__ = _init(Mend)
