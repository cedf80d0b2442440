"""Files that appear whole or not at all, texts in UTF-8, and names that nobody knows."""

from __future__ import annotations

import io
import os
import sys
import threading

import pytest

from limpet.errors import LimpetError, unknown
from limpet.files import read_text, whole, write_whole


def half(path):
    path.write_text("half")
    raise OSError("half")


def test_a_file_is_the_old_one_or_the_new_one(tmp_path):
    file = tmp_path / "a"
    write_whole(file, "é\n")
    assert file.read_bytes() == "é\n".encode()
    with pytest.raises(OSError, match="half"), whole(file) as partial:
        half(partial)
    assert file.read_text(encoding="utf-8") == "é\n"
    write_whole(file, b"\x00")
    assert file.read_bytes() == b"\x00"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    got = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_whole(tmp_path / "pipe", b"through")
    reader.join()
    assert got == [b"through"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("place", ["no/a", "", "file/a"])
def test_what_cannot_be_written_is_a_sentence(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match=r"cannot be written \(.+\): name another file"):
        write_whole(tmp_path / place, "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_text_is_utf_8_or_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"\xff")
    for path in (tmp_path / "a", tmp_path / "none", tmp_path):
        with pytest.raises(LimpetError, match=r"cannot be read \(.+\): give another"):
            read_text(path, "give another")
    (tmp_path / "b").write_bytes("é\r\n".encode())
    assert read_text(tmp_path / "b", "") == "é\r\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"in")))
    assert read_text("-", "") == "in"


def test_a_name_that_nobody_knows_comes_with_the_one_that_was_meant():
    assert str(unknown("crs has no parameter", "budgt", ["nfe", "budget"])) == (
        "crs has no parameter 'budgt'; did you mean budget?"
    )
    assert str(unknown("there is no field", "x", iter(["a", "b"]))) == "there is no field 'x'; it takes a, b"
