"""Text on its way to a trainer: documents, held-out splits, the tokenizer, and rows packed for a model's length."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from limpet.errors import LimpetError
from limpet.files import documents
from limpet.models.tokenizers import BUILTIN_FOLDER

END = "<|endoftext|>"
SHIPPED = "builtin:"  # begins the name of a file that is part of limpet
SPLITS = ("train", "test", "validation")  # in the order in which the documents stand


def read_documents(files: Sequence[Path]) -> list[str]:
    """The documents of some text files, plain or .xz: whatever stands between blank lines, or each of JSON lines."""
    return [document for file in files for document in documents(read_file(file), file)]


def read_file(file: Path) -> str:
    """The text of a UTF-8 file, plain or .xz; "builtin:NAME" is one that is part of limpet."""
    if str(file).startswith(SHIPPED):
        file = BUILTIN_FOLDER / str(file).removeprefix(SHIPPED)
    try:
        raw = file.read_bytes()
        return (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise LimpetError(f"{file} is not a UTF-8 text file that can be read ({error}): name one") from error


def split_documents(documents: Sequence[str], validation: float, test: float) -> dict[str, list[str]]:
    """Whole documents held out from the end: a share `validation` of the characters last, a share `test` before it."""
    ends = np.cumsum([len(document) for document in documents]) / sum(len(document) for document in documents)
    first, second = (int((ends <= share).sum()) for share in (1 - validation - test, 1 - validation))
    parts = documents[:first], documents[first:second], documents[second:]
    splits = {name: list(part) for name, part in zip(SPLITS, parts, strict=True)}
    if not all(splits.values()):
        found = ", ".join(f"{len(part)} for {name}" for name, part in splits.items())
        raise LimpetError(
            f"{len(documents)} documents leave {found}: give more (blank lines separate them) or larger shares"
        )
    return splits


def without_copies(held: Sequence[str], training: Sequence[str], share: float = 0.1, long: int = 60) -> list[str]:
    """Held-out documents less those that training contains: a `share` of their long lines stands there word for word.

    Libraries hold some books twice, under other names."""
    training_lines = {line for document in training for line in document.split("\n") if len(line) >= long}

    def copied(document: str) -> bool:
        lines = [line for line in document.split("\n") if len(line) >= long]
        return sum(len(line) for line in lines if line in training_lines) > share * sum(len(line) for line in lines)

    return [document for document in held if not copied(document)]


def fit_tokenizer(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE with one special token, the end of a text, at id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    if (found := tokenizer.get_vocab_size()) != vocab_size:
        raise LimpetError(f"these texts give a vocabulary of {found}, not {vocab_size}: ask for no more")
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Sequence[str], at_once: int = 8) -> np.ndarray:
    """One stream of ids in which every document is followed by the end token."""
    end = tokenizer.token_to_id(END)
    parts = (list(documents[start : start + at_once]) for start in range(0, len(documents), at_once))
    batches = (tokenizer.encode_batch(part, add_special_tokens=False) for part in parts)
    return np.concatenate([np.array([*one.ids, end], dtype=np.uint16) for batch in batches for one in batch])


@dataclass(frozen=True)
class Stream:
    """A split as ids, with the bytes of text they stand for (the end tokens count for none)."""

    ids: Tensor  # (N,), any integer type
    bytes: int
    end: int
    prompt: int = 0  # leading tokens of a row that are given: none

    def count(self, length: int, offset: int = 0) -> int:
        """How many rows of this length the stream fills, from `offset` on."""
        return (len(self.ids) - offset) // (length - 2)

    def rows(self, which: Tensor, length: int, offset: int = 0) -> Tensor:
        """Chunks of length - 2, each between two end tokens: (B,) chunk numbers -> (B, length) ids."""
        inside = offset + which[:, None] * (length - 2) + torch.arange(length - 2, device=which.device)
        rows = torch.full((len(which), length), self.end, dtype=torch.int64, device=self.ids.device)
        rows[:, 1:-1] = self.ids[inside]
        return rows

    def batch(self, length: int, size: int, seed: int, step: int) -> Tensor:
        """The rows of one step: epochs in a fresh order, each cutting the text at its own offset."""
        available = self.count(length, length - 3)  # at the largest offset, so at every one
        if available < size:
            raise LimpetError(f"{len(self.ids)} training tokens do not fill {size} rows of {length}: lower [run] batch")
        epoch, place = divmod(step, available // size)
        generator = torch.Generator().manual_seed(seed_of(seed, -2 - epoch))
        offset = int(torch.randint(length - 2, (), generator=generator))
        order = torch.randperm(available, generator=generator)
        which = order[place * size : (place + 1) * size]
        return self.rows(which.to(self.ids.device), length, offset)

    def bytes_in_row(self, length: int) -> float:
        """Bytes of text in a row, on average."""
        return self.bytes * (length - 2) / len(self.ids)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.ids.to("cpu", torch.int64).numpy().tobytes()).hexdigest()

    def to(self, device: torch.device) -> Stream:
        return Stream(self.ids.to(device), self.bytes, self.end)


class Split(Protocol):
    """One part of the data, on one device, as rows for a model of some length."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def prompt(self) -> int: ...

    def count(self, length: int) -> int: ...

    def rows(self, which: Tensor, length: int) -> Tensor: ...

    def batch(self, length: int, size: int, seed: int, step: int) -> Tensor: ...

    def bytes_in_row(self, length: int) -> float: ...

    def to(self, device: torch.device) -> Split: ...


def seed_of(seed: int, step: int) -> int:
    """One seed per step, far apart for neighbouring steps."""
    return ((seed * 0x9E3779B97F4A7C15) ^ ((step + 1) * 0xD1B54A32D192ED03)) & (2**63 - 1)


@dataclass(frozen=True)
class Corpus:
    """Prepared data: its tokenizer and its splits, as they lie in a folder."""

    tokenizer: Tokenizer
    splits: Mapping[str, Split]


@dataclass(frozen=True)
class Text(Corpus):
    """A prepared corpus of packed text."""

    splits: Mapping[str, Stream]


def prepare(files: Sequence[Path], folder: Path, vocab_size: int, validation: float, test: float) -> Iterator[str]:
    """Tokenise text files into `folder`, yielding a remark on each stage.

    The tokenizer sees the training documents alone."""
    documents = read_documents(files)
    if not documents:
        raise LimpetError(f"no text in {', '.join(map(str, files)) or 'no files'}: name files with text in them")
    whole = split_documents(documents, validation, test)
    splits = {name: without_copies(part, whole["train"]) for name, part in whole.items()} | {"train": whole["train"]}
    copies = {name: len(whole[name]) - len(part) for name, part in splits.items()}
    if not all(splits.values()):
        raise LimpetError("every held-out document stands in the training documents too: give texts that differ")
    yield f"{len(documents)} documents, {sum(copies.values())} held-out ones left out as copies of training's"
    yield f"fitting a tokenizer of {vocab_size}"
    tokenizer = fit_tokenizer(splits["train"], vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    described = {}
    for name, part in splits.items():
        ids = encode(tokenizer, part)
        size = sum(len(document.encode()) for document in part)
        described[name] = {"documents": len(part), "tokens": len(ids), "bytes": size, "copies": copies[name]}
        (folder / f"{name}.xz").write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=1))
        yield f"{name}: {len(part)} documents, {len(ids)} tokens, {size / (len(ids) - len(part)):.2f} bytes a token"
    digest = hashlib.sha256("\n\n".join(documents).encode()).hexdigest()
    about = {"vocab_size": vocab_size, "validation": validation, "test": test, "splits": described, "sha256": digest}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "data.json").write_text(json.dumps(about, indent=2) + "\n")  # last: it says that the rest is there


def open_text(folder: Path, wanted: dict[str, object], splits: Sequence[str] = SPLITS) -> Text | None:
    """What `prepare` left in a folder, or None; an error if it was prepared otherwise than wanted."""
    if not (folder / "data.json").exists():
        return None
    about = json.loads((folder / "data.json").read_text())
    for key, value in wanted.items():
        if about[key] != value:
            raise LimpetError(f"{folder} was prepared with {key} {about[key]}, not {value}: name another folder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    assert end is not None  # the folder's tokenizer was fitted with it
    streams = {}
    for name in splits:
        ids = np.frombuffer(lzma.decompress((folder / f"{name}.xz").read_bytes()), dtype="<u2")
        streams[name] = Stream(torch.from_numpy(ids.astype(np.int32)), about["splits"][name]["bytes"], end)
    return Text(tokenizer, streams)
