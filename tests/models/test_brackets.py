"""Balanced brackets against enumeration of every string, against automatic differentiation, and against a stack."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from limpet import Native
from limpet.models.brackets import BRACKETS, BalancedBrackets, is_balanced
from limpet.paper.theory import leave_one_out
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import total_variation, truth


def every_string(source: BalancedBrackets) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(source.vocab_size), repeat=source.length)))


def text(tokens: list[int]) -> str:
    return "".join(BRACKETS[token] for token in tokens)


def balanced(source: BalancedBrackets) -> torch.Tensor:
    """Balanced strings found by deleting adjacent pairs until nothing is left: not how the code does it."""

    def empties(string: str) -> bool:
        before = None
        while string != before:
            before = string
            for pair in ("()", "[]", "{}"):
                string = string.replace(pair, "")
        return not string

    return torch.tensor([row for row in every_string(source).tolist() if empties(text(row))])


CASES = [(2, 3), (4, 2), (6, 2), (8, 1)]


@pytest.mark.parametrize(("length", "kinds"), CASES)
@pytest.mark.parametrize("signal", [0.0, 0.3, 0.9, 0.99999])
def test_predictions_are_the_enumerated_leave_one_out_distributions(length: int, kinds: int, signal: float) -> None:
    source, size = BalancedBrackets(length, kinds), 2 * kinds
    noisy, clean = every_string(source), balanced(BalancedBrackets(length, kinds))
    if len(noisy) > 1500:
        noisy = noisy[torch.randperm(len(noisy), generator=torch.Generator().manual_seed(1))[:1500]]
    same = noisy[:, None] == clean[None]  # (Z, X, L)
    channel = same.double() * signal + (1 - signal) / size
    expected = torch.zeros(len(noisy), length, size, dtype=torch.float64)
    for i in range(length):
        others = channel[..., [j for j in range(length) if j != i]].prod(-1)
        for token in range(size):
            expected[:, i, token] = others[:, clean[:, i] == token].sum(-1)
    expected /= expected.sum(-1, keepdim=True)
    found = source.probs(noisy, torch.full((len(noisy),), signal, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


def test_predictions_are_the_derivatives_of_the_summed_evidence() -> None:
    """At the built-in length, where nothing can be enumerated: the sum over all balanced strings of the product of
    their evidences, by a recursion over prefixes and depths for one kind, has the predictions as its gradient."""
    length, generator = 64, torch.Generator().manual_seed(2)
    source = BalancedBrackets(length, 1)
    noisy = torch.randint(2, (3, length), generator=generator)
    for signal in (0.01, 0.5, 0.95):
        evidence = (noisy[..., None] == torch.arange(2)).double() * signal + (1 - signal) / 2
        evidence.requires_grad_(True)
        by_depth = {0: torch.ones(3, dtype=torch.float64)}
        for i in range(length):
            after: dict[int, torch.Tensor] = {}
            for depth, weight in by_depth.items():
                for step, token in ((1, 0), (-1, 1)):
                    if 0 <= depth + step <= length - i - 1:
                        moved = weight * evidence[:, i, token]
                        after[depth + step] = after.get(depth + step, 0) + moved
            by_depth = after
        by_depth[0].sum().backward()
        expected = evidence.grad / evidence.grad.sum(-1, keepdim=True)
        found = source.probs(noisy, torch.full((3,), signal, dtype=torch.float64))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(("length", "kinds"), CASES)
def test_every_balanced_string_is_equally_likely_and_no_other_is_possible(length: int, kinds: int) -> None:
    source, strings = BalancedBrackets(length, kinds), every_string(BalancedBrackets(length, kinds))
    wanted = {tuple(row) for row in balanced(source).tolist()}
    catalan = math.comb(length, length // 2) // (length // 2 + 1)
    assert len(wanted) == catalan * kinds ** (length // 2)
    possible = torch.tensor([tuple(row) in wanted for row in strings.tolist()])
    log_prob = source.log_prob(strings)
    assert torch.isinf(log_prob[~possible]).all()
    torch.testing.assert_close(log_prob[possible].exp(), torch.full((len(wanted),), 1 / len(wanted)).double())
    assert [is_balanced(text(row)) for row in strings.tolist()] == possible.tolist()


def test_draws_are_balanced_uniform_and_a_function_of_seed_and_number() -> None:
    source = BalancedBrackets(6, 2)
    drawn = source.draw(8000, 7)
    assert torch.equal(drawn[:5], source.draw(5, 7))
    assert all(is_balanced(text(row)) for row in drawn.tolist())
    counts = torch.unique(drawn, dim=0, return_counts=True)[1].double()
    assert len(counts) == 5 * 2**3
    expected = 8000 / len(counts)
    assert ((counts - expected) ** 2 / expected).sum() < 72.1  # chi square with 39 degrees of freedom, p = .001


def test_conditionals_of_a_prefix_are_ratios_of_counts() -> None:
    source = BalancedBrackets(6, 2)
    strings = [tuple(row) for row in balanced(source).tolist()]
    for prefix in {string[:end] for string in strings for end in (1, 3, 6)}:
        found = source.conditional(torch.tensor([prefix]))[0].exp().tolist()
        counts = [sum(string[:i] == prefix[:i] for string in strings) for i in range(len(prefix) + 1)]
        assert found == pytest.approx([after / before for before, after in itertools.pairwise(counts)])


def test_a_prediction_does_not_depend_on_its_batch_nor_on_its_own_token() -> None:
    source, generator = BalancedBrackets(64), torch.Generator().manual_seed(3)
    noisy = torch.randint(6, (9, 64), generator=generator)
    signal = torch.linspace(0.05, 0.99999, 9, dtype=torch.float64)
    found = source.probs(noisy, signal)
    assert torch.equal(found[4:5], source.probs(noisy[4:5], signal[4:5]))
    assert found.isfinite().all()
    changed = noisy.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 6
    torch.testing.assert_close(source.probs(changed, signal)[:, 10], found[:, 10], rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize(("length", "kinds"), [(4, 2), (8, 1)])
def test_the_theory_holds_on_brackets(length: int, kinds: int) -> None:
    """Native sampling approaches the data distribution as 1/N, and the mean of the posterior is the prediction."""
    source = BalancedBrackets(length, kinds)
    assert float(truth(source).sum()) == pytest.approx(1)
    distances = [
        float(total_variation(output_distribution(source, Native(nfe=nfe, grid="uniform")), truth(source)))
        for nfe in (16, 32, 64)
    ]
    assert all(after < 0.6 * before for before, after in itertools.pairwise(distances))
    assert distances[-1] < 0.03
    for noise in (0.05, 0.4, 1.0):
        assert all(row.verdict != "VIOLATED" for row in leave_one_out.check("", source, noise))


@pytest.mark.parametrize("wrong", ["(", ")", "(]", "([)]", "a", "()x", "}{"])
def test_what_is_not_balanced(wrong: str) -> None:
    assert not is_balanced(wrong)
    assert is_balanced("")
    assert is_balanced("([]{()})")
