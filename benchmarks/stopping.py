"""Whether sampling could end before the last call: final steps along whole trajectories, and what stopping would save.

    python benchmarks/stopping.py --models mini-distilled mini --n 256 --seeds 8200 8210 8220 8230 --every 2
    python benchmarks/stopping.py --page docs/speed.md

At some calls the final step of every sample is also computed as if sampling ended there. A rule then stops each sample
at the first of these calls before which no committed token changed and the remaining doubt was small: the deficits of
positions without a committed token, as a fraction of the generated length, within a bound. Differences are from the
same sample's own last call; errors are over samples, which are independent. Models and the judge are on a GPU if there
is one. The second command measures nothing: it fills the page from the stored results."""

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
from limpet.evaluation import Judge, SampleSet, evaluate
from limpet.generation import Inputs, rollout
from limpet.models import Denoiser
from limpet.samplers import CRS, params, parse

BOUNDS = (0.01, 0.03, 0.1, 0.2, 0.3, 0.5)
SHARE = 0.8  # of the calls that a rule worth having leaves


class EarlyEnds(NamedTuple):
    """What one batch would have been if it had ended sooner."""

    tokens: dict[int, Tensor]  # call -> (n, L) the output if this call were the last
    doubt: Tensor  # (n, calls) deficits without a committed token, as a fraction of the generated length
    changed: Tensor  # (n, calls) committed tokens that took another value


def ending(sampler: CRS, call: int) -> CRS:
    """The same sampler on the same grid of times, with this call as its final step."""

    @dataclass(frozen=True)
    class Ending(type(sampler)):  # type: ignore[misc]
        times, early = sampler.times, sampler.warmup_calls

    own = {name: getattr(sampler, name) for name in params(type(sampler))}
    if "revise_every" in own:  # its default follows from the number of calls
        own["revise_every"] = own["revise_every"] or -(-sampler.nfe // 32)
    return Ending(**own | {"nfe": call + 1})


def sample_with_ends(model: Denoiser, sampler: CRS, seed: int, samples: Tensor, every: int) -> EarlyEnds:
    """Sample one batch; compute the final step also at every so many calls after warmup."""
    fixed = torch.full((len(samples), model.length), -1, device=model.device)
    inputs, before = Inputs(fixed, CounterRNG(seed, samples.to(model.device))), None
    ends = EarlyEnds({}, *torch.zeros(2, len(samples), sampler.nfe))
    for step in rollout(model, sampler, inputs):
        call, ctx = step.call, step.context
        if sampler.warmup_calls < call < sampler.nfe - 1 and (call - sampler.nfe + 1) % every == 0:
            *_, end = rollout(model, ending(sampler, call), inputs, start=before)
            ends.tokens[call] = end.tokens.cpu()
        left = ctx.free & ~step.masks["committed"] & ~step.masks["chosen"]
        deficit = step.deficit.where(left & step.deficit.isfinite(), 0)
        ends.doubt[:, call] = deficit.sum(-1).cpu() / ctx.generated.cpu()
        ends.changed[:, call] = step.masks.get("revised", ctx.no_positions).sum(-1).cpu()
        before = step.state
    ends.tokens[sampler.nfe - 1] = step.tokens.cpu()
    return ends


def stops(ends: EarlyEnds, bound: float) -> Tensor:
    """(n,) the call at which each sample stops: the first that may, or the last."""
    calls = sorted(ends.tokens)
    before = torch.tensor(calls) - 1
    settled = (ends.doubt[:, before] <= bound) & (ends.changed[:, before] == 0)
    settled[:, -1] = True
    return torch.tensor(calls)[settled.int().argmax(-1)]


def nll_and_entropy(judge: Judge, model: Denoiser, tokens: Tensor) -> NDArray[np.float64]:
    """(2, n) the NLL and the entropy of each sample."""
    columns = evaluate(SampleSet.from_tokens(model, tokens), judge, ["entropy"]).columns()
    return np.stack([columns["nll"], columns["entropy"]])


def saving(values: NDArray[np.float64], full: NDArray[np.float64], stopped: Tensor) -> dict[str, Any]:
    """What stopping saves and changes."""
    mean, error = (values - full).mean(-1), (values - full).std(-1, ddof=1) / values.shape[-1] ** 0.5
    calls = stopped.double() + 1
    spread = calls.quantile(torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)).tolist()
    return {
        "calls": calls.mean().item(),
        "calls: least, tenth, median, nine tenths, most": spread,
        "delta NLL": [mean[0], error[0]],
        "delta entropy": [mean[1], error[1]],
    }


def differences(row: dict[str, Any]) -> list[tuple[float, float]]:
    """NLL and entropy minus those of the last call, each with its error."""
    return [tuple(row[f"delta {name}"]) for name in ("NLL", "entropy")]


def equal(row: dict[str, Any]) -> bool:
    """Whether neither is more than two errors away."""
    return all(abs(mean) <= 2 * error for mean, error in differences(row))


def table(found: dict[str, Any]) -> str:
    """The table of docs/speed.md: by model and sampler, the change at the last call before a fifth of them is left, and
    the fewest calls of any rule that changes nothing."""
    final_steps = set.intersection(
        *({int(call) for call in one["all at one call"]} for one in found["samplers"].values())
    )
    early = max(call for call in final_steps if call <= SHARE * found["nfe"])
    lines = [
        f"| {found['samples']} samples, {found['nfe']} calls | NLL at {early} minus at {found['nfe']} "
        f"| entropy at {early} minus at {found['nfe']} | fewest calls with both equal within two errors |",
        "|---|---|---|---|",
    ]
    for name, about in found["samplers"].items():
        changes = " | ".join(
            f"{mean:+.3f} ± {error:.3f}" for mean, error in differences(about["all at one call"][str(early)])
        )
        every = (*about["rules"].values(), *about["all at one call"].values())
        lines.append(f"| {name} | {changes} | {min(one['calls'] for one in every if equal(one)):.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mini-distilled"])
    parser.add_argument("--sampler", action="append", help="crs or mend, with parameters")
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
    found: dict[str, Any] = {"nfe": options.nfe, "samples": options.n * len(options.seeds), "samplers": {}}
    for name in options.models:
        model, judge = limpet.load(name, precision=options.precision), limpet.load_judge()
        for text in options.sampler or ["mend", "crs"]:
            _, sampler = parse(text, nfe=options.nfe)
            assert isinstance(sampler, CRS), f"{text} commits no tokens, so it cannot settle"
            numbers = torch.arange(options.n)
            parts = [sample_with_ends(model, sampler, seed, numbers, options.every) for seed in options.seeds]
            tokens = {call: torch.cat([part.tokens[call] for part in parts]) for call in parts[0].tokens}
            ends = EarlyEnds(tokens, *(torch.cat([part[field] for part in parts]) for field in (1, 2)))
            values = {call: nll_and_entropy(judge, model, own) for call, own in tokens.items()}
            full, n = values[options.nfe - 1], np.arange(options.n * len(options.seeds))
            rules = {}
            for bound in BOUNDS:
                stopped = stops(ends, bound)
                chosen = np.stack([values[int(call)][:, i] for i, call in zip(n, stopped, strict=True)], 1)
                rules[f"doubt within {bound}"] = saving(chosen, full, stopped)
            found["samplers"][f"{name}, {sampler.caption}"] = {
                "rules": rules,
                "all at one call": {
                    str(call + 1): saving(own, full, torch.full((len(n),), call)) for call, own in values.items()
                },
                "doubt before the last call": ends.doubt[:, -2].mean().item(),
                "samples with a committed token changed in the call before the last": (ends.changed[:, -2] > 0)
                .double()
                .mean()
                .item(),
            }
            options.out.write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(found["samplers"][f"{name}, {sampler.caption}"], indent=1), flush=True)


if __name__ == "__main__":
    main()
