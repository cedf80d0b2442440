"""The temperature fit against a grid, inversions against loops, and distributions against the denoiser itself."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from audit_cases import long_source, run_audit, run_smoke, tiny_network
from limpet.errors import LimpetError
from limpet.generation import rollout
from limpet.models.loading import load
from limpet.paper.studies import temperature
from limpet.paper.studies.temperature import (
    TIE,
    TemperatureSettings,
    audited_calls,
    fit,
    inverted,
    tempered,
    with_and_without,
)
from limpet.paper.studies.trajectories import audit_inputs
from limpet.samplers import CRS


def log_probs_by_call(rows: int, size: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)).log_softmax(-1)


def objective(log_mu: torch.Tensor, log_nu: torch.Tensor, beta: float) -> torch.Tensor:
    """KL(mu || nu_beta) from its definition."""
    powers = log_nu.exp() ** beta
    return (log_mu.exp() * (log_mu - (powers / powers.sum(-1, keepdim=True)).log())).sum(-1)


def test_a_tempered_distribution_is_recovered():
    nu = log_probs_by_call(200, 12, seed=1)
    beta = torch.linspace(0.05, 6, 200, dtype=torch.float64)
    found = fit(tempered(nu, beta), nu)
    assert (found.beta - beta).abs().max() < 1e-6
    assert found.residual.max() < 1e-12
    same = fit(nu, nu)
    assert (same.beta - 1).abs().max() < 1e-6
    assert same.divergence.max() == 0


def test_the_fit_is_the_minimum_of_a_convex_objective():
    mu, nu = log_probs_by_call(40, 9, seed=2), log_probs_by_call(40, 9, seed=3)
    found = fit(mu, nu)
    grid = np.linspace(0, 8, 1601)
    values = torch.stack([objective(mu, nu, float(beta)) for beta in grid])
    assert (values[:-2] - 2 * values[1:-1] + values[2:]).min() > -1e-12  # convex along the grid
    assert (found.residual <= values.min(0).values + 1e-12).all()
    assert found.beta.max() < 8  # so that the grid holds every minimum
    assert ((found.beta > 0).sum() > 15) & ((found.beta == 0).sum() > 5)  # both kinds are here
    assert ((found.beta - torch.tensor(grid)[values.argmin(0)]).abs() <= grid[1]).all()
    for i in range(40):
        assert float(found.residual[i]) == pytest.approx(float(objective(mu[i], nu[i], float(found.beta[i]))), abs=1e-9)
    assert torch.allclose(found.divergence, objective(mu, nu, 1.0), atol=1e-12)
    assert (found.residual <= found.divergence + 1e-12).all()


def test_a_distribution_that_prefers_what_the_other_avoids_is_fitted_by_the_uniform_one():
    nu = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64).log()
    found = fit(torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log(), nu)
    assert float(found.beta) == 0
    mu = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    assert float(found.residual) == pytest.approx(float((mu * (3 * mu).log()).sum()), abs=1e-9)


def test_tokens_without_mass_stay_out_of_the_fit():
    nu = log_probs_by_call(5, 4, seed=4)
    none = torch.full((5, 2), -torch.inf, dtype=torch.float64)
    mu = log_probs_by_call(5, 4, seed=5)
    wide = fit(torch.cat([mu, none], 1), torch.cat([nu, none], 1))
    for one, other in zip(wide, fit(mu, nu), strict=True):
        assert torch.allclose(one, other)
    assert not inverted(torch.cat([nu, none], 1), torch.cat([nu, none], 1)).any()


def by_loops(mu: list[float], nu: list[float], size: int) -> bool:
    tops = [sorted(range(len(probs)), key=lambda a: (-probs[a], a))[:size] for probs in (mu, nu)]
    pool = sorted({*tops[0], *tops[1]})
    return any(
        (mu[a] - mu[b] > TIE and nu[b] - nu[a] > TIE) or (mu[b] - mu[a] > TIE and nu[a] - nu[b] > TIE)
        for a, b in itertools.combinations(pool, 2)
    )


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_inversions_are_those_of_two_loops(seed, size):
    """Coarse distributions, so that ties occur; and a change smaller than the tolerance."""
    generator = np.random.default_rng(seed)
    mu, nu = generator.integers(0, 3, (2, size)).astype(float)
    if seed % 3 == 0:
        nu = mu + generator.uniform(-0.4, 0.4, size) * TIE
    found = inverted(torch.tensor(mu)[None], torch.tensor(nu)[None])
    assert bool(found) == by_loops(mu.tolist(), nu.tolist(), 64)


def test_only_the_union_of_the_top_sets_is_searched():
    ranked = torch.linspace(0, -10, 200, dtype=torch.float64)
    swapped = ranked.clone()
    swapped[150], swapped[151] = ranked[151], ranked[150]
    assert not inverted(ranked[None], swapped[None]).any()
    swapped[63], swapped[64] = ranked[64], ranked[63]
    assert inverted(ranked[None], swapped[None]).all()


def test_the_distributions_are_those_of_the_denoiser_called_directly():
    source, crs = load("exact:words"), CRS(nfe=16)
    wanted = audited_calls(crs, 4)
    assert wanted == [6, 9, 11, 14]
    steps = list(rollout(source, crs, audit_inputs(source, TemperatureSettings(n=3), 5, trace=True)))
    for step, before in ((steps[call], steps[call - 1].state) for call in wanted):
        pairs = torch.stack(with_and_without(step, before, 8)).exp()
        signal, committed = source.schedule.signal(step.t).expand(3), before.memory.committed_at < step.call
        shown = torch.where(committed, before.memory.committed_values, before.tokens)
        exact = torch.stack([source.probs(tokens, signal) for tokens in (shown, before.tokens)])
        rows = []
        for sample in range(3):
            places = (~committed[sample]).nonzero()[:, 0].tolist()
            rows += [exact[:, sample, places[round(rank)]] for rank in np.linspace(0, len(places) - 1, 8)]
        assert torch.allclose(pairs, torch.stack(rows, 1), atol=1e-12)


@pytest.mark.parametrize("name", ["exact:words", "exact:chain", "tiny"])
def test_the_empty_context_control_changes_nothing(name):
    model = tiny_network() if name == "tiny" else load(name)
    result = run_smoke(temperature, model)
    for quantity in ("control, top-rank change", "control, rank inversion"):
        (row,) = result.find(quantity)
        assert row.events == 2 * 8
        assert row.estimate.mean == 0
    (table,) = result.study.build_report(result).tables
    printed = {entries[1].text: entries[-1].text for entries in table.groups[0]}
    assert printed["control, rank inversion"] == ("0" if name == "tiny" else "")
    assert result.find("divergence")[0].estimate.mean > 0


def test_paper_preset_counts():
    preset = temperature.PRESETS["paper"]
    settings = preset.settings
    assert (len(preset.seeds), settings.n, settings.calls, settings.positions) == (4, 8, 7, 8)
    assert audited_calls(CRS(nfe=settings.nfe), settings.calls) == [22, 29, 35, 42, 49, 55, 62]
    result = run_audit(temperature, [long_source()], settings, preset.seeds)
    assert {row.events for row in result.rows() if not row.quantity.startswith("control")} == {1792}
    assert {row.events for row in result.rows() if row.quantity.startswith("control")} == {4 * 8 * 8}


def test_too_few_calls_are_refused():
    with pytest.raises(LimpetError, match="raise nfe"):
        run_audit(temperature, [long_source()], TemperatureSettings(n=1, nfe=8, calls=7))
