"""Every private function of another library that limpet calls, and what is said where a version lacks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from limpet.errors import LimpetError

TESTED = "2.10 to 2.13"  # versions of torch


def _private(name: str) -> Callable[..., Any]:
    """A private function of torch. Raises where this version has none of that name."""
    function: Callable[..., Any] | None = getattr(torch, name, None)
    if function is None:
        raise LimpetError(f"torch {torch.__version__} has no {name}: install a version that limpet knows, {TESTED}")
    return function


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The tanh form of GELU of a linear map of (R, K) rows, in one kernel."""
    found: Tensor = _private("_addmm_activation")(bias, x, weight.t(), use_gelu=True)
    return found


def cpu_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same on a CPU in bfloat16, where the kernel above computes GELU apart, and slowly."""
    fused: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if fused is None or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")
    return fused(x, weight, bias, "gelu", [], "tanh")


def scaled_product(
    rows: Tensor, weight: Tensor, row_scales: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """(R, K) and (N, K) float8 numbers with (R, 1) and (N, 1) scales -> their (R, N) product in bfloat16.

    Sums are kept in the matrix units throughout: their rounding is far below that of float8."""
    found: Tensor = _private("_scaled_mm")(
        rows,
        weight.t(),
        scale_a=row_scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return found


def move_towards(tensors: Sequence[Tensor], targets: Sequence[Tensor], share: float) -> None:
    """Move each tensor a share of the way to its target, in place and in one kernel for all."""
    _private("_foreach_lerp_")(list(tensors), list(targets), share)
