"""A worker: it walks a group of units, measures each as it is done, and publishes it in the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch

from limpet import process
from limpet.errors import LimpetError
from limpet.lab import paths
from limpet.lab.bench import Bench, provenance
from limpet.lab.measure import measure
from limpet.lab.paths import Arm, Trail
from limpet.lab.store import Store, Unwritable
from limpet.lab.study import Judging
from limpet.lab.units import Unit, fixed
from limpet.sampler import NEVER, Run
from limpet.samples import Counted, Selection, prepare
from limpet.streams import Stream

BATCH = {"cpu": 8192, "cuda": 65536}  # tokens at once: fixed, as a network may round otherwise in another batch


@dataclass(frozen=True)
class Job:
    """What every worker of a run is told once."""

    store: str
    judges: tuple[Judging, ...]
    metrics: tuple[str, ...]
    precision: Literal["float32", "bfloat16"] = "float32"
    threads: int | None = None  # of torch on the CPU; None leaves it alone


class Event(NamedTuple):
    """A unit that was made, or why it was not."""

    key: str
    cell: str
    seed: int
    cost: int
    seconds: float
    error: str | None = None
    fatal: bool = False  # nothing else can be made either


class Worker:
    """Models and judges on one device, and the store that results go to."""

    def __init__(self, job: Job, device: str | None = None, bench: Bench | None = None) -> None:
        if job.threads:
            torch.set_num_threads(job.threads)
        self.job, self.store = job, Store(job.store)
        self.bench = bench or Bench(device, job.precision)

    def work(self, group: Sequence[Unit]) -> Iterator[Event]:
        """Make the units of a group that are not there yet; what fails is told, and loses nothing that is done."""
        begun = time.monotonic()
        left = {unit.key: unit for unit in group if not self.store.has(unit.key)}
        try:
            with torch.inference_mode():
                for unit, trails in self._walk(list(left.values())):
                    self._publish(unit, trails)
                    seconds, begun = time.monotonic() - begun, time.monotonic()
                    self.store.log({"unit": unit.key, "cell": unit.cell.name, "seed": unit.seed, "seconds": seconds})
                    del left[unit.key]
                    yield Event(unit.key, unit.cell.name, unit.seed, unit.cost, seconds)
        except Exception as error:
            reason = str(error) if isinstance(error, LimpetError) else f"{type(error).__name__}: {error}"
            fatal = isinstance(error, Unwritable)
            for unit in left.values():
                yield Event(unit.key, unit.cell.name, unit.seed, unit.cost, 0.0, reason, fatal)

    def _walk(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[Trail]]]:
        if not units:
            return
        model = Counted(self.bench.model(units[0].cell.model))
        given = fixed(units[0]).to(model.device)
        size = max(1, BATCH[model.device.type] // given.shape[1])
        batches = [slice(start, min(len(given), start + size)) for start in range(0, len(given), size)]

        def run(unit: Unit, rows: slice, replay: Selection | None) -> Run:
            stream = Stream(unit.seed, torch.arange(rows.start, rows.stop, device=model.device))
            return prepare(model, unit.cell.policy, stream, given[rows], replay=replay)

        def runs(unit: Unit) -> list[Run]:
            whole = None if unit.source is None else self._selection(unit.source)
            return [run(unit, rows, None if whole is None else _on(whole[rows], model.device)) for rows in batches]

        arms = []
        for unit in units:
            # Marks do not depend on what is replayed, only on whose selection it is.
            nothing = Selection(torch.full((1, unit.length), NEVER), torch.zeros(1, unit.length, dtype=torch.long))
            one = run(unit, slice(0, 1), None if unit.source is None else _on(nothing, model.device))
            arms.append(Arm(unit.key, paths.marks(one, unit.source), unit.source is not None, _once(runs, unit)))
        by_key = {unit.key: unit for unit in units}
        first = min(arms, key=lambda arm: arm.late)
        for arm, trails in paths.walk(arms, paths.begin(first.runs())):
            yield by_key[arm.key], trails

    def _selection(self, key: str) -> Selection:
        found = self.store.read(key)
        if found is None:
            raise LimpetError(f"unit {key}, whose selection is to be replayed, is not in the store")
        tensors = found.tensors
        if "selected_at" not in tensors:  # it selected nothing
            return Selection(torch.full(tensors["tokens"].shape, NEVER), torch.zeros_like(tensors["tokens"]).long())
        at = tensors["selected_at"].long()
        return Selection(torch.where(at < 0, NEVER, at), tensors["labels"].long())

    def _publish(self, unit: Unit, trails: Sequence[Trail]) -> None:
        model = self.bench.model(unit.cell.model)
        tokens = torch.cat([trail.state.tokens for trail in trails]).cpu()
        at = torch.cat([trail.state.selected_at for trail in trails]).cpu()
        labels = torch.cat([trail.state.labels for trail in trails]).cpu()
        selected = (at != NEVER).sum(-1)
        tensors = {"tokens": tokens.int()}
        if selected.any():
            tensors |= {"selected_at": torch.where(at == NEVER, -1, at).short(), "labels": labels.int()}
        judges = [(self.bench.judge(judging.name), judging.convention) for judging in self.job.judges]
        columns, sets = measure(tokens, unit.prefixes, model, judges, self.job.metrics)
        policy = unit.cell.policy
        after = policy.nfe - 1 - process.warmup_steps(policy.nfe, policy.warmup)
        visible = torch.cat([trail.visible for trail in trails]).double().cpu() / max(1, after)
        rows: dict[str, Any] = {
            "facts": unit.facts,
            "provenance": provenance(model),
            "nfe": max(trail.calls for trail in trails),
            "columns": {**columns, "selected": selected.tolist(), "visible": visible.tolist()},
            "sets": sets,
        }
        self.store.write(unit.key, tensors, rows)


def _on(selection: Selection, device: torch.device) -> Selection:
    return Selection(selection.selected_at.to(device), selection.labels.to(device))


def _once(runs: Callable[[Unit], list[Run]], unit: Unit) -> Callable[[], Sequence[Run]]:
    return cache(lambda: runs(unit))
