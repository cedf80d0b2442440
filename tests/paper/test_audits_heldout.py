"""Held-out pages: which books they are drawn from, where in a book, and the file that is written."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from limpet.evaluation import heldout_text as heldout
from limpet.registry import from_file
from limpet.training import recipe

TOOL = Path(__file__).parents[2] / "tools" / "heldout.py"
SPLIT, compress, held_out_text, main, pages = (
    from_file(f"{TOOL}:{name}") for name in ("SPLIT", "compress", "held_out_text", "main", "pages")
)


def book(name: str, paragraphs: int) -> str:
    return "\n".join(
        f"{name:7} {i:2}: a paragraph that is long enough to be told from any other one" for i in range(paragraphs)
    )


# The last three documents are three hundredths of it: held out for validation. The second is a copy of a training book.
CORPUS = [book(f"book {i:2}", 60) for i in range(94)] + [book("test", 170)]
CORPUS += [book("first", 60), CORPUS[7], book("last", 60)]


def test_pages_are_whole_paragraphs_from_a_third_of_the_way_in():
    document = book("one", 60)
    lines = document.split("\n")
    width = len(lines[0]) + 1
    assert pages(document, 5 * width).split("\n") == lines[20:25]
    assert pages(document, 5 * width - 2).split("\n") == lines[20:24]
    assert pages(document, 10**6).split("\n") == lines[20:]
    assert pages("\n".join([*lines[:30], "", " ", *lines[30:]]), 10**6).split("\n") == lines[20:]


def test_only_books_that_training_has_not_seen(tmp_path, capsys):
    text = held_out_text(CORPUS, 500)
    assert [part.split(":")[0] for part in text.strip().split("\n\n")] == ["first   20", "last    20"]
    source = tmp_path / "corpus.txt"
    source.write_text("\n\n".join(CORPUS) + "\n")
    assert main([str(source), "--out", str(tmp_path / "pages.xz")]) == 0
    assert lzma.decompress((tmp_path / "pages.xz").read_bytes()).decode() == held_out_text(CORPUS)
    assert main([str(source), "--out", str(tmp_path / "no" / "pages.xz")]) == 2
    assert "name another file" in capsys.readouterr().err
    assert main([str(tmp_path / "none.txt")]) == 2


def test_the_packaged_pages_are_such_pages():
    documents = heldout().strip().split("\n\n")
    assert len(documents) == 15
    assert all(10_000 < len(document) <= 20_000 for document in documents)
    assert not any(line.strip() == "" for document in documents for line in document.split("\n"))
    assert lzma.decompress(compress(heldout())).decode() == heldout()


@pytest.mark.parametrize("name", ["mini", "mini-distilled", "mini-judge"])
def test_the_split_is_that_of_the_recipes(name):
    data = recipe.read(name).data
    assert (data.validation, data.test) == (SPLIT, SPLIT)
