"""Text to ids and back: a folder's own tokenizer, or the public one that a released checkpoint was trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from limpet.errors import LimpetError
from limpet.files import opened, write_whole

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
MASKS = ("[MASK]", "<mask>", "<|mask|>")
LARGEST = 64 << 20  # bytes of a tokenizer's file
TEMPLATE = 1 << 20  # of a chat template
GROWTH = 4096  # letters that may come of one
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
        with _answerable("the tokenizer cannot read a text", "put another beside the model"):
            return list(self._tokens.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        heard = [i for i in map(int, ids) if not self._is_silent(i)]
        with _answerable("the tokenizer cannot write a text", "put another beside the model"):
            return self._tokens.decode(heard, skip_special_tokens=False)

    def written(self, token: int) -> str:
        """What one id is written as; nothing where it has no text."""
        return self._tokens.id_to_token(token) or ""

    def silent(self, ids: Iterable[int]) -> int:
        """How many of these ids leave no trace in the text."""
        return sum(self._is_silent(int(i)) for i in ids)

    def save(self, path: Path) -> None:
        write_whole(path, self._tokens.to_str(pretty=True))

    def _is_silent(self, token: int) -> bool:
        return token >= self._known or token == self.special.get("pad")


def read_tokenizer(folder: Path, vocab_size: int | None = None) -> Tokenizer | None:
    """The tokenizer that lies in a folder, as tokenizer.json or as GPT-2's pair of files; None where there is none."""
    pair = next((pair for pair in GPT2_PAIRS if all((folder / name).exists() for name in pair)), None)
    with _answerable(f"the tokenizer in {folder} cannot be read", "fetch or copy it again"):
        if (folder / "tokenizer.json").exists():
            with opened(folder / "tokenizer.json", LARGEST) as file:
                text = file.read().decode("utf-8")
            _check_growth(json.loads(text))
            tokens = tokenizers.Tokenizer.from_str(text)
        elif pair is not None:
            for name in pair:
                with opened(folder / name, LARGEST):
                    pass
            tokens = tokenizers.Tokenizer(models.BPE.from_file(*(str(folder / name) for name in pair)))
            tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokens.decoder = decoders.ByteLevel()
            tokens.add_special_tokens([ENDS[0]])
        else:
            return None
        return Tokenizer(tokens, vocab_size)


def read_template(folder: Path) -> str | None:
    """How a conversation is written for a model, in Jinja's language, from a folder; None where it does not say."""
    try:
        if (folder / "chat_template.jinja").exists():
            with opened(folder / "chat_template.jinja", TEMPLATE) as file:
                return file.read().decode("utf-8")
        if (folder / "tokenizer_config.json").exists():
            with opened(folder / "tokenizer_config.json", LARGEST) as file:
                about = json.loads(file.read().decode("utf-8"))
            said = about.get("chat_template") if isinstance(about, dict) else None
            return said if isinstance(said, str) and len(said) <= TEMPLATE else None
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, LimpetError):
            raise
        raise LimpetError(f"the chat template in {folder} cannot be read ({error}): fetch or copy it again") from error
    return None


@contextmanager
def _answerable(what: str, mend: str) -> Iterator[None]:
    """What the library raises, as a sentence: it has no exception of its own, and where it panics it raises one that is
    no Exception."""
    try:
        yield
    except (LimpetError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise LimpetError(f"{what} ({error}): {mend}") from error


def _check_growth(about: Any) -> None:
    """Raise where rules that put long texts in the place of short ones, one after the other, could make a letter
    into megabytes: the library would do so."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        grown, waiting = 1, [about.get(part)]
        while waiting:
            node = waiting.pop()
            if isinstance(node, list):
                waiting += node
            elif isinstance(node, dict):
                waiting += [value for value in node.values() if isinstance(value, (dict, list))]
                added = [node[key] for key in ("content", "prepend", "replacement") if isinstance(node.get(key), str)]
                grown *= max([1, *map(len, added)])
                if grown > GROWTH:
                    raise LimpetError(f"a tokenizer whose {part} makes more than {GROWTH} letters of one is refused")
