"""Fill the blocks of the built-in models' cards: a study of their samples, their likelihood on held-out books, and what
storing them as int8 has cost.

    python tools/card.py                      measure what is not in the store, and write the cards
    python tools/card.py --processes 2        with one worker for each core
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

import torch

import limpet
from blocks import machines, put
from limpet.errors import LimpetError
from limpet.evaluation import statistics
from limpet.evaluation.judges import load_judge
from limpet.evaluation.sample_sets import SampleSet
from limpet.evaluation.scores import evaluate
from limpet.experiments import (
    Cell,
    Entry,
    JudgeSpec,
    ModelCache,
    ReportContent,
    Results,
    Store,
    Study,
    Table,
    collect,
    format_estimate,
    local,
    processes,
    provenance,
    run,
)  # fmt: skip
from limpet.experiments.render import markdown
from limpet.experiments.store import canonical_json, digest
from limpet.generation import SEEDS
from limpet.models.duo import DuoNetwork
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.models.networks import PRECISIONS
from limpet.models.tensor_files import STORAGES, read_tensors, unpack_rows, write_tensors
from limpet.training import heldout
from limpet.training.data import Stream, Text, open_text

LOGS = Path(__file__).parents[1] / "recipes/logs"
NAMES = ("mini", "mini-distilled", "mini-judge")
JUDGE = NAMES[2]
SPLITS = ("validation", "test")
MEASURES = {"ppl": 1, "entropy": 3, "rep-4": 4}  # measures of the tables, with their digits
HEAD = ("calls", "GenPPL", "entropy", "Rep-4")

NATIVE = limpet.Native(final_step="argmax")
SAMPLERS = {"native": NATIVE, "CRS": limpet.CRS(budget=0.5, warmup=0.33)}
TOP_PS = (0.9, 0.8, 0.7, 0.65)  # steps wide enough that entropy falls along the curve under every seed
SWEEP = {"native": NATIVE, **{f"top-p {p:g}": NATIVE.replace(top_p=p) for p in TOP_PS}, "CRS": SAMPLERS["CRS"]}
CALLS = {"mini": (8, 16, 32, 64), "mini-distilled": (8, 16, 32)}  # the distilled model is for few calls


# Samples: a study


def study(n: int) -> Study:
    """Top-p and CRS on mini at 64 calls; native sampling and CRS on both models by number of calls."""
    cells = {name("mini", key, 64): Cell(name("mini", key, 64), "mini", sampler, n) for key, sampler in SWEEP.items()}
    for model, key, nfe in curves():
        cell = Cell(name(model, key, nfe), model, SAMPLERS[key].replace(nfe=nfe), n)
        cells.setdefault(cell.name, cell)
    title, judges = "What the built-in models write", (JudgeSpec(JUDGE),)
    return Study("card", title, tuple(cells.values()), SEEDS, build_report, judges, ("entropy", "rep-4"))


def name(model: str, sampler: str, nfe: int) -> str:
    """The name of a cell."""
    return f"{model}, {sampler}, {nfe}"


def curves() -> list[tuple[str, str, int]]:
    """Model, sampler and calls of every row of the second table."""
    return [(model, key, nfe) for model in CALLS for key in SAMPLERS for nfe in CALLS[model]]


def build_report(results: Results, books: tuple[str, ...] = ()) -> ReportContent:
    """Two tables; a row of held-out books may end the first."""

    def row(caption: str, model: str, sampler: str, nfe: int) -> tuple[Entry, ...]:
        cell = name(model, sampler, nfe)
        values = [format_estimate(results(cell, measure), digits) for measure, digits in MEASURES.items()]
        return tuple(map(Entry, (caption, str(nfe), *values)))

    samples = [row(key, "mini", key, 64) for key in SWEEP] + [tuple(map(Entry, books))] * bool(books)
    calls = tuple(row(f"{model}, {key}", model, key, nfe) for model, key, nfe in curves())
    tables = Table("samples", "", ("mini", *HEAD), (tuple(samples),)), Table("calls", "", ("", *HEAD), (calls,))
    return ReportContent(tables)


def findings(results: Results) -> Iterator[tuple[str, bool]]:
    """What the built-in models are for, each as a sentence with its numbers and whether it holds."""

    def ratio(cell: str, base: str) -> statistics.Estimate:
        return statistics.mean_se(results.values(cell, "ppl") / results.values(base, "ppl"))

    for nfe, base, most in ((64, "top-p 0.9", 0.5), (8, "native", 0.25)):
        found = ratio(name("mini", "CRS", nfe), name("mini", base, nfe))
        value = format_estimate(found, 3)
        yield f"At {nfe} calls CRS has {value} of the GenPPL of {base} (target: at most {most}).", found.mean <= most
    curve = [name("mini", key, 64) for key in SWEEP if key != "CRS"]
    gap = statistics.mean_se(-results.matched(name("mini", "CRS", 64), curve, "entropy").values)
    yield (
        f"At the entropy of CRS, seed by seed, the curve through top-p 1, {', '.join(map(str, TOP_PS))}, with the same "
        f"final step, lies {format_estimate(gap, 3)} nats above CRS (target: more than two standard errors).",
        gap.mean > 2 * gap.se,
    )
    few, base8 = name("mini-distilled", "native", 8), name("mini", "native", 8)
    found, drop = ratio(few, base8), results.contrast(base8, few, measure="entropy")
    yield (
        f"At 8 calls of native sampling, mini-distilled has {format_estimate(found, 3)} of mini's GenPPL at an entropy "
        f"{format_estimate(drop, 3)} lower (target: at most 0.75, and at most 0.2 lower).",
        found.mean <= 0.75 and drop.mean <= 0.2,
    )


# Held-out text: measurements beside the study's units

Measured = Mapping[str, Any]


def kept(folder: Path, facts: Measured, measure: Callable[[], Measured]) -> Measured:
    """A measurement, stored under the facts that decide it and made once."""
    file = folder / "text" / f"{digest(canonical_json(facts))[:24]}.json"
    if not file.exists():
        found = measure()
        log(f"measured {', '.join(f'{key} {value}' for key, value in facts.items())}")
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps({"facts": facts, "found": found}, indent=1) + "\n")
        part.replace(file)
    return dict(json.loads(file.read_text())["found"])


def likelihood(network: Any, stream: Stream, rows: int | None, draws: int) -> dict[str, float]:
    """Nats per token on a split: the bound of a Duo network, or the NLL of a causal one."""
    device = next(network.parameters()).device
    batch = 256 if device.type == "cuda" else 32
    draws = draws if isinstance(network, DuoNetwork) else 1
    found = heldout.held_out(network, stream.to(device), rows, draws, batch)
    return {**asdict(found), "perplexity": math.exp(found.nats)}


def held_out(folder: Path, text: Text, models: ModelCache, rows: int | None, draws: int) -> dict[str, list[Measured]]:
    """The likelihood of each model on each split."""
    found: dict[str, list[Measured]] = {model: [] for model in NAMES}

    def measure(model: Any, stream: Stream) -> Measured:
        return {**likelihood(model.network, stream, rows, draws), **provenance(model)}

    for model, split in product(NAMES, SPLITS):
        one: Any = models.judge(model) if model == JUDGE else models.model(model)
        stream = text.splits[split]
        facts = {"held out": split, "text": stream.digest, "model": one.digest, "rows": rows, "draws": draws}
        found[model].append(kept(folder, facts, partial(measure, one, stream)))
    return found


def measure_books(folder: Path, text: Text, models: ModelCache, count: int) -> Measured:
    """The measures of held-out text: rows spread evenly over the validation books."""
    stream, mini, judge = text.splits["validation"], models.model("mini"), models.judge(JUDGE)

    def measure() -> Measured:
        tokens = stream.rows((torch.arange(count) * stream.count(mini.length)) // count, mini.length)
        scores = evaluate(SampleSet.from_tokens(mini, tokens), judge, ("entropy", "rep-4"))
        return {
            "ppl": scores.estimate("perplexity").mean,
            **{measure: scores.estimate(measure).mean for measure in ("entropy", "rep-4")},
        }

    return kept(folder, {"measures of": stream.digest, "rows": count, "judge": judge.digest}, measure)


# Blocks of a card


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown(Table("", "", tuple(head), (tuple(tuple(map(Entry, row)) for row in rows),))).rstrip("\n")


def where(computed_on: Sequence[Measured]) -> str:
    return f"\n\nMeasured in {machines(computed_on)}."


def sample_blocks(results: Results, books: Measured) -> dict[str, str]:
    last = ("held-out text", "", *(f"{books[measure]:.{digits}f}" for measure, digits in MEASURES.items()))
    measured = where(results.provenance["computed on"]) + " All samplers have the final step argmax."
    verdicts = [f"- {text} {'It holds.' if holds else '**It does not hold.**'}" for text, holds in findings(results)]
    tables = {one.name: markdown(one).rstrip() + measured for one in build_report(results, last).tables}
    return {"findings": "\n".join(verdicts), **tables}


def held_out_block(model: str, splits: Sequence[Measured]) -> str:
    rows = []
    for split, found in zip(SPLITS, splits, strict=True):
        error = f" ± {found['error']:.4f}" if found["draws"] > 1 else ""
        figures = f"{found['nats']:.4f}{error}", f"{found['perplexity']:.2f}", f"{found['bits_per_byte']:.4f}"
        rows.append((split, *figures, f"{found['rows']:.0f}"))
    what = "nats per token" if model == JUDGE else "bound, nats per token"
    return table(("whole held-out books", what, "perplexity", "bits per byte", "rows of 256"), rows) + where(splits)


def training_block(model: str) -> str:
    log = [json.loads(line) for line in (LOGS / f"{model}.jsonl").read_text().splitlines()]
    held = [line for line in log if line.get("validation") is not None]
    listed = [held[round(i * (len(held) - 1) / 9)] for i in range(10)] if len(held) > 10 else held
    rows = [
        (str(line["step"]), f"{line['seconds']:.0f}", f"{line['loss']:.3f}", f"{line['validation']:.4f}")
        for line in listed
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
    found = json.loads((LOGS / "storage.json").read_text())[model]
    return (
        f"Matrices are stored as int8 with one float32 scale a row. On {found['rows']} validation rows, with the same "
        f"times and noise, that moves the figure from {found['trained']:.4f} to {found['stored']:.4f} nats per token: "
        f"by {found['stored'] - found['trained']:+.4f}."
    )


def blocks_of(model: str, samples: Mapping[str, str], books: Sequence[Measured], data: Path) -> dict[str, str]:
    """The blocks of a card, by name."""
    wanted = {"mini": ("calls", "findings", "samples"), "mini-distilled": ("calls", "findings")}.get(model, ())
    return {
        "data": data_block(data),
        "training": training_block(model),
        "storage": storage_block(model),
        "held-out": held_out_block(model, books),
        **{block: samples[block] for block in wanted},
    }


# Storage


def pack(trained: Path, text: Text, rows: int, device: str | None) -> None:
    """Store trained models as built-in ones, int8 by rows, and record what that changes of held-out NLL."""
    found = {}
    for model in NAMES:
        load: Callable[..., Any] = load_judge if model == JUDGE else limpet.load
        target = BUILTIN_FOLDER / model
        target.mkdir(exist_ok=True)
        state = unpack_rows(read_tensors(trained / model / "model.safetensors"))
        write_tensors(target / "model.safetensors", STORAGES["int8"](state))
        (target / "model.safetensors").chmod(0o644)
        (target / "config.json").write_bytes((trained / model / "config.json").read_bytes())
        (BUILTIN_FOLDER / "tokenizer.json").write_bytes(
            (trained / model / "tokenizer.json").read_bytes()
        )  # one for all
        before, after = (
            likelihood(load(str(folder), device=device).network, text.splits["validation"], rows, 1)
            for folder in (trained / model, target)
        )
        found[model] = {"trained": before["nats"], "stored": after["nats"], "rows": before["rows"]}
        log(f"{model}: {found[model]}")
    (LOGS / "storage.json").write_text(json.dumps(found, indent=2) + "\n")


def log(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(prog="python tools/card.py", description="Measure and write the models' cards.")
    parser.add_argument("--n", type=int, default=64, help="samples per seed")
    parser.add_argument("--rows", type=int, help="held-out rows, spread over the books (default: all)")
    parser.add_argument("--draws", type=int, default=4, help="draws of times and noise for the bound")
    parser.add_argument("--data", type=Path, default=Path("local/minis/data"), help="the prepared corpus")
    parser.add_argument("--store", type=Path, default=Path("local/minis/card"), help="where measurements are stored")
    parser.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="bfloat16", help="of the sampled models")
    parser.add_argument("--processes", type=int, default=1, help="workers that sample side by side")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="store the trained models of this folder")
    return parser.parse_args(arguments)


def compute_samples(options: argparse.Namespace) -> Results:
    """The results of the study of samples; finished units are not computed again."""
    one, store = study(options.n), Store(options.store)
    models, parallel = ModelCache(options.device, options.precision), options.processes > 1
    executor = processes([options.device] * options.processes) if parallel else local(models=models)
    threads = 1 if parallel else None
    summary = run(one, store, executor, models, threads=threads, on_progress=lambda at: log(f"{at.done}/{at.total}"))
    for unit, reason in summary.failed.items():
        raise LimpetError(f"{unit}: {reason}")
    return collect(one, store)


def main(arguments: list[str] | None = None) -> int:
    """Measure what is missing and write the cards; 1 if a finding does not hold, 2 for an error."""
    options = parse_arguments(arguments)
    try:
        text = open_text(options.data, {}, SPLITS)
        if text is None:
            raise LimpetError(
                f"no prepared corpus in {options.data}: run limpet train on a recipe once, or name it (--data)"
            )
        if options.pack is not None:
            pack(options.pack, text, options.rows or 256, options.device)
            return 0
        results, exact = compute_samples(options), ModelCache(options.device)  # likelihoods are in float32
        samples = sample_blocks(results, measure_books(options.store, text, exact, options.n * len(SEEDS)))
        books = held_out(options.store, text, exact, options.rows, options.draws)
        is_full = options.n >= 64 and options.rows is None
        for model in NAMES:
            blocks = blocks_of(model, samples, books[model], options.data)
            for block, content in blocks.items() if is_full else ():
                put(BUILTIN_FOLDER / model / "README.md", block, content)
            print(f"# {model}\n\n" + "\n\n".join(blocks.values()) + "\n")
        return 0 if not is_full or all(holds for _, holds in findings(results)) else 1
    except LimpetError as error:
        log(f"limpet: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
