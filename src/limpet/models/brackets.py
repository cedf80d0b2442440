"""A context-free language with an exact denoiser: balanced strings of brackets, by the inside-outside algorithm.

The data distribution is uniform over all balanced strings of a given length with brackets of K kinds. A string is
either empty or `( S ) S`, so it has one parse, and the sums below count every string once. Spans are indexed by their
first position i and their half width w: a span holds 2 w brackets."""

from __future__ import annotations

import torch
from torch import Tensor

from limpet.diffusion.rng import CounterRNG, Purpose
from limpet.errors import LimpetError
from limpet.models.exact import Source

BRACKETS = "()[]{}"  # token 2 k opens a bracket of kind k, token 2 k + 1 closes it


class BalancedBrackets(Source):
    """Balanced strings of `length` brackets of `kinds` kinds, all equally likely."""

    def __init__(self, length: int, kinds: int = 3, name: str = "brackets") -> None:
        if length < 2 or length % 2:
            raise LimpetError(f"length is {length}; balanced strings have an even length from 2")
        self.kinds = kinds
        self.completions = _completions(length, kinds)
        super().__init__(name, 2 * kinds, length, (self.completions,))

    def probs(self, tokens: Tensor, signal: Tensor) -> Tensor:
        size, half = self.length, self.length // 2
        clean = torch.nn.functional.one_hot(tokens, self.vocab_size).double()
        evidence = self._evidence(signal, clean)  # (B, L, V): of the noisy token, for each clean one
        evidence = evidence / evidence.amax(-1, keepdim=True)  # keeps products of 64 factors within float64's range
        opens, closes = evidence[..., 0::2], evidence[..., 1::2]  # (B, L, K)
        # pair[v][:, i]: evidence that position i opens a bracket which position i + 2 v + 1 closes
        pair = [sum_kinds(opens[:, : size - 2 * v - 1], closes[:, 2 * v + 1 :]) for v in range(half)]

        # inside[w][:, i]: summed evidence of all balanced strings on a span; group[v]: of `( S )` with v pairs inside
        inside = [evidence.new_ones(len(tokens), size + 1)]
        group: list[Tensor] = []
        for w in range(1, half + 1):
            group.append(pair[w - 1] * inside[w - 1][:, 1 : size - 2 * w + 2])
            width = size - 2 * w + 1  # positions at which a span of this width can start
            parts = (group[v][:, :width] * inside[w - 1 - v][:, 2 * v + 2 : 2 * v + 2 + width] for v in range(w))
            inside.append(_total(parts))

        # outside: the derivative of the summed evidence of the whole string with respect to each part
        outside = [torch.zeros_like(part) for part in inside]
        outside_group = [torch.zeros_like(part) for part in group]
        outside[half] = torch.ones_like(inside[half])
        for w in range(half, 0, -1):
            if w < half:
                outside[w][:, 1 : size - 2 * w] += outside_group[w] * pair[w]
            width = size - 2 * w + 1
            for v in range(w):
                rest = slice(2 * v + 2, 2 * v + 2 + width)
                outside_group[v][:, :width] += outside[w] * inside[w - 1 - v][:, rest]
                outside[w - 1 - v][:, rest] += outside[w] * group[v][:, :width]
        weights = torch.zeros_like(evidence)
        for v in range(half):
            of_pair = (outside_group[v] * inside[v][:, 1 : size - 2 * v])[..., None]
            weights[:, : size - 2 * v - 1, 0::2] += of_pair * closes[:, 2 * v + 1 :]
            weights[:, 2 * v + 1 :, 1::2] += of_pair * opens[:, : size - 2 * v - 1]
        return weights / weights.sum(-1, keepdim=True)

    def log_prob(self, tokens: Tensor) -> Tensor:
        return self.conditional(tokens).sum(-1)

    def conditional(self, tokens: Tensor) -> Tensor:
        stack, depth = self._empty(len(tokens))
        found = []
        for i, token in enumerate(tokens.unbind(1)):
            found.append(self._next(i, stack, depth).gather(-1, token[:, None])[:, 0].log())
            depth = self._push(stack, depth, token)
        return torch.stack(found, 1)

    def draw(self, n: int, seed: int) -> Tensor:
        u, _ = CounterRNG(seed, torch.arange(n)).uniforms(0, torch.arange(self.length), Purpose.DATA)
        stack, depth = self._empty(n)
        tokens = []
        for i in range(self.length):
            cumulated = self._next(i, stack, depth).cumsum(-1)
            tokens.append(torch.searchsorted(cumulated, (u[:, i] * cumulated[:, -1])[:, None], right=True)[:, 0])
            depth = self._push(stack, depth, tokens[-1])
        return torch.stack(tokens, 1)

    def _empty(self, n: int) -> tuple[Tensor, Tensor]:
        """The kinds of the open brackets of n strings, and how many are open: none yet."""
        return torch.zeros(n, self.length + 1, dtype=torch.long), torch.zeros(n, dtype=torch.long)

    def _next(self, position: int, stack: Tensor, depth: Tensor) -> Tensor:
        """(n, V) probabilities of the next token; zero throughout after a string that nothing completes."""
        rest = self.length - position - 1
        may_close = (depth > 0).double() * self.completions[rest, (depth - 1).clamp(min=0)]
        weights = self.completions[rest, depth + 1][:, None].repeat(1, self.vocab_size)
        weights[:, 1::2] = 0
        top = stack.gather(-1, (depth - 1).clamp(min=0)[:, None])  # the kind of the innermost open bracket
        weights.scatter_(-1, 2 * top + 1, may_close[:, None])
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)

    def _push(self, stack: Tensor, depth: Tensor, token: Tensor) -> Tensor:
        """The depths after one more token; `stack` takes the kind that it opens. A string that has gone wrong (a
        bracket closed that was not open) gets a depth from which nothing completes it."""
        kind, closing = token // 2, token % 2 == 1
        top = stack.gather(-1, (depth - 1).clamp(min=0)[:, None])[:, 0]
        wrong = closing & ((depth == 0) | (top != kind))
        stack.scatter_(-1, torch.where(closing, self.length, depth)[:, None], kind[:, None])
        return torch.where(wrong, self.length, torch.where(closing, depth - 1, depth + 1).clamp(max=self.length))


def is_balanced(text: str) -> bool:
    """Whether every bracket of a text is closed by its own kind, in the right order, and nothing else is in it."""
    stack: list[str] = []
    for letter in text:
        kind, closing = divmod(BRACKETS.find(letter), 2)
        if letter not in BRACKETS or (closing and (not stack or stack.pop() != BRACKETS[2 * kind])):
            return False
        if not closing:
            stack.append(letter)
    return not stack


def sum_kinds(opens: Tensor, closes: Tensor) -> Tensor:
    """(..., K) twice -> (...): summed one kind after the other, as the rounding of a reduction depends on the batch."""
    return _total((opens * closes).unbind(-1))


def _total(parts: object) -> Tensor:
    total: Tensor | None = None
    for part in parts:  # type: ignore[attr-defined]
        total = part if total is None else total + part
    assert total is not None
    return total


def _completions(length: int, kinds: int) -> Tensor:
    """(length + 1, length + 2) how many strings of r further brackets close d open ones, in float64."""
    counts = torch.zeros(length + 1, length + 2, dtype=torch.float64)
    counts[0, 0] = 1
    for rest in range(1, length + 1):
        counts[rest, :-1] = kinds * counts[rest - 1, 1:]
        counts[rest, 1:] += counts[rest - 1, :-1]
    return counts
