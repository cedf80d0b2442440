"""Whether visible context only sharpens a distribution: the best temperature at each position, and what it leaves over
(appendix E)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.experiments.claims import Finding, above, within
from limpet.experiments.contents import Panel
from limpet.experiments.results import Results
from limpet.experiments.study import Probe, Seen
from limpet.models import Denoiser
from limpet.paper.studies import trajectories
from limpet.paper.studies.audits import Preset, bars, beside, each, figure, models_of, one, percent, presets
from limpet.paper.studies.published import Claims
from limpet.samplers import CRS
from limpet.samplers.context import Context, State
from limpet.samplers.crs import OPEN

LARGEST = 4096.0  # inverse temperatures beyond it are not looked for
BISECTIONS = 48
TOP = 64  # the most likely tokens of each distribution, among which inversions are looked for
TIE = 1e-12  # log-probabilities nearer than this are tied


@dataclass(frozen=True, kw_only=True)
class Settings(trajectories.Settings):
    calls: int = 7  # audited after the first selection
    positions: int = 8  # unselected positions audited in each


PRESETS = presets("temperature", Settings)


def cells(preset: Preset[Settings]) -> list[Probe]:
    nfe, calls = preset.settings.nfe, preset.settings.calls
    if nfe - 2 < CRS(nfe=nfe).warmup_calls + calls:
        raise LimpetError(f"{nfe} calls leave no {calls} steps after the first selection: raise nfe")
    return each(look)(preset)


def look(models: Sequence[Denoiser], settings: Settings, shard: int, shards: tuple[int, ...]) -> Iterator[Seen]:
    crs = CRS(nfe=settings.nfe)
    wanted = [crs.warmup_calls, *audited_calls(crs, settings.calls)]
    for model in models:
        ctx = trajectories.opened(model, settings, shards[shard], trace=True)
        distributions = [two_distributions(crs, ctx, state, settings.positions)
                for state in trajectories.states(crs, ctx) if state.call in wanted]  # fmt: skip
        mu, nu = (torch.cat(side) for side in zip(*distributions[1:], strict=True))
        found, pairs = fit(mu, nu), len(mu)
        beta, divergence, residual = (one.cpu().numpy() for one in found)
        yield Seen(model.name, "residual", {}, percent(residual.sum(), divergence.sum())[0], "%", pairs)
        yield Seen(model.name, "divergence", {}, float(divergence.mean()), "nats", pairs)
        yield Seen(model.name, "inverse temperature", {}, float(np.median(beta)), "", pairs)
        held = {
            "top-rank change": mu.argmax(-1) != nu.argmax(-1),
            "rank inversion": inverted(mu, nu),
            "optimum at a bound": (found.beta == 0) | (found.beta == LARGEST),
            "control, top-rank change": distributions[0][0].argmax(-1) != distributions[0][1].argmax(-1),
            "control, rank inversion": inverted(*distributions[0]),
        }
        for quantity, true in held.items():
            yield Seen(model.name, quantity, {}, *percent(true.sum(), len(true)))


def audited_calls(crs: CRS, calls: int) -> list[int]:
    """Calls evenly spaced from the first that can see a label to the last that draws."""
    first = crs.warmup_calls + 1
    return [first + place for place in trajectories.spread(crs.nfe - 1 - first, calls)]


def two_distributions(crs: CRS, ctx: Context, state: State, positions: int) -> tuple[Tensor, Tensor]:
    """(R, V) twice: the log-probabilities with and without the visible labels, at unselected positions of every path."""
    sample, position = [], []
    for i, free in enumerate((ctx.free & (state.memory[1] == OPEN)).cpu()):
        places = free.nonzero()[:, 0]
        chosen = places[trajectories.spread(len(places), positions)]
        sample.append(torch.full_like(chosen, i))
        position.append(chosen)
    where = torch.cat(sample).to(ctx.fixed.device), torch.cat(position).to(ctx.fixed.device)
    t, token = crs.times[state.call], state.tokens[where]  # unselected: the same token in both inputs
    shown = torch.where(crs.visible(state), state.memory[0], state.tokens)
    features = (ctx.model.body(tokens, t)[where] for tokens in (shown, state.tokens))
    with_labels, without = (trajectories.log_probs(ctx.model, one, token, t) for one in features)
    return with_labels, without


class Fit(NamedTuple):
    """(R,) each."""

    beta: Tensor
    divergence: Tensor  # KL(mu || nu)
    residual: Tensor  # KL(mu || nu_beta)


def fit(log_mu: Tensor, log_nu: Tensor) -> Fit:
    """The beta in [0, 4096] that minimises KL(mu || nu_beta), for (R, V) float64 log-probabilities.

    The objective is convex and its slope is E_{nu_beta}[ln nu] - E_mu[ln nu]: bisect for its zero."""
    target = mean_log(log_mu, log_nu)
    low, high = torch.zeros_like(target), torch.full_like(target, LARGEST)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        short = mean_log(tempered(log_nu, middle), log_nu) < target
        low, high = torch.where(short, middle, low), torch.where(short, high, middle)
    beta = torch.where(low == 0, 0.0, torch.where(high == LARGEST, LARGEST, (low + high) / 2))  # a bound stays a bound
    own = mean_log(log_mu, log_mu)
    residual = own - mean_log(log_mu, tempered(log_nu, beta))
    return Fit(beta, (own - target).clamp(min=0), residual.clamp(min=0))


def tempered(log_nu: Tensor, beta: Tensor) -> Tensor:
    """ln nu_beta; a token without mass keeps none, also at beta = 0."""
    powers = torch.where(log_nu == -math.inf, -math.inf, beta[:, None] * log_nu)
    return powers.log_softmax(-1)


def mean_log(log_mu: Tensor, log_nu: Tensor) -> Tensor:
    """E_mu[ln nu]; tokens without mass under mu count for nothing."""
    return torch.where(log_mu == -math.inf, 0.0, log_mu.exp() * log_nu).sum(-1)


def inverted(log_mu: Tensor, log_nu: Tensor) -> Tensor:
    """(R,) bool: whether two tokens of the union of the top sets stand in opposite order in the two distributions."""
    size = min(TOP, log_mu.shape[-1])
    pool = torch.cat([log_mu.topk(size).indices, log_nu.topk(size).indices], -1)  # tokens in both stand twice: a tie
    found = []
    for mu, nu in zip(*(torch.split(probs.gather(-1, pool), 256) for probs in (log_mu, log_nu)), strict=True):
        ups = [torch.nan_to_num(probs[:, :, None] - probs[:, None, :]) > TIE for probs in (mu, nu)]  # -inf twice: a tie
        found.append((ups[0] & ups[1].transpose(1, 2)).flatten(1).any(-1))
    return torch.cat(found)


def claims(results: Results, preset: Preset[Settings]) -> Claims:
    """Of the distilled model, whose paths the paper follows."""

    def told(quantity: str, least: float | None) -> list[Finding]:
        """That it is above a bound, or exactly none."""
        paper = figure("temperature", quantity)
        every = {model: one(results, quantity, model) for model in beside(results, "Duo-distilled")}
        return [
            within(quantity, found, 0, paper) if least is None else above(quantity, found, least, paper)
            for found in every.values()
        ]

    return {
        "residual": told("residual", 50),
        "top-rank": told("top-rank change", 0),
        "inversion": told("rank inversion", 99),
        "interior": told("optimum at a bound", None),
        "control": [*told("control, top-rank change", None), *told("control, rank inversion", None)],
    }


def panels(results: Results, preset: Preset[Settings]) -> Iterator[Panel]:
    """What no temperature explains, and how often ranks change."""
    groups: dict[str, tuple[str, dict[str, Any]]] = {model: (model, {}) for model in models_of(results, "residual")}
    shown = ("residual", "top-rank change", "rank inversion", "control, top-rank change")
    yield bars(results, shown, groups)
