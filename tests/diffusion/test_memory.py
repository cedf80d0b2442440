"""What a call holds at once, counted tensor by tensor: no sampler takes more than all of them may."""

from __future__ import annotations

import pytest
import torch
from test_conformance import TABLE
from torch import Tensor

from held import Held
from limpet.diffusion import backends as steps
from limpet.diffusion.rng import CounterRNG
from limpet.models import Denoiser
from limpet.samplers import Sampler, parse
from limpet.samplers.context import open_context, stepped


class Random(Denoiser):
    """Random distributions from features so narrow that logits alone take memory."""

    name, digest, vocab_size, length = "random", "random", 1024, 64

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embedding, self.weight = (torch.randn(self.vocab_size, 4, generator=generator) for _ in range(2))

    def body(self, tokens: Tensor, t: float | Tensor) -> Tensor:
        return self.embedding[tokens]

    def head(self, features: Tensor) -> Tensor:
        return features @ self.weight.T


def most_held(model: Denoiser, sampler: Sampler, batch: int) -> int:
    """Bytes, in the call of a path that takes most; three tokens of each sample are given."""
    fixed = torch.full((batch, model.length), -1)
    fixed[:, :3] = 5
    ctx, most = open_context(model, CounterRNG(3, torch.arange(batch)), fixed), 0
    with torch.inference_mode():
        state = sampler.begin(ctx)
        while state.call < sampler.nfe:
            with Held() as held:
                state, _ = stepped(sampler, ctx, state)
            most = max(most, held.most)
    return most


@pytest.mark.parametrize("piece", [2**15, 2**12], ids=["whole chunks", "eighths"])
@pytest.mark.parametrize("arm", [*TABLE, "native top_p=.8", "gibbs choose=margin", "trapezoidal top_p=.8"])
def test_a_call_holds_four_chunks_of_logits_and_five_pieces_at_most(
    arm: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks as the head gives them, pieces in float64, whatever the sampler; all logits of a call are eight chunks.
    What has one number for each position, or a few, may take an eighth of a chunk."""
    model, batch = Random(), 4
    chunk = batch * model.length * model.vocab_size // 8
    monkeypatch.setitem(steps.CHUNK, "cpu", chunk)
    monkeypatch.setitem(steps.PIECE, "cpu", piece)
    _, sampler = parse(arm, nfe=5)
    assert most_held(model, sampler, batch) <= 4 * (4 * chunk) + 5 * (8 * piece) + 4 * chunk // 8


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
