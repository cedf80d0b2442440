"""Train several recipes side by side, one process each, and check samples of the results.

    python recipes/train.py molecules sudoku --seconds 520 --out results

One run failing does not stop the others, and is tried again without CUDA graph and compiler. For each recipe the output
folder gets NAME.tar (config.json, model.safetensors in bfloat16, tokenizer.json, log.jsonl, check.json) and
NAME.checkpoint.0, .1, ...: from these files, given as --resume FOLDER, a later run goes on. This needs neither a
command line package nor anything else that training itself does not need."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import sys
import tarfile
import time
import tomllib
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

PART = 15 << 20  # bytes of each part of a checkpoint
RETRY = 60  # seconds that must be left to try again
LATE = 15  # seconds after the deadline at which a training that has not ended is stopped
CHECK = 45  # seconds more for the checks
ATTEMPTS: tuple[tuple[str, ...], ...] = ((), ("run.graph=false",), ("run.graph=false", "run.compile=false"))


def changed(plan: Any, changes: list[str]) -> Any:
    """A recipe with fields of its tables replaced: "run.batch=16"."""
    tables: dict[str, dict[str, Any]] = {}
    for change in changes:
        name, _, value = change.partition("=")
        table, _, field = name.partition(".")
        tables.setdefault(table, {})[field] = tomllib.loads(f"value = {value}")["value"]
    return replace(plan, **{table: replace(getattr(plan, table), **fields) for table, fields in tables.items()})


def train_one(file: str, within: Path, out: Path, deadline: float, changes: list[str], resume: Path | None) -> None:
    """Train one recipe until a time.time(), and pack what came of it."""
    from limpet.models.model_files import usable_device
    from limpet.models.tokenizers import HuggingFaceTokenizer
    from limpet.training import datasets, loop, recipe

    plan = changed(recipe.read(file), changes)
    corpus = datasets.open_data(plan.data)
    if corpus is None:
        for remark in datasets.prepare_data(plan.data):
            print(remark, flush=True)
        corpus = datasets.open_data(plan.data)
        assert corpus is not None  # it was prepared just now
    work = within / plan.name
    work.mkdir(parents=True, exist_ok=True)
    parts = sorted(resume.glob(f"{plan.name}.checkpoint.*")) if resume else []
    if parts and not (work / "checkpoint.safetensors").exists():
        (work / "checkpoint.safetensors").write_bytes(b"".join(part.read_bytes() for part in parts))

    def report(now: loop.Progress) -> None:
        with (work / "log.jsonl").open("a") as log:
            log.write(json.dumps(asdict(now)) + "\n")
        if now.validation is not None or now.step % 500 == 0:
            held = "" if now.validation is None else f" held out {now.validation:.4f}"
            done = f"{plan.name}: step {now.step} ({now.fraction:.0%}, {now.seconds:.0f} s)"
            print(f"{done} loss {now.loss:.4f}{held} {now.tokens_per_second:,.0f} tokens/s", flush=True)

    extendable = work / "extendable.safetensors"
    ending = time.monotonic() + deadline - time.time()
    network = loop.train(plan, corpus, work, usable_device(None), report, deadline=ending, extendable=extendable)
    loop.write_model(plan, network, HuggingFaceTokenizer(corpus.tokenizer), work, storage="bfloat16")
    pack(work, out / f"{plan.name}.tar")
    if extendable.exists():
        data = extendable.read_bytes()
        for number, start in enumerate(range(0, len(data), PART)):
            (out / f"{plan.name}.checkpoint.{number}").write_bytes(data[start : start + PART])


def pack(work: Path, archive: Path) -> None:
    """What belongs to a finished model as one file."""
    with tarfile.open(archive, "w") as tar:
        for name in ("config.json", "model.safetensors", "tokenizer.json", "log.jsonl", "check.json"):
            if (work / name).exists():
                tar.add(work / name, f"{work.name}/{name}")


def check_one(file: str, within: Path, out: Path, changes: list[str]) -> None:
    """Sample a finished model natively with 64 calls and count what is right; on the CPU where the GPU fails."""
    from limpet.training import recipe

    plan = changed(recipe.read(file), changes)
    check = check_sudoku if plan.checker == "sudoku" else check_molecules
    work, found = within / plan.name, {}
    for device, n in ((None, 256), ("cpu", 32)):
        try:
            found = check(work, device, n)
            break
        except Exception:
            traceback.print_exc()
    (work / "check.json").write_text(json.dumps(found, indent=2) + "\n")
    pack(work, out / f"{plan.name}.tar")
    print(plan.name, json.dumps(found), flush=True)


def check_sudoku(work: Path, device: str | None, n: int) -> dict[str, Any]:
    """Shares of boards that are valid without clues, and of puzzles that are solved, by number of clues."""
    import limpet
    from limpet.evaluation.checkers import sudoku
    from limpet.models.prompt_layouts import BOARDS

    model, checker = limpet.load(work, device=device), sudoku.SudokuChecker()
    board = BOARDS[(model.length - 2) // 2]

    def share(name: str, prompts: list[str] | None) -> float:
        texts = limpet.sample(model, "native nfe=64", n=n, prompt=prompts).texts
        return sum(checker.check(text)[name] for text in texts) / n

    found: dict[str, Any] = {"device": str(model.device), "n": n, "valid without clues": share("valid", None)}
    for clues in (26, 32, 40) if board.side == 9 else (10, 14, 18):
        found[f"solved from {clues} clues"] = share("solved", sudoku.puzzles(n, clues, clues, board))
    return found


def check_molecules(work: Path, device: str | None, n: int) -> dict[str, Any]:
    """The share of strings that are molecules, by RDKit, and of different ones among those."""
    import limpet
    from limpet.evaluation.checkers.molecules import read_molecule

    model = limpet.load(work, device=device)
    out = limpet.sample(model, "native nfe=64", n=4 * n)
    smiles = [text.rstrip(" ") for text in out.texts]
    good = [found.canonical for one in smiles if (found := read_molecule(one)) is not None]
    found = {"device": str(model.device), "n": len(smiles), "valid": len(good) / len(smiles), "examples": smiles[:8]}
    return {**found, "distinct among valid": len(set(good)) / max(1, len(good))}


def launch(options: argparse.Namespace) -> int:
    """Train all recipes at once, then check all results at once; 0 if every one came to its end."""
    deadline = time.time() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.work, ignore_errors=True)
    context = multiprocessing.get_context("spawn")
    attempts, running, finished = dict.fromkeys(options.recipes, 0), {}, []

    def begin(file: str) -> None:
        changes = [*options.set, *ATTEMPTS[attempts[file]]]
        arguments = (file, options.work, options.out, deadline, changes, options.resume)
        running[file] = context.Process(target=train_one, args=arguments)
        running[file].start()

    for file in options.recipes:
        begin(file)
    while running:
        time.sleep(0.2)
        for file, process in list(running.items()):
            if process.exitcode is None:
                if time.time() > deadline + LATE:
                    process.kill()
                continue
            del running[file]
            if process.exitcode == 0:
                finished.append(file)
                continue
            attempts[file] += 1
            print(f"{file} failed with {process.exitcode}", flush=True)
            if attempts[file] < len(ATTEMPTS) and deadline - time.time() > RETRY:
                begin(file)
    checks = [
        context.Process(target=check_one, args=(file, options.work, options.out, options.set)) for file in finished
    ]
    for process in checks:
        process.start()
    for process in checks:
        process.join(max(0.0, deadline + LATE + CHECK - time.time()))
        process.kill()
    return 0 if len(finished) == len(options.recipes) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("recipes", nargs="+", help="names, or TOML files")
    parser.add_argument("--seconds", type=float, default=520, help="for training, the start included")
    parser.add_argument("--out", type=Path, default=Path("results"), help="folder for what is made")
    parser.add_argument("--work", type=Path, default=Path("local/train-work"), help="folder to work in; it is emptied")
    parser.add_argument("--resume", type=Path, help="a folder with the checkpoints of an earlier run")
    parser.add_argument("--set", nargs="*", default=[], help="fields of every recipe to replace, as run.batch=16")
    return launch(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
