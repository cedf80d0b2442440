"""What makes a network fast on a GPU without changing it: an aligned head, and small bodies replayed as graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 64  # columns of logits: whole tiles for the matrix units, wide loads for whoever reads the rows
REPLAYED = 2**14  # tokens in a batch up to which launching kernels one by one may cost more than running them


class AlignedHead:
    """A linear head over a padded vocabulary, whose result is a view of the real one.

    Rows of 50258 logits start anywhere, and matrix kernels that write them are slow; rows of 50304 are aligned."""

    def __init__(self, linear: nn.Linear) -> None:
        self.vocab_size = linear.out_features
        padding = -linear.out_features % ALIGNMENT
        self.weight = F.pad(linear.weight.detach(), (0, 0, 0, padding))
        self.bias = None if linear.bias is None else F.pad(linear.bias.detach(), (0, padding))

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)[..., : self.vocab_size]


class Replay:
    """A function of CUDA tensors, captured as a graph for each shape of small batches and then replayed."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self.captured: dict[torch.Size, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor], Tensor]] = {}

    def __call__(self, tokens: Tensor, sigma: Tensor) -> Tensor:
        if not tokens.is_cuda or tokens.numel() > REPLAYED:
            return self.function(tokens, sigma)
        if tokens.shape not in self.captured:
            self.captured[tokens.shape] = self._capture(tokens.clone(), sigma.clone())
        graph, inputs, features = self.captured[tokens.shape]
        inputs[0].copy_(tokens)
        inputs[1].copy_(sigma)
        graph.replay()
        return features.clone()  # the next replay writes over it

    def _capture(self, tokens: Tensor, sigma: Tensor) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor], Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and lets libraries allocate, before anything is recorded
            for _ in range(2):
                self.function(tokens, sigma)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            features = self.function(tokens, sigma)
        return graph, (tokens, sigma), features
