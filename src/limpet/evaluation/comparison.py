"""Arms side by side: samplers that share all randomness, measured alike, with errors over shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from limpet.errors import LimpetError
from limpet.evaluation import scoring, statistics
from limpet.evaluation.judges import Judge, SourceJudge
from limpet.generation import Given, Samples, Watcher, sample
from limpet.html import table
from limpet.models import Denoiser
from limpet.samplers import CRS, Mend, Native, Sampler

SHARDS = (8200, 8210, 8220, 8230)  # the paper's seeds
MEASURES = ("entropy", "rep-4")

Floats = NDArray[np.float64]


def baselines(nfe: int) -> dict[str, Sampler]:
    """The arms of a first comparison: the native sampler and top-p at two masses, with the last call that serves them
    best; CRS as in the paper; and Mend."""
    native = Native(nfe=nfe, final_step="sample")
    return {
        "native": native,
        "top-p .9": native.replace(top_p=0.9),
        "top-p .7": native.replace(top_p=0.7),
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
        return {"counted": self.counted, **{name: statistics.mean_se(v).to_dict() for name, v in measures.items()}}


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
    def committed(self) -> float:
        """Positions committed along a path, on average."""
        return float(np.mean([shard.committed.float().mean() for shard in self.samples]))

    def to_dict(self) -> dict[str, Any]:
        head_rows = float(np.mean([shard.head_rows for shard in self.samples]))
        about = {"name": self.name, "sampler": self.sampler.to_dict(), "nfe": self.nfe, "committed": self.committed}
        return {**about, "head_rows": head_rows, **super().to_dict()}


def measure(judge: Judge, model: Denoiser, shards: list[Tensor], prefix: int = 0) -> Measured:
    """Quality and diversity of each shard's tokens (n, L), of which the first `prefix` were given."""
    scores = [scoring.score(judge, model, tokens, prefix) for tokens in shards]
    columns = [scoring.diversity(tokens[:, prefix:], MEASURES)[0] for tokens in shards]
    return Measured(
        nll=np.array([shard.pooled for shard in scores]),
        counted=int(sum(shard.tokens.sum() for shard in scores)),
        convention=scores[0].convention,
        values={name: np.array([statistics.mean(shard[name]) for shard in columns]) for name in MEASURES},
    )


@dataclass(frozen=True, repr=False)
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
    data: Measured | None  # draws from the true distribution, where that judges

    def perplexity(self, arm: Arm) -> statistics.Estimate:
        """The shards' exp(NLL): GenPPL, or the true perplexity."""
        return statistics.mean_se(np.exp(arm.nll))

    def gain(self, arm: Arm) -> statistics.Estimate:
        """The arm's NLL less the first arm's, paired by shard."""
        return statistics.paired(arm.nll, self.arms[0].nll)

    @property
    def caption(self) -> tuple[str, str]:
        """What was compared, and who judged it how."""
        judge, counted = self.judge, [arm.counted for arm in self.arms]
        counts = " to ".join(f"{count:,}" for count in sorted({min(counted), max(counted)}))
        shards = f"{len(self.shards)} shards of {self.samples_per_shard} samples"
        prefix = self.arms[0].samples[0].prefix
        given = f", {prefix} of them given and not counted" if prefix else ""
        return (
            f"{self.model}: {shards}, {self.length} tokens{given}",
            f"{judge['name']} ({judge['digest'][:12]}) in {judge['precision']}, by {judge['convention']}, {counts} "
            f"tokens counted an arm; {self.model} in {self.precision}\n"
            "mean and standard error over shards; contrasts paired by shard",
        )

    def table(self) -> tuple[list[str], list[list[str]]]:
        """A head, and a row an arm: mean and standard error over shards; then draws from the true distribution, where that
        judged."""
        exact = self.judge["convention"] == "exact"
        head = ["arm", "calls", "true NLL" if exact else "GenPPL", f"NLL - {self.arms[0].name}", *self.conventions]
        rows = []
        for arm in self.arms:
            quality = f"{statistics.mean_se(arm.nll):.4f}" if exact else f"{self.perplexity(arm):.2f}"
            gain = "" if arm is self.arms[0] else f"{self.gain(arm):.4f}"
            measures = [f"{statistics.mean_se(values):.4f}" for values in arm.values.values()]
            rows.append([arm.name, str(arm.nfe), quality, gain, *measures, f"{arm.committed:.0f}"])
        if (data := self.data) is not None:
            nll, *measures = (f"{statistics.mean_se(values):.4f}" for values in (data.nll, *data.values.values()))
            rows.append(["the source", "", nll, "", *measures, ""])
        return [*head, "committed"], rows

    def __repr__(self) -> str:
        return f"<{self.caption[0]}: {', '.join(arm.name for arm in self.arms)}>"

    def _repr_html_(self) -> str:
        return table("\n".join(self.caption), *self.table())

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
    progress: bool | Callable[[str], Watcher] = False,
) -> Comparison:
    """n samples in each shard under each arm; a judge scores them, or the model's own distribution where that is known.

    progress: True for a bar, or what makes of an arm's name a function told after every call."""
    arms = baselines(64) if arms is None else arms
    if not arms or not shards:
        raise LimpetError("a comparison needs at least one arm and one shard")
    if len(set(shards)) < len(shards):
        raise LimpetError(f"shards are {', '.join(map(str, shards))}; each seed counts once: give different ones")
    judge = scoring.judge_of(model, judge)
    done = []
    for name, sampler in arms.items():
        watch = progress(name) if callable(progress) else progress
        made = [sample(model, sampler, n, seed, length, prefix, None, batch_size, watch) for seed in shards]
        measured = measure(judge, model, [shard.tokens for shard in made], made[0].prefix)
        done.append(Arm(**vars(measured), name=name, sampler=sampler, samples=made))
    data = None
    if isinstance(judge, SourceJudge) and judge.digest == model.digest and not made[0].prefix:
        data = measure(judge, model, [judge.source.draw(n, seed) for seed in shards])
    about = {name: getattr(judge, name) for name in ("name", "digest", "precision")}
    convention = done[0].convention
    about |= {"convention": convention, "rule": scoring.rule(judge, convention)}
    length, rules = int(made[0].tokens.shape[1]), scoring.conventions(MEASURES)
    return Comparison(model.name, model.digest, model.precision, length, tuple(shards), n, about, rules, done, data)
