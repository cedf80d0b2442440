"""Every example of the README, the docs and the commands' help, as it is written there, one command on each line."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from limpet.cli import main

HERE = Path(__file__).parents[2]
PAGES = [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(limpet|curl|hf|make|pip|python|srun) ")
SILENT = re.compile(r"#|$|\w+=|export ")  # lines of a script that are no commands
COMMANDS = [name for name in main.COMMANDS if name != "paper"] + [f"paper {name}" for name in main.PAPER]


def joined(text: str) -> str:
    """Lines that end in a backslash go on."""
    return re.sub(r" *\\\n *", " ", text)


def shell(page: Path) -> Iterator[str]:
    """The commands of a page's fenced blocks, without their remarks. What stands in a block without a kind, or after
    none of the dollars of a console, may be what a command prints."""
    for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
        yield from re.findall(r"^ *entrypoint: (.*)", block, re.M) if kind == "yaml" else ()
        if kind in ("", "sh", "bash", "console"):
            for line in joined(block).splitlines():
                command = line.removeprefix("$ ")
                if PROGRAM.match(command):
                    yield re.sub(r"\s+#.*", "", command)
                else:
                    printed = kind == "" or (kind == "console" and command == line)
                    assert printed or SILENT.match(line), f"{page.name}: of which program is {line!r}?"


def written(name: str) -> list[str]:
    """The examples of a command's help as they stand there, one or more lines each."""
    words = inspect.getdoc(import_module(f"limpet.cli.{name.replace(' ', '.')}").run)
    return re.findall(r"^\$ (?:.*\\\n)*.*$", words, re.M)


def helped(name: str) -> list[str]:
    return [joined(one).removeprefix("$ ") for one in written(name)]


EVERY = {page.stem: list(shell(page)) for page in PAGES} | {f"help of {name}": helped(name) for name in COMMANDS}
