"""`limpet audit NAME`: what the paper measures inside a trajectory, beside what it found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from limpet.audits import AUDITS, Audit, Models, Preset
from limpet.commands import err, out, print_json, progress_bar
from limpet.denoisers.catalog import load
from limpet.denoisers.exact import Source
from limpet.errors import LimpetError
from limpet.judges import BUILTIN, load_judge
from limpet.lab.audits import READING, Kept, keep, made_on, ready, table, write

Name = Literal["singleton", "endpoint", "selection", "temperature", "values", "hidden", "storage", "risk", "all"]


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
    out_folder: Annotated[Path | None, tyro.conf.arg(name="out")] = None,
) -> int:
    """Look inside trajectories: singleton, endpoint, selection, temperature, values, hidden, storage, risk, or all.

    $ limpet audit temperature --preset smoke
    $ limpet audit hidden --model mini-distilled
    $ limpet audit all --out limpet-reports/audits
    $ limpet audit values --preset paper --model s-sahoo/duo-distilled --judge gpt2-large --json

    Args:
        name: which audit, or all; docs/audits.md says what each shows and what it does not
        preset: smoke takes seconds; mini suits the built-in models; paper has the paper's counts
        model: one or more; the built-in mini and mini-distilled unless told (risk adds the exact sources)
        paths: paths, or clean texts, in each of the preset's shards; the preset's own number unless told
        nfe: network calls of a path; the preset's own number unless told
        judge: what scores texts, where an audit does; an exact source scores its own
        text: clean text for the audits of forward states (selection, risk); held-out pages unless given
        device: cpu, cuda, ...; a GPU where there is one
        precision: what the networks run in; the preset's own unless told
        json: print one JSON document
        out_folder: where the result is kept, as JSON, with its figure and a page over all that is kept there
    """
    clean = _read(text)
    if out_folder is not None:
        ready(out_folder)

    def done(audit: Audit) -> Kept:
        settings = _told(audit.presets[preset], paths, nfe)
        how = precision or settings.precision
        denoisers = [load(one, device=device, precision=how) for one in model or audit.models]
        judged = audit.judged and not all(isinstance(one, Source) for one in denoisers)
        models = Models(tuple(denoisers), load_judge(judge, device=device) if judged else None, clean)
        with progress_bar() as bar:
            task = bar.add_task(audit.name, total=None, detail="")
            result = audit(models, settings, lambda done, total: bar.update(task, completed=done, total=total))
        return Kept(preset, result, made_on(models))

    made: list[Kept] = []
    skipped = []
    for audit in AUDITS.values() if name == "all" else [AUDITS[name]]:
        try:
            kept = done(audit)
        except LimpetError as error:
            if name != "all":
                raise
            skipped.append(f"{audit.name}: {error}")
            continue
        made.append(kept)
        if out_folder is not None:
            keep(kept, out_folder)
        if not json:
            _show(audit, kept)
    for reason in skipped:
        err.print(reason, style="yellow", markup=False)
    if out_folder is not None:
        err.print(str(write(out_folder)), markup=False)
    if json:
        print_json([kept.to_dict() for kept in made] if name == "all" else made[0].to_dict())
    return int(bool(skipped))


def _show(audit: Audit, kept: Kept) -> None:
    """The report's table in a terminal."""
    shown = table(kept.result, f"{audit.title} ({kept.preset})")
    view = Table(title=shown.caption, caption=READING)
    for head in shown.head:
        view.add_column(head, justify="right" if head in ("here", "events") else "left", no_wrap=True)
    for group in shown.groups:
        for entries in group:
            view.add_row(*(escape(entry.text) for entry in entries))
        view.add_section()
    out.print(view)
    for what, convention in kept.result.conventions.items():
        err.print(f"{what}: {convention}", style="dim", markup=False)


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
