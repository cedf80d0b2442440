"""Bulk sampling: a request is split into parts, each a unit that any executor computes and the store checks.

part-000000.jsonl             the samples, as `limpet sample` writes them, or the same as .parquet
checksums/part-000000.json    what the samples depend on, and their digest; without it the part does not exist
plans/samples.json            the request"""

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from limpet.errors import LimpetError, import_extra
from limpet.experiments.executors import Executor
from limpet.experiments.model_cache import ModelCache, provenance
from limpet.experiments.runner import RunProgress, RunSummary, run_groups
from limpet.experiments.store import Store, UnitPaths, canonical_json, digest
from limpet.experiments.units import RESULT_VERSION, PromptTokens, Unit, sampler_facts
from limpet.experiments.worker import WorkerConfig
from limpet.generation import SEED, Samples, default_batch_size, fixed_ids, prompt_tokens, sample
from limpet.generation import _check_counts as check_counts
from limpet.models import tokenizer_digest
from limpet.samplers import Sampler

PLAN = "samples"
LAYOUT = 2  # of a row: raised whenever equal samples would be written otherwise
PARTS, SMALLEST, LARGEST = 64, 32, 1024  # parts of a small request; samples in a part

Format = Literal["jsonl", "parquet"]


class OtherRequestError(LimpetError):
    """The store holds the samples of another request."""


@dataclass(frozen=True)
class BulkRequest:
    """Samples of one model under one sampler and one seed, and how they are written."""

    model: str
    sampler: Sampler
    n: int  # samples; of each prompt, if there are prompts
    seed: int = SEED
    length: int | None = None  # default: the model's
    prompts: tuple[str, ...] = ()
    fixed: Mapping[int, int | str | Sequence[int]] | None = None
    format: Format = "jsonl"
    part_size: int | None = None  # samples in a part; default: by the number of samples
    batch_size: int | None = None  # changes a network's rounding alone, and so, rarely, a token

    def __post_init__(self) -> None:
        for name in ("n", "part_size", "batch_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise LimpetError(f"{name} is {value}; it takes one or more")
        if self.format not in WRITERS:
            raise LimpetError(f"format is {self.format!r}; it takes {' or '.join(WRITERS)}")


@dataclass(frozen=True)
class BulkPart(Unit):
    """The samples of one part."""

    request: BulkRequest  # without its prompts
    number: int
    first: int
    n: int
    prompts: PromptTokens | None  # of each of its samples

    @property
    def name(self) -> str:
        return f"part {self.number}"

    @property
    def size(self) -> int:
        return self.n

    @property
    def paths(self) -> UnitPaths:
        return part_paths(self.number, self.request.format)

    def compute(self, models: ModelCache) -> tuple[bytes, dict[str, Any]]:
        """Batch by batch; one batch is written out while the next is sampled."""
        request, model, writer = self.request, models.model(self.request.model), WRITERS[self.request.format]
        size = request.batch_size or default_batch_size(model.device, request.length or model.length)
        with ThreadPoolExecutor(1) as pool:
            written = []
            for start in range(0, self.n, size):
                samples = sample(
                    model,
                    request.sampler,
                    min(size, self.n - start),
                    request.seed,
                    request.length,
                    None if self.prompts is None else self.prompts[start : start + size],
                    request.fixed,
                    first=self.first + start,
                )
                written.append(pool.submit(writer.batch, samples))
            return writer.join([batch.result() for batch in written]), {"provenance": [provenance(model)]}


def part_paths(number: int, format: str) -> UnitPaths:
    """The files of a part."""
    return UnitPaths(f"part-{number:06}.{format}", f"checksums/part-{number:06}.json")


# How samples are written


class Writer(NamedTuple):
    """How the samples of one batch are written, and how batches are joined to a file."""

    batch: Callable[[Samples], Any]
    join: Callable[[list[Any]], bytes]


def json_lines(samples: Samples) -> bytes:
    """JSON lines, one for each sample."""
    return samples.lines().encode()


def _table(samples: Samples) -> Any:
    arrow = import_extra("pyarrow", "parquet")
    text, number = arrow.string(), arrow.int32()
    columns = {
        "text": text,
        "tokens": arrow.list_(number),
        "seed": arrow.uint64(),
        "sample": arrow.int64(),
        "model": text,
        "digest": text,
        "precision": text,
        "tokenizer": text,
        "nfe": number,
        "committed": number,
        "prompt_length": number,
        "prompt": text,
        "fixed": arrow.list_(arrow.list_(number)),
        "sampler": text,
    }
    rows = [one.to_dict() for one in samples]
    rows = [{**row, "sampler": json.dumps(row["sampler"])} for row in rows]
    return arrow.Table.from_pylist(rows, schema=arrow.schema(columns))


def _parquet(tables: list[Any]) -> bytes:
    """One row group, whatever the batches were."""
    arrow, file = import_extra("pyarrow", "parquet"), io.BytesIO()
    table = arrow.concat_tables(tables).combine_chunks()
    import_extra("pyarrow.parquet", "parquet").write_table(table, file, compression="zstd", row_group_size=len(table))
    return file.getvalue()


WRITERS = {"jsonl": Writer(json_lines, b"".join), "parquet": Writer(_table, _parquet)}


# From a request to parts


def resolve(request: BulkRequest, store: Store, models: ModelCache) -> tuple[list[BulkPart], dict[str, Any]]:
    """The parts of a request, and the plan that the store keeps of it. Raises if the request is impossible, or if the
    store holds the samples of another one."""
    if request.format == "parquet":
        import_extra("pyarrow.parquet", "parquet")
    model = models.model(request.model)
    length = request.length or model.length
    fixed = fixed_ids(model, (request.fixed or {}).items(), length)
    prompts = tuple(tuple(prompt_tokens(model, prompt)) for prompt in request.prompts)
    for i, ids in enumerate(prompts):
        which = f"prompt {i + 1} of {len(prompts)}"
        if len(ids) > length:
            raise LimpetError(f"{which} has {len(ids)} tokens, the sequence {length}: shorten it or raise length")
        if clashes := [position for position, token in enumerate(ids) if fixed.get(position, token) != token]:
            raise LimpetError(f"{which} and what is fixed differ at position {clashes[0]}")
    total = request.n * max(1, len(prompts))
    check_counts(total, request.seed, 0, request.batch_size)
    facts = {
        "result_version": RESULT_VERSION,
        "layout": LAYOUT,
        "name": model.name,
        "model": model.digest,
        "precision": model.precision,
        "tokenizer": tokenizer_digest(model.tokenizer),
        **sampler_facts(request.sampler),
        "seed": request.seed,
        "length": length,
        "prompts": digest(canonical_json([sorted(fixed.items()), request.n if len(prompts) > 1 else None, prompts])),
        "format": request.format,
    }
    size = _part_size(request, total, facts, store)
    request = replace(request, length=length, prompts=(), fixed=fixed)
    parts = []
    for number, first in enumerate(range(0, total, size)):
        n = min(size, total - first)
        own = tuple(prompts[i // request.n] for i in range(first, first + n)) if prompts else None
        cost = request.sampler.nfe * n * length
        parts.append(BulkPart({**facts, "first": first, "n": n}, cost, request, number, first, n, own))
    cells = [{"name": PLAN, "keys": [part.key for part in parts]}]
    return parts, {"samples": total, "part_size": size, "facts": facts, "seeds": [*range(len(parts))], "cells": cells}


def _part_size(request: BulkRequest, total: int, facts: dict[str, Any], store: Store) -> int:
    """Samples in a part. If the store was begun, it must have been by the same request, and its part size stays."""
    plan = _read_plan(store)
    if plan is None:
        return request.part_size or min(LARGEST, max(SMALLEST, 1 << max(1, total // PARTS).bit_length() - 1))
    size = int(plan["part_size"])
    stored_parameters = plan["facts"].get("sampler") or {}
    pairs = {name: (stored_parameters.get(name), value) for name, value in facts["sampler"].items()}
    pairs |= {name: (plan["facts"].get(name), value) for name, value in facts.items() if name != "sampler"}
    pairs["part_size"] = size, request.part_size or size
    pairs["n"] = plan["samples"], min(total, plan["samples"])  # more samples may be asked for
    for name, (stored, wanted) in pairs.items():
        if stored != wanted:
            what = "other prompts or fixed words" if name == "prompts" else f"{name} {stored!r}, and not {wanted!r}"
            raise OtherRequestError(
                f"{store.path} holds the samples of another request, with {what}: ask for the same, name another "
                "folder, or replace them with --force"
            )
    return size


def _read_plan(store: Store) -> dict[str, Any] | None:
    """The plan of the request whose samples a store holds, if there is one."""
    with suppress(LimpetError):
        return store.read_plan(PLAN)
    return None


# The work


def generate(
    request: BulkRequest,
    store: Store,
    executor: Executor,
    models: ModelCache,
    *,
    threads: int | None = None,
    force: bool = False,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> RunSummary:
    """Compute every part that is not in the store. A larger n continues where a smaller one ended.

    executor: where parts are computed. models: loads the model. threads: of torch in each worker on the CPU.
    force: remove the samples of another request that the store holds. on_progress: called before the first part and
    after each."""
    store.remove_partial_files()
    before = _read_plan(store)
    try:
        parts, plan = resolve(request, store, models)
    except OtherRequestError:
        if before is None or not force:
            raise
        _remove(store, before)
        before = None
        parts, plan = resolve(request, store, models)
    store.write_plan(PLAN, plan)
    config = WorkerConfig(store.path, (), (), models.precision, threads=threads, load_options=models.load_options)
    summary = run_groups([[part] for part in parts], store, executor, config, on_progress)
    if before is not None and before["samples"] < plan["samples"]:  # its last part has grown, and is not damaged
        summary.damaged.pop(f"part {(before['samples'] - 1) // before['part_size']}", None)
    return summary


def _remove(store: Store, plan: Mapping[str, Any]) -> None:
    """Remove every part of a plan, and the plan."""
    store.remove(f"plans/{PLAN}.json")
    for number in range(len(plan["cells"][0]["keys"])):
        for path in reversed(part_paths(number, plan["facts"]["format"])):
            store.remove(path)


class PartCheck(NamedTuple):
    """A part that was read: how many samples it should have, and what is wrong with it ("" if nothing is)."""

    name: str
    samples: int
    damage: str


def verify(store: Store) -> Iterator[PartCheck]:
    """Read every part of a store and check it against its checksum and the request. No model is needed."""
    plan = _read_plan(store)
    if plan is None:
        raise LimpetError(f"{store.path} holds no parts of samples: name a folder that `limpet bulk` wrote")
    for number, key in enumerate(plan["cells"][0]["keys"]):
        paths, first = part_paths(number, plan["facts"]["format"]), number * plan["part_size"]
        found, damage = store.inspect(key, paths)
        n = min(plan["part_size"], plan["samples"] - first)
        yield PartCheck(paths.data, n, damage or ("" if found else "missing"))
