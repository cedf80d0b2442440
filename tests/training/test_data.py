"""Text to rows: documents, splits by whole documents, the tokenizer, packing, and the prepared folder."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from limpet.errors import LimpetError
from limpet.files import read_prompts
from limpet.training import data

WORDS = "the sea was calm and the small boat went out past grey rocks where limpets hold".split()


def documents(count: int, length: int = 60) -> list[str]:
    """Texts of a few words each, all different."""
    return [
        " ".join(WORDS[(i * j + i) % len(WORDS)] for j in range(length)) + f" {i}.\nIt ended — so."
        for i in range(count)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt.xz"
    file.write_bytes(lzma.compress("\n\n".join(documents(40)).encode()))
    return file


def test_documents_are_what_blank_lines_separate(tmp_path: Path, corpus: Path) -> None:
    plain = tmp_path / "more.txt"
    plain.write_bytes(b"\n\none\r\ntwo\r\n\r\nthree\n\n\n\nfour")
    assert data.read_documents([corpus, plain]) == [*documents(40), "one\ntwo", "three", "four"]


def test_documents_of_json_lines_may_hold_blank_lines(tmp_path: Path) -> None:
    lines = '{"text": "one\\n\\ntwo"}\n\n"three\\u2028four"\n{"prompt": "five", "text": "six"}\n'
    for name in ("texts.jsonl", "texts.jsonl.xz", "texts"):
        file = tmp_path / name
        file.write_bytes(lzma.compress(lines.encode()) if name.endswith(".xz") else lines.encode())
        assert data.read_documents([file]) == ["one\n\ntwo", "three\u2028four", "five"]
    assert read_prompts(tmp_path / "texts.jsonl") == ["one\n\ntwo", "three\u2028four", "five"]
    (tmp_path / "plain.txt").write_text('{"text"} is a word\r\n\n  so \u2028 "is" this \n', newline="")
    assert read_prompts(tmp_path / "plain.txt") == ['{"text"} is a word', '  so \u2028 "is" this ']
    for wrong, words in (
        ('{"text": 3}', "line 1 of .* has no text"),
        ('"a"\n{"texts": "a"}', "line 2 of .* has no text"),
        ('"a"\n\n{"text"', "line 3 of .* is not JSON"),
        ("[" * 100_000, "line 1 of .* is not JSON"),
        ("\n", "holds no prompt"),
    ):
        (tmp_path / "wrong.jsonl").write_text(wrong)
        with pytest.raises(LimpetError, match=words):
            read_prompts(tmp_path / "wrong.jsonl")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_an_unreadable_file_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "texts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(LimpetError, match=r"texts\.txt is not a UTF-8 text file"):
        data.read_documents([file])


@given(st.lists(st.integers(1, 500), min_size=30, max_size=80), st.floats(0.1, 0.3), st.floats(0.1, 0.3))
def test_splits_are_whole_documents_in_order(lengths: list[int], validation: float, test: float) -> None:
    texts = [chr(97 + i % 26) * length for i, length in enumerate(lengths)]
    try:
        splits = data.split_documents(texts, validation, test)
    except LimpetError:
        assert max(lengths) > 0.1 * sum(lengths)  # only a document as large as a split can leave one empty
        return
    assert splits["train"] + splits["test"] + splits["validation"] == texts
    total, most = sum(lengths), max(lengths)
    assert abs(sum(map(len, splits["validation"])) - validation * total) <= most
    assert abs(sum(map(len, splits["test"])) - test * total) <= 2 * most


def test_held_out_documents_that_training_has_seen_are_left_out() -> None:
    def lines(name: str, count: int) -> list[str]:
        return [
            f"{name} went down to the shore on day {i} of the year and looked for limpets there" for i in range(count)
        ]

    training = ["\n".join([*lines("Ann", 30), *lines("Bob", 30)]), "short\nlines"]
    copy, fresh = "\n".join(lines("Bob", 20)), "\n".join([*lines("Cat", 19), "short", "lines"])
    little = "\n".join([*lines("Cat", 19), *lines("Bob", 1)])
    assert data.without_copies([copy, fresh, little, "short"], training) == [fresh, little, "short"]


def test_too_few_documents_are_refused() -> None:
    with pytest.raises(LimpetError, match="3 documents leave"):
        data.split_documents(["a", "b", "c"], 0.03, 0.03)


def test_the_tokenizer_is_lossless_and_knows_one_end() -> None:
    tokenizer = data.fit_tokenizer(documents(20), 300)
    assert tokenizer.get_vocab_size() == 300
    assert tokenizer.token_to_id(data.END) == 0
    for text in (*documents(3), "Ünïcödé\n\t never seen ☃"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(LimpetError, match="not 60000"):
        data.fit_tokenizer(documents(20), 60000)


def test_every_document_ends(corpus: Path) -> None:
    texts = documents(20)
    tokenizer = data.fit_tokenizer(texts, 300)
    ids = data.encode(tokenizer, texts, at_once=3)
    pieces = [[]]
    for token in ids.tolist():
        if token == 0:
            pieces.append([])
        else:
            pieces[-1].append(token)
    assert [tokenizer.decode(piece) for piece in pieces] == [*texts, ""]


@given(st.integers(3, 12), st.integers(30, 90), st.integers(0, 9))
def test_rows_are_chunks_between_ends(length: int, size: int, offset: int) -> None:
    stream = data.Stream(torch.arange(1, size + 1), bytes=0, end=0)
    count = stream.count(length, offset)
    rows = stream.rows(torch.arange(count), length, offset)
    assert rows.shape == (count, length)
    assert (rows[:, 0] == 0).all()
    assert (rows[:, -1] == 0).all()
    assert rows[:, 1:-1].flatten().tolist() == list(range(offset + 1, offset + 1 + count * (length - 2)))
    assert size - offset - count * (length - 2) < length - 2


def test_a_prepared_folder_opens_as_it_was_made(tmp_path: Path, corpus: Path) -> None:
    texts = documents(40)
    texts[-1] = texts[0]  # a copy of a training document among the held-out ones
    corpus.write_bytes(lzma.compress("\n\n".join(texts).encode()))
    folder = tmp_path / "data"
    wanted: dict[str, object] = {"vocab_size": 300, "validation": 0.1, "test": 0.1}
    assert data.open_text(folder, wanted) is None
    remarks = list(data.prepare([corpus], folder, 300, 0.1, 0.1))
    assert "40 documents, 1 held-out ones left out" in remarks[0]
    text = data.open_text(folder, wanted)
    assert text is not None
    splits = data.split_documents(texts, 0.1, 0.1)
    for name, whole in splits.items():
        part = [text for text in whole if name == "train" or text != texts[0]]
        assert text.splits[name].ids.tolist() == data.encode(text.tokenizer, part).tolist()
        assert text.splits[name].bytes == sum(len(document.encode()) for document in part)
    with pytest.raises(LimpetError, match="vocab_size 300, not 301"):
        data.open_text(folder, {**wanted, "vocab_size": 301})


def test_empty_texts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.txt"
    file.write_text("\n\n")
    with pytest.raises(LimpetError, match="no text in"):
        list(data.prepare([file], tmp_path / "data", 300, 0.1, 0.1))
