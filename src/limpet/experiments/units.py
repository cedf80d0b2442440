"""The units of a study: one cell under one seed, each with a key of everything that decides its result."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from limpet import registry
from limpet.errors import LimpetError
from limpet.evaluation import convention_for
from limpet.evaluation.checkers import Checker, sudoku
from limpet.evaluation.judges import CONVENTIONS, source_judge
from limpet.evaluation.metrics import METRICS
from limpet.evaluation.statistics import numbers
from limpet.experiments.model_cache import ModelCache, provenance
from limpet.experiments.store import UnitPaths, canonical_json, digest, unit_key, unit_paths
from limpet.experiments.study import Cell, Probe, Prompts, Study
from limpet.files import read_prompts, read_text
from limpet.generation import prompt_tokens
from limpet.models import Denoiser, tokenizer_digest
from limpet.models.exact import Source
from limpet.models.prompt_layouts import SUDOKU
from limpet.samplers import Sampler

# Of samplers and measures: raised whenever equal inputs would give another result, or keys are formed in another way.
RESULT_VERSION = 2

MAUVE_STARTS = 1  # starts of each of the k-means clusterings over whose seeds the mean is taken
MAUVE_RULE = (
    "of the first judge's features at the last token of the text, against pieces of the reference text of the same "
    "length, as many as there are samples or all that it has, spread evenly over it; mean over "
    f"5 k-means seeds, {MAUVE_STARTS} start each, a tenth as many buckets as texts; not taken after prompts"
)

PromptTokens = tuple[tuple[int, ...], ...]  # the token ids that each sample begins with


@dataclass(frozen=True)
class Unit(ABC):
    """What a worker computes and publishes as one, with a key of everything that decides the result."""

    facts: dict[str, Any]  # the key is their digest
    cost: int  # tokens through the network, roughly: the remaining time is estimated from it

    @cached_property
    def key(self) -> str:
        return unit_key(self.facts)

    @property
    def size(self) -> int:
        """How much it counts of what a run has done."""
        return 1

    @property
    def paths(self) -> UnitPaths:
        """Its files in the store."""
        return unit_paths(self.key)

    @property
    @abstractmethod
    def name(self) -> str: ...

    def compute(self, models: ModelCache) -> tuple[dict[str, Tensor] | bytes, dict[str, Any]]:
        """The data and rows of a unit that does not depend on others."""
        raise TypeError(f"{self.name} is computed together with others")


@dataclass(frozen=True)
class SeedUnit(Unit):
    """One cell under one seed."""

    cell: Cell | Probe
    index: int  # of the seed
    seeds: tuple[int, ...]

    @property
    def seed(self) -> int:
        return self.seeds[self.index]

    @property
    def name(self) -> str:
        return f"{self.cell.name}, seed {self.seed}"


@dataclass(frozen=True)
class ProbeUnit(SeedUnit):
    """The values of a probe under one seed."""

    cell: Probe

    def compute(self, models: ModelCache) -> tuple[dict[str, Tensor], dict[str, Any]]:
        loaded = [models.model(name) for name in self.cell.models]
        values = [
            {**one._asdict(), "at": list(one.at.items()), "value": numbers([one.value])[0]}
            for one in self.cell.function(loaded, self.cell.settings, self.index, self.seeds)
        ]
        return {}, {"provenance": [provenance(model) for model in loaded], "values": values}


START = attrgetter("seed", "cell.model", "cell.n", "cell.first", "length", "prompts")


@dataclass(frozen=True)
class SamplingUnit(SeedUnit):
    """The samples of one cell under one seed."""

    cell: Cell
    length: int
    prompts: PromptTokens | None
    source: str | None  # the key of the unit that it replays

    def shared_calls(self, other: SamplingUnit) -> int:
        """How many first calls are the same: as many as both samplers say.

        Where one replays what the other does not, no call that may commit a token is the same."""
        if START(self) != START(other):
            return 0
        own, others = self.cell.sampler, other.cell.sampler
        calls = min(own.shared_calls(others), others.shared_calls(own))
        return calls if self.source == other.source else min(calls, self.cell.warmup_calls, other.cell.warmup_calls)


@dataclass(frozen=True)
class Plan:
    """A study resolved on real models and judges."""

    units: tuple[SeedUnit, ...]
    document: dict[str, Any]  # what the store keeps, so that status and report need no model

    def groups(self) -> list[list[Unit]]:
        """Units that are computed together, in a fixed order.

        Samples whose trajectories begin alike are in one group, and so are replays and what they replay."""
        distinct = {unit.key: unit for unit in self.units}.values()
        sampling: list[list[SamplingUnit]] = []
        own = [unit for unit in distinct if isinstance(unit, SamplingUnit)]
        for unit in sorted(own, key=lambda unit: bool(unit.source)):
            for group in sampling:
                if any(unit.source == one.key or (not unit.source and unit.shared_calls(one)) for one in group):
                    group.append(unit)
                    break
            else:
                sampling.append([unit])
        others = [list[Unit]([unit]) for unit in distinct if not isinstance(unit, SamplingUnit)]
        return others + [list[Unit](group) for group in sampling]


def plan_name(study: Study) -> str:
    """Where a store keeps a study's plan. Studies of one name with different settings have different plans."""
    settings: list[Any] = [study.seeds, study.metrics, *map(asdict, study.judges), *map(_cell_facts, study.cells)]
    for cell in study.sample_cells:  # files count by name: they may be in another folder next time
        prompts = cell.prompts and (Path(cell.prompts.texts).name, cell.prompts.tokens, cell.prompts.each)
        settings += [cell.length, prompts]
    settings.append(study.reference_text and Path(study.reference_text).name)
    return f"{study.full_name}/{digest(json.dumps(settings, sort_keys=True).encode())[:16]}"


def resolve(study: Study, models: ModelCache) -> Plan:
    """Load every model and judge of a study once and give every unit its key.

    Raises if a model, judge or file cannot be loaded or read."""
    names = [name for cell in study.cells for name in (cell.models if isinstance(cell, Probe) else [cell.model])]
    loaded = {name: models.model(name) for name in names}
    judges = {cell.model: resolve_judges(study, loaded[cell.model], models) for cell in study.sample_cells}
    checkers = {name: models.checker(study.checker, loaded[name]) for name in judges}
    text = read_reference_text(study)
    reference = None if text is None else digest(text.encode())
    units: list[SeedUnit] = []
    for index in range(len(study.seeds)):
        resolved: dict[str, SeedUnit] = {}
        for cell in sorted(study.cells, key=lambda cell: getattr(cell, "replay", None) is not None):
            if isinstance(cell, Probe):
                resolved[cell.name] = _probe_unit(study, cell, [loaded[name] for name in cell.models], index)
            else:
                source = cell.replay and resolved[cell.replay].key
                scored_by = judges[cell.model], checkers[cell.model]
                resolved[cell.name] = _sampling_unit(
                    study, cell, loaded[cell.model], scored_by, reference, index, source
                )
        units += [resolved[cell.name] for cell in study.cells]
    distinct = {canonical_json(judge): judge for some in judges.values() for judge in some}
    rules = {one["convention"]: CONVENTIONS[one["convention"]].rule for one in distinct.values()}
    measures = _metric_conventions(study) if judges else {}
    for checker in checkers.values():
        measures |= getattr(checker, "conventions", {})
    if any("mauve" in unit.facts for unit in units):
        measures["mauve"] = MAUVE_RULE
    keys = {cell.name: [unit.key for unit in units if unit.cell is cell] for cell in study.cells}
    document = {
        "study": study.name,
        "title": study.title,
        "preset": study.preset,
        "result_version": RESULT_VERSION,
        "seeds": list(study.seeds),
        "models": {name: model.digest for name, model in loaded.items()},
        "judges": list(distinct.values()),  # each with every convention by which it reads here
        "conventions": {**rules, **measures, **study.conventions},
        "cells": [{**_cell_facts(cell), "name": cell.name, "keys": keys[cell.name]} for cell in study.cells],
    }
    return Plan(tuple(units), document)


def resolve_judges(study: Study, model: Denoiser, models: ModelCache) -> list[dict[str, str]]:
    """The judges of a model's samples and their conventions; none where a checker alone scores them.

    Raises if a judge cannot score this model, or if nothing can."""
    if not study.judges and source_judge(model) is None and models.checker(study.checker, model) is None:
        raise LimpetError(
            f"the true distribution of {model.name} is not known: study {study.name} needs a judge or a checker"
        )
    return [
        {
            "name": spec.name,
            "digest": judge.digest,
            "precision": judge.precision,
            "convention": convention_for(judge, model, spec.convention),
        }
        for spec, judge in models.judges(study.judges, model)
    ]


def sampler_facts(sampler: Sampler) -> dict[str, Any]:
    """What decides what a sampler does: its parameters and the code of its class."""
    parameters = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in sampler.to_dict().items()
    }
    parameters["sampler"] = Path(sampler.name).name  # without the folder of the sampler's file
    return {"sampler": parameters, "code": registry.code_digest(type(sampler))}


def checker_facts(checker: Checker) -> dict[str, Any]:
    """What decides what a checker finds: how it says each value is taken, and the code of its class."""
    kind = type(checker)
    conventions = dict(getattr(checker, "conventions", {}))
    return {"checker": kind.__qualname__, "conventions": conventions, "code": registry.code_digest(kind)}


def read_reference_text(study: Study) -> str | None:
    """The text that MAUVE compares samples with, if the study has one."""
    return None if study.reference_text is None else read_text(study.reference_text, "name a text file")


def metric_names(names: Sequence[str], is_prompted: bool) -> dict[str, str]:
    """The metric behind each stored name: after prompts, Self-BLEU is taken within each prompt, as in the paper."""
    return {name: "self-bleu-prompt" if name == "self-bleu" and is_prompted else name for name in names}


def _rules(names: Sequence[str], is_prompted: bool) -> dict[str, str]:
    return {stored: METRICS[name].convention for stored, name in metric_names(names, is_prompted).items()}


def _metric_conventions(study: Study) -> dict[str, str]:
    """How each metric is defined; some are defined otherwise after a prompt."""
    kinds = sorted({cell.prompts is not None for cell in study.sample_cells})
    first, last = (_rules(study.metrics, kinds[i]) for i in (0, -1))
    return {
        name: rule if rule == last[name] else f"{rule}; after a prompt {last[name]}" for name, rule in first.items()
    }


def _function_name(probe: Probe) -> str:
    return f"{probe.function.__module__}:{probe.function.__qualname__}"


def _cell_facts(cell: Cell | Probe) -> dict[str, Any]:
    if isinstance(cell, Probe):
        return {"models": list(cell.models), "function": _function_name(cell), "settings": asdict(cell.settings)}
    facts = {name: getattr(cell, name) for name in ("model", "n", "first", "replay")}
    return {**facts, "sampler": cell.sampler.to_dict()}


def _sampling_unit(
    study: Study,
    cell: Cell,
    model: Denoiser,
    scored_by: tuple[list[dict[str, str]], Checker | None],
    reference: str | None,
    index: int,
    source: str | None,
) -> SamplingUnit:
    length, (judges, checker) = cell.length or model.length, scored_by
    prompts = _prompt_tokens(cell, cell.prompts, model, length, index, study.seeds[index]) if cell.prompts else None
    facts = {
        "result_version": RESULT_VERSION,
        "model": model.digest,
        "tokenizer": tokenizer_digest(model.tokenizer),
        **sampler_facts(cell.sampler),
        "seed": study.seeds[index],
        "n": cell.n,
        **({"first": cell.first} if cell.first else {}),
        "length": length,
        "prompts": prompts and digest(canonical_json(prompts)),
        "replay": source,
        "judges": [{"digest": judge["digest"], "convention": judge["convention"]} for judge in judges],
        "measures": _rules(study.metrics, cell.prompts is not None),
        **({} if checker is None else {"checker": checker_facts(checker)}),
    }
    # A true distribution has no features for MAUVE.
    if reference is not None and cell.prompts is None and judges and judges[0]["convention"] != "exact":
        facts |= {"reference": reference, "mauve": MAUVE_RULE}
    cost = cell.sampler.nfe * cell.n * length
    return SamplingUnit(facts, cost, cell, index, study.seeds, length, prompts, source)


def _probe_unit(study: Study, probe: Probe, models: list[Denoiser], index: int) -> ProbeUnit:
    settings = asdict(probe.settings)
    if settings.get("text") is not None:
        settings["text"] = digest(read_text(settings["text"], "name a UTF-8 text file").encode())
    facts = {
        "result_version": RESULT_VERSION,
        "models": [model.digest for model in models],
        "function": _function_name(probe),
        "code": registry.code_digest(probe.function),
        "settings": settings,
        "seed": study.seeds[index],
        "index": index,
        "seeds": len(study.seeds),
    }
    return ProbeUnit(facts, probe.cost, probe, index, study.seeds)


@cache
def _puzzles(count: int, texts: str, seed: int) -> list[str]:
    """Puzzles with one solution, written once for all cells of a study. texts: "sudoku 32"."""
    layout, _, clues = texts.partition(" ")
    return sudoku.puzzles(count, int(clues), seed, SUDOKU[layout].board)


def _prompt_tokens(cell: Cell, prompts: Prompts, model: Denoiser, length: int, index: int, seed: int) -> PromptTokens:
    """The token ids that each sample under one seed begins with; every seed has texts of its own."""
    if prompts.tokens >= length:
        raise LimpetError(f"prompts of {prompts.tokens} tokens leave nothing to generate in {length}")
    count = cell.n // prompts.each
    if prompts.texts == "source":
        if not isinstance(model, Source):
            raise LimpetError(f"{model.name} is no exact source, so prompts cannot be drawn from it: name a file")
        ids: list[list[int]] = model.draw(count, seed)[:, : prompts.tokens].tolist()
    else:
        if prompts.texts.partition(" ")[0] in SUDOKU:
            lines = _puzzles(count, prompts.texts, seed + cell.first)
        else:
            lines = read_prompts(prompts.texts)[index * count : (index + 1) * count]
        if model.tokenizer is None:
            raise LimpetError(f"{model.name} has no tokenizer, so it cannot continue texts")
        ids = [prompt_tokens(model, line)[: prompts.tokens] for line in lines]
        short = next((line for line, row in zip(lines, ids, strict=True) if len(row) < prompts.tokens), None)
        if len(ids) < count or short is not None:
            what = f"{short[:40]!r} is shorter" if short is not None else f"{len(lines)} are left for seed {seed}"
            raise LimpetError(
                f"{prompts.texts} must hold {count} prompts for every seed, of {prompts.tokens} tokens or more; {what}"
            )
    return tuple(tuple(row) for row in ids for _ in range(prompts.each))
