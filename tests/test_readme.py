"""What the README says is true: its commands exist, its code runs, its exact table is what the command prints."""

import re
from pathlib import Path

from limpet.cli import COMMANDS, main

HERE = Path(__file__).parents[1]
README = (HERE / "README.md").read_text(encoding="utf-8")


def test_its_code_runs():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})


def test_its_commands_are_all_there_are():
    cells = re.findall(r"^\| (`.*?) \|", README, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(?:limpet )?([a-z]+)`", cell)}
    assert named == set(COMMANDS)


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (HERE / link).exists(), link


def test_its_exact_table_is_what_the_command_prints(capsys):
    call = "compare --model exact:words --nfe 8 --n 32"
    assert f"`limpet {call}`" in README
    assert main([*call.split(), "--texts", "0"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert len(lines) == 5
    for line in lines:
        assert re.sub(r" +", " ", line) in re.sub(r" +", " ", README)
