"""The Duo body on a GPU: matrix products, attention, and two Triton kernels for everything that stands between them.

It is `Network.body` with fewer trips to memory and no wait for a compiler. The residual sum, its gates, the norm and
the modulation are one pass over a position, and the sum is stored once a block; the rotation is done in place; one
product makes the modulations of all blocks. The last block mixes positions only through its keys and values, so its
queries and all that follows are done only at the positions that will be read.
Every intermediate outside matrix products and attention is float32."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from limpet.denoisers import Needed
    from limpet.denoisers.duo import Block, Linear, Network, Norm

ATTENTION = [  # the fastest that takes the shape and the precision
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip

REPLAYED = 2**14  # tokens in a batch up to which launching kernels one by one may cost more than running them
SMALL = 2**12  # tokens in a batch up to which it costs less to compute every position than to launch for a few
WIDTH = 768  # of the network that these were found with, the released one; a token of a wider one counts for more

Function = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
Gated = tuple[Tensor, Tensor]  # a gate (B, width), and the update it lets through, one row for each position


def replayed(function: Function, wider: float) -> Function:
    """A function of CUDA tensors, captured as a graph for each shape of small batches and then replayed.

    What a replay returns is written over by the next, and takes memory for ever."""
    captured: dict[torch.Size, Function] = {}

    def replay(tokens: Tensor, sigma: Tensor) -> tuple[Tensor, ...]:
        if not tokens.is_cuda or tokens.numel() * wider > REPLAYED:
            return function(tokens, sigma)
        if tokens.shape not in captured:
            graphed = torch.cuda.make_graphed_callables(function, (tokens.clone(), sigma.clone()))
            captured[tokens.shape] = cast(Function, graphed)
        return captured[tokens.shape](tokens, sigma)

    return replay


class FusedBody:
    """`Network.body` of one network, where its weights are now."""

    def __init__(self, network: Network) -> None:
        self.network, self.heads = network, network.shape.heads
        self.blocks = cast("list[Block]", list(network.blocks))
        modulations = [block.adaLN_modulation for block in self.blocks] + [network.output_layer.adaLN_modulation]
        self.weight = _joined(modulations, "weight")
        self.bias = _joined(modulations, "bias")
        width = network.shape.width
        self.to_queries, self.to_keys = self.blocks[-1].attn_qkv.weight.detach().split([width, 2 * width])
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.wider = max(1.0, width / WIDTH)
        self.trunk, self.whole = replayed(self._trunk, self.wider), replayed(self._whole, self.wider)

    def __call__(self, tokens: Tensor, sigma: Tensor, needed: Needed = lambda: None) -> Tensor:
        """(B, L) tokens, (B,) sigma -> (B, L, width) features in the head's precision, at the needed positions."""
        if tokens.is_cuda and tokens.numel() * self.wider <= SMALL:
            return self.whole(tokens, sigma)[0].clone()
        x, normed, keys, modulation = self.trunk(tokens, sigma)
        index = needed()
        if index is not None and not len(index):
            return torch.empty_like(normed)
        queries = self._queries(normed, index)
        del normed
        attended = self.blocks[-1].attn_out(_attended(queries, keys, self.heads, index))
        del queries, keys
        return self._features(x, attended, modulation, index)

    def _whole(self, tokens: Tensor, sigma: Tensor) -> tuple[Tensor]:
        x, normed, keys, modulation = self._trunk(tokens, sigma)
        attended = self.blocks[-1].attn_out(_attended(self._queries(normed, None), keys, self.heads))
        return (self._features(x, attended, modulation, None),)

    def _queries(self, normed: Tensor, index: Tensor | None) -> Tensor:
        """The last block's, rotated, at an index of flat positions or everywhere."""
        rows = normed.flatten(0, 1)
        queries = F.linear(rows if index is None else rows.index_select(0, index), self.to_queries)
        self._rotate(queries, normed.shape[1], index)
        return queries

    def _features(self, x: Tensor, attended: Tensor, modulation: Tensor, index: Tensor | None) -> Tensor:
        """What the last block does after its attention, and the last norm, at an index of flat positions or
        everywhere; `attended` has their rows."""
        gate_attn, shift_mlp, scale_mlp, gate_mlp, shift, scale = modulation[:, -6:].unbind(1)
        updates = [(gate_attn, attended)]
        updates.append((gate_mlp, _mlp(x, updates, self.blocks[-1], shift_mlp, scale_mlp, index)))
        features = torch.empty_like(x, dtype=modulation.dtype)
        norm = self.network.output_layer.norm_final
        return _normed(x, updates, norm, shift, scale, features, index, scatter=True)

    def _trunk(self, tokens: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Up to the last block's keys and values: the (B, L, width) residual stream and what its queries are made of,
        (B, L, 2 width) keys and values, (B, parts, width) modulations."""
        network, width = self.network, self.network.shape.width
        cond = network.sigma_map(sigma).to(self.weight.dtype)
        modulation = F.linear(cond, self.weight, self.bias).unflatten(-1, (-1, width))
        x = torch.empty(*tokens.shape, width, dtype=torch.float32, device=tokens.device)
        *parts, last, _ = modulation.split(6, 1)
        updates: list[Gated] = []
        for block, part in zip(self.blocks[:-1], parts, strict=True):
            self._update(x, updates, block, part, tokens)
        normed = self._opened(x, updates, self.blocks[-1], last, tokens)
        keys = F.linear(normed, self.to_keys)
        self._rotate(keys[..., :width], tokens.shape[1])
        return x, normed, keys, modulation

    def _opened(self, x: Tensor, updates: list[Gated], block: Block, modulation: Tensor, tokens: Tensor) -> Tensor:
        """A block's first norm, once the residual stream has taken in the updates of the block before, of which there
        are none before the first: it begins with the embedding."""
        embedded = None if updates else (self.network.vocab_embed.embedding, tokens)
        shift, scale = modulation[:, 0], modulation[:, 1]
        normed = torch.empty_like(x, dtype=modulation.dtype)
        _normed(x, updates, block.norm1, shift, scale, normed, embedded=embedded, store=True)
        updates.clear()
        return normed

    def _update(self, x: Tensor, updates: list[Gated], block: Block, modulation: Tensor, tokens: Tensor) -> None:
        """One block, from the updates of the one before to its own. What is no longer read is let go at once: of a
        large batch every one of these is large."""
        width = x.shape[-1]
        gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation[:, 2:].unbind(1)
        qkv = block.attn_qkv(self._opened(x, updates, block, modulation, tokens))
        self._rotate(qkv[..., : 2 * width], x.shape[1])
        updates.append((gate_attn, block.attn_out(_attended(qkv[..., :width], qkv[..., width:], self.heads))))
        del qkv
        updates.append((gate_mlp, _mlp(x, updates, block, shift_mlp, scale_mlp)))

    def _rotate(self, x: Tensor, length: int, index: Tensor | None = None) -> None:
        """Rotate every head in (..., heads x head width), in place; the rows are all positions, or an index of them."""
        if length not in self.tables:  # rounded as `duo.rotate` rounds them
            cos, sin = self.network.rotary_emb(length)
            self.tables[length] = cos.to(self.weight.dtype), sin.to(self.weight.dtype)
        cos, sin = self.tables[length]
        half = cos.shape[1]
        pairs = x.shape[-1] // 2
        _rotate_kernel[(x.shape[:-1].numel(),)](
            x, cos, sin, x if index is None else index, length, x.stride(-2), PAIRS=pairs, HALF=half,
            BLOCK=triton.next_power_of_2(pairs), GATHER=index is not None, num_warps=4,
        )  # fmt: skip


def _normed(
    x: Tensor, updates: list[Gated], norm: Norm, shift: Tensor, scale: Tensor, out: Tensor,
    index: Tensor | None = None, *, scatter: bool = False, store: bool = False,
    embedded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The modulated norm of x, or of an embedding of tokens, with at most two updates added, into `out`.

    The sum can be stored as x. With an index of flat positions, updates and `out` have one row for each of them; to
    scatter is to write each row of `out` at its position instead."""
    width = x.shape[-1]
    rows = x.shape[:-1].numel() if index is None else len(index)
    source, tokens = (x, x) if embedded is None else embedded
    (first_gate, first), (second_gate, second) = [*updates, (shift, x), (shift, x)][:2]
    _norm_kernel[(rows,)](
        source, tokens, first_gate, first, second_gate, second, norm.weight, shift, scale, x, out,
        x if index is None else index, x.shape[1], shift.stride(0), WIDTH=width, BLOCK=triton.next_power_of_2(width),
        EMBED=embedded is not None, UPDATES=len(updates), STORE=store, GATHER=index is not None, SCATTER=scatter,
        num_warps=2,
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(
    source, tokens, first_gate, first, second_gate, second, weight, shift, scale, x, out, index, length, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, EMBED: tl.constexpr, UPDATES: tl.constexpr, STORE: tl.constexpr,
    GATHER: tl.constexpr, SCATTER: tl.constexpr,
):  # fmt: skip
    """One position each; layer norm's own epsilon."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(index + row).to(tl.int64) if GATHER else row
    i = tl.arange(0, BLOCK)
    inside = i < WIDTH
    sample = (position // length) * stride + i
    origin = tl.load(tokens + position) if EMBED else position
    value = tl.load(source + origin * WIDTH + i, inside, other=0.0).to(tl.float32)
    if UPDATES > 0:
        gate = tl.load(first_gate + sample, inside, other=0.0).to(tl.float32)
        value += gate * tl.load(first + row * WIDTH + i, inside, other=0.0).to(tl.float32)
    if UPDATES > 1:
        gate = tl.load(second_gate + sample, inside, other=0.0).to(tl.float32)
        value += gate * tl.load(second + row * WIDTH + i, inside, other=0.0).to(tl.float32)
    if STORE:
        tl.store(x + position * WIDTH + i, value, inside)
    centred = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + 1e-5) * tl.load(weight + i, inside, other=0.0)
    scaled = normed * (1 + tl.load(scale + sample, inside, other=0.0).to(tl.float32))
    moved = scaled + tl.load(shift + sample, inside, other=0.0).to(tl.float32)
    target = (position if SCATTER else row) * WIDTH + i
    tl.store(out + target, moved.to(out.dtype.element_ty), inside)


@triton.jit
def _rotate_kernel(
    x, cos, sin, index, length, stride, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """One position each: every head's two halves rotated against each other."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(index + row).to(tl.int64) if GATHER else row
    pair = tl.arange(0, BLOCK)
    inside = pair < PAIRS
    first = row * stride + pair // HALF * (2 * HALF) + pair % HALF
    angle = (position % length) * HALF + pair % HALF
    c = tl.load(cos + angle, inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, inside, other=0.0).to(tl.float32)
    a = tl.load(x + first, inside, other=0.0).to(tl.float32)
    b = tl.load(x + first + HALF, inside, other=0.0).to(tl.float32)
    tl.store(x + first, (a * c - b * s).to(x.dtype.element_ty), inside)
    tl.store(x + first + HALF, (b * c + a * s).to(x.dtype.element_ty), inside)


def _attended(q: Tensor, kv: Tensor, heads: int, index: Tensor | None = None) -> Tensor:
    """Attention of rotated queries to (B, L, 2 width) keys and values. The queries are those of all positions, or of
    an index of them, in order; the result has their rows."""
    batch, length, _ = kv.shape
    k, v = kv.unflatten(-1, (2, heads, -1)).unbind(2)  # (B, L, heads, head width)
    if index is None:
        q, k, v = q.view(k.shape).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(ATTENTION, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    q, k, v = q.unflatten(-1, (heads, -1)), k.flatten(0, 1), v.flatten(0, 1)
    if _packs(q, k, v):
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        queries_before = torch.searchsorted(index, starts, out_int32=True)
        return cast(Tensor, varlen_attn(q, k, v, queries_before, starts, length, length)).flatten(1)
    every = torch.zeros_like(k)
    every[index.long()] = q
    return _attended(every, kv, heads).flatten(0, 1).index_select(0, index)


def _packs(*parts: Tensor) -> bool:
    """Whether flash attention takes these (rows, heads, head width) queries, keys and values."""
    q, k, v = (part[None].transpose(1, 2) for part in parts)
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, False))


def _mlp(
    x: Tensor, updates: list[Gated], block: Block, shift: Tensor, scale: Tensor, index: Tensor | None = None
) -> Tensor:
    """`Block.mlp` of the second norm, with the attention's update added; one row for each of the update's."""
    out = torch.empty_like(updates[0][1])
    hidden = _hidden(block, _normed(x, updates, block.norm2, shift, scale, out, index))
    del out
    return cast(Tensor, block.mlp[2](hidden))


def _hidden(block: Block, x: Tensor) -> Tensor:
    """The tanh form of GELU comes with the first product where the library has them in one kernel."""
    first = cast(nn.Linear, block.mlp[0])
    if not x.is_cuda:
        return cast(Tensor, block.mlp[1](first(x)))
    return torch._addmm_activation(first.bias, x.flatten(0, -2), first.weight.t(), use_gelu=True)


def _joined(maps: list[Linear], name: str) -> Tensor:
    """The weights or biases of several maps as one, of which each map keeps a view: they are held once."""
    parts: list[Tensor] = [getattr(one, name) for one in maps]
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view
    return whole
