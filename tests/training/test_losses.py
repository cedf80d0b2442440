"""The Duo bound against its dense float64 formula, where it is least, and the Gaussian path against the channel."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from limpet.diffusion.process import forward_probs
from limpet.training import gaussian, objectives


def dense_nll(probs: Tensor, z: int, x0: int, signal: float) -> float:
    """The objective as written: a sum over the vocabulary of ratios of forward distributions."""
    size = len(probs)
    data = torch.full((size,), 1 - signal, dtype=torch.float64)
    data[x0] += size * signal
    model = size * signal * probs + (1 - signal)
    inner = sum((data[j] / data[z]) * math.log((model[z] * data[j]) / (model[j] * data[z])) for j in range(size))
    return float(-(1 - 1e-3) / (size * signal) * (size / data[z] - size / model[z] - inner))


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(2, 40),
    signal=st.floats(1e-3, 1 - 1e-3),
    sharpness=st.sampled_from([0.0, 1.0, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_the_bound_is_the_dense_formula(size: int, signal: float, sharpness: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(1, 4, size, dtype=torch.float64, generator=generator)
    log_probs = logits.log_softmax(-1)
    z, x0 = torch.randint(size, (2, 1, 4), generator=generator)
    z[0, 0] = x0[0, 0]  # both cases, kept and replaced, in every example
    found = objectives.duo_nll(log_probs, z, x0, signal)
    for i in range(4):
        wanted = dense_nll(log_probs[0, i].exp(), int(z[0, i]), int(x0[0, i]), signal)
        assert float(found[0, i]) == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_the_bound_takes_one_signal_or_one_per_row() -> None:
    log_probs = torch.randn(3, 2, 7, dtype=torch.float64).log_softmax(-1)
    z, x0 = torch.randint(7, (2, 3, 2))
    signals = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    rows = torch.stack([objectives.duo_nll(log_probs[i], z[i], x0[i], float(signals[i])) for i in range(3)])
    torch.testing.assert_close(objectives.duo_nll(log_probs, z, x0, signals), rows, rtol=1e-12, atol=1e-12)


def test_float32_is_close_to_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = (3 * torch.randn(64, 8, 4096, dtype=torch.float64, generator=generator)).log_softmax(-1)
    z, x0 = torch.randint(4096, (2, 64, 8), generator=generator)
    z[:, :4] = x0[:, :4]
    signal = 1 - objectives.stratified_times(64, generator, torch.device("cpu")) * (1 - 1e-3)
    exact = objectives.duo_nll(log_probs, z, x0, signal)
    rough = objectives.duo_nll(log_probs.float(), z, x0, signal)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough.double(), exact, rtol=1e-4, atol=1e-4)


SIZE, LENGTH = 3, 3


def source() -> tuple[Tensor, Tensor]:
    """Every sequence of three tokens of three, and a distribution over them with dependence between positions."""
    sequences = torch.tensor(list(itertools.product(range(SIZE), repeat=LENGTH)))
    weight = torch.randn(len(sequences), dtype=torch.float64, generator=torch.Generator().manual_seed(3)).exp()
    return sequences, weight / weight.sum()


def leave_one_out_probs(sequences: Tensor, weight: Tensor, signal: float) -> Tensor:
    """(noisy sequence, position, V): the clean token's distribution given every other noisy token, by enumeration."""
    channel = forward_probs(torch.arange(SIZE), signal, SIZE)  # (clean, noisy)
    distributions = torch.zeros(len(sequences), LENGTH, SIZE, dtype=torch.float64)
    for noisy, z in enumerate(sequences.tolist()):
        for x, p in zip(sequences.tolist(), weight.tolist(), strict=True):
            for i in range(LENGTH):
                others = math.prod(float(channel[x[j], z[j]]) for j in range(LENGTH) if j != i)
                distributions[noisy, i, x[i]] += p * others
    return distributions / distributions.sum(-1, keepdim=True)


@pytest.mark.parametrize("signal", [0.15, 0.6, 0.95])
def test_the_expected_bound_is_least_at_the_leave_one_out_distribution(signal: float) -> None:
    sequences, weight = source()
    channel = forward_probs(torch.arange(SIZE), signal, SIZE)
    joint = weight[:, None] * channel[sequences[:, None], sequences[None]].prod(-1)  # (clean, noisy)
    best = leave_one_out_probs(sequences, weight, signal)

    def expected(logits: Tensor) -> Tensor:
        """The exact expectation over clean and noisy sequences of the bound, summed over positions."""
        log_probs = logits.log_softmax(-1).expand(len(sequences), -1, -1, -1)  # (clean, noisy, position, V)
        x0 = sequences[:, None].expand(-1, len(sequences), -1)
        z = sequences[None].expand(len(sequences), -1, -1)
        return (joint[..., None] * objectives.duo_nll(log_probs, z, x0, signal)).sum()

    logits = best.log().requires_grad_()
    reached = expected(logits)
    (gradient,) = torch.autograd.grad(reached, logits)
    least = reached.detach()
    assert float(gradient.abs().max()) < 1e-12
    generator = torch.Generator().manual_seed(1)
    for scale in (0.01, 0.1, 1.0):
        moved = best.log() + scale * torch.randn(best.shape, dtype=torch.float64, generator=generator)
        assert float(expected(moved)) > float(least)


def test_times_are_one_in_each_stratum() -> None:
    t = objectives.stratified_times(1000, torch.Generator().manual_seed(5), torch.device("cpu"))
    assert float(t.min()) >= 1e-3
    assert float(t.max()) <= 1
    assert (((t - 1e-3) / (1 - 1e-3) * 1000).floor().long() == torch.arange(1000)).all()


def test_noise_replaces_the_right_share() -> None:
    """600,000 tokens a level: five standard errors, so a false alarm has a chance under 1e-5."""
    x0 = torch.zeros(3, 600_000, dtype=torch.int64)
    signal = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    z = objectives.add_noise(x0, signal, 4, torch.Generator().manual_seed(0))
    shares = torch.stack([(z == token).double().mean(-1) for token in range(4)], -1)
    wanted = forward_probs(torch.zeros(3, dtype=torch.int64), signal, 4)
    error = (wanted * (1 - wanted) / x0.shape[1]).sqrt()
    assert ((shares - wanted).abs() < 5 * error).all()


def test_causal_nll_is_of_the_distribution_of_the_next_token() -> None:
    logits = torch.randn(2, 5, 7)
    tokens = torch.randint(7, (2, 5))
    found = objectives.causal_nll(logits, tokens)
    assert found.shape == (2, 4)
    assert float(found[1, 2]) == pytest.approx(-float(logits[1, 2].log_softmax(-1)[tokens[1, 3]]), rel=1e-5)


def test_backward_kl_is_zero_only_at_the_teacher() -> None:
    teacher = torch.randn(4, 6, dtype=torch.float64).log_softmax(-1)
    student = torch.randn(4, 6, dtype=torch.float64).log_softmax(-1)
    assert float(objectives.backward_kl(teacher, teacher).abs().max()) < 1e-14
    wanted = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=student), torch.distributions.Categorical(logits=teacher)
    )
    torch.testing.assert_close(objectives.backward_kl(student, teacher), wanted)


@pytest.mark.parametrize(
    ("gamma", "known"), [(-4, 0.99869), (-3.5, 0.92834), (-3, 0.59624), (-2.5, 0.23797), (-2, 0.07203), (-1, 0.00619)]
)
def test_the_signal_of_gamma_at_the_released_vocabulary(gamma: float, known: float) -> None:
    assert float(gaussian.signal(gamma, 50258)) == pytest.approx(known, abs=2e-5)


def test_gamma_limits_fit_the_vocabulary() -> None:
    for size in (27, 4096):
        line = gaussian.path(size)
        assert float(gaussian.signal(line.first, size)) == pytest.approx(0.999, abs=1e-9)
        assert float(gaussian.signal(line.last, size)) == pytest.approx(0.006, abs=1e-9)
        found = line.signal(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist()
        middle = float(gaussian.signal((line.first + line.last) / 2, size))
        assert found == pytest.approx([0.999, middle, 0.006], abs=1e-9)


def test_the_argmax_at_two_times_is_that_of_the_whole_gaussian() -> None:
    """Joint distribution of the states at two times, against V normals drawn in full (200,000; 5 standard errors)."""
    size, draws = 5, 200_000
    gammas = torch.tensor([-1.5, 0.5], dtype=torch.float64)
    x = torch.full((1, draws), 2)
    generator = torch.Generator().manual_seed(11)
    noise = gaussian.draw(x, size, generator)
    quick = [gaussian.state(x, gamma[None], noise)[0] for gamma in gammas]
    normals = torch.randn(draws, size, dtype=torch.float64, generator=generator)
    whole = []
    for gamma in gammas:
        w = torch.sigmoid(gamma).sqrt() * normals
        w[:, 2] += torch.sigmoid(-gamma).sqrt()
        whole.append(w.argmax(-1))
    joint = [torch.bincount(a * size + b, minlength=size * size).double() / draws for a, b in (quick, whole)]
    error = (2 * joint[1] * (1 - joint[1]) / draws).sqrt() + 1e-4
    assert ((joint[0] - joint[1]).abs() < 5 * error).all()
    for states, gamma in zip(quick, gammas.tolist(), strict=True):
        wanted = forward_probs(torch.tensor(2), gaussian.signal(gamma, size), size)
        found = torch.bincount(states, minlength=size).double() / draws
        assert ((found - wanted).abs() < 5 * (wanted * (1 - wanted) / draws).sqrt()).all()
