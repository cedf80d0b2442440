"""What the networks here share: layers, rotation, attention, precision, and a denoiser that runs a network."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.errors import LimpetError
from limpet.models.denoiser import Denoiser
from limpet.models.float8 import Float8Linear
from limpet.models.private_apis import cpu_linear_gelu
from limpet.models.tensor_files import digest_of
from limpet.models.tokenizers import HuggingFaceTokenizer

Precision = Literal["float32", "bfloat16", "float8"]
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8": torch.bfloat16}  # of weights in memory
SCORES = 2**19  # of attention, at once
ALIGNMENT = 64  # columns of logits: whole tiles for the matrix units, and rows that start at aligned addresses
ROWS = 16  # of a matrix product, or a multiple; with fewer, libraries for CPUs choose kernels that round differently
# Sizes far beyond any model of these kinds: a file that claims more is refused before anything is allocated.
MAX_WIDTH = 1 << 20  # features
MAX_LENGTH = 1 << 24  # tokens of a sample, or of a vocabulary
MAX_BLOCKS = 512

Positions = tuple[Tensor, Tensor]  # some positions of a batch: (R,) samples, and (R,) places in them
Rotation = tuple[Tensor, Tensor]  # (L, head width / 2) each: cosines and sines


# Layers


class Norm(nn.Module):
    """Layer norm in float32 with a gain and no bias, whatever the precision around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight)


class Linear(nn.Linear):
    """A linear map in its own weight's precision. Here float32 features become bfloat16."""

    def forward(self, input: Tensor) -> Tensor:
        return product(input, self.weight, self.bias)

    def with_gelu(self, input: Tensor) -> Tensor:
        """The tanh form of GELU of the outputs. Here bfloat16 products are rounded after it alone."""
        x = input.to(self.weight.dtype)
        if x.dtype != torch.bfloat16 or x.device.type != "cpu":
            return F.gelu(self(x), approximate="tanh")
        return product(x, self.weight, self.bias, cpu_linear_gelu)

    def part(self, x: Tensor, outputs: slice) -> Tensor:
        """Some of the outputs."""
        return product(x, self.weight[outputs], None if self.bias is None else self.bias[outputs])


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, kernel: Callable[..., Tensor] = F.linear) -> Tensor:
    """(..., in) features by a weight (out, in), in the weight's precision: (..., out).

    On a CPU the rows are padded, because libraries add in another order where there are few of them. So a row does
    not depend on how many others there are."""
    x = x.to(weight.dtype)
    if x.device.type != "cpu":
        return kernel(x, weight, bias)
    rows = x.flatten(0, -2)
    return kernel(pad_rows(rows), weight, bias)[: len(rows)].view(*x.shape[:-1], len(weight))


def pad_rows(x: Tensor) -> Tensor:
    """(R, ...) with zeros after it, up to a whole number of `ROWS`. In bfloat16 a CPU keeps a kernel in memory for
    every number of rows, so that there should be few: from 64 on four to every doubling."""
    step = ROWS if x.dtype != torch.bfloat16 else max(ROWS, (1 << max(len(x) - 1, 0).bit_length()) // 8)
    missing = -len(x) % step
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


class Rotary(nn.Module):
    """Rotation of queries and keys by position, in halves."""

    inv_freq: Tensor

    def __init__(self, head_width: int, base: float = 10000) -> None:
        super().__init__()
        half = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu")
        frequencies, device = 1.0 / base ** (half / head_width), torch.get_default_device()  # rounded as released
        # The frequencies are no weights: a network that is laid out without memory has them too.
        self.register_buffer("inv_freq", frequencies if device.type == "meta" else frequencies.to(device))

    def forward(self, length: int) -> Rotation:
        position = torch.arange(length, dtype=torch.float32, device=self.inv_freq.device)
        angle = position[:, None] * self.inv_freq
        return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first half of the last axis against the second."""
    a, b = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(
    qkv: Tensor, heads: int, rotation: Rotation, causal: bool = False, keep: list[Tensor] | None = None
) -> Tensor:
    """(B, L, 3 width) queries, keys and values of all heads, side by side -> (B, L, width).

    keep: where keys and values are appended, see `kept_layer`."""
    q, k, v = qkv.reshape(*qkv.shape[:2], 3, heads, -1).transpose(1, 3).unbind(2)  # (B, heads, L, head width)
    q, k = rotate(q, *rotation), rotate(k, *rotation)
    if keep is not None:
        keep.append(kept_layer(k, v))
        if multiplies_faster(q, k):
            return torch.stack(list(map(attend_by_products, q, k, v))).transpose(1, 2).flatten(2)
    return attention(q, k, v, causal).flatten(2)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """(B, heads, Q, .) queries, and (B, heads or fewer, L, .) keys and values -> (B, Q, heads, .).

    Queries are padded as rows of a `product` are, with `causal` not."""
    size = q.shape[2]
    if q.device.type == "cpu" and not causal and size % ROWS:
        q = F.pad(q, (0, 0, 0, -size % ROWS))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])
    return mixed.transpose(1, 2)[:, :size]


def attend_at(
    x: Tensor,
    qkv: Linear | Float8Linear,
    heads: int,
    rotation: Rotation,
    positions: Positions,
    keep: list[Tensor] | None = None,
) -> Tensor:
    """(B, L, width) -> (R, width): `attend` from some positions to all. No other queries are computed."""
    (samples, places), (batch, length, width) = positions, x.shape
    k, v = qkv.part(x, slice(width, None)).reshape(batch, length, 2, heads, -1).transpose(1, 3).unbind(2)
    k, (cos, sin) = rotate(k, *rotation), (part[places, None] for part in rotation)
    if keep is not None:
        keep.append(kept_layer(k, v))
    q = rotate(qkv.part(x[positions], slice(width)).reshape(-1, heads, width // heads), cos, sin)
    return (attend_packed if keep is None else attend_beside_cache)(q, k, v, samples)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, samples: Tensor) -> Tensor:
    """(R, heads, .) queries of some positions, each of one of (R,) samples, and (B, heads, L, .) keys and values of all
    -> (R, width).

    Samples may have different numbers of queries. Each is padded to as many as the one that has most."""
    counts = samples.bincount(minlength=len(k))
    slots = torch.arange(len(samples), device=q.device) - (counts.cumsum(0) - counts)[samples]
    padded = q.new_zeros(len(k), max(1, int(counts.max())), *q.shape[1:])
    padded[samples, slots] = q
    return attention(padded.transpose(1, 2), k, v)[samples, slots].flatten(1)


def attend_beside_cache(q: Tensor, k: Tensor, v: Tensor, samples: Tensor) -> Tensor:
    """`attend_packed`, for calls that are approximate anyway: faster ones take one sample after another, unpadded."""
    if not multiplies_faster(q, k):
        return attend_packed(q, k, v, samples)
    parts = zip(torch.split(q, samples.bincount(minlength=len(k)).tolist()), k, v, strict=True)
    mixed = [attend_by_products(some.transpose(0, 1), keys, values) for some, keys, values in parts]
    return torch.cat(mixed, 1).transpose(0, 1).flatten(1)


def multiplies_faster(q: Tensor, k: Tensor) -> bool:
    """Whether `attend_by_products` is faster: CPUs are slow at attention in bfloat16. Heads are the second axis."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.shape[1] == k.shape[1]


def attend_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(heads, R, .) queries, (heads, L, .) keys and values -> (heads, R, .), with scores in float32.

    Queries are taken in pieces, so that their scores stay in the processor's cache."""
    keys, few = k.float().transpose(1, 2), max(1, SCORES // (len(k) * k.shape[1]))
    scaled = q.float() * q.shape[-1] ** -0.5
    return torch.cat([(some @ keys).softmax(-1).to(v.dtype) @ v for some in scaled.split(few, 1)], 1)


def kept_layer(k: Tensor, v: Tensor) -> Tensor:
    """(B, heads, L, .) each -> (B, L, 2, heads, .): a layer of a cache, in which a position's numbers are together."""
    return torch.stack([k, v], 2).transpose(1, 3).contiguous()


def attend_kept(
    qkv: Tensor, kept: Tensor, heads: int, rotation: Rotation, positions: Positions, read: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(R, 3 width) queries, keys and values of some positions -> (R, width), and a layer of a cache.

    The layer has these keys and values in place of those in `kept`. The queries attend to all of it. read: which of
    the queries do (default: all)."""
    q, k, v = qkv.reshape(len(qkv), 3, heads, qkv.shape[1] // (3 * heads)).unbind(1)
    q, kept = renewed(q, k, v, kept, rotation, positions)
    q, samples = (q, positions[0]) if read is None else (q[read], positions[0][read])
    return attend_beside_cache(q, *keys_and_values(kept), samples), kept


def renewed(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, rotation: Rotation, positions: Positions
) -> tuple[Tensor, Tensor]:
    """(R, heads, .) queries, keys and values of some positions -> the queries, rotated, and a layer of a cache with
    these keys, rotated, and values in place of those in `kept`."""
    cos, sin = (part[positions[1], None] for part in rotation)
    return rotate(q, cos, sin), kept.index_put(positions, torch.stack([rotate(k, cos, sin), v], 1))


def keys_and_values(kept: Tensor) -> tuple[Tensor, Tensor]:
    """(B, heads, L, .) each, of a layer of a cache."""
    k, v = kept.transpose(1, 3).unbind(2)
    return k, v


class TransformerBlock(nn.Module):
    """The layers of a Duo block and of the built-in judge's: attention and MLP, each with a norm before it."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Norm(width)
        self.attn_qkv: Linear | Float8Linear = Linear(width, 3 * width, bias=False)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = Norm(width)
        self.mlp = nn.Sequential(Linear(width, hidden), nn.GELU(approximate="tanh"), Linear(hidden, width))

    def mlp_beside_cache(self, x: Tensor) -> Tensor:
        """The MLP where predictions are approximate anyway: on a CPU, GELU costs as much as a product."""
        first, _, last = self.mlp
        return cast(Tensor, last(first.with_gelu(x)) if isinstance(first, Linear) else self.mlp(x))


# Positions that will be read


def positions_of(index: Tensor | None, tokens: Tensor) -> Positions | None:
    """Flat positions of a batch as samples and places; None for all."""
    length = tokens.shape[1]
    return None if index is None else (index.long() // length, index.long() % length)


def in_place(features: Tensor, positions: Positions | None, tokens: Tensor) -> Tensor:
    """(B, L, D): the features of some positions, written where they belong. The others may hold anything."""
    if positions is None:
        return features
    placed = features.new_empty(*tokens.shape, features.shape[-1])
    placed[positions] = features
    return placed


# Precision


def dtype_of(precision: str, known: tuple[str, ...] = ("float32", "bfloat16")) -> torch.dtype:
    """The type of the linear maps of a network that can run in the `known` precisions."""
    if precision not in known:
        raise LimpetError(f"precision is one of {', '.join(known)}, not {precision!r}")
    return PRECISIONS[precision]


def set_precision(network: nn.Module, dtype: torch.dtype, kinds: tuple[type[nn.Module], ...] = (Linear,)) -> None:
    """Store the linear maps of a network, or modules of other kinds, in `dtype`. All else stays as it is."""
    for module in network.modules():
        if isinstance(module, kinds):
            module.to(dtype)


class AlignedHead:
    """A linear head over a padded vocabulary, whose result is a view of the real one.

    Matrix kernels write rows of 50304 logits faster than rows of 50258, which start anywhere. Only the padded weight
    is in memory: the linear map keeps a view of it."""

    def __init__(self, linear: nn.Linear) -> None:
        self.vocab_size = linear.out_features
        padding = -linear.out_features % ALIGNMENT
        self.weight, self.bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        if padding:
            with torch.inference_mode(False), torch.no_grad():
                self.weight = F.pad(self.weight, (0, 0, 0, padding))
                self.bias = None if self.bias is None else F.pad(self.bias, (0, padding))
                linear.weight.data = self.weight[: self.vocab_size]

    def __call__(self, features: Tensor) -> Tensor:
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias)[..., : self.vocab_size]


# Sizes of a network whose tensors have not been read


def sizes_in(
    state: Mapping[str, Any], anchors: tuple[str, ...], prefix: str, path: Path, what: str
) -> tuple[int, list[tuple[int, int]]]:
    """The number of blocks, which are named `prefix` and a number, and the shapes of the `anchors`, all matrices."""
    sizes = [tuple(state[name].shape) if name in state else () for name in anchors]
    if any(len(size) != 2 or min(size) < 1 for size in sizes):
        raise LimpetError(f"{path} does not hold {what}: it lacks the matrices {', '.join(anchors)}")
    blocks = len({name.split(".")[1] for name in state if name.startswith(prefix)})
    if blocks > MAX_BLOCKS:
        raise LimpetError(f"{path} does not hold {what}: it names {blocks} blocks, and {MAX_BLOCKS} is the most")
    widest = max(sizes[0][1], *(size[0] for size in sizes[1:]))
    if widest > MAX_WIDTH:
        raise LimpetError(f"{path} does not hold {what}: it is {widest} wide")
    return blocks, sizes


def check_heads(width: int, heads: int, path: Path) -> None:
    """Raise unless so many heads share the width evenly, each in two halves."""
    if width % heads or width // heads % 2:
        raise LimpetError(f"{path} has width {width}, which {heads} heads do not share evenly: check its config.json")


# A network as a denoiser

Parts = tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]  # a network's backbone and its head


class NetworkDenoiser(Denoiser):
    """A denoiser that runs a network, on the device where its parameters are.

    The head's output is multiplied by `scale`. `mask` is a token that noise may be but no clean text has: its
    probability was zero in training, and is zero here."""

    tokenizer: HuggingFaceTokenizer | None
    scale: float = 1.0
    mask: int | None = None

    def __init__(
        self,
        network: Any,
        *,
        name: str,
        tokenizer: HuggingFaceTokenizer | None,
        precision: str,
        info: Mapping[str, Any] | None,
        facts: Mapping[str, object],
    ) -> None:
        """`facts` are what decides the output and the tensors cannot tell; they go into the digest."""
        self.network, self.name, self.tokenizer, self.precision = network, name, tokenizer, precision
        self.vocab_size, self.length = network.shape.vocab_size, network.shape.length
        sizes = [parameter.numel() for parameter in network.parameters()]
        self.info = {**(info or {}), "parameters": sum(sizes), "tensors": len(sizes), "shape": asdict(network.shape)}
        self.digest = digest_of(dict(network.named_parameters()), facts)
        self._parts: dict[torch.device, Parts] = {}

    @property
    def weights_digest(self) -> str:
        """A digest of the weights as bfloat16 holds them: the same in whatever precision they were loaded."""
        return digest_of({name: one.bfloat16() for name, one in self.network.named_parameters()})

    @property
    def device(self) -> torch.device:
        return cast(torch.device, next(self.network.parameters()).device)

    @device.setter
    def device(self, device: torch.device | str) -> None:
        self.network.to(device)
        self._parts.clear()  # they hold weights on the other device

    def head(self, features: Tensor) -> Tensor:
        with torch.no_grad():
            logits = self._parts_on(features.device)[1](features)
            if self.scale != 1:
                logits = logits * self.scale
            if self.mask is not None:
                logits[..., self.mask] = -math.inf
            return logits

    def _parts_on(self, device: torch.device) -> Parts:
        """Backbone and head as they run on a device, created when they are first needed there."""
        if device not in self._parts:
            self._parts[device] = self.make_parts(device)
        return self._parts[device]

    @abstractmethod
    def make_parts(self, device: torch.device) -> Parts:
        """Backbone and head for a device, which may compute the same faster there."""
