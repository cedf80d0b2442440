"""Matrix products in float8: e4m3 numbers, a scale for every row of both factors, sums in float32.

Hardware without such a product computes the same numbers more slowly: two float8 numbers multiply exactly in float32.
Each factor is rounded once, and the result is rounded to bfloat16."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from limpet.models.private_apis import scaled_product

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # e4m3 number
LEAST = 1e-12  # a row is scaled as if it had a value as large as this, so that a row of zeros has a scale
DIP = 0.171  # GELU is above -.1701 everywhere
TILE = 16  # the hardware's products take sizes and addresses that are multiples of this


class Float8Rows(NamedTuple):
    """Rows in float8. Each is its values times its scale."""

    values: Tensor  # (..., K) e4m3
    scales: Tensor  # (..., 1) float32


def quantise(x: Tensor, most: Tensor | None = None) -> Float8Rows:
    """Rows scaled so that their largest value is the largest float8 number.

    most: (..., 1) bounds of the rows' values to use instead."""
    x = x.float()
    most = (x.abs().amax(-1, keepdim=True) if most is None else most).clamp(min=LEAST)
    return Float8Rows((x * (LARGEST / most)).to(DTYPE), most / LARGEST)


def gelu(x: Tensor) -> Float8Rows:
    """The tanh form of GELU, in float8.

    GELU rises from its dip on, so that the largest x bounds it: a kernel need not compute it twice."""
    most = F.gelu(x.float().amax(-1, keepdim=True), approximate="tanh").clamp(min=DIP)
    return quantise(F.gelu(x.float(), approximate="tanh"), most)


def multiply(rows: Float8Rows, weight: Float8Rows, bias: Tensor | None = None) -> Tensor:
    """(R, K) rows and an (N, K) weight -> (R, N) in bfloat16."""
    sizes = [*weight.values.shape, *(part.data_ptr() for part in (*rows, *weight, bias) if part is not None)]
    if in_hardware(rows.values.device) and not any(size % TILE for size in sizes):
        return scaled_product(rows.values, weight.values, rows.scales, weight.scales, bias)
    sums = rows.values.float() @ weight.values.float().t() * rows.scales * weight.scales.t()
    return (sums if bias is None else sums + bias.float()).bfloat16()


@functools.cache
def in_hardware(device: torch.device) -> bool:
    """Whether a device has this product, as GPUs from Hopper on do. It is tried once."""
    if device.type != "cuda":
        return False
    ones = quantise(torch.ones(TILE, TILE, device=device))
    try:
        return bool((scaled_product(ones.values, ones.values, ones.scales, ones.scales, None) == TILE).all())
    except (RuntimeError, ValueError):
        return False


class Float8Linear(nn.Module):
    """A linear map in float8, from one in another precision.

    No output of a row exceeds the row's scale times the first number of `bound` plus the second, because no product of
    two vectors exceeds the product of their lengths. `bound` stays on the device, so that nothing waits for it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = quantise(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach().bfloat16()
        lengths = (self.weight.values.float() * self.weight.scales).norm(dim=-1)
        offset = torch.zeros_like(lengths) if self.bias is None else self.bias.float().abs()
        self.bound = torch.stack([lengths.max() * LARGEST * math.sqrt(linear.in_features), offset.max()])

    def forward(self, x: Tensor | Float8Rows) -> Tensor:
        return self.part(x, slice(None))

    def part(self, x: Tensor | Float8Rows, outputs: slice) -> Tensor:
        """Some of the outputs."""
        rows = x if isinstance(x, Float8Rows) else quantise(x)
        weight = Float8Rows(*(part[outputs] for part in self.weight))
        bias = None if self.bias is None else self.bias[outputs]
        flat = Float8Rows(*(part.flatten(0, -2) for part in rows))
        return multiply(flat, weight, bias).view(*rows.values.shape[:-1], len(weight.values))


class Float8Gelu(nn.Module):
    """`gelu` between two linear maps."""

    def forward(self, x: Tensor) -> Float8Rows:
        return gelu(x)
