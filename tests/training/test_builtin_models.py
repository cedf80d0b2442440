"""The command that installs trained weights as built-in models, and what it keeps of their logs."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import builtin_models as tool
import limpet
from limpet.evaluation.checkers import molecules
from limpet.evaluation.checkers.hashes import HashSet
from limpet.models import model_files, tokenizers
from limpet.models.model_files import BUILTIN_FOLDER
from limpet.training.data import Corpus
from limpet.training.rows import RowTable, character_tokenizer, line_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import train as training_command


def row(step: int, validation: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {"step": step, "fraction": step / 400, "loss": 1.0, "seconds": step / 10, "validation": validation, **more}


def test_a_log_is_joined_to_the_run_that_it_goes_on_from() -> None:
    first = tool.merged_log([], [row(50, None), row(100), row(150, None), row(200)])
    assert [(one["step"], one["run"]) for one in first] == [(100, 1), (200, 1)]
    second = tool.merged_log(first, [row(160, None), row(300), row(400)])
    assert [(one["step"], one["run"]) for one in second] == [(100, 1), (300, 2), (400, 2)]
    anew = tool.merged_log(second, [row(50, None), row(100)])
    assert [(one["step"], one["run"]) for one in anew] == [(100, 1)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built-in folder and the logs, in a place where a test may write."""
    folder = tmp_path / "builtin"
    folder.mkdir()
    for module in (tool, model_files, tokenizers):
        monkeypatch.setattr(module, "BUILTIN_FOLDER", folder)
    monkeypatch.setattr(tool, "LOGS", tmp_path / "logs")
    return folder


@pytest.mark.parametrize(("name", "packed"), [("sudoku", False), ("sudoku", True), ("sudoku-6x6", False)])
def test_a_trained_folder_becomes_a_built_in_model(elsewhere: Path, tmp_path: Path, name: str, packed: bool) -> None:
    trained = tmp_path / name
    limpet.load(str(BUILTIN_FOLDER / name), device="cpu").save(trained, storage="bfloat16")
    config = json.loads((trained / "config.json").read_text())
    del config["checker"], config["layout"]
    (trained / "config.json").write_text(json.dumps(config))
    (trained / "log.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (row(50, None), row(100))))
    source = trained
    if packed:
        source = tmp_path / f"{name}.tar"
        with tarfile.open(source, "w") as archive:
            archive.add(trained, name)
    tool.install(name, tool.trained_files(source))
    model = limpet.load(name, device="cpu")
    assert (model.info["source"], model.checker, model.prompt_layout.name) == ("built in", "sudoku", name)
    assert model.digest == limpet.load(str(BUILTIN_FOLDER / name), device="cpu").digest
    assert [one["step"] for one in tool.read_log(tool.LOGS / f"{name}.jsonl")] == [100]


def test_what_ships_about_the_training_molecules(elsewhere: Path) -> None:
    pytest.importorskip("rdkit")
    (elsewhere / "molecules").mkdir()
    tokenizer = character_tokenizer(sorted(set(" CNO=")))
    parts = {"train": ["CCO", "OCC", "CC=O"], "validation": ["CN"], "test": ["CCN", "NN"]}
    splits = {
        name: RowTable(torch.from_numpy(line_rows(tokenizer, part, 6).astype(int)), 9) for name, part in parts.items()
    }
    tool.derive("molecules", Corpus(tokenizer, splits))
    training = HashSet.load(elsewhere / "molecules" / molecules.TRAINING)
    assert len(training) == 2  # two strings write the same molecule
    assert "CCO" in training
    assert training.about.startswith("written with RDKit 20")
    checker = molecules.MoleculeChecker(elsewhere / "molecules")
    assert checker.held_out == {"atoms": {2: 2, 3: 1}, "rings": {0: 3}, "length": {2: 2, 3: 1}}


def test_an_unknown_folder_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path / "chess.tar")]) == 2
    assert "is named 'chess'; the models here are molecules, sudoku, sudoku-6x6" in capsys.readouterr().err


@pytest.mark.parametrize("name", tool.TASKS)
def test_the_cards_hold_the_stored_figures(name: str) -> None:
    card = (BUILTIN_FOLDER / name / "README.md").read_text()
    found = json.loads((tool.LOGS / f"{name}.json").read_text())
    assert found["digest"] == limpet.load(name, device="cpu", precision=found["precision"]).digest
    assert tool.quality_block(name, found) in card
    assert tool.held_out_block(name, found) in card
    assert tool.training_block(name, found) in card
    for task in tool.TASKS[name]:
        rows = [one for one in found["rows"] if one["task"] == task.name and one["nfe"]]
        assert {(one["sampler"], one["nfe"]) for one in rows} == {(s, k) for s in tool.SAMPLERS for k in tool.NFE}


@pytest.mark.parametrize("name", tool.TASKS)
def test_the_quick_check_after_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = limpet.sample
    monkeypatch.setattr(limpet, "sample", lambda model, sampler, **options: sample(model, "mend nfe=4", **options))
    check = training_command.check_molecules if name == "molecules" else training_command.check_sudoku
    found = check(BUILTIN_FOLDER / name, "cpu", 2)
    assert all(0 <= value <= 1 for key, value in found.items() if "valid" in key or "solved" in key)
    assert len(found) == (5 if name == "molecules" else 6)
