"""Denoisers whose leave-one-out distribution is exact: a codebook, a mixture of products, a Markov chain.

Each knows its own data distribution, so it also scores text (`log_prob`) and draws text (`draw`), and quality can be
measured without a judge. The backbone computes log-probabilities, and the head returns them."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from limpet.diffusion.rng import CounterRNG, Purpose, uniform_token
from limpet.errors import LimpetError
from limpet.models import Denoiser, ModelInput


class Source(Denoiser):
    """A known data distribution and its exact denoiser, which computes in float64."""

    precision = "float64"

    def __init__(self, name: str, vocab_size: int, length: int, parameters: tuple[Tensor, ...]) -> None:
        self.name, self.vocab_size, self.length = name, vocab_size, length
        content = hashlib.sha256(f"{type(self).__name__} {length}".encode())
        for tensor in parameters:
            content.update(str(tuple(tensor.shape)).encode() + tensor.double().numpy().tobytes())
        self.digest = content.hexdigest()

    def head(self, features: Tensor) -> Tensor:
        return features

    def backbone(self, inputs: ModelInput) -> Tensor:
        count, length = inputs.tokens.shape
        if length != self.length:
            raise LimpetError(f"{self.name} knows sequences of {self.length} tokens; it was given {length}")
        return self.probs(inputs.tokens, self.schedule.signal(inputs.t).expand(count)).log()

    @abstractmethod
    def probs(self, tokens: Tensor, signal: Tensor) -> Tensor:
        """(B, L) noisy tokens, (B,) signal -> (B, L, V): each clean token's probs given the other noisy tokens."""

    @abstractmethod
    def log_prob(self, tokens: Tensor) -> Tensor:
        """(B, L) clean tokens -> (B,): their log-probability under the data distribution."""

    @abstractmethod
    def conditional(self, tokens: Tensor) -> Tensor:
        """(B, P) the first clean tokens -> (B, P): the log-probability of each given those before it."""

    @abstractmethod
    def draw(self, n: int, seed: int) -> Tensor:
        """(n, L) tokens from the data distribution."""

    def _evidence(self, signal: Tensor, distributions: Tensor) -> Tensor:
        """The likelihood of a noisy token to which its clean distribution gives a probability: signal p + noise / V."""
        signal = signal.view(-1, *[1] * (distributions.dim() - 1))
        return signal * distributions + (1 - signal) / self.vocab_size


def _choose(weights: Tensor, u: Tensor) -> Tensor:
    """An index of the last axis with probability proportional to its weight, for each u."""
    cumulated = weights.cumsum(-1)
    return torch.searchsorted(cumulated, (u * cumulated[..., -1])[..., None], right=True)[..., 0]


class Mixture(Source):
    """A latent mode with prior `weights` (K,), and given it independent tokens with `distributions` (K, S, V).

    This is the model of theorem 1. A sequence has `phrases` such blocks of S tokens, each with a mode of its own."""

    def __init__(self, weights: Tensor, distributions: Tensor, phrases: int = 1, name: str = "mixture") -> None:
        self.weights = _normal(weights.double())
        self.distributions = _normal(distributions.double())
        self.phrases = phrases
        super().__init__(
            name, distributions.shape[2], phrases * distributions.shape[1], (self.weights, self.distributions)
        )

    def _blocks(self, tokens: Tensor) -> Tensor:
        return tokens.reshape(-1, self.distributions.shape[1])

    def _by_mode(self, blocks: Tensor) -> Tensor:
        """(P, S) tokens -> (P, K, S): the probability of each token in each mode."""
        place = torch.arange(blocks.shape[1])
        return self.distributions[:, place, blocks].transpose(0, 1)

    def mode_probs(self, tokens: Tensor, signal: Tensor) -> Tensor:
        """(B, L, K): the posterior of the block's mode given its noisy tokens but the one at each position."""
        blocks = self._blocks(tokens)
        evidence = self._evidence(signal.repeat_interleave(self.phrases), self._by_mode(blocks)).log()
        zero = evidence.new_zeros(*evidence.shape[:2], 1)
        before = torch.cat([zero, evidence.cumsum(-1)[..., :-1]], -1)
        after = torch.cat([zero, evidence.flip(-1).cumsum(-1)[..., :-1]], -1).flip(-1)
        log_weights = (before + after + self.weights.log()[:, None]).transpose(1, 2)
        return log_weights.softmax(-1).reshape(len(tokens), self.length, -1)

    def probs(self, tokens: Tensor, signal: Tensor) -> Tensor:
        modes = self.mode_probs(tokens, signal).view(-1, *self.distributions.shape[1::-1])  # (P, S, K)
        probs = torch.zeros(1, dtype=torch.float64)
        for k, words in enumerate(self.distributions):  # one by one: a matrix product's rounding depends on the batch
            probs = probs + modes[..., k, None] * words
        return probs.reshape(len(tokens), self.length, -1)

    def log_prob(self, tokens: Tensor) -> Tensor:
        blocks = self._by_mode(self._blocks(tokens)).log().sum(-1) + self.weights.log()
        return blocks.logsumexp(-1).view(len(tokens), -1).sum(-1)

    def conditional(self, tokens: Tensor) -> Tensor:
        size = self.distributions.shape[1]
        rest = -tokens.shape[1] % size  # the last block may be cut: what is put in its place is cut off again
        blocks = self._blocks(torch.nn.functional.pad(tokens, (0, rest)))
        joint = (self._by_mode(blocks).log().cumsum(-1) + self.weights.log()[:, None]).logsumexp(1)  # (P, S)
        steps = joint - torch.nn.functional.pad(joint, (1, 0))[:, :-1]
        return steps.reshape(len(tokens), -1)[:, : tokens.shape[1]]

    def draw(self, n: int, seed: int) -> Tensor:
        rng = CounterRNG(seed, torch.arange(n))
        which, _ = rng.uniforms(0, torch.arange(self.phrases), Purpose.DATA)
        mode = _choose(self.weights.expand(n, self.phrases, -1), which)
        u, _ = rng.uniforms(1, torch.arange(self.length), Purpose.DATA)
        return _choose(self.distributions[mode].reshape(n, self.length, -1), u)


def codebook(
    words: Tensor, vocab_size: int, weights: Tensor | None = None, name: str = "", slip: float = 0.0, phrases: int = 1
) -> Mixture:
    """A uniform (or weighted) choice among K sequences `words` (K, L), the modes of appendix B.2.

    slip: the probability of each token to be replaced by a uniform one."""
    distributions = (1 - slip) * torch.nn.functional.one_hot(words, vocab_size).double() + slip / vocab_size
    name = name or ("mixture" if slip else "codebook")
    return Mixture(torch.ones(len(words)) if weights is None else weights, distributions, phrases, name)


def forward_path(clean: Tensor, signals: Sequence[float], vocab_size: int, seed: int) -> list[Tensor]:
    """The noisy tokens (B, L) of one forward trajectory for each row of clean tokens, at each of falling signals."""
    rng, states = CounterRNG(seed, torch.arange(len(clean))), [clean]
    for step, (before, signal) in enumerate(pairwise([1.0, *signals])):
        keep, fresh = rng.uniforms(step, torch.arange(clean.shape[1]), Purpose.NOISE)
        states.append(torch.where(keep < signal / before, states[-1], uniform_token(fresh, vocab_size)))
    return states[1:]


class Markov(Source):
    """A chain with first-token distribution `initial` (V,) and rows `transition` (V, V), by forward-backward."""

    def __init__(self, initial: Tensor, transition: Tensor, length: int, name: str = "markov") -> None:
        self.initial = _normal(initial.double())
        self.transition = _normal(transition.double())
        super().__init__(name, len(initial), length, (self.initial, self.transition))

    def probs(self, tokens: Tensor, signal: Tensor) -> Tensor:
        points = torch.nn.functional.one_hot(tokens, self.vocab_size).double()
        evidence = self._evidence(signal, points)  # (B, L, V): of the noisy token, for each clean one
        ahead = [self.initial.expand(len(tokens), -1)]  # the clean token given the noisy ones before it
        behind = [torch.ones_like(ahead[0])]  # the likelihood of the noisy ones after it
        for i in range(self.length - 1):  # sums, not matrix products, whose rounding depends on the batch
            ahead.append(_normal(((ahead[-1] * evidence[:, i])[:, None] * self.transition.T).sum(-1)))
            behind.append(_normal(((behind[-1] * evidence[:, self.length - 1 - i])[:, None] * self.transition).sum(-1)))
        return _normal(torch.stack(ahead, 1) * torch.stack(behind[::-1], 1))

    def log_prob(self, tokens: Tensor) -> Tensor:
        return self.initial[tokens[:, 0]].log() + self.transition[tokens[:, :-1], tokens[:, 1:]].log().sum(-1)

    def conditional(self, tokens: Tensor) -> Tensor:
        first = self.initial[tokens[:, :1]].log()
        return torch.cat([first, self.transition[tokens[:, :-1], tokens[:, 1:]].log()], -1)

    def draw(self, n: int, seed: int) -> Tensor:
        u, _ = CounterRNG(seed, torch.arange(n)).uniforms(0, torch.arange(self.length), Purpose.DATA)
        tokens = [_choose(self.initial.expand(n, -1), u[:, 0])]
        for i in range(1, self.length):
            tokens.append(_choose(self.transition[tokens[-1]], u[:, i]))
        return torch.stack(tokens, 1)


def _normal(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)
