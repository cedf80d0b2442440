"""Whether a path could end before its last call: final steps along whole paths, and what stopping each sample would save.

    python benchmarks/stopping.py --models mini-distilled mini --n 256 --seeds 8200 8210 8220 8230 --every 2
    python benchmarks/stopping.py --page docs/speed.md

At some calls every sample is also read out as if the path ended there. A rule then stops each sample at the first of
these calls before which no label changed and little doubt was left: the deficits of the positions without a label, as
a fraction of the generated length, within a bound. Nothing else is needed to judge any such rule, and no sample knows
of another. Differences are from the same sample's own last call; errors are over samples, which are independent. Models
and the judge are on a GPU where there is one. The second line runs nothing: it fills the page from what was found."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import limpet
from limpet.diffusion.rng import CounterRNG
from limpet.evaluation import scoring
from limpet.evaluation.judges import Judge
from limpet.models import Denoiser
from limpet.samplers import CRS, params, parse
from limpet.samplers.context import open_context

BOUNDS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5)
SHARE = 0.8  # of the calls that a rule worth having leaves


class Along(NamedTuple):
    """What one batch of paths was, had it ended sooner."""

    read: dict[int, Tensor]  # call -> (n, L) tokens, had it been the last; the last one's are the output
    doubt: Tensor  # (n, calls) deficits without a label after each call, as a fraction of the generated length
    changed: Tensor  # (n, calls) labels that took another value


def ending(sampler: CRS, call: int) -> CRS:
    """The same sampler, on the same grid of times, whose final step is this call: it reads the distribution of the call's own time,
    which is the one that the state is at."""

    @dataclass(frozen=True)
    class Ending(type(sampler)):  # type: ignore[misc]
        times, early = sampler.times, sampler.warmup_calls

    own = {name: getattr(sampler, name) for name in params(type(sampler))}
    if "turns" in own:  # as it comes, it follows from the number of calls
        own["turns"] = own["turns"] or -(-sampler.nfe // 32)
    return Ending(**own | {"nfe": call + 1})


def walk(model: Denoiser, sampler: CRS, seed: int, samples: Tensor, every: int) -> Along:
    """Whole paths, read out at every so many calls after warmup too."""
    fixed = torch.full((len(samples), model.length), -1, device=model.device)
    path = open_context(model, CounterRNG(seed, samples.to(model.device)), fixed)
    state, along = sampler.begin(path), Along({}, *torch.zeros(2, len(samples), sampler.nfe))
    for call in range(sampler.nfe):
        if call > sampler.warmup_calls and (call - sampler.nfe + 1) % every == 0 and call < sampler.nfe - 1:
            along.read[call] = ending(sampler, call).step(path, state)[0].tokens.cpu()
        state, info = sampler.step(path, state)
        left = path.free & ~info.marks["committed"] & ~info.marks["chosen"]
        seen = info.outcome.deficit.where(left & info.outcome.deficit.isfinite(), 0)
        along.doubt[:, call] = seen.sum(-1).cpu() / path.generated.cpu()
        along.changed[:, call] = info.marks.get("mended", path.no_positions).sum(-1).cpu()
    along.read[sampler.nfe - 1] = state.tokens.cpu()
    return along


def stops(along: Along, bound: float) -> Tensor:
    """(n,) the call that reads each sample out: the first that may, or the last."""
    calls = sorted(along.read)
    before = torch.tensor(calls) - 1
    settled = (along.doubt[:, before] <= bound) & (along.changed[:, before] == 0)
    settled[:, -1] = True
    return torch.tensor(calls)[settled.int().argmax(-1)]


def measured(judge: Judge, model: Denoiser, tokens: Tensor) -> NDArray[np.float64]:
    """(2, n) the NLL and the entropy of each sample."""
    columns, _ = scoring.diversity(tokens, ("entropy",))
    return np.stack([scoring.score(judge, model, tokens).mean, np.array(columns["entropy"], float)])


def less(values: NDArray[np.float64], full: NDArray[np.float64], stopped: Tensor) -> dict[str, Any]:
    """What stopping saved and changed."""
    mean, error = (values - full).mean(-1), (values - full).std(-1, ddof=1) / values.shape[-1] ** 0.5
    calls = stopped.double() + 1
    spread = calls.quantile(torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)).tolist()
    return {
        "calls": calls.mean().item(), "calls: least, tenth, median, nine tenths, most": spread,
        "NLL less the last call's": [mean[0], error[0]], "entropy less the last call's": [mean[1], error[1]],
    }  # fmt: skip


def differences(row: dict[str, Any]) -> list[tuple[float, float]]:
    """NLL and entropy less the last call's, each with its error."""
    return [tuple(row[f"{what} less the last call's"]) for what in ("NLL", "entropy")]


def equal(row: dict[str, Any]) -> bool:
    """Whether neither is more than two errors away."""
    return all(abs(mean) <= 2 * error for mean, error in differences(row))


def table(found: dict[str, Any]) -> str:
    """What docs/speed.md says: by model and arm, the last final step that leaves that share of the calls, and the fewest
    calls of any rule that changes nothing."""
    final_steps = set.intersection(*({int(call) for call in one["all at one call"]} for one in found["arms"].values()))
    early = max(call for call in final_steps if call <= SHARE * found["nfe"])
    lines = [
        f"| {found['samples']} samples, {found['nfe']} calls | NLL at {early} less at {found['nfe']} "
        f"| entropy at {early} less at {found['nfe']} | fewest calls with both equal within two errors |",
        "|---|---|---|---|",
    ]
    for arm, about in found["arms"].items():
        shown = " | ".join(
            f"{mean:+.3f} ± {error:.3f}" for mean, error in differences(about["all at one call"][str(early)])
        )
        every = (*about["rules"].values(), *about["all at one call"].values())
        lines.append(f"| {arm} | {shown} | {min(one['calls'] for one in every if equal(one)):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mini-distilled"])
    parser.add_argument("--arm", action="append", help="crs or mend, with parameters")
    parser.add_argument("--nfe", type=int, default=64)
    parser.add_argument("--n", type=int, default=4, help="samples of each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[8200, 8210])
    parser.add_argument("--every", type=int, default=3, help="calls between final steps")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/stopping.json"))
    parser.add_argument("--page", type=Path, help="fill this page from --out, and run nothing")
    options = parser.parse_args()
    if options.page is not None:
        from blocks import put

        put(options.page, "stopping", table(json.loads(options.out.read_text(encoding="utf-8"))))
        return
    found: dict[str, Any] = {"nfe": options.nfe, "samples": options.n * len(options.seeds), "arms": {}}
    for name in options.models:
        model, judge = limpet.load(name, precision=options.precision), limpet.load_judge()
        for arm in options.arm or ["mend", "crs"]:
            _, sampler = parse(arm, nfe=options.nfe)
            assert isinstance(sampler, CRS), f"{arm} stores no labels, so nothing in it settles"
            with torch.inference_mode():
                shards = [walk(model, sampler, seed, torch.arange(options.n), options.every) for seed in options.seeds]
            read = {call: torch.cat([shard.read[call] for shard in shards]) for call in shards[0].read}
            along = Along(read, *(torch.cat([shard[part] for shard in shards]) for part in (1, 2)))
            values = {call: measured(judge, model, tokens) for call, tokens in read.items()}
            full, n = values[options.nfe - 1], np.arange(options.n * len(options.seeds))
            rules = {}
            for bound in BOUNDS:
                stopped = stops(along, bound)
                chosen = np.stack([values[int(call)][:, i] for i, call in zip(n, stopped, strict=True)], 1)
                rules[f"doubt within {bound}"] = less(chosen, full, stopped)
            found["arms"][f"{name}, {sampler.caption}"] = {
                "rules": rules,
                "all at one call": {
                    str(call + 1): less(own, full, torch.full((len(n),), call)) for call, own in values.items()
                },
                "doubt before the last call": along.doubt[:, -2].mean().item(),
                "samples with a label changed in the call before the last": (along.changed[:, -2] > 0)
                .double()
                .mean()
                .item(),
            }
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(found["arms"][f"{name}, {sampler.caption}"], indent=1), flush=True)


if __name__ == "__main__":
    main()
