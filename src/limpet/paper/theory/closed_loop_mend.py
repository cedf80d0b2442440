"""Exact output distributions of Mend, of the same sampler that revises nothing, and of the native sampler."""

from limpet.models.exact import Source
from limpet.paper.theory import exact_outputs as exact
from limpet.paper.theory.checks import Check
from limpet.paper.theory.exact_outputs import crs_with_deficit, latent
from limpet.paper.theory.problems import chain, describe
from limpet.samplers import Mend, Native
from limpet.samplers.crs import CRSFinalStep

FINAL_STEPS: tuple[CRSFinalStep, ...] = ("keep", "argmax")
DEFICITS = (0.0, 0.1, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0)  # that a call may commit


def mend(source: Source, nfe: int, final_step: CRSFinalStep, deficit: float = 0.2) -> Mend:
    """Mend without top-p, so that only committed tokens sharpen the distribution, and with a budget for each call."""
    budget = crs_with_deficit(source, nfe, "argmax", deficit=deficit).budget
    return Mend(nfe=nfe, final_step=final_step, late_top_p=None, budget=budget)


def samplers(source: Source, nfe: int, final_step: CRSFinalStep, deficit: float = 0.2) -> dict[str, Native]:
    """Mend, CRS with the same parameters, and native with the final step that CRS uses where nothing is committed."""
    ours = mend(source, nfe, final_step, deficit)
    return {"Mend": ours, "CRS": ours.replace(revise=0), "native": ours.native()}


def contrasts(source: Source, nfe: int, final_step: CRSFinalStep) -> list[Check]:
    """Mend beside the others, at as many calls and at equal entropy."""
    chosen, where = samplers(source, nfe, final_step), f"{describe(source)}, {nfe} calls, final_step={final_step}"
    ours, rows = exact.measure(source, chosen["Mend"]), []
    for name in ("CRS", "native"):
        other = exact.measure(source, chosen[name])
        rows += exact.contrast(where, "Mend", ours, name, other, "tv", "kl", "entropy", "reverse_kl")
    by_deficit = [samplers(source, nfe, final_step, deficit)["CRS"] for deficit in DEFICITS]
    for name, curve in (("CRS", by_deficit), ("top-p", exact.top_p_curve(chosen["native"]))):
        rows += exact.at_equal_entropy(source, where, "Mend", chosen["Mend"], name, curve)
    return rows


def checks() -> list[Check]:
    rows = []
    for source in (latent(), chain(4)):
        for final_step in FINAL_STEPS:
            rows += contrasts(source, 4, final_step) + contrasts(source, 16, final_step)
    for seed, final_step in enumerate(FINAL_STEPS, 110):
        rows += exact.check_samples(latent(), "Mend", mend(latent(), 8, final_step), seed)
    return rows
