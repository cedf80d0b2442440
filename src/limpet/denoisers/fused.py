"""The Duo body on a GPU: matrix products, attention, and two Triton kernels for everything that stands between them.

It is `Network.body` with fewer trips to memory and no wait for a compiler. The residual sum, its gate, the norm and
the modulation are one pass over a position; the rotation is done in place; one product makes the modulations of all
blocks. After the last attention nothing mixes positions, so the rest is done only at those that will be read.
Every intermediate outside matrix products and attention is float32."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from limpet.fast import Replay

if TYPE_CHECKING:
    from limpet.denoisers import Needed
    from limpet.denoisers.duo import Block, Network, Norm

ATTENTION = [  # the fastest that takes the shape and the precision
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


class FusedBody:
    """`Network.body` of one network, where its weights are now."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.blocks = cast("list[Block]", list(network.blocks))
        modulations = [block.adaLN_modulation for block in self.blocks] + [network.output_layer.adaLN_modulation]
        self.weight = torch.cat([linear.weight.detach() for linear in modulations])
        self.bias = torch.cat([linear.bias.detach() for linear in modulations])
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.trunk = Replay(self._trunk)

    def __call__(self, tokens: Tensor, sigma: Tensor, needed: Needed = lambda: None) -> Tensor:
        """(B, L) tokens, (B,) sigma -> (B, L, width) features in the head's precision, at the needed positions."""
        x, attended, modulation = self.trunk(tokens, sigma)
        gate_attn, shift_mlp, scale_mlp, gate_mlp, shift, scale = modulation[:, -6:].unbind(1)
        block, norm = self.blocks[-1], self.network.output_layer.norm_final
        index = needed()
        features = torch.empty(x.shape, dtype=modulation.dtype, device=x.device)
        if index is not None and not len(index):
            return features
        rows = attended.flatten(0, 1) if index is None else attended.flatten(0, 1).index_select(0, index)
        update = block.attn_out(rows)
        normed = _normed(x, update, gate_attn, block.norm2, shift_mlp, scale_mlp, torch.empty_like(rows), index)
        return _normed(x, _mlp(block, normed), gate_mlp, norm, shift, scale, features, index, scatter=True)

    def _trunk(self, tokens: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All that mixes positions: (B, L, width) residual stream and last attention, (B, parts, width) modulation."""
        network, heads = self.network, self.network.shape.heads
        cond = network.sigma_map(sigma).to(self.weight.dtype)
        modulation = F.linear(cond, self.weight, self.bias).unflatten(-1, (-1, network.shape.width))
        cos, sin = self._rotary(tokens.shape[1])
        x = network.vocab_embed(tokens)
        normed = torch.empty(x.shape, dtype=modulation.dtype, device=x.device)
        update = gate = None
        for block, part in zip(self.blocks, modulation.split(6, 1), strict=False):
            shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = part.unbind(1)
            qkv = block.attn_qkv(_normed(x, update, gate, block.norm1, shift_attn, scale_attn, normed))
            attended = _attended(qkv, heads, cos, sin)
            if block is self.blocks[-1]:
                break
            _normed(x, block.attn_out(attended), gate_attn, block.norm2, shift_mlp, scale_mlp, normed)
            update, gate = _mlp(block, normed), gate_mlp
        return x, attended, modulation

    def _rotary(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines, rounded as `duo._rotate` rounds them."""
        if length not in self.tables:
            cos, sin = self.network.rotary_emb(length)
            self.tables[length] = cos.to(self.weight.dtype), sin.to(self.weight.dtype)
        return self.tables[length]


def _normed(
    x: Tensor, update: Tensor | None, gate: Tensor | None, norm: Norm, shift: Tensor, scale: Tensor, out: Tensor,
    index: Tensor | None = None, scatter: bool = False,
) -> Tensor:  # fmt: skip
    """Add the gated update to x, in place; the modulated norm of the sum, into `out`.

    With an index of flat positions, `update` and `out` have one row for each of them; to scatter is to write each row
    of `out` at its position instead."""
    width = x.shape[-1]
    rows = x.shape[:-1].numel() if index is None else len(index)
    _norm_kernel[(rows,)](
        x, x if update is None else update, shift if gate is None else gate, norm.weight, shift, scale, out,
        x if index is None else index, x.shape[1], shift.stride(0), WIDTH=width, BLOCK=triton.next_power_of_2(width),
        UPDATE=update is not None, GATHER=index is not None, SCATTER=scatter, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(
    x, update, gate, weight, shift, scale, out, index, length, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    UPDATE: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """One position each; layer norm's own epsilon."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(index + row).to(tl.int64) if GATHER else row
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    sample = (position // length) * stride + i
    value = tl.load(x + position * WIDTH + i, inside, other=0.0)
    if UPDATE:
        gated = tl.load(gate + sample, inside, other=0.0).to(tl.float32)
        value += gated * tl.load(update + row * WIDTH + i, inside, other=0.0).to(tl.float32)
        tl.store(x + position * WIDTH + i, value, inside)
    centred = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + 1e-5) * tl.load(weight + i, inside, other=0.0)
    scaled = normed * (1 + tl.load(scale + sample, inside, other=0.0).to(tl.float32))
    moved = scaled + tl.load(shift + sample, inside, other=0.0).to(tl.float32)
    target = (position if SCATTER else row) * WIDTH + i
    tl.store(out + target, moved.to(out.dtype.element_ty), inside)


def _attended(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """`duo.attend`; queries and keys are rotated where they lie."""
    batch, length, _ = qkv.shape
    half = cos.shape[1]
    _rotate_kernel[(batch * length,)](
        qkv, cos, sin, length, PAIRS=2 * heads * half, HALF=half, BLOCK=triton.next_power_of_2(2 * heads * half),
        num_warps=4,
    )  # fmt: skip
    q, k, v = qkv.view(batch, length, 3, heads, 2 * half).permute(2, 0, 3, 1, 4).unbind(0)  # (B, heads, L, 2 half)
    with sdpa_kernel(ATTENTION, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@triton.jit
def _rotate_kernel(qkv, cos, sin, length, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """One position each: the queries of all heads, then the keys, each head's two halves rotated against each other."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    first = row * (3 * PAIRS) + pair // HALF * (2 * HALF) + pair % HALF
    angle = (row % length) * HALF + pair % HALF
    c = tl.load(cos + angle, inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, inside, other=0.0).to(tl.float32)
    a = tl.load(qkv + first, inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + first + HALF, inside, other=0.0).to(tl.float32)
    tl.store(qkv + first, (a * c - b * s).to(qkv.dtype.element_ty), inside)
    tl.store(qkv + first + HALF, (b * c + a * s).to(qkv.dtype.element_ty), inside)


def _mlp(block: Block, x: Tensor) -> Tensor:
    """`Block.mlp`; the tanh form of GELU comes with the first product where the library has them in one kernel."""
    first, last = cast(nn.Linear, block.mlp[0]), cast(nn.Linear, block.mlp[2])
    if not x.is_cuda:
        return cast(Tensor, block.mlp(x))
    hidden: Tensor = torch._addmm_activation(first.bias, x.flatten(0, -2), first.weight.t(), use_gelu=True)
    return cast(Tensor, last(hidden)).view(x.shape)
