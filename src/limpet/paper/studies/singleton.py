"""How often top-p leaves a single token, and whether that token lasts (appendix D.1, table 1)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from limpet.experiments import Panel, ProbeValue, Results
from limpet.generation import Inputs, rollout
from limpet.models import Denoiser
from limpet.paper.studies import audits
from limpet.paper.studies.trajectories import AuditSettings, audit_inputs
from limpet.samplers import Native

QUANTITIES = ("singleton", "singleton, last steps", "next step", "final", "stochastic bridge")
CERTAIN = 1e-8  # a bridge with a probability this near to 1 counts as deterministic


@dataclass(frozen=True, kw_only=True)
class SingletonSettings(AuditSettings):
    top_ps: tuple[float, ...] = (0.8, 0.9)  # native top-p at every call, warmup included
    last: int = 10  # how many reverse steps count as "last steps"


PRESETS = audits.presets("singleton", SingletonSettings)


def audit(
    models: Sequence[Denoiser], settings: SingletonSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    for model in models:
        for p in settings.top_ps:
            sampler = Native(nfe=settings.nfe, top_p=p, final_step="argmax")
            masks = singleton_events(sampler, model, audit_inputs(model, settings, seeds[index], trace=True))
            single, late = masks["singleton"], masks["singleton"][-settings.last :]
            yield ProbeValue(model.name, "singleton", {"p": p}, *audits.percent(single.sum(), single.numel()))
            yield ProbeValue(model.name, "singleton, last steps", {"p": p}, *audits.percent(late.sum(), late.numel()))
            for quantity in QUANTITIES[2:]:
                kept = (single & masks[quantity]).sum()
                yield ProbeValue(model.name, quantity, {"p": p}, *audits.percent(kept, int(single.sum())))


def singleton_events(sampler: Native, model: Denoiser, inputs: Inputs) -> dict[str, Tensor]:
    """(nfe - 1, B, L) bool each: where top-p keeps one token, and what holds there, along a traced trajectory."""
    steps = list(rollout(model, sampler, inputs))
    top = torch.stack([step.outcome.top for step in steps])
    deficit = torch.stack([step.deficit for step in steps[:-1]])
    state = torch.stack([step.model_input for step in steps[:-1]])
    signals = [model.schedule.level(t) for t in sampler.times]
    nodes = torch.tensor(signals, dtype=torch.float64, device=state.device)
    largest = largest_bridge_prob(top[:-1], state, nodes[:-1, None, None], nodes[1:, None, None], model.vocab_size)
    spare = 1 - sampler.top_p
    return {
        "singleton": deficit.double() < spare if sampler.boundary == "released" else deficit.double() <= spare,
        "next step": top[1:] == top[:-1],
        "final": top[-1] == top[:-1],
        "stochastic bridge": largest < 1 - CERTAIN,
    }


def largest_bridge_prob(token: Tensor, z: Tensor, signal_t: Tensor, signal_s: Tensor, vocab_size: int) -> Tensor:
    """max over y of the bridge q(s|0,t)(y | token, z), in closed form.

    The bridge has mass on the token, on the state z, and evenly on the rest, which has no larger probability."""
    same, between = (token == z).double(), signal_t / signal_s
    rest_s, rest_t, rest = (1 - signal_s) / vocab_size, (1 - between) / vocab_size, (1 - signal_t) / vocab_size
    at_token = (signal_s + rest_s) * (between * same + rest_t)
    at_state = (signal_s * same + rest_s) * (between + rest_t)
    return torch.maximum(at_token, at_state) / (signal_t * same + rest)


cells = audits.probe_each(audit)


def panels(results: Results, preset: audits.AuditPreset[SingletonSettings]) -> Iterator[Panel]:
    """How many pairs are singletons, and how many of those last."""
    models = audits.models_of(results, "singleton")
    groups = {f"{model}, p = {p}": (model, {"p": p}) for model in models for p in preset.settings.top_ps}
    yield from (audits.bars(results, quantities, groups) for quantities in (QUANTITIES[:2], QUANTITIES[2:]))
