"""The built-in models: small enough, whole, no worse for being stored small, and clear about damage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import limpet
from limpet import judges
from limpet.denoisers import files
from limpet.denoisers.tensors import SCALE, read_tensors
from limpet.errors import LimpetError
from limpet.minis import card
from limpet.training import evaluate
from limpet.training.data import Stream, encode, read_documents

HERE = Path(card.__file__).parent
LOGS = Path(__file__).parents[1] / "recipes" / "minis" / "logs"


@pytest.fixture
def stream() -> Stream:
    """A few pages of validation books, as ids."""
    texts = [page[:5000] for page in read_documents([HERE / "heldout.txt.xz"])[::6]]
    tokenizer = Tokenizer.from_file(str(HERE / "mini" / "tokenizer.json"))
    ids = torch.from_numpy(encode(tokenizer, texts).astype("int64"))
    return Stream(ids, sum(len(text.encode()) for text in texts), 0)


def test_together_they_are_small() -> None:
    assert sum(file.stat().st_size for file in HERE.rglob("*") if file.is_file()) <= 48 * 2**20


def test_they_share_one_tokenizer() -> None:
    first, *others = ((HERE / name / "tokenizer.json").read_bytes() for name in card.NAMES)
    assert others == [first, first]


def row_nats(name: str) -> tuple[torch.nn.Module, evaluate.RowNats, int]:
    if name == "mini-judge":
        judge: Any = judges.load_judge(name, device="cpu")
        return judge.network, evaluate.causal_row_nats(judge.network), 255
    model = files.load(name, device="cpu")
    return model.network, evaluate.duo_row_nats(model.network, model.vocab_size), 256


@pytest.mark.parametrize(("name", "most"), [("mini", 4.5), ("mini-distilled", 4.6), ("mini-judge", 3.5)])
def test_rounding_of_the_stored_size_moves_held_out_nll_by_less_than_a_hundredth(
    name: str, most: float, stream: Stream
) -> None:
    """The weights that were rounded away are not here, but another error of the same law is easily made: uniform over
    one step of each row's scale. With the same times and noise it must not matter."""
    network, nats, predicted = row_nats(name)
    before = evaluate.held_out(nats, stream, 256, predicted, rows=12)
    assert before.nats < most  # the model knows this kind of text: a uniform law would have 8.32
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
    after = evaluate.held_out(nats, stream, 256, predicted, rows=12)
    assert abs(after.nats - before.nats) < 0.01


@pytest.mark.parametrize("name", card.NAMES)
def test_storing_changed_validation_by_less_than_a_hundredth(name: str) -> None:
    found = json.loads((LOGS / "storage.json").read_text())[name]
    assert abs(found["stored"] - found["trained"]) < 0.01


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built-in folders somewhere that a test may break them."""
    for name in card.NAMES:
        shutil.copytree(HERE / name, tmp_path / name)
    for module in (files, judges):
        monkeypatch.setattr(module, "MINIS", tmp_path)
    return tmp_path


def remove(file: Path) -> None:
    file.unlink()


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def scramble(file: Path) -> None:
    file.write_bytes(b"\x00\xff" * 100)


@pytest.mark.parametrize("name", card.NAMES)
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", [remove, cut, scramble])
def test_damage_is_one_sentence(name: str, file: str, damage: Any, copies: Path) -> None:
    damage(copies / name / file)
    with pytest.raises(LimpetError) as caught:
        judges.load_judge(name, device="cpu") if name == "mini-judge" else limpet.load(name, device="cpu")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_card_is_filled_between_its_markers() -> None:
    before = "top\n<!-- a -->\nold\n<!-- end -->\nmiddle\n<!-- b -->\n<!-- end -->\n"
    assert card.fill(before, {"a": "x", "b": "y"}) == (
        "top\n<!-- a -->\nx\n<!-- end -->\nmiddle\n<!-- b -->\ny\n<!-- end -->\n"
    )
    with pytest.raises(LimpetError, match="no place for 'c'"):
        card.fill(before, {"c": "z"})


@pytest.mark.parametrize("name", card.NAMES)
def test_the_cards_hold_figures(name: str) -> None:
    text = (HERE / name / "README.md").read_text()
    assert "Run `python -m limpet.minis.card`" not in text
    for word in ("## Data", "## Training", "## Held out", "bits per byte", "## What it is not"):
        assert word in text


class Made(card.Lab):
    """A lab whose figures are made up: GenPPL by arm and calls, entropy falling with top-p."""

    def shards(self, cell: card.Cell) -> dict[str, Any]:
        policy = cell.policy
        base = 100.0 * (64 / policy.nfe) ** 0.5 * policy.top_p**5
        perplexity = base * (0.2 if policy.horizon is None else 1.0) * (0.6 if "distilled" in cell.model else 1.0)
        values = perplexity * np.array([0.99, 1.0, 1.0, 1.01])
        entropy = 4.6 - 0.5 * (1 - policy.top_p) - (0.1 if policy.horizon is None else 0.0) + 0 * values
        place = np.array(["float32 on a slide rule"] * 4)
        return {"nll": np.log(values), "perplexity": values, "entropy": entropy, "rep-4": 0 * values, "place": place}

    def real(self) -> dict[str, float]:
        return {"perplexity": 20.0, "entropy": 4.8, "rep-4": 0.001}

    def held_out(self, name: str, split: str) -> dict[str, Any]:
        place = "float64 on an abacus"
        found = {"nats": 3.5, "error": 0.001, "perplexity": 33.1, "bits_per_byte": 1.4, "rows": 100, "draws": 4}
        return {**found, "place": place}


def test_every_block_of_every_card_is_made_from_the_measurements(tmp_path: Path) -> None:
    lab = Made({}, {}, None, None, card.Cache(tmp_path, "a CPU"), 64, None, 4)  # type: ignore[arg-type]
    splits = {
        name: {"documents": 1, "tokens": 20, "bytes": 70, "copies": 0} for name in ("train", "test", "validation")
    }
    (tmp_path / "data.json").write_text(json.dumps({"splits": splits}))
    for name in card.NAMES:
        blocks = dict(card.blocks_of(lab, name, LOGS.parent, tmp_path))
        filled = card.fill((HERE / name / "README.md").read_text(), blocks)
        assert all(content in filled for content in blocks.values())
        assert "Measured in float64 on an abacus." in blocks["held-out"]
        assert name == "mini-judge" or blocks["calls"].endswith("Measured in float32 on a slide rule.")
    wanted = [0.2 / 0.9**5, 0.2]
    sentences = [sentence for sentence, _ in card.findings(lab)]
    for ratio, sentence in zip(wanted, sentences[:2], strict=True):
        assert f"{ratio:.3f} ± 0.000" in sentence
    # At entropy 4.5 the curve stands at top-p .8: ln(100 .8^5), against CRS's ln 20.
    assert f"{np.log(100 * 0.8**5) - np.log(20):.3f} ± 0.000" in sentences[2]
    assert "0.600 ± 0.000" in sentences[3]
    assert [holds for _, holds in card.findings(lab)] == [True] * 4


def test_a_measurement_is_made_once(tmp_path: Path) -> None:
    made = []

    def measure() -> dict[str, Any]:
        made.append(1)
        return {"value": 0.25}

    for _ in range(2):
        cache = card.Cache(tmp_path, "a CPU")
        assert cache.get({"seed": 1}, "float32", measure) == {"value": 0.25, "place": "float32 on a CPU"}
    assert len(made) == 1


def test_shares_of_the_measurements_are_all_of_them() -> None:
    everything = list(range(11))
    assert (
        sorted(card.share(everything, "1/3") + card.share(everything, "2/3") + card.share(everything, "3/3"))
        == everything
    )
    for wrong in ("0/2", "3/2", "1", "a/b", "1/2/3"):
        with pytest.raises(LimpetError, match="--part is I/N"):
            card.share(everything, wrong)
