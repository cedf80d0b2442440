"""`limpet audit`: every audit by name, its JSON, its figure, its result read back, and what it refuses."""

from __future__ import annotations

import json
import math
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
    assert get_args(command.Name) == tuple(AUDITS)
    for audit in AUDITS.values():
        assert list(audit.presets) == ["smoke", "mini", "paper"]
        assert all(isinstance(preset, Preset) for preset in audit.presets.values())
        assert audit.presets["paper"].shards == (8200, 8210, 8220, 8230)
        assert audit.presets["paper"].length is None


@pytest.mark.parametrize("name", AUDITS)
def test_every_audit_prints_one_json_document_and_draws(name, capsys, tmp_path):
    command.run(name, preset="smoke", model=ON_EXACT.get(name, ("exact:words",)), json=True, figures=tmp_path)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["audit"], shown.pop("preset")) == (name, "smoke")
    assert shown["rows"]
    assert set(shown["models"]) == {"exact:words"}
    for row in shown["rows"]:
        assert set(row) == {"model", "quantity", "at", "mean", "se", "shards", "unit", "events", "paper"}
        assert row["paper"] == "" or name == "selection"  # the paper has no exact source
        assert len(row["shards"]) == 2
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    back = Result.from_dict(shown)
    assert json.loads(json.dumps(back.to_dict())) == shown
    AUDITS[name].figure(back)


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
        command.run("risk", preset="smoke", model=("exact:words",), figures=tmp_path / "file")


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
