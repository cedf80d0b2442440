"""Pages that no built-in model was trained on, drawn from the corpus: the clean text of the audits.

    python tools/heldout.py CORPUS              draw them again into the package
    python tools/heldout.py CORPUS --out FILE   or elsewhere

CORPUS is the text that the recipes in recipes/minis name."""

from __future__ import annotations

import argparse
import lzma
import sys
from collections.abc import Sequence
from pathlib import Path

from limpet.errors import LimpetError
from limpet.models.model_files import MINIS
from limpet.training.data import read_documents, split_documents, without_copies

PLACE = MINIS / "heldout.txt.xz"
SPLIT = 0.03  # held out for validation, and as much for test: as the minis' recipes have it
SHARE = 20_000  # characters of a book, at most


def pages(document: str, share: int = SHARE) -> str:
    """Whole paragraphs of a document from a third of the way in, in a row, as many as its share holds."""
    taken: list[str] = []
    at = size = 0
    for line in document.split("\n"):
        if at >= len(document) // 3 and line.strip():
            if size + len(line) > share:
                break
            taken.append(line)
            size += len(line) + 1
        at += len(line) + 1
    return "\n".join(taken)


def drawn(documents: Sequence[str], share: int = SHARE) -> str:
    """Pages of every document held out for validation that stands nowhere in the training documents."""
    splits = split_documents(documents, SPLIT, SPLIT)
    held = without_copies(splits["validation"], splits["train"])
    return "\n\n".join(pages(document, share) for document in held) + "\n"


def packed(text: str) -> bytes:
    return lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tools/heldout.py", description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path, help="a text file, plain or .xz, documents between blank lines")
    parser.add_argument("--out", type=Path, default=PLACE, help="where the pages go; the package unless told")
    given = parser.parse_args(arguments)
    try:
        text = drawn(read_documents([given.corpus]))
        try:
            given.out.write_bytes(packed(text))
        except OSError as error:
            raise LimpetError(f"the pages cannot be written to {given.out} ({error}): name another file") from error
    except LimpetError as error:
        print(f"limpet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
