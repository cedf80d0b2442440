"""`limpet train`: run a recipe, from text files to a model's folder."""

import json as jsonlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import tyro

from limpet.cli.common import Device, err, progress, show
from limpet.errors import LimpetError
from limpet.integrations.tensorboard import scalars
from limpet.models.model_files import usable_device
from limpet.training import datasets
from limpet.training import recipe as recipes
from limpet.training.loop import Progress, train


def run(
    recipe: tyro.conf.Positional[str],
    files: tuple[Path, ...] = (),
    out_folder: Annotated[Path | None, tyro.conf.arg(name="out")] = None,
    device: Device = None,
    tensorboard: Path | None = None,
    json: bool = False,
) -> None:
    """Train a Duo model, its distillation, or a causal judge on text files.

    A recipe is one TOML file. Those of limpet have names: small, small-judge and small-distilled take seconds; mini,
    mini-distilled, mini-judge, molecules, sudoku and sudoku-6x6 made the built-in models; molecules-cpu and sudoku-cpu
    are for two cores. The text is tokenised once, into the recipe's data folder. The same command resumes an
    interrupted run. The log, one JSON object on each line, is beside the weights; --model of other commands takes the
    path of the finished folder.

    $ limpet train small
    $ limpet train mini --files stories.txt.xz
    $ limpet train recipe.toml --out runs/second --device cuda

    Args:
        recipe: a TOML file, or a name
        files: UTF-8 texts, plain or .xz, with blank lines between documents, or JSON lines (default: the recipe's)
        out_folder: where the model is written (default: the recipe's folder)
        tensorboard: a folder for an event file that TensorBoard shows
        json: print the last progress as one JSON document
    """
    plan = recipes.read(recipe)
    if files:  # in place of the recipe's
        plan = replace(plan, data=replace(plan.data, files=[str(file) for file in files]))
    folder = out_folder or Path(plan.folder)
    if (folder / "model.safetensors").exists():
        raise LimpetError(f"{folder} holds a finished model: remove it or name another folder with --out")
    corpus = datasets.open_data(plan.data)
    if corpus is None:
        for message in datasets.prepare_data(plan.data):
            err.print(message, markup=False)
        corpus = datasets.open_data(plan.data)
        assert corpus is not None  # it was written just now
    folder.mkdir(parents=True, exist_ok=True)
    last: list[Progress] = []
    with scalars(tensorboard) as plot, (folder / "log.jsonl").open("a") as log, progress(plan.name, 1.0) as update:

        def report(now: Progress) -> None:
            last[:] = [now]
            plot(now)
            log.write(jsonlib.dumps(asdict(now)) + "\n")
            log.flush()
            held_out = "" if now.validation is None else f" · held out {now.validation:.4f}"
            left = f"{now.seconds_left / 60:.1f} min left"
            detail = f"step {now.step} · loss {now.loss:.4f}{held_out} · {now.tokens_per_second:,.0f} tokens/s · {left}"
            update(completed=round(now.fraction, 3), detail=detail)
            if now.validation is not None:
                err.print(detail, markup=False)

        train(plan, corpus, folder, usable_device(device), report)
    show(json, asdict(last[0]) if last else {}, [f"{plan.name} is in {folder}"])
