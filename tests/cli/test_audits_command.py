"""`limpet paper audit`: every audit by name, its JSON, its report, its place in the store, and what it refuses."""

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

from limpet.cli.paper import audit as command
from limpet.cli.paper import study as study_command
from limpet.errors import LimpetError
from limpet.evaluation.statistics import mean_se
from limpet.paper.studies import AUDITS, PRESETS, STUDIES, audit_presets
from limpet.paper.studies.audits import AuditPreset, checkpoint, percent, with_error

NAMES = get_args(command.Name)[:-1]
PROBES = [name for name in NAMES if name not in STUDIES]


def test_the_command_names_every_audit():
    assert list(AUDITS) == PROBES
    assert set(NAMES) - set(PROBES) == {"final-step", "values", "storage"}
    for name in PROBES:
        presets = audit_presets(name)
        assert set(PRESETS) >= set(presets) >= set(get_args(command.Size)) == {"smoke", "mini", "paper"}
        assert all(isinstance(preset, AuditPreset) and preset.name == size for size, preset in presets.items())
        assert presets["paper"].seeds == (8200, 8210, 8220, 8230)
        assert presets["paper"].settings.length is None


def small(name: str, tmp_path, **more):
    """The arguments of a small run on an exact source, with a store of its own."""
    model = ("exact:words",) * (2 if name == "selection" else 1)
    return {"preset": "smoke", "model": model, "store": str(tmp_path / "store"), "json": True, **more}


def run_json(capsys, name: str, **arguments):
    assert command.run(name, **arguments) == 0
    return json.loads(capsys.readouterr().out)


def check_report(document, folder):
    """That an audit's document is in its folder, and what it holds of exact:words."""
    name = document["study"]
    assert json.loads((folder / "report.json").read_text()) == document
    assert document["preset"] == "smoke"
    assert set(document["provenance"]["models"]) == {"exact:words"}
    assert document["title"] in (folder / "index.html").read_text()
    if name not in PROBES:
        assert document["cells"]
        return
    (rows,) = document["rows"].values()
    for row in rows:
        assert set(row) == {"model", "quantity", "at", "mean", "se", "values", "unit", "events"}
        assert len(row["values"]) == 2
    (table,) = (folder / "tables").glob("*.md")
    lines = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith("| exact:words")]
    assert [len(line) for line in lines] == [5] * len(rows)
    assert "paper" not in table.read_text()  # it has no exact source
    assert (folder / "figures" / f"{name}.png").stat().st_size > 5000


def test_an_audit_prints_one_json_document_and_writes_its_report(capsys, tmp_path):
    """The one that compares two models, which all audits at once leave out."""
    document = run_json(capsys, "selection", **small("selection", tmp_path, out_folder=tmp_path / "out"))
    check_report(document, tmp_path / "out" / "selection-smoke")


def test_nothing_is_computed_twice(capsys, tmp_path, monkeypatch):
    singleton = import_module("limpet.paper.studies.singleton")
    first = run_json(capsys, "singleton", **small("singleton", tmp_path))
    monkeypatch.setattr(singleton, "singleton_events", lambda *arguments: pytest.fail("computed again"))
    assert run_json(capsys, "singleton", **small("singleton", tmp_path)) == first
    with pytest.raises(pytest.fail.Exception):
        command.run("singleton", **small("singleton", tmp_path, nfe=6))


OFFLINE = """
import socket, sys
from limpet.cli.main import main

def refuse(*arguments):
    raise OSError("this test has no network")

socket.socket.connect = socket.getaddrinfo = refuse
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_a_smoke_run_takes_seconds_and_no_network(name, tmp_path):
    """The whole process takes at most ten seconds of one core's time, which does not depend on other work."""
    call = [
        sys.executable,
        "-c",
        OFFLINE,
        "paper",
        "audit",
        name,
        "--preset",
        "smoke",
        "--json",
        "--store",
        str(tmp_path),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(call, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    models = set(json.loads(done.stdout)["provenance"]["models"])
    assert name not in PROBES or {"mini", "mini-distilled"} <= models
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10


@pytest.mark.parametrize("preset", ["smoke", "mini"])
def test_the_papers_values_are_shown_except_for_toys(preset, capsys, tmp_path, monkeypatch):
    presets = audit_presets("hidden")
    monkeypatch.setitem(presets, "mini", replace(presets["smoke"], name="mini"))
    command.run("hidden", preset=preset, model=("mini-distilled",), store=str(tmp_path))
    printed = capsys.readouterr().out
    assert "restored, where it changed" in printed
    assert ("74.83 ± 0.60" in printed) == ("paper" in printed) == (preset == "mini")


def test_sizes_texts_and_models_can_be_chosen(capsys, tmp_path):
    document = run_json(capsys, "singleton", **small("singleton", tmp_path, n=3, nfe=6))
    (settings,) = document["provenance"]["settings"]
    assert (settings["n"], settings["nfe"]) == (3, 6)
    assert document["rows"]["exact:words"][0]["events"] == 2 * 3 * 5 * 160
    document = run_json(capsys, "values", **small("values", tmp_path, n=3, nfe=6))
    assert document["provenance"]["samples per seed"] == [3]
    assert document["cells"]["argmax"]["nfe"]["mean"] == 6
    text, found = tmp_path / "text.txt", []
    for words in ("Once upon a time there was a king. ", "The sea was calm and the ship lay still. "):
        text.write_text(words * 200)
        found.append(run_json(capsys, "risk", **small("risk", tmp_path, model=("mini",), text=text))["rows"])
    assert found[0] != found[1]  # the content of a text is part of the key of a unit
    document = run_json(capsys, "final-step", **small("final-step", tmp_path, model=("exact:chain", "exact:words")))
    assert set(document["provenance"]["models"]) == {"exact:chain", "exact:words"}
    assert document["cells"]["base/1.0/argmax"] != document["cells"]["distilled/1.0/argmax"]


def test_all_audits_at_once(capsys, tmp_path):
    """Each writes its report. What one cannot do with these models is reported, and the others continue."""
    arguments = small("all", tmp_path, out_folder=tmp_path / "new")
    assert command.run("all", **arguments) == 1
    printed = capsys.readouterr()
    documents = json.loads(printed.out)
    done = [document["study"] for document in documents]
    assert done == [name for name in NAMES if name != "selection"]
    assert "selection: this audit compares two checkpoints" in printed.err
    assert {path.parent.name for path in (tmp_path / "new").glob("*/report.json")} == {f"{name}-smoke" for name in done}
    for document in documents:
        check_report(document, tmp_path / "new" / f"{document['study']}-smoke")
    page = (tmp_path / "new" / "index.html").read_text()
    assert all(f"{name}-smoke/index.html" in page for name in done)


def test_what_it_refuses(tmp_path):
    (tmp_path / "file").write_text("")
    for name, more, message in [
        ("risk", {"n": 0}, "at least one"),
        ("values", {"nfe": 2}, "at least 4"),
        ("selection", {"model": ("exact:words", "mini")}, "one vocabulary"),
        ("final-step", {"model": ("exact:chain",) * 3}, "name two"),
        ("risk", {"text": tmp_path / "none.txt"}, "cannot be read"),
        ("risk", {"out_folder": tmp_path / "file"}, "cannot be written"),
    ]:
        with pytest.raises(LimpetError, match=message):
            command.run(name, **small(name, tmp_path, **more))


def test_the_study_command_lists_studies_and_presets(capsys):
    assert study_command.run("list", json=True) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"studies", "presets"}
    assert study_command.run("list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*STUDIES, *PRESETS))


def test_small_things():
    assert [checkpoint(name) for name in ("exact:words", "mini", "mini-distilled")] == ["", "Duo", "Duo-distilled"]
    assert percent(1, 4) == (25, "%", 4)
    assert percent(0, 5) == (0, "%", 5)
    assert math.isnan(percent(0, 0)[0])
    assert with_error(mean_se([41.0, 43.0])) == "42.0 ± 1.0"
    assert with_error(mean_se([0.8278, 0.8304])) == "0.8291 ± 0.0013"
    assert with_error(mean_se([0.0, 0.0])) == "0"
    assert with_error(mean_se([math.nan, 1.0])) == "none"
