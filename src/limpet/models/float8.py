"""Matrix products in float8: e4m3 numbers, a scale for every row of both factors, sums in float32.

Where the hardware has no such product the same numbers come out, slower: two float8 numbers multiply exactly in
float32. What is rounded is each factor, once, and the result, to bfloat16."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # of these numbers
LEAST = 1e-12  # a row is scaled as if it had a value as large as this, so that zeros have a scale, too
DIP = 0.171  # no GELU is below -.1701
TILE = 16  # numbers that the hardware's products come in, whatever the rows, and bytes that their factors begin at


class Scaled(NamedTuple):
    """Rows in float8: each is its values times its scale."""

    values: Tensor  # (..., K) e4m3
    scales: Tensor  # (..., 1) float32


def quantise(x: Tensor, most: Tensor | None = None) -> Scaled:
    """Rows scaled so that their largest value, or what is told to be at least that, is the largest there is."""
    x = x.float()
    most = (x.abs().amax(-1, keepdim=True) if most is None else most).clamp(min=LEAST)
    return Scaled((x * (LARGEST / most)).to(DTYPE), most / LARGEST)


def gelu(x: Tensor) -> Scaled:
    """The tanh form of GELU, in float8. It rises from its dip on, so that the largest x tells how large it gets: a
    kernel that reads a row twice computes it once."""
    most = F.gelu(x.float().amax(-1, keepdim=True), approximate="tanh").clamp(min=DIP)
    return quantise(F.gelu(x.float(), approximate="tanh"), most)


def multiply(rows: Scaled, weight: Scaled, bias: Tensor | None = None) -> Tensor:
    """(R, K) rows and an (N, K) weight -> (R, N) in bfloat16."""
    sizes = [*weight.values.shape, *(part.data_ptr() for part in (*rows, *weight, bias) if part is not None)]
    if in_hardware(rows.values.device) and not any(size % TILE for size in sizes):
        return _multiply(rows, weight, bias)
    sums = rows.values.float() @ weight.values.float().t() * rows.scales * weight.scales.t()
    return (sums if bias is None else sums + bias.float()).bfloat16()


def _multiply(rows: Scaled, weight: Scaled, bias: Tensor | None) -> Tensor:
    """Sums are kept in the matrix units throughout: their rounding is far below that of float8."""
    return torch._scaled_mm(
        rows.values, weight.values.t(), scale_a=rows.scales, scale_b=weight.scales.t(), bias=bias,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


@functools.cache
def in_hardware(device: torch.device) -> bool:
    """Whether a device has this product, as GPUs from Hopper on do; found out by asking it for one."""
    if device.type != "cuda":
        return False
    rows = quantise(torch.ones(TILE, TILE, device=device))
    try:
        return bool((_multiply(rows, rows, None) == TILE).all())
    except (RuntimeError, ValueError):
        return False


class Product(nn.Module):
    """A linear map in float8, made of one in another precision.

    No output of a row exceeds the row's scale times the first number of `bound` plus the second, because no product of
    two vectors exceeds that of their lengths. It stays on the device: nothing waits for it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = quantise(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach().bfloat16()
        lengths = (self.weight.values.float() * self.weight.scales).norm(dim=-1)
        offset = torch.zeros_like(lengths) if self.bias is None else self.bias.float().abs()
        self.bound = torch.stack([lengths.max() * LARGEST * math.sqrt(linear.in_features), offset.max()])

    def forward(self, x: Tensor | Scaled) -> Tensor:
        return self.part(x, slice(None))

    def part(self, x: Tensor | Scaled, outputs: slice) -> Tensor:
        """Some of the outputs."""
        rows = x if isinstance(x, Scaled) else quantise(x)
        weight = Scaled(*(part[outputs] for part in self.weight))
        bias = None if self.bias is None else self.bias[outputs]
        flat = Scaled(*(part.flatten(0, -2) for part in rows))
        return multiply(flat, weight, bias).view(*rows.values.shape[:-1], len(weight.values))


class Gelu(nn.Module):
    """`gelu` between two products."""

    def forward(self, x: Tensor) -> Scaled:
        return gelu(x)
