"""What generated text is measured by besides a judge; each metric names its convention, for every row of output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from limpet.evaluation.metrics.bleu import SMOOTHINGS, self_bleu
from limpet.evaluation.metrics.mauve import frontier_area, mauve
from limpet.evaluation.metrics.ngrams import Pack, dist, entropy, length, pack, rep


class Metric(NamedTuple):
    """A named statistic of a set of sequences: one value each, or one for the set."""

    name: str
    convention: str
    function: Callable[[Any], Any]
    over: str = "sequence"  # or "set"


# The paper's table, in its order. All ids of a sequence count, special ones too; a set is one shard.
METRICS = (
    Metric("entropy", "unigram, each sequence its own, nats", entropy),
    Metric("dist-4", "distinct over all 4-grams, pooled within the shard", partial(dist, n=4), "set"),
    Metric("rep-4", "1 - distinct over all 4-grams, each sequence its own", partial(rep, n=4)),
    Metric("self-bleu", "BLEU-4 against the rest of the shard, add-one above unigrams", self_bleu),
    Metric("self-bleu-all", "BLEU-4 against the rest of the shard, add-one on every order",
           partial(self_bleu, smoothing="add-one-all")),
    Metric("length", "ids in a sequence", length),
)  # fmt: skip

__all__ = [
    "METRICS", "SMOOTHINGS", "Metric", "Pack", "dist", "entropy", "frontier_area", "length", "mauve", "pack",
    "rep", "self_bleu",
]  # fmt: skip
