"""A worker: it walks a group of units, measures each as it is done, and publishes it in the store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limpet.diffusion.rng import CounterRNG
from limpet.errors import LimpetError
from limpet.evaluation import scoring
from limpet.evaluation.judges import Judge
from limpet.evaluation.metrics import mauve
from limpet.evaluation.statistics import numbers
from limpet.experiments import branching
from limpet.experiments.branching import PAPERS, Trail
from limpet.experiments.resources import Shelf, provenance
from limpet.experiments.store import Store, Unwritable
from limpet.experiments.study import Judging
from limpet.experiments.units import MAUVE, Unit, Walk
from limpet.generation import Counted, at_once, given_tokens
from limpet.models import Denoiser
from limpet.models.duo import Precision
from limpet.samplers.context import open_context

TEXTS = 2  # of a shard, that a report shows


@dataclass(frozen=True)
class Job:
    """What every worker of a run is told once."""

    store: str
    judges: tuple[Judging, ...]
    metrics: tuple[str, ...]
    precision: Precision = "float32"
    real: str | None = None  # a text that samples are held against
    threads: int | None = None  # of torch on the CPU; None leaves it alone
    which: Mapping[str, str] = field(default_factory=dict)  # of the models' weights, where it was told


class Event(NamedTuple):
    """A unit that is there, or why it is not."""

    unit: Unit
    error: str | None = None
    fatal: bool = False  # nothing else can be made either
    made: bool = True  # here and now; else it was found: another runner's


class Worker:
    """Models and judges on one device, and the store that results go to."""

    def __init__(self, job: Job, device: str | None = None, shelf: Shelf | None = None) -> None:
        if job.threads:
            torch.set_num_threads(job.threads)
        self.job, self.store = job, Store(job.store)
        self.shelf = shelf or Shelf(device, job.precision, job.which)

    def work(self, group: Sequence[Unit]) -> Iterator[Event]:
        """Make the units of a group that are not there yet; what fails is told, and loses nothing that is done."""
        begun = time.monotonic()
        left = {unit.key: unit for unit in group if self.store.look(unit.key, unit.at)[0] is None}
        yield from (Event(unit, made=False) for unit in group if unit.key not in left)
        try:
            with torch.inference_mode():
                for unit, made, rows in self._made(list(left.values())):
                    self.store.write(unit.key, made, {"facts": unit.facts, **rows}, unit.at)
                    seconds, begun = time.monotonic() - begun, time.monotonic()
                    self.store.log({"unit": unit.key, "name": unit.name, "seconds": seconds})
                    del left[unit.key]
                    yield Event(unit)
        except Exception as error:
            reason = str(error) if isinstance(error, LimpetError) else f"{type(error).__name__}: {error}"
            yield from (Event(unit, reason, isinstance(error, Unwritable)) for unit in left.values())

    def _made(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, dict[str, Tensor] | bytes, dict[str, Any]]]:
        """What the store is to keep of each unit."""
        walks = [unit for unit in units if isinstance(unit, Walk)]
        for walk, trails in self._walked(walks) if walks else ():
            yield walk, *self._measured(walk, trails)
        for unit in units:
            if not isinstance(unit, Walk):
                yield unit, *unit.made(self.shelf)

    def _walked(self, walks: Sequence[Walk]) -> Iterator[tuple[Walk, list[Trail]]]:
        """Walks that begin alike, batch by batch."""
        first, cell = walks[0], walks[0].cell
        model = Counted(self.shelf.model(cell.model))
        prefix = None if first.prefixes is None else torch.tensor(first.prefixes)
        given = given_tokens(model, cell.n, first.length, prefix, None).to(model.device)
        # The batch is fixed, as a network may round otherwise in another.
        batches = torch.split(torch.arange(cell.n, device=model.device), at_once(model.device, first.length))
        opened = [open_context(model, CounterRNG(first.seed, cell.first + rows), given[rows]) for rows in batches]
        return branching.walk(walks, opened, self._memory)

    @cache  # noqa: B019  a worker lives as long as its run
    def _real(self, judge: Judge, model: Denoiser, n: int, length: int) -> NDArray[np.float32]:
        """The features of the real text in pieces as long as the samples: as many, spread evenly over it, or all."""
        pieces = scoring.pieces(model, self.job.real or "", length)
        chosen = np.linspace(0, len(pieces) - 1, min(n, len(pieces))).round().astype(int)
        return scoring.features(judge, model, [pieces[i] for i in chosen])

    def _memory(self, key: str) -> list[Tensor]:
        """What a unit that is to be replayed remembered at its end."""
        found = self.store.read(key)
        if found is None:
            raise LimpetError(f"unit {key}, whose selection is to be replayed, is not in the store")
        if not found.rows["memory"]:
            raise LimpetError(f"unit {key} remembers nothing that could be replayed")
        return [found.tensors[name].to(getattr(torch, kind)) for name, kind in found.rows["memory"]]

    def _measured(self, unit: Walk, trails: Sequence[Trail]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tokens and the sampler's last memory; scores, diversity, and what was marked along the path."""
        model = self.shelf.model(unit.cell.model)
        tokens = torch.cat([trail.state.tokens for trail in trails]).cpu()
        memory = [torch.cat(part).cpu() for part in zip(*(trail.state.memory for trail in trails), strict=True)]
        names = getattr(trails[0].state.memory, "_fields", ("tokens",))
        if "tokens" in names:  # taken, or it has no names
            names = tuple(f"memory{i}" for i in range(len(memory)))
        given = len(unit.prefixes[0]) if unit.prefixes else 0
        prompts = None if unit.prefixes is None else [",".join(map(str, prefix)) for prefix in unit.prefixes]
        columns, sets = scoring.diversity(tokens[:, given:], self.job.metrics, prompts)
        for i, (_, judge) in enumerate(self.shelf.judges(self.job.judges, model)):
            scores = scoring.score(judge, model, tokens, given, unit.facts["judges"][i]["convention"])
            # By number, not by name: one judge may go by two names, and the unit is the same.
            columns |= {f"{name}:{i}": numbers(getattr(scores, name)) for name in ("nll", "tokens", "dropped")}
            if "mauve" in unit.facts and i == 0:
                ours, theirs = scoring.features(judge, model, tokens), self._real(judge, model, *tokens.shape)
                sets["mauve"] = numbers([mauve(ours, theirs, **MAUVE).mean()])[0]
        for mark in {name: None for trail in trails for name in trail.marks}:
            count = torch.cat([trail.marks.get(mark, trail.ctx.no_positions.sum(-1)) for trail in trails]).tolist()
            if mark in PAPERS or any(count):  # others may be of whoever led the path so far
                columns[mark] = count
        kinds = [str(part.dtype).removeprefix("torch.") for part in memory]
        tensors = dict(zip(("tokens", *names), map(_narrow, (tokens, *memory)), strict=True))
        return tensors, {
            "provenance": [provenance(model)],
            "nfe": max(trail.calls for trail in trails),
            "memory": list(zip(names, kinds, strict=True)),
            "columns": columns,
            "sets": sets,
            "texts": [model.tokenizer.decode(row) for row in tokens[:TEXTS].tolist()] if model.tokenizer else [],
        }


def _narrow(part: Tensor) -> Tensor:
    """Whole numbers in half the bytes, where they fit."""
    return part.int() if part.dtype == torch.long and torch.equal(part.int().long(), part) else part
