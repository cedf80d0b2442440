"""Philox against its published answers, and uniforms that depend only on what they are used for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import literal
from limpet.diffusion.rng import CounterRNG, Purpose, canvas_seed, philox, uniform53, uniform_token

KNOWN = [  # Random123's known answers for philox4x32 with ten rounds: counter, key, output
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def words_of(counter: list[int], key: list[int]) -> list[int]:
    return [int(word) for word in philox(tuple(torch.tensor([word]) for word in counter), (key[0], key[1]))]


def test_published_known_answers() -> None:
    for counter, key, answer in KNOWN:
        assert words_of(counter, key) == literal.philox(counter, key) == answer


WORDS = st.integers(0, 2**32 - 1)


@given(counter=st.lists(WORDS, min_size=4, max_size=4), key=st.lists(WORDS, min_size=2, max_size=2))
def test_philox_is_the_plain_generator(counter: list[int], key: list[int]) -> None:
    assert words_of(counter, key) == literal.philox(counter, key)


@given(
    seed=st.integers(0, 2**64 - 1),
    sample=WORDS,
    step=st.integers(0, 10**6),
    position=st.integers(0, 10**6),
    purpose=st.sampled_from(Purpose),
)
def test_the_layout_of_the_counter(seed: int, sample: int, step: int, position: int, purpose: Purpose) -> None:
    """Position, step, sample, purpose. The layout decides every result, so it never changes."""
    first, second = CounterRNG(seed, torch.tensor([sample])).uniforms(step, torch.tensor([position]), purpose)
    assert (first.item(), second.item()) == literal.uniforms(seed, sample, step, position, int(purpose))


SEEDS = [0, 8200, 2**31 + 7, 2**63 + 11, 2**64 - 1]


def bits(seeds: list[int]) -> torch.Tensor:
    """Seeds as int64."""
    return torch.tensor(np.array(seeds, dtype=np.uint64).view(np.int64))


def test_samples_may_have_seeds_of_their_own() -> None:
    """Each has the uniforms that it has alone, on a grid and by rows, and the same seeds of later canvases."""
    samples, positions, rows = torch.tensor([3, 0, 3, 9, 1]), torch.arange(6), torch.tensor([4, 2, 2, 0, 3, 1])
    for canvas in (0, 1, 2):
        own = [CounterRNG(canvas_seed(seed, canvas), one[None]) for seed, one in zip(SEEDS, samples, strict=True)]
        together = CounterRNG(canvas_seed(bits(SEEDS), canvas), samples)
        for ours, *theirs in zip(
            together.uniforms(2, positions, Purpose.TOKENS),
            *(one.uniforms(2, positions, Purpose.TOKENS) for one in own),
            strict=True,
        ):
            assert torch.equal(ours, torch.cat(theirs))
        found, _ = together.uniforms(2, positions, Purpose.COINS, rows)
        assert found.tolist() == [
            own[row].uniforms(2, positions[i : i + 1], Purpose.COINS)[0].item() for i, row in enumerate(rows.tolist())
        ]


def test_purposes_keep_their_numbers() -> None:
    assert [purpose.name for purpose in Purpose] == [
        "START", "COINS", "TOKENS", "VALUES", "NOISE", "DATA", "POSITIONS", "CANVAS",
    ]  # fmt: skip
    assert [int(purpose) for purpose in Purpose] == list(range(8))


def test_uniform53_covers_the_half_open_interval() -> None:
    """In steps of 2^-53."""
    high = torch.tensor([0, 0, 0, 0, 32, 0xFFFFFFFF])
    low = torch.tensor([0, 63, 64, 128, 0, 0xFFFFFFFF])
    assert uniform53(high, low).tolist() == [0, 0, 2.0**-53, 2.0**-52, 2.0**-27, 1 - 2.0**-53]
    assert uniform53(high, low).dtype == torch.float64


def test_all_53_bits_are_random() -> None:
    """Each bit is one half, and pairs of neighbours agree half the time: 105 normal scores, overall error 1e-5."""
    u, _ = CounterRNG(1, torch.arange(100)).uniforms(0, torch.arange(1000), Purpose.COINS)
    whole = (u.flatten() * 2**53).long()
    bits = torch.stack([whole >> bit & 1 for bit in range(53)]).double()
    n = bits.shape[1]
    scores = [(bits.sum(1) - n / 2) / (n / 4) ** 0.5, ((bits[1:] == bits[:-1]).sum(1) - n / 2) / (n / 4) ** 0.5]
    assert torch.cat(scores).abs().max() < stats.norm.isf(1e-5 / 2 / 105)


def test_uniforms_do_not_depend_on_the_batch_or_the_order() -> None:
    rng = CounterRNG(8200, torch.arange(7))
    positions = torch.arange(11)
    whole = rng.uniforms(3, positions, Purpose.TOKENS)
    assert whole[0].shape == (7, 11)

    order = torch.tensor([5, 0, 3])
    apart = CounterRNG(8200, order).uniforms(3, positions.flip(0), Purpose.TOKENS)
    sample, position = torch.tensor([[6, 10], [0, 0], [2, 9], [2, 3]]).unbind(-1)
    listed = rng.uniforms(3, position, Purpose.TOKENS, sample)
    for all_, some, rows in zip(whole, apart, listed, strict=True):
        assert torch.equal(some, all_[order].flip(1))
        assert torch.equal(rows, all_[sample, position])


def test_every_argument_matters() -> None:
    """Two generators that differ in one argument share no uniform."""
    uses = itertools.product([0, 1, 2**32, 2**63 + 5], range(3), Purpose)
    pairs = [
        torch.stack(CounterRNG(seed, torch.arange(3)).uniforms(step, torch.arange(200), purpose))
        for seed, step, purpose in uses
    ]
    uniforms = torch.stack(pairs)
    assert len(uniforms.unique()) == uniforms.numel()


@pytest.mark.parametrize("axis", ["position", "sample", "step", "seed"])
def test_uniforms_are_uniform_along_every_axis(axis: str) -> None:
    """Kolmogorov-Smirnov of both uniforms, the correlation of both and of neighbours: overall error 1e-5."""
    n = 20000
    if axis == "position":
        pair = CounterRNG(3, torch.tensor([5])).uniforms(7, torch.arange(n), Purpose.START)
    elif axis == "sample":
        pair = CounterRNG(3, torch.arange(n)).uniforms(7, torch.tensor([5]), Purpose.START)
    else:
        each = [
            CounterRNG(i if axis == "seed" else 3, torch.arange(20)).uniforms(
                i if axis == "step" else 7, torch.tensor([5]), Purpose.START
            )
            for i in range(n // 20)
        ]
        pair = tuple(torch.cat(column).T for column in zip(*each, strict=True))  # neighbours have one step or seed
        pair = tuple(column.reshape(20, -1) for column in pair)
    first, second = (u.flatten().numpy() for u in pair)
    limit = 1e-5 / (4 * 5)
    for u in (first, second):
        assert stats.kstest(u, "uniform").pvalue > limit
        assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) * n**0.5 < stats.norm.isf(limit / 2)
    assert abs(np.corrcoef(first, second)[0, 1]) * n**0.5 < stats.norm.isf(limit / 2)


def test_a_uniform_token_is_never_the_vocabulary_size() -> None:
    largest = torch.tensor(1 - 2.0**-53, dtype=torch.float64)
    sizes = {*range(1, 300), 50257, 50258, 100278, *(2**k + d for k in range(12, 32) for d in (-1, 0, 1))}
    for size in sizes:
        assert uniform_token(largest, size) == size - 1
        assert uniform_token(torch.zeros((), dtype=torch.float64), size) == 0


def test_uniform_tokens_are_equally_likely() -> None:
    """Chi-square over 200,000 tokens, error 1e-5 for the three sizes."""
    u, _ = CounterRNG(4, torch.arange(200)).uniforms(0, torch.arange(1000), Purpose.START)
    for size in (2, 7, 50):
        counts = uniform_token(u, size).flatten().bincount(minlength=size)
        assert literal.chi_square(counts.numpy(), np.full(size, 1 / size)) > 1e-5 / 3
