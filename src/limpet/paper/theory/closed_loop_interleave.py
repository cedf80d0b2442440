"""Exact output distributions of interleaved steps, and of steps at all positions in every call."""

from collections.abc import Callable, Iterator
from itertools import product

import torch

from limpet.experiments import Panel
from limpet.models.exact import Mixture, Source, codebook
from limpet.paper.theory import exact_outputs as exact
from limpet.paper.theory.checks import Check
from limpet.paper.theory.problems import chain
from limpet.samplers import Native
from limpet.samplers.native import Grid

CALLS = (4, 8, 16, 64)
GRIDS: tuple[Grid, ...] = ("uniform", "quadratic")


def distant_pairs() -> Mixture:
    """Position 0 depends on 2, and 1 on 3; neighbours are independent."""
    words = torch.cartesian_prod(torch.arange(3), torch.arange(3)).repeat(1, 2)
    return codebook(words, 3, torch.full((9,), 1 / 9, dtype=torch.float64), slip=0.1)


SOURCES: dict[str, Callable[[], Source]] = {
    "three modes": exact.latent,
    "Markov chain": lambda: chain(4),
    "pairs two positions apart": distant_pairs,
}


def native(nfe: int, grid: Grid, interleave: bool) -> Native:
    return Native(nfe=nfe, grid=grid, interleave=interleave, final_step="sample")


def checks() -> list[Check]:
    rows = []
    for (name, create), grid, nfe in product(SOURCES.items(), GRIDS, CALLS):
        source = create()
        where = f"{name}, V={source.vocab_size}, L={source.length}, {grid}, {nfe} calls"
        one, other = (exact.measure(source, native(nfe, grid, interleave)) for interleave in (True, False))
        rows += exact.contrast(where, "interleaved", one, "native", other, "tv")
    return rows + exact.check_samples(exact.latent(), "interleaved", native(8, "quadratic", True), 120)


def panels() -> Iterator[Panel]:
    places, ticks = range(len(exact.CALLS)), {"xticks": range(len(exact.CALLS)), "xticklabels": exact.CALLS}
    variants = (("native", False, "C0"), ("interleaved", True, "C1"))
    sweeps = {
        (f"{name}, {grid}", color + style): [native(nfe, grid, interleave) for nfe in exact.CALLS]
        for (name, interleave, color), (grid, style) in product(variants, zip(GRIDS, (".-", ".--"), strict=True))
    }
    for title, create in SOURCES.items():
        lines = exact.lines_along(create(), places, sweeps, "tv")["tv"]
        yield Panel(title, "network calls", exact.TITLES["tv"], lines, axes={**ticks, "yscale": "log"})
