"""What the README says is true: its commands exist and parse, its code runs, its exact table is what is printed."""

import inspect
import re
import shlex
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from examples import helped
from limpet.cli import compare as compare_command
from limpet.cli import sample as sample_command
from limpet.cli.common import Where, arms
from limpet.cli.main import COMMANDS, main
from limpet.evaluation.comparison import baselines

HERE = Path(__file__).parents[2]
README = (HERE / "README.md").read_text(encoding="utf-8")


def test_its_code_runs():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})


def test_its_commands_are_all_there_are():
    cells = re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(?:limpet )?([a-z]+)`", cell)}
    assert named == set(COMMANDS)


@pytest.mark.parametrize("command", [sample_command, compare_command])
def test_its_examples_and_those_of_help_are_arms(command, tmp_path, monkeypatch):
    """Every `--arm` that is written anywhere can be read, and so can the flags beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from limpet import Native\n\n\nclass Mine(Native):\n    pass\n")
    name = command.__name__.rpartition(".")[2]
    shown = [*re.findall(rf"^limpet {name}.*$", README, re.MULTILINE), *helped(name)]
    assert any("--arm" in line for line in shown)
    taken = {*inspect.signature(command.run).parameters, *(field.name for field in fields(Where))} - {"where"}
    flags = {f"--{flag.replace('_', '-')}" for flag in taken}
    for line in shown:
        words = shlex.split(line.partition(" > ")[0])
        assert {word for word in words if word.startswith("--")} <= flags
        given = [value for flag, value in pairwise(words) if flag == "--arm"]
        assert len(arms(given, 16)) == len(given)


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (HERE / link).exists(), link


def test_its_exact_table_is_what_the_command_prints(capsys):
    call = "compare --model exact:words --nfe 8 --n 32"
    assert f"`limpet {call}`" in README
    assert main([*call.split(), "--texts", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if line.startswith("│")]
    assert len(lines) == len(baselines(8)) + 1  # and the source
    for line in [*lines, *printed[-2:]]:
        assert re.sub(r" +", " ", line).strip() in re.sub(r" +", " ", README)
    assert "tokens counted" in printed[-2]


def test_both_its_tables_say_who_judged():
    for caption in (
        r"mini-judge \([0-9a-f]{12}\) in float32, by ids",
        r"true distribution of exact:words \([0-9a-f]{12}\) in float64",
    ):
        (line,) = re.findall(rf"^{caption}.*$", README, re.MULTILINE)
        assert "tokens counted an arm" in line


def test_its_sentence_on_top_p_names_the_readout():
    """The card and the report that it links bear it out."""
    (words,) = re.findall(r"compare at \*equal\* entropy.*?the lead is gone", README, re.DOTALL)
    assert "both CRS and top-p are read out by argmax" in " ".join(words.split())
    assert "final_step=sample" in words
    report = (HERE / "docs/reports/mini/final-step-sample/report.md").read_text()
    rows = re.findall(r"^\| (p=0\.9|D=0\.5L) \| ([\d.]+) ± [\d.]+ \| ([\d.]+)", report, re.MULTILINE)
    found = {name: (float(ppl), float(entropy)) for name, ppl, entropy in rows}
    assert found["p=0.9"][0] < found["D=0.5L"][0] / 1.5
    assert abs(found["p=0.9"][1] - found["D=0.5L"][1]) < 0.02
