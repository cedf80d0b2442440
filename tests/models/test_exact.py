"""The exact denoisers against enumeration of every sequence: predictions, log-probabilities and draws."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

import literal
from limpet.diffusion import process
from limpet.errors import LimpetError
from limpet.models.exact import Markov, Mixture, Source, codebook
from limpet.models.exact_sources import SOURCES, WORDS, Letters, source
from model_cases import features

GENERATOR = torch.Generator().manual_seed(11)


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=GENERATOR, dtype=torch.float64) + 0.02


CODE = torch.tensor([[0, 1, 2, 0], [0, 1, 1, 2], [2, 2, 0, 1]])
SOURCE = {
    "mixture": Mixture(rand(3), rand(3, 4, 3) ** 3),
    "mixture of two tokens": Mixture(rand(2), rand(2, 5, 2) ** 3),
    "two phrases": Mixture(rand(4), rand(4, 2, 3) ** 4, phrases=2),
    "three phrases of one": Mixture(rand(3), rand(3, 1, 3) ** 2, phrases=3),
    "codebook": codebook(CODE, 3),
    "weighted codebook": codebook(CODE, 3, weights=torch.tensor([1.0, 5.0, 2.0])),
    "markov": Markov(rand(3), rand(3, 3) ** 3, 4),
    "markov of two tokens": Markov(rand(2), rand(2, 2), 6),
    "markov with impossible pairs": Markov(rand(3), rand(3, 3) * (1 - torch.eye(3)), 4),
    "markov of length one": Markov(rand(3), rand(3, 3), 1),
}
every_source = pytest.mark.parametrize("name", SOURCE)


def sequences(model: Source) -> np.ndarray:
    return np.array(list(itertools.product(range(model.vocab_size), repeat=model.length)))


def data_probs(model: Source) -> np.ndarray:
    """The probability of every sequence, from the definition of its family, one sequence at a time."""
    if isinstance(model, Markov):
        return np.array(
            [
                model.initial[x[0]].item() * math.prod(model.transition[a, b].item() for a, b in itertools.pairwise(x))
                for x in sequences(model)
            ]
        )
    assert isinstance(model, Mixture)
    modes, size = range(len(model.weights)), model.distributions.shape[1]
    probs = []
    for x in sequences(model):
        probability = 1.0
        for start in range(0, model.length, size):
            probability *= sum(
                model.weights[k].item() * math.prod(model.distributions[k, s, x[start + s]].item() for s in range(size))
                for k in modes
            )
        probs.append(probability)
    return np.array(probs)


def leave_one_out_by_enumeration(model: Source, signal: float) -> np.ndarray:
    """(Z, L, V): for every noisy sequence, each clean token's probs given the other noisy tokens. NaN: undefined."""
    every, prior = sequences(model), data_probs(model)
    size, length = model.vocab_size, model.length
    channel = literal.forward(every[:, None, :], every[None, :, :], 1 - signal, size)  # (noisy, clean, position)
    distributions = np.empty((len(every), length, size))
    for i in range(length):
        others = channel[..., [j for j in range(length) if j != i]].prod(-1) * prior
        for x in range(size):
            distributions[:, i, x] = others[:, every[:, i] == x].sum(-1)
    with np.errstate(invalid="ignore"):
        return distributions / distributions.sum(-1, keepdims=True)


@every_source
@pytest.mark.parametrize("signal", [0.0, 0.001, 0.3, 0.8, 0.99999, 1.0])
def test_predictions_are_the_enumerated_leave_one_out_distributions(name: str, signal: float) -> None:
    """At every noisy sequence; at signal 1 wherever the other tokens are possible at all."""
    model = SOURCE[name]
    expected = leave_one_out_by_enumeration(model, signal)
    noisy = torch.from_numpy(sequences(model))
    found = model.probs(noisy, torch.full((len(noisy),), signal, dtype=torch.float64)).numpy()
    defined = ~np.isnan(expected)
    assert defined.any()
    assert signal == 1 or defined.all()
    np.testing.assert_allclose(found[defined], expected[defined], rtol=1e-9, atol=1e-12)


@every_source
def test_features_are_the_log_probs_at_the_signal_of_t(name: str) -> None:
    """One time for all, or a time for each; the head has nothing to do; the logits are float32."""
    model = SOURCE[name]
    noisy = torch.from_numpy(sequences(model))[:30]
    times = torch.linspace(0.01, 1, len(noisy), dtype=torch.float64)
    values = features(model, noisy, times)
    assert torch.equal(model.head(values), values)
    for i, t in enumerate(times.tolist()):
        expected = model.probs(noisy[i : i + 1], process.LOG_LINEAR.signal(t)[None])
        torch.testing.assert_close(values[i : i + 1].exp(), expected, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(features(model, noisy[i : i + 1], t), values[i : i + 1], rtol=1e-10, atol=1e-12)
    assert model.logits(noisy, 0.5).dtype == torch.float32
    assert model.logits(noisy, 0.5).shape == (len(noisy), model.length, model.vocab_size)
    assert model.predicts == "leave-one-out"


@every_source
def test_log_prob_is_the_data_probs(name: str) -> None:
    model = SOURCE[name]
    log_prob = model.log_prob(torch.from_numpy(sequences(model)))
    np.testing.assert_allclose(log_prob.exp().numpy(), data_probs(model), rtol=1e-10, atol=1e-15)
    assert log_prob.exp().sum().item() == pytest.approx(1, abs=1e-12)


@every_source
def test_draws_have_the_data_probs(name: str) -> None:
    """Chi-square over every sequence, 100,000 draws, overall error 1e-5."""
    model = SOURCE[name]
    drawn = model.draw(100_000, seed=3)
    assert drawn.shape == (100_000, model.length)
    index = (drawn * model.vocab_size ** torch.arange(model.length).flip(0)).sum(-1)
    counts = index.bincount(minlength=model.vocab_size**model.length).numpy()
    assert literal.chi_square(counts, data_probs(model)) > 1e-5 / len(SOURCE)


def test_draws_depend_on_the_seed_and_the_index_alone() -> None:
    model = SOURCE["two phrases"]
    assert torch.equal(model.draw(50, 1)[:20], model.draw(20, 1))
    assert not torch.equal(model.draw(50, 1), model.draw(50, 2))


def test_modes_of_a_mixture() -> None:
    """The posterior of the mode given all noisy tokens of the block but one, by Bayes over the modes."""
    model = SOURCE["mixture"]
    noisy, signal = torch.tensor([[0, 2, 1, 1]]), 0.7
    modes = model.mode_probs(noisy, torch.tensor([signal], dtype=torch.float64))[0]
    for i in range(4):
        joint = [
            model.weights[k].item()
            * math.prod(
                signal * model.distributions[k, j, noisy[0, j]].item() + (1 - signal) / 3 for j in range(4) if j != i
            )
            for k in range(3)
        ]
        np.testing.assert_allclose(modes[i].numpy(), np.array(joint) / sum(joint), rtol=1e-10)


def test_long_sequences_do_not_underflow() -> None:
    """1024 positions, at both ends of a path: proper distributions everywhere."""
    chain = Markov(rand(5), rand(5, 5) ** 6, 1024)
    long = Mixture(rand(6), rand(6, 1024, 5) ** 4)
    for model in (chain, long):
        for tokens in (model.draw(2, 0), torch.randint(5, (2, 1024), generator=GENERATOR)):
            for t in (1e-5, 0.3, 1.0):
                probs = features(model, tokens, t).exp()
                torch.testing.assert_close(probs.sum(-1), torch.ones(2, 1024, dtype=torch.float64))
        assert torch.isfinite(model.log_prob(model.draw(2, 0))).all()


def test_weights_need_not_be_normalised() -> None:
    weights, distributions = rand(3), rand(3, 2, 4)
    scaled = Mixture(7 * weights, 3 * distributions)
    torch.testing.assert_close(scaled.weights, Mixture(weights, distributions).weights)
    torch.testing.assert_close(scaled.distributions, Mixture(weights, distributions).distributions)
    initial, transition = rand(3), rand(3, 3)
    torch.testing.assert_close(
        Markov(2 * initial, 5 * transition, 4).transition, Markov(initial, transition, 4).transition
    )


def test_float32_parameters_give_distributions_that_sum_to_one() -> None:
    weights, distributions, initial, transition = (x.float() for x in (rand(3), rand(3, 2, 27), rand(27), rand(27, 27)))
    mixture, chain = Mixture(weights, distributions), Markov(initial, transition, 4)
    for probs in (mixture.weights, mixture.distributions, chain.initial, chain.transition):
        assert probs.dtype == torch.float64
        assert (probs.sum(-1) - 1).abs().max() < 1e-14


@every_source
def test_a_prediction_does_not_depend_on_its_batch(name: str) -> None:
    """Bit for bit: two equally likely tokens must not be told apart by the company a row keeps."""
    model = SOURCE[name]
    noisy = torch.from_numpy(sequences(model))
    whole = features(model, noisy, 0.3)
    for size in (1, 2, 7):
        assert torch.equal(torch.cat([features(model, rows, 0.3) for rows in noisy[:63].split(size)]), whole[:63])


@pytest.mark.parametrize("name", SOURCES)
def test_a_prediction_of_a_built_in_source_does_not_depend_on_its_batch(name: str) -> None:
    model = source(name)
    noisy = torch.randint(model.vocab_size, (14, model.length), generator=torch.Generator().manual_seed(0))
    whole = features(model, noisy, 0.3)
    for size in (1, 2, 7):
        assert torch.equal(torch.cat([features(model, rows, 0.3) for rows in noisy.split(size)]), whole)


def test_the_digest_is_of_everything_that_decides_the_predictions() -> None:
    weights, distributions, initial, transition = rand(2), rand(2, 3, 4), rand(4), rand(4, 4)
    digests = {
        Mixture(weights, distributions).digest,
        Mixture(weights, distributions, phrases=2).digest,
        Mixture(weights.flip(0), distributions).digest,
        Mixture(weights, distributions.flip(2)).digest,
        Markov(initial, transition, 3).digest,
        Markov(initial, transition, 4).digest,
        Markov(initial.flip(0), transition, 3).digest,
    }
    assert len(digests) == 7
    assert Mixture(weights, distributions, name="another").digest == Mixture(weights, distributions).digest


@pytest.mark.parametrize("name", ["mixture", "codebook", "markov"])
def test_a_sequence_of_another_length_is_refused(name: str) -> None:
    model = SOURCE[name]
    with pytest.raises(LimpetError, match=rf"{model.length} tokens; it was given {model.length + 1}"):
        features(model, torch.zeros(1, model.length + 1, dtype=torch.long), 0.5)


@pytest.mark.parametrize("name", SOURCES)
def test_the_built_in_sources_score_their_own_draws_best(name: str) -> None:
    model = source(name)
    assert model.name == name
    assert model.vocab_size == len(model.tokenizer.alphabet)
    drawn = model.draw(64, 0)
    scrambled = drawn[:, torch.randperm(model.length, generator=torch.Generator().manual_seed(0))]
    assert model.log_prob(drawn).mean() > model.log_prob(scrambled).mean() + 1
    text = model.tokenizer.decode(drawn[0].tolist())
    assert model.tokenizer.encode(text) == drawn[0].tolist()
    assert model.digest == source(name).digest


def test_words_are_words() -> None:
    model = source("exact:words")
    text = Letters().decode(model.draw(1, 0)[0].tolist())
    known = sum(word in WORDS for word in text.split(" "))
    assert known >= 24  # of 32, each letter slipping once in fifty


def test_an_unknown_source_or_letter_is_a_sentence() -> None:
    with pytest.raises(LimpetError, match=r"no exact source 'exact:word'; there are exact:words"):
        source("exact:word")
    with pytest.raises(LimpetError, match=r"letters a to z and the space; it was given '!é'"):
        Letters().encode("café!")
