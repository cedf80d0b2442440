"""The exact output distribution against a literal transcription of the algorithm, and `limpet.sample` against the distribution."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_published_samplers import trapezoidal_distribution

from backends import Posterior
from limpet import CRS, Gibbs, LimpetError, Mend, Native, sample
from limpet.models.exact import Markov, Mixture, Source, codebook
from limpet.paper.theory.output_distribution import corrected_distribution, output_distribution
from limpet.paper.theory.problems import (
    chain,
    encode,
    marginals,
    product,
    random_distributions,
    sequences,
    tiny,
    total_variation,
    truth,
)
from limpet.samplers import parse

EPS, FLOOR = 1e-5, 1e-3


def times(sampler: Native) -> list[float]:
    n = sampler.nfe
    w = round(sampler.warmup * (n - 1))
    if sampler.grid == "quadratic":
        return [(1 + (math.sqrt(EPS) - 1) * r / (n - 1)) ** 2 for r in range(n)]
    if sampler.grid == "uniform" or w in (0, n - 1):
        return [1 + (EPS - 1) * r / (n - 1) for r in range(n)]
    split = 1 - sampler.warmup * (1 - EPS)
    early = [1 + (split - 1) * r / w for r in range(w)]
    return early + [split + (EPS - split) * r / (n - 1 - w) for r in range(n - w)]


def restricted(probs: list[float], p: float, boundary: str) -> list[float]:
    if p >= 1:
        return probs
    kept, mass = set(), 0.0
    for a in sorted(range(len(probs)), key=lambda a: -probs[a]):
        kept.add(a)
        mass += probs[a]
        if mass > p or (boundary == "paper" and mass >= p):
            break
    return [h / mass if a in kept else 0.0 for a, h in enumerate(probs)]


def channel(z: int, x: int, signal: float, size: int) -> float:
    return signal * (z == x) + (1 - signal) / size


def reverse(probs: list[float], z: int, signal_t: float, signal_s: float) -> list[float]:
    """Equation 7 as written: the bridge of every clean token, weighted by the posterior."""
    size = len(probs)
    joint = [h * channel(z, x, signal_t, size) for x, h in enumerate(probs)]
    total = [0.0] * size
    for x, weight in enumerate(joint):
        over = [channel(y, x, signal_s, size) * channel(z, y, signal_t / signal_s, size) for y in range(size)]
        for y in range(size):
            total[y] += weight / sum(joint) * over[y] / sum(over)
    return total


def greedy(deficit: dict[int, float], count: int, budget: float, spacing: int) -> list[int]:
    chosen: list[int] = []
    spent = 0.0
    for i in sorted(deficit, key=lambda i: (deficit[i], i)):
        if any(abs(i - j) <= spacing for j in chosen):
            continue
        if len(chosen) == count or spent + deficit[i] > budget:
            break
        chosen.append(i)
        spent += deficit[i]
    return chosen


def transcription(joint: list[float], size: int, length: int, sampler: Native) -> dict[tuple[int, ...], float]:
    """Algorithm 1 with every draw enumerated; a row holds each position's token, label and step of selection."""
    words = list(itertools.product(range(size), repeat=length))

    @cache
    def distributions(seen: tuple[int, ...], signal: float) -> list[list[float]]:
        """The leave-one-out distributions by Bayes' rule over all clean sequences."""
        found = [[0.0] * size for _ in range(length)]
        for word, mass in zip(words, joint, strict=True):
            each = [channel(z, x, signal, size) for z, x in zip(seen, word, strict=True)]
            for i in range(length):
                found[i][word[i]] += mass * math.prod(each[:i] + each[i + 1 :])
        found = [[(h / max(probs)) ** (1 / sampler.temperature) for h in probs] for probs in found]
        return [[h / sum(probs) for h in probs] for probs in found]

    n, grid = sampler.nfe, times(sampler)
    signals = [1 - (1 - FLOOR) * t for t in grid]
    warmup = round(sampler.warmup * (n - 1))
    after = max(1, n - 1 - warmup)
    count, budget, horizon, spacing, values, write = 0, 0.0, math.inf, 0, "argmax", "input"  # labels: none
    if isinstance(sampler, CRS):
        count = math.ceil(length / after) if sampler.count is None else sampler.count
        budget = sampler.budget * length / after
        horizon = math.inf if sampler.horizon is None else sampler.horizon
        spacing, values, write = sampler.spacing, sampler.values, sampler.write
    mend, apart, turns = 0, 0, 1
    if isinstance(sampler, Mend):
        mend = math.ceil(length / 32) if sampler.mend is None else sampler.mend
        apart, turns = sampler.apart, math.ceil(n / 32) if sampler.turns is None else sampler.turns
    rows = {tuple((z, None, None) for z in word): 1 / len(words) for word in words}
    for r in range(n):
        following: dict[tuple, float] = defaultdict(float)
        late = sampler.top_p if sampler.late_top_p is None or r < warmup else sampler.late_top_p
        for row, mass in rows.items():
            visible = [e is not None and r - e <= horizon and write != "output" for _, _, e in row]
            seen = tuple(c if v else z for (z, c, _), v in zip(row, visible, strict=True))
            probs = distributions(seen, signals[r])
            top = [max(range(size), key=lambda a, h=h: (h[a], -a)) for h in probs]
            drawn = [restricted(h, late, sampler.boundary) for h in probs]
            last = r == n - 1
            if last and sampler.final_step == "argmax":
                moves = [[float(a == top[i]) for a in range(size)] for i in range(length)]
            else:
                target, origin = 1.0 if last else signals[r + 1], signals[max(0, r - 1) if sampler.interleave else r]
                moves = [reverse(drawn[i], row[i][0], origin, target) for i in range(length)]
                if sampler.interleave:
                    moves = [
                        moves[i] if (i - r) % 2 == 0 else [float(a == row[i][0]) for a in range(size)]
                        for i in range(length)
                    ]
            tags = [(c, e) for _, c, e in row]
            if not last and r >= warmup:
                free = {i: 1 - probs[i][top[i]] for i in range(length) if tags[i][1] is None}
                ranked = [sorted(range(size), key=lambda a, h=h: (-h[a], a)) for h in probs]
                for i in greedy(free, count, budget, spacing):
                    tags[i] = (ranked[i][1] if values == "second" else top[i], r)
                due = {
                    "refreshed": [True] * length,
                    "refreshed-half": [r % 2 == 0] * length,
                    "refreshed-in-turn": [(i + r) % 2 == 0 for i in range(length)],
                }.get(values, [False] * length)
                tags = [(top[i], e) if visible[i] and due[i] else (c, e) for i, (c, e) in enumerate(tags)]
            behind = {}
            for i, (_, c, _) in enumerate(
                row
            ):  # how little the distribution gives a label of what it gives the best token
                if (
                    visible[i]
                    and (i + r) % turns == 0
                    and probs[i][c] < max(h for a, h in enumerate(probs[i]) if a != c)
                ):
                    behind[i] = probs[i][c] / max(probs[i])
            for i in greedy(behind, mend, math.inf, apart):
                tags[i] = (top[i], tags[i][1])
            if last and (write != "input" or sampler.final_step == "keep"):
                moves = [m if e is None else [float(a == c) for a in range(size)]
                         for m, (c, e) in zip(moves, tags, strict=True)]  # fmt: skip
            for word in words:
                chance = math.prod(move[y] for move, y in zip(moves, word, strict=True))
                if chance:
                    following[tuple((y, c, e) for y, (c, e) in zip(word, tags, strict=True))] += mass * chance
        rows = following
    output: dict[tuple[int, ...], float] = defaultdict(float)
    for row, mass in rows.items():
        output[tuple(z for z, _, _ in row)] += mass
    return output


def a_source(kind: str, seed: int, vocab_size: int, length: int) -> Source:
    if kind == "markov":
        distributions = random_distributions(vocab_size + 1, vocab_size, seed=seed)
        return Markov(distributions[0], distributions[1:], length)
    return Mixture(
        random_distributions(1, 3, seed=seed)[0], random_distributions(1, 3, length, vocab_size, seed=seed + 1)[0]
    )


STEPS = {
    "nfe": st.integers(2, 5),
    "warmup": st.sampled_from([0.0, 0.33, 0.5]),
    "temperature": st.sampled_from([1.0, 1.0, 0.5, 1.4]),
    "top_p": st.sampled_from([1.0, 0.9, 0.6]),
    "late_top_p": st.sampled_from([None, 0.8]),
    "final_step": st.sampled_from(["argmax", "sample"]),
    "grid": st.sampled_from(["two-piece", "uniform", "quadratic"]),
    "interleave": st.booleans(),
    "boundary": st.sampled_from(["released", "paper"]),
}
LABELS = {
    "horizon": st.sampled_from([None, None, 1, 2]),
    "budget": st.sampled_from([0.0, 0.2, 0.5, 3.0]),
    "spacing": st.integers(0, 2),
    "count": st.sampled_from([None, None, 1, 2]),
    "values": st.sampled_from(["argmax", "argmax", "second", "refreshed", "refreshed-half", "refreshed-in-turn"]),
    "write": st.sampled_from(["input", "input", "output", "both"]),
}
FINAL_STEPS = {"final_step": st.sampled_from(["argmax", "sample", "keep", "keep"])}
MENDING = {
    "mend": st.sampled_from([None, 0, 1, 2]),
    "apart": st.integers(0, 2),
    "turns": st.sampled_from([None, 1, 2]),
}
LABELLED = {**STEPS, **LABELS, **FINAL_STEPS}
SAMPLERS = st.builds(Native, **STEPS) | st.builds(CRS, **LABELLED) | st.builds(Mend, **LABELLED, **MENDING)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(sampler=SAMPLERS, kind=st.sampled_from(["markov", "mixture"]), seed=st.integers(0, 10**6))
def test_the_law_is_that_of_the_algorithm_as_written(sampler: Native, kind: str, seed: int) -> None:
    source = a_source(kind, seed, 2, 3)
    wanted = transcription(truth(source).tolist(), 2, 3, sampler)
    found = output_distribution(source, sampler)
    for code, word in enumerate(itertools.product(range(2), repeat=3)):
        assert float(found[code]) == pytest.approx(wanted[word], abs=1e-10)


def test_the_transcription_tells_samplers_apart() -> None:
    """Agreement means something: one parameter away, the distributions differ."""
    words, weights = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 1]]), torch.tensor([0.4, 0.35, 0.25])
    source, sampler = codebook(words, 2, weights, slip=0.3), CRS(nfe=5, warmup=0.5, budget=1.0, spacing=0)
    found = output_distribution(source, sampler).tolist()
    changes = [
        {"horizon": 1}, {"count": 0}, {"budget": 0.3}, {"values": "second"}, {"final_step": "sample"},
        {"spacing": 1}, {"count": 1}, {"top_p": 0.7}, {"write": "output"}, {"warmup": 0.33}, {"temperature": 0.8},
        {"interleave": True}, {"grid": "quadratic"},
    ]  # fmt: skip
    for other in [Native(nfe=5, warmup=0.5), *(sampler.replace(**change) for change in changes)]:
        probs = transcription(truth(source).tolist(), 2, 3, other)
        assert sum(abs(p - probs[tuple(word)]) for p, word in zip(found, sequences(2, 3).tolist(), strict=True)) > 1e-3


def test_the_law_is_that_of_the_algorithm_with_three_symbols() -> None:
    source = a_source("mixture", 11, 3, 3)
    for sampler in (
        CRS(nfe=4, warmup=0.0, spacing=1),
        Native(nfe=4, top_p=0.7, final_step="sample"),
        Native(nfe=4, temperature=0.8, final_step="sample"),
    ):
        wanted = transcription(truth(source).tolist(), 3, 3, sampler)
        found = output_distribution(source, sampler)
        for code, word in enumerate(itertools.product(range(3), repeat=3)):
            assert float(found[code]) == pytest.approx(wanted[word], abs=1e-10)


@pytest.mark.parametrize("grid", ["uniform", "two-piece"])
def test_the_native_sampler_converges_to_the_data_law(grid: str) -> None:
    """With an ancestral final_step the error is of first order in the step: four times the calls, a quarter of it."""
    source = tiny()[2]
    distances = []
    for nfe in (16, 64, 256):
        probs = output_distribution(source, Native(nfe=nfe, final_step="sample", grid=grid))
        assert float(probs.sum()) == pytest.approx(1, abs=1e-12)
        distances.append(float(total_variation(probs, truth(source))))
    assert 0.02 < distances[0] < 0.08
    assert distances[0] / 6 < distances[1] < distances[0] / 3
    assert distances[1] / 6 < distances[2] < distances[1] / 3


@pytest.mark.parametrize(
    "sampler",
    [
        Native(nfe=8, top_p=0.8),
        Native(nfe=8, temperature=0.8, final_step="sample"),
        CRS(nfe=8, spacing=0),
        CRS(nfe=8, spacing=1, horizon=2),
        CRS(nfe=8, spacing=0, final_step="sample"),
        CRS(nfe=8, spacing=0, horizon=3, budget=0.2, values="refreshed", top_p=0.8, write="both"),
    ],
    ids=lambda sampler: sampler.caption,
)
def test_samples_follow_the_law(sampler: Native) -> None:
    """Pearson's test at level 1e-6; outputs expected less than five times are pooled."""
    source = a_source("mixture", 5, 2, 4)
    exact, n = output_distribution(source, sampler), 20_000
    counts = torch.bincount(encode(sample(source, sampler, n, seed=7, batch_size=n).tokens, 2), minlength=16).double()
    assert not counts[exact == 0].any()
    rare = n * exact < 5
    expected = torch.cat([n * exact[~rare], n * exact[rare].sum()[None]]).clamp(min=1e-9)
    found = torch.cat([counts[~rare], counts[rare].sum()[None]])
    statistic = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(1.0, float(len(expected) - 1)), dtype=torch.float64)
    assert float(torch.special.gammaincc(freedom / 2, statistic / 2)) > 1e-6


@pytest.mark.parametrize(
    "sampler",
    [
        CRS(nfe=5, spacing=0),
        Native(nfe=5, top_p=0.8, final_step="sample"),
        Native(nfe=5, temperature=0.8, top_p=0.8, final_step="sample"),
    ],
    ids=lambda sampler: sampler.caption,
)
def test_a_posterior_model_has_the_same_law(sampler: Native) -> None:
    source = a_source("markov", 3, 2, 3)
    torch.testing.assert_close(
        output_distribution(Posterior(source), sampler), output_distribution(source, sampler), rtol=0, atol=1e-10
    )


def test_a_horizon_beyond_the_path_is_endless() -> None:
    source = a_source("mixture", 9, 2, 3)
    for final_step in ("argmax", "sample"):
        sampler = CRS(nfe=5, spacing=0, warmup=0.0, final_step=final_step)
        torch.testing.assert_close(
            output_distribution(source, sampler.replace(horizon=40)), output_distribution(source, sampler)
        )


def test_a_law_that_draws_nothing_sums_to_one() -> None:
    source = a_source("mixture", 4, 3, 4)
    for sampler in (Native(nfe=9), CRS(nfe=9, horizon=2, spacing=0), CRS(nfe=9, final_step="sample", write="both")):
        assert float(output_distribution(source, sampler).sum()) == pytest.approx(1, abs=1e-12)


def test_what_cannot_be_listed_is_refused() -> None:
    source = a_source("markov", 1, 3, 12)
    with pytest.raises(LimpetError, match="smaller source"):
        output_distribution(source, CRS(nfe=4))
    with pytest.raises(LimpetError, match="draws its labels"):
        output_distribution(a_source("markov", 1, 2, 3), CRS(nfe=4, values="nucleus"))

    class Mine(CRS):
        name = "mine"

    with pytest.raises(LimpetError, match="knows what native and CRS remember, not what mine does"):
        output_distribution(a_source("markov", 1, 2, 3), Mine(nfe=4))


def test_codes_products_and_marginals() -> None:
    words = sequences(3, 4)
    assert torch.equal(encode(words, 3), torch.arange(81))
    assert words[5].tolist() == [0, 0, 1, 2]
    distributions = random_distributions(6, 4, 3, seed=0)
    joint = product(distributions)
    assert float(joint[2, 5]) == pytest.approx(
        float(distributions[2, 0, 0] * distributions[2, 1, 0] * distributions[2, 2, 1] * distributions[2, 3, 2])
    )
    torch.testing.assert_close(marginals(joint, 3), distributions, rtol=1e-12, atol=1e-12)


# -- samplers of the field --------------------------------------------------------------------------------------------

PLAIN = "final_step=sample grid=uniform"
TABLE = {  # total variation to the data distribution of the Markov source with 16, 64 and 256 calls; trapezoidal, 17 and 65
    f"native {PLAIN}": (0.048, 0.0105, 0.0025),
    f"native {PLAIN} interleave=true": (0.0153, 0.0032, 0.00077),
    "native final_step=sample grid=quadratic": (0.0372, 0.00847, 0.00207),
    "native final_step=sample grid=quadratic interleave=true": (0.0172, 0.0037, 0.00089),
    f"ddim {PLAIN}": (0.045, 0.0097, 0.0023),
    f"psi rule=constant eta=.05 {PLAIN}": (0.050, 0.0121, 0.0040),
    f"psi rule=rescale eta=.05 {PLAIN}": (0.049, 0.0109, 0.0031),
    f"psi rule=constant eta=1 {PLAIN}": (0.084, 0.054, 0.039),
    f"gibbs predictor=native,{PLAIN.replace(' ', ',')}": (0.047, 0.0056, 0.0006),
    f"gibbs predictor=native,{PLAIN.replace(' ', ',')} corrections=2 choose=margin": (0.27, 0.40, 0.50),
    f"trapezoidal {PLAIN}": (0.025, 0.0036),
}


@pytest.mark.parametrize("arm", TABLE)
def test_distances_to_the_data_law_are_those_known(arm: str) -> None:
    source, by_twos = chain(5), arm.startswith("trapezoidal")  # two calls a step, and one to read out
    for nfe, known in zip((17, 65) if by_twos else (16, 64, 256), TABLE[arm], strict=True):
        _, sampler = parse(arm, nfe=nfe)
        probs = trapezoidal_distribution(nfe) if by_twos else output_distribution(source, sampler)
        assert float(total_variation(probs, truth(source))) == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize(
    ("parameters", "floor"),
    [("top_p=.9", 0.155), ("temperature=.8", 0.117), ("top_k=2", 0.228), ("final_step=argmax", 0.42)],
)
def test_what_cuts_or_cools_a_law_keeps_its_distance(params: str, floor: float) -> None:
    source, (_, sampler) = chain(5), parse(f"native grid=uniform final_step=sample {params}", nfe=256)
    assert float(total_variation(output_distribution(source, sampler), truth(source))) == pytest.approx(floor, rel=0.02)


@pytest.mark.parametrize(
    "arm",
    [
        "psi rule=constant eta=.5",
        "psi rule=loop eta=.05 final_step=sample",
        "ddim top_p=.8",
        "ddim stay=.4 final_step=sample",
        "gibbs",
        "gibbs positions=2 corrections=2 predictor=psi,rule=constant,eta=.3",
        "gibbs choose=margin predictor=native,temperature=.8",
        "gibbs choose=margin tau=.3 positions=2 predictor=native,final_step=sample",
        "gibbs choose=margin positions=3 predictor=crs,spacing=0",
        "gibbs predictor=crs,spacing=1,horizon=1",
        "crs spacing=0 final_step=keep",
        "crs spacing=0 final_step=keep horizon=1",
        "native interleave=true grid=quadratic final_step=sample",
        "mend spacing=0 interleave=true",
    ],
)
def test_samples_of_the_field_follow_the_law(arm: str) -> None:
    test_samples_follow_the_law(parse(arm, nfe=8)[1])


def test_corrections_that_there_are_no_calls_for_change_nothing() -> None:
    source = a_source("mixture", 5, 2, 3)
    for predictor in ("native", "crs spacing=0"):
        _, alone = parse(predictor, nfe=5)
        for corrections in (0, 5):
            probs = output_distribution(source, Gibbs(nfe=5, predictor=predictor, corrections=corrections))
            assert torch.equal(probs, output_distribution(source, alone))


def test_a_law_after_a_correction_is_refused_where_there_is_none() -> None:
    source, probs = a_source("markov", 1, 2, 3), torch.full((8,), 1 / 8, dtype=torch.float64)
    for sampler, call in ((Gibbs(nfe=5), 0), (Gibbs(nfe=5, predictor="crs"), 1)):
        with pytest.raises(LimpetError, match="is no correction of a state without labels"):
            corrected_distribution(source, sampler, call, probs)
    assert float(corrected_distribution(source, Gibbs(nfe=5), 1, probs).sum()) == pytest.approx(1, abs=1e-12)
