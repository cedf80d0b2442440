"""Metrics of token sequences that need no judge; each names its convention, which is printed with every value."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from limpet.evaluation.metrics.bleu import SMOOTHINGS, self_bleu
from limpet.evaluation.metrics.mauve import frontier_area, mauve
from limpet.evaluation.metrics.ngrams import Pack, dist, entropy, length, novelty, pack, rep


class Metric(NamedTuple):
    """A statistic of the samples of one seed: one value for each sample, or one for the whole set."""

    convention: str
    function: Callable[..., Any]
    of_set: bool = False
    by_prompt: bool = False  # compares the continuations of one prompt: takes `groups`, needs prompts


# In the order of the paper's table. All tokens of a sample count, special ones too; a set is the samples of one seed.
METRICS = {
    "entropy": Metric("unigram entropy within each sample, nats", entropy),
    "dist-4": Metric("distinct 4-grams over all 4-grams, pooled over the samples of a seed", partial(dist, n=4), True),
    "rep-4": Metric("1 - distinct 4-grams over all 4-grams, within each sample", partial(rep, n=4)),
    "self-bleu": Metric("BLEU-4 against the other samples of the seed, add-one above unigrams", self_bleu),
    "self-bleu-all": Metric(
        "BLEU-4 against the other samples of the seed, add-one on every order",
        partial(self_bleu, smoothing="add-one-all"),
    ),
    "self-bleu-prompt": Metric(
        "BLEU-4 against the other continuations of the same prompt, method 1",
        partial(self_bleu, smoothing="method-1"),
        by_prompt=True,
    ),
    "length": Metric("tokens in a sample", length),
}

__all__ = [
    "METRICS", "SMOOTHINGS", "Metric", "Pack", "dist", "entropy", "frontier_area", "length", "mauve", "novelty",
    "pack", "rep", "self_bleu",
]  # fmt: skip
