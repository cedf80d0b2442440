"""Candidates for the body: products that rotate their result, or take its GELU in float8, before they store it.

They would spare a pass over memory each, if Triton's products are as fast as the library's: `body.py` finds out."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

import math
from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from limpet.denoisers import float8, fused
from limpet.denoisers.duo import Block
from limpet.denoisers.float8 import Scaled
from limpet.denoisers.fused import FusedBody, Normed

TILES = {  # by bytes of a number: rows, outputs, depth, warps, stages
    1: ((128, 256, 128, 8, 3), (128, 128, 128, 8, 3), (128, 128, 128, 4, 3)),
    2: ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3)),
}


@triton.jit
def _kernel(
    a, b, a_scales, b_scales, bias, out, out_scales, cos, sin, rows, length, rotated, reach, offset,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, SCALED: tl.constexpr, GELU: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """One tile each; GROUP tiles of rows share the weight's tiles while these are in the cache."""
    tile, across, down = tl.program_id(0), tl.cdiv(N, OUTPUTS), tl.cdiv(rows, ROWS)
    group = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - group, GROUP)
    inside = tile % (GROUP * across)
    top, left = (group + inside % height) * ROWS, inside // height * OUTPUTS
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for depth in range(0, K, DEPTH):
        sums = tl.dot(a.load([top, depth]), b.load([left, depth]).T, sums)
    row, output = top + tl.arange(0, ROWS), left + tl.arange(0, OUTPUTS)
    if SCALED:
        scale = tl.load(a_scales + row, row < rows, other=1.0)
        sums = sums * scale[:, None] * tl.load(b_scales + output, output < N, other=0.0)[None, :]
    if GELU:
        sums += tl.load(bias + output, output < N, other=0.0).to(tl.float32)[None, :]
        sums = sums / (1 + tl.exp(-1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)))
        most = scale * reach + offset  # float8 is as exact far below its largest number as near it
        sums *= tl.div_rn(LARGEST, most)[:, None]
        tl.store(out_scales + row, tl.div_rn(most, LARGEST), (row < rows) & (left == 0))
    elif left < rotated:
        parted = tl.permute(tl.reshape(sums, (ROWS, OUTPUTS // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
        one, other = tl.split(parted)  # (rows, heads, half)
        angle = (row % length)[:, None, None] * HALF + tl.arange(0, HALF)[None, None, :]
        c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
        turned = tl.join(one * c - other * s, other * c + one * s)
        sums = tl.reshape(tl.permute(turned, (0, 1, 3, 2)), (ROWS, OUTPUTS))
    out.store([top, left], sums.to(out.dtype))


def launch(x: Normed, weight: Normed, out: Tensor, tile: tuple[int, ...], **given: Any) -> None:
    """Into `out`, (R, N), in its own precision."""
    scaled = isinstance(x, Scaled)
    (values, scales), (matrix, matrix_scales) = (
        part if isinstance(part, Scaled) else (part, part) for part in (x, weight)
    )
    (rows, inner), outputs = values.shape, len(matrix)
    high, wide, deep, warps, stages = tile
    none = dict.fromkeys(("bias", "out_scales", "cos", "sin"), scales)
    _kernel[(triton.cdiv(rows, high) * triton.cdiv(outputs, wide),)](
        a=TensorDescriptor.from_tensor(values, [high, deep]), b=TensorDescriptor.from_tensor(matrix, [wide, deep]),
        a_scales=scales, b_scales=matrix_scales, out=TensorDescriptor.from_tensor(out, [high, wide]), rows=rows,
        N=outputs, K=inner, ROWS=high, OUTPUTS=wide, DEPTH=deep, GROUP=8, SCALED=scaled, LARGEST=float8.LARGEST,
        num_warps=warps, num_stages=stages,
        **(none | {"length": 1, "rotated": 0, "reach": 0.0, "offset": 0.0, "HALF": 1, "GELU": False} | given),
    )  # fmt: skip


def rotated(x: Normed, weight: Normed, cos: Tensor, sin: Tensor, tile: tuple[int, ...]) -> Tensor:
    """(R, 3 width) queries and keys, rotated, and values, in bfloat16; rows are whole samples."""
    values, matrix = (part.values if isinstance(part, Scaled) else part for part in (x, weight))
    out = torch.empty(len(values), len(matrix), dtype=torch.bfloat16, device=values.device)
    turned = len(matrix) // 3 * 2
    assert turned % tile[1] == 0, "a tile is rotated as a whole"
    launch(x, weight, out, tile, cos=cos, sin=sin, length=len(cos), rotated=turned, HALF=cos.shape[1])
    return out


def gelu(x: Scaled, product: float8.Product, tile: tuple[int, ...]) -> Scaled:
    """GELU of a product in float8, scaled by what the largest value of a row allows the result to be."""
    inner, bias, weight = x.values.shape[-1], product.bias, product.weight
    assert bias is not None
    if not hasattr(product, "reach"):  # once: it is read back from the device
        longest = (weight.values.float() * weight.scales).norm(dim=-1).max()
        product.reach = float(float8.LARGEST * math.sqrt(inner) * longest), float(bias.abs().max()) + float8.DIP
    out = torch.empty(len(x.values), len(weight.values), dtype=float8.DTYPE, device=x.values.device)
    scales = torch.empty_like(x.scales)
    reach, offset = product.reach
    launch(x, weight, out, tile, bias=bias, out_scales=scales, reach=reach, offset=offset, GELU=True)
    return Scaled(out, scales)


class JoinedBody(FusedBody):
    """The fused body with these products; `tiles` of those above for queries and so on, and for GELUs."""

    tiles = (0, 0)

    def _qkv(self, block: Block, normed: Normed) -> Tensor:
        values = normed.values if isinstance(normed, Scaled) else normed
        tile = TILES[values.element_size()][self.tiles[0]]
        weight = cast(Normed, block.attn_qkv.weight)
        flat = rotated(fused._rows(normed, None), weight, *self._angles(values.shape[1]), tile)
        return flat.view(*values.shape[:2], -1)

    def _hidden(self, block: Block, normed: Normed) -> Normed:
        if not isinstance(normed, Scaled):
            return super()._hidden(block, normed)
        flat = Scaled(*(part.flatten(0, -2) for part in normed))
        return gelu(flat, cast(float8.Product, block.mlp[0]), TILES[1][self.tiles[1]])
