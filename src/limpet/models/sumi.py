"""Sumi (Ye et al., 7B): a Llama-like transformer without time, whose attention may also look at nothing.

Its softmax has one more in the denominator: a key and a value of zeros, which every query sees, are just that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.diffusion.process import clipped_snr
from limpet.errors import LimpetError
from limpet.models import model_files, time_agnostic
from limpet.models.duo import Linear, Rows, rotate
from limpet.models.tensor_files import Unread
from limpet.models.time_agnostic import COUNT, FALSE, NUMBER, RMSNorm, Rotation, Sizes, Timeless

WHAT = "a Sumi model"
CANVAS = 2048  # tokens that its own sampler works on, of the 4864 that it has positions for
ROPE: dict[str, Callable[[Any], bool]] = {"rope_theta": NUMBER[1], "rope_type": lambda value: value == "default"}
TAKES: model_files.Takes = {
    "num_attention_heads": COUNT,
    "num_key_value_heads": COUNT,
    "max_position_embeddings": COUNT,
    "rms_norm_eps": NUMBER,
    "rope_theta": NUMBER,
    "hidden_act": ('"silu"', lambda value: value == "silu"),
    "tie_word_embeddings": FALSE,
    "attention_bias": FALSE,
    "add_qkv_bias": FALSE,
    "mlp_bias": FALSE,
    "rope_parameters": (
        "a rope_theta above 0 of the default type",
        lambda value: isinstance(value, dict) and all(key in ROPE and ROPE[key](one) for key, one in value.items()),
    ),
}


@dataclass(frozen=True)
class Shape(Sizes):
    """Every size of a network, and the numbers that its tensors cannot tell; the defaults are its own config's."""

    groups: int  # key and value heads, each for several heads of queries
    eps: float = 1e-6
    base: float = 10000.0  # of the rotation


class Attention(nn.Module):
    """Every query to every key, and to nothing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        narrow = shape.width // shape.heads * shape.groups
        self.heads, self.groups = shape.heads, shape.groups
        self.q_proj, self.o_proj = (Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (Linear(shape.width, narrow, bias=False) for _ in range(2))

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """(B, L, width) -> (B, L, width), before the map out of it."""
        q = rotate(self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2), *rotation)  # (B, heads, L, .)
        k, v = (part(x).unflatten(-1, (self.groups, -1)).transpose(1, 2) for part in (self.k_proj, self.v_proj))
        k, v = (F.pad(part, (0, 0, 0, 1)) for part in (rotate(k, *rotation), v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.groups)
        return mixed.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """A gate of SiLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down_proj = Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return inner


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(shape.width, shape.eps) for _ in range(2))

    def forward(self, x: Tensor, rotation: Rotation, clean: Tensor | None, at: Rows | None) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), rotation)
        if at is not None:  # from here on nothing mixes positions
            x, mixed = x[at], mixed[at]
        x = x + self.self_attn.o_proj(mixed)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class Network(time_agnostic.Network):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, lambda: Layer(shape), RMSNorm(shape.width, shape.eps), shape.base)


def make(
    folder: Path | None = None, *, device: torch.device | str | None = None, precision: str = "float32"
) -> Timeless:
    """A Sumi model from a folder as it lies on the hub, in one file or in parts.

    It is told nothing of which tokens are clean: its network has no door for that. Half of its training gave every
    token a noise level of its own, so that labels among noise are nothing new to it."""
    place = model_files.usable_device(device)
    path, config, state = time_agnostic.open_folder(folder, TAKES, WHAT, ("num_attention_heads",))
    shape = shape_of(config, state, path)
    network = time_agnostic.filled(lambda: Network(shape), state, path, WHAT, place, precision)
    tokenizer, reason = model_files.find_tokenizer(path.parent, shape.vocab_size)
    return Timeless(
        network,
        schedule=clipped_snr(),
        name=str(folder),
        tokenizer=tokenizer,
        precision=precision,
        info={"file": str(path), "weights": "as stored", "tokenizer": reason},
    )


def shape_of(config: Mapping[str, Any], state: Mapping[str, Unread], path: Path) -> Shape:
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    vocab_size, width, hidden, blocks = time_agnostic.sizes_of(state, "mlp.up_proj.weight", heads, path, WHAT)
    if heads % groups:
        raise LimpetError(f"{path} has {heads} heads of queries for {groups} of keys, which do not share them evenly")
    base = config.get("rope_parameters", {}).get("rope_theta", config.get("rope_theta", Shape.base))
    length = min(CANVAS, config.get("max_position_embeddings", CANVAS))
    return Shape(vocab_size, length, width, blocks, heads, hidden, groups, config.get("rms_norm_eps", Shape.eps), base)
