"""The paper's statements as code that runs: each file evaluates one of them on sources whose laws are known.

A statement has `rows()`, a table of left and right sides with computed verdicts, and `figure()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from limpet.theory import (
    bayes_factor,
    closed_loop,
    closed_loop_exact,
    combined_evidence,
    diminishing_returns,
    selection_risk,
    separated_modes,
    shared_modes,
    support_restriction,
    temperature,
)
from limpet.theory.rows import Row

__all__ = ["STATEMENTS", "Row", "Statement"]


class Statement(NamedTuple):
    """One entry of the table of statements."""

    says: str
    where: str  # in the paper
    rows: Callable[[], list[Row]]
    figure: Callable[[], Any]  # a matplotlib Figure


STATEMENTS = {
    "support-restriction": Statement(
        "restricting the support commutes with the conversion to the posterior", "section 3.2",
        support_restriction.rows, support_restriction.figure,
    ),
    "selection-risk": Statement(
        "lower noise does not raise the Bayes risk of a selected label", "proposition 2",
        selection_risk.rows, selection_risk.figure,
    ),
    "separated-modes": Statement(
        "at low noise the true word of a codebook is the unique nearest one", "appendix B.2",
        separated_modes.rows, separated_modes.figure,
    ),
    "shared-modes": Statement(
        "a product of marginals loses the shared mode; context on it wins it back", "theorem 1",
        shared_modes.rows, shared_modes.figure,
    ),
    "combined-evidence": Statement(
        "evidence from support restriction and from visible context adds", "theorem 3",
        combined_evidence.rows, combined_evidence.figure,
    ),
    "diminishing-returns": Statement(
        "the more evidence there is, the less one more label adds", "corollary 4",
        diminishing_returns.rows, diminishing_returns.figure,
    ),
    "bayes-factor": Statement(
        "a visible token says more on the mode the less noise there is", "appendix C.2",
        bayes_factor.rows, bayes_factor.figure,
    ),
    "temperature": Statement(
        "which laws are a temperature of another, and the convex fit", "appendix E.1",
        temperature.rows, temperature.figure,
    ),
    "closed-loop": Statement(
        "what a sampler that inserts its own argmax does, measured", "beyond the paper",
        closed_loop.rows, closed_loop.figure,
    ),
    "closed-loop-exact": Statement(
        "the same as exact output laws, without sampling noise", "beyond the paper",
        closed_loop_exact.rows, closed_loop_exact.figure,
    ),
}  # fmt: skip
