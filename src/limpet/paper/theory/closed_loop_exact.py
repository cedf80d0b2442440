"""The closed loop without sampling noise: exact output distributions of native, top-p and CRS on tiny sources."""

from collections.abc import Iterator

from limpet.experiments import Panel
from limpet.models.exact import Source
from limpet.paper.theory import exact_outputs as exact
from limpet.paper.theory.checks import Check
from limpet.paper.theory.exact_outputs import crs_with_deficit, latent
from limpet.paper.theory.problems import chain, describe
from limpet.samplers import Native
from limpet.samplers.native import FinalStep

STYLES: dict[FinalStep, str] = {"sample": ".-", "argmax": ".--"}  # by final step


def samplers(source: Source, nfe: int, final_step: FinalStep) -> dict[str, Native]:
    native = Native(nfe=nfe, final_step=final_step)
    return {
        "native": native,
        "top-p 0.9": native.replace(top_p=0.9),
        "CRS": crs_with_deficit(source, nfe, final_step),
        "CRS, no warmup, no budget": crs_with_deficit(source, nfe, final_step, warmup=0.0, deficit=1.0),
    }


def check_convergence(source: Source) -> list[Check]:
    """With final_step=sample, the native sampler comes nearer to the data distribution with more calls."""
    calls, where = (4, 16, 64), f"{describe(source)}, final_step=sample"
    few, medium, many = exact.sweep(source, (Native(nfe=nfe, final_step="sample") for nfe in calls))["tv"]
    return [
        Check("TV of native: 16 calls <= 4 calls", where, medium, "<=", few),
        Check("TV of native: 64 calls <= 16 calls", where, many, "<=", medium),
    ]


def contrasts(source: Source, final_step: FinalStep) -> list[Check]:
    """Each sampler beside the native sampler."""
    measures = {name: exact.measure(source, one) for name, one in samplers(source, 16, final_step).items()}
    native, where = measures.pop("native"), f"{describe(source)}, final_step={final_step}"
    keys = ("tv", "nll", "entropy", "favoured")
    return [
        row for name, ours in measures.items() for row in exact.contrast(where, name, ours, "native", native, *keys)
    ]


def checks() -> list[Check]:
    rows = []
    for source in (latent(), chain(4)):
        rows += check_convergence(source) + contrasts(source, "sample") + contrasts(source, "argmax")
        for final_step in STYLES:
            crs, where = crs_with_deficit(source, 16, final_step), f"{describe(source)}, final_step={final_step}"
            rows += exact.at_equal_entropy(source, where, "CRS", crs, "top-p", exact.top_p_curve(crs.native()))
    for seed, (name, sampler) in enumerate(samplers(latent(), 16, "argmax").items(), 92):
        rows += exact.check_samples(latent(), name, sampler, seed)
    return rows


def panels() -> Iterator[Panel]:
    modes, warmups = latent(), [step / 15 for step in range(15)]
    by_calls = {
        (f"{name}, {final_step}", f"C{color}{style}"): [samplers(modes, nfe, final_step)[name] for nfe in exact.CALLS]
        for final_step, style in STYLES.items()
        for color, name in enumerate(("native", "top-p 0.9", "CRS"))
    }
    by_warmup = {
        (f"deficit {deficit:g} a call", ".-"): [crs_with_deficit(modes, 16, "argmax", x, deficit) for x in warmups]
        for deficit in (0.15, 0.2, 0.3, 0.45, 1.0)
    }
    places, ticks = range(5), {"xticks": range(5), "xticklabels": exact.CALLS}
    keys = ("tv", "nll", "favoured")
    yield from exact.panels_along(modes, "three modes", "network calls", places, by_calls, *keys, **ticks)
    title = "three modes, CRS, 16 calls, argmax"
    yield from exact.panels_along(modes, title, "warmup", warmups, by_warmup, "favoured")
    deficits = (0.0, 0.12, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)
    for source, title in ((modes, "three modes, 16 calls"), (chain(4), "Markov chain, 16 calls")):
        curves: dict[tuple[str, str], list[Native]] = {}
        for final_step, style in STYLES.items():
            native = Native(nfe=16, final_step=final_step)
            curves[f"top-p, {final_step}", f"C1{style}"] = exact.top_p_curve(native)
            curves[f"CRS, {final_step}", f"C2{style}"] = [
                crs_with_deficit(source, 16, final_step, deficit=deficit) for deficit in deficits
            ]
        yield exact.panel_by_entropy(source, title, curves)
