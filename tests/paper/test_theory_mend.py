"""Mend where every distribution is known: its output distribution against its samples, and labels that change one by one or at once."""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from limpet import CRS, Gibbs, Mend, sample
from limpet.cli import theory
from limpet.diffusion.backends import dense
from limpet.models.exact import Markov, Mixture, Source
from limpet.paper.theory import STATEMENTS, Sides
from limpet.paper.theory import closed_loop_mend as closed
from limpet.paper.theory import coordinate_ascent as ascent
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import RANDOM, chain, encode, random_distributions, tiny, total_variation
from limpet.samplers import Sampler

many = settings(deadline=None, max_examples=30)
DRAWS = 60_000
SEEDS = st.integers(0, 2**31)


def violated(rows: list[Sides] | Sides) -> bool:
    return any(row.verdict == "VIOLATED" for row in ([rows] if isinstance(rows, Sides) else rows))


# The output distribution

EAGER = Mend(nfe=6, warmup=0.5, spacing=0, budget=3.0, late_top_p=None)  # it stores soon, and much of it is mended
PARAMS = [
    {}, {"final_step": "argmax"}, {"final_step": "sample"}, {"mend": 2, "apart": 0}, {"mend": 3, "apart": 1},
    {"turns": 2}, {"horizon": 3}, {"write": "both", "late_top_p": 0.8}, {"values": "refreshed-in-turn", "turns": 2},
]  # fmt: skip


def source() -> Source:
    return Markov(torch.tensor([0.55, 0.45]), torch.tensor([[0.85, 0.15], [0.2, 0.8]]), 4)


def plainly(mend: Mend) -> CRS:
    """The CRS with the parameters that both have."""
    return CRS(**{one.name: getattr(mend, one.name) for one in fields(CRS)})


def drawn(sampler: Sampler) -> Tensor:
    return sample(source(), sampler, DRAWS, seed=8, batch_size=DRAWS).tokens


def chance(probs: Tensor, tokens: Tensor) -> float:
    """Pearson's test of samples against a distribution over two symbols; outputs expected less than five times are pooled."""
    n, counts = len(tokens), torch.bincount(encode(tokens, 2), minlength=len(probs)).double()
    if counts[probs == 0].any():
        return 0.0
    rare = n * probs < 5
    expected = torch.cat([n * probs[~rare], n * probs[rare].sum()[None]]).clamp(min=1e-9)
    found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(1.0, float(len(expected) - 1)), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize("parameters", PARAMS, ids=str)
def test_samples_follow_the_law(params: dict) -> None:
    """60,000 samples, at level 1e-6; mending has changed the distribution by more than a hundredth."""
    mend = EAGER.replace(**params)
    probs = output_distribution(source(), mend)
    assert float(probs.sum()) == pytest.approx(1, abs=1e-12)
    assert chance(probs, drawn(mend)) > 1e-6
    assert float(total_variation(probs, output_distribution(source(), mend.replace(mend=0)))) > 0.01


def test_samples_without_mending_do_not() -> None:
    assert chance(output_distribution(source(), EAGER), drawn(EAGER.replace(mend=0))) < 1e-6


def test_corrected_samples_follow_the_law() -> None:
    gibbs = Gibbs(nfe=8, predictor="mend warmup=.5 spacing=0 budget=3 late_top_p=1")
    assert chance(output_distribution(source(), gibbs), drawn(gibbs)) > 1e-6


@pytest.mark.parametrize("parameters", PARAMS, ids=str)
def test_mending_nothing_has_the_law_of_crs(params: dict) -> None:
    still = EAGER.replace(**{**params, "mend": 0})
    assert torch.equal(output_distribution(source(), still), output_distribution(source(), plainly(still)))


def test_the_readout_mends_before_labels_are_copied() -> None:
    """On two sites that agree, with both labels stored in one call, only the last call can bring them together."""
    two = Mixture(torch.ones(2), torch.tensor([[[0.99, 0.01]] * 2, [[0.01, 0.99]] * 2], dtype=torch.float64))
    mend = Mend(nfe=3, warmup=0.5, spacing=0, budget=9.0, late_top_p=None)
    probs, still = output_distribution(two, mend), output_distribution(two, mend.replace(mend=0))
    assert float(still[[1, 2]].sum()) > 0.2
    assert float(probs[[1, 2]].sum()) == 0
    # Twice at once, they change places instead.
    swapped = output_distribution(two, mend.replace(mend=2, apart=0))
    torch.testing.assert_close(swapped[[1, 2]], still[[2, 1]], rtol=0, atol=1e-12)


# Labels that change


@many
@given(seed=SEEDS, shape=st.sampled_from([(2, 3), (3, 3), (2, 5), (4, 2)]), signal=st.floats(0.05, 1.0))
def test_one_label_climbs_by_its_gain(seed: int, shape: tuple[int, int], signal: float) -> None:
    vocab_size, length = shape
    joints = ("", random_distributions(20, vocab_size**length, seed=seed), vocab_size)
    assert not violated(ascent.check_one(joints, signal))
    assert not violated(ascent.check_two(joints))
    assert not violated(ascent.check_rest(joints))


@many
@given(seed=SEEDS, order=st.integers(1, 3), vocab_size=st.integers(2, 3))
def test_as_far_apart_as_a_chain_reaches_labels_may_change_at_once(seed: int, order: int, vocab_size: int) -> None:
    chains = ascent.random_chains(20, vocab_size, 5, order, seed)
    for apart in range(order, 5):
        assert not violated(ascent.check_many(chains, apart))


@pytest.mark.parametrize("order", [1, 2])
def test_nearer_than_that_they_may_not(order: int) -> None:
    assert violated(ascent.check_many(ascent.random_chains(RANDOM, 2, 6, order, seed=7), order - 1))


def test_checks_can_fail() -> None:
    joints = ascent.random_joints(3, 3, seed=1)
    rows = ascent.check_one(
        joints, signal=0.9, told=0.3
    )  # a distribution of other noise is no conditional of the input's
    assert [row.verdict for row in rows] == ["VIOLATED", "VIOLATED"]
    assert violated(ascent.check_many(joints, apart=1))  # no chain at all
    assert not violated(ascent.check_many(joints, apart=3))  # but one label alone is one alone


def test_gains_are_those_that_mend_ranks_by() -> None:
    seen = ascent.look(random_distributions(9, 27, seed=2), 3)
    gain = dense.gain_of(seen.probs, seen.inputs.expand_as(seen.top))
    torch.testing.assert_close(seen.gain, gain.clamp(min=0), rtol=1e-12, atol=1e-12)


def test_a_law_by_loops() -> None:
    """P(clean token at i | noisy tokens elsewhere), and the distribution of the input, summed by hand."""
    joint, signal, words = (
        random_distributions(1, 8, seed=3),
        0.7,
        [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)],
    )
    seen = ascent.look(joint, 2, signal)

    def channel(z: int, x: int) -> float:
        return signal * (z == x) + (1 - signal) / 2

    for code, z in enumerate(words):
        q = sum(float(joint[0, k]) * math.prod(map(channel, z, x)) for k, x in enumerate(words))
        assert float(seen.log_q[0, code]) == pytest.approx(math.log(q), abs=1e-12)
        for i in range(3):
            weights = [0.0, 0.0]
            for k, x in enumerate(words):
                weights[x[i]] += float(joint[0, k]) * math.prod(channel(z[j], x[j]) for j in range(3) if j != i)
            probs = [weight / sum(weights) for weight in weights]
            assert seen.probs[0, code, i].tolist() == pytest.approx(probs, abs=1e-12)


def test_what_comes_to_rest() -> None:
    step = torch.tensor([[0, 0, 1, 2, 5, 4], [1, 2, 3, 4, 5, 0]])
    assert ascent.at_rest(step).tolist() == [[True, True, True, True, False, False], [False] * 6]


def test_two_sites_change_places_for_ever() -> None:
    assert not violated(ascent.two_sites())


def test_noise_takes_the_claims_away() -> None:
    """On a chain: changes by a noisy distribution may lower the data distribution, and labels far apart are no longer independent."""
    markov = tiny()[2]
    assert ascent.falls(markov, 1.0) == 0
    assert ascent.falls(markov, 0.4) > 0.01
    assert ascent.interaction(markov, 1.0, 2) == pytest.approx(0, abs=1e-12)
    assert ascent.interaction(markov, 0.6, 1) > ascent.interaction(markov, 0.6, 2) > 0.01


# The closed loop


def test_arms_differ_in_mending_alone() -> None:
    arms = closed.arms(chain(4), 8, "keep")
    crs, native = arms["CRS"], arms["native"]
    assert torch.equal(output_distribution(chain(4), crs), output_distribution(chain(4), plainly(crs)))
    assert (native.nfe, native.final_step, native.late_top_p) == (8, "sample", None)
    assert closed.arms(chain(4), 8, "argmax")["native"].final_step == "argmax"


def test_an_infinite_distance_is_not_told() -> None:
    rows = closed.contrasts(chain(4), 4, "argmax")
    assert all(math.isfinite(row.left) and math.isfinite(row.right) for row in rows)
    assert not any(row.statement.startswith(closed.MISSED) for row in rows)
    assert any(row.statement.startswith(closed.MISSED) for row in closed.contrasts(chain(4), 4, "keep"))


def test_the_closed_loop_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "closed-loop-mend"
    monkeypatch.setattr(closed, "DEFICITS", (0.0, 0.2))
    monkeypatch.setattr(closed, "NUCLEI", (1.0, 0.9))
    monkeypatch.setitem(STATEMENTS, name, STATEMENTS[name]._replace(sides=list))
    theory.run(name, figures=tmp_path)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
