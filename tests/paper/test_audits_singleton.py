"""Singleton events against the bridge written out, the nucleus by a full sort, and enumeration of every trajectory."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import literal
from audit_cases import run_audit
from limpet.generation import rollout
from limpet.models.exact import Mixture
from limpet.paper.studies import singleton
from limpet.paper.studies.singleton import CERTAIN, SingletonSettings, largest_bridge_prob, singleton_events
from limpet.paper.studies.trajectories import audit_inputs
from limpet.samplers import Native

WORDS = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 1, 0]])
SOURCE = Mixture(
    torch.tensor([0.5, 0.3, 0.2]), 0.88 * torch.nn.functional.one_hot(WORDS, 3).double() + 0.04, name="three words"
)
STATES = np.array(list(itertools.product(range(3), repeat=3)))


@given(
    size=st.integers(2, 9),
    high=st.floats(1e-6, 0.99999),
    share=st.floats(0.0, 0.999),
    token=st.integers(0, 8),
    z=st.integers(0, 8),
)
def test_the_largest_probability_is_the_largest_of_the_bridge(size, high, share, token, z):
    token, z, low = token % size, z % size, high * share
    masses = [literal.bridge(y, token, z, 1 - low, 1 - high, size) for y in range(size)]
    signals = (torch.tensor(signal, dtype=torch.float64) for signal in (low, high))
    found = largest_bridge_prob(torch.tensor(token), torch.tensor(z), *signals, size)
    assert float(found) == pytest.approx(max(masses), rel=1e-9)


def enumerated(nfe: int, p: float) -> dict[str, float]:
    """The expected shares, from the distribution of every state at every step and every transition between them."""
    nodes = [SOURCE.schedule.level(t) for t in Native(nfe=nfe, top_p=p).times]
    distributions = []
    for signal in nodes:
        signals = torch.full((len(STATES),), signal, dtype=torch.float64)
        distributions.append(SOURCE.probs(torch.from_numpy(STATES), signals).numpy())  # (27, 3, 3)
    moves = []
    for r in range(nfe - 1):
        rows = []
        for state, probs in zip(STATES, distributions[r], strict=True):
            own = []
            for z, one in zip(state, probs, strict=True):
                kept = literal.restricted(one, literal.nucleus(one, p, "released"))
                own.append(literal.reverse(kept, z, 1 - nodes[r], 1 - nodes[r + 1]))
            rows.append([math.prod(own[i][y] for i, y in enumerate(after)) for after in STATES])
        moves.append(np.array(rows))
    chance = np.full(len(STATES), 1 / len(STATES))
    sums = dict.fromkeys(("singleton", "late", "next step", "final", "stochastic bridge"), 0.0)
    for r in range(nfe - 1):
        top = distributions[r].argmax(-1)
        to_end = np.linalg.multi_dot([*moves[r:], np.eye(27)]) if r < nfe - 2 else moves[r]
        for s, state in enumerate(STATES):
            for i in range(3):
                if sum(literal.nucleus(distributions[r][s, i], p, "released")) != 1:
                    continue
                sums["singleton"] += chance[s]
                sums["late"] += chance[s] * (r >= nfe - 1 - 2)
                sums["next step"] += chance[s] * (moves[r][s] @ (distributions[r + 1].argmax(-1)[:, i] == top[s, i]))
                sums["final"] += chance[s] * (to_end[s] @ (distributions[-1].argmax(-1)[:, i] == top[s, i]))
                a, z, noises = top[s, i], state[i], (1 - nodes[r], 1 - nodes[r + 1])
                largest = max(literal.bridge(y, a, z, *noises, 3) for y in range(3))
                sums["stochastic bridge"] += chance[s] * (largest < 1 - CERTAIN)
        chance = chance @ moves[r]
    pairs, late = 3 * (nfe - 1), 3 * 2
    shares = {name: value / sums["singleton"] for name, value in sums.items()}
    return {**shares, "singleton": sums["singleton"] / pairs, "singleton, last steps": sums["late"] / late}


def events(settings: SingletonSettings, p: float, seed: int) -> dict[str, torch.Tensor]:
    inputs = audit_inputs(SOURCE, settings, seed, trace=True)
    return singleton_events(Native(nfe=settings.nfe, top_p=p, final_step="argmax"), SOURCE, inputs)


def test_events_have_the_rates_of_enumeration():
    """Five rates from 6000 trajectories, each within 4.5 standard errors of its expectation."""
    nfe, p, n = 6, 0.8, 6000
    found = events(SingletonSettings(n=n, nfe=nfe), p, 7)
    single = found["singleton"].double()
    exact = enumerated(nfe, p)
    assert 0.2 < exact["singleton"] < 0.9  # neither rare nor certain, or nothing would be tested
    counts = {
        "singleton": (single, torch.ones_like(single)),
        "singleton, last steps": (single[-2:], torch.ones_like(single[-2:])),
        **{name: (single * found[name], single) for name in ("next step", "final", "stochastic bridge")},
    }
    for name, (hits, among) in counts.items():
        by_sample, total = hits.sum((0, 2)), among.sum((0, 2))
        rate = float(by_sample.sum() / total.sum())
        error = float((by_sample - rate * total).std() / total.mean() / math.sqrt(n))
        assert rate == pytest.approx(exact[name], abs=4.5 * error + 1e-12), name


def test_every_event_is_a_nucleus_of_one():
    """Every call of a short trajectory: the prediction, the nucleus by a full sort, and the argmax of later calls."""
    settings = SingletonSettings(n=8, nfe=5)
    found = events(settings, 0.9, 3)
    sampler = Native(nfe=5, top_p=0.9, final_step="argmax")
    steps = list(rollout(SOURCE, sampler, audit_inputs(SOURCE, settings, 3, trace=True)))
    probs = [SOURCE.probs(step.model_input, SOURCE.schedule.signal(step.t).expand(8)) for step in steps]
    tops = [one.argmax(-1) for one in probs]
    for r in range(4):
        for b, i in itertools.product(range(8), range(3)):
            kept = literal.nucleus(probs[r][b, i].tolist(), 0.9, "released")
            assert bool(found["singleton"][r, b, i]) == (sum(kept) == 1)
        assert (found["next step"][r] == (tops[r + 1] == tops[r])).all()
        assert (found["final"][r] == (tops[-1] == tops[r])).all()


def test_paper_preset_counts():
    preset = singleton.PRESETS["paper"]
    settings = preset.settings
    assert (preset.seeds, settings.n, settings.nfe) == ((8200, 8210, 8220, 8230), 4, 64)
    assert settings.top_ps == (0.8, 0.9)
    result = run_audit(singleton, [SOURCE], settings, preset.seeds)
    for p in settings.top_ps:
        (single,) = result.find("singleton", p=p)
        assert single.events == 4 * 4 * 63 * SOURCE.length
        assert result.find("singleton, last steps", p=p)[0].events == 4 * 4 * 10 * SOURCE.length
        singles = round(sum(single.estimate.values / 100 * 4 * 63 * SOURCE.length))
        assert result.find("final", p=p)[0].events == singles
