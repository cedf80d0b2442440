"""Committed tokens in the output only, or also in the network's input (appendix D.8; figure 5).

`final-only` replays the positions, calls and tokens of a CRS run on a trajectory whose network never sees them, and
writes them into the output, as the CRS run does too: the two differ in the input only. Mend with the same parameters
is not in the paper."""

from collections.abc import Iterator

from limpet.experiments import Panel, Series
from limpet.paper.studies.presets import Preset
from limpet.paper.studies.published import PaperResults, ticks

TOP_PS = (1.0, 0.9, 0.85, 0.8)  # after a warmup at 0.9; the paper does not list its sweep
SAMPLERS = {
    "revisable": "revisable",
    "final-only": "final-only",
    "CRS": "CRS, written to the output",
    "mend": "Mend, written to the output",
}


def panels(results: PaperResults, preset: Preset) -> Iterator[Panel]:
    def lines(x: str | tuple[float, ...]) -> list[Series]:
        return [results.series(caption, [f"{p}/{name}" for p in TOP_PS], x) for name, caption in SAMPLERS.items()]

    ppl = "GenPPL (lower is better)"
    yield Panel("against diversity", "unigram entropy, nats", ppl, lines("entropy"), log_y=True)
    yield Panel("against late top-p", "late top-p", ppl, lines(TOP_PS), ticks(TOP_PS), log_y=True, reverse_x=True)
