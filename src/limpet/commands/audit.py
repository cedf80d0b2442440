"""`limpet audit NAME`: what the paper measures inside a trajectory, beside what it found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import tyro
from rich.table import Table

from limpet.audits import AUDITS, Models, Preset
from limpet.audits.result import Result, with_error
from limpet.commands import err, out, print_json, progress_bar
from limpet.denoisers.catalog import load
from limpet.denoisers.exact import Source
from limpet.errors import LimpetError
from limpet.judges import BUILTIN, load_judge

Name = Literal["singleton", "endpoint", "selection", "temperature", "values", "hidden", "storage", "risk"]


def run(
    name: tyro.conf.Positional[Name],
    /,
    *,
    preset: Literal["smoke", "mini", "paper"] = "mini",
    model: tuple[str, ...] = (),
    paths: int | None = None,
    nfe: int | None = None,
    judge: str = BUILTIN,
    text: Path | None = None,
    device: str | None = None,
    precision: Literal["float32", "bfloat16"] | None = None,
    json: bool = False,
    figures: Path | None = None,
) -> None:
    """Look inside trajectories: singleton, endpoint, selection, temperature, values, hidden, storage or risk.

    $ limpet audit temperature --preset smoke
    $ limpet audit hidden --model mini-distilled --figures figures
    $ limpet audit values --preset paper --model s-sahoo/duo-distilled --judge gpt2-large --json

    Args:
        name: which audit; docs/audits.md says what each shows and what it does not
        preset: smoke takes seconds; mini suits the built-in models; paper has the paper's counts
        model: one or more; the built-in mini and mini-distilled unless told (risk adds the exact sources)
        paths: paths, or clean texts, in each of the preset's shards; the preset's own number unless told
        nfe: network calls of a path; the preset's own number unless told
        judge: what scores texts, where an audit does; an exact source scores its own
        text: clean text for the audits of forward states (selection, risk); held-out pages unless given
        device: cpu, cuda, ...; a GPU where there is one
        precision: what the networks run in; the preset's own unless told
        json: print one JSON document
        figures: folder for the audit's figure
    """
    audit = AUDITS[name]
    settings = _told(audit.presets[preset], paths, nfe)
    denoisers = [load(one, device=device, precision=precision or settings.precision) for one in model or audit.models]
    judged = audit.judged and not all(isinstance(one, Source) for one in denoisers)
    models = Models(tuple(denoisers), load_judge(judge, device=device) if judged else None, _read(text))
    with progress_bar() as bar:
        task = bar.add_task(name, total=None, detail="")
        result = audit(models, settings, lambda done, total: bar.update(task, completed=done, total=total))
    if figures is not None:
        _save(audit.figure(result), figures / f"{name}.png")
    if json:
        print_json({"preset": preset, **result.to_dict()})
        return
    out.print(table(f"{audit.title} ({preset}: {len(settings.shards)} shards of {settings.paths})", result))
    for what, convention in result.conventions.items():
        err.print(f"{what}: {convention}", style="dim", markup=False)


def table(title: str, result: Result) -> Table:
    """One line a row: where, ours with its error, how many events, and the paper's."""
    view = Table(
        title=title,
        caption="mean and standard error over shards; the paper's figures are for Duo and Duo-distilled",
    )
    for head in ("model", "quantity", "at", "here", "events", "paper"):
        view.add_column(head, justify="right" if head in ("here", "events") else "left", no_wrap=True)
    before = None
    for row in result.rows:
        if before not in (None, row.model):
            view.add_section()
        before = row.model
        at = ", ".join(f"{name} {value}" for name, value in row.at.items())
        unit = f" {row.unit}" if row.unit else ""
        events = "" if row.events is None else f"{row.events:,}"
        view.add_row(row.model, row.quantity, at, with_error(row.estimate) + unit, events, row.paper)
    return view


def _told(preset: Preset, paths: int | None, nfe: int | None) -> Preset:
    """The preset with what the caller asked for in its place."""
    if paths is not None and paths < 1:
        raise LimpetError(f"paths is {paths}; ask for at least one in each shard")
    if nfe is not None and nfe < 4:
        raise LimpetError(f"nfe is {nfe}; an audit needs at least 4 calls, to have steps on both sides of the warmup")
    return replace(preset, paths=paths or preset.paths, nfe=nfe or preset.nfe)


def _read(text: Path | None) -> str | None:
    if text is None:
        return None
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LimpetError(f"{text} cannot be read ({error}): name a UTF-8 text file") from error


def _save(drawing: object, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(path, dpi=110)  # type: ignore[attr-defined]
    except OSError as error:
        raise LimpetError(f"the figure cannot be written to {path} ({error}): name another folder") from error
