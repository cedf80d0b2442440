"""`limpet tune`: the best parameters for one's own model, judge and number of calls."""

from __future__ import annotations

import json as jsons
import os
import shlex
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from limpet import registry
from limpet.cli.common import HERE, Json, Length, Model, On, Somewhere, err, show
from limpet.cli.study import make, placed
from limpet.errors import LimpetError
from limpet.evaluation import scoring
from limpet.evaluation.judges import BUILTIN
from limpet.experiments import Judging, Results, Shelf, Store, Study, collect, figures
from limpet.experiments.contents import number, signed
from limpet.experiments.tuning import SPACE, Question, Tuned, tune
from limpet.files import write_whole

ASKED = Question("")  # as it comes
SPACES = f"""a sampler and values of its parameters, all crossed; several times for several samplers. Unless told:
{SPACE}"""


def run(
    model: Annotated[Model, tyro.conf.Positional],
    /,
    nfe: int = ASKED.nfe,
    entropy: float | None = None,
    tolerance: float = ASKED.tolerance,
    space: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(help=SPACES)] = (),
    arms: int = ASKED.arms,
    n: int = ASKED.n,
    shards: int = ASKED.shards,
    seed: int = ASKED.seed,
    length: Length = None,
    judge: str | None = None,
    store: str = "limpet-store",
    on: On = "local",
    workers: int | None = None,
    address: str | None = None,
    threads: int | None = None,
    where: Somewhere = HERE,
    out_file: Annotated[Path, tyro.conf.arg(name="out")] = Path("tuned.toml"),
    json: Json = False,
) -> int:
    """Find the parameters that lie farthest below the curve of top-p at equal entropy, by successive halving.

    Stopped at any moment, the same command goes on; the winner is measured again on seeds that no choice has seen.

    $ limpet tune mini --nfe 16
    $ limpet tune mini --nfe 16 --entropy 4.4 --out sharp.toml
    $ limpet tune ./my.py:factory --judge gpt2-large --n 32 --on processes
    $ limpet tune mini --space "mend late_top_p=.9,.8" --space "crs budget=.25,.5"
    $ limpet compare --model mini --arm native --arm tuned.toml

    Args:
        nfe: network calls of every arm
        entropy: the unigram entropy that is wanted; wherever the distance is largest unless told
        tolerance: how far from it an arm's own may lie
        arms: the most that are tried, spread evenly over the space; more of them hold the fewer
        n: samples in a shard
        shards: fresh ones, that the report is on; the last choice is made on as many or more
        seed: the first, an even number; choices take even seeds and the report odd ones
        judge: what scores the texts; unless told, the true distribution of an exact source, and mini-judge elsewhere
        store: where results live, as for `limpet study`: nothing is made twice
        on: in this process, in processes (one a GPU, or as many as --workers), or on a Ray cluster
        workers: how many; as many as there are devices unless told
        address: of a running Ray cluster; one is started here unless told
        threads: of torch in each worker on the CPU
        out_file: where the sampler is written, for `--arm`; the figure stands beside it
    """
    if out_file.suffix != ".toml" or not out_file.resolve().parent.is_dir():
        raise LimpetError(f"out is {str(out_file)!r}; it takes a file that ends in .toml, in a folder that is there")
    shelf = Shelf(where.device if on == "local" else "cpu", where.resolved, where.which)
    known = judge is None and scoring.source_judge(shelf.model(model)) is not None
    judges = () if known else (Judging(judge or BUILTIN),)
    question = Question(model, nfe, judges, space or ASKED.spaces, arms, n, shards, entropy, tolerance, length, seed)
    place, threads = placed(on, workers, address, where.device, threads, shelf)
    kept = Store(store)

    def measured(study: Study) -> Results:
        for reason in make(study, kept, place, shelf, threads=threads).failed.values():
            raise LimpetError(reason)
        return collect(study, kept)

    found = tune(question, measured)
    write_whole(out_file, written(found, out_file))
    picture = _drawn(found, out_file.with_suffix(".svg"))
    show(json, {**found.to_dict(), "files": [str(out_file), *picture]}, [
        frontier(found), table(found), verdict(found), "", *commands(found, out_file), *picture
    ])  # fmt: skip
    return 0


def written(found: Tuned, path: Path) -> str:
    """The winner as `--arm` takes it from a file, and where it comes from; a Python file by its place from there."""
    name, rest = found.arm.split(" ", 1)
    if registry.is_file(name):
        name = os.path.relpath(name, path.resolve().parent)
    about = [f"{found.question.model}, judged by {', '.join(found.fresh.judges)}", *verdict(found).split("\n")]
    return "".join(
        [
            *(f"# {' '.join(line.split())}\n" for line in about),
            f"arm = {jsons.dumps(f'{name} {rest}', ensure_ascii=False)}\n",
        ]
    )


def verdict(found: Tuned) -> str:
    """How far the winner, and its sampler as it comes, lie from what they are held against."""
    lines = []
    for arm in dict.fromkeys((found.winner, found.plain)):
        entropy, (top_p, crs) = found.fresh(arm, "entropy"), found.distances(arm).values()
        lines.append(
            f"{arm}: at its entropy, {number(entropy, 3)}, NLL is {signed(top_p, 3)} against top-p with the better "
            f"final step, {signed(crs, 3)} against CRS with labels copied"
        )
    wanted, tolerance = found.question.entropy, found.question.tolerance
    off = 0.0 if wanted is None else found.fresh(found.winner, "entropy").mean - wanted
    if abs(off) > tolerance:
        lines.append(f"on fresh seeds the winner's entropy is {off:+.3f} from {wanted:g}: give finer values, or more n")
    return "\n".join(lines)


def commands(found: Tuned, path: Path) -> list[str]:
    """What to run with the winner."""
    head = f"limpet compare --model {shlex.quote(found.question.model)} --nfe {found.question.nfe} --arm native"
    return [f'{head} --arm "{found.arm}"', f"{head} --arm {shlex.quote(str(path))}"]


def frontier(found: Tuned) -> Table:
    """The arms that no other beat in both entropy and NLL."""
    tried, counts = len(found.rungs[0]), ", ".join(f"{len(rung)} on {rung[0].shards}" for rung in found.rungs)
    view = _table(
        f"{found.question.model}, {found.question.nfe} calls: the frontier of {tried} arms",
        f"as choices saw them, so the best look a little too good; arms on shards of {found.question.n}: {counts}",
        "arm", "shards", "entropy", "NLL", "less top-p",
    )  # fmt: skip
    for one in found.frontier():
        gap = "n/a" if one.less != one.less else f"{one.less:+.3f}"
        view.add_row(one.arm, str(one.shards), f"{one.entropy:.3f}", f"{one.nll:.3f}", gap)
    return view


def table(found: Tuned) -> Table:
    """The winner on fresh seeds, beside its sampler as it comes, the curves and the paper's CRS."""
    fresh, question = found.fresh, found.question
    view = _table(
        f"on fresh seeds: {len(question.fresh)} shards of {question.n} samples",
        f"judged by {', '.join(fresh.judges)}; mean and standard error over shards", "arm", "NLL", "entropy", "rep-4",
    )  # fmt: skip
    for name in fresh.cells:
        values = [number(fresh(name, what), digits) for what, digits in (("nll", 3), ("entropy", 3), ("rep-4", 4))]
        view.add_row(name, *values, style="bold" if name == found.winner else None)
    return view


def _table(title: str, caption: str, *heads: str) -> Table:
    view = Table(title=title, caption=caption)
    for head in heads:
        view.add_column(head, justify="left" if head == "arm" else "right", no_wrap=head != "arm")
    return view


def _drawn(found: Tuned, path: Path) -> list[str]:
    """The figure's file; without matplotlib none, and that is said."""
    try:
        picture = figures.draw(found.figure())["svg"]
    except LimpetError as error:
        err.print(f"no figure: {error}", markup=False)
        return []
    write_whole(path, picture)
    return [str(path)]
