"""`limpet compare`: samplers on common randomness, in one table, and one sample under each of them."""

from __future__ import annotations

from typing import Annotated

import tyro
from rich.table import Table
from rich.text import Text

from limpet.commands import DEFAULT_MODEL, Precision, err, out, precision_on, print_json, progress_bar
from limpet.compare import SHARDS, Comparison, baselines, compare
from limpet.denoisers.catalog import load
from limpet.denoisers.exact import Source
from limpet.judges import load_judge
from limpet.policy import Policy
from limpet.sampler import Info, State
from limpet.samples import Watcher
from limpet.stats import Estimate, mean_se


def run(
    model: str = DEFAULT_MODEL,
    n: int = 4,
    shards: tuple[int, ...] = SHARDS,
    length: int | None = None,
    judge: str = "mini-judge",
    batch_size: int | None = None,
    device: str | None = None,
    precision: Precision = "auto",
    texts: int = 1,
    json: bool = False,
    policy: Annotated[Policy, tyro.conf.arg(name="")] = Policy(nfe=16),
) -> None:
    """Compare the native sampler, top-p .95 and .9, and CRS at equal network calls and on the same randomness.

    $ limpet compare
    $ limpet compare --model exact:chain --nfe 32
    $ limpet compare --nfe 64 --budget 0.25 --json > comparison.json

    Args:
        model: built-in name, folder, file, owner/name on the hub, or exact:NAME (a source whose true law is known)
        n: samples in each shard
        shards: one seed each; errors are over shards
        length: tokens in a sample; the model's own unless told
        judge: what scores the texts; an exact source scores its own
        batch_size: samples computed at once
        device: cpu, cuda, ...; a GPU where there is one
        precision: what the network runs in; auto is bfloat16 where the device has it
        texts: how many samples to show under each arm, side by side
        json: print one JSON document
        policy: the CRS arm; the baselines share its calls, grid and endpoint
    """
    denoiser = load(model, device=device, precision=precision_on(device, precision))
    scorer = None if isinstance(denoiser, Source) else load_judge(judge, device=device)
    arms = baselines(policy)
    with progress_bar() as bar:
        task = bar.add_task("", total=len(arms) * len(shards) * n * policy.nfe, detail="")
        ends = {"done": 0}

        def watch(arm: str) -> Watcher:
            before = ends["done"]

            def tell(state: State, info: Info, done: int, total: int) -> None:
                ends["done"] = before + done
                bar.update(task, description=arm, completed=ends["done"])

            return tell

        result = compare(denoiser, arms, n, shards, length, None, batch_size, scorer, watch)
    if json:
        print_json(result.to_dict())
        return
    out.print(table(result))
    for name, convention in result.conventions.items():
        err.print(f"{name}: {convention}", style="dim", markup=False)
    for i in range(min(texts, n) if denoiser.tokenizer else 0):
        view = Table(title=f"sample {i} of seed {shards[0]}: the same randomness under each arm", show_lines=True)
        for arm in result.arms:
            view.add_column(arm.name, ratio=1)
        view.add_row(*(Text(arm.samples[0].texts[i].strip()) for arm in result.arms))
        out.print(view)


def table(result: Comparison) -> Table:
    """One row an arm: mean and standard error over shards."""
    exact = result.quality == "true law"
    view = Table(
        title=f"{result.model}: {len(result.shards)} shards of {result.per_shard} samples, {result.length} tokens",
        caption=f"quality under the {result.quality}; mean and standard error over shards; contrasts paired by shard",
    )
    heads = ["arm", "calls", "true NLL" if exact else "GenPPL", f"NLL - {result.arms[0].name}"]
    for head in (*heads, *result.conventions, "selected"):
        view.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
    for arm in result.arms:
        quality = mean_se(arm.nll) if exact else result.perplexity(arm)
        gain = "" if arm is result.arms[0] else _with_error(result.gain(arm), 4)
        measures = [_with_error(mean_se(values), 4) for values in arm.values.values()]
        selected = f"{arm.selected:.0f}"
        view.add_row(arm.name, str(arm.nfe), _with_error(quality, 4 if exact else 2), gain, *measures, selected)
    if result.data is not None:
        nll, *others = (_with_error(mean_se(values), 4) for values in result.data.values())
        view.add_row("the source", "", nll, "", *others, "", style="dim")
    return view


def _with_error(estimate: Estimate, digits: int) -> str:
    mean = f"{estimate.mean:.{digits}f}"
    return mean if len(estimate.values) < 2 else f"{mean} ± {estimate.se:.{digits}f}"
