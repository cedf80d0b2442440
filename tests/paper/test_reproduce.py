"""`limpet reproduce`: what is missing is said at once, what is done is not done again, and it ends with the claims."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from limpet.cli import reproduce
from limpet.errors import LimpetError
from limpet.experiments import Shelf, Store, report, units
from limpet.paper import studies

DOCS = Path(__file__).parents[2] / "docs"
EVERY = {*studies.STUDIES, *studies.AUDITS} - set(studies.OWN)


def test_the_whole_paper_is_every_study_and_audit_that_is_not_our_own():
    for name in ("paper", "mini", "mini-gpu", "smoke", "rehearsal"):
        assert {one.name for one in studies.whole(studies.preset(name))} == EVERY
    with pytest.raises(LimpetError, match="audits have no preset 'exact'"):
        studies.whole(studies.preset("exact"))


def test_the_paper_preset_names_the_released_checkpoints_and_judges():
    """Audits too: of the distilled one alone where the paper looks at that alone."""
    for one in studies.whole(studies.preset("paper")):
        assert one.shards == (8200, 8210, 8220, 8230)
        models = {name for cell in one.cells for name in getattr(cell, "models", None) or (cell.model,)}
        assert models <= {"s-sahoo/duo", "s-sahoo/duo-distilled"}
        if one.name in studies.AUDITS:
            both = one.name in ("selection", "risk")
            assert models == {"s-sahoo/duo-distilled", *(["s-sahoo/duo"] if both else [])}
            assert import_module(f"limpet.paper.studies.{one.name}").PRESETS["paper"].precision == "float32"
        else:
            assert [judge.name for judge in one.judges] == ["gpt2-large", "EleutherAI/pythia-1.4b"]


def test_a_rehearsal_is_the_paper_preset_with_stand_ins(tmp_path):
    """The same cells by the same samplers, but for their sizes; every hub name has its folder."""
    stand = reproduce.stand_ins(tmp_path)
    size = studies.preset("rehearsal")
    for ours, papers in zip(studies.whole(size, stand), studies.whole(studies.preset("paper")), strict=True):
        assert {cell.name for cell in ours.samples if "/" not in cell.name or "nfe" not in ours.name} == {
            cell.name for cell in papers.samples if "/" not in cell.name or "nfe" not in papers.name
        }
        assert [judge.convention for judge in ours.judges] == [judge.convention for judge in papers.judges]
        for cell in studies.shortened(ours, 64).cells:
            models = getattr(cell, "models", None) or (cell.model,)
            assert all(Path(model).is_dir() and model.startswith(str(tmp_path)) for model in models)
            assert (cell.settings.length if hasattr(cell, "settings") else cell.length) in (64, size.prompted_length)
    assert reproduce.stand_ins(tmp_path) == stand  # and is not copied again


def test_all_that_is_missing_is_said_at_once(tmp_path, capsys):
    size = studies.preset("smoke")
    made = [
        studies.study("final_step", replace(size, base=str(tmp_path / "no-model"))),
        studies.study("prefix", replace(size, prompts=replace(size.prompts, texts=str(tmp_path / "no-prompts.txt")))),
        studies.study("storage", size),
    ]
    with pytest.raises(LimpetError, match="2 cannot be had, as said above: nothing was begun"):
        reproduce.needed(made, Shelf())
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["final_step", "prefix"]
    assert "no-model" in said[0]
    assert "no-prompts.txt" in said[1]
    assert len(reproduce.needed(made[2:], Shelf())) == 1


@pytest.fixture
def some(monkeypatch):
    """Two audits and a study, of the rehearsal."""
    whole = studies.whole
    keep = {"risk", "singleton", "final_step"}
    monkeypatch.setattr(
        studies, "whole", lambda *given, **more: [one for one in whole(*given, **more) if one.name in keep]
    )


def test_it_ends_with_the_claims_and_goes_on_where_it_was(some, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert reproduce.run(rehearse=True) == 0
    first = capsys.readouterr()
    assert "units to make, 0 found" in first.err
    assert "in one process here" in " ".join(first.err.split())
    kept = json.loads((tmp_path / "limpet-reproduction" / reproduce.FILE).read_text())
    assert [one["study"] for one in kept["studies"]] == ["singleton", "risk", "final_step"]
    assert all(one["claims"] and one["provenance"]["made on"] for one in kept["studies"])
    assert kept["tally"] in first.out.replace("\n", " ")
    claims = [claim for one in kept["studies"] for claim in one["claims"]]
    assert first.out.count("├") == len(claims) - 1  # a rule between every two
    page = (tmp_path / "limpet-reproduction/claims.md").read_text()
    assert all(claim["text"] in page for claim in claims)

    (plan,) = (tmp_path / "limpet-store/plans/final_step-rehearsal").iterdir()
    lost = json.loads(plan.read_text())["cells"][0]["keys"][0]
    rows = tmp_path / f"limpet-store/units/{lost[:2]}/{lost}/rows.json"
    before = rows.read_bytes()
    rows.write_bytes(before[:100])  # as if the plug had been pulled
    assert reproduce.run(rehearse=True) == 0
    again = " ".join(capsys.readouterr().err.split())
    assert "1 units to make" in again
    assert "final_step-rehearsal: 1 units made, 15 found" in again
    assert rows.read_bytes() == before
    assert json.loads((tmp_path / "limpet-reproduction" / reproduce.FILE).read_text()) == kept


def test_the_page_of_claims_is_made_from_committed_numbers(tmp_path, capsys):
    assert reproduce.run(preset="mini-gpu", from_folder=DOCS / "reports/mini", out_folder=tmp_path, json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tally"] in (DOCS / "reproduce.md").read_text()
    made = studies.whole(studies.preset("mini-gpu"))
    sections = [report.section(report.read(one, tmp_path / units.name(one))) for one in made]
    assert report.tally(sections) == document["tally"]


def test_a_bill_counts_what_is_not_there_yet(tmp_path):
    size = studies.preset("smoke")
    made = [studies.study(name, size) for name in ("interaction", "factorial")]  # which share their cells
    found = reproduce.bill(reproduce.needed(made, Shelf()), Store(tmp_path), None)
    cells = {cell.name: cell for one in made for cell in one.samples}
    assert (found.units, found.found, found.seconds) == (2 * len(cells), 0, None)
    assert found.tokens == 2 * sum(cell.n * cell.sampler.nfe * 160 for cell in cells.values())
    assert found.judged == 2 * sum(cell.n * 160 for cell in cells.values())
    assert str(found).startswith(f"{2 * len(cells)} units to make, 0 found: {found.tokens:,} tokens")
    assert str(found._replace(units=0, found=40)) == "all 40 units are there"


@pytest.mark.long
def test_the_rehearsal_killed_at_any_moment_goes_on(tmp_path):
    """Every study and audit in a fresh folder, without a network, within a quarter of an hour; killed three times."""
    command = [sys.executable, "-m", "limpet.cli.main", "reproduce", "--rehearse", "--json"]
    offline = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    begun = time.monotonic()
    for seconds in (15, 40, 25):
        running = subprocess.Popen(command, cwd=tmp_path, env=offline, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(seconds)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert {one["study"] for one in document["studies"]} == EVERY
    assert document["failed"] == {}
    claims = sum(len(one["claims"]) for one in document["studies"])
    committed = [report.read(one, DOCS / f"reports/mini/{units.name(one)}")
                 for one in studies.whole(studies.preset("mini-gpu"))]  # fmt: skip
    assert claims == sum(len(one.study.build_report(one).claims) for one in committed)
    assert time.monotonic() - begun < 900
