"""The deficit selector: which positions a step selects, under a count cap, a budget and a spacing (appendix A)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Selector = Callable[[Tensor, Tensor, int | Tensor, float | Tensor, int], Tensor]  # select's arguments and result


def spaced(deficit: Tensor, eligible: Tensor, spacing: int) -> Tensor:
    """The set that a greedy scan in deficit order accepts when only spacing stops it.

    It is the lexicographically first independent set of the graph of conflicts. Whoever comes first in its own
    neighbourhood is in the set whatever happens elsewhere, so whole rounds of local minima are accepted at once."""
    if spacing == 0:
        return eligible.clone()
    length = deficit.shape[-1]
    spacing = min(spacing, length)  # nothing is further apart, and the margins below are as wide
    accepted = torch.zeros_like(eligible)
    # Scores rank as deficits do, the best the largest; -inf is out. The margins spare every round its edges.
    score = F.pad(torch.where(eligible, -deficit, -math.inf), (spacing, spacing), value=-math.inf)
    centre = score[:, spacing:-spacing]
    while True:
        ahead = F.max_pool1d(score, spacing, stride=1)  # the best of positions j .. j + spacing - 1
        # Ties go to the lower position: strictly above everything before, at least everything after.
        first = (centre > ahead[:, :length]) & (centre >= ahead[:, spacing + 1 :])
        if not first.any():
            return accepted
        accepted |= first
        near = F.max_pool1d(first.float(), 2 * spacing + 1, stride=1, padding=spacing)
        centre.masked_fill_(near.bool(), -math.inf)


def select(deficit: Tensor, eligible: Tensor, count: int | Tensor, budget: float | Tensor, spacing: int) -> Tensor:
    """(B, L) deficits -> bool (B, L): scan eligible positions in increasing deficit, ties by position; skip a
    position within `spacing` of an accepted one; stop at `count` positions or where the sum would pass `budget`.

    Deficits ascend, so once one does not fit none after it does: cap and budget keep a prefix of the spaced set."""
    candidates = spaced(deficit.to(torch.float64), eligible, spacing)
    place = candidates.cumsum(-1)  # the candidates of each sample, packed to the left, in order of position
    most = int(place[:, -1].max())
    row, position = candidates.nonzero(as_tuple=True)
    slot = place[row, position] - 1
    packed = deficit.new_full((len(deficit), most), math.inf, dtype=torch.float64)
    packed[row, slot] = deficit[row, position].to(torch.float64)
    ranked = packed.sort(dim=-1, stable=True)
    rank = torch.arange(most, device=deficit.device)
    fits = (rank < _per_sample(count, deficit)) & (ranked.values.cumsum(-1) <= _per_sample(budget, deficit))
    kept = torch.zeros_like(fits).scatter(-1, ranked.indices, fits)
    candidates[row, position] = kept[row, slot]
    return candidates


def _per_sample(limit: float | Tensor, like: Tensor) -> Tensor:
    """One limit for all samples, or one each, as a column."""
    limit = torch.as_tensor(limit, dtype=torch.float64, device=like.device)
    return limit[:, None] if limit.dim() else limit
