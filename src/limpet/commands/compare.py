"""`limpet compare`: samplers on common randomness, in one table, and one sample under each of them."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from limpet.commands import DEFAULT_MODEL, HERE, Arms, Json, Length, Model, Somewhere, arms, err, progress, show
from limpet.comparison import SHARDS, Comparison, baselines, compare
from limpet.judges import BUILTIN, load_judge
from limpet.lab.page import number
from limpet.samples import Watcher
from limpet.scoring import true_law
from limpet.stats import mean_se


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
    $ limpet compare --arm native --arm "crs budget=.25" --arm "wide: crs spacing=8" --arm ./mine.py:Mine
    $ limpet compare --arm "crs nfe=8" --arm "crs nfe=64" --json > comparison.json

    Args:
        nfe: network calls of every arm that does not say otherwise
        n: samples in each shard
        shards: one seed each; errors are over shards
        prompt: text that every sample begins with; it is not counted
        judge: what scores the texts; unless told, the true law of an exact source, and mini-judge elsewhere
        batch_size: samples computed at once
        texts: how many samples to show under each arm, side by side
    """
    chosen = arms(arm, nfe) or baselines(nfe)
    denoiser = where.load(model)
    own = true_law(denoiser) if judge is None else None
    scorer = own or load_judge(judge or BUILTIN, where.device)
    with progress(total=sum(arm.nfe for arm in chosen.values()) * len(shards) * n) as tell:

        def watch(arm: str) -> Watcher:
            return lambda state, *_: tell(description=arm, advance=len(state.tokens))

        result = compare(denoiser, chosen, n, shards, length, prompt, batch_size, scorer, watch)
    if not json:
        for name, convention in {"NLL": result.judge["rule"], **result.conventions}.items():
            err.print(f"{name}: {convention}", style="dim", markup=False)
    many = min(texts, n) if denoiser.tokenizer else 0
    show(json, result.to_dict(), [table(result), *(side_by_side(result, i) for i in range(many))])


def side_by_side(result: Comparison, i: int) -> Table:
    """The i-th sample of the first shard under each arm."""
    view = Table(title=f"sample {i} of seed {result.shards[0]}: the same randomness under each arm", show_lines=True)
    for one in result.arms:
        view.add_column(one.name, ratio=1)
    view.add_row(*(Text(one.samples[0].texts[i].strip()) for one in result.arms))
    return view


def table(result: Comparison) -> Table:
    """One row an arm: mean and standard error over shards."""
    judge, exact = result.judge, result.judge["convention"] == "law"
    counted = [arm.counted for arm in result.arms]
    counts = " to ".join(f"{count:,}" for count in sorted({min(counted), max(counted)}))
    shards = f"{len(result.shards)} shards of {result.samples_per_shard} samples"
    view = Table(
        title=f"{result.model}: {shards}, {result.length} tokens",
        caption=f"{judge['name']} ({judge['digest'][:12]}) in {judge['precision']}, by {judge['convention']}, {counts} "
        f"tokens counted an arm; {result.model} in {result.precision}\n"
        "mean and standard error over shards; contrasts paired by shard",
    )
    heads = ["arm", "calls", "true NLL" if exact else "GenPPL", f"NLL - {result.arms[0].name}"]
    for head in (*heads, *result.conventions, "selected"):
        view.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
    for arm in result.arms:
        quality = mean_se(arm.nll) if exact else result.perplexity(arm)
        gain = "" if arm is result.arms[0] else number(result.gain(arm), 4)
        measures = [number(mean_se(values), 4) for values in arm.values.values()]
        first = [arm.name, str(arm.nfe), number(quality, 4 if exact else 2), gain]
        view.add_row(*first, *measures, f"{arm.selected:.0f}")
    if (data := result.data) is not None:
        nll, *measures = (number(mean_se(values), 4) for values in (data.nll, *data.values.values()))
        view.add_row("the source", "", nll, "", *measures, "", style="dim")
    return view
