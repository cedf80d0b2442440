"""The units of a study: (cell, shard), each keyed by everything that decides its result."""

from __future__ import annotations

import json
import lzma
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from limpet import registry
from limpet.errors import LimpetError
from limpet.evaluation import scoring
from limpet.evaluation.judges import CONVENTIONS
from limpet.evaluation.statistics import numbers
from limpet.experiments.resources import Shelf, provenance
from limpet.experiments.store import Spot, canonical, digest, key_of
from limpet.experiments.study import Cell, Probe, Prompts, Study
from limpet.files import read_prompts, read_text
from limpet.models import Denoiser, tokenizer_digest
from limpet.models.exact import Source
from limpet.samplers import Sampler

RESULT_VERSION = 1  # of the samplers and the measures: raised whenever equal inputs would give another result

MAUVE = {"seeds": 5, "redo": 1}  # clusterings: seeds to take the mean over, and starts of each
MAUVE_RULE = (
    "of the first judge's features at the last id of the text, against as many pieces of the real text as there are "
    "samples, or all that it has, as long as they and spread evenly over it; mean over "
    f"{MAUVE['seeds']} k-means seeds, {MAUVE['redo']} start each, a tenth as many buckets as texts; not taken after "
    "prefixes"
)

Prefixes = tuple[tuple[int, ...], ...]  # ids, for each sample


@dataclass(frozen=True)
class Unit(ABC):
    """What is made as one: all that a worker needs, and a key of everything that decides the result."""

    facts: dict[str, Any]  # what the key is the digest of
    cost: int  # tokens through the network, roughly: what time left is reckoned by

    @cached_property
    def key(self) -> str:
        return key_of(self.facts)

    @property
    def at(self) -> Spot | None:
        """Its own files in the store, if it has such."""
        return None

    @property
    @abstractmethod
    def name(self) -> str: ...

    def made(self, shelf: Shelf) -> tuple[dict[str, Tensor] | bytes, dict[str, Any]]:
        """What the store is to keep of it, if it is made alone: tensors or bytes, and rows."""
        raise TypeError(f"{self.name} is made together with others")


@dataclass(frozen=True)
class Shard(Unit):
    """One cell in one shard."""

    cell: Cell | Probe
    shard: int  # which of
    shards: tuple[int, ...]  # the seeds

    @property
    def seed(self) -> int:
        return self.shards[self.shard]

    @property
    def name(self) -> str:
        return f"{self.cell.name}, seed {self.seed}"


@dataclass(frozen=True)
class Look(Shard):
    """What a probe sees in one shard."""

    cell: Probe

    def made(self, shelf: Shelf) -> tuple[dict[str, Tensor], dict[str, Any]]:
        models = [shelf.model(name) for name in self.cell.models]
        seen = [
            {**one._asdict(), "at": list(one.at.items()), "value": numbers([one.value])[0]}
            for one in self.cell.look(models, self.cell.settings, self.shard, self.shards)
        ]
        return {}, {"provenance": [provenance(model) for model in models], "seen": seen}


START = attrgetter("seed", "cell.model", "cell.n", "cell.first", "length", "prefixes")


@dataclass(frozen=True)
class Walk(Shard):
    """Samples of one cell in one shard."""

    cell: Cell
    length: int
    prefixes: Prefixes | None
    source: str | None  # key of the walk that it replays

    def shared(self, other: Walk) -> int:
        """How many first calls are the same: as many as both samplers say, and where one replays what the other does
        not, none that may select."""
        if START(self) != START(other):
            return 0
        mine, theirs = self.cell.sampler, other.cell.sampler
        calls = min(mine.shared(theirs), theirs.shared(mine))
        return calls if self.source == other.source else min(calls, self.cell.warmup_calls, other.cell.warmup_calls)


@dataclass(frozen=True)
class Plan:
    """A study resolved on real models and judges."""

    units: tuple[Shard, ...]
    document: dict[str, Any]  # what the store remembers, so that status and report need no model

    def groups(self) -> list[list[Unit]]:
        """What is worked together, in a fixed order: walks that begin alike, and replays after what they replay."""
        distinct = {unit.key: unit for unit in self.units}.values()
        walks: list[list[Walk]] = []
        for walk in sorted((unit for unit in distinct if isinstance(unit, Walk)), key=lambda walk: bool(walk.source)):
            for group in walks:
                if any(walk.source == other.key or (not walk.source and walk.shared(other)) for other in group):
                    group.append(walk)
                    break
            else:
                walks.append([walk])
        return [list[Unit]([unit]) for unit in distinct if not isinstance(unit, Walk)] + [
            list[Unit](group) for group in walks
        ]


def _named(probe: Probe) -> str:
    return f"{probe.look.__module__}:{probe.look.__qualname__}"


def name(study: Study) -> str:
    """What a study is called in a store and among reports."""
    return f"{study.name}-{study.preset}" if study.preset else study.name


def filed(study: Study) -> str:
    """Where a store keeps a study's plan: studies of one name that ask for other things do not meet."""
    asked: list[Any] = [study.shards, study.metrics, *map(asdict, study.judges), *map(_written, study.cells)]
    for cell in study.samples:
        asked += [cell.length, cell.prompts and (Path(cell.prompts.texts).name, cell.prompts.tokens, cell.prompts.each)]
    asked.append(study.real and Path(study.real).name)  # files may stand elsewhere where it is asked for again
    return f"{name(study)}/{digest(json.dumps(asked, sort_keys=True).encode())[:16]}"


def resolve(study: Study, shelf: Shelf) -> Plan:
    """Load every model and judge once, or say which cannot be had or read, and key every unit."""
    names = [name for cell in study.cells for name in (cell.models if isinstance(cell, Probe) else [cell.model])]
    models = {name: shelf.model(name) for name in names}
    judges = {cell.model: judges_of(study, models[cell.model], shelf) for cell in study.samples}
    text = real(study)
    held = None if text is None else digest(text.encode())
    units: list[Shard] = []
    for shard in range(len(study.shards)):
        made: dict[str, Shard] = {}
        for cell in sorted(study.cells, key=lambda cell: getattr(cell, "replay", None) is not None):
            if isinstance(cell, Probe):
                made[cell.name] = _look(study, cell, [models[name] for name in cell.models], shard)
            else:
                made[cell.name] = _samples(study, cell, models[cell.model], judges[cell.model], held, shard, made)
        units += [made[cell.name] for cell in study.cells]
    known = {canonical(judge): judge for some in judges.values() for judge in some}
    rules = {one["convention"]: CONVENTIONS[one["convention"]].rule for one in known.values()}
    measures = _conventions(study) if judges else {}
    if any("mauve" in unit.facts for unit in units):
        measures["mauve"] = MAUVE_RULE
    keys = {cell.name: [unit.key for unit in units if unit.cell is cell] for cell in study.cells}
    return Plan(tuple(units), {
        "study": study.name,
        "title": study.title,
        "preset": study.preset,
        "exact": RESULT_VERSION,
        "shards": list(study.shards),
        "models": {name: model.digest for name, model in models.items()},
        "judges": list(known.values()),  # each with every convention that it reads by here
        "conventions": {**rules, **measures, **study.conventions},
        "cells": [{**_written(cell), "name": cell.name, "keys": keys[cell.name]} for cell in study.cells],
    })  # fmt: skip


def _conventions(study: Study) -> dict[str, str]:
    """How each metric is taken, which for some is not the same after a prefix."""
    alone, after = (scoring.conventions(study.metrics, prompted) for prompted in (False, True))
    some, others = (any((cell.prompts is None) == free for cell in study.samples) for free in (True, False))
    if not (some and others):
        return after if others else alone
    return {
        name: rule if rule == after[name] else f"{rule}; after a prefix {after[name]}" for name, rule in alone.items()
    }


def _written(cell: Cell | Probe) -> dict[str, Any]:
    if isinstance(cell, Probe):
        return {"models": list(cell.models), "look": _named(cell), "settings": asdict(cell.settings)}
    return {"model": cell.model, "sampler": cell.sampler.to_dict(), "n": cell.n, "first": cell.first,
            "replay": cell.replay}  # fmt: skip


def judges_of(study: Study, model: Denoiser, shelf: Shelf) -> list[dict[str, str]]:
    """Who judges a model's samples, and by which convention; or why one cannot."""
    if not study.judges and scoring.source_judge(model) is None:
        raise LimpetError(f"the true distribution of {model.name} is not known: study {study.name} needs a judge")
    return [
        {
            "name": judging.name,
            "digest": judge.digest,
            "precision": judge.precision,
            "convention": scoring.way_for(judge, model, judging.convention).convention,
        }
        for judging, judge in shelf.judges(study.judges, model)
    ]


def _samples(
    study: Study, cell: Cell, model: Denoiser, judges: list[dict[str, str]], text: str | None, shard: int,
    made: dict[str, Shard],
) -> Walk:  # fmt: skip
    length = cell.length or model.length
    prefixes = _prefixes(cell, cell.prompts, model, length, shard, study.shards[shard]) if cell.prompts else None
    source = cell.replay and made[cell.replay].key
    # A true distribution has no features to hold samples against a text by.
    held = text if cell.prompts is None and judges[0]["convention"] != "exact" else None
    facts = {
        "exact": RESULT_VERSION,
        "model": model.digest,
        "tokenizer": tokenizer_digest(model.tokenizer),
        **sampler_facts(cell.sampler),
        "seed": study.shards[shard],
        "n": cell.n,
        **({"first": cell.first} if cell.first else {}),
        "length": length,
        "prefixes": prefixes and digest(canonical(prefixes)),
        "replay": source,
        "judges": [{"digest": judge["digest"], "convention": judge["convention"]} for judge in judges],
        "measures": scoring.conventions(study.metrics, cell.prompts is not None),
        **({"real": held, "mauve": MAUVE_RULE} if held is not None else {}),
    }
    return Walk(facts, cell.sampler.nfe * cell.n * length, cell, shard, study.shards, length, prefixes, source)


def sampler_facts(sampler: Sampler) -> dict[str, Any]:
    """What decides what a sampler does: its parameters, and the code of its class."""
    params = {
        param: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for param, value in sampler.to_dict().items()
    }
    # Not the folder that its file stands in.
    return {"sampler": {**params, "sampler": Path(sampler.name).name}, "code": registry.code_digest(type(sampler))}


def real(study: Study) -> str | None:
    """The text that samples are held against, if any."""
    if study.real is None:
        return None
    path = Path(study.real)
    return lzma.decompress(path.read_bytes()).decode() if path.suffix == ".xz" else read_text(path, "name a text file")


def _look(study: Study, probe: Probe, models: list[Denoiser], shard: int) -> Look:
    settings = asdict(probe.settings)
    if settings.get("text") is not None:
        settings["text"] = digest(read_text(settings["text"], "name a UTF-8 text file").encode())
    facts = {
        "exact": RESULT_VERSION,
        "models": [model.digest for model in models],
        "look": _named(probe),
        "code": registry.code_digest(probe.look),
        "settings": settings,
        "seed": study.shards[shard],
        "shard": shard,
        "shards": len(study.shards),
    }
    return Look(facts, probe.cost, probe, shard, study.shards)


def _prefixes(cell: Cell, prompts: Prompts, model: Denoiser, length: int, shard: int, seed: int) -> Prefixes:
    """The ids that each sample of a shard begins with; shards take the texts in turn."""
    if prompts.tokens >= length:
        raise LimpetError(f"prompts of {prompts.tokens} tokens leave nothing to generate in {length}")
    count = cell.n // prompts.each
    if prompts.texts == "source":
        if not isinstance(model, Source):
            raise LimpetError(f"{model.name} is no exact source, so prompts cannot be drawn from it: name a file")
        ids: list[list[int]] = model.draw(count, seed)[:, : prompts.tokens].tolist()
    else:
        lines = read_prompts(prompts.texts)[shard * count : (shard + 1) * count]
        if model.tokenizer is None:
            raise LimpetError(f"{model.name} has no tokenizer, so it cannot continue texts")
        ids = [model.tokenizer.encode(line)[: prompts.tokens] for line in lines]
        short = next((line for line, row in zip(lines, ids, strict=True) if len(row) < prompts.tokens), None)
        if len(ids) < count or short is not None:
            what = f"{short[:40]!r} is shorter" if short is not None else f"{len(lines)} are left for shard {shard + 1}"
            raise LimpetError(
                f"{prompts.texts} must hold {count} prompts for every shard, of {prompts.tokens} tokens or more; {what}"
            )
    return tuple(tuple(row) for row in ids for _ in range(prompts.each))
