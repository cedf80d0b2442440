"""Every example of the README, of docs and of the commands' own help: all can be read, and those that need neither a
hub, nor a GPU, nor hours are run. (tests/test_outside.py runs those of write-a-sampler, bring-a-model and samplers, and
tests/test_schedulers.py that of diffusers, on a small model.)"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import tyro

import limpet
from limpet import cli
from limpet.studies import hidden

HERE = Path(__file__).parents[1]
PAGES = [HERE / "README.md", *sorted((HERE / "docs").glob("*.md"))]
OUTSIDE = {"write-a-sampler", "bring-a-model", "samplers", "diffusers"}
SMALLEST = {'"cuda", "bfloat16"': '"cpu"', "mini-gpu": "smoke"}  # what stands for what in a page's Python
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
# What asks for a hub, a cluster, hours, a file that is nobody's, or never ends
BEYOND = re.compile(
    r"s-sahoo|gpt2|path/to|kuleshov|dvruette|tohoku|--preset (mini|paper)|ray|s3:|\.py:|serve|bench|my-study"
    r"|openwebtext|\btune mini|audit (hidden|all|values)|study run all|compare --(nfe|model mini)|tuned\.toml"
    r"|readout\.toml|--n 1000|google/|prompts\.jsonl"
)


def shell(page: Path) -> Iterator[str]:
    """The commands of a page's fenced blocks, without their remarks."""
    for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind in ("", "sh", "console"):
            for line in block.splitlines():
                if (found := re.match(r"(?:\$ )?(limpet .*)", line)) and "━" not in line:
                    yield re.sub(r"\s+#.*| > .*", "", found[1])


def helped(name: str) -> list[str]:
    words = inspect.getdoc(import_module(f"limpet.commands.{name}").run)
    return [re.sub(r" > .*", "", line[2:]) for line in map(str.strip, words.splitlines()) if line.startswith("$ ")]


EVERY = {page.stem: list(shell(page)) for page in PAGES} | {f"help of {name}": helped(name) for name in cli.COMMANDS}


@pytest.mark.parametrize("where", [where for where, lines in EVERY.items() if lines])
def test_every_command_can_be_read(where):
    for line in EVERY[where]:
        program, name, *arguments = shlex.split(line)
        assert program == "limpet"
        command = import_module(f"limpet.commands.{name}").run
        told = functools.wraps(command)(lambda *given, **named: (given, named))
        try:
            tyro.cli(told, args=arguments)
        except SystemExit as error:
            raise AssertionError(f"{where}: {line}") from error


def test_there_are_examples_of_every_command():
    named = {shlex.split(line)[1] for lines in EVERY.values() for line in lines}
    assert named == set(cli.COMMANDS)
    assert sum(map(len, EVERY.values())) > 100


@pytest.fixture
def checkout(here):
    """A folder that looks like a clone's root to a command, and is written to alone."""
    for name in ("recipes", "src", "docs"):
        (here / name).symlink_to(HERE / name)
    return here


RUN = {page.stem: [line for line in EVERY[page.stem] if not BEYOND.search(line)] for page in PAGES}


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page, lines in RUN.items() if lines and page not in OUTSIDE])
def test_the_commands_of_a_page_run(page, checkout, capsys):
    for line in RUN[page]:
        assert cli.main(shlex.split(line)[1:]) == 0, line
        capsys.readouterr()


def test_most_commands_of_the_pages_are_run():
    ran = sum(len(EVERY[page] if page in OUTSIDE else lines) for page, lines in RUN.items())
    assert ran > 0.6 * sum(len(EVERY[page]) for page in RUN)


@pytest.mark.long
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in OUTSIDE], ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page, checkout, monkeypatch):
    """In the order of the page, at the smallest size."""
    monkeypatch.setitem(hidden.PRESETS, "mini", replace(hidden.PRESETS["smoke"], name="mini"))
    space = {"limpet": limpet}
    for kind, block in FENCED.findall(page.read_text(encoding="utf-8")):
        if kind == "python":
            for words, small in SMALLEST.items():
                block = block.replace(words, small)
            exec(compile(block, page.name, "exec"), space)


def test_links_of_the_pages_lead_somewhere():
    for page in (*PAGES, HERE / "CHANGELOG.md"):
        for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_page_of_times_is_what_was_measured():
    spec = importlib.util.spec_from_file_location("times", HERE / "tools/times.py")
    times = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(times)
    kept = json.loads(times.KEPT.read_text())
    assert list(kept["seconds"]) == times.COMMANDS
    assert times.PAGE.read_text() == times.page(kept, kept["seconds"])
    named = {shlex.split(line)[1] for line in times.COMMANDS}
    assert named == {*cli.COMMANDS, "--help"} - {"serve", "reproduce"}


def test_the_guide_to_training_names_every_field():
    from dataclasses import fields

    from limpet.training import recipe

    text = (HERE / "docs/train.md").read_text()
    for table, kind in (("data", recipe.Data), ("sizes", recipe.Sizes), ("run", recipe.Run), ("distil", recipe.Distil)):
        for one in fields(kind):
            assert f"`{table}.{one.name}`" in text, one.name
    for one in fields(recipe.Recipe):
        assert f"`{one.name}`" in text or f"`[{one.name}]`" in text, one.name
