"""The paper's statements as code that runs: each file evaluates one of them on sources whose laws are known.

A statement has `sides()`, what stands on its two sides on each source, with computed verdicts, and `figure()`."""

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
from limpet.theory.sides import Sides as Sides


class Statement(NamedTuple):
    """One entry of the table of statements."""

    says: str
    where: str  # in the paper
    sides: Callable[[], list[Sides]]
    figure: Callable[[], Any]  # a matplotlib Figure


STATEMENTS = {
    module.__name__.rpartition(".")[2].replace("_", "-"): Statement(says, where, module.sides, module.figure)
    for module, where, says in (
        (support_restriction, "section 3.2", "restricting the support commutes with the conversion to the posterior"),
        (selection_risk, "proposition 2", "lower noise does not raise the Bayes risk of a selected label"),
        (separated_modes, "appendix B.2", "at low noise the true word of a codebook is the unique nearest one"),
        (shared_modes, "theorem 1", "a product of marginals loses the shared mode; context on it wins it back"),
        (combined_evidence, "theorem 3", "evidence from support restriction and from visible context adds"),
        (diminishing_returns, "corollary 4", "the more evidence there is, the less one more label adds"),
        (bayes_factor, "appendix C.2", "a visible token says more on the mode the less noise there is"),
        (temperature, "appendix E.1", "which laws are a temperature of another, and the convex fit"),
        (closed_loop, "beyond the paper", "what a sampler that inserts its own argmax does, measured"),
        (closed_loop_exact, "beyond the paper", "the same as exact output laws, without sampling noise"),
    )
}
