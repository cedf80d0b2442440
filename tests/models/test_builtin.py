"""The built-in models: small enough, complete, hardly changed by their int8 storage, and clear about damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import limpet
from limpet.errors import LimpetError
from limpet.evaluation import checkers, judges
from limpet.models import model_files, tokenizers
from limpet.models.tensor_files import SCALE, read_tensors
from limpet.training import heldout
from limpet.training.data import Stream, encode, read_documents

HERE = model_files.BUILTIN_FOLDER
NAMES = ("mini", "mini-distilled", "mini-judge")  # of text
CHECKED = {"molecules": "molecules", "sudoku": "sudoku", "sudoku-6x6": "sudoku"}  # models with a checker
LOGS = Path(__file__).parents[2] / "recipes" / "logs"


@pytest.fixture
def stream() -> Stream:
    """A few pages of validation books, as ids."""
    texts = [page[:5000] for page in read_documents([HERE / "heldout.txt.xz"])[::6]]
    tokenizer = Tokenizer.from_file(str(HERE / "tokenizer.json"))
    ids = torch.from_numpy(encode(tokenizer, texts).astype("int64"))
    return Stream(ids, sum(len(text.encode()) for text in texts), 0)


def test_they_are_small() -> None:
    sizes = {name: sum(file.stat().st_size for file in (HERE / name).iterdir()) for name in (*NAMES, *CHECKED)}
    assert sum(sizes[name] for name in NAMES) <= 47 * 2**20
    assert all(sizes[name] <= 8e6 for name in CHECKED)
    assert sum(file.stat().st_size for file in HERE.rglob("*") if file.is_file()) <= 60 * 2**20


def test_those_of_text_share_one_tokenizer_and_are_saved_with_it(tmp_path: Path) -> None:
    own = [Path("tokenizer.json"), *(Path(name) / "tokenizer.json" for name in CHECKED)]
    assert sorted(file.relative_to(HERE) for file in HERE.rglob("tokenizer.json")) == sorted(own)
    mini, judge = limpet.load("mini", device="cpu"), judges.load_judge("mini-judge", device="cpu")
    assert mini.tokenizer.digest == judge.tokenizer.digest
    mini.save(tmp_path / "copy", storage="int8")
    copy = limpet.load(tmp_path / "copy", device="cpu")
    text = "The tide turned, and the limpets held on."
    assert copy.tokenizer.encode(text) == mini.tokenizer.encode(text)
    assert copy.tokenizer.decode(copy.tokenizer.encode(text)) == text
    model_files.copy_builtin("mini-distilled", tmp_path / "twin")
    twin = limpet.load(tmp_path / "twin", device="cpu")
    assert twin.tokenizer.digest == mini.tokenizer.digest
    assert twin.digest == limpet.load("mini-distilled", device="cpu").digest


@pytest.mark.parametrize(
    ("name", "most"), [("mini", 4.5), ("mini-judge", 3.5), pytest.param("mini-distilled", 4.6, marks=pytest.mark.long)]
)
def test_rounding_of_the_stored_size_moves_held_out_nll_by_less_than_a_hundredth(
    name: str, most: float, stream: Stream
) -> None:
    """The original weights are not here, so a second error of the same size is added: uniform over one step of each
    row's scale. With the same times and noise it must not matter."""
    load: Any = judges.load_judge if name == "mini-judge" else limpet.load
    network = load(name, device="cpu").network
    before = heldout.held_out(network, stream, rows=12)
    assert before.nats < most  # the model knows this kind of text: a uniform distribution would have 8.32
    scales = {
        key.removeprefix("backbone.").removesuffix(SCALE): value
        for key, value in read_tensors(HERE / name / "model.safetensors").items()
        if key.endswith(SCALE)
    }
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, p in network.named_parameters():
            if key in scales:
                p += scales[key][:, None] * (torch.rand(p.shape, generator=generator) - 0.5)
    after = heldout.held_out(network, stream, rows=12)
    assert abs(after.nats - before.nats) < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_storing_changed_validation_by_less_than_a_hundredth(name: str) -> None:
    found = json.loads((LOGS / "storage.json").read_text())[name]
    assert abs(found["stored"] - found["trained"]) < 0.01


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built-in files in a folder where a test may damage them."""
    shutil.copytree(HERE, tmp_path, dirs_exist_ok=True)
    for module in (model_files, tokenizers, judges):
        for name in {"BUILTIN_FOLDER", "MINIS"} & vars(module).keys():
            monkeypatch.setattr(module, name, tmp_path)
    return tmp_path


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def scramble(file: Path) -> None:
    file.write_bytes(b"\x00\xff" * 100)


@pytest.mark.parametrize("name", [*NAMES, *CHECKED])
def test_damage_is_one_sentence(name: str, copies: Path) -> None:
    tokenizer = copies / name / "tokenizer.json" if name in CHECKED else copies / "tokenizer.json"
    for file in (copies / name / "model.safetensors", copies / name / "config.json", tokenizer):
        content = file.read_bytes()
        for damage in (remove, cut, scramble):
            damage(file)
            with pytest.raises(LimpetError) as caught:
                judges.load_judge(name, device="cpu") if name == "mini-judge" else limpet.load(name, device="cpu")
            assert "\n" not in str(caught.value)
            assert len(str(caught.value)) < 400
            file.write_bytes(content)


@pytest.mark.parametrize("name", CHECKED)
def test_those_with_a_checker_name_it_and_keep_their_tokenizer(name: str, tmp_path: Path) -> None:
    model = limpet.load(name, device="cpu")
    assert model.checker == CHECKED[name]
    assert model.checker in checkers.BUILTIN
    assert model.vocab_size == len(model.tokenizer.decode(range(model.vocab_size)))
    model_files.copy_builtin(name, tmp_path / "copy")
    copy = limpet.load(tmp_path / "copy", device="cpu")
    assert (copy.digest, copy.tokenizer.digest, copy.checker) == (model.digest, model.tokenizer.digest, CHECKED[name])


@pytest.mark.parametrize("name", [*NAMES, *CHECKED])
def test_the_cards_hold_figures(name: str) -> None:
    text = (HERE / name / "README.md").read_text()
    assert "Run `python tools/card.py`" not in text
    for word in ("## Data", "## Training", "## Held out", "nats per", "## What it is not"):
        assert word in text
