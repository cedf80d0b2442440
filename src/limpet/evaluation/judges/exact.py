"""The true distribution of an exact source as a judge; it counts every token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.errors import LimpetError
from limpet.evaluation.judges.base import Judge
from limpet.models.exact import Source


class SourceJudge(Judge):
    """The likelihood under the distribution that the samples should have."""

    precision = "float64"

    def __init__(self, source: Source) -> None:
        self.source, self.tokenizer = source, source.tokenizer
        self.name, self.digest = f"true distribution of {source.name}", source.digest
        self.vocab_size, self.context = source.vocab_size, source.length
        self.start = source.vocab_size  # an id before the sequence, so that its first token counts too

    def backbone(self, tokens: Tensor) -> Tensor:
        raise LimpetError(f"the {self.name} has no network, so texts have no features under it: name another judge")

    def head(self, features: Tensor) -> Tensor:
        return self.backbone(features)

    def _checked(self, sequence: Any) -> Tensor:
        ids = super()._checked(sequence[1:])
        if len(ids) > self.context:
            raise LimpetError(f"the {self.name} is of {self.context} tokens; a sample here has {len(ids)}")
        return F.pad(ids, (1, 0))  # the first id is not read: any will do

    def _nll(self, rows: Tensor, scored: Tensor) -> Tensor:
        nll = -self.source.conditional(rows[:, 1:])[scored]
        return nll.masked_fill(nll.isnan(), torch.inf)  # after an impossible token everything is impossible
