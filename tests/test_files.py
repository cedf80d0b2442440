"""Files: atomic writes, refusal of what is no file, texts of a file, and TOML mistakes that name their field."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from limpet.errors import LimpetError
from limpet.files import Toml, atomic_path, documents, open_regular, read_prompts, read_text, write_file


@dataclass(frozen=True)
class Run:
    rate: float
    kind: Literal["short", "long"] = "short"

    def __post_init__(self) -> None:
        if self.rate <= 0:
            raise LimpetError(f"rate is {self.rate}; it takes a number above 0")


@dataclass(frozen=True)
class Recipe:
    name: str
    runs: tuple[Run, ...] = ()
    tables: dict[str, Run] = field(default_factory=dict)
    run: Run | None = None
    sizes: tuple[int, ...] = ()


GOOD = """
name = "a"
sizes = [
    1,
    2,
]
[run]
rate = 1
[tables.first]
rate = 0.5
[[runs]]
rate = 2
[[runs]]
rate = 3
kind = "long"
"""


def test_toml_is_read_into_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD)
    found = Toml(tmp_path / "x.toml", "name a recipe").build(Recipe)
    runs = (Run(2), Run(3, "long"))
    assert found == Recipe("a", runs=runs, tables={"first": Run(0.5)}, run=Run(1), sizes=(1, 2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "a"', "name = 3", "x.toml, name: name is 3; it takes a text"),
        ('name = "a"', "", "x.toml: the file has"),
        ("    2,\n", "    2.5,\n", "x.toml, sizes: sizes is [1, 2.5]; it takes a list, each a whole number"),
        ("rate = 1", "rate = -1", "x.toml, [run]: rate is -1; it takes a number above 0"),
        ("rate = 1", "rate = true", "x.toml, [run] rate: rate is True; it takes a number"),
        ("rate = 1", "rat = 1", "x.toml, [run]: run has {'rat': 1}; it takes rate"),
        ("rate = 0.5", "rate = 0.5\nsped = 2", "x.toml, [tables.first] sped: tables has no field 'sped'"),
        ("[tables.first]", "[tables.'the first']", None),
        ("rate = 0.5", "rate = ''", "x.toml, [tables.first] rate: rate is ''"),
        ('kind = "long"', 'kind = "wide"', "x.toml, [runs #2] kind: kind is 'wide'; it takes one of short, long"),
        ("rate = 2", "rate = 0", "x.toml, [runs #1]: rate is 0"),
    ],
)
def test_a_toml_mistake_names_its_field(tmp_path: Path, old: str, new: str, message: str | None) -> None:
    """Wherever the field is written: the lines of lists and of tables in several pieces do not matter."""
    (tmp_path / "x.toml").write_text(GOOD.replace(old, new))
    if message is None:
        assert Toml(tmp_path / "x.toml", "name a recipe").build(Recipe).tables == {"the first": Run(0.5)}
        return
    with pytest.raises(LimpetError) as caught:
        Toml(tmp_path / "x.toml", "name a recipe").build(Recipe)
    assert message in str(caught.value)


def test_a_toml_syntax_error_has_the_parsers_position(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('name = "a"\nsizes = [1,\n2\n[run]\n')
    with pytest.raises(LimpetError, match=r"x\.toml is not TOML: .*line 4, column"):
        Toml(tmp_path / "x.toml", "name a recipe")
    for text in ("a = " + "[" * 100_000, "a = " + "9" * 100_000):
        (tmp_path / "x.toml").write_text(text)
        with pytest.raises(LimpetError, match="is not TOML"):
            Toml(tmp_path / "x.toml", "name a recipe")


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link"
    write_file(path, "old")
    link.symlink_to(path)
    with pytest.raises(FileNotFoundError), atomic_path(link) as partial:
        partial.with_name("missing").read_bytes()
    assert (path.read_text(), [file.name for file in tmp_path.iterdir() if "partial" in file.name]) == ("old", [])
    write_file(link, b"new")
    assert path.read_text() == "new"
    assert link.is_symlink()
    with pytest.raises(LimpetError, match="cannot be written"):
        write_file(tmp_path / "no" / "folder", "x")


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a pipe"), ("device", "a device"), (".", "a folder")):
        with pytest.raises(LimpetError, match=f"it is {kind}, and a file is needed"):
            read_text(tmp_path / name, "name a text")
    (tmp_path / "long").write_bytes(bytes(11))
    with pytest.raises(LimpetError, match="more than 10 is no such file"), open_regular(tmp_path / "long", 10):
        pass


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    """Windows programs write one. It was read as the first letter of the first prompt, and no JSON or TOML began so."""
    lines, rows, table = tmp_path / "a.txt", tmp_path / "b.jsonl", tmp_path / "c.toml"
    lines.write_text("one\ntwo\n", "utf-8-sig")
    rows.write_text('{"text": "one"}\n', "utf-8-sig")
    table.write_text('name = "a"\n', "utf-8-sig")
    assert read_prompts(lines) == ["one", "two"]
    assert read_prompts(rows) == ["one"]
    assert Toml(table, "name a recipe").build(Recipe) == Recipe("a")


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127])
def test_a_file_may_have_the_longest_name(tmp_path: Path, name: str) -> None:
    """The partial file beside it had a longer name than a file system takes."""
    write_file(tmp_path / name, "text")
    assert read_text(tmp_path / name, "") == "text"
    with pytest.raises(LimpetError, match=r"cannot be written .*too long"):
        write_file(tmp_path / (name * 2), "text")


def test_the_texts_of_a_file(tmp_path: Path) -> None:
    """One on each line or between blank lines, or JSON lines, which may hold both."""
    lines, rows = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_text("one\r\n\ntwo\n")
    rows.write_text('"one"\n\n{"prompt": "two\\n\\nthree", "text": "no"}\n{"text": "four"}\n')
    assert read_prompts(lines) == ["one", "two"]
    assert read_prompts(rows) == ["one", "two\n\nthree", "four"]
    assert documents("a\nb\r\n\r\nc\n", "x.txt") == ["a\nb", "c"]
    assert documents('{"text": "a\\n\\nb"}\n', "x") == ["a\n\nb"]
    rows.write_text('"one"\n{"words": 3}\n')
    with pytest.raises(LimpetError, match=r"line 2 of .*b\.jsonl has no text"):
        read_prompts(rows)
    rows.write_text("{")
    with pytest.raises(LimpetError, match=r"line 1 of .*b\.jsonl is not JSON"):
        read_prompts(rows)
    lines.write_text("\n")
    with pytest.raises(LimpetError, match="holds no prompt"):
        read_prompts(lines)
