"""`limpet audit`: every audit by name, its JSON, its figure, its result kept in the store, and what it refuses."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from typing import get_args

import pytest

from limpet.cli import audit as command
from limpet.errors import LimpetError
from limpet.evaluation.statistics import mean_se
from limpet.paper.studies import AUDITS, PRESETS, STUDIES
from limpet.paper.studies.audits import Preset, checkpoint, percent, with_error

NAMES = get_args(command.Name)[:-1]
PROBES = [name for name in NAMES if name not in STUDIES]
ON_EXACT = {"selection": ("exact:words", "exact:words")}


def test_the_command_names_every_audit():
    assert list(AUDITS) == PROBES
    assert set(NAMES) - set(PROBES) == {"final_step", "values", "storage"}
    for name in PROBES:
        presets = import_module(f"limpet.paper.studies.{name}").PRESETS
        assert set(presets) <= set(PRESETS)
        assert set(presets) >= set(get_args(command.Size)) == {"smoke", "mini", "paper"}
        assert all(isinstance(preset, Preset) and preset.name == size for size, preset in presets.items())
        assert presets["paper"].shards == (8200, 8210, 8220, 8230)
        assert presets["paper"].settings.length is None


def of(name: str, tmp_path, **more):
    """The arguments of a small run on an exact source, with a store of its own."""
    model = ON_EXACT.get(name, ("exact:words",))
    return {"preset": "smoke", "model": model, "store": str(tmp_path / "store"), **more}


@pytest.mark.parametrize("name", NAMES)
def test_every_audit_prints_one_json_document_and_draws(name, capsys, tmp_path):
    assert command.run(name, **of(name, tmp_path, json=True, out_folder=tmp_path / "out")) == 0
    shown = json.loads(capsys.readouterr().out)
    folder = tmp_path / "out" / f"{name}-smoke"
    assert json.loads((folder / "report.json").read_text()) == shown
    assert (shown["study"], shown["preset"]) == (name, "smoke")
    assert set(shown["provenance"]["models"]) == {"exact:words"}
    assert shown["title"] in (folder / "index.html").read_text()
    if name not in PROBES:
        assert shown["cells"]
        return
    (rows,) = shown["rows"].values()
    for row in rows:
        assert set(row) == {"model", "quantity", "at", "mean", "se", "shards", "unit", "events"}
        assert len(row["shards"]) == 2
    (table,) = (folder / "tables").glob("*.md")
    lines = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith("| exact:words")]
    assert len(lines) == len(rows)
    assert table.read_text().count("paper") == 0  # it has no exact source
    assert all(len(line) == 5 for line in lines)
    assert (folder / "figures" / f"{name}.png").stat().st_size > 5000


def test_nothing_is_made_twice(capsys, tmp_path, monkeypatch):
    singleton = import_module("limpet.paper.studies.singleton")
    command.run("singleton", **of("singleton", tmp_path, json=True))
    first = capsys.readouterr().out
    monkeypatch.setattr(singleton, "trace", lambda sampler, path: pytest.fail("made again"))
    command.run("singleton", **of("singleton", tmp_path, json=True))
    assert capsys.readouterr().out == first
    with pytest.raises(pytest.fail.Exception):
        command.run("singleton", **of("singleton", tmp_path, nfe=6))


ALONE = """
import socket, sys
from limpet.cli import main

def refuse(*arguments):
    raise OSError("this test has no network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_takes_seconds_and_no_network(name, tmp_path):
    """The whole process, in ten seconds of one core's time: that does not depend on who else is at work here, and is no
    less than what a process with two cores to itself would take."""
    told = [sys.executable, "-c", ALONE, "audit", name, "--preset", "smoke", "--json", "--store", str(tmp_path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(told, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    models = list(json.loads(done.stdout)["provenance"]["models"])
    if name in PROBES:
        assert {"mini", "mini-distilled"} <= set(models)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


@pytest.mark.parametrize("preset", ["smoke", "mini"])
def test_the_paper_stands_beside_what_is_no_toy(preset, capsys, tmp_path, monkeypatch):
    presets = import_module("limpet.paper.studies.hidden").PRESETS
    monkeypatch.setitem(presets, "mini", replace(presets["smoke"], name="mini"))
    command.run("hidden", preset=preset, model=("mini-distilled",), store=str(tmp_path))
    printed = capsys.readouterr().out
    assert "restored, where it changed" in printed
    assert ("74.83 ± 0.60" in printed) == ("paper" in printed) == (preset == "mini")


def test_paths_and_calls_can_be_told(capsys, tmp_path):
    command.run("singleton", **of("singleton", tmp_path, paths=3, nfe=6, json=True))
    shown = json.loads(capsys.readouterr().out)
    (settings,) = shown["provenance"]["settings"]
    assert (settings["paths"], settings["nfe"]) == (3, 6)
    assert shown["rows"]["exact:words"][0]["events"] == 2 * 3 * 5 * 160
    command.run("values", **of("values", tmp_path, paths=3, nfe=6, json=True))
    shown = json.loads(capsys.readouterr().out)
    assert shown["provenance"]["samples in a shard"] == [3]
    assert shown["cells"]["argmax"]["nfe"]["mean"] == 6


def test_text_can_be_told(capsys, tmp_path):
    """Its content is part of what a shard is kept under."""
    text, told = tmp_path / "text.txt", of("risk", tmp_path, model=("mini",), json=True)
    found = []
    for words in ("Once upon a time there was a king. ", "The sea was calm and the ship lay still. "):
        text.write_text(words * 200)
        command.run("risk", **told, text=text)
        found.append(json.loads(capsys.readouterr().out)["rows"])
    assert found[0] != found[1]


def test_models_take_the_roles_of_a_study(capsys, tmp_path):
    told = of("final_step", tmp_path, model=("exact:chain", "exact:words"), json=True)
    command.run("final_step", **told)
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["provenance"]["models"]) == {"exact:chain", "exact:words"}
    assert shown["cells"]["base/1.0/argmax"] != shown["cells"]["distilled/1.0/argmax"]
    with pytest.raises(LimpetError, match="name two"):
        command.run("final_step", **of("final_step", tmp_path, model=("exact:chain",) * 3))


def test_all_of_them_in_one_go(capsys, tmp_path):
    """What one audit cannot do with these models is told, and the others go on."""
    told = of("all", tmp_path, json=True, out_folder=tmp_path / "new")
    assert command.run("all", **told) == 1
    printed = capsys.readouterr()
    done = [shown["study"] for shown in json.loads(printed.out)]
    assert done == [name for name in NAMES if name != "selection"]
    assert "selection: this audit compares two checkpoints" in printed.err
    assert {path.parent.name for path in (tmp_path / "new").glob("*/report.json")} == {f"{name}-smoke" for name in done}
    page = (tmp_path / "new" / "index.html").read_text()
    assert all(f"{name}-smoke/index.html" in page for name in done)


def test_what_it_refuses(tmp_path):
    with pytest.raises(LimpetError, match="at least one"):
        command.run("risk", **of("risk", tmp_path, paths=0))
    with pytest.raises(LimpetError, match="at least 4"):
        command.run("values", **of("values", tmp_path, nfe=2))
    with pytest.raises(LimpetError, match="one vocabulary"):
        command.run("selection", **of("selection", tmp_path, model=("exact:words", "mini")))
    with pytest.raises(LimpetError, match="cannot be read"):
        command.run("risk", **of("risk", tmp_path, text=tmp_path / "none.txt"))
    (tmp_path / "file").write_text("")
    with pytest.raises(LimpetError, match="cannot be written"):
        command.run("risk", **of("risk", tmp_path, out_folder=tmp_path / "file"))


def test_counterparts():
    assert checkpoint("exact:words") == ""
    assert checkpoint("mini") == "Duo"
    assert checkpoint("mini-distilled") == "Duo-distilled"


def test_small_things():
    assert percent(1, 4) == (25, "%", 4)
    assert percent(0, 5) == (0, "%", 5)
    assert math.isnan(percent(0, 0)[0])
    assert with_error(mean_se([41.0, 43.0])) == "42.0 ± 1.0"
    assert with_error(mean_se([0.8278, 0.8304])) == "0.8291 ± 0.0013"
    assert with_error(mean_se([0.0, 0.0])) == "0"
    assert with_error(mean_se([math.nan, 1.0])) == "none"
