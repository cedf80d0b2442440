"""The Duo backbone on a GPU: matrix products, attention, and Triton kernels for everything between them.

It computes what `DuoNetwork.backbone` does with fewer passes over memory and no wait for a compiler. One pass over a
position adds the residual updates with their gates, norms and modulates the sum, and rounds it where the next product
is in float8. The sum is stored once a block. Rotation is done in place, or in float8 by the product itself, as GELU is.
One product computes the modulations of all blocks. The last block mixes positions only through its keys and values, so
its queries and all that follows are computed only at the positions that will be read. Every intermediate outside matrix
products and attention is float32."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from limpet.models import Cache, Rows, all_rows, float8, float8_kernels
from limpet.models.float8 import Float8Rows
from limpet.models.float8_kernels import gelu_of
from limpet.models.private_apis import linear_gelu

if TYPE_CHECKING:
    from limpet.models.duo import DuoBlock, DuoNetwork
    from limpet.models.networks import Linear, Norm

ATTENTION = [  # the first that supports the shape and the precision is used, and is the fastest
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
MAX_GRAPH = 2**14  # tokens in a batch; with more, launching kernels one by one costs no more than running them
MAX_WHOLE = 2**12  # tokens in a batch; with fewer, computing every position costs less than launching for a few
WIDTH = 768  # the released network's, with which these limits were measured; a token of a wider one counts for more
# Positions that one program norms, which share their sample's modulation, and the warps of each kernel. Of those that
# benchmarks/body.py tries, these take the least time on an H200, over both precisions.
ROWS, WARPS = 1, 2

Normed = Tensor | Float8Rows  # what a product takes, in its precision
Function = Callable[[Tensor, Tensor], tuple[Any, ...]]
Gated = tuple[Tensor, Tensor]  # a gate (B, width) and the update it multiplies, one row for each position


def replayed(function: Function, wider: float) -> Function:
    """A function of CUDA tensors, captured as a CUDA graph for each shape of small batches and then replayed.

    The next replay overwrites what one returns. Each graph keeps its memory."""
    captured: dict[torch.Size, Function] = {}

    def replay(tokens: Tensor, sigma: Tensor) -> tuple[Any, ...]:
        if not tokens.is_cuda or tokens.numel() * wider > MAX_GRAPH:
            return function(tokens, sigma)
        if tokens.shape not in captured:
            with _no_garbage_collection():
                graphed = torch.cuda.make_graphed_callables(function, (tokens.clone(), sigma.clone()))
            captured[tokens.shape] = cast(Function, graphed)
        return captured[tokens.shape](tokens, sigma)

    return replay


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect no garbage. If a graph of a deleted model is freed while another is captured, the device gives up the
    capture, and the next kernel is reported as failed."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class FusedBackbone:
    """The backbone of one network, on the device where its weights are."""

    def __init__(self, network: DuoNetwork) -> None:
        self.network, self.heads = network, network.shape.heads
        self.blocks = cast("list[DuoBlock]", list(network.blocks))
        modulations = [block.adaLN_modulation for block in self.blocks] + [network.output_layer.adaLN_modulation]
        self.weight = _joined(modulations, "weight")
        self.bias = _joined(modulations, "bias")
        self.float8 = isinstance(self.blocks[-1].attn_qkv, float8.Float8Linear)
        self.joined = self.float8 and float8_kernels.suit(network.shape, self.weight.device)
        self.tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.wider = max(1.0, network.shape.width / WIDTH)
        self.trunk, self.whole = replayed(self._trunk, self.wider), replayed(self._whole, self.wider)

    def __call__(self, tokens: Tensor, sigma: Tensor, rows: Rows = all_rows, cache: Cache | None = None) -> Tensor:
        """(B, L) tokens, (B,) sigma -> (B, L, width) features in the head's precision, at the positions to be read."""
        sigma = sigma.expand(len(tokens))
        if cache is not None and cache.compute is not None:
            return self._cached(tokens, sigma, cache, cache.compute.int())
        if cache is None and tokens.is_cuda and tokens.numel() * self.wider <= MAX_WHOLE:
            return self.whole(tokens, sigma)[0].clone()
        parts = self.trunk(tokens, sigma) if cache is None else self._trunk(tokens, sigma, cache.after)
        x, normed, keys, modulation = parts
        del parts
        index = rows()
        if index is not None and not len(index):
            return torch.empty_like(x, dtype=modulation.dtype)
        queries = self._queries(normed, x.shape[1], index)
        del normed
        attended = self.blocks[-1].attn_out(_attended(queries, keys, self.heads, index))
        del queries, keys
        return self._features(x, attended, modulation, index)

    def _whole(self, tokens: Tensor, sigma: Tensor) -> tuple[Tensor]:
        x, normed, keys, modulation = self._trunk(tokens, sigma)
        queries = self._queries(normed, x.shape[1], None)
        attended = self.blocks[-1].attn_out(_attended(queries, keys, self.heads))
        return (self._features(x, attended, modulation, None),)

    def _cached(self, tokens: Tensor, sigma: Tensor, cache: Cache, index: Tensor) -> Tensor:
        """The features at an index of flat positions, beside the kept keys and values of all others."""
        width, features = self.network.shape.width, torch.empty(0)
        x, modulation = self._start(tokens, sigma)
        updates: list[Gated] = []
        for number, (block, kept) in enumerate(zip(self.blocks, cache.before, strict=True)):
            shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = modulation[:, 6 * number : 6 * number + 6].unbind(1)
            embedded = None if updates else (self.network.vocab_embed.embedding, tokens)
            room = self._empty_rows(x.new_empty(len(index), width))
            normed = _normed(x, updates, block.norm1, shift, scale, room, index, store=True, embedded=embedded)
            qkv = cast(Tensor, block.attn_qkv(normed))
            self._rotate(qkv[:, : 2 * width], x.shape[1], index)
            renewed = kept.flatten(0, 1).flatten(1).index_copy(0, index.long(), qkv[:, width:])
            cache.after.append(renewed.view_as(kept))
            keys = renewed.view(*tokens.shape, -1)
            attended = cast(Tensor, block.attn_out(_attended(qkv[:, :width], keys, self.heads, index)))
            if number == len(self.blocks) - 1:
                features = self._features(x, attended, modulation, index)
            updates = [(gate, attended)]
            if number < len(self.blocks) - 1:
                updates.append((gate_mlp, self._mlp(x, updates, block, shift_mlp, scale_mlp, index)))
        return features

    def _start(self, tokens: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the (B, L, width) residual stream, and the (B, parts, width) modulations."""
        width = self.network.shape.width
        cond = self.network.sigma_map(sigma).to(self.weight.dtype)
        x = torch.empty(*tokens.shape, width, dtype=torch.float32, device=tokens.device)
        return x, F.linear(cond, self.weight, self.bias).unflatten(-1, (-1, width))

    def _keep(self, keep: list[Tensor] | None, keys: Tensor) -> None:
        """Append rotated keys and values (B, L, 2 width) as a layer of a cache, if there is one."""
        if keep is not None:
            keep.append(keys.unflatten(-1, (2, self.heads, -1)).clone(memory_format=torch.contiguous_format))

    def _queries(self, normed: Normed, length: int, index: Tensor | None) -> Tensor:
        """The last block's queries, rotated, at an index of flat positions or at all."""
        queries = _part(self.blocks[-1], _rows(normed, index), slice(self.network.shape.width))
        self._rotate(queries, length, index)
        return queries

    def _features(self, x: Tensor, attended: Tensor, modulation: Tensor, index: Tensor | None) -> Tensor:
        """The last block after its attention, and the last norm, at an index of flat positions or at all.

        `attended` has one row for each of them."""
        gate_attn, shift_mlp, scale_mlp, gate_mlp, shift, scale = modulation[:, -6:].unbind(1)
        updates = [(gate_attn, attended)]
        updates.append((gate_mlp, self._mlp(x, updates, self.blocks[-1], shift_mlp, scale_mlp, index)))
        features = torch.empty_like(x, dtype=modulation.dtype)
        _normed(x, updates, self.network.output_layer.norm_final, shift, scale, features, index, scatter=True)
        return features

    def _trunk(
        self, tokens: Tensor, sigma: Tensor, keep: list[Tensor] | None = None
    ) -> tuple[Tensor, Normed, Tensor, Tensor]:
        """Up to the last block's keys and values. keep: where those of all blocks are appended for the next call.

        Returns the (B, L, width) residual stream, the normed rows that queries are computed from, (B, L, 2 width) keys
        and values, and (B, parts, width) modulations."""
        width = self.network.shape.width
        x, modulation = self._start(tokens, sigma)
        *parts, last, _ = modulation.split(6, 1)
        updates: list[Gated] = []
        for block, part in zip(self.blocks[:-1], parts, strict=True):
            self._update(x, updates, block, part, tokens, keep)
        normed = self._first_norm(x, updates, self.blocks[-1], last, tokens)
        keys = _part(self.blocks[-1], normed, slice(width, None))
        self._rotate(keys[..., :width], tokens.shape[1])
        self._keep(keep, keys)
        return x, normed, keys, modulation

    def _first_norm(
        self, x: Tensor, updates: list[Gated], block: DuoBlock, modulation: Tensor, tokens: Tensor
    ) -> Normed:
        """A block's first norm, after the updates of the block before are added to the residual stream.

        The first block has no updates before it: it starts from the embedding."""
        embedded = None if updates else (self.network.vocab_embed.embedding, tokens)
        shift, scale = modulation[:, 0], modulation[:, 1]
        normed = _normed(x, updates, block.norm1, shift, scale, self._empty_rows(x), embedded=embedded, store=True)
        updates.clear()
        return normed

    def _update(
        self,
        x: Tensor,
        updates: list[Gated],
        block: DuoBlock,
        modulation: Tensor,
        tokens: Tensor,
        keep: list[Tensor] | None,
    ) -> None:
        """One block: adds the updates of the block before and replaces them with its own.

        Tensors that are no longer read are freed at once, because each is large in a large batch."""
        width = x.shape[-1]
        gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation[:, 2:].unbind(1)
        qkv = self._qkv(block, self._first_norm(x, updates, block, modulation, tokens))
        self._keep(keep, qkv[..., width:])
        updates.append((gate_attn, block.attn_out(_attended(qkv[..., :width], qkv[..., width:], self.heads))))
        del qkv
        updates.append((gate_mlp, self._mlp(x, updates, block, shift_mlp, scale_mlp)))

    def _qkv(self, block: DuoBlock, normed: Normed) -> Tensor:
        """(B, L, 3 width) queries and keys, rotated, and values."""
        if self.joined:
            rows, product = cast(Float8Rows, _rows(normed, None)), cast(float8.Float8Linear, block.attn_qkv)
            batch, length, _ = cast(Float8Rows, normed).values.shape
            return float8_kernels.rotated(rows, product, *self._angles(length)).view(batch, length, -1)
        qkv = cast(Tensor, block.attn_qkv(normed))
        self._rotate(qkv[..., : qkv.shape[-1] // 3 * 2], qkv.shape[1])
        return qkv

    def _mlp(
        self,
        x: Tensor,
        updates: list[Gated],
        block: DuoBlock,
        shift: Tensor,
        scale: Tensor,
        index: Tensor | None = None,
    ) -> Tensor:
        """`DuoBlock.mlp` of the second norm, with the attention's update added. One row for each of the update's."""
        room = self._empty_rows(updates[0][1])
        # The normed rows have no name, so that they are freed before the second product takes memory.
        hidden = self._hidden(block, _normed(x, updates, block.norm2, shift, scale, room, index))
        del room
        return cast(Tensor, block.mlp[2](hidden))

    def _hidden(self, block: DuoBlock, normed: Normed) -> Normed:
        """The hidden layer of an MLP: its first product and the tanh form of GELU, in one kernel where there is one."""
        first = cast(nn.Linear, block.mlp[0])
        if isinstance(normed, Float8Rows):
            rows = Float8Rows(*(part.flatten(0, -2) for part in normed))
            if self.joined:
                return float8_kernels.activated(rows, cast(float8.Float8Linear, block.mlp[0]))
            return _gelu(first(rows))
        if not normed.is_cuda:
            return cast(Tensor, block.mlp[1](first(normed)))
        return linear_gelu(normed.flatten(0, -2), first.weight, first.bias)

    def _empty_rows(self, like: Tensor) -> Normed:
        """Memory for normed rows of this shape."""
        if not self.float8:
            return torch.empty_like(like, dtype=self.weight.dtype)
        scales = torch.empty(*like.shape[:-1], 1, dtype=torch.float32, device=like.device)
        return Float8Rows(torch.empty_like(like, dtype=float8.DTYPE), scales)

    def _angles(self, length: int) -> tuple[Tensor, Tensor]:
        """(L, half a head's width) cosines and sines, rounded as `networks.rotate` rounds them."""
        if length not in self.tables:
            cos, sin = self.network.rotary_emb(length)
            self.tables[length] = cos.to(self.weight.dtype), sin.to(self.weight.dtype)
        return self.tables[length]

    def _rotate(self, x: Tensor, length: int, index: Tensor | None = None) -> None:
        """Rotate every head in (..., heads x head width), in place. The rows are all positions, or an index of them."""
        cos, sin = self._angles(length)
        half = cos.shape[1]
        pairs = x.shape[-1] // 2
        _rotate_kernel[(x.shape[:-1].numel(),)](
            x, cos, sin, x if index is None else index, length, x.stride(-2), PAIRS=pairs, HALF=half,
            BLOCK=triton.next_power_of_2(pairs), GATHER=index is not None, num_warps=WARPS,
        )  # fmt: skip


def _rows(normed: Normed, index: Tensor | None) -> Normed:
    """(R, width): the rows of all positions, or of an index of them."""
    if isinstance(normed, Float8Rows):  # index_select does not take float8 on every device, but takes bytes
        values = cast(Tensor, _rows(normed.values.view(torch.uint8), index)).view(float8.DTYPE)
        return Float8Rows(values, cast(Tensor, _rows(normed.scales, index)))
    flat = normed.flatten(0, 1)
    return flat if index is None else flat.index_select(0, index)


def _part(block: DuoBlock, normed: Normed, outputs: slice) -> Tensor:
    """Some of a block's queries, keys and values."""
    return cast("Callable[[Normed, slice], Tensor]", block.attn_qkv.part)(normed, outputs)


def _normed(
    x: Tensor, updates: list[Gated], norm: Norm, shift: Tensor, scale: Tensor, out: Normed,
    index: Tensor | None = None, *, scatter: bool = False, store: bool = False,
    embedded: tuple[Tensor, Tensor] | None = None,
) -> Normed:  # fmt: skip
    """The modulated norm of x, or of an embedding of tokens, with at most two updates added, into `out`.

    store: also write the sum to x. index: flat positions, for each of which updates and `out` have one row. scatter:
    write each row of `out` at its position instead."""
    width, length = x.shape[-1], x.shape[1]
    rows = x.shape[:-1].numel() if index is None else len(index)
    together = math.gcd(ROWS, length) if index is None else 1  # of one sample
    source, tokens = (x, x) if embedded is None else embedded
    (first_gate, first), (second_gate, second) = [*updates, (shift, x), (shift, x)][:2]
    _norm_kernel[(rows // together,)](
        source, tokens, first_gate, first, second_gate, second, norm.weight, shift, scale, x,
        *(out if isinstance(out, Float8Rows) else (out, x)), x if index is None else index, length, shift.stride(0),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), ROWS=together, EMBED=embedded is not None,
        UPDATES=len(updates), STORE=store, GATHER=index is not None, SCATTER=scatter,
        QUANTISE=isinstance(out, Float8Rows), LARGEST=float8.LARGEST, LEAST=float8.LEAST, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _norm_kernel(
    source, tokens, first_gate, first, second_gate, second, weight, shift, scale, x, out, scales, index, length,
    stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EMBED: tl.constexpr, UPDATES: tl.constexpr,
    STORE: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr, QUANTISE: tl.constexpr, LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """Some positions of one sample each. The epsilon is that of torch's layer norm."""
    begin = tl.program_id(0).to(tl.int64) * ROWS
    row = begin + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = i < WIDTH
    position = tl.load(index + row).to(tl.int64) if GATHER else row
    sample = ((tl.load(index + begin).to(tl.int64) if GATHER else begin) // length) * stride + i
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
    centred = tl.where(inside, value - tl.sum(value, 1, keep_dims=True) / WIDTH, 0.0)
    spread = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) / WIDTH + 1e-5)
    normed = centred * spread * tl.load(weight + i, inside, other=0.0)
    scaled = normed * (1 + tl.load(scale + sample, inside, other=0.0).to(tl.float32))
    moved = scaled + tl.load(shift + sample, inside, other=0.0).to(tl.float32)
    target = position if SCATTER else row
    if QUANTISE:  # as `float8.quantise`
        most = tl.maximum(tl.max(tl.abs(moved), 1, keep_dims=True), LEAST)
        tl.store(scales + target, tl.div_rn(most, LARGEST))
        moved *= tl.div_rn(LARGEST, most)
    tl.store(out + target * WIDTH + i, moved.to(out.dtype.element_ty), inside)


def _gelu(x: Tensor) -> Float8Rows:
    """`float8.gelu` of (R, hidden) rows."""
    rows, hidden = x.shape
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    out = Float8Rows(torch.empty_like(x, dtype=float8.DTYPE), scales)
    _gelu_kernel[(rows,)](
        x, *out, HIDDEN=hidden, BLOCK=min(1024, triton.next_power_of_2(hidden)), LARGEST=float8.LARGEST,
        DIP=float8.DIP, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def _gelu_kernel(
    x, out, scales, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, DIP: tl.constexpr
):  # fmt: skip
    """One row, read twice. The second time it is still in the cache."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    high = tl.full((BLOCK,), 0.0, tl.float32)
    for begin in tl.static_range(0, HIDDEN, BLOCK):
        high = tl.maximum(high, tl.load(x + row * HIDDEN + begin + i, begin + i < HIDDEN, other=0.0).to(tl.float32))
    most = tl.maximum(gelu_of(tl.max(high, 0)), DIP)
    tl.store(scales + row, tl.div_rn(most, LARGEST))
    factor = tl.div_rn(LARGEST, most)
    for begin in tl.static_range(0, HIDDEN, BLOCK):
        inside = begin + i < HIDDEN
        value = tl.load(x + row * HIDDEN + begin + i, inside, other=0.0).to(tl.float32)
        tl.store(out + row * HIDDEN + begin + i, (gelu_of(value) * factor).to(out.dtype.element_ty), inside)


@triton.jit
def _rotate_kernel(
    x, cos, sin, index, length, stride, PAIRS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """One position: the two halves of every head rotated against each other."""
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
    """Attention of rotated queries to (B, L, 2 width) keys and values.

    The queries are those of all positions, or of an ascending index of them. The result has one row for each."""
    batch, length, _ = kv.shape
    k, v = kv.unflatten(-1, (2, heads, -1)).unbind(2)  # (B, L, heads, head width)
    if index is None:
        q, k, v = q.view(k.shape).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(ATTENTION, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    q, k, v = q.unflatten(-1, (heads, -1)), k.flatten(0, 1), v.flatten(0, 1)
    if _flash_supports(q, k, v):
        starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        queries_before = torch.searchsorted(index, starts, out_int32=True)
        return cast(Tensor, varlen_attn(q, k, v, queries_before, starts, length, length)).flatten(1)
    every = torch.zeros_like(k)
    every[index.long()] = q
    return _attended(every, kv, heads).flatten(0, 1).index_select(0, index)


def _flash_supports(*parts: Tensor) -> bool:
    """Whether flash attention supports these (rows, heads, head width) queries, keys and values."""
    q, k, v = (part[None].transpose(1, 2) for part in parts)
    return can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, False))


def _joined(maps: Sequence[Linear], name: str) -> Tensor:
    """The weights or biases of several linear maps as one tensor. Each map keeps a view, so they are in memory once."""
    parts: list[Tensor] = [getattr(one, name) for one in maps]
    with torch.inference_mode(False), torch.no_grad():
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view
    return whole
