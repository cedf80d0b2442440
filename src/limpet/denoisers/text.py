"""Text to ids and back: a folder's own tokenizer, or the public one that a released checkpoint was trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from limpet.errors import LimpetError
from limpet.files import write_whole

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
MASKS = ("[MASK]", "<mask>", "<|mask|>")
GPT2_SIZE = 50257  # its own ids; the released Duo has one more, [PAD]
BERT_SIZE = 30522  # ids of bert-base-uncased, which UDLM was trained with
GPT2_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # one pair of files, under its two names


class Tokenizer:
    """Ids below `vocab_size`; `special` has the ids of "eos", "pad" and "mask" where there are such.

    The pad, and any id that the model has and the text does not, decodes to nothing; `silent` counts them."""

    def __init__(self, tokens: tokenizers.Tokenizer, vocab_size: int | None = None) -> None:
        tokens.no_padding()
        tokens.no_truncation()
        known = tokens.get_vocab(with_added_tokens=True)
        self._tokens = tokens
        self._known = max(known.values(), default=-1) + 1
        self.vocab_size = self._known if vocab_size is None else vocab_size
        if self._known > self.vocab_size:
            raise LimpetError(
                f"the tokenizer has ids up to {self._known - 1} and the model only {self.vocab_size} tokens: "
                "put the tokenizer that the model was trained with beside it"
            )
        ends = [known[token] for token in ENDS if token in known]
        pads = [known[token] for token in PADS if token in known]
        masks = [known[token] for token in MASKS if token in known]
        if not pads and self.vocab_size == self._known + 1:
            pads = [self._known]  # the released models' [PAD]: one id after the tokenizer's own
        self.special = {name: ids[0] for name, ids in {"eos": ends, "pad": pads, "mask": masks}.items() if ids}

    @cached_property
    def digest(self) -> str:
        """Of all its ids and what each is written as, and of how they are put together."""
        decoder = type(self._tokens.decoder).__name__
        vocabulary = sorted(self._tokens.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return hashlib.sha256(json.dumps([decoder, vocabulary]).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise LimpetError("the text holds bytes that are not UTF-8: save or type it as UTF-8")
        return list(self._tokens.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokens.decode([i for i in map(int, ids) if not self._is_silent(i)], skip_special_tokens=False)

    def silent(self, ids: Iterable[int]) -> int:
        """How many of these ids leave no trace in the text."""
        return sum(self._is_silent(int(i)) for i in ids)

    def save(self, path: Path) -> None:
        write_whole(path, self._tokens.to_str(pretty=True))

    def _is_silent(self, token: int) -> bool:
        return token >= self._known or token == self.special.get("pad")


def read_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer that lies in a folder, as tokenizer.json or as GPT-2's pair of files; None where there is none."""
    pair = next((pair for pair in GPT2_PAIRS if all((folder / name).is_file() for name in pair)), None)
    try:
        if (folder / "tokenizer.json").is_file():
            tokens = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        elif pair is not None:
            tokens = tokenizers.Tokenizer(models.BPE.from_file(*(str(folder / name) for name in pair)))
            tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokens.decoder = decoders.ByteLevel()
            tokens.add_special_tokens([ENDS[0]])
        else:
            return None
    except Exception as error:  # the library raises bare Exception for a file that it cannot read
        raise LimpetError(f"the tokenizer in {folder} cannot be read ({error}): fetch or copy it again") from error
    return Tokenizer(tokens, vocab_size)
