"""Audits of exact forward states (selection, risk) against loops and enumeration, and where clean text comes from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import literal
from audit_cases import run_audit, run_smoke, tiny_network
from limpet.errors import LimpetError
from limpet.evaluation import heldout_text as heldout
from limpet.models.exact import Mixture
from limpet.models.loading import load
from limpet.paper.studies import risk, selection
from limpet.paper.studies.selection import ModelView, SelectionSettings, commit_count, compared, model_view
from limpet.paper.studies.trajectories import (
    ForwardSettings,
    clean_texts,
    evenly_spaced,
    forward_states,
    text_positions,
)


def mixture(seed: int) -> Mixture:
    generator = torch.Generator().manual_seed(seed)
    return Mixture(torch.ones(3), torch.rand(3, 6, 3, generator=generator) ** 4 + 0.01, name=f"mixture {seed}")


def test_forward_states_have_the_forward_distribution():
    """Each time has the distribution of the channel, though the states lie on one trajectory: chi-square at 1e-4."""
    model, n, times = mixture(1), 40_000, (0.2, 0.5, 0.9)
    clean = torch.zeros(n, 1, dtype=torch.long)
    for t, states in zip(times, forward_states(clean, times, model, 5), strict=True):
        noise = 1 - float(model.schedule.signal(t))
        probs = np.array([literal.forward(z, 0, noise, 3) for z in range(3)])
        assert literal.chi_square(np.bincount(states[:, 0].numpy(), minlength=3), probs) > 1e-4


def test_comparison_of_two_views_by_loops():
    generator = torch.Generator().manual_seed(3)
    rows, length = 5, 40

    def random_view() -> ModelView:
        top = torch.randint(3, (rows, length), generator=generator)
        deficit = torch.rand(rows, length, generator=generator).double()
        chosen = torch.rand(rows, length, generator=generator) < 0.3
        return ModelView(top, deficit, chosen)

    first, second = random_view(), random_view()
    clean = torch.randint(3, (rows, length), generator=generator)
    found = compared(first, second, clean)
    places = [*itertools.product(range(rows), range(length))]
    for name, own, other in (("first", first, second), ("second", second, first)):
        mine = [place for place in places if own.chosen[place]]
        theirs = [place for place in places if other.chosen[place]]
        right = 100 * np.mean([bool(own.top[place] == clean[place]) for place in mine])
        assert found["self accuracy", name] == pytest.approx(right)
        assert found["self error", name] == pytest.approx(100 - right)
        cross = 100 * np.mean([bool(own.top[place] == clean[place]) for place in theirs])
        assert found["cross accuracy", name] == pytest.approx(cross)
        sure = 100 * np.mean([1 - float(own.deficit[place]) for place in mine])
        assert found["confidence", name] == pytest.approx(sure)
        agree = 100 * np.mean([bool(first.top[place] == second.top[place]) for place in mine])
        assert found["argmax agreement", name] == pytest.approx(agree)
    jaccards = []
    for b in range(rows):
        a, c = set(first.chosen[b].nonzero()[:, 0].tolist()), set(second.chosen[b].nonzero()[:, 0].tolist())
        jaccards.append(len(a & c) / len(a | c))
    assert found["Jaccard", ""] == pytest.approx(np.mean(jaccards))
    gap = found["self accuracy", "second"] - found["self accuracy", "first"]
    assert found["self accuracy, difference", ""] == pytest.approx(gap)


def test_a_view_is_the_exact_distribution_scanned_greedily():
    model = load("exact:words")
    states = forward_states(model.draw(2, 3), (0.5,), model, 3)[0]
    top, deficit, chosen = model_view(model, states, 0.5, torch.ones_like(states, dtype=torch.bool), count=7, spacing=4)
    probs = model.probs(states, model.schedule.signal(0.5).expand(2))
    assert (top == probs.argmax(-1)).all()
    assert torch.allclose(deficit, 1 - probs.amax(-1), atol=1e-12)
    for b in range(2):
        taken: list[int] = []
        for i in deficit[b].argsort(stable=True).tolist():
            if len(taken) < 7 and all(abs(i - j) > 4 for j in taken):
                taken.append(i)
        assert sorted(taken) == chosen[b].nonzero()[:, 0].tolist()


def test_an_exact_distribution_is_reliable():
    """Two sources' own denoisers are calibrated: each bin's accuracy is near its centre. Another source's is not."""
    own, other = mixture(4), mixture(5)
    result = run_audit(selection, [own, other], SelectionSettings(n=800, times=(0.3, 0.6), bins=5), (1, 2))
    off = {name: [] for name in (own.name, other.name)}
    for name, found in off.items():
        for row in result.find("reliability", name):
            if row.events > 400:
                found.append(abs(row.estimate.mean - 100 * row.at["confidence"]))
    assert max(off[own.name]) < 10 + 4  # half a bin's width, and about four standard errors of a share
    assert max(off[other.name]) > 20


def test_selection_needs_two_models_of_one_vocabulary():
    with pytest.raises(LimpetError, match="name two"):
        run_smoke(selection, mixture(1))
    with pytest.raises(LimpetError, match="one vocabulary"):
        list(selection.audit((mixture(1), load("exact:words")), SelectionSettings(n=1), 0, (1,)))


def bayes_risk(model: Mixture, noise: float) -> float:
    """The mean over positions of 1 - sum over noisy contexts of the largest joint mass, by enumeration."""
    every = np.array(list(itertools.product(range(3), repeat=6)))
    chance = model.log_prob(torch.from_numpy(every)).exp().numpy()
    joint = chance.reshape((3,) * 6)
    channel = np.array([[literal.forward(z, x, noise, 3) for z in range(3)] for x in range(3)])
    risks = []
    for i in range(6):
        noisy = np.moveaxis(joint, i, 0)
        for axis in range(1, 6):
            noisy = np.moveaxis(np.tensordot(noisy, channel, ([axis], [0])), -1, axis)
        risks.append(1 - noisy.max(0).sum())
    return float(np.mean(risks))


def test_an_oracles_deficit_and_error_are_its_bayes_risk():
    """Within 4.5 standard errors over 40 seeds, at three times; and the exact risk rises with noise."""
    model, times = mixture(7), (0.2, 0.5, 0.8)
    result = run_audit(risk, [model], ForwardSettings(n=100, times=times, count=2), tuple(range(40)))
    exact = [100 * bayes_risk(model, 1 - float(model.schedule.signal(t))) for t in times]
    assert exact == sorted(exact)
    for t, bayes in zip(times, exact, strict=True):
        for quantity in ("error", "deficit"):
            (row,) = result.find(quantity, t=t)
            assert row.estimate.mean == pytest.approx(bayes, abs=4.5 * row.estimate.se), (quantity, t)
            assert row.events == 40 * 100 * 6
        assert result.find("committed error", t=t)[0].events == 40 * 100 * 2
        assert result.find("committed error", t=t)[0].estimate.mean < bayes
    rise = result.find("committed error, rise", t=0.8)[0].estimate
    gap = (
        result.find("committed error", t=0.8)[0].estimate.mean - result.find("committed error", t=0.5)[0].estimate.mean
    )
    assert rise.mean == pytest.approx(gap)


def test_count_is_that_of_a_crs_step():
    assert commit_count(SelectionSettings(n=1), 1024) == 25
    assert commit_count(SelectionSettings(n=1), 256) == 7


def test_paper_preset_counts():
    of_selection, of_risk = (module.PRESETS["paper"] for module in (selection, risk))
    for preset in (of_selection, of_risk):
        settings = preset.settings
        assert (len(preset.seeds), settings.n, settings.count, settings.spacing) == (4, 16, 25, 4)
    assert of_selection.settings.times == (0.2, 0.4, 0.5, 0.6, 0.67, 0.7)
    assert set(of_selection.settings.times) - {0.7} < set(of_risk.settings.times)


def test_clean_text_is_cut_as_for_training(tmp_path):
    model, settings = load("mini"), SelectionSettings(n=3)
    parts = [clean_texts(model, settings, index, (1, 2)) for index in range(2)]
    assert [tuple(rows.shape) for rows in parts] == [(3, 256), (3, 256)]
    whole = torch.cat(parts)
    assert (whole[:, 0] == 0).all()
    assert (whole[:, -1] == 0).all()
    assert len(torch.unique(whole, dim=0)) == 6
    ids = [token for page in heldout().split("\n\n") for token in (*model.tokenizer.encode(page.strip("\n")), 0)]
    chunks = [ids[254 * k : 254 * (k + 1)] for k in evenly_spaced(len(ids) // 254, 6)]
    assert [rows[:, 1:-1].tolist() for rows in parts] == [chunks[0::2], chunks[1::2]]
    inside = text_positions(model, whole)
    assert inside[:, 1:-1].all()
    assert not inside[:, [0, -1]].any()
    assert text_positions(mixture(1), torch.zeros(2, 6)).all()
    text = heldout()
    pieces = [model.tokenizer.decode(row[1:-1].tolist()) for row in whole]
    assert sum(piece[20:-20].split("<|endoftext|>")[0] in text for piece in pieces) == 6
    (short := tmp_path / "short.txt").write_text("Once upon a time.")
    with pytest.raises(LimpetError, match="give more text"):
        clean_texts(model, SelectionSettings(n=1, text=str(short)), 0, (1,))
    with pytest.raises(LimpetError, match="no tokenizer"):
        clean_texts(tiny_network(), settings, 0, (1,))
