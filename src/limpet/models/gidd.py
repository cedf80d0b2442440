"""gidd-unif (von Ruette et al., 3B and 10B): a transformer that is not given the time, and whose prompts see no noise.

Its norms have gains above one, queries and keys are normed over the full width, attention logits are capped, every head
has a learned key and value that no position owns, and the branches of all layers together weigh as much as four."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from limpet.diffusion.process import clipped_snr
from limpet.errors import LimpetError
from limpet.models import model_files, time_agnostic
from limpet.models.model_files import FALSE, NUMBER, TOKEN, Field, Fields, whole_number
from limpet.models.networks import (
    MAX_LENGTH,
    Linear,
    Positions,
    Rotation,
    kept_layer,
    keys_and_values,
    product,
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

WHAT = "a gidd-unif model"
MASK = 3  # the released tokenizer's <|mask|>, whose probability was zero in training
UNIFORM = 20.0  # nats of log-odds: with more, less than one noise token in 10^8 is the mask
MAX_LOG_SNR = 500.0  # nats; exp of it is still a finite number
LOG_SNR: Field = (
    f"a number from {-MAX_LOG_SNR:g} to {MAX_LOG_SNR:g}",
    lambda value: type(value) in (int, float) and abs(value) <= MAX_LOG_SNR,
)
FIELDS: Fields = {
    "num_attention_heads": whole_number(MAX_LENGTH),
    "max_position_embeddings": whole_number(MAX_LENGTH),
    "is_causal": FALSE,
    "tie_word_embeddings": FALSE,
    "use_qk_norm": ("true", lambda value: value is True),
    "rope_scaling": ("null", lambda value: value is None),
    "rope_theta": NUMBER,
    "rms_norm_eps": NUMBER,
    "attn_soft_cap": NUMBER,
    "resid_scale": NUMBER,
    "head_scaling": NUMBER,
    "weight_scaling": ("a number, fan_in or fan_out", lambda value: value in ("fan_in", "fan_out") or NUMBER[1](value)),
    "noise_type": ("a number", lambda value: type(value) in (int, float)),
    "min_log_snr": LOG_SNR,
    "max_log_snr": LOG_SNR,
    "mask_token_id": ("a token's id", lambda value: value is not None and TOKEN[1](value)),
}
OWN_FIELDS = {  # of config.json, and what they are called in the shape
    "rms_norm_eps": "eps",
    "attn_soft_cap": "cap",
    "resid_scale": "branches",
    "weight_scaling": "scaling",
    "rope_theta": "base",
}


@dataclass(frozen=True)
class GiddShape(TimeAgnosticShape):
    """Every size of a network, and the numbers that its tensors cannot tell. The defaults are the released config's."""

    eps: float = 1e-6
    cap: float = 30.0  # of attention logits
    branches: float = 4.0  # the summed weight of the branches of all layers
    scaling: float | str = "fan_in"  # of linear maps
    base: float = 10000.0  # of the rotation
    bias: bool = True  # whether the MLP has biases
    sink: bool = True  # whether heads have a key and a value that belong to no position


class ScaledLinear(Linear):
    """A linear map whose output is scaled before its bias is added."""

    def __init__(self, inward: int, outward: int, scaling: float | str, bias: bool = False) -> None:
        super().__init__(inward, outward, bias=bias)
        known = {"fan_in": inward**-0.5, "fan_out": outward**-0.5}
        self.scale = known[scaling] if isinstance(scaling, str) else scaling

    def forward(self, input: Tensor) -> Tensor:
        y = product(input, self.weight) * self.scale
        return y if self.bias is None else y + self.bias


class GiddAttention(nn.Module):
    """Every query to every key that is no noisier than itself."""

    def __init__(self, shape: GiddShape) -> None:
        super().__init__()
        self.heads, self.cap = shape.heads, shape.cap
        self.q_norm, self.k_norm = (RMSNorm(shape.width, shape.eps, centred=True) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            ScaledLinear(shape.width, shape.width, shape.scaling) for _ in range(4)
        )
        if shape.sink:
            self.k_bias, self.v_bias = (
                nn.Parameter(torch.zeros(shape.heads, shape.width // shape.heads)) for _ in range(2)
            )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """(..., width) -> queries, keys and values (..., heads, .), not rotated."""
        v = self.v_proj(x)
        q, k = self.q_norm(self.q_proj(x)).to(v.dtype), self.k_norm(self.k_proj(x)).to(v.dtype)
        return tuple(part.unflatten(-1, (self.heads, -1)) for part in (q, k, v))

    def cached(
        self, x: Tensor, rotation: Rotation, clean: Tensor | None, positions: Positions, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(R, width) -> (R, width) at some positions, and a layer of a cache; see `TimeAgnosticLayer`."""
        q, k, v = self.project(x)
        q, kept = renewed(q, k, v, kept, rotation, positions)
        k, v = keys_and_values(kept)
        counts = positions[0].bincount(minlength=len(kept)).tolist()
        mixed = [
            self._sample(own.transpose(0, 1), k[i], v[i], None if clean is None else clean[i, at, None] & ~clean[i])
            for i, (own, at) in enumerate(zip(torch.split(q, counts), torch.split(positions[1], counts), strict=True))
        ]
        return torch.cat(mixed, 1).transpose(0, 1).flatten(1), kept

    def forward(self, x: Tensor, rotation: Rotation, clean: Tensor | None, keep: list[Tensor] | None = None) -> Tensor:
        """(B, L, width) -> (B, L, width), before the output map. One sample at a time, as scores take much memory."""
        q, k, v = (part.transpose(1, 2) for part in self.project(x))  # (B, heads, L, .)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        if keep is not None:
            keep.append(kept_layer(k, v))
        mixed = [
            self._sample(q[i], k[i], v[i], None if clean is None else clean[i, :, None] & ~clean[i])
            for i in range(len(x))
        ]
        return torch.stack(mixed).transpose(1, 2).flatten(2)

    def _sample(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """(heads, R, .) queries, (heads, L, .) keys and values, and (R, L) where a query may not see a key ->
        (heads, R, .)."""
        if hasattr(self, "k_bias"):  # a key that all queries see, before the others and at no position
            k = torch.cat([self.k_bias.to(v.dtype)[:, None], k], 1)
            v = torch.cat([self.v_bias.to(v.dtype)[:, None], v], 1)
            hidden = None if hidden is None else nn.functional.pad(hidden, (1, 0))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(1, 2)
        scores = self.cap * torch.tanh(scores / self.cap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


class GiddMLP(nn.Module):
    """Two linear maps with a squared ReLU between them."""

    def __init__(self, shape: GiddShape) -> None:
        super().__init__()
        self.up_proj = ScaledLinear(shape.width, shape.hidden, shape.scaling, shape.bias)
        self.down_proj = ScaledLinear(shape.hidden, shape.width, shape.scaling, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down_proj(self.up_proj(x).relu() ** 2)
        return inner


class GiddLayer(TimeAgnosticLayer):
    def __init__(self, shape: GiddShape) -> None:
        super().__init__()
        self.weight = shape.branches / shape.blocks
        self.self_attn, self.mlp = GiddAttention(shape), GiddMLP(shape)
        self.attn_layernorm, self.mlp_layernorm = (RMSNorm(shape.width, shape.eps, centred=True) for _ in range(2))

    @property
    def norms(self) -> tuple[nn.Module, nn.Module]:
        return self.attn_layernorm, self.mlp_layernorm


class GiddNetwork(TimeAgnosticNetwork):
    def __init__(self, shape: GiddShape) -> None:
        super().__init__(shape, lambda: GiddLayer(shape), RMSNorm(shape.width, shape.eps, centred=True), shape.base)


def from_folder(
    folder: Path | None = None, *, device: torch.device | str | None = None, precision: str = "float32"
) -> TimeAgnostic:
    """A gidd-unif model from a folder as it lies on the hub, in one file or in parts.

    The model is given the fixed tokens as clean, as prompts were in its training: they see each other and no noise.
    It is not given committed tokens as clean. In the training runs with a noise level for every token, all tokens saw
    all, and the prediction at a clean position was never trained."""
    device = model_files.usable_device(device)
    path, config, state = time_agnostic.open_folder(folder, FIELDS, WHAT, ("num_attention_heads", "noise_type"))
    low, high = config.get("min_log_snr", -9.0), config.get("max_log_snr", 9.0)
    if not low < high:
        raise LimpetError(
            f"{path.parent / 'config.json'} has log-SNRs from {low} to {high}, and they rise: copy it again"
        )
    if not config["noise_type"] >= UNIFORM - low:
        raise LimpetError(
            f"{path.parent / 'config.json'} has noise_type {config['noise_type']}, so its noise is in part the mask "
            "token: limpet samples uniform noise alone, as gidd-unif's"
        )
    shape = read_shape(config, state, path)
    mask = config.get("mask_token_id", MASK)
    if mask >= shape.vocab_size:
        raise LimpetError(
            f"{path} has {shape.vocab_size} tokens, and {mask} is no mask: put mask_token_id in config.json"
        )
    network = time_agnostic.filled_network(lambda: GiddNetwork(shape), state, path, WHAT, device, precision)
    tokenizer, reason = model_files.find_tokenizer(path.parent, shape.vocab_size)
    return TimeAgnostic(
        network,
        schedule=clipped_snr(low, high),
        scale=float(config.get("head_scaling", 1.0)),
        mask=mask,
        clean_tokens="fixed",
        name=str(folder),
        tokenizer=tokenizer,
        precision=precision,
        info={"file": str(path), "weights": "as stored", "tokenizer": reason, "mask": mask},
    )


def read_shape(config: Mapping[str, Any], state: Mapping[str, Unread], path: Path) -> GiddShape:
    """The sizes that the tensors tell, and the numbers that only config.json does."""
    heads, length = config["num_attention_heads"], config.get("max_position_embeddings", 1024)
    vocab_size, width, hidden, blocks = time_agnostic.read_sizes(state, heads, path, WHAT)
    own = {name: config[field] for field, name in OWN_FIELDS.items() if field in config}
    parts = {"bias": "layers.0.mlp.up_proj.bias" in state, "sink": "layers.0.self_attn.k_bias" in state}
    return GiddShape(vocab_size, length, width, blocks, heads, hidden, **own, **parts)
