"""Other readings of what the paper leaves open, as samplers: each differs from CRS in one rule."""

import math
from dataclasses import dataclass

import torch

from limpet import CRS
from limpet.diffusion import truncation
from limpet.diffusion.backends import inverse_cdf
from limpet.diffusion.rng import Purpose


@dataclass(frozen=True)
class AfterExclusion(CRS):
    """A committed token is drawn from the nucleus of the prediction without its argmax, not from the nucleus of the
    prediction."""

    def update_values(self, choice):
        tokens = choice.values.clone()
        for rows, logits in choice.ctx.log_probs(choice.features, choice.chosen.nonzero(), self.temperature):
            others = logits.scatter(-1, logits.argmax(-1, keepdim=True), -math.inf).softmax(-1)
            weights = others * truncation.nucleus(others, self.value_top_p, self.boundary)
            uniform, _ = choice.ctx.rng.uniforms(choice.call, rows[:, 1], Purpose.VALUES, rows[:, 0])
            tokens[tuple(rows.unbind(-1))] = inverse_cdf(weights, uniform)
        return tokens


@dataclass(frozen=True)
class WholeLength(CRS):
    """The most positions committed in a call follow from the whole sequence, prompt included."""

    def limits(self, ctx):
        _, allowance = super().limits(ctx)
        steps = max(1, self.nfe - 1 - self.warmup_calls)
        return torch.full_like(ctx.generated, -(-ctx.fixed.shape[1] // steps)), allowance
