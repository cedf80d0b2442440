"""`limpet paper reproduce`: it reports everything that is missing, resumes, and ends with the claims."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from limpet.cli.paper import reproduce
from limpet.errors import LimpetError
from limpet.experiments import ModelCache, Store, report
from limpet.paper import studies

DOCS = Path(__file__).parents[2] / "docs"
EVERY = {*studies.STUDIES, *studies.AUDITS} - set(studies.NOT_IN_PAPER)


def models_of(cell):
    return getattr(cell, "models", None) or (cell.model,)


def test_the_whole_paper_is_every_study_and_audit_of_the_paper():
    for name in ("paper", "mini", "mini-gpu", "smoke", "rehearsal"):
        assert {one.name for one in studies.all_studies(studies.preset(name))} == EVERY
    with pytest.raises(LimpetError, match="audits have no preset 'exact'"):
        studies.all_studies(studies.preset("exact"))


def test_the_paper_preset_names_the_released_checkpoints_and_judges():
    """Audits use the distilled checkpoint alone where the paper does."""
    for one in studies.all_studies(studies.preset("paper")):
        assert one.seeds == (8200, 8210, 8220, 8230)
        models = {name for cell in one.cells for name in models_of(cell)}
        assert models <= {"s-sahoo/duo", "s-sahoo/duo-distilled"}
        if one.name in studies.AUDITS:
            both = one.name in ("selection", "risk")
            assert models == {"s-sahoo/duo-distilled", *(["s-sahoo/duo"] if both else [])}
            assert studies.audit_presets(one.name)["paper"].precision == "float32"
        else:
            assert [judge.name for judge in one.judges] == ["gpt2-large", "EleutherAI/pythia-1.4b"]


def test_a_rehearsal_is_the_paper_preset_with_other_models(tmp_path):
    """The same cells by the same samplers, except for their sizes; every name of the hub has its folder."""
    folders, size = reproduce.hub_replacements(tmp_path), studies.preset("rehearsal")
    assert all((Path(folder) / "tokenizer.json").is_file() for folder in folders.values())
    paper = studies.all_studies(studies.preset("paper"))
    for ours, papers in zip(studies.all_studies(size, folders), paper, strict=True):
        names = [{cell.name for cell in one.sample_cells} for one in (ours, papers)]
        assert names[0] == names[1] or ours.name == "nfe-scaling"
        assert [judge.convention for judge in ours.judges] == [judge.convention for judge in papers.judges]
        for cell in studies.with_length(ours, 64).cells:
            assert all(Path(model).is_dir() and model.startswith(str(tmp_path)) for model in models_of(cell))
            assert (cell.settings.length if hasattr(cell, "settings") else cell.length) in (64, size.prompted_length)
    assert reproduce.hub_replacements(tmp_path) == folders


def test_everything_that_is_missing_is_reported_at_once(tmp_path, capsys):
    size = studies.preset("smoke")
    prompts = replace(size.prompts, texts=str(tmp_path / "no-prompts.txt"))
    every = [
        studies.study("final-step", replace(size, base=str(tmp_path / "no-model"))),
        studies.study("continuation", replace(size, prompts=prompts)),
        studies.study("storage", size),
    ]
    with pytest.raises(LimpetError, match="2 of the things needed are missing"):
        reproduce.resolve_all(every, ModelCache())
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["final-step", "continuation"]
    assert "no-model" in lines[0]
    assert "no-prompts.txt" in lines[1]
    assert len(reproduce.resolve_all(every[2:], ModelCache())) == 1


@pytest.fixture
def some(monkeypatch):
    """An audit and a study of the rehearsal, whose cost is estimated without measuring."""
    monkeypatch.setattr(reproduce, "_time_second_run", lambda work, device: 1.0)
    every, keep = studies.all_studies, {"singleton", "final-step"}
    monkeypatch.setattr(studies, "all_studies", lambda *sizes: [one for one in every(*sizes) if one.name in keep])


def test_it_ends_with_the_claims_and_resumes(some, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert reproduce.run(rehearse=True) == 0
    first = capsys.readouterr()
    assert "units to compute, 0 found" in first.err
    assert "in one process here" in " ".join(first.err.split())
    document = json.loads((tmp_path / "limpet-reproduction" / reproduce.FILE).read_text())
    assert [one["study"] for one in document["studies"]] == ["singleton", "final-step"]
    assert all(one["claims"] and one["provenance"]["computed on"] for one in document["studies"])
    assert document["tally"] in first.out.replace("\n", " ")
    claims = [claim for one in document["studies"] for claim in one["claims"]]
    assert first.out.count("├") == len(claims) - 1  # a rule between every two
    page = (tmp_path / "limpet-reproduction/claims.md").read_text()
    assert all(claim["text"] in page for claim in claims)

    (plan,) = (tmp_path / "limpet-store/plans/final-step-rehearsal").iterdir()
    lost = json.loads(plan.read_text())["cells"][0]["keys"][0]
    rows = tmp_path / f"limpet-store/units/{lost[:2]}/{lost}/rows.json"
    before = rows.read_bytes()
    rows.write_bytes(before[:100])  # as if the power had been cut
    assert reproduce.run(rehearse=True) == 0
    again = " ".join(capsys.readouterr().err.split())
    assert "1 units to compute" in again
    assert "final-step-rehearsal: 1 units computed, 15 found" in again
    assert rows.read_bytes() == before
    assert json.loads((tmp_path / "limpet-reproduction" / reproduce.FILE).read_text()) == document


def test_the_page_of_claims_is_written_from_committed_numbers(tmp_path, capsys):
    assert reproduce.run(preset="mini-gpu", from_folder=DOCS / "reports/mini", out_folder=tmp_path, json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tally"] in (DOCS / "reproduce.md").read_text()
    every = studies.all_studies(studies.preset("mini-gpu"))
    entries = [report.index_entry(report.read_report(one, tmp_path / one.full_name)) for one in every]
    assert report.count_verdicts(entries) == document["tally"]


def test_the_cost_counts_what_is_not_in_the_store(tmp_path):
    size = studies.preset("smoke")
    every = [studies.study(name, size) for name in ("interaction", "factorial")]  # they share their cells
    cost = reproduce.estimate_cost(reproduce.resolve_all(every, ModelCache()), Store(tmp_path), None)
    cells = {cell.name: cell for one in every for cell in one.sample_cells}
    assert (cost.units, cost.found, cost.seconds) == (2 * len(cells), 0, None)
    assert cost.tokens == 2 * sum(cell.n * cell.sampler.nfe * 160 for cell in cells.values())
    assert cost.judged == 2 * sum(cell.n * 160 for cell in cells.values())
    assert str(cost).startswith(f"{2 * len(cells)} units to compute, 0 found: {cost.tokens:,} tokens")
    assert str(cost._replace(units=0, found=40)) == "all 40 units are in the store"


@pytest.mark.long
def test_the_rehearsal_resumes_after_it_was_killed(tmp_path):
    """Every study and audit in a fresh folder, without a network; killed after the first unit of three studies."""
    command = [sys.executable, "-m", "limpet.cli.main", "paper", "reproduce", "--rehearse", "--json"]
    proxy = "http://127.0.0.1:9"
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "http_proxy": proxy, "https_proxy": proxy}
    for name in ("singleton", "risk", "warmup"):
        running = subprocess.Popen(command, cwd=tmp_path, env=offline, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while running.poll() is None and not list(tmp_path.glob(f"limpet-store/plans/{name}-rehearsal/*")):
            running.stderr.read1(1)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    finished = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, check=True)
    document = json.loads(finished.stdout)
    assert {one["study"] for one in document["studies"]} == EVERY
    assert document["failed"] == {}
    assert sum(len(one["claims"]) for one in document["studies"]) > 60
