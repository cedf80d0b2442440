"""Metrics against literal transcriptions of their formulas, and Self-BLEU against NLTK."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nltk.translate.bleu_score import Fraction, SmoothingFunction, sentence_bleu

from limpet.errors import LimpetError
from limpet.evaluation import metrics
from limpet.evaluation.metrics.ngrams import ngrams, pack

SETS = st.lists(st.lists(st.integers(0, 5), max_size=14), min_size=1, max_size=8)


def grams(sequence, n):
    return [tuple(sequence[i : i + n]) for i in range(len(sequence) - n + 1)]


def real_texts(width=120):
    """The licence as sequences of word numbers: real text, with its repetitions."""
    words = (Path(__file__).parents[2] / "LICENSE").read_text().split()
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    ids = [number[word] for word in words]
    return [ids[i : i + width] for i in range(0, len(ids), width)]


@given(SETS, st.integers(1, 5))
def test_codes_are_equal_exactly_where_ngrams_are(sequences, n):
    *_, (code, sequence) = ngrams(pack(sequences), n)
    literal = [(s, gram) for s, ids in enumerate(sequences) for gram in grams(ids, n)]
    assert sequence.tolist() == [s for s, _ in literal]
    pairs = set(zip(code.tolist(), (gram for _, gram in literal), strict=True))
    assert len(pairs) == len({c for c, _ in pairs}) == len({gram for _, gram in pairs})


@given(SETS)
def test_entropy_is_its_formula(sequences):
    for got, ids in zip(metrics.entropy(sequences), sequences, strict=True):
        if not ids:
            assert math.isnan(got)
        else:
            probs = [count / len(ids) for count in Counter(ids).values()]
            assert got == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-12)


@given(SETS, st.integers(1, 5))
def test_rep_and_dist_are_their_formulas(sequences, n):
    for got, ids in zip(metrics.rep(sequences, n), sequences, strict=True):
        all_grams = grams(ids, n)
        if all_grams:
            assert got == pytest.approx(1 - len(set(all_grams)) / len(all_grams), abs=1e-12)
        else:
            assert math.isnan(got)
    total = sum(len(grams(ids, n)) for ids in sequences)
    union = set().union(*(grams(ids, n) for ids in sequences))
    got = metrics.dist(sequences, n)
    assert math.isnan(got) if not total else got == pytest.approx(len(union) / total, abs=1e-12)


@given(SETS)
def test_lengths(sequences):
    assert metrics.length(sequences).tolist() == [len(ids) for ids in sequences]


def add_one_all(p_n, **_):
    return [Fraction(p.numerator + 1, p.denominator + 1, _normalize=False) for p in p_n]


NLTK = {
    "add-one": SmoothingFunction().method2,
    "add-one-all": add_one_all,
    "method-1": SmoothingFunction(epsilon=0.1).method1,
}


def nltk_self_bleu(sequences, smoothing, groups=None):
    groups = groups or [0] * len(sequences)
    scores = []
    for i, (hypothesis, group) in enumerate(zip(sequences, groups, strict=True)):
        references = [r for j, (r, g) in enumerate(zip(sequences, groups, strict=True)) if j != i and g == group]
        score = sentence_bleu(references, hypothesis, smoothing_function=NLTK[smoothing]) if references else math.nan
        scores.append(float(score))
    return np.array(scores)


@pytest.mark.parametrize("smoothing", NLTK)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_self_bleu_agrees_with_nltk_on_random_texts(smoothing, data):
    sequences = data.draw(SETS)
    groups = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=len(sequences), max_size=len(sequences)))
    expected = nltk_self_bleu(sequences, smoothing, groups)
    np.testing.assert_allclose(metrics.self_bleu(sequences, smoothing, groups), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("smoothing", NLTK)
def test_self_bleu_agrees_with_nltk_on_real_texts(smoothing):
    texts = real_texts()
    expected = nltk_self_bleu(texts, smoothing)
    assert 0.05 < expected.mean() < 0.9
    np.testing.assert_allclose(metrics.self_bleu(texts, smoothing), expected, rtol=0, atol=1e-12)


def zipf(shape, size=5000, seed=0):
    probs = 1 / np.arange(1, size + 1)
    return np.random.default_rng(seed).choice(size, size=shape, p=probs / probs.sum())


@given(SETS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_and_other_sequences_change_nothing(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    shuffled = [sequences[i] for i in order]
    for function in (metrics.entropy, metrics.rep, metrics.self_bleu):
        np.testing.assert_allclose(function(shuffled), function(sequences)[order], rtol=0, atol=1e-12)
    np.testing.assert_allclose(metrics.dist(shuffled, 2), metrics.dist(sequences, 2), rtol=0, atol=1e-12)
    for function in (metrics.entropy, metrics.rep):
        alone = np.concatenate([function([ids]) for ids in sequences])
        np.testing.assert_allclose(alone, function(sequences), rtol=0, atol=1e-12)


def test_arrays_lists_and_tensors_have_the_same_values():
    tokens = zipf((6, 40), 30)
    forms = [tokens, tokens.tolist(), torch.from_numpy(tokens), list(torch.from_numpy(tokens)), tokens.astype(np.int32)]
    for name, metric in metrics.METRICS.items():
        values = [metric.function(form) for form in forms]
        assert all(np.array_equal(values[0], value) for value in values[1:]), name
        assert np.shape(values[0]) == (() if metric.of_set else (6,))
        assert metric.convention


def test_edges_are_defined():
    assert metrics.entropy([]).shape == metrics.self_bleu([]).shape == (0,)
    assert math.isnan(metrics.dist([], 4))
    assert metrics.entropy([[7]]).tolist() == [0.0]
    assert math.isnan(metrics.rep([[7]])[0])
    assert math.isnan(metrics.self_bleu([[1, 2, 3, 4]])[0])  # nothing to compare with
    assert metrics.self_bleu([[1, 2], [3, 4]]).tolist() == [0.0, 0.0]
    assert metrics.self_bleu([[], [3, 4]]).tolist() == [0.0, 0.0]
    assert metrics.entropy([[2**62, 5, 2**62]])[0] == pytest.approx(math.log(3) - 2 / 3 * math.log(2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: metrics.entropy([0.5, 1.0]), "integers"),
        (lambda: metrics.entropy([1, 2, 3]), "wrap a single one"),
        (lambda: metrics.rep([[1, 2]], 0), "at least 1"),
        (lambda: metrics.self_bleu([[1], [2]], "method-9"), "none of add-one, add-one-all, method-1"),
        (lambda: metrics.self_bleu([[1], [2]], groups=[0]), "1 groups for 2 sequences"),
        (lambda: metrics.mauve(np.zeros((3, 2)), np.zeros((3, 4))), "(3, 2) and (3, 4)"),
        (lambda: metrics.mauve(np.zeros((3, 2)), np.zeros((3, 2)), buckets=7), "6 texts into 7 buckets"),
    ],
)
def test_errors_are_sentences(call, words):
    with pytest.raises(LimpetError) as raised:
        call()
    assert words in str(raised.value)


# MAUVE
