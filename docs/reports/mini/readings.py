"""Other readings of what the paper leaves open, as samplers: each differs from CRS in one rule."""

import math
from dataclasses import dataclass

import torch
from limpet.engine import support
from limpet.engine.steps import inverse_cdf
from limpet.engine.streams import Purpose

from limpet.samplers import CRS


@dataclass(frozen=True)
class AfterExclusion(CRS):
    """A label is a draw from the nucleus of the law without its argmax, not from the nucleus of the law."""

    def relabel(self, choice):
        labels = choice.labels.clone()
        for rows, logits in choice.path.laws(choice.features, choice.chosen.nonzero(), self.temperature):
            others = logits.scatter(-1, logits.argmax(-1, keepdim=True), -math.inf).softmax(-1)
            weights = others * support.nucleus(others, self.value_top_p, self.boundary)
            uniform, _ = choice.path.stream.uniforms(choice.call, rows[:, 1], Purpose.VALUES, rows[:, 0])
            labels[tuple(rows.unbind(-1))] = inverse_cdf(weights, uniform)
        return labels


@dataclass(frozen=True)
class WholeLength(CRS):
    """The most positions selected in a call are reckoned from the whole sequence, a given prefix too."""

    def limits(self, path):
        _, allowance = super().limits(path)
        after = max(1, self.nfe - 1 - self.early)
        return torch.full_like(path.generated, -(-path.fixed.shape[1] // after)), allowance
