"""Sumi (Ye et al., 7B): a Llama-like transformer that is not given the time, whose attention may look at nothing.

Its softmax has one more in the denominator. A key and a value of zeros, which every query sees, have that effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.diffusion.process import clipped_snr
from limpet.errors import LimpetError
from limpet.models import model_files, time_agnostic
from limpet.models.model_files import FALSE, NUMBER, Fields, whole_number
from limpet.models.networks import (
    MAX_LENGTH,
    Linear,
    Positions,
    Rotation,
    attend_beside_cache,
    attention,
    kept_layer,
    keys_and_values,
    renewed,
    rotate,
)
from limpet.models.tensor_files import Unread
from limpet.models.time_agnostic import (
    RMSNorm,
    TimeAgnostic,
    TimeAgnosticLayer,
    TimeAgnosticNetwork,
    TimeAgnosticShape,
)

WHAT = "a Sumi model"
CANVAS = 2048  # tokens that the released sampler works on; the model has positions for 4864
ROPE: dict[str, Callable[[Any], bool]] = {"rope_theta": NUMBER[1], "rope_type": lambda value: value == "default"}
FIELDS: Fields = {
    "num_attention_heads": whole_number(MAX_LENGTH),
    "num_key_value_heads": whole_number(MAX_LENGTH),
    "max_position_embeddings": whole_number(MAX_LENGTH),
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
class SumiShape(TimeAgnosticShape):
    """Every size of a network, and the numbers that its tensors cannot tell. The defaults are the released config's."""

    groups: int  # key and value heads, each for several heads of queries
    eps: float = 1e-6
    base: float = 10000.0  # of the rotation


class SumiAttention(nn.Module):
    """Attention of every query to every key, and to a key and a value of zeros."""

    def __init__(self, shape: SumiShape) -> None:
        super().__init__()
        narrow = shape.width // shape.heads * shape.groups
        self.heads, self.groups = shape.heads, shape.groups
        self.q_proj, self.o_proj = (Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (Linear(shape.width, narrow, bias=False) for _ in range(2))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., width) -> queries (..., heads, .), keys and values (..., groups, .), not rotated."""
        parts = ((self.q_proj, self.heads), (self.k_proj, self.groups), (self.v_proj, self.groups))
        return tuple(part(x).unflatten(-1, (heads, -1)) for part, heads in parts)

    def cached(
        self, x: Tensor, rotation: Rotation, clean: Tensor | None, positions: Positions, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(R, width) -> (R, width) at some positions, and a layer of a cache; see `TimeAgnosticLayer`."""
        q, k, v = self.project(x)
        q, kept = renewed(q, k, v, kept, rotation, positions)
        k, v = (F.pad(part, (0, 0, 0, 1)) for part in keys_and_values(kept))
        return attend_beside_cache(q, k, v, positions[0]), kept

    def forward(self, x: Tensor, rotation: Rotation, clean: Tensor | None, keep: list[Tensor] | None = None) -> Tensor:
        """(B, L, width) -> (B, L, width), before the output map."""
        q, k, v = (part.transpose(1, 2) for part in self.project(x))  # (B, heads or groups, L, .)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        if keep is not None:
            keep.append(kept_layer(k, v))
        k, v = (F.pad(part, (0, 0, 0, 1)) for part in (k, v))
        return attention(q, k, v).flatten(2)


class SumiMLP(nn.Module):
    """An MLP with a SiLU gate."""

    def __init__(self, shape: SumiShape) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (Linear(shape.width, shape.hidden, bias=False) for _ in range(2))
        self.down_proj = Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return inner


class SumiLayer(TimeAgnosticLayer):
    def __init__(self, shape: SumiShape) -> None:
        super().__init__()
        self.self_attn, self.mlp = SumiAttention(shape), SumiMLP(shape)
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(shape.width, shape.eps) for _ in range(2))

    @property
    def norms(self) -> tuple[nn.Module, nn.Module]:
        return self.input_layernorm, self.post_attention_layernorm


class SumiNetwork(TimeAgnosticNetwork):
    def __init__(self, shape: SumiShape) -> None:
        super().__init__(shape, lambda: SumiLayer(shape), RMSNorm(shape.width, shape.eps), shape.base)


def from_folder(
    folder: Path | None = None, *, device: torch.device | str | None = None, precision: str = "float32"
) -> TimeAgnostic:
    """A Sumi model from a folder as it lies on the hub, in one file or in parts.

    The network has no input for which tokens are clean. In half of its training every token had a noise level of its
    own, so that committed tokens among noise are like its training data."""
    device = model_files.usable_device(device)
    path, config, state = time_agnostic.open_folder(folder, FIELDS, WHAT, ("num_attention_heads",))
    shape = read_shape(config, state, path)
    network = time_agnostic.filled_network(lambda: SumiNetwork(shape), state, path, WHAT, device, precision)
    tokenizer, reason = model_files.find_tokenizer(path.parent, shape.vocab_size)
    return TimeAgnostic(
        network,
        schedule=clipped_snr(),
        name=str(folder),
        tokenizer=tokenizer,
        precision=precision,
        info={"file": str(path), "weights": "as stored", "tokenizer": reason},
    )


def read_shape(config: Mapping[str, Any], state: Mapping[str, Unread], path: Path) -> SumiShape:
    """The sizes that the tensors tell, and the numbers that only config.json does."""
    heads = config["num_attention_heads"]
    groups = config.get("num_key_value_heads", heads)
    vocab_size, width, hidden, blocks = time_agnostic.read_sizes(state, heads, path, WHAT)
    if heads % groups:
        raise LimpetError(f"{path} has {heads} heads of queries for {groups} of keys, which do not share them evenly")
    base = config.get("rope_parameters", {}).get("rope_theta", config.get("rope_theta", SumiShape.base))
    length = min(CANVAS, config.get("max_position_embeddings", CANVAS))
    eps = config.get("rms_norm_eps", SumiShape.eps)
    return SumiShape(vocab_size, length, width, blocks, heads, hidden, groups, eps, base)
