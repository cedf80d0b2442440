"""Text to ids and back: the tokenizer of a folder, read with the tokenizers library."""

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
from limpet.files import open_regular, write_file

ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "[SEP]")
PADS = ("[PAD]", "<pad>", "<|pad|>", "<|padding|>")
MASKS = ("[MASK]", "<mask>", "<|mask|>")
MAX_FILE = 64 << 20  # bytes of a tokenizer's file
MAX_TEMPLATE = 1 << 20  # bytes of a chat template
MAX_GROWTH = 4096  # letters that the rules of a tokenizer may make of one
GPT2_SIZE = 50257  # ids of GPT-2's tokenizer; the released Duo has one more, [PAD]
BERT_SIZE = 30522  # ids of bert-base-uncased, which UDLM was trained with
GPT2_FILES = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))  # the same two files under other names
BUILTIN_FOLDER = Path(__file__).parent / "builtin"  # the models of text in it share one tokenizer, beside their folders


class HuggingFaceTokenizer:
    """A tokenizer of the tokenizers library, with ids below `vocab_size`.

    `special` has the ids of "eos", "pad" and "mask" where there are such. The padding token, and ids that only the
    model has, decode to nothing. `silent` counts them."""

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
            pads = [self._known]  # the released models have [PAD] after the tokenizer's ids
        self.special = {name: ids[0] for name, ids in {"eos": ends, "pad": pads, "mask": masks}.items() if ids}

    @cached_property
    def digest(self) -> str:
        """A digest of all ids, of the text of each, and of how the texts are joined."""
        decoder = type(self._tokens.decoder).__name__
        vocabulary = sorted(self._tokens.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return hashlib.sha256(json.dumps([decoder, vocabulary]).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise LimpetError("the text holds bytes that are not UTF-8: save or type it as UTF-8")
        with _library_errors("the tokenizer cannot encode a text", "put another beside the model"):
            return list(self._tokens.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, without those that decode to nothing."""
        written = [i for i in map(int, ids) if not self._is_silent(i)]
        with _library_errors("the tokenizer cannot decode tokens", "put another beside the model"):
            return self._tokens.decode(written, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """The text of one id, empty where it has none."""
        return self._tokens.id_to_token(token) or ""

    def silent(self, ids: Iterable[int]) -> int:
        """How many of these ids decode to nothing."""
        return sum(self._is_silent(int(i)) for i in ids)

    def save(self, path: Path) -> None:
        """Write tokenizer.json."""
        write_file(path, self._tokens.to_str(pretty=True))

    def _is_silent(self, token: int) -> bool:
        return token >= self._known or token == self.special.get("pad")


def builtin_tokenizer(folder: Path) -> Path:
    """The tokenizer.json of a built-in model: its own, else the one that the models of text share."""
    own = folder / "tokenizer.json"
    return own if own.exists() else BUILTIN_FOLDER / "tokenizer.json"


def read_tokenizer(folder: Path, vocab_size: int | None = None) -> HuggingFaceTokenizer | None:
    """The tokenizer in a folder, from tokenizer.json or GPT-2's two files. None where there is none."""
    folder = builtin_tokenizer(folder).parent if folder.parent == BUILTIN_FOLDER else folder
    pair = next((pair for pair in GPT2_FILES if all((folder / name).exists() for name in pair)), None)
    with _library_errors(f"the tokenizer in {folder} cannot be read", "fetch or copy it again"):
        if (folder / "tokenizer.json").exists():
            with open_regular(folder / "tokenizer.json", MAX_FILE) as file:
                text = file.read().decode("utf-8")
            _check_growth(json.loads(text))
            tokens = tokenizers.Tokenizer.from_str(text)
        elif pair is not None:
            for name in pair:
                with open_regular(folder / name, MAX_FILE):
                    pass
            tokens = tokenizers.Tokenizer(models.BPE.from_file(*(str(folder / name) for name in pair)))
            tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokens.decoder = decoders.ByteLevel()
            tokens.add_special_tokens([ENDS[0]])
        else:
            return None
        return HuggingFaceTokenizer(tokens, vocab_size)


def read_template(folder: Path) -> str | None:
    """The chat template in a folder, which writes a conversation as text for the model. None where there is none."""
    try:
        if (folder / "chat_template.jinja").exists():
            with open_regular(folder / "chat_template.jinja", MAX_TEMPLATE) as file:
                return file.read().decode("utf-8")
        if (folder / "tokenizer_config.json").exists():
            with open_regular(folder / "tokenizer_config.json", MAX_FILE) as file:
                about = json.loads(file.read().decode("utf-8"))
            template = about.get("chat_template") if isinstance(about, dict) else None
            return template if isinstance(template, str) and len(template) <= MAX_TEMPLATE else None
    except (ValueError, OSError, RecursionError) as error:
        if isinstance(error, LimpetError):
            raise
        raise LimpetError(f"the chat template in {folder} cannot be read ({error}): fetch or copy it again") from error
    return None


@contextmanager
def _library_errors(what: str, advice: str) -> Iterator[None]:
    """Raise the library's errors as LimpetErrors. It has no exception class of its own, and what it raises when it
    panics is no Exception."""
    try:
        yield
    except (LimpetError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise LimpetError(f"{what} ({error}): {advice}") from error


def _check_growth(about: Any) -> None:
    """Raise where rules that replace short texts by long ones, one after the other, could make megabytes of a letter.
    The library would apply them."""
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
                if grown > MAX_GROWTH:
                    raise LimpetError(f"a tokenizer whose {part} makes over {MAX_GROWTH} letters of one is refused")
