"""A worker: computes the units of a group, evaluates each, and publishes it in the store."""

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
from limpet.evaluation import SampleSet, evaluate, features, text_pieces
from limpet.evaluation.judges import Judge
from limpet.evaluation.statistics import numbers
from limpet.experiments.branching import PAPER_MASKS, Branch, sample_units
from limpet.experiments.leases import Leases
from limpet.experiments.model_cache import ModelCache, provenance
from limpet.experiments.store import Store, StoreWriteError
from limpet.experiments.study import JudgeSpec
from limpet.experiments.units import MAUVE_STARTS, SamplingUnit, Unit, metric_names
from limpet.generation import CountingDenoiser, Inputs, default_batch_size, fixed_tokens
from limpet.models import Denoiser
from limpet.models.networks import Precision

TEXTS_PER_UNIT = 2  # samples whose text is stored, for reports
POLL = 0.2  # seconds between two looks at a unit that another runner computes


@dataclass(frozen=True)
class WorkerConfig:
    """What every worker of a run needs to know."""

    store: str
    judges: tuple[JudgeSpec, ...]
    metrics: tuple[str, ...]
    precision: Precision = "float32"
    reference_text: str | None = None  # what MAUVE compares samples with
    checker: str | None = None  # default: each model's own, if it names one
    threads: int | None = None  # of torch on the CPU; default: torch's own choice
    load_options: Mapping[str, str] = field(default_factory=dict)  # which of a model's weights


class UnitEvent(NamedTuple):
    """What became of a unit."""

    unit: Unit
    error: str | None = None
    fatal: bool = False  # nothing else can be computed either
    computed: bool = True  # by this worker; False if another runner had published it
    busy: bool = False  # another runner is computing it: the executor tries the group again later


class Worker:
    """Models and judges on one device, and the store that results go to."""

    def __init__(self, config: WorkerConfig, device: str | None = None, models: ModelCache | None = None) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.config, self.store = config, Store(config.store)
        self.models = models or ModelCache(device, config.precision, config.load_options)
        self.leases = Leases(self.store)
        self._seen_busy: set[str] = set()

    def work(self, group: Sequence[Unit]) -> Iterator[UnitEvent]:
        """Compute the units of a group that are not there yet. A failure loses nothing that is finished."""
        begun, keys = time.monotonic(), [unit.key for unit in group]
        left = {unit.key: unit for unit in group}
        try:
            if not self.leases.acquire(keys):
                if keys[0] in self._seen_busy:
                    time.sleep(POLL)
                self._seen_busy.add(keys[0])
                yield from (UnitEvent(unit, computed=False, busy=True) for unit in group)
                return
            for unit in group:
                # The rows are written last. The runner has read and checked what was there before.
                if self.store.exists(unit.paths.rows):
                    yield UnitEvent(left.pop(unit.key), computed=False)
            with torch.inference_mode():
                for unit, data, rows in self._results(list(left.values())):
                    self.store.write(unit.key, data, {"facts": unit.facts, **rows}, unit.paths)
                    seconds, begun = time.monotonic() - begun, time.monotonic()
                    self.store.log({"unit": unit.key, "name": unit.name, "seconds": seconds})
                    yield UnitEvent(left.pop(unit.key))
        except Exception as error:
            reason = str(error) if isinstance(error, LimpetError) else f"{type(error).__name__}: {error}"
            yield from (UnitEvent(unit, reason, isinstance(error, StoreWriteError)) for unit in left.values())
        finally:
            self.leases.release(keys)

    def _results(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, dict[str, Tensor] | bytes, dict[str, Any]]]:
        """The data and rows of each unit."""
        sampling = [unit for unit in units if isinstance(unit, SamplingUnit)]
        for unit, branches in self._sampled(sampling) if sampling else ():
            yield unit, *self._evaluated(unit, branches)
        for other in units:
            if not isinstance(other, SamplingUnit):
                yield other, *other.compute(self.models)

    def _sampled(self, units: Sequence[SamplingUnit]) -> Iterator[tuple[SamplingUnit, list[Branch]]]:
        """Samples of units that start from the same noise, batch by batch."""
        first, cell = units[0], units[0].cell
        model = CountingDenoiser(self.models.model(cell.model))
        prompt = None if first.prompts is None else torch.tensor(first.prompts)
        fixed = fixed_tokens(model, cell.n, first.length, prompt, None).to(model.device)
        # The batch size is part of the result, because a network may round otherwise in another batch.
        size = default_batch_size(model.device, first.length)
        batches = [
            (rows, Inputs(fixed[rows], CounterRNG(first.seed, cell.first + rows)))
            for rows in torch.split(torch.arange(cell.n, device=model.device), size)
        ]
        return sample_units(model, units, batches, self._memory)

    @cache  # noqa: B019  a worker lives as long as its run
    def _reference(self, judge: Judge, model: Denoiser, n: int, length: int) -> NDArray[np.float32]:
        """Features of n pieces of the reference text, as long as the samples and spread evenly over it."""
        pieces = [ids for _, ids in text_pieces(model, self.config.reference_text or "", length).ids or ()]
        chosen = np.linspace(0, len(pieces) - 1, min(n, len(pieces))).round().astype(int)
        return features(judge, SampleSet.from_tokens(model, [pieces[i] for i in chosen]))

    def _memory(self, key: str) -> list[Tensor]:
        """The final memory of a unit that is replayed."""
        found = self.store.read(key)
        if found is None:
            raise LimpetError(f"unit {key}, whose selection is to be replayed, is not in the store")
        if not found.rows["memory"]:
            raise LimpetError(f"unit {key} has no memory that could be replayed")
        return [found.tensors[name].to(getattr(torch, kind)) for name, kind in found.rows["memory"]]

    def _evaluated(self, unit: SamplingUnit, branches: Sequence[Branch]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tokens and the sampler's final memory; scores, metrics, and the counts of masks."""
        model = self.models.model(unit.cell.model)
        tokens = torch.cat([branch.state.tokens for branch in branches]).cpu()
        scores = self._scores(unit, model, tokens)
        for mask in {name: None for branch in branches for name in branch.counts}:
            counts = [branch.counts.get(mask, torch.zeros_like(branch.state.tokens[:, 0])) for branch in branches]
            count = torch.cat(counts).tolist()
            if mask in PAPER_MASKS or any(count):  # another mask may be that of the sampler that ran for this one
                scores["columns"][mask] = count
        memory = [torch.cat(part).cpu() for part in zip(*(branch.state.memory for branch in branches), strict=True)]
        names = getattr(branches[0].state.memory, "_fields", ("tokens",))
        if "tokens" in names:  # the tokens have that name, or the memory has no names
            names = tuple(f"memory{i}" for i in range(len(memory)))
        types = [str(part.dtype).removeprefix("torch.") for part in memory]
        tensors = dict(zip(("tokens", *names), map(_narrowed, (tokens, *memory)), strict=True))
        texts = [model.tokenizer.decode(row) for row in tokens[:TEXTS_PER_UNIT].tolist()] if model.tokenizer else []
        return tensors, {
            "provenance": [provenance(model)],
            "nfe": max(branch.calls for branch in branches),
            "memory": list(zip(names, types, strict=True)),
            "texts": texts,
            **scores,
        }

    def _scores(self, unit: SamplingUnit, model: Denoiser, tokens: Tensor) -> dict[str, Any]:
        """Columns with one value per sample, values of the whole set, and which of them are a checker's."""
        prompt_length = len(unit.prompts[0]) if unit.prompts else 0
        samples = SampleSet.from_tokens(model, tokens, prompt_length)
        names = metric_names(self.config.metrics, unit.prompts is not None)
        scores = evaluate(samples, None, names.values(), checker=self.models.checker(self.config.checker, model))
        checks = [name for name in scores.measures if name not in names.values()]
        each, whole = scores.columns(), scores.set_values()
        stored = {**dict(zip(checks, checks, strict=True)), **names}
        columns: dict[str, Any] = {as_name: numbers(each[name]) for as_name, name in stored.items() if name in each}
        sets: dict[str, Any] = {as_name: numbers([whole[name]])[0] for as_name, name in stored.items() if name in whole}
        for i, (_, judge) in enumerate(self.models.judges(self.config.judges, model)):
            convention = unit.facts["judges"][i]["convention"]
            reference = self._reference(judge, model, *tokens.shape) if i == 0 and "mauve" in unit.facts else None
            scores = evaluate(samples, judge, (), convention=convention, reference=reference, mauve_starts=MAUVE_STARTS)
            # By number: one judge may have two names, and the unit is the same.
            for name in ("nll", "tokens", "dropped"):
                columns[f"{name}:{i}"] = numbers(getattr(scores.judged[0], name))
            if scores.mauve is not None:
                sets["mauve"] = numbers([scores.mauve.mean()])[0]
        return {"checks": checks, "columns": columns, "sets": sets}


def _narrowed(part: Tensor) -> Tensor:
    """Whole numbers in half the bytes, where they fit."""
    return part.int() if part.dtype == torch.long and torch.equal(part.int().long(), part) else part
