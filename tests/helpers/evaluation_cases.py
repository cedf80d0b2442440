"""Small models and a checker for the tests of evaluation."""

from __future__ import annotations

from typing import ClassVar

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from limpet.models.duo import Duo, DuoNetwork, DuoShape
from limpet.models.tokenizers import HuggingFaceTokenizer


def small_tokenizer() -> HuggingFaceTokenizer:
    """A byte-level tokenizer that no built-in model has."""
    tokens = tokenizers.Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    tokens.train_from_iterator(["the sea and the sand and the salt"] * 9, trainer)
    return HuggingFaceTokenizer(tokens, 280)


def tiny(tokenizer: HuggingFaceTokenizer | None) -> Duo:
    torch.manual_seed(0)
    network = DuoNetwork(DuoShape(vocab_size=280, length=24, width=16, blocks=1, heads=2, cond=8, hidden=32))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0, 0.3)
    return Duo(network.eval(), name="tiny", tokenizer=tokenizer)


class VowelChecker:
    """Counts vowels; knows nothing of a text without letters."""

    conventions: ClassVar = {"vowels": "share of vowels in a text"}

    def check(self, text):
        letters = text.replace(" ", "")
        vowels = sum(letter in "aeiou" for letter in letters)
        checks = {"vowels": vowels / len(letters)} if letters else {}
        return {**checks, "starts with s": text.startswith("s")}

    def check_set(self, texts):
        return {"distinct texts": len(set(texts)) / len(texts)}
