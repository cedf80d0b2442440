"""Each statement on random sources of every shape, its equality cases, and that its check can fail."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet import CRS
from limpet.paper.theory import STATEMENTS, Sides, closed_loop_exact
from limpet.paper.theory import bayes_factor as bayes
from limpet.paper.theory import combined_evidence as combined
from limpet.paper.theory import diminishing_returns as returns
from limpet.paper.theory import leave_one_out as loo
from limpet.paper.theory import selection_risk as risk
from limpet.paper.theory import separated_modes as separated
from limpet.paper.theory import shared_modes as shared
from limpet.paper.theory import support_restriction as support
from limpet.paper.theory import temperature as temp
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import RANDOM, chain, large, product, random_distributions, random_words, tiny, truth
from limpet.paper.theory.sides import measured, worst

BATCH = 50  # sources in each example: 40 examples are 2,000 sources for each statement
many = settings(deadline=None, max_examples=40)
SEEDS = st.integers(0, 2**31)


@pytest.fixture(scope="module")
def tables() -> dict[str, list[Sides]]:
    """What `limpet theory` evaluates, within a minute of one core's time."""
    start = time.process_time()
    found = {name: statement.sides() for name, statement in STATEMENTS.items()}
    assert time.process_time() - start < 60
    return found


def sound(rows: list[Sides] | Sides) -> None:
    for row in [rows] if isinstance(rows, Sides) else rows:
        assert row.verdict != "VIOLATED", row


def broken(rows: list[Sides], *statements: str) -> None:
    """Exactly the named checks, and no others, report a violation."""
    found = {row.statement for row in rows if row.verdict == "VIOLATED"}
    assert found == set(statements), [(row, row.verdict) for row in rows]


# What two sides say


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Sides("", "", 1.0, "<=", 2.0), "holds"),
        (Sides("", "", 2.0, "<=", 1.0), "VIOLATED"),
        (Sides("", "", 1.0, "<=", 1.0 - 1e-12), "equal"),
        (Sides("", "", 1.0, "<=", 1.0 - 1e-9), "VIOLATED"),
        (Sides("", "", 1e6, "<=", 1e6 - 1e-5), "equal"),
        (Sides("", "", 1.0, "=", 1.0 + 1e-9), "VIOLATED"),
        (Sides("", "", 1.0, "=", 1.3, error=0.1), "equal"),
        (Sides("", "", 1.0, "=", 1.5, error=0.1), "VIOLATED"),
        (Sides("", "", 0.0, "<", 1e-300), "holds"),
        (Sides("", "", 0.0, "<", 0.0), "VIOLATED"),
        (Sides("", "", 1.0, "~", 2.0), "below"),
        (Sides("", "", 2.0, "~", 1.0), "above"),
        (Sides("", "", 2.0, "~", 1.0, error=1.0), "equal"),
        (Sides("", "", -math.inf, "<=", -math.inf), "equal"),
        (Sides("", "", -math.inf, "<=", 0.0), "holds"),
        (Sides("", "", math.nan, "<=", 0.0), "VIOLATED"),
        (Sides("", "", math.nan, "=", math.nan), "VIOLATED"),
    ],
)
def test_a_verdict_follows_from_the_sides(row: Sides, verdict: str) -> None:
    assert row.verdict == verdict


def test_the_worst_case_is_the_violated_one() -> None:
    """However many cases are tight, and however small the sides of the tight ones."""
    left = torch.tensor([1.0, 0.5, 1e-17, 5.0, 1.0], dtype=torch.float64)
    right = torch.tensor([1.0, 0.6, 0.0, 9.0, 0.99], dtype=torch.float64)
    row = worst("", "", left, "<=", right)
    assert (row.left, row.right, row.verdict) == (1.0, 0.99, "VIOLATED")
    row = worst("", "", left[:4], "<=", right[:4])
    assert (row.left, row.right, row.verdict) == (1.0, 1.0, "equal")
    assert worst("", "", torch.tensor([0.0, math.nan]), "<=", 1.0).verdict == "VIOLATED"


def test_measured_sides_carry_the_error_of_their_difference() -> None:
    """Paired values: what they share takes no part in the error."""
    generator = torch.Generator().manual_seed(0)
    common, own = torch.randn(2, 10_000, generator=generator, dtype=torch.float64)
    sides = measured("", "", common, "=", common + 0.01 * own + 1)
    assert sides.slack == pytest.approx(1, abs=1e-3)
    assert sides.error == pytest.approx(1e-4, rel=0.05)
    assert sides.verdict == "VIOLATED"
    against = measured("", "", common, "=", 0.0)
    assert (against.right, against.verdict) == (0.0, "equal")
    assert against.error == pytest.approx(1e-2, rel=0.05)


# Selection risk


@many
@given(seed=SEEDS, shape=st.sampled_from([(2, 3), (2, 5), (3, 3), (4, 3)]), zeros=st.sampled_from([0.0, 0.5]))
def test_selection_risk_falls_with_noise(seed: int, shape: tuple[int, int], zeros: float) -> None:
    vocab_size, length = shape
    joint = random_distributions(BATCH, vocab_size**length, seed=seed, zeros=zeros)
    sound(risk.check("", joint, vocab_size, [1.0, 0.9, 0.5, 0.2, 0.01, 0.0]))
    sound(risk.check_simulation("", joint, vocab_size, 0.77, 0.31))


def test_selection_risk_is_equal_for_independent_tokens() -> None:
    joint = product(random_distributions(RANDOM, 3, 3, seed=1))
    signals = [1.0, 0.6, 0.3, 0.0]
    risks = torch.stack([risk.risks(joint, 3, signal) for signal in signals])
    torch.testing.assert_close(risks, risks[:1].expand_as(risks), rtol=0, atol=1e-12)
    assert risk.check("", joint, 3, signals).verdict == "equal"


def test_selection_risk_can_fail() -> None:
    joint = random_distributions(RANDOM, 27, seed=2)
    assert risk.check("", joint, 3, [0.3, 0.6]).verdict == "VIOLATED"
    # Noise that leaves one position for another is not further corruption, though there is more of it in all.
    before, after = torch.tensor([1.0, 0.1, 1.0]), torch.tensor([1.0, 0.9, 0.0])
    assert risk.check("", joint, 3, [before, after]).verdict == "VIOLATED"
    simulated = risk.simulated_risks(joint, 3, 0.6, 0.3)[0]
    assert worst("", "", simulated, "=", risk.risks(joint, 3, 0.35)[0]).verdict == "VIOLATED"


def test_selection_risk_by_hand() -> None:
    """Two equal bits, 00 or 11: the other bit is right with probability signal + noise / 2."""
    joint = torch.tensor([[0.5, 0.0, 0.0, 0.5]], dtype=torch.float64)
    for signal in (1.0, 0.7, 0.0):
        assert float(risk.risks(joint, 2, signal)[0]) == pytest.approx((1 - signal) / 2, abs=1e-12)


@pytest.mark.parametrize("source", tiny() + large(), ids=lambda source: f"{source.name}-{source.length}")
def test_the_deficit_has_less_variance_than_the_error_it_averages(source: risk.Source) -> None:
    deficits, wrong = risk.sampled_risks(source, [0.15], 2000, seed=1)
    assert float(deficits.std()) < float(wrong.std())


# Separated modes


@many
@given(seed=SEEDS, shape=st.sampled_from([(2, 2, 6), (3, 2, 7), (3, 3, 4), (4, 4, 4)]), noise=st.floats(0.0, 0.3))
def test_separated_modes(seed: int, shape: tuple[int, int, int], noise: float) -> None:
    modes, vocab_size, length = shape
    words = random_words(BATCH, modes, length, vocab_size, seed=seed)
    sound(separated.check_nearest("", words, vocab_size, noise))
    weights = random_distributions(BATCH, modes, seed=seed) / 2
    weights[:, 0] += 0.5
    sound(separated.check_gap("", words, weights, vocab_size))


@pytest.mark.parametrize(("vocab_size", "length", "apart"), [(2, 8, 8), (2, 9, 6), (3, 6, 5), (5, 4, 3)])
def test_two_words_by_enumeration_and_by_the_trinomial_sum(vocab_size: int, length: int, apart: int) -> None:
    words = torch.zeros(1, 2, length, dtype=torch.long)
    words[0, 1, :apart] = 1
    for noise in (0.0, 0.03, 0.2, 0.7, 1.0):
        exact = float(separated.not_nearest(words, vocab_size, noise)[0])
        assert exact == pytest.approx(separated.not_nearest_of_two(apart, vocab_size, noise), abs=1e-10)


def test_binary_opposites_meet_the_binomial_tail() -> None:
    words = torch.stack([torch.zeros(7, dtype=torch.long), torch.ones(7, dtype=torch.long)])[None]
    assert separated.check_nearest("", words, 2, 0.2)[0].verdict == "equal"


def test_the_gap_is_met_by_the_other_of_two_words() -> None:
    words = random_words(RANDOM, 2, 4, 3, seed=3)
    row = separated.check_gap("", words, torch.tensor([[0.7, 0.3]], dtype=torch.float64).expand(RANDOM, 2), 3)[0]
    assert row.verdict == "equal"


def test_separated_modes_can_fail() -> None:
    words = random_words(RANDOM, 3, 5, 3, seed=4)
    broken(separated.check_nearest("", words, 3, 0.9, everywhere=True), "ln binomial tail <= Chernoff exponent")
    weights = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).expand(RANDOM, 3)
    broken(separated.check_gap("", words, weights, 3), "0 < Hamming gap")
    prior = torch.tensor([0.98, 0.01, 0.01])
    broken(
        separated.check_decoding("", words[0], 3, 0.4, prior),
        "states where the likeliest is not the nearest",
        "states within half the separation of a word not decoded to it",
    )


def test_the_argmax_spells_the_sure_mode() -> None:
    for words in random_words(20, 3, 4, 3, seed=5):
        sound(separated.check_decoding("", words, 3, 0.3))


# The leave-one-out distribution


@many
@given(seed=SEEDS, noise=st.floats(0.01, 1.0), shape=st.sampled_from([(2, 4), (3, 3), (4, 2)]))
def test_the_posterior_averages_to_a_law_that_converts_back(seed: int, noise: float, shape: tuple[int, int]) -> None:
    size, length = shape
    joint = random_distributions(BATCH, size**length, seed=seed)
    sound(loo.check_random("", joint, size, length, noise))


@pytest.mark.parametrize("noise", [0.05, 0.4, 1.0])
def test_the_mean_of_the_posterior_is_what_exact_sources_predict(noise: float) -> None:
    for source in tiny():
        sound(loo.check("", source, noise))


def test_a_mean_that_forgets_what_the_others_say_is_another_law() -> None:
    for source in tiny():
        broken(loo.check("", source, 0.4, given=False), "mean of the posterior = leave-one-out distribution (TV)")


# Shared modes


@many
@given(seed=SEEDS, shape=st.sampled_from([(2, 2, 4), (2, 5, 2), (3, 3, 3), (5, 4, 2)]), zeros=st.sampled_from([0, 0.5]))
def test_shared_modes(seed: int, shape: tuple[int, int, int], zeros: float) -> None:
    modes, count, vocab_size = shape
    weights = random_distributions(BATCH, modes, seed=seed)
    distributions = random_distributions(BATCH, modes, count, vocab_size, seed=seed + 1, zeros=zeros)
    context = random_distributions(BATCH, modes, 4, seed=seed + 2)
    sound(shared.check_gap("", weights, distributions))
    sound(shared.check_context("", shared.with_context(weights, context, distributions), vocab_size))
    sound(shared.check_ratio("", weights, context))


def test_shared_modes_are_equal_for_separate_words() -> None:
    weights = random_distributions(RANDOM, 4, seed=6)
    points = torch.eye(4, dtype=torch.float64)[None, :, None].expand(RANDOM, 4, 3, 4)
    assert {row.verdict for row in shared.check_gap("", weights, points)} == {"equal"}
    assert shared.check_ratio("", weights[:, :2], random_distributions(RANDOM, 2, 3, seed=7)).verdict == "equal"


def test_shared_modes_can_fail_when_the_context_depends_on_the_tokens() -> None:
    """Context that tells whether two tokens agree: given the mode they are independent, given both they are not."""
    weights = torch.tensor([[0.95, 0.05]], dtype=torch.float64)
    distributions = torch.tensor([[[[0.5, 0.5]] * 2, [[0.9, 0.1]] * 2]], dtype=torch.float64)
    tokens = weights[..., None] * product(distributions)  # (1, 2, 4)
    agree = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    joint = torch.stack([tokens * agree, tokens * (1 - agree)], 2)
    rows = shared.check_context("", joint, 2)
    broken(rows, *(row.statement for row in rows))


def test_the_gap_can_fail_when_sides_are_exchanged() -> None:
    weights, distributions = random_distributions(RANDOM, 3, seed=8), random_distributions(RANDOM, 3, 3, 3, seed=9)
    for row in shared.check_gap("", weights, distributions)[1:]:
        assert row._replace(left=row.right, right=row.left).verdict == "VIOLATED"


def test_the_likelihood_ratio_can_fail_when_sides_are_exchanged() -> None:
    row = shared.check_ratio("", random_distributions(8, 3, seed=8), random_distributions(8, 3, 4, seed=9))
    assert row._replace(left=row.right, right=row.left).verdict == "VIOLATED"


@pytest.mark.parametrize("share", [0.05, 0.3, 0.49])
def test_the_two_coordinates_of_the_paper(share: float) -> None:
    assert {row.verdict for row in shared.two_coordinates(share)} == {"equal"}


# Combined evidence and diminishing returns


@many
@given(
    seed=st.integers(0, 2**31),
    modes=st.sampled_from([2, 3, 5]),
    sizes=st.sampled_from([(1, 2, 1), (3, 3, 2), (2, 4, 3)]),
)
def test_combined_evidence(seed: int, modes: int, sizes: tuple[int, int, int]) -> None:
    d, n, h = sizes
    sound(combined.check("", combined.random_evidence(BATCH, modes, seed, d, n, h)))


def test_combined_evidence_is_equal_for_two_modes() -> None:
    rows = combined.check("", combined.random_evidence(RANDOM, 2, seed=1))
    verdicts = {row.statement: row.verdict for row in rows}
    for statement in ("ln posterior odds <= ln prior odds - S - T", "-ln w[A, u] <= ln(1 + a e^-(S + T))"):
        assert verdicts[statement] == "equal"


def test_every_bound_of_combined_evidence_can_fail_when_sides_are_exchanged() -> None:
    bounds = [row for row in combined.check("", combined.random_evidence(20, 4, seed=30)) if row.relation == "<="]
    assert len(bounds) == 5
    for row in bounds:
        assert row._replace(left=row.right, right=row.left).verdict == "VIOLATED", row


def test_combined_evidence_can_fail_when_an_observation_is_repeated() -> None:
    """The same token seen twice is not two tokens: bounds that count it twice promise too much."""
    evidence = combined.random_evidence(RANDOM, 3, seed=2)
    evidence = evidence._replace(seen=evidence.seen[:, :1].expand(-1, 2).contiguous())
    whole = combined.joint(evidence)
    first = whole.view(*whole.shape[:-1], 2, 2).sum(-1)  # of the two observations: the second is made its copy
    probs = torch.diag_embed(first).flatten(-2)
    assert float(probs.sum((1, 2, 3, 4)).sub(1).abs().max()) < 1e-12  # still a distribution
    found = {row.statement for row in combined.check("", evidence, probs) if row.verdict == "VIOLATED"}
    assert {"ln posterior odds <= ln prior odds - S - T", "posterior error <= e(S, T)"} <= found


@many
@given(seed=SEEDS)
def test_returns_diminish(seed: int) -> None:
    sound(returns.check("", *returns.random_problems(BATCH, seed)))
    sound(returns.check_observation("", combined.random_evidence(BATCH, 2, seed % 10**6)))


def test_returns_can_fail_when_evidence_is_taken_away() -> None:
    odds, support_, context, more = returns.random_problems(RANDOM, seed=1)
    rows = returns.check("", odds, support_, context, -more)
    assert {row.statement for row in rows if row.verdict == "VIOLATED"} >= {"0 < gain", "dG/dS < 0"}


def test_the_certificate_is_not_exact_for_three_modes() -> None:
    assert returns.check_observation("", combined.random_evidence(RANDOM, 3, seed=3)).verdict == "VIOLATED"


# The Bayes factor, support restriction, temperature


@many
@given(seed=SEEDS, vocab_size=st.integers(2, 40))
def test_the_bayes_factor_grows_toward_the_clean_end(seed: int, vocab_size: int) -> None:
    pairs = random_distributions(BATCH, 2, vocab_size, seed=seed)
    favoured, other = pairs.amax(1), pairs.amin(1)
    sound(bayes.check_order("", favoured, other, vocab_size, bayes.NOISES))
    noise = torch.linspace(0.05, 1, BATCH, dtype=torch.float64)[:, None].expand(-1, vocab_size)
    sound(bayes.check_slope("", favoured, other, noise, vocab_size))
    sound(bayes.check_denoiser("", pairs[:5, :, 0] / pairs[:5, :, 0].sum(-1, keepdim=True),
                               random_distributions(5, 2, 2, vocab_size, seed=seed), 0.3))  # fmt: skip


def test_the_bayes_factor_can_fail_for_the_disfavoured_mode() -> None:
    pairs = random_distributions(RANDOM, 2, 5, seed=1)
    assert bayes.check_order("", pairs.amin(1), pairs.amax(1), 5, bayes.NOISES).verdict == "VIOLATED"
    assert bayes.check_order("", pairs[:, 0], pairs[:, 0], 5, bayes.NOISES).verdict == "equal"


@many
@given(seed=SEEDS, vocab_size=st.integers(2, 60), p=st.floats(0.05, 1.0))
def test_restriction_commutes_with_conversion(seed: int, vocab_size: int, p: float) -> None:
    probs, kept, z, signal = support.random_steps(BATCH, vocab_size, seed)
    sound(support.check("", probs, kept, z, signal))
    sound(support.check_top_p("", probs, p, z, signal))


def test_restriction_can_fail_when_the_set_is_ranked_after_conversion() -> None:
    probs, _, z, signal = support.random_steps(RANDOM, 12, 3)
    assert support.check_top_p("", probs, 0.9, z, signal, rank="posterior").verdict == "VIOLATED"


@many
@given(seed=SEEDS, vocab_size=st.integers(2, 30))
def test_temperature(seed: int, vocab_size: int) -> None:
    probs, other = (
        random_distributions(BATCH, vocab_size, seed=seed),
        random_distributions(BATCH, vocab_size, seed=seed + 1),
    )
    beta = 0.05 + 2 * torch.rand(BATCH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sound(temp.check_characterisation("", probs, temp.tempered(probs, beta), beta))
    sound(temp.check_convexity("", probs, other, beta))


def test_temperature_can_fail_when_tokens_are_exchanged() -> None:
    probs = random_distributions(RANDOM, 6, seed=4)
    beta = torch.full((RANDOM,), 1.5, dtype=torch.float64)
    rows = temp.check_characterisation("", probs, temp.tempered(probs, beta).roll(1, -1), beta)
    broken(rows, *(row.statement for row in rows))


def test_a_fit_stops_at_zero_where_rankings_are_opposed() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    beta, residual = temp.fit(probs, probs.flip(-1))
    assert float(beta) == 0
    assert float(residual) == pytest.approx(math.log(3) - float(-(probs * probs.log()).sum()), abs=1e-12)


# The closed loop


def test_the_sampler_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sampler = closed_loop_exact.latent(), CRS(nfe=8, budget=1.0)
    sound(closed_loop_exact.check_sampler(source, "", sampler, seed=1))
    monkeypatch.setattr(
        closed_loop_exact, "output_distribution", lambda s, other: output_distribution(s, other.replace(warmup=0.5))
    )
    rows = closed_loop_exact.check_sampler(source, "", sampler, seed=1)
    broken(rows, *(row.statement for row in rows))


def test_the_data_law_has_its_own_measures() -> None:
    source = closed_loop_exact.latent()
    found = closed_loop_exact.expectations(source, truth(source))
    assert found["tv"] == 0
    assert found["kl"] == pytest.approx(0, abs=1e-12)
    assert found["favoured"] == pytest.approx(0.5, abs=1e-12)


def test_selecting_at_once_without_a_budget_always_gives_one_sequence() -> None:
    """Theorem 1 says that context makes tokens agree, not on which mode: here all paths end in the same place."""
    for source in (closed_loop_exact.latent(), chain(4)):
        probs = output_distribution(source, closed_loop_exact.arms(source, 16, "argmax")["CRS, no warmup, no budget"])
        assert float(probs.max()) > 1 - 1e-9


# The tables


def test_nothing_is_violated(tables: dict[str, list[Sides]]) -> None:
    for rows in tables.values():
        sound(rows)


def test_every_statement_meets_random_sources_and_equality(tables: dict[str, list[Sides]]) -> None:
    for name, rows in tables.items():
        if not name.startswith("closed-loop"):
            assert any(row.source.startswith(f"{RANDOM:,} random") for row in rows), name
            assert any(row.verdict == "equal" and row.relation == "<=" for row in rows) or name in {
                "diminishing-returns", "leave-one-out", "support-restriction",
            }, name  # fmt: skip


def test_the_documentation_shows_what_is_measured(tables: dict[str, list[Sides]]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
    known = {(row.statement, row.source): row for rows in tables.values() for row in rows}
    shown = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.replace(r"\|", "\0").strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6 and cells[3] in ("<=", "<", "=", "~"):
            row = known[cells[0].replace("\0", "|"), cells[1]]
            assert float(cells[2]) == pytest.approx(row.left, rel=0.02, abs=1e-6), row
            assert float(cells[4]) == pytest.approx(row.right, rel=0.02, abs=1e-6), row
            assert cells[5] == row.verdict, row
            shown += 1
    assert shown > 20
