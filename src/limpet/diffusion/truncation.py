"""Truncation of a distribution to a subset of its tokens: top-p without a sort, top-k, min-p.

Tokens are ranked by weight, ties by lower id. Let c_k be the mass of the first k tokens. The boundary `paper` keeps the
smallest k with c_k >= p; `released` keeps the smallest k with c_k > p, which is one token more if c_k = p."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Boundary = Literal["released", "paper"]


class Support(NamedTuple):
    """Which tokens may be drawn: those that all of these criteria keep, each applied to the whole distribution."""

    top_p: float = 1.0  # the fewest most likely tokens with this mass
    boundary: Boundary = "released"
    top_k: int | None = None  # this many of the most likely tokens
    min_p: float = 0.0  # tokens at least this fraction as likely as the most likely one

    @property
    def keeps_all(self) -> bool:
        """Whether no token is removed."""
        return self.top_p >= 1 and self.top_k is None and self.min_p == 0


ALL_TOKENS = Support()
SLACK = 1e-9  # much more than the rounding error of float64 sums


def _fits(mass: Tensor, limit: Tensor, boundary: Boundary) -> Tensor:
    """Whether top-p keeps one more token after tokens of this mass."""
    return mass <= limit if boundary == "released" else mass < limit


def _mass_above(weights: Tensor, threshold: Tensor, buffer: Tensor) -> Tensor:
    """(R, 1) float64: the mass of each row's weights above its threshold. Writes those weights, else 0, to `buffer`."""
    torch.gt(weights, threshold, out=buffer)  # 0 and 1 in the dtype of the weights: faster than a boolean mask
    return buffer.mul_(weights).sum(-1, keepdim=True, dtype=torch.float64)


def nucleus(weights: Tensor, p: float, boundary: Boundary) -> Tensor:
    """The tokens that top-p keeps, found by bisection on the threshold instead of a sort.

    weights: (R, V), not negative, not necessarily normalised. Returns (R, V) bool.

    The smallest weight kept is the smallest one above which the mass fits. The bits of non-negative floats, read as
    integers, have the same order as the floats. So bisection on the bits, snapped to weights that occur, finds it."""
    bits = torch.int64 if weights.dtype == torch.float64 else torch.int32
    limit = p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    largest = weights.amax(-1, keepdim=True)
    out_of_reach = 4 * float(largest.max()) if len(weights) else 0.0
    high = largest.view(bits)  # the mass above `high` fits: nothing is above the largest weight
    low = torch.full_like(high, -1)  # the mass above `low` does not fit
    buffer = torch.empty_like(weights)
    while (high - low > 1).any():
        middle = (high - (high - low) // 2).view(weights.dtype)  # equals `high` in rows that are done
        fits = _fits(_mass_above(weights, middle, buffer), limit, boundary)
        under = torch.sub(weights, buffer, out=buffer).amax(-1, keepdim=True)  # the largest weight up to the middle
        torch.le(weights, middle, out=buffer)
        over = torch.add(weights, buffer, alpha=out_of_reach, out=buffer).amin(-1, keepdim=True)  # the smallest above
        low, high = torch.where(fits, low, over.view(bits) - 1), torch.where(fits, under.view(bits), high)
    threshold = high.view(weights.dtype)
    above = _mass_above(weights, threshold, buffer)
    return _first_ranked(weights, threshold, _tied_count(above, threshold.double(), limit, boundary))


def _tied_count(above: Tensor, threshold: Tensor, limit: Tensor, boundary: Boundary) -> Tensor:
    """(R, 1) how many tokens with exactly the threshold's weight are kept after the mass `above`: at least one, and all
    if the weight is zero. The comparisons correct a quotient that was rounded across a whole number."""
    quotient = ((limit - above) / threshold).floor().nan_to_num(math.inf).clamp(max=2.0**53)
    more = quotient - (~_fits(above + quotient * threshold, limit, boundary)).double()
    return (more + _fits(above + (more + 1) * threshold, limit, boundary) + 1).long()


def _first_ranked(weights: Tensor, threshold: Tensor, tied: Tensor) -> Tensor:
    """bool (R, V): the weights above each row's threshold, and the first `tied` weights that equal it."""
    at_threshold = weights == threshold
    return (weights > threshold) | (at_threshold & (at_threshold.cumsum(-1) <= tied))


def truncated_prob_bounds(weights: Tensor, own: Tensor, total: Tensor, support: Support) -> tuple[Tensor, Tensor]:
    """Bounds (R,) on the probability of one token of each row after truncation, without truncating the row.

    weights: (R, V). own: (R,) the weight of the token. total: (R,) the sum of the row.

    The tokens that top-p keeps have at least the mass p, and at most p without the last of them. So a token is removed
    if the tokens above it have more mass than p, and kept if all others that are not below it have less. The mass kept
    then is at most p plus the token's own. For top-k and min-p the bounds are 0 and infinity."""
    if support.top_k is not None or support.min_p > 0:
        return torch.zeros_like(total), torch.full_like(total, math.inf)
    limit, threshold, own = support.top_p * total, own[:, None].to(weights.dtype), own.double()
    buffer = torch.empty_like(weights)
    above = _mass_above(weights, threshold, buffer)[:, 0]
    others = torch.ge(weights, threshold, out=buffer).mul_(weights).sum(-1, dtype=torch.float64) - own
    least = (own / (limit + own)).where(others < limit * (1 - SLACK), 0)
    return (1 - SLACK) * least, (1 + SLACK) * (own / limit).where(above <= limit * (1 + SLACK), 0)


def kept(weights: Tensor, support: Support) -> Tensor:
    """The tokens that a support keeps, bool (R, V), of weights (R, V)."""
    keep = weights >= support.min_p * weights.amax(-1, keepdim=True)
    if support.top_p < 1:
        keep &= nucleus(weights, support.top_p, support.boundary)
    if support.top_k is not None and support.top_k < weights.shape[-1]:
        ranked = weights.topk(support.top_k, -1).values
        keep &= _first_ranked(weights, ranked[:, -1:], (ranked == ranked[:, -1:]).sum(-1, keepdim=True))
    return keep


def truncate(probs: Tensor, support: Support) -> Tensor:
    """The distributions (..., V) restricted to a support and normalised again, in float64."""
    probs = probs.to(torch.float64)
    if support.keeps_all:
        return probs
    probs = probs * kept(probs.reshape(-1, probs.shape[-1]), support).view(probs.shape)
    return probs / probs.sum(-1, keepdim=True)


def restrict(probs: Tensor, p: float, boundary: Boundary = "released") -> Tensor:
    """T_p: the distributions restricted to their nucleus and normalised again (eq. 9), in float64."""
    return truncate(probs, Support(p, boundary))
