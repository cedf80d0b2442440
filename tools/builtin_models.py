"""Install trained models as `molecules`, `sudoku` and `sudoku-6x6`, and measure the figures of their cards.

    python tools/builtin_models.py molecules.tar sudoku.tar   install what recipes/train.py wrote, measure, write cards
    python tools/builtin_models.py                            measure what is missing and write the cards again
    python tools/builtin_models.py --n 8 --nfe 4              a quick look at smaller numbers, printed and not written

A trained folder or .tar holds config.json, model.safetensors, tokenizer.json and log.jsonl. The data of the recipes is
prepared if it is not there; for molecules that needs the text that the recipe molecules names. Figures are kept in
recipes/logs and measured again only for other weights, sizes or seeds."""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import limpet
from blocks import machines, put
from limpet.errors import LimpetError
from limpet.evaluation import SampleSet, evaluate, find_checker
from limpet.evaluation.checkers import sudoku
from limpet.evaluation.checkers.hashes import HashSet
from limpet.evaluation.checkers.molecules import HELD_OUT, TRAINING, histograms, read_molecule
from limpet.evaluation.statistics import Estimate
from limpet.models import Denoiser
from limpet.models.duo import Duo
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.models.networks import PRECISIONS
from limpet.models.prompt_layouts import SUDOKU
from limpet.training import datasets, heldout, recipe
from limpet.training.data import Corpus

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "recipes" / "logs"
SAMPLERS = ("native", "crs", "mend")
NFE = (16, 64)
SEEDS = (8200, 8210)
TRAINED_ON = "one NVIDIA H200"
CURVE = 12  # rows of a learning curve
BOARDS_OF_6X6 = 28_200_960
UNIT = {"molecules": "token", "sudoku": "solution cell", "sudoku-6x6": "solution cell"}  # of the held-out bound


@dataclass(frozen=True)
class Task:
    """One way to sample a model, and what is measured then."""

    name: str
    n: int  # samples of each seed
    columns: tuple[str, ...]  # measures of its table
    clues: int = 0  # of sudoku puzzles; 0 samples without a prompt


def sudoku_tasks(n: int, clues: int) -> tuple[Task, Task]:
    """Boards, and puzzles with so many clues."""
    boards = Task("boards without clues", n, ("valid", "distinct", "wrong units"))
    return boards, Task(f"puzzles with {clues} clues", n, ("solved", "clues kept", "wrong units"), clues)


DISTANCES = ("atoms distance", "rings distance", "length distance")
TASKS = {
    "molecules": (Task("molecules", 256, ("valid", "unique", "novel", "v.u.n.", "scaffolds", *DISTANCES)),),
    "sudoku": sudoku_tasks(64, 32),
    "sudoku-6x6": sudoku_tasks(256, 14),
}


# Installing


def trained_files(source: Path) -> dict[str, bytes]:
    """The files of a trained folder or archive, by name."""
    if source.is_dir():
        return {file.name: file.read_bytes() for file in source.iterdir() if file.is_file()}
    with tarfile.open(source) as archive:
        files = {Path(member.name).name: archive.extractfile(member) for member in archive if member.isfile()}
        return {name: file.read() for name, file in files.items() if file is not None}


def install(name: str, files: Mapping[str, bytes]) -> None:
    """Write the built-in folder of trained weights. What depends on the training data is written by `derive`."""
    folder = BUILTIN_FOLDER / name
    folder.mkdir(exist_ok=True)
    config = json.loads(files["config.json"]) | {"checker": recipe.read(name).checker}
    if name in SUDOKU:
        config["layout"] = name
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in ("model.safetensors", "tokenizer.json"):
        (folder / file).write_bytes(files[file])
    rows = [json.loads(line) for line in io.StringIO(files["log.jsonl"].decode())]
    LOGS.mkdir(exist_ok=True)
    log = LOGS / f"{name}.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in merged_log(read_log(log), rows)))


def merged_log(earlier: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The held-out rows of a log, after those of the earlier runs that it goes on from; "run" numbers the runs.

    A run that goes on starts its log at a later step than the first report."""
    begins = rows[0]["step"]
    before = [dict(row) for row in earlier if row["step"] < begins] if begins > 50 else []
    run = max((row["run"] for row in before), default=0) + 1
    return before + [{**row, "run": run} for row in rows if row["validation"] is not None]


def read_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def derive(name: str, corpus: Corpus) -> None:
    """Write what ships with the weights about their data: for molecules hashes and held-out histograms."""
    if name != "molecules":
        return
    import rdkit

    folder, strings = BUILTIN_FOLDER / name, texts_of(corpus)
    canonical = [found.canonical for text in strings["train"] if (found := read_molecule(text)) is not None]
    HashSet.of(canonical, f"written with RDKit {rdkit.__version__}").save(folder / TRAINING)
    held_out = [found for text in held_out_texts(strings) if (found := read_molecule(text)) is not None]
    counted = {key: dict(sorted(counter.items())) for key, counter in histograms(held_out).items()}
    (folder / HELD_OUT).write_text(json.dumps(counted) + "\n")


def texts_of(corpus: Corpus) -> dict[str, list[str]]:
    """The strings of every split."""
    decode = corpus.tokenizer.decode
    return {name: [decode(row).rstrip(" ") for row in split.ids.tolist()] for name, split in corpus.splits.items()}


def held_out_texts(strings: Mapping[str, Sequence[str]]) -> list[str]:
    return [*strings["validation"], *strings["test"]]


def corpus_of(plan: recipe.Recipe) -> Corpus:
    """The data of a recipe, prepared if it is not there yet."""
    found = datasets.open_data(plan.data)
    if found is None:
        for remark in datasets.prepare_data(plan.data):
            say(remark)
        found = datasets.open_data(plan.data)
    assert found is not None  # it was prepared just now
    return found


# Measuring


def measure(name: str, corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a model's card: stored ones where they are of the same weights, sizes and seeds."""
    model = limpet.load(name, device=options.device, precision=options.precision)
    about = {"digest": model.digest, "seeds": list(options.seeds), "precision": model.precision}
    path = LOGS / f"{name}.json"
    stored = json.loads(path.read_text()) if path.exists() else {}
    if {key: stored.get(key) for key in about} != about:
        stored = {**about, "rows": []}
    assert isinstance(model, Duo)
    stored |= {"parameters": sum(weight.numel() for weight in model.network.parameters())}
    stored |= {"trained_on": options.trained_on or stored.get("trained_on", TRAINED_ON)}
    stored |= {"device": device_name(model.device)}

    def keep() -> None:
        if not options.is_quick:
            path.write_text(json.dumps(stored, indent=1) + "\n")

    if "held_out" not in stored:
        precise = limpet.load(name, device=options.device)
        stored["held_out"] = {split: bound(precise, corpus, split, options) for split in ("validation", "test")}
        keep()
    if name == "sudoku-6x6" and "least" not in stored:
        stored["least"] = {split: least_nats(corpus.splits[split].ids) for split in ("validation", "test")}
    for row, run in rows_of(name, model, corpus, options):
        if not any(all(one[key] == value for key, value in row.items()) for one in stored["rows"]):
            stored["rows"].append({**row, "measures": run()})
            keep()
            say(f"{name}: measured {', '.join(map(str, row.values()))}")
    keep()
    return stored


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def bound(model: Denoiser, corpus: Corpus, split: str, options: argparse.Namespace) -> dict[str, float]:
    """The bound on held-out rows in nats, with its error over draws of times and noise."""
    assert isinstance(model, Duo)
    rows, draws = (64, 2) if options.is_quick else (None, 4)
    return asdict(heldout.held_out(model.network, corpus.splits[split].to(model.device), rows, draws))


def least_nats(rows: torch.Tensor) -> float:
    """The entropy of the solutions in rows of 6x6 where all solutions of a puzzle are equally likely, per cell."""
    puzzles = rows[:, 1 : sudoku.SIX.cells + 1].tolist()
    counts = [len(sudoku.solutions(one, limit=BOARDS_OF_6X6)) if any(one) else BOARDS_OF_6X6 for one in puzzles]
    return sum(map(math.log, counts)) / len(counts) / sudoku.SIX.cells


def rows_of(
    name: str, model: Denoiser, corpus: Corpus, options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """What identifies each row of the tables, and the function that measures it."""
    for task in TASKS[name]:
        n = options.n or task.n
        for nfe in options.nfe:
            for sampler in SAMPLERS:
                row = {"task": task.name, "sampler": sampler, "nfe": nfe, "n": n}
                yield row, partial(sampled, model, task, n, f"{sampler} nfe={nfe}", options.seeds)
    if name == "molecules":
        n = options.n or TASKS[name][0].n
        row = {"task": "molecules", "sampler": "held-out molecules", "nfe": 0, "n": n}
        yield row, partial(of_held_out, held_out_texts(texts_of(corpus)), n, options.seeds)


def sampled(model: Denoiser, task: Task, n: int, sampler: str, seeds: Sequence[int]) -> dict[str, Any]:
    """The checker's values of a sampler, one for each seed; each seed has puzzles of its own."""
    parts = []
    for seed in seeds:
        prompt = sudoku.puzzles(n, task.clues, seed, SUDOKU[model.name].board) if task.clues else None
        parts.append(limpet.sample(model, sampler, n=n, seed=seed, prompt=prompt))
    return values_of(parts, model.checker)


def of_held_out(texts: Sequence[str], n: int, seeds: Sequence[int]) -> dict[str, Any]:
    """The same values of held-out molecules, which no sampler can be expected to surpass."""
    parts = []
    for seed in seeds:
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[:n]
        parts.append(SampleSet.from_texts([texts[i] for i in order.tolist()]))
    return values_of(parts, "molecules")


def values_of(parts: Sequence[Any], checker: str | None) -> dict[str, Any]:
    assert checker is not None  # every model here names one
    scores = evaluate(parts, metrics=(), checker=find_checker(checker))
    return {name: scores.estimate(name).to_dict() for name in scores.measures}


# The cards


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size_block(name: str, found: Mapping[str, Any]) -> str:
    """The sizes of the network and of its files."""
    config = json.loads((BUILTIN_FOLDER / name / "config.json").read_text())
    files = sum(file.stat().st_size for file in (BUILTIN_FOLDER / name).iterdir() if file.name != "README.md")
    return (
        f"{found['parameters'] / 1e6:.2f} million parameters: {config['n_blocks']} blocks of width "
        f"{config['hidden_dim']} with {config['n_heads']} heads, {config['vocab_size']} tokens, rows of "
        f"{config['model_length']} tokens. Weights in bfloat16; all files together take {files / 1e6:.1f} MB."
    )


def data_block(name: str, corpus: Corpus) -> str:
    """How many rows each split holds."""
    what = "molecules" if name == "molecules" else "base boards"
    rows = [[split, f"{len(part.ids):,}"] for split, part in corpus.splits.items()]
    block = table(("split", what), rows)
    if name == "molecules":
        hashes = HashSet.load(BUILTIN_FOLDER / name / TRAINING)
        size = (BUILTIN_FOLDER / name / TRAINING).stat().st_size
        block += (
            f"\n\n`{TRAINING}` has 32-bit hashes of the {len(hashes):,} different canonical SMILES of the training "
            f"molecules in {size / 1e3:.0f} kB. It takes a new molecule for a training molecule with probability "
            f"{hashes.false_positive_rate:.1e}. It was {hashes.about}; another version can write a molecule "
            "otherwise, and novelty is then too high."
        )
    return block


def training_block(name: str, found: Mapping[str, Any]) -> str:
    """How long the training took, and the learning curve."""
    log = read_log(LOGS / f"{name}.jsonl")
    end, runs = log[-1], log[-1]["run"]
    picked = [log[round(i * (len(log) - 1) / (CURVE - 1))] for i in range(CURVE)] if len(log) > CURVE else log
    rows = [
        (f"{row['step']:,}", f"{row['seconds']:.0f}", f"{row['loss']:.4f}", f"{row['validation']:.4f}")
        for row in picked
    ]
    before = next(row for row in reversed(log) if row["fraction"] <= 0.9)
    words = (
        f"{end['step']:,} steps in {end['seconds']:.0f} s of training on {found['trained_on']}, in "
        f"{runs} run{'s' * (runs > 1)}. Over the last {1 - before['fraction']:.0%} of the last run the held-out "
        f"figure moved by {end['validation'] - before['validation']:+.4f}; the run ended with its time."
    )
    return words + "\n\n" + table(("step", "seconds", "loss", f"held out, nats per {UNIT[name]}"), rows)


def held_out_block(name: str, found: Mapping[str, Any]) -> str:
    """The bound on held-out rows."""
    least = found.get("least", {})
    rows = [
        (
            split,
            f"{one['nats']:.4f} ± {one['error']:.4f}",
            *(f"{least[key]:.4f}" for key in (split,) if least),
            f"{one['rows']:,}",
        )
        for split, one in found["held_out"].items()
    ]
    head = ("split", f"bound, nats per {UNIT[name]}", *(("least possible",) if least else ()), "rows")
    return f"{table(head, rows)}\n\n{measured({**found, 'precision': 'float32'})}"


def quality_block(name: str, found: Mapping[str, Any]) -> str:
    """One table for each task: mean and standard error over seeds."""
    parts = []
    for task in TASKS[name]:
        own = [row for row in found["rows"] if row["task"] == task.name]
        rows = [
            (row["sampler"], str(row["nfe"] or ""), *(number(row["measures"].get(column)) for column in task.columns))
            for row in own
        ]
        caption = f"{task.name[0].upper()}{task.name[1:]}, {len(found['seeds'])} seeds x {own[0]['n']} samples"
        parts.append(f"{caption}:\n\n{table(('sampler', 'calls', *task.columns), rows)}")
    return "\n\n".join([*parts, measured(found)])


def number(stored: Mapping[str, Any] | None) -> str:
    """A mean with its standard error, or nothing."""
    return "" if stored is None else f"{Estimate.from_dict(stored):.3f}"


def measured(found: Mapping[str, Any]) -> str:
    return f"Measured by `python tools/builtin_models.py` in {machines([found])}."


def blocks_of(name: str, corpus: Corpus, found: Mapping[str, Any]) -> dict[str, str]:
    """All that a card has between markers."""
    return {
        "size": size_block(name, found),
        "data": data_block(name, corpus),
        "training": training_block(name, found),
        "held-out": held_out_block(name, found),
        "quality": quality_block(name, found),
    }


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Install, measure and write cards; 2 if something is missing."""
    parser = argparse.ArgumentParser(prog="python tools/builtin_models.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trained", type=Path, nargs="*", help="trained folders or .tar files, named as their recipes")
    parser.add_argument("--models", nargs="*", choices=tuple(TASKS), help="which cards (default: the trained, or all)")
    parser.add_argument("--n", type=int, help="samples of each seed, for a quick look")
    parser.add_argument("--nfe", type=int, nargs="*", default=list(NFE), help="network calls")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS), help="standard errors are over them")
    parser.add_argument("--device", default="cpu", help="where samples are drawn")
    parser.add_argument(
        "--precision", choices=tuple(PRECISIONS), default="bfloat16", help="of sampling; the bound is in float32"
    )
    parser.add_argument("--trained-on", help=f"the machine of the training (default: {TRAINED_ON})")
    options = parser.parse_args(arguments)
    options.is_quick = options.n is not None
    try:
        names = [source.name.removesuffix(".tar") for source in options.trained]
        for name, source in zip(names, options.trained, strict=True):
            if name not in TASKS:
                raise LimpetError(f"{source} is named {name!r}; the models here are {', '.join(TASKS)}")
            install(name, trained_files(source))
        for name in options.models or names or TASKS:
            corpus = corpus_of(recipe.read(name))
            if name in names:
                derive(name, corpus)
            found = measure(name, corpus, options)
            for block, content in blocks_of(name, corpus, found).items():
                if options.is_quick:
                    print(f"{name}, {block}:\n{content}\n")
                else:
                    put(BUILTIN_FOLDER / name / "README.md", block, content)
    except (LimpetError, OSError, KeyError) as error:
        say(f"limpet: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
