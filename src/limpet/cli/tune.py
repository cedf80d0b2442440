"""`limpet tune`: the best parameters for a model, a judge and a number of network calls."""

from __future__ import annotations

import json as jsons
import os
import shlex
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from limpet import registry
from limpet.cli.common import DEFAULT_LOADING, Json, Length, Loading, Model, err, show
from limpet.cli.study import DEFAULT_EXECUTING, Executing, compute
from limpet.errors import LimpetError
from limpet.evaluation import source_judge
from limpet.evaluation.judges import BUILTIN
from limpet.experiments import JudgeSpec, Results, Store, Study, collect, figures, format_estimate, format_signed
from limpet.experiments.tuning import SPACE, TuningConfig, TuningResult, tune
from limpet.files import read_text, write_file

DEFAULTS = TuningConfig("")
SPACE_HELP = f"""a sampler and values of its parameters, all combined; can be repeated for several samplers (default:
{SPACE})"""


def run(
    model: Annotated[Model, tyro.conf.Positional],
    /,
    nfe: int = DEFAULTS.nfe,
    entropy: float | None = None,
    tolerance: float = DEFAULTS.tolerance,
    space: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help=SPACE_HELP)] = (),
    candidates: int = DEFAULTS.candidates,
    n: int = DEFAULTS.n,
    n_seeds: int = DEFAULTS.n_seeds,
    seed: int = DEFAULTS.seed,
    length: Length = None,
    judge: str | None = None,
    store: str = "limpet-store",
    executing: Executing = DEFAULT_EXECUTING,
    loading: Loading = DEFAULT_LOADING,
    out_file: Annotated[Path, tyro.conf.arg(name="out")] = Path("tuned.toml"),
    force: bool = False,
    json: Json = False,
) -> int:
    """Find the parameters with the lowest NLL against top-p at equal entropy, by successive halving.

    The same command resumes an interrupted run. The winner is measured again on seeds that no choice has used.

    $ limpet tune mini --nfe 16
    $ limpet tune mini --nfe 16 --entropy 4.4 --out sharp.toml
    $ limpet tune ./my.py:factory --judge gpt2-large --n 32 --on processes
    $ limpet tune mini --space "mend late_top_p=.9,.8" --space "crs budget=.25,.5"
    $ limpet compare --model mini --sampler native --sampler tuned.toml

    Args:
        nfe: network calls of every sampler
        entropy: the wanted unigram entropy in nats (default: wherever the distance is largest)
        tolerance: how far from it a sampler's own entropy may be
        candidates: how many samplers are tried, spread evenly over the space
        n: samples per seed
        n_seeds: fresh seeds, which the report is on; the last choice uses as many or more
        seed: the first, an even number; choices use even seeds and the report odd ones
        judge: what scores the texts (default: an exact source's own distribution, else mini-judge)
        store: where results live, as for `limpet study`: nothing is computed twice
        out_file: where the sampler is written, for `--sampler`; the figure is written beside it
        force: overwrite the result of another tuning
    """
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
