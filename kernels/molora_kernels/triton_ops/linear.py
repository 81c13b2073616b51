"""One interface over the ops: the rule that chooses among them. Their twin: `dispatch.routed_linear`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_kernels.bank import Bank, Plan, Sorted
from molora_kernels.dispatch import routed_linear
from molora_kernels.triton_ops import interpreted, tiles
from molora_kernels.triton_ops.decode import decode
from molora_kernels.triton_ops.prefill import extendable, prefill, prefill_extended
from molora_kernels.triton_ops.sort import sort_by_slot

# Estimates from byte and launch counts, to be replaced by measurements on a GPU (docs/kernels-gpu.md).
FUSED_TOKENS = 4  # each token reads W again (from L2); beyond, cuBLAS makes the base and the op adds
DECODE_TOKENS = 64  # beyond, a tile of tokens with one adapter fills tensor cores
SPLIT_SHARE = (
    1.0  # rows of A that a tile recomputes per row of W it reads, from where a second launch is less
)
EXTENDED_COLUMNS = 128  # R up to which multiplying with every adapter costs less than passing over y again
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes(bank: Bank, plan: Plan, *tensors: Tensor | None) -> bool:
    """Whether the kernels can do this call; else (float64, no extent, gradients wanted, under autocast, not
    on the GPU) the twin does."""
    if bank.extent is None or bank.scale is None:
        return False
    factors = (bank.A, bank.B, bank.scale, bank.out_scale, bank.out_bias, bank.base_bias, plan.weights)
    return _runs(*tensors, *factors)


def _runs(*tensors: Tensor | None) -> bool:
    every = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in every):
        return False
    if torch.is_autocast_enabled(every[0].device.type):
        return False
    return all(t.dtype in DTYPES and (t.is_cuda or interpreted()) for t in every)


def highest_rank(bank: Bank) -> int:
    """The bank's `max_rank`; where that is not known, the largest rank now, for which the device is asked:
    call it when loading."""
    if bank.max_rank is not None:
        return max(1, bank.max_rank)
    return 1 if bank.extent is None else max(1, int(bank.extent[:, 1].max()))


def sort_plan(plan: Plan) -> Sorted | None:
    """The sort that `prefill` needs, made once for all modules of a plan; None where tokens are few."""
    if plan.slots.shape[0] <= DECODE_TOKENS:
        return None
    return sort_by_slot(plan.slots, plan.gates.shape[1], tiles.sort_rows())


def choose(tokens: int, bank: Bank, choices: int, max_rank: int, *, plain: bool, wide: bool) -> str:
    """The path of a call: 'fused', 'fused-split', 'delta', 'extended' or 'sorted'; for reports too.

    plain: the module's W is a dense tensor. wide: it was laid out by `widen`.
    """
    if tokens <= DECODE_TOKENS:
        if not plain or tokens > FUSED_TOKENS:
            return "delta"
        return "fused" if max_rank * choices <= SPLIT_SHARE * tiles.DECODE[0].bn else "fused-split"
    dense = wide and extendable(bank) and bank.A.shape[0] <= EXTENDED_COLUMNS
    return "extended" if dense else "sorted"


def mixed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: Bank,
    plan: Plan,
    *,
    max_rank: int,
    segments: Sorted | None = None,
    wide: Tensor | None = None,
) -> Tensor:
    """The mixture of a module with a dense weight. x (..., in), weight (out, in), bias (out,) -> (..., out).

    max_rank: from `highest_rank`. segments: from `sort_plan`, made here if absent. wide: the buffer of
    `widen`, of which `weight` is the left part. Where the kernels cannot, and under autograd, the twin runs.
    """
    if not takes(bank, plan, x, weight, bias) or x.dtype != weight.dtype:
        return routed_linear(x, F.linear(x, weight, bias), bank, plan)
    rows = x.reshape(-1, x.shape[-1])
    path = choose(rows.shape[0], bank, plan.slots.shape[1], max_rank, plain=True, wide=wide is not None)
    if path.startswith("fused"):
        out = _decode(rows, weight, bias, None, bank, plan, max_rank, path == "fused-split")
    elif path == "extended" and wide is not None:
        out = prefill_extended(rows, wide, bias, bank, plan)
    else:
        out = _add(rows, F.linear(rows, weight, bias), bank, plan, max_rank, segments)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def mixed_delta(
    x: Tensor, y: Tensor, bank: Bank, plan: Plan, *, max_rank: int, segments: Sorted | None = None
) -> Tensor:
    """The mixture where the base module has run: x (..., in), y (..., out) = W x + bias -> (..., out).

    For weights that are no plain tensor (bnb, GPTQ, AWQ, experts). Arguments and twin as in `mixed_linear`.
    """
    if not takes(bank, plan, x, y):
        return routed_linear(x, y, bank, plan)
    rows, base = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
    return _add(rows, base, bank, plan, max_rank, segments).reshape(y.shape)


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W x + bias by the engine without adapters: the fused kernel for few tokens, else cuBLAS."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] > FUSED_TOKENS or x.dtype != weight.dtype or not _runs(x, weight, bias):
        return F.linear(x, weight, bias)
    none = rows.new_empty(rows.shape[0], 0)
    empty = rows.new_empty(0, rows.shape[1])
    extent = torch.empty(0, 2, dtype=torch.int64, device=x.device)
    out = decode(
        rows, weight, bias, None, empty, weight[:, :0], extent, none, none.long(), none, None, None, 1, False
    )
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _add(x: Tensor, y: Tensor, bank: Bank, plan: Plan, max_rank: int, segments: Sorted | None) -> Tensor:
    if x.shape[0] <= DECODE_TOKENS:
        return _decode(x, None, bank.base_bias, y, bank, plan, max_rank, True)
    segments = segments or sort_plan(plan)
    assert segments is not None and bank.extent is not None and bank.scale is not None
    return prefill(
        x, y, bank.base_bias, bank.A, bank.B, bank.extent, bank.scale, plan.weights,
        bank.out_scale, bank.out_bias,
        segments.order, segments.offsets, segments.tiles, segments.block, max_rank,
    )  # fmt: skip


def _decode(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    bank: Bank,
    plan: Plan,
    max_rank: int,
    split: bool,
) -> Tensor:
    assert bank.extent is not None and bank.scale is not None
    return decode(
        x, weight, bias, y, bank.A, bank.B, bank.extent, bank.scale, plan.slots, plan.weights,
        bank.out_scale, bank.out_bias, max_rank, split,
    )  # fmt: skip
