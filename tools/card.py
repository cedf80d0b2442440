"""The figures in the built-in models' cards: a study of their samples, their likelihood on held-out books, and what
storing them small has cost.

    python tools/card.py                      measure what is not in the store, and write the cards
    python tools/card.py --processes 2        with one worker a core
    python tools/card.py --n 4 --rows 64      a quick look at smaller numbers, printed and not written
    python tools/card.py --pack local/minis   store trained weights as int8 and measure what that changes"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import limpet
from blocks import places, put
from limpet.errors import LimpetError
from limpet.evaluation import scoring, statistics
from limpet.evaluation.comparison import SHARDS
from limpet.evaluation.judges import load_judge
from limpet.experiments import Cell, Judging, Results, Shelf, Store, Study, collect, run
from limpet.experiments.contents import Entry, Page, Table, number
from limpet.experiments.executors import local
from limpet.experiments.executors.processes import processes
from limpet.experiments.render import markdown
from limpet.experiments.resources import provenance
from limpet.experiments.store import canonical, digest
from limpet.models.duo import PRECISIONS, DuoNetwork
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.models.tensor_files import STORAGES, read_tensors, unpack_rows, write_tensors
from limpet.training import heldout
from limpet.training.data import Stream, Text, open_text

RECIPES = Path(__file__).parents[1] / "recipes" / "minis"
NAMES = ("mini", "mini-distilled", "mini-judge")
JUDGE = NAMES[2]
SPLITS = ("validation", "test")
MEASURES = {"ppl": 1, "entropy": 3, "rep-4": 4}  # of a set of texts, with the digits of each
HEAD = ("calls", "GenPPL", "entropy", "Rep-4")

ARMS = {"native": limpet.Native(), "CRS": limpet.CRS(budget=0.5, warmup=0.33)}
MASSES = (0.9, 0.8, 0.7, 0.65)  # steps wide enough that 64 samples a shard keep their order in entropy
SWEEP = {"native": ARMS["native"], **{f"top-p {p:g}": limpet.Native(top_p=p) for p in MASSES}, "CRS": ARMS["CRS"]}
CALLS = {"mini": (8, 16, 32, 64), "mini-distilled": (8, 16, 32)}  # distilled for few of them


# Samples: a study


def study(n: int) -> Study:
    """Top-p and CRS on mini at 64 calls; native and CRS on both models over the number of calls."""
    cells = {name("mini", arm, 64): Cell(name("mini", arm, 64), "mini", sampler, n) for arm, sampler in SWEEP.items()}
    for model, arm, nfe in curves():
        cell = Cell(name(model, arm, nfe), model, ARMS[arm].replace(nfe=nfe), n)
        cells.setdefault(cell.name, cell)
    title, judges = "What the built-in models write", (Judging(JUDGE),)
    return Study("card", title, tuple(cells.values()), SHARDS, show, judges, ("entropy", "rep-4"))


def name(model: str, arm: str, nfe: int) -> str:
    return f"{model}, {arm}, {nfe}"


def curves() -> list[tuple[str, str, int]]:
    return [(model, arm, nfe) for model in CALLS for arm in ARMS for nfe in CALLS[model]]


def show(results: Results, books: tuple[str, ...] = ()) -> Page:
    """Two tables; a row of held-out books may end the first."""

    def row(caption: str, model: str, arm: str, nfe: int) -> tuple[Entry, ...]:
        figures = [number(results(name(model, arm, nfe), measure), digits) for measure, digits in MEASURES.items()]
        return tuple(map(Entry, (caption, str(nfe), *figures)))

    samples = [row(arm, "mini", arm, 64) for arm in SWEEP] + [tuple(map(Entry, books))] * bool(books)
    calls = tuple(row(f"{model}, {arm}", model, arm, nfe) for model, arm, nfe in curves())
    return Page((Table("samples", "", ("mini", *HEAD), (tuple(samples),)), Table("calls", "", ("", *HEAD), (calls,))))


def findings(results: Results) -> Iterator[tuple[str, bool]]:
    """What the built-in models are for, each as a sentence with its figures and whether it holds."""

    def ratio(cell: str, base: str) -> statistics.Estimate:
        return statistics.mean_se(results.values(cell, "ppl") / results.values(base, "ppl"))

    for nfe, base, most in ((64, "top-p 0.9", 0.5), (8, "native", 0.25)):
        found = ratio(name("mini", "CRS", nfe), name("mini", base, nfe))
        words = f"At {nfe} calls CRS has {number(found, 3)} of the GenPPL of {base} (wanted: at most {most})."
        yield words, found.mean <= most
    curve = [name("mini", arm, 64) for arm in SWEEP if arm != "CRS"]
    gap = results.matched(name("mini", "CRS", 64), curve, "entropy")
    above = statistics.mean_se(-gap.values)
    yield (
        f"At CRS's own entropy, shard by shard, the curve through top-p 1, {', '.join(map(str, MASSES))}, "
        "read out by argmax as CRS is, lies "
        f"{number(above, 3)} nats above it (wanted: above by more than two standard errors).",
        above.mean > 2 * above.se,
    )
    few, base8 = name("mini-distilled", "native", 8), name("mini", "native", 8)
    found, drop = ratio(few, base8), results.contrast(base8, few, measure="entropy")
    yield (
        f"At 8 calls, native, mini-distilled has {number(found, 3)} of mini's GenPPL at an entropy "
        f"{number(drop, 3)} lower (wanted: at most 0.75, and at most 0.2 lower).",
        found.mean <= 0.75 and drop.mean <= 0.2,
    )


# Held-out text: small documents beside the study's units

Kept = Mapping[str, Any]


def kept(folder: Path, about: Kept, measure: Callable[[], Kept]) -> Kept:
    """A measurement by what decides it, made once."""
    file = folder / "text" / f"{digest(canonical(about))[:24]}.json"
    if not file.exists():
        found = measure()
        say(f"measured {', '.join(f'{key} {value}' for key, value in about.items())}")
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"about": about, "found": found}, indent=1) + "\n")
        part.replace(file)
    return dict(json.loads(file.read_text())["found"])


def likelihood(network: heldout.Network, stream: Stream, rows: int | None, draws: int) -> dict[str, float]:
    """Nats per token on a split: the bound of a Duo network, or the NLL of a causal one."""
    device = next(network.parameters()).device
    batch = 256 if device.type == "cuda" else 32
    found = heldout.held_out(network, stream.to(device), rows, draws if isinstance(network, DuoNetwork) else 1, batch)
    return {**asdict(found), "perplexity": math.exp(found.nats)}


def held_out(folder: Path, text: Text, shelf: Shelf, rows: int | None, draws: int) -> dict[str, list[Kept]]:
    """Of each model, on each split."""

    def measured(model: Any, stream: Stream) -> Kept:
        return {**likelihood(model.network, stream, rows, draws), **provenance(model)}

    found: dict[str, list[Kept]] = {model: [] for model in NAMES}
    for model, split in product(NAMES, SPLITS):
        one: Any = shelf.judge(model) if model == JUDGE else shelf.model(model)
        stream = text.splits[split]
        about = {"held out": split, "text": stream.digest, "model": one.digest, "rows": rows, "draws": draws}
        found[model].append(kept(folder, about, partial(measured, one, stream)))
    return found


def real(folder: Path, text: Text, shelf: Shelf, count: int) -> Kept:
    """The measures of samples, of held-out text: rows spread evenly over the validation books."""
    stream, mini, judge = text.splits["validation"], shelf.model("mini"), shelf.judge(JUDGE)

    def measure() -> Kept:
        tokens = stream.rows((torch.arange(count) * stream.count(mini.length)) // count, mini.length)
        columns, _ = scoring.diversity(tokens, ("entropy", "rep-4"))
        means = {measure: statistics.mean(column) for measure, column in columns.items()}
        return {"ppl": float(np.exp(scoring.score(judge, mini, tokens).pooled)), **means}

    return kept(folder, {"measures of": stream.digest, "rows": count, "judge": judge.digest}, measure)


# Blocks of a card


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(Table("", "", tuple(head), (tuple(tuple(map(Entry, row)) for row in rows),))).rstrip("\n")


def where(made_on: Sequence[Kept]) -> str:
    return f"\n\nMeasured in {places(made_on)}."


def sample_blocks(results: Results, books: Kept) -> dict[str, str]:
    last = ("held-out text", "", *(f"{books[measure]:.{digits}f}" for measure, digits in MEASURES.items()))
    measured = where(results.provenance["made on"])
    verdicts = [f"- {words} {'It holds.' if holds else '**It does not hold.**'}" for words, holds in findings(results)]
    tables = {one.name: markdown(one).rstrip() + measured for one in show(results, last).tables}
    return {"findings": "\n".join(verdicts), **tables}


def held_out_block(model: str, splits: Sequence[Kept]) -> str:
    rows = []
    for split, found in zip(SPLITS, splits, strict=True):
        error = f" ± {found['error']:.4f}" if found["draws"] > 1 else ""
        figures = f"{found['nats']:.4f}{error}", f"{found['perplexity']:.2f}", f"{found['bits_per_byte']:.4f}"
        rows.append((split, *figures, f"{found['rows']:.0f}"))
    what = "nats per token" if model == JUDGE else "bound, nats per token"
    return table(("whole held-out books", what, "perplexity", "bits per byte", "rows of 256"), rows) + where(splits)


def training_block(model: str) -> str:
    log = [json.loads(line) for line in (RECIPES / "logs" / f"{model}.jsonl").read_text().splitlines()]
    held = [line for line in log if line.get("validation") is not None]
    shown = [held[round(i * (len(held) - 1) / 9)] for i in range(10)] if len(held) > 10 else held
    rows = [
        (str(line["step"]), f"{line['seconds']:.0f}", f"{line['loss']:.3f}", f"{line['validation']:.4f}")
        for line in shown
    ]
    end, before = held[-1], [line for line in held if line["fraction"] <= 0.9][-1]
    words = (
        f"{end['step']} steps in {end['seconds']:.0f} s of training on one H200, {end['tokens_per_second'] / 1e6:.2f} "
        f"million tokens a second. Over the run's last {1 - before['fraction']:.0%} the held-out figure moved by "
        f"{end['validation'] - before['validation']:+.4f}; the run ended with its time."
    )
    return words + "\n\n" + table(("step", "seconds", "loss", "held out, 1024 rows or more"), rows)


def data_block(data: Path) -> str:
    splits = json.loads((data / "data.json").read_text())["splits"]
    keys = ("documents", "tokens", "bytes", "copies")
    rows = [(split, *(f"{facts[key]:,}" for key in keys)) for split, facts in splits.items()]
    return table(("split", "books", "tokens", "bytes", "left out as copies"), rows)


def storage_block(model: str) -> str:
    found = json.loads((RECIPES / "logs" / "storage.json").read_text())[model]
    return (
        f"Matrices are stored as int8 with one float32 scale a row. On {found['rows']} validation rows, with the same "
        f"times and noise, that moves the figure from {found['trained']:.4f} to {found['stored']:.4f} nats per token: "
        f"by {found['stored'] - found['trained']:+.4f}."
    )


def blocks_of(model: str, samples: Mapping[str, str], books: Sequence[Kept], data: Path) -> dict[str, str]:
    """All that a card has between markers."""
    shown = {"mini": ("calls", "findings", "samples"), "mini-distilled": ("calls", "findings")}.get(model, ())
    return {
        "data": data_block(data),
        "training": training_block(model),
        "storage": storage_block(model),
        "held-out": held_out_block(model, books),
        **{block: samples[block] for block in shown},
    }


# Storage


def pack(trained: Path, text: Text, rows: int, device: str | None) -> None:
    """Store trained folders as the built-in ones, int8 by rows, and write down what that does to held-out NLL."""
    found = {}
    for model in NAMES:
        load: Callable[..., Any] = load_judge if model == JUDGE else limpet.load
        target = BUILTIN_FOLDER / model
        target.mkdir(exist_ok=True)
        state = unpack_rows(read_tensors(trained / model / "model.safetensors"))
        write_tensors(target / "model.safetensors", STORAGES["int8"](state))
        (target / "model.safetensors").chmod(0o644)
        for file in ("config.json", "tokenizer.json"):
            (target / file).write_bytes((trained / model / file).read_bytes())
        before, after = (
            likelihood(load(str(folder), device=device).network, text.splits["validation"], rows, 1)
            for folder in (trained / model, target)
        )
        found[model] = {"trained": before["nats"], "stored": after["nats"], "rows": before["rows"]}
        say(f"{model}: {found[model]}")
    (RECIPES / "logs" / "storage.json").write_text(json.dumps(found, indent=2) + "\n")


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/card.py", description="Measure and write the models' cards.")
    parser.add_argument("--n", type=int, default=64, help="samples in each of the four shards")
    parser.add_argument("--rows", type=int, help="held-out rows, spread over the books; all unless told")
    parser.add_argument("--draws", type=int, default=4, help="draws of times and noise for the bound")
    parser.add_argument("--data", type=Path, default=Path("local/minis/data"), help="the prepared corpus")
    parser.add_argument("--store", type=Path, default=Path("local/minis/card"), help="where measurements are kept")
    parser.add_argument("--device", help="cpu, cuda, ...; a GPU where there is one")
    parser.add_argument(
        "--precision", choices=tuple(PRECISIONS), default="bfloat16", help="of the two models as they are sampled"
    )
    parser.add_argument("--processes", type=int, default=1, help="workers that sample side by side")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="store the trained models of this folder")
    given = parser.parse_args(arguments)
    try:
        text = open_text(given.data, {}, SPLITS)
        if text is None:
            raise LimpetError(
                f"no prepared corpus in {given.data}: run limpet train on a recipe once, or name it (--data)"
            )
        if given.pack is not None:
            pack(given.pack, text, given.rows or 256, given.device)
            return 0
        made, store, shelf = study(given.n), Store(given.store), Shelf(given.device, given.precision)
        many = given.processes > 1
        place = processes([given.device] * given.processes) if many else local(shelf=shelf)
        summary = run(
            made, store, place, shelf, threads=1 if many else None, tell=lambda at: say(f"{at.done}/{at.total}")
        )
        for unit, why in summary.failed.items():
            raise LimpetError(f"{unit}: {why}")
        exact = Shelf(given.device)  # likelihoods are in float32
        results = collect(made, store)
        samples = sample_blocks(results, real(given.store, text, exact, given.n * len(SHARDS)))
        books = held_out(given.store, text, exact, given.rows, given.draws)
        whole = given.n >= 64 and given.rows is None
        for model in NAMES:
            blocks = blocks_of(model, samples, books[model], given.data)
            if whole:
                for block, content in blocks.items():
                    put(BUILTIN_FOLDER / model / "README.md", block, content)
            print(f"# {model}\n\n" + "\n\n".join(blocks.values()) + "\n")
        return 0 if not whole or all(holds for _, holds in findings(results)) else 1
    except LimpetError as error:
        say(f"limpet: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
