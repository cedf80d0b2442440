"""What stepping in turn does to exact output distributions: even and odd positions by turns, and all of them in every call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch

from limpet.experiments.contents import Panel
from limpet.models.exact import Mixture, Source, codebook
from limpet.paper.theory.closed_loop_exact import TITLES, check_sampler, latent, swept
from limpet.paper.theory.problems import chain
from limpet.paper.theory.sides import Sides, line
from limpet.samplers import Native
from limpet.samplers.native import Grid

CALLS = (4, 8, 16, 64)
GRIDS: tuple[Grid, ...] = ("uniform", "quadratic")


def apart() -> Mixture:
    """Positions that go together two places apart, 0 with 2 and 1 with 3: neighbours know nothing of each other."""
    words = torch.cartesian_prod(torch.arange(3), torch.arange(3)).repeat(1, 2)
    return codebook(words, 3, torch.full((9,), 1 / 9, dtype=torch.float64), slip=0.1)


SOURCES: dict[str, Callable[[], Source]] = {
    "three modes": latent,
    "Markov chain": lambda: chain(4),
    "pairs two places apart": apart,
}


def native(nfe: int, grid: Grid, interleave: bool) -> Native:
    return Native(nfe=nfe, grid=grid, interleave=interleave, final_step="sample")


def contrasts(source: Source, where: str, grid: Grid) -> list[Sides]:
    """Interleaved against all at once at as many calls; no claim is made, the verdict says what was found."""
    interleaved, plain = (
        swept(source, (native(nfe, grid, interleave) for nfe in CALLS))["tv"] for interleave in (True, False)
    )
    return [
        Sides(f"{TITLES['tv']}: interleaved ~ native", f"{where}, {grid}, {nfe} calls", one, "~", other)
        for nfe, one, other in zip(CALLS, interleaved, plain, strict=True)
    ]


def sides() -> list[Sides]:
    found = []
    for name, source in ((name, make()) for name, make in SOURCES.items()):
        for grid in GRIDS:
            found += contrasts(source, f"{name}, V={source.vocab_size}, L={source.length}", grid)
    return found + check_sampler(latent(), "interleaved", native(8, "quadratic", True), 120)


def panels() -> Iterator[Panel]:
    calls = (2, 4, 8, 16, 32)
    ticks = {"xticks": range(len(calls)), "xticklabels": calls, "yscale": "log"}
    for title, make in SOURCES.items():
        source, lines = make(), []
        for (color, interleave), (grid, style) in product(
            enumerate((False, True)), zip(GRIDS, (".-", ".--"), strict=True)
        ):
            found = swept(source, (native(nfe, grid, interleave) for nfe in calls))["tv"]
            lines.append(
                line(
                    f"{'interleaved' if interleave else 'native'}, {grid}", range(len(calls)), found, f"C{color}{style}"
                )
            )
        yield Panel(title, "calls of the denoiser", TITLES["tv"], lines, axes=ticks)
