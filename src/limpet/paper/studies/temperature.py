"""Whether visible context is more than a temperature: the best temperature at each position, and what it leaves
unexplained (appendix E)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.experiments import Panel, Probe, ProbeValue, Results
from limpet.generation import Step, rollout
from limpet.models import Denoiser
from limpet.paper.studies import audits
from limpet.paper.studies.trajectories import AuditSettings, audit_inputs, evenly_spaced, read_log_probs
from limpet.samplers import CRS, State

LARGEST = 4096.0  # the largest inverse temperature that is tried
BISECTIONS = 48
TOP = 64  # the most probable tokens of each distribution, among which inversions are looked for
TIE = 1e-12  # log-probabilities nearer than this count as equal


@dataclass(frozen=True, kw_only=True)
class TemperatureSettings(AuditSettings):
    calls: int = 7  # audited after the first selection
    positions: int = 8  # uncommitted positions audited in each


PRESETS = audits.presets("temperature", TemperatureSettings)


def cells(preset: audits.AuditPreset[TemperatureSettings]) -> list[Probe]:
    nfe, calls = preset.settings.nfe, preset.settings.calls
    if nfe - 2 < CRS(nfe=nfe).warmup_calls + calls:
        raise LimpetError(f"{nfe} calls leave no {calls} steps after the first selection: raise nfe")
    return audits.probe_each(audit)(preset)


def audit(
    models: Sequence[Denoiser], settings: TemperatureSettings, index: int, seeds: tuple[int, ...]
) -> Iterator[ProbeValue]:
    crs = CRS(nfe=settings.nfe)
    wanted = [crs.warmup_calls, *audited_calls(crs, settings.calls)]
    for model in models:
        pairs, before = [], None
        for step in rollout(model, crs, audit_inputs(model, settings, seeds[index], trace=True), stop=crs.nfe - 1):
            if step.call in wanted:
                pairs.append(with_and_without(step, before or crs.init(step.context), settings.positions))
            before = step.state
        control, *audited = pairs
        mu, nu = (torch.cat(side) for side in zip(*audited, strict=True))
        found, count = fit(mu, nu), len(mu)
        beta, divergence, residual = (one.cpu().numpy() for one in found)
        yield ProbeValue(model.name, "residual", {}, audits.percent(residual.sum(), divergence.sum())[0], "%", count)
        yield ProbeValue(model.name, "divergence", {}, float(divergence.mean()), "nats", count)
        yield ProbeValue(model.name, "inverse temperature", {}, float(np.median(beta)), "", count)
        events = {
            "top-rank change": mu.argmax(-1) != nu.argmax(-1),
            "rank inversion": inverted(mu, nu),
            "optimum at a bound": (found.beta == 0) | (found.beta == LARGEST),
            "control, top-rank change": control[0].argmax(-1) != control[1].argmax(-1),
            "control, rank inversion": inverted(*control),
        }
        for quantity, happens in events.items():
            yield ProbeValue(model.name, quantity, {}, *audits.percent(happens.sum(), len(happens)))


def audited_calls(crs: CRS, calls: int) -> list[int]:
    """Calls evenly spaced from the first that can see a committed token to the last reverse step."""
    first = crs.warmup_calls + 1
    return [first + place for place in evenly_spaced(crs.nfe - 1 - first, calls)]


def with_and_without(step: Step, before: State, positions: int) -> tuple[Tensor, Tensor]:
    """(R, V) twice: log-probabilities at uncommitted positions, given the call's input with its visible committed
    tokens, and given the noisy tokens alone.

    before: the state before the call, whose noisy tokens stand at the uncommitted positions of both inputs."""
    rows = []
    for sample, is_open in enumerate((step.context.free & ~step.committed).cpu()):
        places = is_open.nonzero()[:, 0].tolist()
        rows += [(sample, places[k]) for k in evenly_spaced(len(places), positions)]
    where = torch.tensor(rows, device=before.tokens.device)
    ctx = replace(step.context, trace=False)
    visible = step.visible | ~ctx.free
    with_context = read_log_probs(ctx, before, step.model_input, step.t, where, visible)
    return with_context, read_log_probs(ctx, before, before.tokens, step.t, where)


class TemperatureFit(NamedTuple):
    """(R,) each."""

    beta: Tensor
    divergence: Tensor  # KL(mu || nu)
    residual: Tensor  # KL(mu || nu_beta)


def fit(log_mu: Tensor, log_nu: Tensor) -> TemperatureFit:
    """The beta in [0, 4096] that minimises KL(mu || nu_beta), for (R, V) float64 log-probabilities.

    The objective is convex with slope E_{nu_beta}[ln nu] - E_mu[ln nu]; its zero is found by bisection."""
    target = mean_log(log_mu, log_nu)
    low, high = torch.zeros_like(target), torch.full_like(target, LARGEST)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        short = mean_log(tempered(log_nu, middle), log_nu) < target
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    # Exactly at a bound where the search ends there, so that such fits can be counted.
    beta = torch.where(low == 0, 0.0, torch.where(high == LARGEST, LARGEST, (low + high) / 2))
    own = mean_log(log_mu, log_mu)
    residual = own - mean_log(log_mu, tempered(log_nu, beta))
    return TemperatureFit(beta, (own - target).clamp(min=0), residual.clamp(min=0))


def tempered(log_nu: Tensor, beta: Tensor) -> Tensor:
    """ln nu_beta; a token with probability 0 keeps it, also at beta = 0."""
    powers = torch.where(log_nu == -math.inf, -math.inf, beta[:, None] * log_nu)
    return powers.log_softmax(-1)


def mean_log(log_mu: Tensor, log_nu: Tensor) -> Tensor:
    """E_mu[ln nu]; tokens with probability 0 under mu do not count."""
    return torch.where(log_mu == -math.inf, 0.0, log_mu.exp() * log_nu).sum(-1)


def inverted(log_mu: Tensor, log_nu: Tensor) -> Tensor:
    """(R,) bool: whether two tokens of the union of both top sets have opposite orders."""
    size = min(TOP, log_mu.shape[-1])
    pool = torch.cat(
        [log_mu.topk(size).indices, log_nu.topk(size).indices], -1
    )  # a token in both is there twice: a tie
    found = []
    for mu, nu in zip(*(torch.split(probs.gather(-1, pool), 256) for probs in (log_mu, log_nu)), strict=True):
        ups = [torch.nan_to_num(probs[:, :, None] - probs[:, None, :]) > TIE for probs in (mu, nu)]
        found.append((ups[0] & ups[1].transpose(1, 2)).flatten(1).any(-1))
    return torch.cat(found)


def panels(results: Results, preset: audits.AuditPreset[TemperatureSettings]) -> Iterator[Panel]:
    """What no temperature explains, and how often ranks change."""
    groups: dict[str, tuple[str, dict[str, Any]]] = {
        model: (model, {}) for model in audits.models_of(results, "residual")
    }
    quantities = ("residual", "top-rank change", "rank inversion", "control, top-rank change")
    yield audits.bars(results, quantities, groups)
