"""The units of a study: (cell, shard), each keyed by everything that decides its result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from limpet.denoisers import Denoiser
from limpet.denoisers.exact import Source
from limpet.errors import LimpetError
from limpet.judges import CONVENTIONS
from limpet.lab.bench import Bench
from limpet.lab.measure import TRUE_LAW, conventions
from limpet.lab.store import canonical, digest
from limpet.lab.study import Cell, Prompts, Study

LAW = 1  # of the sampler and the measures: raised whenever equal inputs would give another result


@dataclass(frozen=True)
class Unit:
    """One cell in one shard: all that a worker needs to make it."""

    key: str
    cell: Cell
    seed: int
    length: int
    prefixes: tuple[tuple[int, ...], ...] | None  # one for each sample
    source: str | None  # key of the unit whose selection it replays
    facts: dict[str, Any]  # what the key is the digest of

    @property
    def cost(self) -> int:
        """Tokens through the network, roughly: what time left is reckoned by."""
        return self.cell.policy.nfe * self.cell.n * self.length


@dataclass(frozen=True)
class Plan:
    """A study resolved on real models and judges."""

    study: Study
    units: tuple[Unit, ...]
    models: dict[str, str]  # name -> digest
    judges: tuple[dict[str, str], ...]
    conventions: dict[str, str]

    def groups(self) -> list[list[Unit]]:
        """Units that can share the beginning of a path, one list for each, in a fixed order."""
        groups: dict[object, dict[str, Unit]] = {}
        for unit in self.units:
            groups.setdefault((unit.seed, unit.cell.trunk), {}).setdefault(unit.key, unit)
        return [list(group.values()) for group in groups.values()]

    def to_dict(self) -> dict[str, Any]:
        """What the store remembers, so that status and report need no model."""
        study = self.study
        keys: dict[str, list[str]] = {}
        for unit in self.units:
            keys.setdefault(unit.cell.name, []).append(unit.key)
        return {
            "study": study.name,
            "title": study.title,
            "preset": study.preset,
            "law": LAW,
            "shards": list(study.shards),
            "models": self.models,
            "judges": list(self.judges),
            "conventions": self.conventions,
            "cells": [
                {
                    "name": cell.name,
                    "model": cell.model,
                    "policy": cell.policy.to_dict(),
                    "n": cell.n,
                    "replay": cell.replay,
                    "keys": keys[cell.name],
                }
                for cell in study.cells
            ],
        }


def name(study: Study) -> str:
    """What a study's plan is called in the store."""
    return f"{study.name}-{study.preset}" if study.preset else study.name


def resolve(study: Study, bench: Bench) -> Plan:
    """Load every model and judge once, or say which cannot be had, and key every unit."""
    models = {cell.model: bench.model(cell.model) for cell in study.cells}
    judges = [
        {"name": judging.name, "convention": judging.convention, "digest": bench.judge(judging.name).digest}
        for judging in study.judges
    ]
    for cell in study.cells:
        if not study.judges and not isinstance(models[cell.model], Source):
            raise LimpetError(f"the true law of {cell.model} is not known: study {study.name} needs a judge")
    units: list[Unit] = []
    for shard, seed in enumerate(study.shards):
        made: dict[str, Unit] = {}
        for cell in sorted(study.cells, key=lambda cell: cell.replay is not None):  # sources before their replays
            made[cell.name] = _unit(study, cell, models[cell.model], judges, shard, seed, made)
        units += [made[cell.name] for cell in study.cells]
    rules = {judging.label: CONVENTIONS[judging.convention].rule for judging in study.judges}
    if not judges:
        rules = {TRUE_LAW: "the source's own law, nats per token, every token counted"}
    prompted = any(cell.prompts for cell in study.cells)
    digests = {name: model.digest for name, model in models.items()}
    return Plan(study, tuple(units), digests, tuple(judges), {**rules, **conventions(study.metrics, prompted)})


def _unit(
    study: Study, cell: Cell, model: Denoiser, judges: Iterable[dict[str, str]], shard: int, seed: int,
    made: dict[str, Unit],
) -> Unit:  # fmt: skip
    length = cell.length or model.length
    prefixes = None if cell.prompts is None else _prefixes(cell.prompts, model, cell.n, shard, seed)
    source = None if cell.replay is None else made[cell.replay].key
    facts = {
        "law": LAW,
        "model": model.digest,
        "policy": cell.policy.to_dict(),
        "seed": seed,
        "n": cell.n,
        "length": length,
        "prefixes": None if prefixes is None else digest(canonical(prefixes)),
        "replay": source,
        "judges": [{"digest": judge["digest"], "convention": judge["convention"]} for judge in judges],
        "measures": conventions(study.metrics, cell.prompts is not None),
    }
    key = hashlib.sha256(canonical(facts)).hexdigest()[:40]
    return Unit(key, cell, seed, length, prefixes, source, facts)


def _prefixes(prompts: Prompts, model: Denoiser, n: int, shard: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """The ids that each sample of a shard begins with; shards take the texts in turn."""
    count = n // prompts.each
    if prompts.texts == "source":
        if not isinstance(model, Source):
            raise LimpetError(f"{model.name} is no exact source, so prompts cannot be drawn from it: name a file")
        ids: list[list[int]] = model.draw(count, seed)[:, : prompts.tokens].tolist()
    else:
        lines = _lines(prompts.texts)[shard * count : (shard + 1) * count]
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


def _lines(path: str) -> list[str]:
    try:
        return [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise LimpetError(
            f"the prompts {path} cannot be read ({error}): name a text file, one prompt a line"
        ) from error


def fixed(unit: Unit) -> Tensor:
    """(n, L) given tokens, -1 where free."""
    given = torch.full((unit.cell.n, unit.length), -1)
    if unit.prefixes is not None:
        rows = torch.tensor(unit.prefixes)
        if rows.shape[1] >= unit.length:
            raise LimpetError(f"prompts of {rows.shape[1]} tokens leave nothing to generate in {unit.length}")
        given[:, : rows.shape[1]] = rows
    return given
