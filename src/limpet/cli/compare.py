"""`limpet compare`: samplers on the same random numbers, in one table, with one sample of each beside the others."""

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
    Sharpness,
    err,
    out,
    print_recommended,
    prompt_texts,
    readable,
    samplers_progress,
    show,
)
from limpet.evaluation.comparison import NFE, Comparison, N, compare, compared_samplers
from limpet.evaluation.judges import load_judge
from limpet.evaluation.tables import HEAD_WIDTH, ResultTable
from limpet.generation import SEEDS
from limpet.models import Denoiser

NARROW = 12  # characters of a line of a column's name in a narrow terminal


def run(
    model: Model = DEFAULT_MODEL,
    sampler: SamplerTexts = (),
    nfe: int = NFE,
    sharpness: Sharpness = None,
    n: int = N,
    seeds: tuple[int, ...] = SEEDS,
    length: Length = None,
    prompt: str | None = None,
    prompts: str | None = None,
    judge: str | None = None,
    checker: str | None = None,
    batch_size: int | None = None,
    loading: Loading = DEFAULT_LOADING,
    metrics: tuple[str, ...] = (),
    controls: bool = False,
    texts: int = 1,
    json: Json = False,
) -> None:
    """Compare samplers on the same random numbers (default: native, native with top-p .9 and .7, CRS, Mend and the
    sampler that --sharpness chooses, with the same number of network calls).

    $ limpet compare
    $ limpet compare --nfe 8 --sharpness 0
    $ limpet compare --model exact:chain --nfe 32
    $ limpet compare --sampler native --sampler "wide: crs spacing=8"
    $ limpet compare --sampler "crs nfe=8" --sampler "crs nfe=64" --json
    $ limpet compare --controls
    $ limpet compare --metrics mauve --n 64
    $ limpet compare --model sudoku --prompt puzzle.txt

    Args:
        nfe: network calls of every sampler that does not set its own
        n: samples of each seed, for each prompt
        seeds: standard errors are over them
        prompt: text that every sample begins with, or the puzzle that it solves (or a file that holds it); it is not
            counted
        prompts: a file of prompts, --n samples of each: lines, or JSON lines
        judge: of the texts (default: an exact source's own distribution, none beside a model's checker, mini-judge for
            models of its tokens)
        checker: of texts, by name or as ./file.py:Name (default: the model's)
        batch_size: samples that are computed at once
        metrics: shown beside the likelihood and entropy: rep-4, dist-4, self-bleu, novelty-8, mauve, ... (default:
            rep-4, with --controls novelty-8); mauve takes 64 samples or more
        controls: add three rows of texts that no model made; a metric that ranks one above a sampler is fooled
        texts: samples of each sampler to print side by side
    """
    compared_samplers(sampler or None, nfe, sharpness)  # before the model is loaded
    denoiser = loading.load(model)
    chosen = compared_samplers(sampler or None, nfe, sharpness, denoiser)
    scorer = None if judge is None else load_judge(judge, loading.device)
    texts_before = prompt_texts(denoiser, prompt, prompts)
    each = [text for text in texts_before for _ in range(n)] or None
    count = len(each or range(n))
    with samplers_progress(sum(one.nfe for one in chosen.values()) * len(seeds) * count) as report_for:
        result = compare(
            denoiser, chosen, nfe, count, seeds, length, each, batch_size, scorer, report_for, checker,
            metrics or None, controls,
        )  # fmt: skip
    if not sampler:
        print_recommended(list(chosen.values())[-1], sharpness)
    if not json:
        rules = {"judge": result.judge["rule"]} if result.judge else {}
        for name, convention in {**rules, **result.conventions}.items():
            err.print(f"{name}: {convention}", style="dim", markup=False)
    printed = min(texts, count) if denoiser.tokenizer else 0
    width = out.width if out.is_terminal else None
    parts = [rich_table(result.table(), width), *(side_by_side(denoiser, result, i) for i in range(printed))]
    show(json, result.to_dict(), parts)


def side_by_side(denoiser: Denoiser, result: Comparison, i: int) -> table.Table:
    """The i-th sample of the first seed under each sampler."""
    view = table.Table(title=f"sample {i} of seed {result.seeds[0]}, from the same random numbers", show_lines=True)
    for one in result.samplers:
        view.add_column(one.name, ratio=1)
    view.add_row(*(Text(readable(denoiser, one.samples[0].texts[i]).strip()) for one in result.samplers))
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
