"""Exact output distributions: equal to a literal transcription of the algorithm, and to the shares of drawn samples."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    total_variation,
    truth,
)
from limpet.samplers import Sampler, parse
from thinned import thinned

EPS, FLOOR = 1e-5, 1e-3
Row = tuple[tuple[int, int | None, int | None], ...]  # of each position: token, committed token, call of the commitment


# The algorithm, transcribed


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
        bridge = [channel(y, x, signal_s, size) * channel(z, y, signal_t / signal_s, size) for y in range(size)]
        for y in range(size):
            total[y] += weight / sum(joint) * bridge[y] / sum(bridge)
    return total


def greedy(cost: dict[int, float], count: int, budget: float, spacing: int) -> list[int]:
    chosen: list[int] = []
    spent = 0.0
    for i in sorted(cost, key=lambda i: (cost[i], i)):
        if any(abs(i - j) <= spacing for j in chosen):
            continue
        if len(chosen) == count or spent + cost[i] > budget:
            break
        chosen.append(i)
        spent += cost[i]
    return chosen


class Transcription:
    """Algorithm 1 with every draw enumerated, and Mend's revisions."""

    def __init__(self, joint: list[float], size: int, length: int, sampler: Native) -> None:
        self.joint, self.size, self.length, self.sampler = joint, size, length, sampler
        self.words = list(itertools.product(range(size), repeat=length))
        self.signals = [1 - (1 - FLOOR) * t for t in times(sampler)]
        self.warmup = round(sampler.warmup * (sampler.nfe - 1))
        self.commits = isinstance(sampler, CRS)
        self.predict = cache(self._predict)

    def outputs(self) -> list[float]:
        rows: dict[Row, float] = {tuple((z, None, None) for z in word): 1 / len(self.words) for word in self.words}
        for r in range(self.sampler.nfe):
            following: dict[Row, float] = defaultdict(float)
            for row, mass in rows.items():
                moves, tags = self.call(r, row)
                for word in self.words:
                    chance = math.prod(move[y] for move, y in zip(moves, word, strict=True))
                    if chance:
                        following[tuple((y, *tag) for y, tag in zip(word, tags, strict=True))] += mass * chance
            rows = following
        output = dict.fromkeys(self.words, 0.0)
        for row, mass in rows.items():
            output[tuple(z for z, _, _ in row)] += mass
        return list(output.values())

    def _predict(self, model_input: tuple[int, ...], signal: float) -> list[list[float]]:
        """The leave-one-out distributions, by Bayes' rule over all clean sequences."""
        weights = [[0.0] * self.size for _ in range(self.length)]
        for word, mass in zip(self.words, self.joint, strict=True):
            each = [channel(z, x, signal, self.size) for z, x in zip(model_input, word, strict=True)]
            for i in range(self.length):
                weights[i][word[i]] += mass * math.prod(each[:i] + each[i + 1 :])
        weights = [[(h / max(probs)) ** (1 / self.sampler.temperature) for h in probs] for probs in weights]
        return [[h / sum(probs) for h in probs] for probs in weights]

    def call(self, r: int, row: Row) -> tuple[list[list[float]], list[tuple[int | None, int | None]]]:
        """One call: the distribution of each next token, and what each position has committed after it."""
        sampler, last = self.sampler, r == self.sampler.nfe - 1
        horizon = getattr(sampler, "horizon", None) or math.inf
        in_input = self.commits and sampler.write != "output"
        visible = [e is not None and r - e <= horizon and in_input for _, _, e in row]
        probs = self.predict(tuple(c if v else z for (z, c, _), v in zip(row, visible, strict=True)), self.signals[r])
        tags = [(c, e) for _, c, e in row]
        if self.commits and not last and r >= self.warmup:
            tags = self.commit(r, probs, tags, visible)
        if isinstance(sampler, Mend):
            tags = self.revise(r, probs, row, tags, visible)
        moves = self.moves(r, row, probs)
        if last and self.commits and (sampler.write != "input" or sampler.final_step == "keep"):
            points = [[float(a == c) for a in range(self.size)] for c, _ in tags]
            moves = [move if e is None else point for move, point, (_, e) in zip(moves, points, tags, strict=True)]
        return moves, tags

    def moves(self, r: int, row: Row, probs: list[list[float]]) -> list[list[float]]:
        sampler, last = self.sampler, r == self.sampler.nfe - 1
        late = sampler.top_p if sampler.late_top_p is None or r < self.warmup else sampler.late_top_p
        target, origin = 1.0 if last else self.signals[r + 1], self.signals[max(0, r - 1) if sampler.interleave else r]
        moves = []
        for i, (z, _, _) in enumerate(row):
            if last and sampler.final_step == "argmax":
                moves.append([float(a == self.top(probs[i])) for a in range(self.size)])
            elif sampler.interleave and (i - r) % 2:
                moves.append([float(a == z) for a in range(self.size)])
            else:
                moves.append(reverse(restricted(probs[i], late, sampler.boundary), z, origin, target))
        return moves

    def top(self, probs: list[float], rank: int = 0) -> int:
        return sorted(range(self.size), key=lambda a: (-probs[a], a))[rank]

    def commit(self, r: int, probs: list[list[float]], tags: list, visible: list[bool]) -> list:
        sampler = self.sampler
        assert isinstance(sampler, CRS)
        after, values = max(1, sampler.nfe - 1 - self.warmup), sampler.values
        count = math.ceil(self.length / after) if sampler.count is None else sampler.count
        free = {i: 1 - max(probs[i]) for i in range(self.length) if tags[i][1] is None}
        if self.has_turns:
            free = {i: deficit for i, deficit in free.items() if (i - r) % 2 == 0}
        for i in greedy(free, count, sampler.budget * self.length / after, sampler.spacing):
            tags[i] = (self.top(probs[i], rank=int(values == "second")), r)
        refreshes: Callable[[int], bool] = {
            "refreshed": lambda i: True,
            "refreshed-half": lambda i: r % 2 == 0,
            "refreshed-interleaved": lambda i: (i + r) % 2 == 0,
        }.get(values, lambda i: False)
        return [(self.top(probs[i]), e) if visible[i] and refreshes(i) else (c, e) for i, (c, e) in enumerate(tags)]

    @property
    def has_turns(self) -> bool:
        """Whether a call commits only positions that step in it, and revises even or odd ones."""
        return self.sampler.interleave and getattr(self.sampler, "own_turn", False)

    def revise(self, r: int, probs: list[list[float]], row: Row, tags: list, visible: list[bool]) -> list:
        sampler = self.sampler
        assert isinstance(sampler, Mend)
        every = math.ceil(sampler.nfe / 32) if sampler.revise_every is None else sampler.revise_every
        ratios = {}  # of the committed token's probability to the largest one
        for i, (_, c, _) in enumerate(row):
            if visible[i] and (i + r) % every == 0 and probs[i][c] < max(h for a, h in enumerate(probs[i]) if a != c):
                ratios[i] = probs[i][c] / max(probs[i])
        if self.has_turns and ratios:
            worst = min(ratios, key=lambda i: (ratios[i], i))
            ratios = {i: ratio for i, ratio in ratios.items() if (i - worst) % 2 == 0}
        most = math.ceil(self.length / 32) if sampler.revise is None else sampler.revise
        for i in greedy(ratios, most, math.inf, sampler.revise_spacing):
            tags[i] = (self.top(probs[i]), tags[i][1])
        return tags


def a_source(kind: str, seed: int, vocab_size: int, length: int) -> Source:
    if kind == "markov":
        distributions = random_distributions(vocab_size + 1, vocab_size, seed=seed)
        return Markov(distributions[0], distributions[1:], length)
    weights = random_distributions(1, 3, seed=seed)[0]
    return Mixture(weights, random_distributions(1, 3, length, vocab_size, seed=seed + 1)[0])


def transcribed(source: Source, sampler: Native) -> torch.Tensor:
    outputs = Transcription(truth(source).tolist(), source.vocab_size, source.length, sampler).outputs()
    return torch.tensor(outputs, dtype=torch.float64)


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
COMMITTING = {
    **STEPS,
    "final_step": st.sampled_from(["argmax", "sample", "keep", "keep"]),
    "horizon": st.sampled_from([None, None, 1, 2]),
    "budget": st.sampled_from([0.0, 0.2, 0.5, 3.0]),
    "spacing": st.integers(0, 2),
    "count": st.sampled_from([None, None, 1, 2]),
    "values": st.sampled_from(["argmax", "argmax", "second", "refreshed", "refreshed-half", "refreshed-interleaved"]),
    "write": st.sampled_from(["input", "input", "output", "both"]),
}
REVISING = {
    **COMMITTING,
    "revise": st.sampled_from([None, 0, 1, 2]),
    "revise_spacing": st.integers(0, 2),
    "revise_every": st.sampled_from([None, 1, 2]),
    "own_turn": st.booleans(),
}
SAMPLERS = st.builds(Native, **STEPS) | st.builds(CRS, **COMMITTING) | st.builds(Mend, **REVISING)


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(sampler=SAMPLERS, kind=st.sampled_from(["markov", "mixture"]), seed=st.integers(0, 10**6))
def test_the_distribution_is_that_of_the_algorithm_as_written(sampler: Native, kind: str, seed: int) -> None:
    source = a_source(kind, seed, 2, 3)
    torch.testing.assert_close(output_distribution(source, sampler), transcribed(source, sampler), rtol=0, atol=1e-10)


def test_it_is_also_with_three_symbols() -> None:
    source = a_source("mixture", 11, 3, 3)
    for sampler in (CRS(nfe=4, warmup=0.0, spacing=1), Native(nfe=4, top_p=0.7), Native(nfe=4, temperature=0.8)):
        exact = output_distribution(source, sampler)
        torch.testing.assert_close(exact, transcribed(source, sampler), rtol=0, atol=1e-10)


def test_every_parameter_changes_the_distribution() -> None:
    """Agreement with the transcription means something: one parameter away, the distributions differ."""
    words, weights = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 0, 1]]), torch.tensor([0.4, 0.35, 0.25])
    source, sampler = codebook(words, 2, weights, slip=0.3), CRS(nfe=5, warmup=0.5, budget=1.0, spacing=0)
    changes = [
        {"horizon": 1},
        {"count": 0},
        {"count": 1},
        {"budget": 0.3},
        {"values": "second"},
        {"final_step": "sample"},
        {"spacing": 1},
        {"top_p": 0.7},
        {"write": "output"},
        {"warmup": 0.33},
        {"temperature": 0.8},
        {"interleave": True},
        {"grid": "quadratic"},
    ]
    exact = output_distribution(source, sampler)
    native = Native(nfe=5, warmup=0.5, final_step="argmax")
    for other in [native, *(sampler.replace(**change) for change in changes)]:
        assert float(total_variation(exact, transcribed(source, other))) > 5e-4, other


# Samples


def p_value(source: Source, probs: torch.Tensor, sampler: Sampler, n: int = 20_000) -> float:
    """Pearson's test of samples against a distribution; outputs that are expected less than five times are pooled."""
    tokens = sample(source, sampler, n, seed=8, batch_size=n).tokens
    counts = torch.bincount(encode(tokens, source.vocab_size), minlength=len(probs)).double()
    if counts[probs == 0].any():
        return 0.0
    rare = n * probs < 5
    expected = torch.cat([n * probs[~rare], n * probs[rare].sum()[None]]).clamp(min=1e-9)
    pooled = torch.cat([counts[~rare], counts[rare].sum()[None]])
    statistic = ((pooled - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(1.0, float(len(expected) - 1)), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize(
    "text",
    thinned(
        [
            "native top_p=.8 final_step=argmax",
            "native temperature=.8",
            "native interleave=true grid=quadratic",
            "crs spacing=0",
            "crs spacing=1 horizon=2",
            "crs spacing=0 final_step=sample",
            "crs spacing=0 final_step=keep",
            "crs spacing=0 final_step=keep horizon=1",
            "crs spacing=0 horizon=3 budget=.2 values=refreshed top_p=.8 write=both",
            "mend spacing=0 interleave=true",
            "psi rule=constant eta=.5 final_step=argmax",
            "psi rule=loop eta=.05",
            "ddim top_p=.8 final_step=argmax",
            "ddim stay=.4",
            "gibbs predictor=native,final_step=argmax",
            "gibbs positions=2 corrections=2 predictor=psi,rule=constant,eta=.3",
            "gibbs choose=margin predictor=native,temperature=.8",
            "gibbs choose=margin tau=.3 positions=2",
            "gibbs choose=margin positions=3 predictor=crs,spacing=0",
            "gibbs predictor=crs,spacing=1,horizon=1",
            "gibbs predictor=mend,warmup=.5,spacing=0,budget=3,late_top_p=1",
        ]
    ),
)
def test_samples_follow_the_distribution(text: str) -> None:
    _, sampler = parse(text, nfe=8)
    source = a_source("mixture", 5, 2, 4)
    assert p_value(source, output_distribution(source, sampler), sampler) > 1e-6


EAGER = Mend(nfe=6, warmup=0.5, spacing=0, budget=3.0, late_top_p=None)  # commits early, and revises often
REVISIONS = [
    {},
    {"final_step": "argmax"},
    {"final_step": "sample"},
    {"revise": 2, "revise_spacing": 0},
    {"revise": 3, "revise_spacing": 1},
    {"revise_every": 2},
    {"horizon": 3},
    {"write": "both", "late_top_p": 0.8},
    {"values": "refreshed-interleaved", "revise_every": 2},
]


@pytest.mark.parametrize("changes", thinned(REVISIONS), ids=str)
def test_samples_of_mend_follow_the_distribution(changes: dict) -> None:
    """The revisions change the distribution by more than a hundredth; without them it is that of CRS."""
    source = Markov(torch.tensor([0.55, 0.45]), torch.tensor([[0.85, 0.15], [0.2, 0.8]]), 4)
    mend = EAGER.replace(**changes)
    without = mend.replace(revise=0)
    crs = CRS(**{one.name: getattr(mend, one.name) for one in fields(CRS)})
    exact, other = output_distribution(source, mend), output_distribution(source, without)
    assert float(exact.sum()) == pytest.approx(1, abs=1e-12)
    assert p_value(source, exact, mend, n=60_000) > 1e-6
    assert float(total_variation(exact, other)) > 0.01
    assert torch.equal(other, output_distribution(source, crs))


def test_the_test_of_samples_can_fail() -> None:
    source = Markov(torch.tensor([0.55, 0.45]), torch.tensor([[0.85, 0.15], [0.2, 0.8]]), 4)
    assert p_value(source, output_distribution(source, EAGER), EAGER.replace(revise=0), n=60_000) < 1e-6


# Single properties


def test_the_final_step_revises_before_committed_tokens_are_kept() -> None:
    """On two sites that agree, with both tokens committed in one call, only the last call can bring them together."""
    two = Mixture(torch.ones(2), torch.tensor([[[0.99, 0.01]] * 2, [[0.01, 0.99]] * 2], dtype=torch.float64))
    mend = Mend(nfe=3, warmup=0.5, spacing=0, budget=9.0, late_top_p=None)
    exact, without = output_distribution(two, mend), output_distribution(two, mend.replace(revise=0))
    assert float(without[[1, 2]].sum()) > 0.2
    assert float(exact[[1, 2]].sum()) == 0
    # When both are revised, they still disagree.
    swapped = output_distribution(two, mend.replace(revise=2, revise_spacing=0))
    torch.testing.assert_close(swapped[[1, 2]], without[[2, 1]], rtol=0, atol=1e-12)


def test_a_posterior_model_has_the_same_distribution() -> None:
    source = a_source("markov", 3, 2, 3)
    cool = Native(nfe=5, temperature=0.8, top_p=0.8)
    for sampler in (CRS(nfe=5, spacing=0), Native(nfe=5, top_p=0.8), cool):
        exact, of_posterior = output_distribution(source, sampler), output_distribution(Posterior(source), sampler)
        torch.testing.assert_close(of_posterior, exact, rtol=0, atol=1e-10)


def test_a_horizon_beyond_the_last_call_is_endless() -> None:
    source = a_source("mixture", 9, 2, 3)
    for final_step in ("argmax", "sample"):
        sampler = CRS(nfe=5, spacing=0, warmup=0.0, final_step=final_step)
        endless, long = output_distribution(source, sampler), output_distribution(source, sampler.replace(horizon=40))
        torch.testing.assert_close(long, endless)


def test_corrections_without_calls_for_them_change_nothing() -> None:
    source = a_source("mixture", 5, 2, 3)
    for predictor in ("native", "crs spacing=0"):
        _, alone = parse(predictor, nfe=5)
        for corrections in (0, 5):
            exact = output_distribution(source, Gibbs(nfe=5, predictor=predictor, corrections=corrections))
            assert torch.equal(exact, output_distribution(source, alone))


def test_what_cannot_be_enumerated_is_refused() -> None:
    source, large = a_source("markov", 1, 2, 3), a_source("markov", 1, 3, 12)
    with pytest.raises(LimpetError, match="smaller source"):
        output_distribution(large, CRS(nfe=4))
    with pytest.raises(LimpetError, match="no random committed tokens"):
        output_distribution(source, CRS(nfe=4, values="nucleus"))

    class Mine(CRS):
        name = "mine"

    with pytest.raises(LimpetError, match="takes Native, Psi, DDIM, CRS, Mend and Gibbs, not mine"):
        output_distribution(source, Mine(nfe=4))
    probs = torch.full((8,), 1 / 8, dtype=torch.float64)
    for sampler, call in ((Gibbs(nfe=5), 0), (Gibbs(nfe=5, predictor="crs"), 1)):
        with pytest.raises(LimpetError, match="is not a correction of a state without committed tokens"):
            corrected_distribution(source, sampler, call, probs)
    assert float(corrected_distribution(source, Gibbs(nfe=5), 1, probs).sum()) == pytest.approx(1, abs=1e-12)


def test_codes_products_and_marginals() -> None:
    words = sequences(3, 4)
    assert torch.equal(encode(words, 3), torch.arange(81))
    assert words[5].tolist() == [0, 0, 1, 2]
    distributions = random_distributions(6, 4, 3, seed=0)
    joint = product(distributions)
    assert float(joint[2, 5]) == pytest.approx(float(distributions[2, range(4), words[5]].prod()))
    torch.testing.assert_close(marginals(joint, 3), distributions, rtol=1e-12, atol=1e-12)


# Distances to the data distribution

DISTANCES = {  # total variation on the Markov source with 16, 64 and 256 calls
    "native grid=uniform": (0.048, 0.0105, 0.0025),
    "native grid=uniform interleave=true": (0.0153, 0.0032, 0.00077),
    "native grid=quadratic": (0.0372, 0.00847, 0.00207),
    "native grid=quadratic interleave=true": (0.0172, 0.0037, 0.00089),
    "ddim grid=uniform": (0.045, 0.0097, 0.0023),
    "psi grid=uniform rule=constant eta=.05": (0.050, 0.0121, 0.0040),
    "psi grid=uniform rule=rescale eta=.05": (0.049, 0.0109, 0.0031),
    "psi grid=uniform rule=constant eta=1": (0.084, 0.054, 0.039),
    "gibbs predictor=native,grid=uniform": (0.047, 0.0056, 0.0006),
    "gibbs predictor=native,grid=uniform corrections=2 choose=margin": (0.27, 0.40, 0.50),
}


@pytest.mark.parametrize("text", thinned(DISTANCES))
def test_distances_to_the_data_distribution_are_those_known(text: str) -> None:
    for nfe, known in zip((16, 64, 256), DISTANCES[text], strict=True):
        exact = output_distribution(chain(5), parse(text, nfe=nfe)[1])
        assert float(exact.sum()) == pytest.approx(1, abs=1e-12)
        assert float(total_variation(exact, truth(chain(5)))) == pytest.approx(known, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "floor"),
    [("top_p=.9", 0.155), ("temperature=.8", 0.117), ("top_k=2", 0.228), ("final_step=argmax", 0.42)],
)
def test_a_sharpened_sampler_does_not_converge(changes: str, floor: float) -> None:
    exact = output_distribution(chain(5), parse(f"native grid=uniform {changes}", nfe=256)[1])
    assert float(total_variation(exact, truth(chain(5)))) == pytest.approx(floor, rel=0.02)
