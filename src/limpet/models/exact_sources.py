"""The built-in exact sources: three small languages of letters and one of brackets, with known distributions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from limpet.errors import LimpetError
from limpet.models.brackets import BRACKETS, BalancedBrackets
from limpet.models.exact import Markov, Mixture, Source, codebook

ALPHABET = " abcdefghijklmnopqrstuvwxyz"
WORDS = (
    "sand salt sail seal sole sort surf moon mood moor more mist moss mast mare tide tile tire tune turn tern barn "
    "band bone bore boat bolt rose rain rail reef reed wind wing wine wire wave wake ware wore shoe shop lamp land "
    "line lime loom lore"
).split()
SLIP = 0.02  # the probability that a letter of a word is any letter at all
PHRASES = 32


class Letters:
    """One token for each letter of an alphabet."""

    def __init__(self, alphabet: str = ALPHABET, name: str = "the letters a to z and the space") -> None:
        self.alphabet, self.name = alphabet, name
        self.digest = hashlib.sha256(alphabet.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        strange = sorted({letter for letter in text if letter not in self.alphabet})
        if strange:
            raise LimpetError(f"this source knows {self.name}; it was given {''.join(strange)!r}")
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.alphabet[i] for i in ids)


def _spelled(words: list[str]) -> Tensor:
    """(K, 5) tokens: four letters and a space."""
    return torch.tensor([Letters().encode(f"{word:<5}") for word in words])


def words() -> Mixture:
    """Thirty-two words, each an independent latent mode. Letters slip rarely, so that a mix of two words is no word."""
    spelled = _spelled(WORDS)
    distributions = torch.nn.functional.one_hot(spelled, len(ALPHABET)) * (1 - SLIP) + SLIP / len(ALPHABET)
    return Mixture(torch.ones(len(spelled)), distributions, PHRASES, "exact:words")


def chain() -> Markov:
    """A chain of letters with the transitions of the same words, a little smoothed."""
    text = "".join(f"{word} " for word in WORDS)
    counts = torch.full((len(ALPHABET), len(ALPHABET)), SLIP)
    for here, after in zip(Letters().encode(text), Letters().encode(text[1:] + text[0]), strict=True):
        counts[here, after] += 1
    return Markov(counts.sum(-1), counts, 128, "exact:chain")


def verses() -> Mixture:
    """A codebook of sixteen fixed sequences of eight words, the model of separated modes (appendix B.2)."""
    spelled = _spelled(WORDS)
    order = torch.arange(16 * 8).view(16, 8) * 17 % len(spelled)
    return codebook(spelled[order].flatten(1), len(ALPHABET), name="exact:verses")


def grammar() -> BalancedBrackets:
    """A context-free language: all balanced strings of 64 brackets of three kinds, equally likely."""
    return BalancedBrackets(64, name="exact:grammar")


SOURCES: dict[str, Callable[[], Source]] = {
    "exact:words": words,
    "exact:chain": chain,
    "exact:verses": verses,
    "exact:grammar": grammar,
}


def source(name: str) -> Source:
    """A built-in exact source by name."""
    if name not in SOURCES:
        raise LimpetError(f"there is no exact source {name!r}; there are {', '.join(SOURCES)}")
    found = SOURCES[name]()
    if isinstance(found, BalancedBrackets):
        found.tokenizer, found.checker = Letters(BRACKETS, f"the brackets {BRACKETS}"), "grammar"
    else:
        found.tokenizer = Letters()
    return found
