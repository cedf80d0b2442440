"""Draw pages that no built-in model was trained on from the corpus: the clean text of the audits.

    python tools/heldout.py CORPUS              # into the package
    python tools/heldout.py CORPUS --out FILE   # or elsewhere

CORPUS is the text that the recipes of the mini models name."""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

from limpet.errors import LimpetError
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.training.data import read_documents, split_documents, without_copies

OUT = BUILTIN_FOLDER / "heldout.txt.xz"
SPLIT = 0.03  # the share held out for validation, and for test, as in the recipes of the built-in models
MAX_CHARACTERS = 20_000  # of a book


def pages(document: str, characters: int = MAX_CHARACTERS) -> str:
    """Consecutive paragraphs of a document from a third of the way in, at most so many characters."""
    taken: list[str] = []
    at = size = 0
    for line in document.split("\n"):
        if at >= len(document) // 3 and line.strip():
            if size + len(line) > characters:
                break
            taken.append(line)
            size += len(line) + 1
        at += len(line) + 1
    return "\n".join(taken)


def held_out_text(documents: Sequence[str], characters: int = MAX_CHARACTERS) -> str:
    """Pages of every document held out for validation, without documents that the training documents contain."""
    splits = split_documents(documents, SPLIT, SPLIT)
    held_out = without_copies(splits["validation"], splits["train"])
    return "\n\n".join(pages(document, characters) for document in held_out) + "\n"


def compress(text: str) -> bytes:
    """A text as the package stores it."""
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def main(arguments: list[str] | None = None) -> int:
    """Write the pages; 2 if they cannot be written."""
    parser = argparse.ArgumentParser(prog="python tools/heldout.py", description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="a text file, plain or .xz, documents between blank lines")
    parser.add_argument("--out", type=Path, default=OUT, help="where the pages go (default: into the package)")
    options = parser.parse_args(arguments)
    try:
        text = held_out_text(read_documents([options.corpus]))
        try:
            options.out.write_bytes(compress(text))
        except OSError as error:
            raise LimpetError(f"the pages cannot be written to {options.out} ({error}): name another file") from error
    except LimpetError as error:
        print(f"limpet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
