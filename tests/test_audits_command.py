"""`limpet audit`: every audit by name, its JSON, its figure, its result read back, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from typing import get_args

import pytest

from limpet.audits import AUDITS, Models, Result
from limpet.audits.result import Preset, checkpoint, each, percent, with_error
from limpet.commands import audit as command
from limpet.denoisers.catalog import load
from limpet.errors import LimpetError
from limpet.stats import mean_se

ON_EXACT = {"selection": ("exact:words", "exact:words")}


def test_the_command_names_every_audit():
    assert get_args(command.Name) == (*AUDITS, "all")
    for audit in AUDITS.values():
        assert list(audit.presets) == ["smoke", "mini", "paper"]
        assert all(isinstance(preset, Preset) for preset in audit.presets.values())
        assert audit.presets["paper"].shards == (8200, 8210, 8220, 8230)
        assert audit.presets["paper"].length is None


@pytest.mark.parametrize("name", AUDITS)
def test_every_audit_prints_one_json_document_and_draws(name, capsys, tmp_path):
    model = ON_EXACT.get(name, ("exact:words",))
    assert command.run(name, preset="smoke", model=model, json=True, out_folder=tmp_path) == 0
    shown = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / f"{name}-smoke.json").read_text()) == shown
    assert (shown["audit"], shown["preset"]) == (name, "smoke")
    assert shown["rows"]
    assert set(shown["models"]) == {"exact:words"}
    for row in shown["rows"]:
        assert set(row) == {"model", "quantity", "at", "mean", "se", "shards", "unit", "events", "paper"}
        assert row["paper"] == "" or name == "selection"  # the paper has no exact source
        assert len(row["shards"]) == 2
    assert (tmp_path / f"{name}-smoke.png").stat().st_size > 5000
    assert AUDITS[name].title in (tmp_path / "index.html").read_text()
    back = json.loads(json.dumps(Result.from_dict(shown).to_dict()))
    assert back == {part: shown[part] for part in ("audit", "settings", "models", "rows", "conventions")}


ALONE = """
import socket, sys
from limpet.cli import main

def refuse(*arguments):
    raise OSError("this test has no network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", AUDITS)
def test_a_smoke_takes_seconds_and_no_network(name):
    """The whole process on the built-in models, in ten seconds of one core's time: that does not depend on who else is
    at work here, and is no less than what a process with two cores to itself would take."""
    told = [sys.executable, "-c", ALONE, "audit", name, "--preset", "smoke", "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(told, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["models"])[:2] == ["mini", "mini-distilled"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


def test_a_mini_smoke_shows_the_paper_beside(capsys):
    command.run("hidden", preset="smoke", model=("mini-distilled",))
    printed = capsys.readouterr().out
    assert "74.83 ± 0.60" in printed
    assert "restored, where it changed" in printed


def test_paths_and_calls_can_be_told(capsys):
    command.run("singleton", preset="smoke", model=("exact:words",), paths=3, nfe=6, json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["settings"]["paths"], shown["settings"]["nfe"]) == (3, 6)
    assert shown["rows"][0]["events"] == 2 * 3 * 5 * 160


def test_all_of_them_in_one_go(capsys, tmp_path):
    """What one audit cannot do with these models is told, and the others go on."""
    assert command.run("all", preset="smoke", model=("exact:words",), json=True, out_folder=tmp_path / "new") == 1
    printed = capsys.readouterr()
    done = [shown["audit"] for shown in json.loads(printed.out)]
    assert done == [name for name in AUDITS if name != "selection"]
    assert "selection: this audit compares two checkpoints" in printed.err
    assert {path.stem for path in (tmp_path / "new").glob("*.json")} == {f"{name}-smoke" for name in done}
    page = (tmp_path / "new" / "index.html").read_text()
    assert all(f'id="{name}-smoke"' in page for name in done)


def test_what_it_refuses(tmp_path):
    with pytest.raises(LimpetError, match="at least one"):
        command.run("risk", preset="smoke", model=("exact:words",), paths=0)
    with pytest.raises(LimpetError, match="at least 4"):
        command.run("values", preset="smoke", model=("exact:words",), nfe=2)
    with pytest.raises(LimpetError, match="no preset"):
        AUDITS["risk"](Models((load("exact:words"),)), "huge")
    with pytest.raises(LimpetError, match="cannot be read"):
        command.run("risk", preset="smoke", model=("exact:words",), text=tmp_path / "none.txt")
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match="cannot be written"):
        command.run("risk", preset="smoke", model=("exact:words",), out_folder=tmp_path / "file")


def test_counterparts():
    assert checkpoint(load("exact:words")) == ""
    assert checkpoint(load("mini")) == "Duo"
    assert checkpoint(load("mini-distilled")) == "Duo-distilled"


def test_small_things():
    assert percent([1, 0], [4, 5]).tolist() == [25, 0]
    assert math.isnan(percent([0, 1], [0, 5])[0])
    told = []
    assert list(each("ab", lambda done, total: told.append((done, total)))) == ["a", "b"]
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert with_error(mean_se([41.0, 43.0])) == "42.0 ± 1.0"
    assert with_error(mean_se([0.8278, 0.8304])) == "0.8291 ± 0.0013"
    assert with_error(mean_se([0.0, 0.0])) == "0"
    assert with_error(mean_se([math.nan, 1.0])) == "none"
