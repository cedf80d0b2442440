"""Every example of the README, the docs and the commands' help, as it is written there, one command on each line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from limpet.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(limpet|curl|docker|hf|make|pip|python|serve|srun) ")
NOT_A_COMMAND = re.compile(r"#|$|\w+=|export ")  # other lines of a shell script
SAVED = re.compile(r"[Ss]ave (?:it|this) as\s+`([\w.-]+)`")
COMMANDS = [name for name in main.COMMANDS if name != "paper"] + [f"paper {name}" for name in main.PAPER]


def joined(text: str) -> str:
    """A text with the lines that end in a backslash joined to the next."""
    return re.sub(r" *\\\n *", " ", text)


def shell(page: Path) -> Iterator[str]:
    """The commands of a page's fenced blocks, without comments.

    A block without a language, and the lines of a console without a dollar, may also show what a command prints."""
    for language, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if language == "yaml":
            yield from re.findall(r"^ *entrypoint: (.*)", block, re.M)
        if language not in ("", "sh", "bash", "console"):
            continue
        for line in joined(block).splitlines():
            command = line.removeprefix("$ ")
            if PROGRAM.match(command):
                yield re.sub(r"\s+#.*", "", command)
            else:
                is_output = language == "" or (language == "console" and command == line)
                assert is_output or NOT_A_COMMAND.match(line), f"{page.name}: of which program is {line!r}?"


def saved(page: Path) -> Iterator[tuple[str, str]]:
    """(name, content) of every file that a page asks its reader to save: the block after its name."""
    text = page.read_text(encoding="utf-8")
    for found in SAVED.finditer(text):
        block = FENCED.search(text, found.end())
        assert block, f"{page.name}: {found[1]} has no content"
        yield found[1], block[2]


def written(name: str) -> list[str]:
    """The examples of a command's help as they are written there, one or more lines each."""
    text = inspect.getdoc(import_module(f"limpet.cli.{name.replace(' ', '.')}").run)
    return re.findall(r"^\$ (?:.*\\\n)*.*$", text, re.M)


def helped(name: str) -> list[str]:
    """The examples of a command's help, one line each."""
    return [joined(one).removeprefix("$ ") for one in written(name)]


BY_PAGE = {page.stem: list(shell(page)) for page in PAGES} | {f"help of {name}": helped(name) for name in COMMANDS}
