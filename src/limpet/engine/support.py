"""Top-p: which tokens a law keeps, with both boundary conventions, and without a full sort where none is needed.

Tokens are ranked by weight, ties by lower id. With c_k the mass of the first k tokens:
`paper` keeps the smallest k with c_k >= p; `released` the smallest k with c_k > p (one token more at an exact tie)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Boundary = Literal["released", "paper"]
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
    at_threshold = weights == threshold
    return (weights > threshold) | (at_threshold & (at_threshold.cumsum(-1) <= tied))


def restrict(law: Tensor, p: float, boundary: Boundary = "released") -> Tensor:
    """T_p: the law restricted to its nucleus and renormalised (eq. 9), in float64."""
    law = law.to(torch.float64)
    if p >= 1:
        return law
    kept = law * nucleus(law.reshape(-1, law.shape[-1]), p, boundary).view(law.shape)
    return kept / kept.sum(-1, keepdim=True)
