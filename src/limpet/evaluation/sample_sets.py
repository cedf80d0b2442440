"""The samples of one seed as evaluation reads them, and how a judge may read them: as ids or as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from limpet.errors import LimpetError
from limpet.evaluation.judges import AUTO, CONVENTIONS, Judge, SourceJudge, prompt_ids
from limpet.generation import Samples, split_text
from limpet.models import Denoiser, tokenizer_digest

Ids = list[int]


@dataclass(frozen=True, eq=False)
class SampleSet:
    """The samples of one seed as ids, as texts or as both; the prompt of each is apart from what was generated."""

    ids: Sequence[tuple[Ids, Ids]] | None  # (prompt, rest) of each sample
    stored_texts: Sequence[tuple[str, str]] | None = None  # (prompt, rest) of each sample; else the ids are decoded
    decode: Callable[[Ids], str] | None = None
    seed: int | str = 0
    numbers: Sequence[int | None] = ()  # of each sample under the seed
    name: str = "these samples"
    model: str | None = None  # digest of the model that generated them
    tokenizers: frozenset[str | None] = frozenset([None])  # digests of the ids' tokenizers; None where unknown

    @cached_property
    def texts(self) -> Sequence[tuple[str, str]] | None:
        """(prompt, rest) of each sample as text, or None if there is no text."""
        if self.stored_texts is not None or self.ids is None or self.decode is None:
            return self.stored_texts
        return [split_text(self.decode, prompt + rest, len(prompt)) for prompt, rest in self.ids]

    @property
    def has_text(self) -> bool:
        return self.stored_texts is not None or (self.ids is not None and self.decode is not None)

    @cached_property
    def prompts(self) -> list[str]:
        """The prompt of each sample as a key to group samples by; "" where there is none."""
        pairs: Sequence[tuple[Any, Any]] = self.ids or self.texts or []
        return [str(prompt) if len(prompt) else "" for prompt, _ in pairs]

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def from_tokens(
        cls, model: Denoiser, tokens: Any, prompt_length: int | Sequence[int] = 0, seed: int | str = 0
    ) -> SampleSet:
        """A model's samples from their tokens: (n, L) as a tensor or an array, or a list of rows.

        prompt_length: how many leading tokens are the prompt, of all samples or of each."""
        rows = _plain(tokens) if hasattr(tokens, "tolist") else [_plain(row) for row in tokens]
        cuts = [prompt_length] * len(rows) if isinstance(prompt_length, int) else prompt_length
        return cls(
            ids=[(row[:k], row[k:]) for row, k in zip(rows, cuts, strict=True)],
            decode=None if model.tokenizer is None else model.tokenizer.decode,
            seed=seed,
            numbers=range(len(rows)),
            name=model.name,
            model=model.digest,
            tokenizers=frozenset([tokenizer_digest(model.tokenizer)]),
        )

    @classmethod
    def from_samples(cls, samples: Samples) -> SampleSet:
        """What `limpet.sample` returned, or `Samples.load` read."""
        rows, cuts = samples.tokens.tolist(), samples.prompt_lengths.tolist()
        return cls(
            ids=[(row[:k], row[k:]) for row, k in zip(rows, cuts, strict=True)],
            decode=samples._decode,
            seed=samples.seed,
            numbers=samples.indices.tolist(),
            name=samples.model,
            model=samples.digest,
            tokenizers=frozenset([samples.tokenizer]),
        )

    @classmethod
    def from_texts(cls, texts: Sequence[str], prompts: Sequence[str] | None = None) -> SampleSet:
        """Texts of any origin; with `prompts`, each text is a continuation."""
        before = [""] * len(texts) if prompts is None else prompts
        return cls(None, list(zip(before, texts, strict=True)), numbers=range(len(texts)), name="these texts")


def _plain(values: Any) -> list[Any]:
    """A tensor, an array or a sequence as a list of Python numbers; all at once, not one by one."""
    return values.tolist() if hasattr(values, "tolist") else list(values)


def sample_sets(samples: Any) -> list[SampleSet]:
    """One set a seed, from whatever `evaluate` takes."""
    if isinstance(samples, SampleSet):
        sets = [samples]
    elif isinstance(samples, Samples):
        sets = [SampleSet.from_samples(samples)]
    elif isinstance(samples, str) or not isinstance(samples, Sequence):
        raise LimpetError(f"evaluate takes samples, a list of samples or a list of texts, not {type(samples).__name__}")
    elif all(isinstance(one, str) for one in samples):
        sets = [SampleSet.from_texts(samples)]
    else:
        sets = [one for part in samples for one in sample_sets(part)]
    if not sets or not all(map(len, sets)):
        raise LimpetError("there is nothing to evaluate: give at least one sample of each seed")
    if not (all(one.ids is not None for one in sets) or all(one.has_text for one in sets)):
        raise LimpetError("some samples are ids without text and others are text without ids: give one kind for all")
    return sets


def tokenised(samples: SampleSet, judge: Judge | None) -> list[tuple[Ids, Ids]]:
    """(prompt, rest) of each text in the judge's ids, or as one id for each distinct word if it has no tokenizer."""
    cuts, number = [], dict[str, int]()
    for prompt, rest in samples.texts or ():
        if judge is not None and judge.tokenizer is not None:
            ids = judge.tokenizer.encode(prompt + rest)
            k = prompt_ids(judge.tokenizer, ids, prompt)
        else:
            ids = [number.setdefault(word, len(number)) for word in [*prompt.split(), *rest.split()]]
            k = len(prompt.split())
        cuts.append((ids[:k], ids[k:]))
    return cuts


class ReadingMode(NamedTuple):
    """How a judge reads samples."""

    convention: str
    as_ids: bool  # it is given their ids; else their texts


def reading_mode(judge: Judge, sets: Sequence[SampleSet], wanted: str = AUTO) -> ReadingMode:
    """How a judge reads samples, or an error if it cannot.

    "auto" means ids if they belong to the judge's own tokenizer, else text. Another convention is checked by the same
    rule, except where the tokenizer of the ids, or of the judge, is unknown: to ask for "ids" then states that the ids
    are the judge's."""
    if wanted not in (AUTO, *CONVENTIONS):
        raise LimpetError(f"convention {wanted!r} is none of {', '.join((AUTO, *CONVENTIONS))}")
    own, exact = tokenizer_digest(judge.tokenizer), isinstance(judge, SourceJudge)
    tokenizers = frozenset[str | None]().union(*(one.tokenizers for one in sets))
    has_ids, has_text = all(one.ids is not None for one in sets), all(one.has_text for one in sets)
    same = has_ids and (all(one.model == judge.digest for one in sets) or (own is not None and tokenizers == {own}))
    unknown = has_ids and (own is None or (None in tokenizers and tokenizers <= {own, None}))
    stated = unknown and wanted != AUTO
    readable = has_text and judge.tokenizer is not None
    possible = {
        "exact": exact and (same or stated or readable),
        "ids": not exact and (same or stated),
        "text": not exact and readable,
        "released": not exact and judge.tokenizer is not None and (same or stated or readable),
    }
    if wanted == AUTO:
        wanted = "exact" if exact else "ids" if same else "text"
    if not possible[wanted]:
        hint = "; if the ids are the judge's own, ask for the convention ids" if unknown and not stated else ""
        raise LimpetError(
            f"{judge.name} cannot score {sets[0].name} by the convention {wanted!r}: ids are scored only if they "
            "belong to the judge's tokenizer, and text only if both have a tokenizer; give texts, or name another judge"
            + hint
        )
    takes = CONVENTIONS[wanted].takes
    return ReadingMode(wanted, has_ids and ("text" not in takes or ("ids" in takes and (same or not has_text))))


def convention_for(judge: Judge, model: Denoiser, wanted: str = AUTO) -> str:
    """The convention by which a judge reads a model's samples, or an error if it cannot read them."""
    return reading_mode(judge, [SampleSet.from_tokens(model, np.empty((0, 0), int))], wanted).convention


def text_pieces(model: Denoiser, text: str, size: int) -> SampleSet:
    """A real text in pieces of `size` tokens of a model, to compare the model's samples with."""
    if model.tokenizer is None:
        raise LimpetError(f"{model.name} has no tokenizer, so its samples cannot be compared with a text")
    ids = model.tokenizer.encode(text)
    return SampleSet.from_tokens(model, [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)])
