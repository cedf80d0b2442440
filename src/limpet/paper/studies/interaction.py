"""What visibility gains as support shrinks (appendix D.7; figure 4): cells of `factorial` and `continuation`."""

from collections.abc import Iterator

from limpet.experiments import Panel, Series, estimate_series
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults, ticks

STEPS = (("0", "short"), ("short", "unlimited"))  # the gain of each is NLL of the first minus the second
TOP_PS = (1.0, 0.9, 0.85, 0.8)
LATE_TOP_PS = (1.0, 0.8)  # those with all horizons after a prompt


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    def gains(name: str, family: str, top_ps: tuple[float, ...], step: tuple[str, str]) -> Series:
        found = [results.contrast(*(f"{family}/{p}/{horizon}" for horizon in step)) for p in top_ps]
        return estimate_series(name, top_ps, found, joined=family == "late")

    titles = f"horizon 0 to {preset.horizon}", f"horizon {preset.horizon} to ∞"
    for title, step in zip(titles, STEPS, strict=True):
        lines = gains("unconditional", "late", TOP_PS, step), gains("after a prompt", "prompt", LATE_TOP_PS, step)
        yield Panel(title, "late top-p", "gain in NLL, nats/token", lines, ticks(TOP_PS), reverse_x=True)
