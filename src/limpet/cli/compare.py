"""`limpet compare`: samplers on common randomness, in one table, and one sample under each of them."""

from __future__ import annotations

from textwrap import fill

from rich.table import Table
from rich.text import Text

from limpet.cli.common import (
    DEFAULT_MODEL,
    HERE,
    Arms,
    Json,
    Length,
    Model,
    Somewhere,
    arms,
    err,
    out,
    progress,
    show,
)
from limpet.evaluation.comparison import SHARDS, Comparison, baselines, compare
from limpet.evaluation.judges import BUILTIN, load_judge
from limpet.evaluation.scoring import source_judge
from limpet.generation import Watcher

NARROW = 12  # columns of a head, where there are few


def run(
    model: Model = DEFAULT_MODEL,
    arm: Arms = (),
    nfe: int = 16,
    n: int = 4,
    shards: tuple[int, ...] = SHARDS,
    length: Length = None,
    prompt: str | None = None,
    judge: str | None = None,
    batch_size: int | None = None,
    where: Somewhere = HERE,
    texts: int = 1,
    json: Json = False,
) -> None:
    """Compare samplers on the same randomness: unless told which, native, top-p .9 and .7, CRS and Mend
    at equal calls.

    $ limpet compare
    $ limpet compare --model exact:chain --nfe 32
    $ limpet compare --arm native --arm "wide: crs spacing=8" --arm ./mine.py:Mine
    $ limpet compare --arm "crs nfe=8" --arm "crs nfe=64" --json > comparison.json

    Args:
        nfe: network calls of every arm that does not say otherwise
        n: samples in each shard
        shards: one seed each; errors are over shards
        prompt: text that every sample begins with; it is not counted
        judge: what scores the texts; unless told, the true distribution of an exact source, and mini-judge elsewhere
        batch_size: samples computed at once
        texts: how many samples to show under each arm, side by side
    """
    chosen = arms(arm, nfe) or baselines(nfe)
    denoiser = where.load(model)
    own = source_judge(denoiser) if judge is None else None
    scorer = own or load_judge(judge or BUILTIN, where.device)
    with progress(total=sum(arm.nfe for arm in chosen.values()) * len(shards) * n) as tell:

        def watch(arm: str) -> Watcher:
            return lambda state, *_: tell(description=arm, advance=len(state.tokens))

        result = compare(denoiser, chosen, n, shards, length, prompt, batch_size, scorer, watch)
    if not json:
        for name, convention in {"NLL": result.judge["rule"], **result.conventions}.items():
            err.print(f"{name}: {convention}", style="dim", markup=False)
    many = min(texts, n) if denoiser.tokenizer else 0
    show(
        json,
        result.to_dict(),
        [table(result, out.width if out.is_terminal else None), *(side_by_side(result, i) for i in range(many))],
    )


def side_by_side(result: Comparison, i: int) -> Table:
    """The i-th sample of the first shard under each arm."""
    view = Table(title=f"sample {i} of seed {result.shards[0]}: the same randomness under each arm", show_lines=True)
    for one in result.arms:
        view.add_column(one.name, ratio=1)
    view.add_row(*(Text(one.samples[0].texts[i].strip()) for one in result.arms))
    return view


def table(result: Comparison, width: int | None) -> Table:
    """One row an arm; where that is too wide, each error under its mean."""
    title, caption = result.caption
    head, rows = result.table()
    widths = [max(map(len, column)) + 3 for column in zip(head, *rows, strict=True)]
    narrow = width is not None and sum(widths) + 1 > width
    between = "\n± " if narrow else " ± "
    view = Table(title=title, caption=caption)
    for name in head:
        shown = fill(name, NARROW, break_on_hyphens=False) if narrow else name
        view.add_column(shown, justify="left" if name == "arm" else "right", no_wrap=name != "arm", overflow="fold")
    for row, style in zip(rows, [None] * len(result.arms) + ["dim"], strict=False):
        view.add_row(*(Text(text.replace(" ± ", between)) for text in row), style=style)
    return view
