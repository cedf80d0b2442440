"""Controls: texts made without a model, as rows of a comparison. A metric that ranks one above a sampler is fooled.

Generative perplexity at a good entropy can be reached by nonsense (arXiv 2606.08417). The three controls come from a
reference text: for models of text, pages of books that the training of the built-in models left out, which ship with
limpet (their training text does not); for an exact source, draws from its distribution."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation.judges import Judge
from limpet.evaluation.metrics import entropy
from limpet.evaluation.sample_sets import Ids, SampleSet, text_pieces
from limpet.evaluation.scores import NLL, evaluate
from limpet.models import Denoiser
from limpet.models.exact import Source
from limpet.models.model_files import BUILTIN_FOLDER

ORDER = 4  # of the frequent n-grams
DRAWS, DRAW_SEED = 512, 2**32  # reference samples of an exact source, and their seed
TRIED = 64  # passages that the judge reads to find a well-predicted one
SLACK = 0.05  # nats by which their entropy is to be below the wanted one
FITTED = 32  # samples by which a control is fitted to an entropy
NGRAMS, SHIFTS, COPIES = f"control: frequent {ORDER}-grams", "control: one passage, shifted", "control: copied text"

Random = np.random.Generator


def heldout_text() -> str:
    """Pages of books that the training of the built-in models held out for validation."""
    return lzma.decompress((BUILTIN_FOLDER / "heldout.txt.xz").read_bytes()).decode()


def reference_set(model: Denoiser, length: int) -> SampleSet:
    """Real texts of a length: draws of an exact source, else pieces of the held-out text."""
    if isinstance(model, Source):
        return SampleSet.from_tokens(model, model.draw(DRAWS, DRAW_SEED))
    if model.checker is not None:
        raise LimpetError(f"{model.name} does not write prose, so its samples have no reference text: leave out "
                          "controls, mauve and novelty-8, and use its checker")  # fmt: skip
    return text_pieces(model, heldout_text(), length)


def control_sets(
    model: Denoiser, judge: Judge | None, n: int, seeds: Sequence[int], length: int, wanted: float
) -> dict[str, list[SampleSet]]:
    """The samples of each control, one set a seed.

    judge: finds a well-predicted passage (default: the one with the nearest entropy). wanted: the mean entropy of a
    sample, which the first two controls are fitted to."""
    real = reference_set(model, length)
    rows = [ids for _, ids in real.ids or ()]
    if not rows:
        raise LimpetError(f"the reference text has no piece of {length} tokens: give a smaller length")
    passage = rows[_well_predicted(real, judge, wanted)]
    makers = {NGRAMS: _frequent(rows, length, wanted), SHIFTS: _shifted(passage, rows, wanted), COPIES: _copied(rows)}
    return {
        name: [
            SampleSet.from_tokens(model, make(np.random.default_rng([seed, number]), n), seed=seed) for seed in seeds
        ]
        for number, (name, make) in enumerate(makers.items())
    }


Maker = Callable[[Random, int], list[Ids]]


def _frequent(rows: Sequence[Ids], length: int, wanted: float) -> Maker:
    """The most frequent n-grams of the texts, one after the other at random; the number of kinds sets the entropy."""
    counts = Counter(tuple(row[i : i + ORDER]) for row in rows for i in range(len(row) - ORDER + 1))
    ranked = np.array([gram for gram, _ in counts.most_common()])

    def make(random: Random, n: int, kinds: int) -> list[Ids]:
        drawn: list[Ids] = ranked[random.integers(kinds, size=(n, -(-length // ORDER)))].reshape(n, -1).tolist()
        return [row[:length] for row in drawn]

    kinds = _fitted(make, len(ranked), wanted)
    return lambda random, n: make(random, n, kinds)


def _shifted(passage: Ids, rows: Sequence[Ids], wanted: float) -> Maker:
    """One passage from another starting point each time, in which some tokens are replaced by others of the texts."""
    others = np.array([token for row in rows for token in row])

    def make(random: Random, n: int, replaced: int) -> list[Ids]:
        samples = []
        for _ in range(n):
            row = np.roll(passage, random.integers(len(passage)))
            row[random.permutation(len(row))[: replaced - 1]] = random.choice(others, replaced - 1)
            samples.append(row.tolist())
        return samples

    replaced = _fitted(make, len(passage) + 1, wanted)  # one more than the number of replaced tokens
    return lambda random, n: make(random, n, replaced)


def _copied(rows: Sequence[Ids]) -> Maker:
    """The texts themselves."""
    return lambda random, n: [rows[i] for i in random.choice(len(rows), n, replace=n > len(rows))]


def _fitted(make: Callable[[Random, int, int], list[Ids]], most: int, wanted: float) -> int:
    """The number from 1 to `most` with which the mean entropy, which rises with it, is nearest to the wanted one."""

    def found(number: int) -> float:
        return float(np.mean(entropy(make(np.random.default_rng(0), FITTED, number))))

    low, high = 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if found(middle) < wanted else (low, middle)
    return min((low, high), key=lambda number: abs(found(number) - wanted))


def _well_predicted(real: SampleSet, judge: Judge | None, wanted: float) -> int:
    """Of the passages whose entropy is a little below the wanted one, that with the lowest NLL under the judge.

    So only a few of its tokens need to be replaced."""
    pairs = real.ids or []
    apart = np.abs(entropy([ids for _, ids in pairs]) - (wanted - SLACK))
    near = np.argsort(apart, kind="stable")[:TRIED].tolist()
    if judge is None:
        return int(near[0])
    tried = SampleSet([pairs[i] for i in near], None, real.decode, 0, near, real.name, real.model, real.tokenizers)
    return int(near[int(np.argmin(evaluate(tried, judge, ()).columns()[NLL]))])
