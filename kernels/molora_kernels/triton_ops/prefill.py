"""The adapters' part of one linear module for many tokens: sorted by slot, or all adapters in one product.

sorted     x --gather--> shrink (tl.dot, A of the tile's slot) --> hidden --> expand --> y, once per choice j
extended   [x | mask * (x A_all^T)] . [W | B_all]^T         one product, R columns wider; y is written once
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_kernels.bank import Bank, Plan
from molora_kernels.triton_ops import tiles
from molora_kernels.triton_ops.decode import _rows


@torch.library.custom_op("molora_triton::prefill", mutates_args=())
def prefill(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    A: Tensor,
    B: Tensor,
    extent: Tensor,
    scale: Tensor,
    weights: Tensor,
    out_scale: Tensor | None,
    out_bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    upto: Tensor,
    block: int,
    max_rank: int,
) -> Tensor:
    """x (N, in) and y (N, out) = W x + bias -> (N, out) in y's dtype; order, offsets, upto, block from
    `sort_by_slot`, weights (N, J) float, the rest as in `Bank`.

    fp32 accumulation; A x is rounded once to the dtype of B, y once per choice.
    """
    from molora_kernels.triton_ops import _prefill as device
    from molora_kernels.triton_ops import interpreted

    tokens, inputs = x.shape
    outputs = B.shape[0]
    out = torch.empty_like(y, memory_format=torch.contiguous_format)
    if tokens == 0 or outputs == 0:
        return out
    choices = order.shape[0]
    if choices == 0:
        return out.copy_(y)
    x, y, A = _rows(x), _rows(y), _rows(A)
    tile = tiles.prefill_tile()
    step = tiles.prefill_step(max_rank, B.dtype)
    width = -(-max_rank // step) * step
    n_slots = extent.shape[0]
    slots_width = tiles.power_of_two(n_slots, 2)
    most = -(-tokens // block) + n_slots
    hidden = x.new_empty(choices, tokens, width, dtype=B.dtype)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        device.shrink_sorted[(most, choices, width // step)](
            x, A, extent, scale, order, offsets, upto, hidden,
            tokens, inputs, n_slots, width, x.stride(0), A.stride(0),
            SP=slots_width, BM=block, BK=min(tile.bk, tiles.power_of_two(inputs, 16)), BR=step,
            UPCAST=interpreted(), num_warps=tile.warps, num_stages=tile.shrink_stages,
        )  # fmt: skip
        m = x if out_scale is None else _rows(out_scale)
        c = x if out_bias is None else _rows(out_bias)
        width_out = tiles.prefill_outputs(tile, outputs, B.dtype)
        for j in range(choices):
            device.expand_sorted[(most, -(-outputs // width_out))](
                hidden, y, x if bias is None else bias.contiguous(), B, extent, weights, m, c,
                order, offsets, upto, out,
                j, tokens, outputs, n_slots, width, y.stride(0), B.stride(0), B.stride(1),
                weights.stride(0), weights.stride(1), m.stride(0), c.stride(0), out.stride(0),
                FIRST=j == 0, HAS_BIAS=bias is not None,
                HAS_SCALE=out_scale is not None, HAS_SLOT_BIAS=out_bias is not None,
                SP=slots_width, BM=block, BN=width_out, BR=step,
                UPCAST=interpreted(), num_warps=tile.warps, num_stages=tile.expand_stages,
                **tiles.registers(out_scale is not None),
            )  # fmt: skip
    return out


@prefill.register_fake
def _(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    A: Tensor,
    B: Tensor,
    extent: Tensor,
    scale: Tensor,
    weights: Tensor,
    out_scale: Tensor | None,
    out_bias: Tensor | None,
    order: Tensor,
    offsets: Tensor,
    upto: Tensor,
    block: int,
    max_rank: int,
) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def widen(weight: Tensor, bank: Bank) -> tuple[Tensor, Bank]:
    """One buffer (out, in + R) for W and all B, and the bank whose B lies in it.

    No second W is kept if the caller then takes `buffer[:, :in]` as its weight. R is padded to a multiple of
    8, as tensor cores want it.
    """
    outputs, inputs = weight.shape
    columns = bank.B.shape[1]
    wide = weight.new_zeros(outputs, inputs + -(-columns // 8) * 8)
    wide[:, :inputs] = weight
    wide[:, inputs : inputs + columns] = bank.B
    return wide, replace(bank, B=wide[:, inputs : inputs + columns])


def extendable(bank: Bank) -> bool:
    """Whether one product may stand for all adapters: an output scale acts on W x alone, and a factor that is
    not finite would leak from one token's adapter to another's."""
    return bank.out_scale is None and bank.finite


def prefill_extended(x: Tensor, wide: Tensor, bias: Tensor | None, bank: Bank, plan: Plan) -> Tensor:
    """Base and adapters in one product. x (N, in), wide (out, in + padded R) from `widen` -> (N, out).

    In torch (cuBLAS), static shapes, no sync. Raises ValueError for a bank that is not `extendable`.
    """
    if not extendable(bank):
        raise ValueError("the extended product takes no output scale and only finite factors")
    coefficient = plan.columns[bank.layout].coefficient
    hidden = (F.linear(x.to(bank.A.dtype), bank.A).float() * coefficient).to(x.dtype)  # (N, R)
    spare = wide.shape[1] - x.shape[1] - bank.A.shape[0]
    y = F.linear(torch.cat([x, F.pad(hidden, (0, spare))], dim=1), wide, bias)
    return y if bank.out_bias is None else y + (plan.gates @ bank.out_bias.to(plan.gates.dtype)).to(y.dtype)
