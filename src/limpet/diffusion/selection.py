"""The selector: the positions with the smallest deficits, limited by a count, a budget and a spacing (appendix A)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Selector = Callable[[Tensor, Tensor, int | Tensor, float | Tensor, int], Tensor]  # the signature of `select`


def spaced(deficit: Tensor, eligible: Tensor, spacing: int) -> Tensor:
    """(B, L) bool: what a greedy scan in deficit order accepts when the spacing is its only limit.

    This is the lexicographically first independent set of the conflict graph. A position with the smallest deficit of
    its neighbourhood is always in the set, so each round accepts all local minima at once."""
    if spacing == 0:
        return eligible.clone()
    length = deficit.shape[-1]
    spacing = min(spacing, length)  # a larger spacing changes nothing and would widen the padding below
    accepted = torch.zeros_like(eligible)
    # The score is the negative deficit; -inf excludes a position. The padding avoids special cases at both ends.
    score = F.pad(torch.where(eligible, -deficit, -math.inf), (spacing, spacing), value=-math.inf)
    centre = score[:, spacing:-spacing]
    while True:
        ahead = F.max_pool1d(score, spacing, stride=1)  # the largest score of positions j .. j + spacing - 1
        # Ties go to the lower position: larger than all scores before, at least as large as all scores after.
        first = (centre > ahead[:, :length]) & (centre >= ahead[:, spacing + 1 :])
        if not first.any():
            return accepted
        accepted |= first
        near = F.max_pool1d(first.float(), 2 * spacing + 1, stride=1, padding=spacing)
        centre.masked_fill_(near.bool(), -math.inf)


def select(deficit: Tensor, eligible: Tensor, count: int | Tensor, budget: float | Tensor, spacing: int) -> Tensor:
    """Scans eligible positions in increasing deficit (ties: lower position first) and accepts each that fits.

    deficit: (B, L). eligible: (B, L) bool. count: the most positions of a sample, one limit for all samples or (B,).
    budget: the largest sum of accepted deficits of a sample, likewise. spacing: accepted positions are more than this
    far apart. Returns (B, L) bool."""
    # Deficits ascend: once a deficit exceeds a limit, so do all later ones. Count and budget keep the first candidates.
    candidates = spaced(deficit.to(torch.float64), eligible, spacing)
    number = candidates.cumsum(-1)  # numbers the candidates of each sample from 1, in order of position
    width = int(number[:, -1].max())
    row, position = candidates.nonzero(as_tuple=True)
    column = number[row, position] - 1
    packed = deficit.new_full((len(deficit), width), math.inf, dtype=torch.float64)
    packed[row, column] = deficit[row, position].to(torch.float64)
    ranked = packed.sort(dim=-1, stable=True)
    rank = torch.arange(width, device=deficit.device)
    fits = (rank < _per_sample(count, deficit)) & (ranked.values.cumsum(-1) <= _per_sample(budget, deficit))
    kept = torch.zeros_like(fits).scatter(-1, ranked.indices, fits)
    candidates[row, position] = kept[row, column]
    return candidates


def _per_sample(limit: float | Tensor, like: Tensor) -> Tensor:
    """A limit as a number for all samples, or as a column with one for each."""
    limit = torch.as_tensor(limit, dtype=torch.float64, device=like.device)
    return limit[:, None] if limit.dim() else limit
