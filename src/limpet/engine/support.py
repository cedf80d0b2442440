"""Which tokens a law keeps: top-p with both boundary conventions, top-k, min-p; no full sort where none is needed.

Tokens are ranked by weight, ties by lower id. With c_k the mass of the first k tokens:
`paper` keeps the smallest k with c_k >= p; `released` the smallest k with c_k > p (one token more at an exact tie)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Boundary = Literal["released", "paper"]


class Support(NamedTuple):
    """What a law is cut to before it is drawn from: the tokens that all of these keep. Each looks at the whole law."""

    top_p: float = 1.0  # the fewest likeliest tokens that have this mass
    boundary: Boundary = "released"
    top_k: int | None = None  # the likeliest, so many
    min_p: float = 0.0  # those at least this fraction as likely as the likeliest

    @property
    def whole(self) -> bool:
        """Whether nothing is cut."""
        return self.top_p >= 1 and self.top_k is None and self.min_p == 0


EVERY = Support()
FIRST_LOOK = 64  # tokens ranked at first; most nuclei are smaller


def _kept(ranked: Tensor, limit: Tensor, boundary: Boundary) -> Tensor:
    """How many of the ranked weights are kept: the first, and each whose predecessors' mass is within the limit."""
    before = ranked.to(torch.float64).cumsum(-1)
    within = before <= limit if boundary == "released" else before < limit
    return within.sum(-1) + 1  # one more than len(ranked): the nucleus is larger than what was ranked


def nucleus(weights: Tensor, p: float, boundary: Boundary) -> Tensor:
    """(R, V) weights, not necessarily normalised -> bool (R, V): the tokens that top-p keeps."""
    rows, vocab_size = weights.shape
    limit = p * weights.sum(-1, keepdim=True, dtype=torch.float64)
    threshold = weights.new_zeros(rows, 1)  # the smallest weight kept
    tied = torch.zeros(rows, 1, dtype=torch.long, device=weights.device)  # how many of that weight are kept
    pending = torch.arange(rows, device=weights.device)
    look = min(FIRST_LOOK, vocab_size)
    while len(pending):
        ranked = weights[pending].topk(look, -1).values
        kept = _kept(ranked, limit[pending], boundary).clamp(max=vocab_size)
        done = kept <= look
        last = ranked.gather(-1, (kept.clamp(max=look) - 1)[:, None])
        threshold[pending[done]] = last[done]
        tied[pending[done]] = (kept[:, None] - (ranked > last).sum(-1, keepdim=True))[done]
        pending = pending[~done]
        look = min(8 * look, vocab_size)
    return _ranked(weights, threshold, tied)


def _ranked(weights: Tensor, threshold: Tensor, tied: Tensor) -> Tensor:
    """bool (R, V): what lies above a row's threshold, and the first `tied` that lie on it."""
    at_threshold = weights == threshold
    return (weights > threshold) | (at_threshold & (at_threshold.cumsum(-1) <= tied))


def kept(weights: Tensor, support: Support) -> Tensor:
    """(R, V) weights -> bool (R, V): the tokens that a support keeps."""
    keep = weights >= support.min_p * weights.amax(-1, keepdim=True)
    if support.top_p < 1:
        keep &= nucleus(weights, support.top_p, support.boundary)
    if support.top_k is not None and support.top_k < weights.shape[-1]:
        ranked = weights.topk(support.top_k, -1).values
        keep &= _ranked(weights, ranked[:, -1:], (ranked == ranked[:, -1:]).sum(-1, keepdim=True))
    return keep


def cut(law: Tensor, support: Support) -> Tensor:
    """The law restricted to a support and renormalised, in float64."""
    law = law.to(torch.float64)
    if support.whole:
        return law
    law = law * kept(law.reshape(-1, law.shape[-1]), support).view(law.shape)
    return law / law.sum(-1, keepdim=True)


def restrict(law: Tensor, p: float, boundary: Boundary = "released") -> Tensor:
    """T_p: the law restricted to its nucleus and renormalised (eq. 9), in float64."""
    return cut(law, Support(p, boundary))
