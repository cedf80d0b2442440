"""gidd-unif (von Ruette et al., 3B and 10B): a transformer without time, whose prompts see no noise.

Its norms have gains above one, queries and keys are normed over the full width, attention logits are capped, every head
has a learned key and value that no position owns, and the branches of all layers together weigh as much as four."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from limpet.diffusion.process import clipped_snr
from limpet.errors import LimpetError
from limpet.models import model_files, time_agnostic
from limpet.models.duo import Linear, Rows, rotate
from limpet.models.tensor_files import Unread
from limpet.models.time_agnostic import COUNT, FALSE, NUMBER, RMSNorm, Rotation, Sizes, Timeless

WHAT = "a gidd-unif model"
MASK = 3  # the released tokenizer's <|mask|>, which its trainer gives no chance
UNIFORM = 20.0  # nats of log-odds: with more, less than one noise token in 10^8 is the mask
MOST_ODDS = 500.0  # nats, of which exp is still a number
ODDS: time_agnostic.Taken = (
    f"a number from {-MOST_ODDS:g} to {MOST_ODDS:g}",
    lambda value: type(value) in (int, float) and abs(value) <= MOST_ODDS,
)
TAKES: model_files.Takes = {
    "num_attention_heads": COUNT,
    "max_position_embeddings": COUNT,
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
    "min_log_snr": ODDS,
    "max_log_snr": ODDS,
    "mask_token_id": ("a token's id", lambda value: type(value) is int and value >= 0),
}  # fmt: skip


@dataclass(frozen=True)
class Shape(Sizes):
    """Every size of a network, and the numbers that its tensors cannot tell; the defaults are its own config's."""

    eps: float = 1e-6
    cap: float = 30.0  # of attention logits
    branches: float = 4.0  # what the branches of all layers weigh together
    scaling: float | str = "fan_in"  # of linear maps
    base: float = 10000.0  # of the rotation
    bias: bool = True  # whether the MLP has biases
    sink: bool = True  # whether heads have a key and a value of their own


class Scaled(Linear):
    """A linear map whose output is scaled before its bias comes in."""

    def __init__(self, inward: int, outward: int, scaling: float | str, bias: bool = False) -> None:
        super().__init__(inward, outward, bias=bias)
        known = {"fan_in": inward**-0.5, "fan_out": outward**-0.5}
        self.scale = known[scaling] if isinstance(scaling, str) else scaling

    def forward(self, input: Tensor) -> Tensor:
        y = input.to(self.weight.dtype) @ self.weight.T * self.scale
        return y if self.bias is None else y + self.bias


class Attention(nn.Module):
    """Every query to every key that is no noisier than itself."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.cap = shape.heads, shape.cap
        self.q_norm, self.k_norm = (RMSNorm(shape.width, shape.eps, centred=True) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            Scaled(shape.width, shape.width, shape.scaling) for _ in range(4)
        )
        if shape.sink:
            self.k_bias, self.v_bias = (
                nn.Parameter(torch.zeros(shape.heads, shape.width // shape.heads)) for _ in range(2)
            )

    def forward(self, x: Tensor, rotation: Rotation, clean: Tensor | None) -> Tensor:
        """(B, L, width) -> (B, L, width), before the map out of it. One sample at a time: scores are large."""
        v = self.v_proj(x)
        q, k = self.q_norm(self.q_proj(x)).to(v.dtype), self.k_norm(self.k_proj(x)).to(v.dtype)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))  # (B, heads, L, .)
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        mixed = [
            self._sample(q[i], k[i], v[i], None if clean is None else clean[i, :, None] & ~clean[i])
            for i in range(len(x))
        ]
        return torch.stack(mixed).transpose(1, 2).flatten(2)

    def _sample(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
        """(heads, L, .) each, and (L, L) where a query may not see a key -> (heads, L, .)."""
        if hasattr(self, "k_bias"):  # a key that all queries see, before the others and at no position
            k, v = (torch.cat([own.to(v.dtype)[:, None], x], 1) for own, x in ((self.k_bias, k), (self.v_bias, v)))
            hidden = None if hidden is None else nn.functional.pad(hidden, (1, 0))
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(1, 2)
        scores = self.cap * torch.tanh(scores / self.cap)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


class MLP(nn.Module):
    """Squared ReLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up_proj = Scaled(shape.width, shape.hidden, shape.scaling, shape.bias)
        self.down_proj = Scaled(shape.hidden, shape.width, shape.scaling, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down_proj(self.up_proj(x).relu() ** 2)
        return inner


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = shape.branches / shape.blocks
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.attn_layernorm, self.mlp_layernorm = (RMSNorm(shape.width, shape.eps, centred=True) for _ in range(2))

    def forward(self, x: Tensor, rotation: Rotation, clean: Tensor | None, at: Rows | None) -> Tensor:
        mixed = self.self_attn(self.attn_layernorm(x), rotation, clean)
        if at is not None:  # from here on nothing mixes positions
            x, mixed = x[at], mixed[at]
        x = x + self.weight * self.self_attn.o_proj(mixed)
        return cast(Tensor, x + self.weight * self.mlp(self.mlp_layernorm(x)))


class Network(time_agnostic.Network):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, lambda: Layer(shape), RMSNorm(shape.width, shape.eps, centred=True), shape.base)


def make(
    folder: Path | None = None, *, device: torch.device | str | None = None, precision: str = "float32"
) -> Timeless:
    """A gidd-unif model from a folder as it lies on the hub, in one file or in parts.

    Given tokens are told to it as clean, as prompts were in its training: they see each other and no noise. Labels are
    not: where every token had a noise level of its own, training let all see all, and what is predicted at a clean
    position was never trained."""
    place = model_files.usable_device(device)
    path, config, state = time_agnostic.open_folder(folder, TAKES, WHAT, ("num_attention_heads", "noise_type"))
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
    shape = shape_of(config, state, path)
    mask = config.get("mask_token_id", MASK)
    if mask >= shape.vocab_size:
        raise LimpetError(
            f"{path} has {shape.vocab_size} tokens, and {mask} is no mask: put mask_token_id in config.json"
        )
    network = time_agnostic.filled(lambda: Network(shape), state, path, WHAT, place, precision)
    tokenizer, reason = model_files.find_tokenizer(path.parent, shape.vocab_size)
    return Timeless(
        network,
        schedule=clipped_snr(low, high),
        scale=float(config.get("head_scaling", 1.0)),
        mask=mask,
        told_clean="given",
        name=str(folder),
        tokenizer=tokenizer,
        precision=precision,
        info={"file": str(path), "weights": "as stored", "tokenizer": reason, "mask": mask},
    )


def shape_of(config: Mapping[str, Any], state: Mapping[str, Unread], path: Path) -> Shape:
    heads = config["num_attention_heads"]
    vocab_size, width, hidden, blocks = time_agnostic.sizes_of(state, "mlp.up_proj.weight", heads, path, WHAT)
    named = {"rms_norm_eps": "eps", "attn_soft_cap": "cap", "resid_scale": "branches", "weight_scaling": "scaling",
             "rope_theta": "base"}  # fmt: skip
    told = {field: config[key] for key, field in named.items() if key in config}
    parts = {"bias": "layers.0.mlp.up_proj.bias" in state, "sink": "layers.0.self_attn.k_bias" in state}
    return Shape(vocab_size, config.get("max_position_embeddings", 1024), width, blocks, heads, hidden, **told, **parts)
