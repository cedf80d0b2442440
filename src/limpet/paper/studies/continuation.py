"""Continuations of fixed prompts (appendix D.6; table 9 and its contrasts)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from limpet.experiments import DIVERSITY_METRICS, Cell, Contrast, Finding, Table, above, below, equivalent
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import METRIC_CAPTIONS, Claims, MakeFinding, PaperResults, published, row_name
from limpet.samplers import CRS, Sampler

ROWS = (  # late top-p and horizon of the table's rows; the last has top-p at every step
    ("1.0", "0"),
    ("1.0", "short"),
    ("1.0", "unlimited"),
    ("0.9", "short"),
    ("0.8", "0"),
    ("0.8", "short"),
    ("0.8", "unlimited"),
    ("all 0.8", "0"),
)
LATE_TOP_PS = (1.0, 0.8)  # those with all horizons
HORIZON_STEPS = (("0", "short"), ("short", "unlimited"))  # the gain of each is NLL of the first minus the second


def cells(preset: Preset) -> tuple[Cell, ...]:
    """Cells prompt/LATE/HORIZON, and Mend with its defaults."""

    def crs(late: str) -> CRS:
        is_global = late.startswith("all ")
        return preset.crs.replace(**{"top_p" if is_global else "late_top_p": float(late.removeprefix("all "))})

    samplers: dict[str, Sampler] = {
        f"prompt/{late}/{horizon}": preset.horizons(crs(late))[horizon] for late, horizon in ROWS
    }
    return tuple(
        Cell(name, preset.distilled, sampler, preset.prompted_n, preset.prompted_length, preset.prompts)
        for name, sampler in {**samplers, "prompt/mend": preset.mend}.items()
    )


def tables(results: PaperResults, preset: Preset) -> Iterator[Table]:
    captions = preset.horizon_captions

    def names(late: str, horizon: str) -> tuple[str, str]:
        return late.capitalize() if late.startswith("all") else f"Late {late}", captions[horizon]

    groups = [{f"prompt/{late}/{h}": names(late, h) for late, h in rows} for rows in (ROWS[:-1], ROWS[-1:])]
    groups.append({"prompt/mend": ("Mend", captions["unlimited"])})
    measures = (*(f"ppl:{judge}" for judge in results.judges), *DIVERSITY_METRICS[:3])
    yield results.measure_table("continuation", groups, measures)
    policies = {"prompt/all 0.8/0": ("p=0.8 at every step, H=0",)}
    policies |= {f"prompt/0.8/{h}": (f"late p=0.8, H={captions[h]}",) for h in ("short", "unlimited")}
    yield results.measure_table("continuation-self-bleu", [policies], ["self-bleu"])


Differences = Mapping[str, tuple[str, ...]]  # by name, the cells of a difference, or of a difference of differences


def gain_cells(family: str, step: tuple[str, str], *top_ps: float) -> tuple[str, ...]:
    """The cells whose difference is the gain of a longer horizon, at one late p or at the first minus the second."""
    return tuple(f"{family}/{p}/{horizon}" for p in top_ps for horizon in step)


def differences(preset: Preset) -> tuple[Differences, Differences, Differences]:
    """Gains of a longer horizon; how much larger they are at p=1 than at p=0.8; late p=0.8 minus p=0.8 throughout."""
    captions = preset.horizon_captions
    steps = {f"gain of H={captions[a]} to {captions[b]}": (a, b) for a, b in HORIZON_STEPS}
    gains = {
        f"{name}, late p={p:g}": gain_cells("prompt", step, p) for name, step in steps.items() for p in LATE_TOP_PS
    }
    larger = {f"{name}, late p=1 minus 0.8": gain_cells("prompt", step, *LATE_TOP_PS) for name, step in steps.items()}
    against = {
        f"NLL of late p=0.8, H={captions[h]} minus p=0.8 at every step": (f"prompt/0.8/{h}", "prompt/all 0.8/0")
        for h in ("short", "unlimited")
    }
    return gains, larger, against


def contrasts(results: PaperResults, preset: Preset) -> Iterator[Contrast]:
    for measure, judge in ((f"nll:{judge}", judge) for judge in results.judges):
        for group in differences(preset):
            for name, cells in group.items():
                paper = results.paper_text(row_name(*cells), measure)
                yield Contrast(f"{name} ({judge})", results.contrast(*cells, measure=measure), paper)


def claims(results: PaperResults, preset: Preset) -> Claims:
    def positive(group: Differences) -> list[Finding]:
        return [results.finding(above, name, *cells) for name, cells in group.items()]

    def by_second_judge(make: MakeFinding, group: Differences) -> list[Finding]:
        """Findings under the second judge, with the paper's values also where there is no second judge here."""
        found = []
        for name, cells in group.items():
            judge = results.judges[1] if len(results.judges) > 1 else ""
            estimate = results.contrast(*cells, measure=f"nll:{judge}") if judge else results.missing("one judge here")
            found.append(make(f"{name} ({judge or 'second judge'})", estimate, paper=published("nll:2", *cells)))
        return found

    def compared(make: MakeFinding, measure: str, a: str, b: str, name: str) -> Finding:
        cells = f"prompt/{a}", f"prompt/{b}"
        return results.finding(make, f"{METRIC_CAPTIONS[measure]}, {name}", *cells, measure=measure)

    gains, larger, against = differences(preset)
    short, unlimited = positive(against)
    at = preset.horizon_captions
    every_step = f"p=0.8 at every step minus late p=0.8, H={at['unlimited']}"
    horizons = f"late p=0.8, H={at['unlimited']} minus H={at['short']}"
    ends = "1.0/unlimited", "1.0/0", "H=∞ minus H=0, late p=1"
    return {
        "visible": positive(gains),
        "attenuated": positive(larger),
        "attenuated-second": by_second_judge(above, larger),
        "first-judge": [short],
        "first-judge-unlimited": [unlimited],
        "second-judge": by_second_judge(equivalent, against),
        "self-bleu": [
            compared(above, "self-bleu", "all 0.8/0", "0.8/unlimited", every_step),
            compared(above, "self-bleu", "0.8/unlimited", "0.8/short", horizons),
        ],
        "repeats": [compared(below, "dist-4", *ends), compared(above, "rep-4", *ends)],
    }
