"""`limpet compare`: samplers on the same random numbers, in one table, with one sample of each beside the others."""

from __future__ import annotations

from textwrap import fill

from rich import table
from rich.text import Text

from limpet.cli.common import (
    DEFAULT_LOADING,
    DEFAULT_MODEL,
    Json,
    Length,
    Loading,
    Model,
    SamplerTexts,
    err,
    out,
    progress,
    show,
)
from limpet.evaluation import source_judge
from limpet.evaluation.comparison import NFE, SAMPLERS, Comparison, N, compare
from limpet.evaluation.judges import BUILTIN, load_judge
from limpet.evaluation.tables import HEAD_WIDTH, ResultTable
from limpet.generation import SEEDS, Progress
from limpet.samplers import named_samplers

NARROW = 12  # characters of a line of a column's name in a narrow terminal


def run(
    model: Model = DEFAULT_MODEL,
    sampler: SamplerTexts = (),
    nfe: int = NFE,
    n: int = N,
    seeds: tuple[int, ...] = SEEDS,
    length: Length = None,
    prompt: str | None = None,
    judge: str | None = None,
    checker: str | None = None,
    batch_size: int | None = None,
    loading: Loading = DEFAULT_LOADING,
    texts: int = 1,
    json: Json = False,
) -> None:
    """Compare samplers on the same random numbers (default: native, native with top-p .9 and .7, CRS and Mend, with
    the same number of network calls).

    $ limpet compare
    $ limpet compare --model exact:chain --nfe 32
    $ limpet compare --sampler native --sampler "wide: crs spacing=8"
    $ limpet compare --sampler "crs nfe=8" --sampler "crs nfe=64" --json

    Args:
        nfe: network calls of every sampler that does not set its own
        n: samples of each seed
        seeds: standard errors are over them
        prompt: text that every sample begins with; it is not counted
        judge: the judge of the texts (default: the true distribution of an exact source, mini-judge for other models)
        checker: a checker of texts, by name or as ./file.py:Name (default: the model's own, if it has one)
        batch_size: samples that are computed at once
        texts: how many samples of each sampler to print side by side
    """
    chosen = named_samplers(sampler or SAMPLERS, nfe)
    denoiser = loading.load(model)
    own_judge = source_judge(denoiser) if judge is None else None
    scorer = own_judge or load_judge(judge or BUILTIN, loading.device)
    with progress(total=sum(one.nfe for one in chosen.values()) * len(seeds) * n) as tell:

        def report_for(name: str) -> Progress:
            before = 0

            def report(done: int, total: int) -> None:
                nonlocal before
                tell(description=name, advance=done - before if done > before else done)
                before = done

            return report

        result = compare(denoiser, chosen, nfe, n, seeds, length, prompt, batch_size, scorer, report_for, checker)
    if not json:
        for name, convention in {"judge": result.judge["rule"], **result.conventions}.items():
            err.print(f"{name}: {convention}", style="dim", markup=False)
    count = min(texts, n) if denoiser.tokenizer else 0
    width = out.width if out.is_terminal else None
    parts = [rich_table(result.table(), width), *(side_by_side(result, i) for i in range(count))]
    show(json, result.to_dict(), parts)


def side_by_side(result: Comparison, i: int) -> table.Table:
    """The i-th sample of the first seed under each sampler."""
    view = table.Table(title=f"sample {i} of seed {result.seeds[0]}, from the same random numbers", show_lines=True)
    for one in result.samplers:
        view.add_column(one.name, ratio=1)
    view.add_row(*(Text(one.samples[0].texts[i].strip()) for one in result.samplers))
    return view


def rich_table(content: ResultTable, width: int | None) -> table.Table:
    """A table for a terminal of a width; where it is too wide, each error is under its mean."""
    widths = [max(*map(len, column), HEAD_WIDTH) + 3 for column in zip(*content.rows, strict=True)]
    is_narrow = width is not None and sum(widths) + 1 > width
    view = table.Table(title=content.caption, title_justify="left")
    for i, name in enumerate(content.head):
        head = fill(name, NARROW if is_narrow else HEAD_WIDTH, break_on_hyphens=False)
        view.add_column(head, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for row in content.rows:
        view.add_row(*(Text(text.replace(" ± ", "\n± ") if is_narrow else text) for text in row))
    return view
