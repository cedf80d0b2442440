"""Data whose rows all have one length: lines of characters, and sudoku boards that a program writes."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from limpet.errors import LimpetError
from limpet.evaluation.checkers import sudoku
from limpet.files import write_file
from limpet.models.prompt_layouts import SUDOKU, SudokuLayout
from limpet.training.data import SPLITS, read_file
from limpet.training.recipe import Clues, Data

FILL = " "  # after the characters of a line, to the end of its row


@dataclass(frozen=True)
class RowTable:
    """Rows of tokens, each as long as the model."""

    ids: Tensor  # (N, L)
    bytes: int  # of the text in all rows, without what fills them
    prompt: int = 0  # leading tokens of a row that are given: neither noise nor loss falls on them

    def count(self, length: int) -> int:
        """The number of rows."""
        return len(self.ids)

    def rows(self, which: Tensor, length: int) -> Tensor:
        """(B,) row numbers -> (B, L) tokens."""
        return self.ids[which].long()

    def batch(self, length: int, size: int, seed: int, step: int) -> Tensor:
        """Rows drawn with replacement by torch's own generator, which the trainer seeds for every step."""
        return self.rows(torch.randint(len(self.ids), (size,), device=self.ids.device), length)

    def bytes_in_row(self, length: int) -> float:
        """Bytes of text in a row, on average."""
        return self.bytes / len(self.ids)

    def to(self, device: torch.device) -> RowTable:
        return replace(self, ids=self.ids.to(device))


@dataclass(frozen=True)
class Boards(RowTable):
    """Sudoku rows written anew for each step: base boards under random symmetries, with random clues."""

    layout: SudokuLayout = SUDOKU["sudoku"]
    clues: Clues = field(default_factory=Clues)

    def batch(self, length: int, size: int, seed: int, step: int) -> Tensor:
        boards = self.ids[torch.randint(len(self.ids), (size,), device=self.ids.device)]
        return sudoku_rows(self.layout, sudoku.random_symmetries(boards), self.clues)


# Characters


def character_tokenizer(characters: Sequence[str]) -> Tokenizer:
    """One token per character; a text with any other character is refused."""
    vocabulary = {character: token for token, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))  # which is in no vocabulary
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def line_rows(tokenizer: Tokenizer, lines: Sequence[str], length: int) -> np.ndarray:
    """Each line's characters, filled with spaces: (N, L) uint16.

    One symbol ends a line and fills its row, so where a line ends is a single decision at each position. A separate
    end before the padding would have to agree with its neighbours, and nothing else in the row says where it is."""
    lookup = tokenizer.get_vocab()
    rows = np.full((len(lines), length), lookup[FILL], dtype=np.uint16)
    for row, line in zip(rows, lines, strict=True):
        row[: len(line)] = [lookup[character] for character in line]
    return rows


# Sudoku


def sudoku_rows(layout: SudokuLayout, boards: Tensor, clues: Clues, generator: torch.Generator | None = None) -> Tensor:
    """Boards (B, cells) as rows (B, L): a mark, the clues with 0 for a blank, a mark, the board."""
    (count, cells), device = boards.shape, boards.device
    order = torch.rand(count, cells, device=device, generator=generator).argsort(-1)
    numbers = torch.randint(clues.fewest, clues.most + 1, (count, 1), device=device, generator=generator)
    numbers = numbers * (torch.rand(count, 1, device=device, generator=generator) >= clues.none)
    empty = torch.tensor([layout.characters.index(one) for one in layout.empty], device=device)
    rows = torch.cat([empty.expand(count, -1), boards.long()], 1)
    rows[:, 1 : cells + 1] = boards * (order < numbers)
    return rows


# Preparing and opening a folder


def prepare_lines(data: Data, folder: Path) -> Iterator[str]:
    """Tokenise the lines of some files into `folder`, yielding a remark on each stage.

    The held-out lines are a choice by `split_seed` among the distinct lines in their order."""
    lines = list(dict.fromkeys(line for file in data.files for line in read_file(Path(file)).split("\n") if line))
    if not lines:
        raise LimpetError(f"no line in {', '.join(data.files) or 'no files'}: name files with text in them")
    if max(map(len, lines)) > data.length or FILL in "".join(lines):
        raise LimpetError(f"a line is longer than {data.length} characters or holds a space: name other files")
    characters = sorted({FILL, *"".join(lines)})
    if len(characters) != data.vocab_size:
        raise LimpetError(f"vocab_size is {data.vocab_size}; these lines take {len(characters)}, with the space")
    yield f"{len(lines)} lines of {len(characters)} characters"
    tokenizer = character_tokenizer(characters)
    parts = {name: [lines[i] for i in which] for name, which in split_rows(len(lines), data).items()}
    rows = {name: line_rows(tokenizer, part, data.length) for name, part in parts.items()}
    _write(data, folder, tokenizer, rows, {name: sum(map(len, part)) for name, part in parts.items()})
    yield ", ".join(f"{name}: {len(part)} lines" for name, part in parts.items())


def prepare_boards(data: Data, folder: Path) -> Iterator[str]:
    """Solve base boards into `folder`. Held-out boards become rows once; those for training do at every step."""
    layout = SUDOKU[data.format]
    yield f"solving {data.boards} {data.format} boards"
    boards = sudoku.base_boards(data.boards, data.split_seed, layout.board)
    parts = {name: boards[which] for name, which in split_rows(len(boards), data).items()}
    rows = {"train": parts.pop("train")}
    generator = torch.Generator().manual_seed(data.split_seed)
    for name, part in parts.items():
        moved = sudoku.random_symmetries(torch.from_numpy(part), generator)
        rows[name] = sudoku_rows(layout, moved, data.clues, generator).numpy()
    tokenizer = character_tokenizer(layout.characters)
    _write(data, folder, tokenizer, rows, {name: layout.board.cells * len(part) for name, part in rows.items()})
    yield ", ".join(f"{name}: {len(part)} boards" for name, part in rows.items())


def split_rows(count: int, data: Data) -> dict[str, np.ndarray]:
    """Which rows each split holds, in their order: shares `validation` and `test` chosen by `split_seed`."""
    order = np.random.default_rng(data.split_seed).permutation(count)
    first = round(count * data.validation)
    second = first + round(count * data.test)
    splits = dict(zip(("validation", "test", "train"), np.split(order, (first, second)), strict=True))
    if not all(len(part) for part in splits.values()):
        raise LimpetError(f"{count} rows leave a split empty: give more rows or larger shares")
    return {name: np.sort(splits[name]) for name in SPLITS}


def _described(data: Data) -> dict[str, object]:
    """What of a recipe decides the prepared rows."""
    about: dict[str, object] = {"format": data.format, "vocab_size": data.vocab_size, "length": data.length}
    about |= {"validation": data.validation, "test": data.test, "split_seed": data.split_seed}
    if data.format in SUDOKU:
        about |= {"boards": data.boards, "clues": [data.clues.fewest, data.clues.most, data.clues.none]}
    return about


def _write(data: Data, folder: Path, tokenizer: Tokenizer, rows: dict[str, np.ndarray], sizes: dict[str, int]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        (folder / f"{name}.xz").write_bytes(lzma.compress(part.astype("<u2").tobytes(), preset=1))
    tokenizer.save(str(folder / "tokenizer.json"))
    splits = {name: {"rows": len(part), "bytes": sizes[name]} for name, part in rows.items()}
    about = {**_described(data), "splits": splits}
    write_file(folder / "data.json", json.dumps(about, indent=2) + "\n")  # last: it says that the rest is there


def open_rows(data: Data, folder: Path) -> tuple[Tokenizer, dict[str, RowTable]] | None:
    """The tokenizer and the splits that were prepared in a folder, or None; an error if others were."""
    if not (folder / "data.json").exists():
        return None
    about = json.loads((folder / "data.json").read_text())
    for key, value in _described(data).items():
        if about.get(key) != value:
            raise LimpetError(f"{folder} was prepared with {key} {about.get(key)}, not {value}: name another folder")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    layout = SUDOKU.get(data.format)
    prompt = len(layout.empty) if layout else 0
    splits: dict[str, RowTable] = {}
    for name in SPLITS:
        flat = np.frombuffer(lzma.decompress((folder / f"{name}.xz").read_bytes()), dtype="<u2").astype(np.int32)
        ids, size = torch.from_numpy(flat).view(about["splits"][name]["rows"], -1), about["splits"][name]["bytes"]
        if layout is not None and name == "train":
            splits[name] = Boards(ids, size, prompt, layout, data.clues)
        else:
            splits[name] = RowTable(ids, size, prompt)
    return tokenizer, splits
