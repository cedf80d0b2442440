"""`limpet tune`: the dial of a model, or the best parameters of one sampler for a number of network calls."""

from __future__ import annotations

import json as jsons
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from limpet import __version__, registry
from limpet.cli.common import DEFAULT_LOADING, Json, Length, Loading, LoadOptions, Model, err, progress, show
from limpet.cli.compare import rich_table
from limpet.cli.study import DEFAULT_EXECUTING, Executing, compute
from limpet.errors import LimpetError
from limpet.evaluation import source_judge
from limpet.evaluation.comparison import Comparison, compare
from limpet.evaluation.judges import BUILTIN, load_judge
from limpet.experiments import JudgeSpec, Results, Store, Study, collect, dial, figures, format_estimate, format_signed
from limpet.experiments.tuning import SPACE, TuningConfig, TuningResult, tune
from limpet.files import read_text, write_file
from limpet.generation import Progress
from limpet.samplers import Sampler
from limpet.samplers.recommended import SavedDial, dial_path

DEFAULTS = TuningConfig("")
SPACE_HELP = f"""a sampler and values of its parameters, all combined; can be repeated for several samplers (default:
{SPACE})"""


def run(
    model: Annotated[Model, tyro.conf.Positional],
    /,
    nfe: int = DEFAULTS.nfe,
    n: int = DEFAULTS.n,
    n_seeds: int = DEFAULTS.n_seeds,
    seed: int = DEFAULTS.seed,
    length: Length = None,
    judge: str | None = None,
    checker: str | None = None,
    space: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help=SPACE_HELP)] = (),
    entropy: float | None = None,
    tolerance: float = DEFAULTS.tolerance,
    candidates: int = DEFAULTS.candidates,
    store: str = "limpet-store",
    executing: Executing = DEFAULT_EXECUTING,
    loading: Loading = DEFAULT_LOADING,
    out_file: Annotated[Path | None, tyro.conf.arg(name="out")] = None,
    force: bool = False,
    json: Json = False,
) -> int:
    """Fit the dial to a model, so that --sharpness chooses what suits it; with --space, --entropy or --out, find the
    one sampler with the lowest NLL against top-p at equal entropy, by successive halving.

    $ limpet tune mini
    $ limpet tune sudoku --nfe 16 --n 16
    $ limpet tune mini --nfe 16 --entropy 4.4 --out sharp.toml
    $ limpet tune mini --space "mend late_top_p=.9,.8" --space "crs budget=.25,.5"

    Args:
        nfe: network calls of every sampler
        n: samples per seed
        n_seeds: seeds of the choice, and as many of the report
        seed: the first; choices use even seeds, the report odd ones
        judge: of the texts (default: own distribution, checker or mini-judge)
        checker: of samples (default: the model's own); its first number is the quality
        entropy: wanted, in nats (default: where the distance is largest)
        tolerance: how far off an entropy may be, in nats
        candidates: samplers of the space that are tried
        store: where results of the search live; nothing is computed twice
        out_file: where the search writes its sampler (default: tuned.toml)
        force: overwrite another result
    """
    if not (space or entropy is not None or out_file):
        return _fit_dial(model, nfe, n, n_seeds, seed, length, judge, checker, loading, json)
    if checker is not None:
        raise LimpetError("a search over a space compares NLL: leave checker out, or fit the dial, without --space")
    out_file = out_file or Path("tuned.toml")
    if out_file.suffix != ".toml" or not out_file.resolve().parent.is_dir():
        raise LimpetError(f"out is {str(out_file)!r}; it takes a file that ends in .toml, in a folder that exists")
    models = executing.models(loading)
    is_exact = judge is None and source_judge(models.model(model)) is not None
    judges = () if is_exact else (JudgeSpec(judge or BUILTIN),)
    spaces = space or DEFAULTS.spaces
    config = TuningConfig(model, nfe, judges, spaces, candidates, n, n_seeds, entropy, tolerance, length, seed)
    if out_file.exists() and not force and config.digest not in read_text(out_file, "name another file"):
        raise LimpetError(
            f"{out_file} exists and is of another tuning: name another file, or overwrite it with --force"
        )
    executor, threads = executing.executor(loading.device, models)
    results = Store(store)

    def measure(study: Study) -> Results:
        for reason in compute(study, results, executor, models, threads=threads).failed.values():
            raise LimpetError(reason)
        return collect(study, results)

    found = tune(config, measure)
    write_file(out_file, sampler_file(found, out_file))
    figure = _write_figure(found, out_file.with_suffix(".svg"))
    files = [str(out_file), *figure]
    parts = [frontier_table(found), fresh_table(found), verdict(found), "", *commands(found, out_file), *figure]
    show(json, {**found.to_dict(), "files": files}, parts)
    return 0


def _fit_dial(
    name: str,
    nfe: int,
    n: int,
    n_seeds: int,
    seed: int,
    length: int | None,
    judge: str | None,
    checker: str | None,
    loading: LoadOptions,
    json: bool,
) -> int:
    """Fit the dial, save it under the model's digest, and show it on fresh seeds."""
    config = TuningConfig(name, nfe, n=n, n_seeds=n_seeds, seed=seed)
    model = loading.load(name)
    scorer = None if judge is None else load_judge(judge, loading.device)

    def measure(samplers: Mapping[str, Sampler], seeds: Sequence[int]) -> Comparison:
        with progress(total=sum(one.nfe for one in samplers.values()) * len(seeds) * n) as update:

            def report_for(name: str) -> Progress:
                before = 0

                def report(done: int, total: int) -> None:
                    nonlocal before
                    update(description=name, advance=done - before if done > before else done)
                    before = done

                return report

            return compare(model, samplers, nfe, n, seeds, length, None, None, scorer, report_for, checker)

    found = dial.fit(nfe, config.seeds(n_seeds), config.fresh_seeds, measure)
    about = f"{found.quality} at {nfe} calls, {n_seeds} seeds x {n} samples, by limpet {__version__}"
    path = dial_path(model.digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LimpetError(f"{path} cannot be written ({error.strerror}): set LIMPET_HOME to a folder") from error
    write_file(path, SavedDial(model.name, model.digest, about, found.dial).toml())
    next_step = f"limpet sample --model {shlex.quote(name)} --nfe {nfe} --sharpness 0.5"
    numbers = ", ".join(f"{field} {value:g}" for field, value in asdict(found.dial).items())
    parts = [rich_table(found.fresh.table(), None), f"the dial: {numbers}", f"saved: {path}", next_step]
    show(json, {**found.to_dict(), "file": str(path)}, parts)
    return 0


def sampler_file(found: TuningResult, path: Path) -> str:
    """The winner as a file that `--sampler` takes, with where it comes from.

    A sampler's Python file is named by its path from there."""
    name, rest = found.text.split(" ", 1)
    if registry.is_file(name):
        name = os.path.relpath(name, path.resolve().parent)
    judges = ", ".join(found.fresh.judges)
    about = [f"{found.config.model}, judged by {judges}; tuning {found.config.digest}", *verdict(found).split("\n")]
    comments = [f"# {' '.join(line.split())}\n" for line in about]
    return "".join([*comments, f"sampler = {jsons.dumps(f'{name} {rest}', ensure_ascii=False)}\n"])


def verdict(found: TuningResult) -> str:
    """Delta NLL of the winner, and of its sampler with default parameters, against top-p and CRS."""
    lines = []
    for text in dict.fromkeys((found.winner, found.default)):
        entropy, (top_p, crs) = found.fresh(text, "entropy"), found.distances(text).values()
        lines.append(
            f"{text}: at its entropy, {format_estimate(entropy, 3)} nats, delta NLL (nats/token, lower is better) is "
            f"{format_signed(top_p, 3)} against top-p with the better final step, and {format_signed(crs, 3)} against "
            "CRS that keeps committed tokens"
        )
    wanted, tolerance = found.config.entropy, found.config.tolerance
    off = 0.0 if wanted is None else found.fresh(found.winner, "entropy").mean - wanted
    if abs(off) > tolerance:
        lines.append(f"on fresh seeds the winner's entropy is {off:+.3f} from {wanted:g}: give finer values, or more n")
    return "\n".join(lines)


def commands(found: TuningResult, path: Path) -> list[str]:
    """What to run with the winner."""
    config = found.config
    head = f"limpet compare --model {shlex.quote(config.model)} --nfe {config.nfe} --sampler native"
    return [f'{head} --sampler "{found.text}"', f"{head} --sampler {shlex.quote(str(path))}"]


def frontier_table(found: TuningResult) -> Table:
    """The candidates that no other beats in both entropy and NLL."""
    tried, counts = len(found.rungs[0]), ", ".join(f"{len(rung)} on {rung[0].seeds}" for rung in found.rungs)
    table = _table(
        f"{found.config.model}, {found.config.nfe} network calls: the best of {tried} samplers",
        "measured on the seeds of the choices, so the best look a little too good; samplers on seeds of "
        f"{found.config.n} samples: {counts}",
        "sampler",
        "seeds",
        "entropy (nats)",
        "NLL (nats/token, lower is better)",
        "delta NLL against top-p",
    )
    for one in found.frontier():
        delta = "n/a" if one.delta_nll != one.delta_nll else f"{one.delta_nll:+.3f}"
        table.add_row(one.sampler, str(one.seeds), f"{one.entropy:.3f}", f"{one.nll:.3f}", delta)
    return table


def fresh_table(found: TuningResult) -> Table:
    """The winner on fresh seeds, beside its sampler with default parameters, the curves and the paper's CRS."""
    fresh, config = found.fresh, found.config
    table = _table(
        f"on fresh seeds: {len(config.fresh_seeds)} seeds x {config.n} samples",
        f"judged by {', '.join(fresh.judges)}; mean and standard error over seeds",
        "sampler",
        "NLL (nats/token, lower is better)",
        "entropy (nats)",
        "rep-4 (lower is better)",
    )
    for name in fresh.cells:
        digits = {"nll": 3, "entropy": 3, "rep-4": 4}
        values = [format_estimate(fresh(name, measure), count) for measure, count in digits.items()]
        table.add_row(name, *values, style="bold" if name == found.winner else None)
    return table


def _table(title: str, caption: str, *heads: str) -> Table:
    table = Table(title=title, caption=caption)
    for head in heads:
        table.add_column(head, justify="left" if head == "sampler" else "right", no_wrap=head == "seeds")
    return table


def _write_figure(found: TuningResult, path: Path) -> list[str]:
    """The path of the figure's file; without matplotlib there is none."""
    try:
        drawing = figures.draw(found.figure())["svg"]
    except LimpetError as error:
        err.print(f"no figure: {error}", markup=False)
        return []
    write_file(path, drawing)
    return [str(path)]
