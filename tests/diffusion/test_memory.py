"""The memory of a call, counted tensor by tensor: one limit holds for every sampler."""

from __future__ import annotations

import pytest
import torch
from test_every_sampler import TABLE
from torch import Tensor

from held import Held
from limpet.diffusion import backends
from limpet.diffusion.rng import CounterRNG
from limpet.generation import Inputs, rollout
from limpet.models import Denoiser, ModelInput
from limpet.samplers import Sampler, parse
from thinned import thinned


class RandomDenoiser(Denoiser):
    """Random distributions from so few features that only logits take memory."""

    name, digest, vocab_size, length = "random", "random", 1024, 64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding, self.weight = (torch.randn(self.vocab_size, 4, generator=generator) for _ in range(2))

    def backbone(self, inputs: ModelInput) -> Tensor:
        return self.embedding[inputs.tokens]

    def head(self, features: Tensor) -> Tensor:
        return features @ self.weight.T


def most_held(model: Denoiser, sampler: Sampler, batch: int) -> int:
    """The most bytes that a call takes; three tokens of each sample are fixed."""
    fixed = torch.full((batch, model.length), -1)
    fixed[:, :3] = 5
    most, state = 0, None
    for call in range(1, sampler.nfe + 1):
        with Held() as held:
            (step,) = rollout(model, sampler, Inputs(fixed, CounterRNG(3, torch.arange(batch))), state, call)
        most, state = max(most, held.most), step.state
    return most


SAMPLERS = [*TABLE, "native top_p=.8", "gibbs choose=margin", "trapezoidal top_p=.8"]
CASES = [*((text, 2**12) for text in SAMPLERS), *((text, 2**15) for text in ("native top_p=.8", "crs", "trapezoidal"))]


@pytest.mark.parametrize(("text", "piece"), thinned(CASES))
def test_a_call_holds_at_most_four_chunks_of_logits_and_five_pieces(
    text: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks in float32, pieces in float64. All logits of a call are eight chunks. Tensors with one or a few numbers
    per position may take an eighth of a chunk."""
    model, batch = RandomDenoiser(), 4
    model.length = 64 if piece > 2**12 else 32  # as many positions as show more than two pieces at once
    chunk = batch * model.length * model.vocab_size // 8
    monkeypatch.setitem(backends.CHUNK, "cpu", chunk)
    monkeypatch.setitem(backends.PIECE, "cpu", piece)
    assert most_held(model, parse(text, nfe=4)[1], batch) <= 4 * (4 * chunk) + 5 * (8 * piece) + 4 * chunk // 8


def test_what_is_held_is_counted() -> None:
    with Held() as held:
        one = torch.ones(1000)
        assert held.most == 4000
        (one + 1).sum()  # the sum of a tensor that nothing keeps
        one[2:].mul_(2)
        assert held.most == 8004
        del one
        torch.ones(1500)
        assert held.most == 8004
        kept = torch.ones(2500)[:1]  # a view keeps all
        torch.ones(10)
    assert held.most == 10040
    assert len(kept) == 1
