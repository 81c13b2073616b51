"""The mixture of one linear module for few tokens, memory-bound: W x and the adapters in one launch, or two.

    y_n = W x_n + b + sum_j g_nj ((m - 1) W x_n + m s B A x_n + c)    with A, B, s, m, c of slot j; 0: none

LoRA: Hu et al., arXiv 2106.09685, section 4.1 (m = 1, c = 0). DoRA: Liu et al., arXiv 2402.09353, eq. 5.
`weight` given: the op makes W x itself. `y` given: the base has run (cuBLAS, a quantised module), the op
adds. Sums are fp32 in a fixed order; nothing is rounded before the result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from molora_kernels.triton_ops import tiles


@torch.library.custom_op("molora_triton::decode", mutates_args=())
def decode(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    A: Tensor,
    B: Tensor,
    extent: Tensor,
    scale: Tensor,
    slots: Tensor,
    weights: Tensor,
    out_scale: Tensor | None,
    out_bias: Tensor | None,
    max_rank: int,
    split: bool,
) -> Tensor:
    """x (N, in), exactly one of weight (out, in) and y (N, out), bias (out,) of the base -> (N, out) in the
    dtype of y, else x. slots (N, J) integer, weights (N, J) float; the rest as in `Bank`.

    max_rank: no slot of `extent` is above it, now or later (it sizes buffers; no sync reads it).
    split: shrink in a launch of its own rather than again in each tile of outputs. J = 0 is the base alone.
    bf16, fp16 or fp32, mixed as they come.
    """
    from molora_kernels.triton_ops import _decode as device

    tokens, inputs = x.shape
    outputs = B.shape[0]
    out = _empty(x, y, B)
    if tokens == 0 or outputs == 0:
        return out
    x, A = _rows(x), _rows(A)
    tile = tiles.decode_tile(outputs, inputs, x.dtype)
    choices = slots.shape[1]
    split = split and choices > 0
    step = tiles.decode_step(max_rank, split)
    z = x.new_empty((tokens, choices, max_rank) if split else (1,), dtype=torch.float32)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        if split:
            rows = min(step, 4)  # few rows a program: the launch has to fill the GPU with one token
            device.shrink_rows[(tokens * choices, -(-max_rank // rows))](
                x, A, extent, scale, slots, z,
                inputs, max_rank, x.stride(0), A.stride(0), slots.stride(0), slots.stride(1),
                TOPK=choices, BR=rows, BK=min(512, tiles.power_of_two(inputs, 16)), num_warps=4,
            )  # fmt: skip
        # an absent tensor is never read; the kernel still wants a pointer
        W = x if weight is None else _rows(weight)
        before = x if y is None else _rows(y)
        m = x if out_scale is None else _rows(out_scale)
        c = x if out_bias is None else _rows(out_bias)
        device.linear_rows[(tokens, -(-outputs // tile.bn))](
            x, W, x if bias is None else bias.contiguous(), before, A, B, extent, scale,
            slots, weights, z, m, c, out,
            inputs, outputs, max_rank,
            x.stride(0), W.stride(0), before.stride(0), A.stride(0), B.stride(0), B.stride(1),
            slots.stride(0), slots.stride(1), weights.stride(0), weights.stride(1),
            m.stride(0), c.stride(0), out.stride(0),
            TOPK=choices, HAS_W=weight is not None, HAS_BIAS=bias is not None, HAS_Z=split,
            HAS_SCALE=out_scale is not None, HAS_SLOT_BIAS=out_bias is not None,
            BN=tile.bn, BK=tile.bk, BR=step, num_warps=tile.warps,
            **tiles.registers(out_scale is not None),
        )  # fmt: skip
    return out


@decode.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    A: Tensor,
    B: Tensor,
    extent: Tensor,
    scale: Tensor,
    slots: Tensor,
    weights: Tensor,
    out_scale: Tensor | None,
    out_bias: Tensor | None,
    max_rank: int,
    split: bool,
) -> Tensor:
    return _empty(x, y, B)


def _empty(x: Tensor, y: Tensor | None, B: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], B.shape[0], dtype=x.dtype if y is None else y.dtype)


def _rows(t: Tensor) -> Tensor:
    """Rows contiguous in themselves, at any distance from one another; copies only what is not."""
    return t if t.stride(-1) == 1 else t.contiguous()
