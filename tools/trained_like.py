"""Networks with random weights whose distributions are as confident as a trained model's, for measuring speed.

limpet bench --model ./tools/trained_like.py:released --device cuda
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch

from limpet.models.duo import Duo, DuoBlock, DuoNetwork, DuoShape
from limpet.models.networks import Linear


def released(
    folder: Path | None = None, *, device: torch.device | str | None = None, precision: str = "float32"
) -> Duo:
    """The released size: 169.6M parameters, length 1024, vocabulary 50258."""
    return Duo(trained_like(DuoShape()), name="trained-like", precision=precision).to(device or "cpu")


def trained_like(shape: DuoShape, seed: int = 0) -> DuoNetwork:
    """Random weights of any shape, so that sampling costs what it would cost with trained ones.

    The head is the embedding, scaled: logits are then normal with one outlier, the input's own token. The noise level
    reaches the network through one conditioning feature, about 2.7 at clean text and 0 at noise: it raises the last
    scale, so distributions sharpen during sampling, and lowers the gates of the blocks, so that tokens come to favour
    themselves. The numbers were chosen so that the mean largest probability and the probability of the
    input's own token develop at the released size roughly as for the built-in model."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        network = DuoNetwork(shape)
        width, embedding = shape.width, network.vocab_embed.embedding
        first, second = cast(Linear, network.sigma_map.mlp[0]), cast(Linear, network.sigma_map.mlp[2])
        for parameter in network.sigma_map.parameters():
            parameter.zero_()
        first.weight[0, network.sigma_map.FREQUENCIES + 32] = -12.0  # the sine of sigma / 10
        first.bias[0] = 3.0
        second.weight[0, 0] = 1.0
        for block in cast(list[DuoBlock], network.blocks):
            cast(Linear, block.mlp[0]).bias.zero_()  # what all positions share would make all distributions alike
            cast(Linear, block.mlp[2]).bias.zero_()
            for gate in (slice(2 * width, 3 * width), slice(5 * width, 6 * width)):
                block.adaLN_modulation.bias[gate] = 0.35
                block.adaLN_modulation.weight[gate, 0] = -0.06
        output = network.output_layer
        output.linear.weight.copy_(3.3 * math.sqrt(3) * embedding)  # logits of standard deviation 3.3 at noise
        output.adaLN_modulation.weight[width:, 0] = 0.35
    return network
