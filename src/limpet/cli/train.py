"""`limpet train`: run a recipe, from text files to a model's folder."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import tyro

from limpet.cli.common import Device, err, progress, show
from limpet.errors import LimpetError
from limpet.models.model_files import usable_device
from limpet.training import recipe as recipes
from limpet.training.data import open_text, prepare
from limpet.training.loop import Progress, train


def run(
    recipe: Annotated[Path, tyro.conf.Positional],
    files: tuple[Path, ...] = (),
    out_folder: Annotated[Path | None, tyro.conf.arg(name="out")] = None,
    device: Device = None,
    json: bool = False,
) -> None:
    """Train a Duo model, its distillation, or a causal judge on any text files.

    The recipe is one TOML file; those of the built-in models are under recipes/minis. The text is tokenised once into
    the recipe's data folder. A run that was stopped goes on from its last checkpoint; the finished folder can be
    loaded by name of its path. The log, one JSON object a line, is beside the weights.

    $ limpet train recipes/minis/mini.toml --files stories.txt.xz
    $ limpet train recipe.toml --out runs/second --device cuda

    Args:
        recipe: the TOML file
        files: UTF-8 texts, plain or .xz, documents apart by a blank line, or JSON lines; the recipe's own unless told
        out_folder: where the model goes; the recipe's own folder unless told
        json: print the last progress as one JSON document
    """
    plan = recipes.read(recipe)
    if files:
        plan = replace(plan, data=replace(plan.data, files=[str(file) for file in files]))
    folder = out_folder or Path(plan.folder)
    if (folder / "model.safetensors").exists():
        raise LimpetError(f"{folder} holds a finished model: remove it or name another folder with --out")
    data = plan.data
    wanted: dict[str, object] = {"vocab_size": data.vocab_size, "validation": data.validation, "test": data.test}
    text = open_text(Path(data.folder), wanted)
    if text is None:
        sources = [Path(file) for file in data.files]
        for remark in prepare(sources, Path(data.folder), data.vocab_size, data.validation, data.test):
            err.print(remark, markup=False)
        text = open_text(Path(data.folder), wanted)
        assert text is not None  # it was prepared just now
    folder.mkdir(parents=True, exist_ok=True)
    last: list[Progress] = []
    with (folder / "log.jsonl").open("a") as log, progress(plan.name, 1.0) as tell:

        def report(now: Progress) -> None:
            last[:] = [now]
            log.write(jsonlib.dumps(asdict(now)) + "\n")
            log.flush()
            held = "" if now.validation is None else f" · held out {now.validation:.4f}"
            left = f"{now.seconds_left / 60:.1f} min left"
            detail = f"step {now.step} · loss {now.loss:.4f}{held} · {now.tokens_per_second:,.0f} tokens/s · {left}"
            tell(completed=round(now.fraction, 3), detail=detail)
            if now.validation is not None:
                err.print(detail, markup=False)

        train(plan, text, folder, usable_device(device), report)
    show(json, asdict(last[0]) if last else {}, [f"{plan.name} is in {folder}"])
