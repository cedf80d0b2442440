"""Arms side by side: samplers that share all randomness, measured alike, with errors over shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from limpet import scoring, stats
from limpet.denoisers import Denoiser
from limpet.errors import LimpetError
from limpet.judges import Judge, TrueLaw
from limpet.samplers import CRS, Mend, Native, Sampler
from limpet.samples import Given, Samples, Watcher, sample

SHARDS = (8200, 8210, 8220, 8230)  # the paper's seeds
MEASURES = ("entropy", "rep-4")

Floats = NDArray[np.float64]


def baselines(nfe: int) -> dict[str, Sampler]:
    """The arms of a first comparison: the native sampler and top-p at two masses, with the last call that serves them
    best; CRS as in the paper; and Mend."""
    native = Native(nfe=nfe, endpoint="ancestral")
    return {
        "native": native,
        "top-p .9": native.but(top_p=0.9),
        "top-p .7": native.but(top_p=0.7),
        "CRS": CRS(nfe=nfe),
        "Mend": Mend(nfe=nfe),
    }


@dataclass(frozen=True)
class Measured:
    """Sets of texts, one a shard, in numbers."""

    nll: Floats  # (shards,) nats per counted token
    counted: int  # tokens that the nll is over
    convention: str
    values: dict[str, Floats]  # (shards,) each

    def to_dict(self) -> dict[str, Any]:
        measures = {"nll": self.nll, "perplexity": np.exp(self.nll), **self.values}
        return {"counted": self.counted, **{name: stats.mean_se(v).to_dict() for name, v in measures.items()}}


@dataclass(frozen=True)
class Arm(Measured):
    """What one sampler gave."""

    name: str
    sampler: Sampler
    samples: list[Samples]  # one a shard

    @property
    def nfe(self) -> int:
        return self.samples[0].nfe

    @property
    def selected(self) -> float:
        """Positions selected along a path, on average."""
        return float(np.mean([shard.selected.float().mean() for shard in self.samples]))

    def to_dict(self) -> dict[str, Any]:
        head_rows = float(np.mean([shard.head_rows for shard in self.samples]))
        about = {"name": self.name, "sampler": self.sampler.to_dict(), "nfe": self.nfe, "selected": self.selected}
        return {**about, "head_rows": head_rows, **super().to_dict()}


def measure(judge: Judge, model: Denoiser, shards: list[Tensor], prefix: int = 0) -> Measured:
    """Quality and diversity of each shard's tokens (n, L), of which the first `prefix` were given."""
    scores = [scoring.score(judge, model, tokens, prefix) for tokens in shards]
    columns = [scoring.diversity(tokens[:, prefix:], MEASURES)[0] for tokens in shards]
    return Measured(
        nll=np.array([shard.pooled for shard in scores]),
        counted=int(sum(shard.tokens.sum() for shard in scores)),
        convention=scores[0].convention,
        values={name: np.array([stats.mean(shard[name]) for shard in columns]) for name in MEASURES},
    )


@dataclass(frozen=True)
class Comparison:
    """Arms that started from the same states and used the same uniforms."""

    model: str
    digest: str
    precision: str
    length: int
    shards: tuple[int, ...]
    samples_per_shard: int
    judge: dict[str, str]  # name, digest, precision, convention, and the rule in words
    conventions: dict[str, str]
    arms: list[Arm]
    data: Measured | None  # draws from the true law, where that judges

    def perplexity(self, arm: Arm) -> stats.Estimate:
        """The shards' exp(NLL): GenPPL, or the true perplexity."""
        return stats.mean_se(np.exp(arm.nll))

    def gain(self, arm: Arm) -> stats.Estimate:
        """The arm's NLL less the first arm's, paired by shard."""
        return stats.paired(arm.nll, self.arms[0].nll)

    def to_dict(self) -> dict[str, Any]:
        arms = [{**arm.to_dict(), "nll_against_first": self.gain(arm).to_dict()} for arm in self.arms]
        return {**vars(self), "shards": list(self.shards), "data": self.data and self.data.to_dict(), "arms": arms}


def compare(
    model: Denoiser,
    arms: Mapping[str, Sampler] | None = None,
    n: int = 64,
    shards: tuple[int, ...] = SHARDS,
    length: int | None = None,
    prefix: Given | None = None,
    batch_size: int | None = None,
    judge: Judge | None = None,
    watch: Callable[[str], Watcher | bool] = lambda arm: False,
) -> Comparison:
    """n samples in each shard under each arm; a judge scores them, or the model's own law where that is known."""
    arms = baselines(64) if arms is None else arms
    if not arms or not shards:
        raise LimpetError("a comparison needs at least one arm and one shard")
    if len(set(shards)) < len(shards):
        raise LimpetError(f"shards are {', '.join(map(str, shards))}; each seed counts once: give different ones")
    judge = scoring.judge_of(model, judge)
    done = []
    for name, sampler in arms.items():
        made = [sample(model, sampler, n, seed, length, prefix, None, batch_size, watch(name)) for seed in shards]
        measured = measure(judge, model, [shard.tokens for shard in made], made[0].prefix)
        done.append(Arm(**vars(measured), name=name, sampler=sampler, samples=made))
    data = None
    if isinstance(judge, TrueLaw) and judge.digest == model.digest and not made[0].prefix:
        data = measure(judge, model, [judge.source.draw(n, seed) for seed in shards])
    about = {name: getattr(judge, name) for name in ("name", "digest", "precision")}
    convention = done[0].convention
    about |= {"convention": convention, "rule": scoring.rule(judge, convention)}
    length, rules = int(made[0].tokens.shape[1]), scoring.conventions(MEASURES)
    return Comparison(model.name, model.digest, model.precision, length, tuple(shards), n, about, rules, done, data)
