"""The README is true: its commands, code and output are what limpet does, its numbers those of committed results."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from dataclasses import fields
from itertools import pairwise

import pytest

import readme
import truth as truth_page
from examples import FENCED, ROOT, helped
from limpet.cli import compare as compare_command
from limpet.cli import main
from limpet.cli import sample as sample_command
from limpet.cli.common import LoadOptions
from limpet.evaluation.comparison import SAMPLERS
from limpet.paper.studies import truth
from limpet.samplers import named_samplers

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_its_beginning_has_what_a_newcomer_needs():
    lines = README.splitlines()
    assert len(lines) <= 150
    beginning = "\n".join(lines[:40])
    for needed in ("pip install .", "make demo", "make test", "](docs/images/samplers.gif)", "$ limpet sample"):
        assert needed in beginning


@pytest.mark.parametrize("model", ["exact:words", pytest.param("mini", marks=pytest.mark.long)])
def test_its_code_runs(model, capsys):
    """By default on a model that costs nothing, whose alphabet has no capitals."""
    (block,) = (block for language, block in FENCED.findall(README) if language == "python")
    assert 'load("mini")' in block
    prompt = "The sea" if model == "mini" else "the sea"
    exec(compile(block.replace('"mini"', f'"{model}"').replace("The sea", prompt), "README.md", "exec"), {})
    assert prompt in capsys.readouterr().out


def test_its_commands_are_all_there_are():
    cells = re.findall(r"^\| (`limpet .*?) \|", README, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(?:limpet )?([a-z]+)`", cell)} == set(main.COMMANDS)


@pytest.mark.parametrize("command", [sample_command, compare_command])
def test_samplers_and_options_of_its_examples_exist(command, tmp_path, monkeypatch):
    """And those of the commands' help."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from limpet import Native\n\n\nclass Mine(Native):\n    pass\n")
    name = command.__name__.rpartition(".")[2]
    examples = [*re.findall(rf"^\$ (limpet {name}.*)$", README, re.MULTILINE), *helped(name)]
    assert any("--sampler" in line for line in examples)
    names = {*inspect.signature(command.run).parameters, *(field.name for field in fields(LoadOptions))}
    options = {f"--{option.replace('_', '-')}" for option in names}
    for line in examples:
        words = shlex.split(line.partition(" > ")[0])
        assert {word for word in words if word.startswith("--")} <= options
        values = [value for option, value in pairwise(words) if option == "--sampler"]
        assert len(named_samplers(values, 16)) == len(values)


def printed(command: str, capsys) -> str:
    capsys.readouterr()
    assert main.main(shlex.split(command)[1:]) == 0
    return capsys.readouterr().out


def test_its_exact_table_is_what_the_command_prints(capsys):
    ((command, output),) = re.findall(r"^\$ (limpet compare .*)\n((?:.+\n)*)```", README, re.MULTILINE)
    rows = [line for line in output.splitlines() if line.startswith("│")]
    assert len(rows) == len(SAMPLERS) + 2  # and the recommended sampler, and the true distribution
    now = " ".join(printed(command, capsys).split())
    for line in output.splitlines():
        assert " ".join(line.split()) in now


def test_its_sample_is_what_the_command_prints(capsys):
    """A network may round differently on another machine, and then its words differ: the beginning is enough."""
    ((command, output),) = re.findall(r"^\$ (limpet sample .*)\n((?:.+\n)*)```", README, re.MULTILINE)
    assert output.split()[:8] == printed(command, capsys).split()[:8]


def test_its_results_are_those_of_the_committed_reports():
    block = readme.results_block(*readme.committed())
    assert f"<!-- results -->\n{block}<!-- end -->" in README
    table = [line for line in block.splitlines() if line.startswith("|")]
    assert len(table) <= 2 + 5  # head, rule and at most five rows
    assert all(line.count("|") <= 6 for line in table)  # at most four columns of numbers


def test_its_limits_are_what_the_study_of_truth_found():
    results, _ = readme.committed()

    def outcomes(family: str, nfe: int) -> dict[str, str]:
        (text,) = truth.COMPARED[family]
        worlds = [world for world, size in truth_page.SIZE.truth.items() if nfe in size.nfes]
        return {world: truth.against_baseline(results, f"{world}/{nfe}", text).outcome for world in worlds}

    assert "neither CRS nor Mend beats the best baseline, mostly interleaved top-p, with 64 calls" in " ".join(
        README.split()
    )
    assert "holds" not in [*outcomes("CRS", 64).values(), *outcomes("Mend", 64).values()]
    assert [world for world, outcome in outcomes("Mend", 16).items() if outcome == "holds"] == ["boards"]
    assert outcomes("Mend", 16)["grammar"] == outcomes("CRS", 16)["grammar"] == "fails"


def test_it_says_how_much_faster_than_the_released_functions():
    measured = json.loads((ROOT / "benchmarks/results/h200.json").read_text())
    times = [
        measured[f"batch 16 nfe 64 released {name}"]["seconds"] / measured[f"batch 16 nfe 64 {name}"]["seconds"]
        for name in ("native", "top-p .9")
    ]
    assert "{:.0f} times (without top-p) and {:.0f} times (top-p .9)".format(*times) in " ".join(README.split())


def test_what_it_says_of_molecules_is_what_the_card_says():
    card = (ROOT / "src/limpet/models/builtin/molecules/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (native|mend) \| (\d+) \| ([\d.]+) .*? \| [\d.]+ .*? \| ([\d.]+) ", card, re.MULTILINE)
    found = {(name, calls): (float(valid), float(novel)) for name, calls, valid, novel in rows}
    for calls in {calls for _, calls in found}:
        (valid, novel), (more_valid, less_novel) = found["native", calls], found["mend", calls]
        assert more_valid > valid
        assert less_novel < novel
    assert "Mend makes more molecules valid and fewer of them novel than native sampling" in " ".join(README.split())
