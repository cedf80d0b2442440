"""A million samples: an order is cut into shards of rows, each a unit that any place can make and the store seals.

shard-000000.jsonl           the rows, as `limpet sample` writes them, or the same as .parquet
seals/shard-000000.json      what the rows were made of, and their digest; without it the shard does not exist
plans/samples.json           the order"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from limpet.errors import LimpetError, extra
from limpet.experiments.executors import Place
from limpet.experiments.resources import Shelf, provenance
from limpet.experiments.runner import Progress, Summary, work
from limpet.experiments.store import Spot, Store, canonical, digest
from limpet.experiments.units import RESULT_VERSION, Prefixes, Unit, sampler_facts
from limpet.experiments.worker import Event, Job
from limpet.generation import Samples, at_once, ids_of, reachable, sample, spelled
from limpet.models import tokenizer_digest
from limpet.samplers import Sampler

PLAN = "samples"
LAYOUT = 1  # of a row: raised whenever equal samples would be written otherwise
SHARDS, LEAST, MOST = 64, 32, 1024  # shards that a small order is cut into, and samples that a shard has

Format = Literal["jsonl", "parquet"]


@dataclass(frozen=True)
class Order:
    """What is asked for: samples of one model under one sampler and one seed, and how they are written."""

    model: str
    sampler: Sampler
    n: int  # samples; of each prompt, if there are prompts
    seed: int = 8200
    length: int | None = None  # the model's own unless told
    prompts: tuple[str, ...] = ()
    fixed: Mapping[int, int | str | Sequence[int]] | None = None
    format: Format = "jsonl"
    per_shard: int | None = None  # samples; by their number unless told
    batch_size: int | None = None  # decides no sample, only a network's last bits

    def __post_init__(self) -> None:
        for name in ("n", "per_shard", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise LimpetError(f"{name} is {value}; it takes one or more")
        if self.format not in WRITERS:
            raise LimpetError(f"format is {self.format!r}; it takes {' or '.join(WRITERS)}")


@dataclass(frozen=True)
class Draw(Unit):
    """The samples of one shard."""

    order: Order  # without its prompts
    number: int
    first: int
    n: int
    prefixes: Prefixes | None  # of each of its samples

    @property
    def name(self) -> str:
        return f"shard {self.number}"

    @property
    def at(self) -> Spot:
        return spot(self.number, self.order.format)

    def made(self, shelf: Shelf) -> tuple[bytes, dict[str, Any]]:
        """Batch by batch; the rows of one are written out while the next is sampled."""
        model, order, writer = shelf.model(self.order.model), self.order, WRITERS[self.order.format]
        size = order.batch_size or at_once(model.device, order.length or model.length)
        with ThreadPoolExecutor(1) as pool:
            parts = [
                pool.submit(
                    writer.part,
                    sample(
                        model, order.sampler, min(size, self.n - start), order.seed, order.length,
                        None if self.prefixes is None else self.prefixes[start : start + size], order.fixed,
                        first=self.first + start,
                    ),
                )
                for start in range(0, self.n, size)
            ]  # fmt: skip
            return writer.whole([part.result() for part in parts]), {"provenance": [provenance(model)]}


def spot(number: int, format: str) -> Spot:
    return Spot(f"shard-{number:06}.{format}", f"seals/shard-{number:06}.json")


# How rows are written


class Writer(NamedTuple):
    """Samples of one batch, in whatever form, and the file of all."""

    part: Callable[[Samples], Any]
    whole: Callable[[list[Any]], bytes]


def json_lines(samples: Samples) -> bytes:
    return samples.lines().encode()


def _table(samples: Samples) -> Any:
    arrow = extra("pyarrow", "parquet")
    text, whole = arrow.string(), arrow.int32()
    kinds = {
        "text": text, "tokens": arrow.list_(whole), "seed": arrow.uint64(), "sample": arrow.int64(), "model": text,
        "digest": text, "precision": text, "tokenizer": text, "nfe": whole, "committed": whole, "prefix": whole,
        "prefix_text": text, "fixed": arrow.list_(arrow.list_(whole)), "sampler": text,
    }  # fmt: skip
    rows = [{**row, "sampler": json.dumps(row["sampler"])} for row in samples.rows()]
    return arrow.Table.from_pylist(rows, schema=arrow.schema(kinds))


def _parquet(tables: list[Any]) -> bytes:
    """One group of rows, whatever the batches were."""
    arrow, file = extra("pyarrow", "parquet"), io.BytesIO()
    whole = arrow.concat_tables(tables).combine_chunks()
    extra("pyarrow.parquet", "parquet").write_table(whole, file, compression="zstd", row_group_size=len(whole))
    return file.getvalue()


WRITERS = {"jsonl": Writer(json_lines, b"".join), "parquet": Writer(_table, _parquet)}


# From an order to shards


def resolve(order: Order, store: Store, shelf: Shelf) -> tuple[list[Draw], dict[str, Any]]:
    """The shards of an order and what the store remembers of it; or why it cannot be, or not in this store."""
    if order.format == "parquet":
        extra("pyarrow.parquet", "parquet")
    model = shelf.model(order.model)
    length = order.length or model.length
    fixed = spelled(model, (order.fixed or {}).items(), length)
    prompts = tuple(tuple(ids_of(model, prompt, "prompts")) for prompt in order.prompts)
    for i, ids in enumerate(prompts):
        if len(ids) > length:
            which = f"prompt {i + 1} of {len(prompts)} has {len(ids)} tokens"
            raise LimpetError(f"{which}, the sequence {length}: shorten it or raise length")
        if torn := [at for at, token in enumerate(ids) if fixed.get(at, token) != token]:
            raise LimpetError(f"prompt {i + 1} of {len(prompts)} and what is fixed differ at position {torn[0]}")
    total = order.n * max(1, len(prompts))
    reachable(total, order.seed, 0, order.batch_size)
    facts = {
        "exact": RESULT_VERSION,
        "layout": LAYOUT,
        "name": model.name,
        "model": model.digest,
        "precision": model.precision,
        "tokenizer": tokenizer_digest(model.tokenizer),
        **sampler_facts(order.sampler),
        "seed": order.seed,
        "length": length,
        "given": digest(canonical([sorted(fixed.items()), order.n if len(prompts) > 1 else None, prompts])),
        "format": order.format,
    }
    size = _size(order, total, facts, store)
    order = replace(order, length=length, prompts=(), fixed=fixed)
    draws = [
        _draw(order, facts, number, first, min(size, total - first), prompts)
        for number, first in enumerate(range(0, total, size))
    ]
    keys = [draw.key for draw in draws]
    document = {"samples": total, "per_shard": size, "facts": facts, "shards": [*range(len(draws))]}
    return draws, {**document, "cells": [{"name": PLAN, "keys": keys}]}


def _draw(order: Order, facts: dict[str, Any], number: int, first: int, n: int, prompts: Prefixes) -> Draw:
    prefixes = tuple(prompts[i // order.n] for i in range(first, first + n)) if prompts else None
    cost = order.sampler.nfe * n * facts["length"]
    return Draw({**facts, "first": first, "n": n}, cost, order, number, first, n, prefixes)


def _size(order: Order, total: int, facts: dict[str, Any], store: Store) -> int:
    """Samples in a shard: as the store has them already, if it was begun, and it must have been by the same order."""
    begun = _begun(store)
    if begun is None:
        return order.per_shard or min(MOST, max(LEAST, 1 << max(1, total // SHARDS).bit_length() - 1))
    size = int(begun["per_shard"])
    params = begun["facts"].get("sampler") or {}
    pairs = {name: (params.get(name), value) for name, value in facts["sampler"].items()}
    pairs |= {name: (begun["facts"].get(name), value) for name, value in facts.items() if name != "sampler"}
    pairs["per_shard"] = size, order.per_shard or size
    pairs["n"] = begun["samples"], min(total, begun["samples"])  # more may be asked for
    for name, (held, asked) in pairs.items():
        if held != asked:
            what = "other prompts or fixed words" if name == "given" else f"{name} {held!r}, and not {asked!r}"
            raise LimpetError(f"{store.path} was begun with {what}: ask for the same, or name another folder")
    return size


def _begun(store: Store) -> dict[str, Any] | None:
    """The order that a store was begun with, if any."""
    try:
        plan = store.read_plan(PLAN)
    except LimpetError:
        return None
    counts, facts = [plan.get(name) for name in ("samples", "per_shard")], plan.get("facts")
    whole = all(type(count) is int and count > 0 for count in counts) and len(plan["cells"]) == 1
    return plan if whole and isinstance(facts, dict) and facts.get("format") in WRITERS else None


# The work


class Pace(NamedTuple):
    """How far an order is: told before the first shard and after each."""

    event: Event | None
    done: int  # samples, with those found done
    total: int
    rate: float  # samples a second in this run, whoever made them
    left: float | None  # seconds, once it can be told


def make(
    order: Order,
    store: Store,
    place: Place,
    shelf: Shelf,
    *,
    threads: int | None = None,
    tell: Callable[[Pace], None] = lambda pace: None,
) -> Summary:
    """Make every shard that is not in the store. A larger n goes on where a smaller one ended."""
    store.sweep()
    before = _begun(store)
    draws, document = resolve(order, store, shelf)
    store.write_plan(PLAN, document)
    job = Job(store.path, (), (), shelf.precision, None, threads, shelf.which)
    summary = work([[draw] for draw in draws], store, place, job, _paced(document, tell))
    if before is not None and before["samples"] < document["samples"]:  # its last shard has grown, and is not damaged
        summary.damaged.pop(f"shard {(before['samples'] - 1) // before['per_shard']}", None)
    return summary


def _paced(document: dict[str, Any], tell: Callable[[Pace], None]) -> Callable[[Progress], None]:
    """From shards to samples. Only the last shard has fewer, so that few may be counted too early."""
    begun, found, total = 0.0, 0, document["samples"]

    def told(now: Progress) -> None:
        nonlocal begun, found
        done = min(total, now.done * document["per_shard"])
        if now.event is None:
            begun, found = time.monotonic(), done
        tell(Pace(now.event, done, total, (done - found) / max(1e-9, time.monotonic() - begun), now.left))

    return told


class Checked(NamedTuple):
    """A shard that was read: how many samples it should have, and what is wrong with it, if anything."""

    name: str
    samples: int
    wrong: str


def verify(store: Store) -> Iterator[Checked]:
    """Read every shard of a store whole, against its seal and the order: no model is needed."""
    plan = _begun(store)
    if plan is None:
        raise LimpetError(f"{store.path} holds no samples in shards: name a folder that `limpet sample --out` wrote")
    for number, key in enumerate(plan["cells"][0]["keys"]):
        at, first = spot(number, plan["facts"]["format"]), number * plan["per_shard"]
        found, damage = store.look(key, at)
        yield Checked(at.data, min(plan["per_shard"], plan["samples"] - first), damage or ("" if found else "missing"))
