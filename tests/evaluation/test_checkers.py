"""The checkers of molecules and brackets, and the hashes that tell known molecules from new ones."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import limpet
from limpet.cli.main import main
from limpet.errors import LimpetError
from limpet.evaluation import evaluate
from limpet.evaluation.checkers import BUILTIN, find_checker, molecules
from limpet.evaluation.checkers.grammar import leaf_shares, leaves
from limpet.evaluation.checkers.hashes import SPACE, HashSet
from limpet.evaluation.checkers.molecules import read_molecule, total_variation
from limpet.models.brackets import is_balanced
from limpet.models.model_files import BUILTIN_FOLDER

SMILES = ("NC(=O)C1OCC=C1", "N#CC12CC3CCN1C23", "O=C1CCCC1C#C", "CC(C)(C)O", "C1=CC=CC=C1", "FC(F)(F)C#N")


@pytest.fixture(scope="module")
def chem():
    pytest.importorskip("rdkit")
    from rdkit import Chem, rdBase

    with rdBase.BlockLogs():
        yield Chem


def test_what_is_a_molecule(chem) -> None:
    assert read_molecule("OCC   ") == read_molecule("OCC")
    assert read_molecule("OCC").canonical == read_molecule("C(O)C").canonical == chem.CanonSmiles("CCO")
    for text in ("", "   ", "C C", " CC", "C.C", "C1CC", "C(C", "CFC", "name", "C\n"):
        assert read_molecule(text) is None, text
    benzene = read_molecule("C1=CC=CC=C1")
    assert (benzene.atoms, benzene.rings, benzene.length, benzene.scaffold) == (6, 1, 11, "c1ccccc1")


def test_the_values_of_a_set(chem, tmp_path: Path) -> None:
    known = [read_molecule(text).canonical for text in ("CCO", "CC")]
    HashSet.of(known, "written for a test").save(tmp_path / molecules.TRAINING)
    (tmp_path / molecules.HELD_OUT).write_text('{"atoms": {"2": 1, "3": 1}, "rings": {"0": 2}, "length": {"2": 2}}')
    checker = molecules.MoleculeChecker(tmp_path)
    texts = ["CCO  ", "OCC", "CC", "CF", "C(", ""]
    scores = evaluate(texts, metrics=(), checker=checker)
    values = {name: float(column[0]) for name, column in scores.values.items()}
    assert values == pytest.approx(
        {
            "valid": 4 / 6,
            "unique": 3 / 4,
            "novel": 1 / 3,
            "v.u.n.": 1 / 6,
            "scaffolds": 1 / 3,  # none has a ring
            "atoms distance": 0,
            "rings distance": 0,
            "length distance": 0.5,
        }
    )
    assert values["v.u.n."] == pytest.approx(values["valid"] * values["unique"] * values["novel"])
    assert set(scores.measures) <= set(checker.conventions)
    nothing = evaluate(["C(", "("], metrics=(), checker=checker).values
    assert nothing["valid"] == nothing["v.u.n."] == 0
    assert np.isnan([nothing[name][0] for name in ("unique", "novel", "atoms distance")]).all()


def test_total_variation() -> None:
    assert total_variation({1: 2, 2: 2}, {1: 1, 2: 1}) == 0
    assert total_variation({1: 3}, {2: 5}) == 1
    assert total_variation({1: 1, 2: 1}, {1: 1}) == 0.5
    assert math.isnan(total_variation({}, {1: 1}))


def test_without_rdkit_a_check_is_one_sentence_and_molecules_are_sampled(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rdkit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rdkit", None)
    model = limpet.load("molecules", device="cpu")
    sentence = r"this needs rdkit: pip install 'limpet\[molecules\]'"
    with pytest.raises(LimpetError, match=sentence):
        find_checker("molecules")
    monkeypatch.setattr(type(model), "backbone", lambda *_: pytest.fail("it sampled before it said so"))
    with pytest.raises(LimpetError, match=sentence):
        limpet.compare(model, ["native nfe=2"], n=1, seeds=(1,))
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "rdkit", None)
    assert len(limpet.sample(model, "native nfe=2", n=1).texts[0]) == 24


def test_the_commands_without_rdkit(monkeypatch, capsys) -> None:
    """`sample` needs no checker; `compare` names the extra in one sentence before it samples."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "rdkit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rdkit", None)
    assert main(["sample", "--model", "molecules", "--sampler", "native nfe=2", "--n", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["text"]) == 24
    assert main(["compare", "--model", "molecules", "--nfe", "2", "--n", "1"]) == 2
    error = capsys.readouterr().err
    assert error.count("pip install 'limpet[molecules]'") == 1
    assert "Traceback" not in error


def test_every_way_of_writing_a_molecule_is_the_same_molecule(chem) -> None:
    """Read by RDKit alone: the filter must know a training molecule however a sampler writes it."""
    known = HashSet.of(read_molecule(text).canonical for text in SMILES)
    for number, text in enumerate(SMILES):
        read = chem.MolFromSmiles(text)
        assert read_molecule(text).atoms == sum(text.count(symbol) for symbol in "CNOF") == read.GetNumHeavyAtoms()
        for written in chem.MolToRandomSmilesVect(read, 8, randomSeed=number + 1, kekuleSmiles=True):
            found = read_molecule(written)
            assert found.canonical == read_molecule(text).canonical == chem.CanonSmiles(text)
            assert found.canonical in known


# Hashes


def test_hashes_find_every_text_and_take_few_others_for_one(tmp_path: Path) -> None:
    members = [f"member {i}" for i in range(20_000)]
    found = HashSet.of(members, "about")
    found.save(tmp_path / "set")
    loaded = HashSet.load(tmp_path / "set")
    assert np.array_equal(loaded.hashes, found.hashes)
    assert loaded.about == "about"
    assert all(text in loaded for text in members)
    assert loaded.false_positive_rate == pytest.approx(20_000 / SPACE, rel=1e-3)
    wrong = sum(f"other {i}" in loaded for i in range(60_000))
    assert wrong < 9  # 0.3 are expected


def test_the_false_positive_rate_is_measured_where_it_is_large() -> None:
    """A set that holds one hash in four thousand: as many strangers are found as the stated rate says."""
    rng = np.random.default_rng(0)
    many = HashSet(rng.integers(0, SPACE, SPACE // 4000, dtype=np.uint32))
    wrong = sum(f"other {i}" in many for i in range(20_000))
    expected = 20_000 * many.false_positive_rate
    assert abs(wrong - expected) < 5 * math.sqrt(expected)


def test_the_hashes_that_ship_are_small_and_know_molecules(chem) -> None:
    folder = BUILTIN_FOLDER / "molecules"
    training = HashSet.load(folder / molecules.TRAINING)
    assert len(training) > 120_000
    assert training.false_positive_rate < 1e-4
    assert (folder / molecules.TRAINING).stat().st_size < 300_000
    simple = ("C", "N", "O", "CC", "CCO", "C#N", "C#C", "CC=O", "C1CC1", "CCC", "C1CO1", "CC#N")
    known = [read_molecule(text).canonical in training for text in simple]
    assert sum(known) >= 9  # three in a hundred are held out, and a few are not in the corpus
    assert "not a molecule" not in training
    checker = find_checker("molecules")
    assert sum(checker.held_out["atoms"].values()) > 3900
    assert max(checker.held_out["atoms"]) == 9


# Brackets


def test_the_checker_of_brackets() -> None:
    scores = evaluate(["([]{})", "([]{})", "()", "(]", ")("], metrics=(), checker="grammar")
    assert scores.values["grammatical"].tolist() == [0.6]
    assert scores.values["distinct"].tolist() == [pytest.approx(2 / 3)]
    assert np.isnan(evaluate([")("], metrics=(), checker="grammar").values["distinct"]).all()


@settings(max_examples=300, deadline=None)
@given(st.text("()[]{}", max_size=10) | st.text("()[]{}a ", max_size=6))
def test_balance_is_what_removing_closed_pairs_leaves_nothing_of(text: str) -> None:
    rest, before = text, None
    while rest != before:
        before, rest = rest, rest.replace("()", "").replace("[]", "").replace("{}", "")
    assert is_balanced(text) == (rest == "")


@pytest.mark.parametrize(("pairs", "kinds"), [(0, 3), (1, 3), (2, 3), (3, 2), (5, 1)])
def test_the_shares_of_leaves_are_those_of_all_balanced_strings(pairs: int, kinds: int) -> None:
    letters = "()[]{}"[: 2 * kinds]
    every = [text for text in map("".join, itertools.product(letters, repeat=2 * pairs)) if is_balanced(text)]
    counted = Counter(map(leaves, every))
    assert leaf_shares(pairs) == pytest.approx({k: count / len(every) for k, count in counted.items()})
    assert find_checker("grammar").check_set(every)["leaves distance"] == pytest.approx(0)
    assert sum(leaf_shares(32).values()) == pytest.approx(1)


def test_short_nests_alone_are_far_from_all_balanced_strings() -> None:
    flat = evaluate(["()[]{}()", "[][]()()"], metrics=(), checker="grammar").values
    assert flat["grammatical"].tolist() == [1]
    assert flat["leaves distance"].tolist() == [pytest.approx(1 - 1 / 14)]  # one of 14 shapes of 4 pairs has 4 leaves


def test_every_draw_of_the_grammar_is_right() -> None:
    model = limpet.load("exact:grammar")
    assert model.checker == "grammar"
    result = limpet.compare(model, ["native"], nfe=4, n=4, seeds=(1, 2))
    assert result.data.values["grammatical"].tolist() == [1, 1]
    assert result.table().head[1:3] == ["grammatical", "distinct"]


@pytest.mark.parametrize("name", BUILTIN)
def test_every_measure_has_a_convention(name: str, chem) -> None:
    checker = find_checker(name)
    scores = evaluate(["()", "CC"], metrics=(), checker=checker)
    assert scores.measures.keys() <= checker.conventions.keys()
