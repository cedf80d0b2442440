"""What makes a network fast on a GPU without changing it: a fused body, graphs for small batches, an aligned head."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.engine.steps import has_triton

if TYPE_CHECKING:
    from limpet.denoisers import Needed
    from limpet.denoisers.duo import Network

ALIGNMENT = 64  # columns of logits: whole tiles for the matrix units, wide loads for whoever reads the rows
REPLAYED = 2**14  # tokens in a batch up to which launching kernels one by one may cost more than running them


class Parts(NamedTuple):
    """The two parts of a network, each as fast as a device can have it."""

    body: Callable[[Tensor, Tensor, Needed], Tensor]  # (B, L) tokens, (B,) sigma -> (B, L, width) features
    head: Callable[[Tensor], Tensor]


def parts(network: Network, device: torch.device) -> Parts:
    """The network's own parts, or on a GPU faster ones that compute the same."""
    plain = Parts(lambda tokens, sigma, needed: network.body(tokens, sigma, needed()), network.head)
    if device.type != "cuda":
        return plain
    head = AlignedHead(network.output_layer.linear)
    if not has_triton(device):
        return plain._replace(head=head)
    from limpet.denoisers.fused import FusedBody

    return Parts(FusedBody(network), head)


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
    """A function of CUDA tensors, captured as a graph for each shape of small batches and then replayed.

    What a replay returns is written over by the next."""

    def __init__(self, function: Callable[[Tensor, Tensor], tuple[Tensor, ...]]) -> None:
        self.function = function
        self.captured: dict[torch.Size, tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor], tuple[Tensor, ...]]] = {}

    def __call__(self, tokens: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
        if not tokens.is_cuda or tokens.numel() > REPLAYED:
            return self.function(tokens, sigma)
        if tokens.shape not in self.captured:
            self._capture(tokens.clone(), sigma.clone())
        graph, inputs, outputs = self.captured[tokens.shape]
        inputs[0].copy_(tokens)
        inputs[1].copy_(sigma)
        graph.replay()
        return outputs

    def _capture(self, tokens: Tensor, sigma: Tensor) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and lets libraries allocate, before anything is recorded
            for _ in range(2):
                self.function(tokens, sigma)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = self.function(tokens, sigma)
        self.captured[tokens.shape] = graph, (tokens, sigma), outputs
