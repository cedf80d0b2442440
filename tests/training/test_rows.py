"""Rows of fixed length: characters, sudoku boards, what of a row is noised, and the recipes that train on them."""

from __future__ import annotations

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import limpet
from limpet.errors import LimpetError
from limpet.evaluation.checkers import sudoku
from limpet.models.prompt_layouts import LAYOUTS, SUDOKU, SudokuLayout
from limpet.models.tokenizers import HuggingFaceTokenizer
from limpet.training import datasets, heldout, loop, objectives, recipe, rows

CPU = torch.device("cpu")
NINE = SUDOKU["sudoku"]
PROMPT = len(NINE.empty)
LINES = [f"{a}{b}{c}" for a in "CNO" for b in ("=", "#", "", "(F)") for c in ("C", "CC", "N1")]


def decoded(tokenizer: Any, ids: Any) -> str:
    return HuggingFaceTokenizer(tokenizer).decode(ids)


# Characters


def test_characters_survive_a_round_trip() -> None:
    characters = sorted(set(" #()=CNOF12\n"))
    tokenizer = rows.character_tokenizer(characters)
    text = "C1(=O)\n N#C  "
    ids = HuggingFaceTokenizer(tokenizer).encode(text)
    assert ids == [characters.index(letter) for letter in text]
    assert decoded(tokenizer, ids) == text
    with pytest.raises(LimpetError, match="the tokenizer cannot encode a text"):
        HuggingFaceTokenizer(tokenizer).encode("Cx")


@pytest.mark.parametrize(
    ("name", "text"), [("molecules", "O=C1CC(F)1#N"), ("sudoku", "?0123456789=0"), ("sudoku-6x6", "?0123456=0")]
)
def test_the_built_in_tokenizers_hold_what_the_recipes_make(name: str, text: str) -> None:
    tokenizer = limpet.load(name, device="cpu").tokenizer
    assert tokenizer.decode(tokenizer.encode(text)) == text
    if name in SUDOKU:
        characters = SUDOKU[name].characters
        assert tokenizer.encode(characters) == list(range(len(characters)))


@pytest.fixture
def lines(tmp_path: Path) -> recipe.Data:
    file = tmp_path / "lines.txt.xz"
    file.write_bytes(lzma.compress("\n".join([*LINES, LINES[0], ""]).encode()))
    size = len(set(" ".join(LINES)))
    return recipe.Data([str(file)], str(tmp_path / "data"), "lines", size, 8, 0.1, 0.1, split_seed=3)


def test_lines_are_prepared_once_and_split_without_overlap(lines: recipe.Data) -> None:
    assert datasets.open_data(lines) is None
    assert len(list(datasets.prepare_data(lines))) == 2
    corpus = datasets.open_data(lines)
    texts = {name: [decoded(corpus.tokenizer, row) for row in split.ids] for name, split in corpus.splits.items()}
    assert sorted(text.rstrip(" ") for part in texts.values() for text in part) == sorted(LINES)
    assert {name: len(part) for name, part in texts.items()} == {"train": 28, "test": 4, "validation": 4}
    assert all(len(text) == 8 for part in texts.values() for text in part)
    split = corpus.splits["train"]
    assert split.bytes_in_row(8) == pytest.approx(np.mean([len(text.rstrip(" ")) for text in texts["train"]]))
    assert (split.prompt, split.count(8)) == (0, 28)
    again = recipe.Data(**{**vars(lines), "folder": lines.folder + "2"})
    list(datasets.prepare_data(again))
    assert torch.equal(datasets.open_data(again).splits["test"].ids, corpus.splits["test"].ids)
    with pytest.raises(LimpetError, match="was prepared with split_seed 3, not 4"):
        datasets.open_data(replace(lines, split_seed=4))


def test_lines_that_do_not_fit_are_refused(lines: recipe.Data, tmp_path: Path) -> None:
    wrong = [
        (replace(lines, vocab_size=50), "vocab_size is 50; these lines take"),
        (replace(lines, length=3), "a line is longer than 3 characters"),
        (replace(lines, validation=0.0), "leave a split empty"),
    ]
    for data, sentence in wrong:
        with pytest.raises(LimpetError, match=sentence):
            list(datasets.prepare_data(data))
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(LimpetError, match="no line in"):
        list(datasets.prepare_data(replace(lines, files=[str(tmp_path / "empty")])))


# Sudoku


@pytest.fixture(scope="module")
def boards(tmp_path_factory: pytest.TempPathFactory) -> recipe.Data:
    folder = tmp_path_factory.mktemp("boards") / "data"
    data = recipe.Data([], str(folder), "sudoku", 12, 164, 0.1, 0.1, split_seed=2, boards=100)
    list(datasets.prepare_data(data))
    return data


@pytest.mark.parametrize(("layout", "fewest", "most"), [(NINE, 17, 60), (SUDOKU["sudoku-6x6"], 8, 26)])
def test_a_row_is_a_puzzle_and_its_solution(layout: SudokuLayout, fewest: int, most: int) -> None:
    bases = torch.from_numpy(sudoku.base_boards(50, 0, layout.board))
    full = sudoku.random_symmetries(bases.repeat(8, 1)).long()
    clues, prompt = recipe.Clues(fewest, most, 0.15), len(layout.empty)
    found = rows.sudoku_rows(layout, full, clues, torch.Generator().manual_seed(0))
    assert found.shape == (400, layout.length)
    assert torch.equal(found[:, prompt:], full)
    puzzles = found[:, 1 : prompt - 1]
    assert ((puzzles == 0) | (puzzles == full)).all()
    counts = (puzzles > 0).sum(1)
    drawn = counts[counts > 0]
    assert fewest <= int(drawn.min()) < fewest + 3
    assert most - 3 < int(drawn.max()) <= most
    assert 0.09 < float((counts == 0).float().mean()) < 0.21
    text = decoded(rows.character_tokenizer(layout.characters), found[0].tolist())
    assert layout.write(text[:prompt]) == text[:prompt]
    assert len(text) == layout.length


def test_prepared_boards_are_valid_and_split(boards: recipe.Data) -> None:
    corpus = datasets.open_data(boards)
    train, held_out = corpus.splits["train"], corpus.splits["validation"]
    assert (len(train.ids), len(held_out.ids), len(corpus.splits["test"].ids)) == (80, 10, 10)
    clues, solutions = held_out.ids[:, 1 : PROMPT - 1], held_out.ids[:, PROMPT:]
    assert sudoku.is_valid(train.ids.numpy()).all()
    assert sudoku.is_valid(solutions.numpy()).all()
    assert ((clues == 0) | (clues == solutions)).all()
    assert (train.prompt, held_out.prompt) == (PROMPT, PROMPT)
    torch.manual_seed(5)
    batch = train.batch(164, 64, 0, 0)
    torch.manual_seed(5)
    assert torch.equal(batch, train.batch(164, 64, 0, 0))
    assert sudoku.is_valid(batch[:, PROMPT:].numpy()).all()
    known = {tuple(board) for board in train.ids.tolist()}
    assert not {tuple(board) for board in batch[:, PROMPT:].tolist()} & known  # a symmetry of each, not itself


def test_noise_and_loss_fall_on_the_solution_alone(boards: recipe.Data) -> None:
    clean = datasets.open_data(boards).splits["validation"].rows(torch.arange(8), 164)
    noisy = objectives.add_noise(clean, torch.full((8,), 0.1), 12, torch.Generator().manual_seed(0), PROMPT)
    assert torch.equal(noisy[:, :PROMPT], clean[:, :PROMPT])
    assert (noisy[:, PROMPT:] != clean[:, PROMPT:]).float().mean() > 0.7
    network = loop.network_of(small("sudoku", boards))
    signal = torch.full((8,), 0.5, dtype=torch.float64)
    assert heldout.token_nats(network, clean, noisy, signal, prompt=PROMPT).shape == (8, NINE.board.cells)
    assert heldout.held_out(network, datasets.open_data(boards).splits["test"], 4).rows == 4


@pytest.mark.parametrize("clues", [{"fewest": 40, "most": 30}, {"fewest": -1}, {"none": 1.5}])
def test_impossible_clues_are_refused(clues: dict[str, Any]) -> None:
    with pytest.raises(LimpetError, match=r"fewest is|none is"):
        recipe.Clues(**clues)


# Recipes


def small(name: str, data: recipe.Data, **changes: Any) -> recipe.Recipe:
    """A recipe on other data, with a small network and a few steps."""
    plan = recipe.read(f"{name}-cpu")
    run = replace(plan.run, seconds=0.0, **{"steps": 6, "batch": 8, "validate_every": 3, "validate_rows": 4, **changes})
    sizes = replace(plan.sizes, width=16, heads=2, blocks=1, hidden=32, cond=8)
    return replace(plan, data=data, run=run, sizes=sizes)


def test_learned_positions_begin_with_what_the_cells_of_a_unit_share() -> None:
    plan = recipe.read("sudoku-6x6")
    positions = loop.network_of(plan).vocab_embed.positions.detach()
    board = SUDOKU["sudoku-6x6"].board
    near = torch.nn.functional.cosine_similarity(positions[:, None], positions[None], dim=-1)
    puzzle, solution = near[1:37, 38:], near[38:, 38:]
    shared = torch.zeros(36, 36)
    for unit in board.units.values():
        shared[torch.tensor(unit)[:, None], torch.tensor(unit)] += 1
    assert puzzle.diagonal().min() > 0.7  # a clue and its cell
    assert solution[shared == 2].mean() > solution[shared == 1].mean() + 0.1 > solution[shared == 0].mean() + 0.2


@pytest.mark.parametrize("name", ["molecules", "sudoku"])
def test_both_recipes_describe_the_same_model(name: str) -> None:
    one, other = recipe.read(name), recipe.read(f"{name}-cpu")
    assert (one.sizes, one.data, one.checker) == (other.sizes, other.data, other.checker)
    network = loop.network_of(one)
    shape = limpet.load(name, device="cpu").network.shape
    assert network.shape == shape
    assert sum(p.numel() for p in network.parameters()) < {"molecules": 4e6, "sudoku": 2.5e6}[name]


@pytest.mark.parametrize("name", ["molecules", "sudoku"])
def test_a_few_steps_on_a_cpu_make_a_model_that_samples(
    name: str, lines: recipe.Data, boards: recipe.Data, tmp_path: Path
) -> None:
    data = lines if name == "molecules" else boards
    if name == "molecules":
        list(datasets.prepare_data(data))
    corpus, reports = datasets.open_data(data), []
    loop.train(small(name, data), corpus, tmp_path / name, CPU, reports.append)
    assert reports[-1].step == 6
    assert reports[-1].validation is not None
    model = limpet.load(tmp_path / name, device="cpu")
    assert model.checker == name
    assert model.prompt_layout == LAYOUTS.get(name)
    assert len(limpet.sample(model, "native nfe=2", n=1).texts[0]) == data.length


def test_a_checkpoint_from_before_recipes_named_a_checker_is_taken_up(boards: recipe.Data, tmp_path: Path) -> None:
    corpus, plan = datasets.open_data(boards), small("sudoku", boards)
    trainer = loop.Trainer(replace(plan, checker=""), corpus, CPU)
    trainer.step()
    trainer.save(tmp_path / "checkpoint", is_small=True)
    other = loop.Trainer(plan, corpus, CPU)
    other.load(tmp_path / "checkpoint")
    assert other.steps == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_a_captured_update_is_the_ordinary_one(boards: recipe.Data) -> None:
    corpus, device = datasets.open_data(boards), torch.device("cuda")
    losses = []
    for graph in (False, True):
        trainer = loop.Trainer(small("sudoku", boards, graph=graph), corpus, device)
        losses.append([float(trainer.step()) for _ in range(8)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
