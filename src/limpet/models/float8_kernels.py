"""Float8 products that process their result before it is stored: queries and keys rotated, a hidden layer activated.

Each saves the pass over memory that a second kernel would take. The library's own products are faster, so that this
pays only where such a pass is long compared with the product: in float8, and not in bfloat16."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, no-any-return"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from limpet.models import float8
from limpet.models.float8 import Float8Linear, Float8Rows

if TYPE_CHECKING:
    from limpet.models.duo import DuoShape

HOPPER = 9  # the generation of GPUs that these were measured on; another may not have room for a tile
GROUP = 8  # tiles of rows that read a weight's tiles while these are in the cache


class Tile(NamedTuple):
    """What one program multiplies, with how many warps, and how many pieces of the depth are in flight."""

    rows: int
    outputs: int
    depth: int
    warps: int
    stages: int


TILE = Tile(128, 128, 128, 4, 3)  # the fastest of those that benchmarks/body.py tries


def suit(shape: DuoShape, device: torch.device) -> bool:
    """Whether a network of this shape can use these kernels on a device."""
    if not float8.in_hardware(device) or torch.cuda.get_device_capability(device)[0] != HOPPER:
        return False
    return divides(TILE, shape)


def divides(tile: Tile, shape: DuoShape) -> bool:
    """Whether every tile is full but those of the last rows, holds queries, keys or values alone, and whole heads."""
    sides = (tile.outputs, tile.depth)
    full = not any(size % side for size in (shape.width, shape.hidden) for side in sides)
    return full and tile.outputs % (shape.width // shape.heads) == 0


def rotated(x: Float8Rows, product: Float8Linear, cos: Tensor, sin: Tensor, tile: Tile = TILE) -> Tensor:
    """(R, width) rows of whole samples -> (R, 3 width) queries and keys, rotated, and values, in bfloat16."""
    outputs = len(product.weight.values)
    out = torch.empty(len(x.values), outputs, dtype=torch.bfloat16, device=x.values.device)
    arguments = {"cos": cos, "sin": sin, "length": len(cos), "turned": outputs // 3 * 2, "HALF": cos.shape[1]}
    _launch(x, product.weight, out, tile, bias=cos, bound=cos, out_scales=cos, GELU=False, **arguments)
    return out


def activated(x: Float8Rows, product: Float8Linear, tile: Tile = TILE) -> Float8Rows:
    """`float8.gelu` of the product of (R, K) rows, with a larger scale.

    A tile does not see whole rows, so the scale comes from a bound of the row's values. That costs little accuracy: a
    float8 number is rounded by a share of itself, down to 2^-15 of the largest."""
    bias, bound, device = product.bias, product.bound, x.values.device
    out = torch.empty(len(x.values), len(product.weight.values), dtype=float8.DTYPE, device=device)
    scales = torch.empty_like(x.scales)
    arguments = {"cos": bound, "sin": bound, "length": 1, "turned": 0, "HALF": 1}
    _launch(x, product.weight, out, tile, bias=bias, bound=bound, out_scales=scales, GELU=True, **arguments)
    return Float8Rows(out, scales)


def _launch(x: Float8Rows, weight: Float8Rows, out: Tensor, tile: Tile, **arguments: Any) -> None:
    (rows, inner), outputs = x.values.shape, len(weight.values)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.outputs),)
    _kernel[grid](
        TensorDescriptor.from_tensor(x.values, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight.values, [tile.outputs, tile.depth]),
        TensorDescriptor.from_tensor(out, [tile.rows, tile.outputs]), x.scales, weight.scales, rows=rows,
        N=outputs, K=inner, ROWS=tile.rows, OUTPUTS=tile.outputs, DEPTH=tile.depth, GROUP=GROUP,
        LARGEST=float8.LARGEST, DIP=float8.DIP, num_warps=tile.warps, num_stages=tile.stages, **arguments,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])  # it differs from call to call
def _kernel(
    x, weight, out, x_scales, weight_scales, bias, bound, out_scales, cos, sin, rows, length, turned,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, GELU: tl.constexpr, LARGEST: tl.constexpr, DIP: tl.constexpr,
):  # fmt: skip
    """One tile. Rows beyond the last are read as zeros and not written."""
    tile, across, down = tl.program_id(0), tl.cdiv(N, OUTPUTS), tl.cdiv(rows, ROWS)
    group = tile // (GROUP * across) * GROUP
    height = tl.minimum(down - group, GROUP)
    inside = tile % (GROUP * across)
    top, left = (group + inside % height) * ROWS, inside // height * OUTPUTS
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for depth in range(0, K, DEPTH):
        sums = tl.dot(x.load([top, depth]), weight.load([left, depth]).T, sums)
    row, output = top + tl.arange(0, ROWS), left + tl.arange(0, OUTPUTS)
    scale = tl.load(x_scales + row, row < rows, other=1.0)
    sums = sums * scale[:, None] * tl.load(weight_scales + output)[None, :]
    if GELU:
        sums += tl.load(bias + output).to(tl.float32)[None, :]
        most = scale * tl.load(bound) + tl.load(bound + 1) + DIP
        sums = gelu_of(sums) * tl.div_rn(LARGEST, most)[:, None]
        tl.store(out_scales + row, tl.div_rn(most, LARGEST), (row < rows) & (left == 0))
    elif left < turned:
        parted = tl.permute(tl.reshape(sums, (ROWS, OUTPUTS // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
        one, other = tl.split(parted)  # (rows, heads, half)
        angle = (row % length)[:, None, None] * HALF + tl.arange(0, HALF)[None, None, :]
        c, s = tl.load(cos + angle).to(tl.float32), tl.load(sin + angle).to(tl.float32)
        both = tl.join(one * c - other * s, other * c + one * s)
        sums = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (ROWS, OUTPUTS))
    out.store([top, left], sums.to(out.dtype))


@triton.jit
def gelu_of(x):
    """The tanh form of GELU: tanh(u) is a sigmoid of 2 u."""
    return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
