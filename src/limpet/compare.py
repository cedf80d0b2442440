"""Arms side by side: policies that share all randomness, measured alike, with errors over shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from limpet import metrics, stats
from limpet.denoisers import Denoiser
from limpet.denoisers.exact import Source
from limpet.errors import LimpetError
from limpet.judges import Judge, gen_nll
from limpet.policy import Policy
from limpet.samples import Given, Samples, Watcher, sample

SHARDS = (8200, 8210, 8220, 8230)  # the paper's seeds


def baselines(policy: Policy) -> dict[str, Policy]:
    """The arms of a first comparison: the native sampler, top-p at two masses, and the policy itself (CRS)."""
    native = policy.but(horizon=0)
    return {
        "native": native,
        "top-p .95": native.but(top_p=0.95, late_top_p=None),
        "top-p .9": native.but(top_p=0.9, late_top_p=None),
        "CRS": policy,
    }


@dataclass(frozen=True)
class Arm:
    """What one policy gave: a value of each measure for every shard."""

    name: str
    policy: Policy
    nfe: int
    selected: float  # positions selected along a path, on average
    head_rows: float
    nll: NDArray[np.float64]  # (shards,) nats per token
    values: dict[str, NDArray[np.float64]]  # (shards,) each
    samples: list[Samples]  # one a shard


@dataclass(frozen=True)
class Comparison:
    """Arms that started from the same states and used the same uniforms."""

    model: str
    digest: str
    length: int
    shards: tuple[int, ...]
    per_shard: int
    quality: str  # what the nll is: under the model's own true law, or under a judge
    conventions: dict[str, str]
    arms: list[Arm]
    data: dict[str, NDArray[np.float64]] | None  # the same measures of draws from the true law, where it is known

    def perplexity(self, arm: Arm) -> stats.Estimate:
        """The shards' exp(NLL): GenPPL, or the true perplexity."""
        return stats.mean_se(np.exp(arm.nll))

    def gain(self, arm: Arm) -> stats.Estimate:
        """The arm's NLL less the first arm's, paired by shard."""
        return stats.paired(arm.nll, self.arms[0].nll)

    def to_dict(self) -> dict[str, Any]:
        def entry(estimate: stats.Estimate) -> dict[str, Any]:
            one = len(estimate.values) < 2
            return {"mean": estimate.mean, "se": None if one else estimate.se, "shards": estimate.values.tolist()}

        data = None if self.data is None else {name: entry(stats.mean_se(values)) for name, values in self.data.items()}
        return {
            "model": self.model,
            "digest": self.digest,
            "length": self.length,
            "shards": list(self.shards),
            "samples_per_shard": self.per_shard,
            "quality": self.quality,
            "conventions": self.conventions,
            "data": data,
            "arms": [
                {
                    "name": arm.name,
                    "policy": arm.policy.to_dict(),
                    "nfe": arm.nfe,
                    "selected": arm.selected,
                    "head_rows": arm.head_rows,
                    "nll": entry(stats.mean_se(arm.nll)),
                    "perplexity": entry(self.perplexity(arm)),
                    "nll_against_first": entry(self.gain(arm)),
                    **{name: entry(stats.mean_se(values)) for name, values in arm.values.items()},
                }
                for arm in self.arms
            ],
        }


def compare(
    model: Denoiser,
    arms: Mapping[str, Policy] | None = None,
    n: int = 64,
    shards: tuple[int, ...] = SHARDS,
    length: int | None = None,
    prefix: Given | None = None,
    batch_size: int | None = None,
    judge: Judge | None = None,
    watch: Callable[[str], Watcher | bool] = lambda arm: False,
) -> Comparison:
    """n samples in each shard under each arm; a judge scores them, or the model's own law where that is known."""
    arms = baselines(Policy()) if arms is None else arms
    if not arms or not shards:
        raise LimpetError("a comparison needs at least one arm and one shard")
    score, quality = _scorer(model, judge, prefix)
    measured = [metric for metric in metrics.METRICS if metric.name in ("entropy", "rep-4")]

    def measure(shards_of_tokens: list[Tensor]) -> dict[str, NDArray[np.float64]]:
        return {
            metric.name: np.array([np.mean(metric.function(tokens)) for tokens in shards_of_tokens])
            for metric in measured
        }

    done = []
    for name, policy in arms.items():
        made = [sample(model, policy, n, seed, length, prefix, batch_size, watch(name)) for seed in shards]
        done.append(
            Arm(
                name=name,
                policy=policy,
                nfe=made[0].nfe,
                selected=float(np.mean([shard.selected.float().mean() for shard in made])),
                head_rows=float(np.mean([shard.head_rows for shard in made])),
                nll=np.array([score(shard.tokens) for shard in made]),
                values=measure([shard.tokens for shard in made]),
                samples=made,
            )
        )
    data = None
    if isinstance(model, Source) and judge is None:
        true = [model.draw(n, seed) for seed in shards]
        data = {"nll": np.array([score(tokens) for tokens in true]), **measure(true)}
    return Comparison(
        model=model.name,
        digest=model.digest,
        length=int(done[0].samples[0].tokens.shape[1]),
        shards=tuple(shards),
        per_shard=n,
        quality=quality,
        conventions={metric.name: metric.convention for metric in measured},
        arms=done,
        data=data,
    )


def _scorer(model: Denoiser, judge: Judge | None, prefix: Given | None) -> tuple[Callable[[Tensor], float], str]:
    """How a shard's tokens are scored, in nats per token, and what that is called."""
    if judge is not None:
        return lambda tokens: float(gen_nll(judge, tokens.tolist()).by_shard([0] * len(tokens))[0]), judge.name
    if not isinstance(model, Source):
        raise LimpetError(f"the true law of {model.name} is not known: give a judge (judge=limpet.load_judge(...))")
    if prefix is not None:
        raise LimpetError("with a prefix the true law would score the prefix too: compare without one, or with a judge")
    return lambda tokens: -float(model.log_prob(tokens).mean()) / tokens.shape[1], "true law"
