"""Which tokens a distribution keeps: top-p with both boundary conventions, top-k, min-p; top-p without a sort.

Tokens are ranked by weight, ties by lower id. With c_k the mass of the first k tokens:
`paper` keeps the smallest k with c_k >= p; `released` the smallest k with c_k > p (one token more at an exact tie)."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Boundary = Literal["released", "paper"]


class Support(NamedTuple):
    """What a distribution is cut to before it is drawn from: the tokens that all of these keep. Each looks at the whole distribution."""

    top_p: float = 1.0  # the fewest likeliest tokens that have this mass
    boundary: Boundary = "released"
    top_k: int | None = None  # the likeliest, so many
    min_p: float = 0.0  # those at least this fraction as likely as the likeliest

    @property
    def whole(self) -> bool:
        """Whether nothing is cut."""
        return self.top_p >= 1 and self.top_k is None and self.min_p == 0


EVERY = Support()
SLACK = 1e-9  # far more than float64 sums can be off by, far less than decides anything often


def _fits(mass: Tensor, limit: Tensor, boundary: Boundary) -> Tensor:
    """Whether one more token is kept after tokens of this mass."""
    return mass <= limit if boundary == "released" else mass < limit


def _above(weights: Tensor, threshold: Tensor, room: Tensor) -> Tensor:
    """(R, 1) float64: the mass of each row's weights above its threshold; `room` (R, V) is left with these weights, and
    zeros."""
    torch.gt(weights, threshold, out=room)  # as numbers: vectorised, where a mask is not
    return room.mul_(weights).sum(-1, keepdim=True, dtype=torch.float64)


def nucleus(weights: Tensor, p: float, boundary: Boundary) -> Tensor:
    """(R, V) weights, not necessarily normalised -> bool (R, V): the tokens that top-p keeps.

    The smallest weight kept is the smallest above which the mass fits. Weights are not negative, so their bits, read
    as whole numbers, stand in the same order: halving finds that weight, in steps to weights that there are."""
    bits = torch.int64 if weights.dtype == torch.float64 else torch.int32
    limit = p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    largest = weights.amax(-1, keepdim=True)
    out_of_reach = 4 * float(largest.max()) if len(weights) else 0.0
    high = largest.view(bits)  # what is above `high` fits: nothing is above the largest
    low = torch.full_like(high, -1)  # and what is above `low` does not
    room = torch.empty_like(weights)
    while (high - low > 1).any():
        middle = (high - (high - low) // 2).view(weights.dtype)  # of a row that is done, `high`
        fits = _fits(_above(weights, middle, room), limit, boundary)
        under = torch.sub(weights, room, out=room).amax(-1, keepdim=True)
        torch.le(weights, middle, out=room)
        over = torch.add(weights, room, alpha=out_of_reach, out=room).amin(-1, keepdim=True)
        low, high = torch.where(fits, low, over.view(bits) - 1), torch.where(fits, under.view(bits), high)
    threshold = high.view(weights.dtype)
    return _ranked(weights, threshold, _tied(_above(weights, threshold, room), threshold.double(), limit, boundary))


def _tied(above: Tensor, threshold: Tensor, limit: Tensor, boundary: Boundary) -> Tensor:
    """(R, 1) how many tokens of exactly the threshold's weight are kept after a mass that fits: at least one, and as
    many more as fit; of weight zero, all. The quotient may be rounded across a whole number."""
    most = ((limit - above) / threshold).floor().nan_to_num(math.inf).clamp(max=2.0**53)
    more = most - (~_fits(above + most * threshold, limit, boundary)).double()
    return (more + _fits(above + (more + 1) * threshold, limit, boundary) + 1).long()


def _ranked(weights: Tensor, threshold: Tensor, tied: Tensor) -> Tensor:
    """bool (R, V): what lies above a row's threshold, and the first `tied` that lie on it."""
    at_threshold = weights == threshold
    return (weights > threshold) | (at_threshold & (at_threshold.cumsum(-1) <= tied))


def bounds(weights: Tensor, own: Tensor, total: Tensor, support: Support) -> tuple[Tensor, Tensor]:
    """(R,) each: between which the distribution, once it is cut, lies at a token of weight `own` (R,), told without cutting it.

    What top-p keeps has at least the mass p, and without its last token at most. So a token is cut if those above it
    have more than that, and kept if all others that are not below it have less; then what is kept has at most p and
    the token's own mass. Of top-k and min-p nothing is told."""
    if support.top_k is not None or support.min_p > 0:
        return torch.zeros_like(total), torch.full_like(total, math.inf)
    limit, own = support.top_p * total, own.double()
    room = torch.empty_like(weights)
    above = _above(weights, own[:, None].to(weights.dtype), room)[:, 0]
    others = (
        torch.ge(weights, own[:, None].to(weights.dtype), out=room).mul_(weights).sum(-1, dtype=torch.float64) - own
    )
    least = (own / (limit + own)).where(others < limit * (1 - SLACK), 0)
    return (1 - SLACK) * least, (1 + SLACK) * (own / limit).where(above <= limit * (1 + SLACK), 0)


def kept(weights: Tensor, support: Support) -> Tensor:
    """(R, V) weights -> bool (R, V): the tokens that a support keeps."""
    keep = weights >= support.min_p * weights.amax(-1, keepdim=True)
    if support.top_p < 1:
        keep &= nucleus(weights, support.top_p, support.boundary)
    if support.top_k is not None and support.top_k < weights.shape[-1]:
        ranked = weights.topk(support.top_k, -1).values
        keep &= _ranked(weights, ranked[:, -1:], (ranked == ranked[:, -1:]).sum(-1, keepdim=True))
    return keep


def cut(probs: Tensor, support: Support) -> Tensor:
    """The distribution restricted to a support and renormalised, in float64."""
    probs = probs.to(torch.float64)
    if support.whole:
        return probs
    probs = probs * kept(probs.reshape(-1, probs.shape[-1]), support).view(probs.shape)
    return probs / probs.sum(-1, keepdim=True)


def restrict(probs: Tensor, p: float, boundary: Boundary = "released") -> Tensor:
    """T_p: the distribution restricted to its nucleus and renormalised (eq. 9), in float64."""
    return cut(probs, Support(p, boundary))
