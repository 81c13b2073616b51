"""The public operators: one function per job, whichever backend runs it.

The torch twin (`dispatch`) computes the same and runs where a backend cannot: another device or dtype, or
under autograd, so that no gradient is lost.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_kernels import cpu_ops
from molora_kernels.bank import Bank, Plan
from molora_kernels.dispatch import routed_linear
from molora_kernels.int8 import int8_linear

MANY_TOKENS = 64  # a guess: the crossing was not measured


def plain_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    backend: str = "torch",
    row_scale: Tensor | None = None,
) -> Tensor:
    """W x + bias. x: (..., in), weight: (out, in) in x's dtype, or int8 with row_scale (out,) float32 (see
    `int8`), bias: (out,) or None -> (..., out)."""
    if backend == "cpu" and cpu_ops.takes(x, None if row_scale is not None else weight, bias):
        return torch.ops.molora_cpu.gemv(x, weight, bias, row_scale)
    if backend == "triton" and row_scale is None:
        from molora_kernels.triton_ops import linear

        return linear.plain_linear(x, weight, bias)
    return _product(x, weight, bias, row_scale)


def mixed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bank: Bank,
    plan: Plan,
    backend: str = "torch",
    row_scale: Tensor | None = None,
) -> Tensor:
    """The mixture of a linear module with a dense weight.

    x: (..., in), leading sizes multiplying to the plan's N; weight, bias, row_scale as in `plain_linear`.
    Returns (..., out). A token with no slot chosen gets what `plain_linear` gives: bit for bit up to 16
    tokens.
    """
    if backend == "cpu" and _runs(x, bank, plan, None if row_scale is not None else weight, bias):
        if _masks(x, bank, plan):
            return _masked(x, plain_linear(x, weight, bias, backend, row_scale), bank, plan)
        return torch.ops.molora_cpu.linear(x, weight, bias, row_scale, *cpu_ops.adapters(bank, plan))
    if backend == "triton" and row_scale is None:
        from molora_kernels.triton_ops import linear

        rank = linear.highest_rank(bank)
        return linear.mixed_linear(x, weight, bias, bank, plan, max_rank=rank, segments=plan.segments)
    return routed_linear(x, _product(x, weight, bias, row_scale), bank, plan)


def mixed_delta(x: Tensor, y: Tensor, bank: Bank, plan: Plan, backend: str = "torch") -> Tensor:
    """The mixture of a module whose weight is not a plain dense tensor. x: (..., in), y = W x + bias: (...,
    out).
    """
    if backend == "cpu" and _runs(x, bank, plan, y):
        return torch.ops.molora_cpu.delta(y, x, bank.base_bias, *cpu_ops.adapters(bank, plan))
    if backend == "triton":
        from molora_kernels.triton_ops import linear

        rank = linear.highest_rank(bank)
        return linear.mixed_delta(x, y, bank, plan, max_rank=rank, segments=plan.segments)
    return routed_linear(x, y, bank, plan)


def prepared(plan: Plan, backend: str = "torch") -> Plan:
    """The plan with what a backend needs of it once for all modules: "triton" takes float32 weights, and many
    tokens sorted by slot."""
    if backend != "triton" or plan.weights.requires_grad:
        return plan
    from molora_kernels.triton_ops import linear

    return replace(plan, weights=plan.weights.float(), segments=linear.sort_plan(plan))


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, row_scale: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias) if row_scale is None else int8_linear(x, weight, bias, row_scale)


def _masks(x: Tensor, bank: Bank, plan: Plan) -> bool:
    """Whether many tokens are multiplied with all adapters, and masked, faster than each with its own.

    A row of A and B costs two fifths in a product of whole matrices (measured on AVX2, ranks 16 and 64, 512
    tokens, four and eight adapters). Of no use where factors that nobody chose could leak (NaN), and in half
    widths, which torch multiplies slowly there.
    """
    if x.dtype != torch.float32 or len(plan.slots) < MANY_TOKENS:
        return False
    adapters, top = plan.gates.shape[1] - 1, plan.slots.shape[1]
    return adapters <= 3 * top and bank.finite and bank.out_scale is None and bank.out_bias is None


def _masked(x: Tensor, y: Tensor, bank: Bank, plan: Plan) -> Tensor:
    """y + B (mask (A x)), the second sum in place. x (..., in), y (..., out), which no one else holds."""
    columns = plan.columns[bank.layout]
    hidden = F.linear(x.reshape(-1, x.shape[-1]), bank.A)  # (N, R)
    hidden = torch.where(columns.chosen, hidden * columns.coefficient, torch.zeros_like(hidden))
    return y.view(-1, y.shape[-1]).addmm_(hidden, bank.B.t()).view(y.shape)


def _runs(x: Tensor, bank: Bank, plan: Plan, *more: Tensor | None) -> bool:
    if bank.extent is None or not cpu_ops.takes(x, *more, bank.A, bank.B, bank.base_bias):
        return False
    return not (torch.is_grad_enabled() and plan.weights.requires_grad)
