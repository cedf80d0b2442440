"""Whether visible context only sharpens a law: the best temperature at each position, and what it leaves over
(appendix E)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from limpet import process, sampler
from limpet.audits.figures import bars
from limpet.audits.paths import Models, log_law, prepared, spread, states
from limpet.audits.result import SHARDS, Progress, Result, Row, each, percent, row
from limpet.audits.result import Preset as Base
from limpet.errors import LimpetError
from limpet.policy import Policy
from limpet.sampler import NEVER, Run, State

TITLE = "Visible context against the best scalar temperature"
ASKS = "Whether visible context does more to a law than the best temperature could."
LARGEST = 4096.0  # inverse temperatures beyond it are not looked for
BISECTIONS = 48
TOP = 64  # the most likely labels of each law, among which inversions are looked for
TIE = 1e-12  # log-probabilities nearer than this are tied
PANELS = 1


@dataclass(frozen=True, kw_only=True)
class Preset(Base):
    steps: int = 7  # steps audited after the first selection
    positions: int = 8  # unselected positions audited in each

    @property
    def pairs(self) -> int:
        """Coordinate-step pairs, if every state has positions enough left."""
        return len(self.shards) * self.paths * self.steps * self.positions


PRESETS = {
    "smoke": Preset(shards=SHARDS[:2], paths=1, nfe=12, length=64, steps=3),
    "mini": Preset(paths=2),
    "paper": Preset(paths=8),
}

PAPER = {
    ("Duo-distilled", "residual"): "79.4 ± 2.1",
    ("Duo-distilled", "top-rank change"): "30.2 ± 0.8",
    ("Duo-distilled", "rank inversion"): "99.89 ± 0.06",
    ("Duo-distilled", "optimum at a bound"): "0",
    ("Duo-distilled", "control, top-rank change"): "0",
    ("Duo-distilled", "control, rank inversion"): "0",
}

CONVENTIONS = {
    "residual": "sum of KL(with || best temperature of without) over sum of KL(with || without), pooled by shard",
    "divergence": "mean KL(with || without), nats",
    "top-rank change": "pairs where the two laws have another argmax",
    "rank inversion": f"pairs where some two labels of the union of both top {TOP} change order; ties within {TIE:g}",
    "inverse temperature": "median of the fitted beta",
    "optimum at a bound": f"fits that end at beta = 0 or {LARGEST:g}",
    "control": "the same at the first step after warmup, where nothing is visible yet",
    "pairs": "unselected positions, evenly spaced, at evenly spaced steps after the first selection; one state, one t",
}


class Fit(NamedTuple):
    """(R,) each."""

    beta: Tensor
    divergence: Tensor  # KL(mu || nu)
    residual: Tensor  # KL(mu || nu_beta)


def tempered(log_nu: Tensor, beta: Tensor) -> Tensor:
    """ln nu_beta; a label without mass keeps none, also at beta = 0."""
    powers = torch.where(log_nu == -math.inf, -math.inf, beta[:, None] * log_nu)
    return powers.log_softmax(-1)


def mean_log(log_mu: Tensor, log_nu: Tensor) -> Tensor:
    """E_mu[ln nu]; labels without mass under mu count for nothing."""
    return torch.where(log_mu == -math.inf, 0.0, log_mu.exp() * log_nu).sum(-1)


def fit(log_mu: Tensor, log_nu: Tensor) -> Fit:
    """The beta in [0, 4096] that minimises KL(mu || nu_beta), for (R, V) float64 log laws.

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


def inverted(log_mu: Tensor, log_nu: Tensor) -> Tensor:
    """(R,) bool: whether two labels of the union of the top sets stand in opposite order in the two laws."""
    size = min(TOP, log_mu.shape[-1])
    pool = torch.cat([log_mu.topk(size).indices, log_nu.topk(size).indices], -1)  # labels in both stand twice: a tie
    found = []
    for mu, nu in zip(*(torch.split(law.gather(-1, pool), 256) for law in (log_mu, log_nu)), strict=True):
        ups = [
            torch.nan_to_num(law[:, :, None] - law[:, None, :]) > TIE for law in (mu, nu)
        ]  # -inf against -inf: a tie
        found.append((ups[0] & ups[1].transpose(1, 2)).flatten(1).any(-1))
    return torch.cat(found)


def audited_steps(run: Run, steps: int) -> list[int]:
    """Steps evenly spaced from the first that can see a label to the last that draws."""
    first = run.warmup + 1
    return [first + place for place in spread(run.policy.nfe - 1 - first, steps)]


def two_laws(run: Run, state: State, positions: int) -> tuple[Tensor, Tensor]:
    """(R, V) twice: the log laws with and without the visible labels, at unselected positions of every path."""
    row, position = [], []
    for path, open_ in enumerate((run.free & (state.selected_at == NEVER)).cpu()):
        places = open_.nonzero()[:, 0]
        chosen = places[spread(len(places), positions)]
        row.append(torch.full_like(chosen, path))
        position.append(chosen)
    where = torch.cat(row).to(run.fixed.device), torch.cat(position).to(run.fixed.device)
    t, token = run.times[state.step], state.tokens[where]  # unselected: the same token in both inputs
    _, shown = sampler.look(run, state)
    features = (run.denoiser.body(tokens, t)[where] for tokens in (shown, state.tokens))
    with_labels, without = (log_law(run.denoiser, one, token, t) for one in features)
    return with_labels, without


@torch.inference_mode()
def audit(models: Models, preset: Preset, progress: Progress = lambda done, total: None) -> Result:
    policy = Policy(nfe=preset.nfe)
    if preset.nfe - 2 < process.warmup_steps(preset.nfe, policy.warmup) + preset.steps:
        raise LimpetError(f"{preset.nfe} calls leave no {preset.steps} steps after the first selection: raise nfe")
    found: dict[str, list[dict[str, np.ndarray]]] = {}
    units = [(model, seed) for model in models.denoisers for seed in preset.shards]
    for model, seed in each(units, progress):
        run = prepared(model, policy, seed, preset.paths, preset.length, trace=True)
        wanted = [run.warmup, *audited_steps(run, preset.steps)]
        pairs = {state.step: two_laws(run, state, preset.positions) for state in states(run) if state.step in wanted}
        found.setdefault(model.name, []).append(_measured(pairs, run.warmup))
    rows: list[Row] = []
    for model in models.denoisers:
        shards = found[model.name]
        rows += _rows(model, shards)
    return Result("temperature", asdict(preset), models.digests(), rows, CONVENTIONS)


def _measured(pairs: dict[int, tuple[Tensor, Tensor]], control: int) -> dict[str, np.ndarray]:
    """One shard's figures, a value for each pair of laws."""
    mu, nu = (torch.cat([laws[side] for step, laws in pairs.items() if step != control]) for side in (0, 1))
    found = fit(mu, nu)
    empty = pairs[control]
    values = {
        "beta": found.beta,
        "divergence": found.divergence,
        "residual": found.residual,
        "optimum at a bound": (found.beta == 0) | (found.beta == LARGEST),
        "top-rank change": mu.argmax(-1) != nu.argmax(-1),
        "rank inversion": inverted(mu, nu),
        "control, top-rank change": empty[0].argmax(-1) != empty[1].argmax(-1),
        "control, rank inversion": inverted(*empty),
    }
    return {name: value.double().cpu().numpy() for name, value in values.items()}


def _rows(model: Any, shards: list[dict[str, np.ndarray]]) -> list[Row]:
    pairs = sum(len(shard["beta"]) for shard in shards)
    sums = {name: [float(shard[name].sum()) for shard in shards] for name in shards[0]}
    counts = {name: [len(shard[name]) for shard in shards] for name in shards[0]}
    rows = [
        row(model, "residual", {}, percent(sums["residual"], sums["divergence"]), PAPER, "%", pairs),
        row(model, "divergence", {}, [shard["divergence"].mean() for shard in shards], PAPER, "nats", pairs),
        row(model, "inverse temperature", {}, [np.median(shard["beta"]) for shard in shards], PAPER, "", pairs),
    ]
    events = ("top-rank change", "rank inversion", "optimum at a bound")
    for name in (*events, "control, top-rank change", "control, rank inversion"):
        rows.append(row(model, name, {}, percent(sums[name], counts[name]), PAPER, "%", sum(counts[name])))
    return rows


def figure(result: Result, axes: Sequence[Any]) -> None:
    """What no temperature explains, and how often ranks change."""
    (panel,) = axes
    shown = ("residual", "top-rank change", "rank inversion", "control, top-rank change")
    bars(panel, shown, {m: [result.of(quantity, m)[0].estimate for quantity in shown] for m in result.models})
    panel.set_ylabel("%")
    panel.set_ylim(0, 105)
    panel.legend()
