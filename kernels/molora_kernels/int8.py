"""Weights of a linear as int8 with a scale per row (output): W_oi = q_oi s_o, s_o = max_i |W_oi| / 127.

Rounding to nearest, symmetric, no zero point: such a weight loses a hundredth of its size or less where a row
has no outliers. Adapters and sums stay in floating point, inputs too but for the CPU kernel of few tokens: it
takes them as 16-bit integers with a scale for every 256, which costs a thousandth of that.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDENED_AT_ONCE = 1 << 21  # weights, so that a large head needs no large copy
_ROUNDED_AT_ONCE = 1 << 19  # weights, which stay in the cache meanwhile
_TINY = torch.finfo(torch.float32).tiny


class Quantised(NamedTuple):
    """q (out, in) int8 and scale (out,) float32 of a weight; error: what rounding costs, as a share of the
    weights' size, mean over the rows.

    An error spread evenly over a step s is s / sqrt(12) large (RMS); a row's size is taken from its mean
    |W|, times sqrt(pi / 2) (the RMS of a normal row), because a single outlier would hide what it does to all
    the others.
    """

    q: Tensor
    scale: Tensor
    error: float


def quantise_rows(weight: Tensor) -> Quantised:
    """A weight (out, in) of any float dtype as int8. A row of zeros has scale 1.

    Raises ValueError for a weight that is not finite.
    """
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.ones(len(weight), dtype=torch.float32, device=weight.device)
    lost = torch.zeros_like(scale)
    for rows in _blocks(weight, _ROUNDED_AT_ONCE) if weight.numel() else ():
        wide = weight[rows].detach().to(torch.float32, copy=True)
        size = wide.abs()
        largest = size.amax(1)
        if not bool(largest.isfinite().all()):
            raise ValueError("the weight holds NaN or Inf")
        scale[rows] = torch.where(largest > 0, largest / 127, 1.0)
        lost[rows] = torch.where(largest > 0, scale[rows] / size.mean(1).clamp_min(_TINY), 0.0)
        q[rows] = wide.div_(scale[rows, None]).round_().to(torch.int8)
    error = float(lost.mean()) / math.sqrt(6 * math.pi) if len(lost) else 0.0
    return Quantised(q, scale, error)


def widen_rows(q: Tensor, scale: Tensor) -> Tensor:
    """The weight (out, in) in float32 that q (out, in) and scale (out,) stand for."""
    return q.float() * scale.unsqueeze(1)


def int8_linear(x: Tensor, q: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """The torch twin of a product with such a weight. x: (..., in), q: (out, in) int8, bias: (out,) or None,
    scale: (out,) float32 -> (..., out) in x's dtype; sums in float32 at least. Differentiable in x."""
    kind = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(kind)
    parts = [F.linear(wide, q[rows].to(kind)) for rows in _blocks(q, _WIDENED_AT_ONCE)]
    y = torch.cat(parts, -1) * scale
    return (y if bias is None else y + bias).to(x.dtype)


def _blocks(weight: Tensor, at_once: int) -> list[slice]:
    out, width = weight.shape
    step = max(1, at_once // max(1, width))
    return [slice(first, first + step) for first in range(0, max(out, 1), step)]
