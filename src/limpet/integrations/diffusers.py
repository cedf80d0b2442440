"""limpet's samplers inside diffusers: schedulers for its DiffusionGemma pipeline.

The pipeline calls the network, and asks the scheduler for the next canvas. The canvas is what the network reads, with
committed tokens written in. The scheduler itself keeps the noisy state and the commitments between steps."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from limpet.diffusion.rng import SEED_LIMIT, CounterRNG, canvas_seed
from limpet.errors import LimpetError, import_extra
from limpet.integrations.given_logits import advance, check_sampler, first_state
from limpet.samplers import CRS, Sampler, State, as_sampler, params
from limpet.samplers.builtin import BUILTIN
from limpet.samplers.names import find
from limpet.samplers.params import check_names

diffusers = import_extra("diffusers", "diffusers")
outputs, configuration = (
    import_extra("diffusers.utils", "diffusers"),
    import_extra("diffusers.configuration_utils", "diffusers"),
)

SETTINGS = {"num_inference_steps": 48, "seed": None}  # of a scheduler, beside its sampler's parameters


@dataclass
class SamplerOutput(outputs.BaseOutput):  # type: ignore[misc, name-defined]
    """What a step returns."""

    prev_sample: Tensor  # (B, L) the canvas that the network reads next; after the last step, the output
    pred_logits: Tensor  # (B, L, V) at the temperature at which the sampler read them, for the self-conditioning
    committed: Tensor  # (B, L) bool: where a token is committed


class SamplerScheduler(diffusers.SchedulerMixin, diffusers.ConfigMixin):  # type: ignore[misc, name-defined]
    """A sampler as a scheduler. Its settings are the parameters of the sampler (`limpet samplers NAME`) and `seed`.

    With a seed, a canvas is a function of the seed, the row and the number of the canvas. Without one, each canvas
    draws its seed from the pipeline's generator."""

    kind: ClassVar[type[Sampler]]
    order = 1
    rng: CounterRNG  # of the canvas
    returned: Tensor  # (B, L) the canvas as the last step returned it
    finished: Tensor  # (B, 1) bool: rows that the pipeline has changed since

    def restart(self, calls: int) -> None:
        """Begin again, with this many calls for each canvas."""
        own = {name: self.config[name] for name in params(self.kind) if name != "nfe"}
        self.sampler = self.kind(nfe=calls, **own)  # type: ignore[call-arg]
        self.num_inference_steps, self.timesteps = calls, torch.arange(calls)
        self.canvas = -1
        self.state: State | None = None

    def set_timesteps(self, num_inference_steps: int, device: str | torch.device | None = None) -> None:
        """Set the number of network calls for each canvas."""
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
    ) -> SamplerOutput | tuple[Tensor, Tensor, Tensor]:
        """The next canvas, from the logits (B, L, V) of a posterior and the canvas (B, L) that the network read.

        Step 0 begins a canvas. A row that differs from what the last step returned has been finished by the pipeline,
        whose early stop writes the argmax there; such a row stays as it is."""
        call = int(timestep)
        if call == 0:
            self._begin_canvas(sample, model_output.shape[-1], generator)
        if self.state is None or self.state.call != call:
            expected = 0 if self.state is None else self.state.call
            raise LimpetError(f"step {call} of a canvas came after {expected} steps: ask for them in order, from 0")
        self.finished |= (sample != self.returned).any(-1, keepdim=True)
        after = advance(self.sampler, self.state, self.rng, model_output)
        self.state, self.returned = after.state, torch.where(self.finished, sample, after.canvas)
        read = model_output if after.temperature == 1 else model_output / after.temperature
        output = SamplerOutput(self.returned, read, after.committed)
        return output if return_dict else (output.prev_sample, output.pred_logits, output.committed)

    def _begin_canvas(self, canvas: Tensor, vocab_size: int, generator: torch.Generator | None) -> None:
        self.canvas += 1
        if self.config.seed is None:
            device = canvas.device if generator is None else generator.device
            seed = int(torch.empty((), dtype=torch.long, device=device).random_(generator=generator))
        else:
            seed = canvas_seed(self.config.seed, self.canvas)
        self.rng = CounterRNG(seed, torch.arange(len(canvas), device=canvas.device))
        self.state = first_state(self.sampler, self.rng, canvas.shape[1], vocab_size)._replace(tokens=canvas)
        self.returned, self.finished = canvas, torch.zeros_like(canvas[:, :1], dtype=torch.bool)


def _init(kind: type[Sampler]) -> Any:
    """The `__init__` of a scheduler for this sampler, from whose signature diffusers reads what to save and load."""

    def init(self: Any, *values: Any, **named: Any) -> None:
        check_names(kind, {name: value for name, value in named.items() if name not in SETTINGS}, type(self).__name__)
        seed = self.config.seed
        if seed is not None and not (type(seed) is int and 0 <= seed < SEED_LIMIT):
            raise LimpetError(f"seed is {seed!r}; it takes a whole number from 0, of at most 64 bits, or None")
        self.restart(self.config.num_inference_steps)

    defaults = {**SETTINGS, **{name: param.default for name, param in params(kind).items() if name != "nfe"}}
    place = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [inspect.Parameter(name, place, default=default) for name, default in defaults.items()]
    init.__signature__ = inspect.Signature([inspect.Parameter("self", place), *own])  # type: ignore[attr-defined]
    return configuration.register_to_config(init)


@cache
def scheduler_class(kind: type[Sampler]) -> type[SamplerScheduler]:
    """The scheduler's class for the class of a sampler."""
    name = "CommittedRevealScheduler" if kind is CRS else f"{kind.__name__}Scheduler"
    about = {"__doc__": kind.__doc__, "__module__": __name__, "__init__": _init(kind), "kind": kind}
    return type(name, (SamplerScheduler,), about)


def scheduler_for(sampler: Sampler | str, seed: int | None = None) -> SamplerScheduler:
    """A scheduler for a sampler or a text such as "mend budget=.5".

    seed: see `SamplerScheduler`. The pipeline's `num_inference_steps` takes the place of the sampler's `nfe`."""
    chosen = check_sampler(as_sampler(sampler))
    values = {name: getattr(chosen, name) for name in params(type(chosen)) if name != "nfe"}
    # Defaults are left out, so that another scheduler made from this one's config has its own.
    own = {name: value for name, value in values.items() if value != params(type(chosen))[name].default}
    return scheduler_class(type(chosen))(num_inference_steps=chosen.nfe, seed=seed, **own)


# The schedulers of the built-in samplers, by the name of the class. Guidance has none: a canvas has no fixed tokens.
SCHEDULERS = {one.__name__: one for one in (scheduler_class(k) for k in map(find, BUILTIN) if not k.needs_fixed)}
globals().update(SCHEDULERS)


def __getattr__(name: str) -> type[SamplerScheduler]:
    raise AttributeError(f"there is no {name} here; there are {', '.join(SCHEDULERS)}")
