"""The data of a recipe: prepared once in its folder, then opened as a tokenizer and splits of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from limpet.models.prompt_layouts import SUDOKU
from limpet.training import data as text
from limpet.training import rows
from limpet.training.recipe import Data


def prepare_data(data: Data) -> Iterator[str]:
    """Write the tokens of a recipe's data into its folder, yielding a remark on each stage."""
    folder = Path(data.folder)
    if data.format == "lines":
        yield from rows.prepare_lines(data, folder)
    elif data.format in SUDOKU:
        yield from rows.prepare_boards(data, folder)
    else:
        files = [Path(file) for file in data.files]
        yield from text.prepare(files, folder, data.vocab_size, data.validation, data.test)


def open_data(data: Data) -> text.Corpus | None:
    """What `prepare_data` left in the folder of a recipe's data, or None; an error if it was prepared otherwise."""
    folder = Path(data.folder)
    if data.format != "text":
        found = rows.open_rows(data, folder)
        return None if found is None else text.Corpus(*found)
    wanted: dict[str, object] = {"vocab_size": data.vocab_size, "validation": data.validation, "test": data.test}
    return text.open_text(folder, wanted)
