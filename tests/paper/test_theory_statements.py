"""Each statement on random sources of every shape, its cases of equality, and that its check can fail."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from limpet import CRS
from limpet.diffusion.backends import dense
from limpet.paper.theory import STATEMENTS, Check, exact_outputs
from limpet.paper.theory import bayes_factor as bayes
from limpet.paper.theory import closed_loop_exact as closed
from limpet.paper.theory import closed_loop_interleave as interleave
from limpet.paper.theory import closed_loop_mend as closed_mend
from limpet.paper.theory import combined_evidence as combined
from limpet.paper.theory import coordinate_ascent as ascent
from limpet.paper.theory import diminishing_returns as returns
from limpet.paper.theory import leave_one_out as loo
from limpet.paper.theory import selection_risk as risk
from limpet.paper.theory import separated_modes as separated
from limpet.paper.theory import shared_modes as shared
from limpet.paper.theory import support_restriction as support
from limpet.paper.theory import temperature as temp
from limpet.paper.theory.checks import compare_means, worst_case
from limpet.paper.theory.output_distribution import output_distribution
from limpet.paper.theory.problems import RANDOM, chain, large, product, random_distributions, random_words, tiny, truth

PAGE = (Path(__file__).parents[2] / "docs/theory.md").read_text()
SLOW = {"closed-loop", "closed-loop-exact", "closed-loop-mend"}
BATCH = 50  # sources in each example: 25 examples are 1,250 sources for each statement


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.more)], ids=["quick", "all"])
def tables(request: pytest.FixtureRequest) -> dict[str, list[Check]]:
    """What `limpet paper theory` prints, with or without the slow statements."""
    return {name: statement.checks() for name, statement in STATEMENTS.items() if not (request.param and name in SLOW)}


def violations(rows: list[Check] | Check) -> set[str]:
    return {row.statement for row in ([rows] if isinstance(rows, Check) else rows) if row.verdict == "VIOLATED"}


def exchanged(row: Check) -> Check:
    return row._replace(left=row.right, right=row.left)


# Checks


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Check("", "", 1.0, "<=", 2.0), "holds"),
        (Check("", "", 2.0, "<=", 1.0), "VIOLATED"),
        (Check("", "", 1.0, "<=", 1.0 - 1e-12), "equal"),
        (Check("", "", 1.0, "<=", 1.0 - 1e-9), "VIOLATED"),
        (Check("", "", 1e6, "<=", 1e6 - 1e-5), "equal"),
        (Check("", "", 1.0, "=", 1.0 + 1e-9), "VIOLATED"),
        (Check("", "", 1.0, "=", 1.3, error=0.1), "equal"),
        (Check("", "", 1.0, "=", 1.5, error=0.1), "VIOLATED"),
        (Check("", "", 0.0, "<", 1e-300), "holds"),
        (Check("", "", 0.0, "<", 0.0), "VIOLATED"),
        (Check("", "", 1.0, "~", 2.0), "below"),
        (Check("", "", 2.0, "~", 1.0), "above"),
        (Check("", "", 2.0, "~", 1.0, error=1.0), "equal"),
        (Check("", "", -math.inf, "<=", -math.inf), "equal"),
        (Check("", "", -math.inf, "<=", 0.0), "holds"),
        (Check("", "", math.nan, "<=", 0.0), "VIOLATED"),
        (Check("", "", math.nan, "=", math.nan), "VIOLATED"),
    ],
)
def test_a_verdict_follows_from_the_two_sides(row: Check, verdict: str) -> None:
    assert row.verdict == verdict


def test_the_worst_case_is_the_violated_one() -> None:
    """Also beside many tight cases, and beside tight cases with small sides."""
    left = torch.tensor([1.0, 0.5, 1e-17, 5.0, 1.0], dtype=torch.float64)
    right = torch.tensor([1.0, 0.6, 0.0, 9.0, 0.99], dtype=torch.float64)
    row = worst_case("", "", left, "<=", right)
    assert (row.left, row.right, row.verdict) == (1.0, 0.99, "VIOLATED")
    row = worst_case("", "", left[:4], "<=", right[:4])
    assert (row.left, row.right, row.verdict) == (1.0, 1.0, "equal")
    assert worst_case("", "", torch.tensor([0.0, math.nan]), "<=", 1.0).verdict == "VIOLATED"


def test_the_error_of_paired_means_is_that_of_their_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    common, own = torch.randn(2, 10_000, generator=generator, dtype=torch.float64)
    paired = compare_means("", "", common, "=", common + 0.01 * own + 1)
    assert paired.slack == pytest.approx(1, abs=1e-3)
    assert paired.error == pytest.approx(1e-4, rel=0.05)
    assert paired.verdict == "VIOLATED"
    against_zero = compare_means("", "", common, "=", 0.0)
    assert (against_zero.right, against_zero.verdict) == (0.0, "equal")
    assert against_zero.error == pytest.approx(1e-2, rel=0.05)


# Claims on random sources


def random_rows(seed: int, vocab_size: int, length: int, noise: float) -> list[Check]:
    """Every claim of the statements on random sources of one shape."""
    joint = random_distributions(BATCH, vocab_size**length, seed=seed, zeros=0.3)
    words, weights = random_words(BATCH, 3, length, vocab_size, seed=seed), random_distributions(BATCH, 3, seed=seed)
    favoured = torch.cat([0.5 + weights[:, :1] / 2, weights[:, 1:] / 2], 1)
    pairs, modes = (random_distributions(BATCH, 2, *shape, vocab_size, seed=seed) for shape in ((), (2,)))
    probs, kept, z, signal = support.random_steps(BATCH, vocab_size, seed)
    beta = torch.linspace(0.05, 2, BATCH, dtype=torch.float64)
    levels = torch.linspace(0.05, 1, BATCH, dtype=torch.float64)[:, None].expand(-1, vocab_size)
    mixed = random_distributions(BATCH, 3, length, vocab_size, seed=seed + 1, zeros=0.3)
    context = random_distributions(BATCH, 3, 4, seed=seed + 2)
    positive = "", random_distributions(BATCH, vocab_size**length, seed=seed), vocab_size
    chains = ascent.random_chains(20, vocab_size, length + 1, 2, seed)
    return [
        risk.check("", joint, vocab_size, [1.0, 0.9, 0.5, 0.2, 0.01, 0.0]),
        *risk.check_simulation("", joint, vocab_size, 0.77, 0.31),
        *separated.check_nearest("", words, vocab_size, noise / 4),
        *separated.check_gap("", words, favoured, vocab_size),
        loo.check_random("", joint, vocab_size, noise),
        *shared.check_gap("", weights, mixed),
        *shared.check_context("", shared.with_context(weights, context, mixed), vocab_size),
        shared.check_ratio("", weights, context),
        *combined.check("", combined.random_evidence(BATCH, 3, seed, 2, 3, 2, vocab_size)),
        *returns.check("", *returns.random_problems(BATCH, seed)),
        returns.check_observation("", combined.random_evidence(BATCH, 2, seed)),
        bayes.check_order("", pairs.amax(1), pairs.amin(1), vocab_size, bayes.NOISES),
        bayes.check_slope("", pairs.amax(1), pairs.amin(1), levels, vocab_size),
        bayes.check_denoiser("", random_distributions(5, 2, seed=seed), modes[:5], 0.3),
        support.check("", probs, kept, z, signal),
        support.check_top_p("", probs, 0.05 + 0.95 * noise, z, signal),
        *temp.check_characterisation("", probs, temp.tempered(probs, beta), beta),
        *temp.check_convexity("", probs, random_distributions(BATCH, vocab_size, seed=seed + 3), beta),
        *ascent.check_one(positive, 1 - noise / 2),
        ascent.check_two(positive),
        *ascent.check_rest(positive),
        *(row for spacing in (2, 3) for row in ascent.check_many(chains, spacing)),
    ]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([(2, 3), (2, 5), (3, 3), (4, 2)]), st.floats(0.05, 1.0))
def test_no_claim_is_violated_on_random_sources(seed: int, shape: tuple[int, int], noise: float) -> None:
    assert not violations(random_rows(seed, *shape, noise))


# Selection risk


def test_selection_risk_is_equal_for_independent_tokens() -> None:
    joint = product(random_distributions(RANDOM, 3, 3, seed=1))
    signals = [1.0, 0.6, 0.3, 0.0]
    risks = torch.stack([risk.risks(joint, 3, signal) for signal in signals])
    torch.testing.assert_close(risks, risks[:1].expand_as(risks), rtol=0, atol=1e-12)
    assert risk.check("", joint, 3, signals).verdict == "equal"


def test_selection_risk_can_fail() -> None:
    joint = random_distributions(RANDOM, 27, seed=2)
    assert violations(risk.check("", joint, 3, [0.3, 0.6]))
    # Noise that leaves one position for another is not further corruption, though there is more of it in all.
    before, after = torch.tensor([1.0, 0.1, 1.0]), torch.tensor([1.0, 0.9, 0.0])
    assert violations(risk.check("", joint, 3, [before, after]))
    simulated = risk.simulated_risks(joint, 3, 0.6, 0.3)[0]
    assert violations(worst_case("", "", simulated, "=", risk.risks(joint, 3, 0.35)[0]))


def test_selection_risk_by_hand() -> None:
    """Two equal bits, 00 or 11: the other bit is right with probability signal + noise / 2."""
    joint = torch.tensor([[0.5, 0.0, 0.0, 0.5]], dtype=torch.float64)
    for signal in (1.0, 0.7, 0.0):
        assert float(risk.risks(joint, 2, signal)[0]) == pytest.approx((1 - signal) / 2, abs=1e-12)


def test_the_deficit_has_less_variance_than_the_errors_of_the_argmax() -> None:
    for source in tiny() + large():
        deficits, errors = risk.sampled_risks(source, [0.15], 2000, seed=1)
        assert float(deficits.std()) < float(errors.std())


# Separated modes


def test_separated_modes_can_fail() -> None:
    words = random_words(RANDOM, 3, 5, 3, seed=4)
    rows = separated.check_nearest("", words, 3, 0.9, everywhere=True)
    assert violations(rows) == {"ln binomial tail <= Chernoff exponent"}
    weights = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).expand(RANDOM, 3)
    assert violations(separated.check_gap("", words, weights, 3)) == {"0 < Hamming gap"}
    likeliest, near, spelled = separated.count_exceptions(words[0], 3, 0.4, torch.tensor([0.98, 0.01, 0.01])).values()
    assert likeliest
    assert near
    assert not spelled


# The leave-one-out distribution


def test_a_mean_with_equal_weights_is_another_distribution() -> None:
    for source in tiny():
        rows = loo.check("", source, 0.4, weighted=False)
        assert violations(rows) == {"mean of the posterior = leave-one-out distribution (TV)"}


# Shared modes


def test_shared_modes_can_fail() -> None:
    weights, distributions = random_distributions(RANDOM, 3, seed=8), random_distributions(RANDOM, 3, 3, 3, seed=9)
    rows = shared.check_gap("", weights, distributions)[1:]
    rows.append(shared.check_ratio("", weights[:8], random_distributions(8, 3, 4, seed=9)))
    assert all(violations(exchanged(row)) for row in rows)
    # The context says whether two tokens agree. They are independent given the mode, and not given both.
    weights = torch.tensor([[0.95, 0.05]], dtype=torch.float64)
    distributions = torch.tensor([[[[0.5, 0.5]] * 2, [[0.9, 0.1]] * 2]], dtype=torch.float64)
    tokens = weights[..., None] * product(distributions)  # (1, 2, 4)
    agree = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    rows = shared.check_context("", torch.stack([tokens * agree, tokens * (1 - agree)], 2), 2)
    assert len(violations(rows)) == len(rows) == 2


# Combined evidence and diminishing returns


def test_combined_evidence_can_fail() -> None:
    bounds = [row for row in combined.check("", combined.random_evidence(20, 4, seed=30)) if row.relation == "<="]
    assert len(bounds) == 5
    assert all(violations(exchanged(row)) for row in bounds)
    # One token that is observed twice is not two tokens: bounds that count it twice promise too much.
    evidence = combined.random_evidence(RANDOM, 3, seed=2)
    evidence = evidence._replace(observed=evidence.observed[:, :1].expand(-1, 2).contiguous())
    whole = combined.joint(evidence)
    first = whole.view(*whole.shape[:-1], 2, 2).sum(-1)  # of the two observations: the second becomes its copy
    probs = torch.diag_embed(first).flatten(-2)
    assert float(probs.sum((1, 2, 3, 4)).sub(1).abs().max()) < 1e-12  # still a distribution
    expected = {"ln posterior odds <= ln prior odds - S - T", "posterior error <= e(S, T)"}
    assert expected <= violations(combined.check("", evidence, probs))


def test_diminishing_returns_can_fail() -> None:
    odds, support_, context, more = returns.random_problems(RANDOM, seed=1)
    assert violations(returns.check("", odds, support_, context, -more)) >= {"0 < gain", "dG/dS < 0"}
    assert violations(returns.check_observation("", combined.random_evidence(RANDOM, 3, seed=3)))  # three modes


# The Bayes factor, support restriction, temperature


def test_the_bayes_factor_can_fail_for_the_disfavoured_mode() -> None:
    pairs = random_distributions(RANDOM, 2, 5, seed=1)
    assert violations(bayes.check_order("", pairs.amin(1), pairs.amax(1), 5, bayes.NOISES))
    assert bayes.check_order("", pairs[:, 0], pairs[:, 0], 5, bayes.NOISES).verdict == "equal"


def test_restriction_can_fail_when_the_set_is_ranked_after_conversion() -> None:
    probs, _, z, signal = support.random_steps(RANDOM, 12, 3)
    assert violations(support.check_top_p("", probs, 0.9, z, signal, rank="posterior"))


def test_temperature_can_fail_when_tokens_are_exchanged() -> None:
    probs = random_distributions(RANDOM, 6, seed=4)
    beta = torch.full((RANDOM,), 1.5, dtype=torch.float64)
    rows = temp.check_characterisation("", probs, temp.tempered(probs, beta).roll(1, -1), beta)
    assert len(violations(rows)) == len(rows)


def test_a_fit_stops_at_zero_where_rankings_are_opposed() -> None:
    probs = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    beta, residual = temp.fit(probs, probs.flip(-1))
    assert float(beta) == 0
    assert float(residual) == pytest.approx(math.log(3) - float(-(probs * probs.log()).sum()), abs=1e-12)


# Coordinate ascent


def test_coordinate_ascent_can_fail() -> None:
    for order in (1, 2):
        assert violations(ascent.check_many(ascent.random_chains(RANDOM, 2, 6, order, seed=7), order - 1))
    joints = ascent.random_joints(3, 3, seed=1)
    assert len(violations(ascent.check_one(joints, signal=0.9, model_signal=0.3))) == 2
    assert violations(ascent.check_many(joints, spacing=1))  # not a chain
    assert not violations(ascent.check_many(joints, spacing=3))  # one token at a time


def test_the_gain_is_that_by_which_mend_ranks() -> None:
    at = ascent.predict(random_distributions(9, 27, seed=2), 3)
    gain = dense.gain_of(at.probs, at.inputs.expand_as(at.top))
    torch.testing.assert_close(at.gain, gain.clamp(min=0), rtol=1e-12, atol=1e-12)


def test_exact_predictions_by_loops() -> None:
    """P(clean token at i | noisy tokens elsewhere), and the distribution of the input, summed by hand."""
    joint, signal = random_distributions(1, 8, seed=3), 0.7
    words = list(itertools.product((0, 1), repeat=3))
    at = ascent.predict(joint, 2, signal)

    def channel(z: int, x: int) -> float:
        return signal * (z == x) + (1 - signal) / 2

    for code, z in enumerate(words):
        q = sum(float(joint[0, k]) * math.prod(map(channel, z, x)) for k, x in enumerate(words))
        assert float(at.log_q[0, code]) == pytest.approx(math.log(q), abs=1e-12)
        for i in range(3):
            weights = [0.0, 0.0]
            for k, x in enumerate(words):
                weights[x[i]] += float(joint[0, k]) * math.prod(channel(z[j], x[j]) for j in range(3) if j != i)
            probs = [weight / sum(weights) for weight in weights]
            assert at.probs[0, code, i].tolist() == pytest.approx(probs, abs=1e-12)


def test_which_inputs_reach_a_fixed_point() -> None:
    step = torch.tensor([[0, 0, 1, 2, 5, 4], [1, 2, 3, 4, 5, 0]])
    assert ascent.reaches_fixed_point(step).tolist() == [[True, True, True, True, False, False], [False] * 6]


def test_noise_takes_the_claims_away() -> None:
    """On a chain with noise, a revision may lower the data distribution, and distant tokens are not independent."""
    markov = tiny()[2]
    assert ascent.falling_share(markov, 1.0) == 0
    assert ascent.falling_share(markov, 0.4) > 0.01
    assert ascent.interaction(markov, 1.0, 2) == pytest.approx(0, abs=1e-12)
    assert ascent.interaction(markov, 0.6, 1) > ascent.interaction(markov, 0.6, 2) > 0.01


# The closed loops


def test_the_check_of_samples_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sampler = exact_outputs.latent(), CRS(nfe=8, budget=1.0)
    assert not violations(exact_outputs.check_samples(source, "", sampler, seed=1))
    exact = output_distribution(source, sampler.replace(warmup=0.5))
    monkeypatch.setattr(exact_outputs, "output_distribution", lambda *_: exact)
    assert len(violations(exact_outputs.check_samples(source, "", sampler, seed=1))) == 2


def test_the_measures_of_the_data_distribution() -> None:
    source = exact_outputs.latent()
    measures = exact_outputs.measures_of(source, truth(source))
    assert measures["tv"] == measures["reverse_kl"] == 0
    assert measures["kl"] == pytest.approx(0, abs=1e-12)
    assert measures["favoured"] == pytest.approx(0.5, abs=1e-12)


def test_committing_at_once_without_a_budget_always_gives_one_sequence() -> None:
    """Theorem 1 says that context makes tokens agree, not on which mode: here all trajectories end in the same one."""
    for source in (exact_outputs.latent(), chain(4)):
        probs = output_distribution(source, closed.samplers(source, 16, "argmax")["CRS, no warmup, no budget"])
        assert float(probs.max()) > 1 - 1e-9


def test_the_native_sampler_beside_mend_has_the_final_step_of_free_positions() -> None:
    native = closed_mend.samplers(chain(4), 8, "keep")["native"]
    assert (native.nfe, native.final_step, native.late_top_p) == (8, "sample", None)
    assert closed_mend.samplers(chain(4), 8, "argmax")["native"].final_step == "argmax"


def test_an_infinite_divergence_is_left_out() -> None:
    title = exact_outputs.TITLES["reverse_kl"]
    rows = closed_mend.contrasts(chain(4), 4, "argmax")
    assert all(math.isfinite(row.left) and math.isfinite(row.right) for row in rows)
    assert not any(row.statement.startswith(title) for row in rows)
    assert any(row.statement.startswith(title) for row in closed_mend.contrasts(chain(4), 4, "keep"))


def test_sixteen_interleaved_calls_do_what_48_others_do() -> None:
    pairs = ((16, True), (47, False), (48, False))
    samplers = [interleave.native(nfe, "uniform", interleaved) for nfe, interleaved in pairs]
    interleaved, before, after = exact_outputs.sweep(chain(4), samplers)["tv"]
    assert after < interleaved < before
    assert "16 interleaved calls do what 48" in " ".join(PAGE.split())


def test_in_two_interleaved_calls_pairs_of_neighbours_are_drawn_exactly() -> None:
    """The first of two tokens is drawn as if it stood alone, and the second given the first. All at once they are
    independent. Both hold up to what noise at t = 1 still says."""
    source = chain(2)
    data = truth(source).view(3, 3)
    exact, independent = (
        output_distribution(source, interleave.native(2, "uniform", value)).view(3, 3) for value in (True, False)
    )
    torch.testing.assert_close(exact, data, rtol=0, atol=2e-3)
    torch.testing.assert_close(independent, data.sum(1)[:, None] * data.sum(0), rtol=0, atol=2e-2)


# The tables, and the page that shows them


def test_nothing_is_violated(tables: dict[str, list[Check]]) -> None:
    assert not [row for rows in tables.values() for row in rows if row.verdict == "VIOLATED"]


def test_every_statement_is_checked_on_random_sources_and_meets_equality(tables: dict[str, list[Check]]) -> None:
    only_equalities = {"leave-one-out", "support-restriction"}
    for name, rows in tables.items():
        if not name.startswith("closed-loop"):
            assert any(row.source.startswith(f"{RANDOM:,} random") for row in rows), name
            relations = {row.relation for row in rows if row.verdict == "equal"}
            assert relations >= ({"="} if name in only_equalities | {"diminishing-returns"} else {"<="}), name


def test_the_page_shows_what_is_measured(tables: dict[str, list[Check]]) -> None:
    known = {(row.statement, row.source): row for rows in tables.values() for row in rows}
    complete, shown = len(tables) == len(STATEMENTS), 0
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.replace(r"\|", "\0").strip("|").split("|")]
        if line.startswith("|") and len(cells) == 6 and cells[3] in ("<=", "<", "=", "~"):
            row = known.get((cells[0].replace("\0", "|"), cells[1]))
            if row is None and not complete:
                continue
            assert row is not None, line
            assert float(cells[2]) == pytest.approx(row.left, rel=0.02, abs=1e-6), row
            assert float(cells[4]) == pytest.approx(row.right, rel=0.02, abs=1e-6), row
            assert cells[5] == row.verdict, row
            shown += 1
    assert shown > (100 if complete else 50)


def test_the_page_lists_every_statement() -> None:
    for name, statement in STATEMENTS.items():
        place = "" if statement.where == "beyond the paper" else f"{statement.where} "
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.endswith(f"| {place}|")
        assert row.split(" | ")[1].split(", ")[0] in statement.summary


def test_the_page_says_how_much_nearer_interleaved_steps_are(tables: dict[str, list[Check]]) -> None:
    ratios: dict[tuple[str, str], list[float]] = {}  # of the distances, by source and grid
    for row in tables["closed-loop-interleave"]:
        if row.relation == "~":
            name, *_, grid, _ = row.source.split(", ")
            ratios.setdefault((name, grid), []).append(row.left / row.right)
    text = " ".join(PAGE.partition("## Interleaved steps")[2].split())
    assert len(ratios) == len(interleave.SOURCES) * len(interleave.GRIDS)
    for (name, _), values in ratios.items():
        assert f"{min(values):.0%} to {max(values):.0%}" in text
        assert (max(values) < 1) == (name != "pairs two positions apart")
