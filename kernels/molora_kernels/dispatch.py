"""The per-token mixture in plain torch: the twin that faster kernels are held against.

    y_t + sum_k g_tk (f_k(x_t) - y_t)            f_k(x) = m_k * (W x + s_k B_k A_k x) + bias + s_k b_k

with m_k = 1 and b_k = 0 for plain LoRA (Hu et al., arXiv 2106.09685, section 4.1), m_k = magnitude / row
norm of W + s_k B_k A_k for DoRA (Liu et al., arXiv 2402.09353, eq. 5). Every adapter's factors meet every
token (dense) and `where` keeps only the chosen ones: a product with zero would let NaN and Inf through.
No host sync, no data-dependent shape; traces into one graph; differentiable in x, y, A, B and the gates.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_kernels.bank import Bank, Columns, Plan


def routed_linear(x: Tensor, y: Tensor, bank: Bank, plan: Plan) -> Tensor:
    """The mixture of one linear module.

    x: (..., in) and y = W x + bias: (..., out), any strides, leading sizes multiplying to the plan's N.
    Returns (..., out) in y's dtype. A token with no slot chosen gets y's own values.
    """
    hidden = F.linear(x.reshape(-1, x.shape[-1]).to(bank.A.dtype), bank.A)  # (N, R)
    return _mixture(hidden, y, bank, plan)


def routed_embedding(
    ids: Tensor, y: Tensor, bank: Bank, plan: Plan, embed_scale: Tensor | float = 1.0
) -> Tensor:
    """The mixture of an embedding: x is the one-hot row of each id, so A x is a column of A.

    ids: (...) int64, y: (..., out) the embedding's output, bank.A: (R, vocabulary), embed_scale: the factor
    that some embeddings put on their own output.
    """
    hidden = F.embedding(ids.reshape(-1), bank.A.t())  # (N, R)
    return _mixture(hidden * embed_scale, y, bank, plan)


def _mixture(hidden: Tensor, y: Tensor, bank: Bank, plan: Plan) -> Tensor:
    columns = plan.columns[bank.layout]
    rows = y.reshape(-1, y.shape[-1])  # (N, out)
    delta = (_delta_together if bank.finite else _delta_apart)(hidden, rows, bank, plan, columns)
    return (rows + delta.to(rows.dtype)).reshape(y.shape)


def _gated(hidden: Tensor, columns: Columns, dtype: torch.dtype) -> Tensor:
    gated = hidden * columns.coefficient
    return torch.where(columns.chosen, gated, torch.zeros_like(gated)).to(dtype)  # (N, R)


def _delta_together(hidden: Tensor, rows: Tensor, bank: Bank, plan: Plan, columns: Columns) -> Tensor:
    """(N, out): all slots in one product; right where every factor is finite."""
    expand = bank.B
    if bank.out_scale is not None:
        expand = expand * bank.out_scale.index_select(0, bank.owner).t().to(expand.dtype)
    delta = F.linear(_gated(hidden, columns, expand.dtype), expand)
    if bank.out_scale is not None:
        plain = rows if bank.base_bias is None else rows - bank.base_bias
        delta = delta + plain * (plan.gates @ (bank.out_scale.to(plan.gates.dtype) - 1))
    if bank.out_bias is not None:
        delta = delta + plan.gates @ bank.out_bias.to(plan.gates.dtype)
    return delta


def _delta_apart(hidden: Tensor, rows: Tensor, bank: Bank, plan: Plan, columns: Columns) -> Tensor:
    """(N, out): slot by slot, each seen only by the tokens that chose it."""
    gated = _gated(hidden, columns, bank.B.dtype)
    plain = rows if bank.base_bias is None else rows - bank.base_bias
    total = torch.zeros_like(rows)
    for slot in range(1, plan.gates.shape[1]):
        mine = bank.owner == slot  # (R,)
        part = F.linear(
            torch.where(mine, gated, torch.zeros_like(gated)),
            torch.where(mine, bank.B, torch.zeros_like(bank.B)),
        )
        gate = plan.gates[:, slot : slot + 1]
        if bank.out_scale is not None:
            scale = bank.out_scale[slot].to(gate.dtype)
            part = part * scale + plain * (gate * (scale - 1))
        if bank.out_bias is not None:
            part = part + gate * bank.out_bias[slot].to(gate.dtype)
        total = torch.where(plan.chosen[:, slot : slot + 1], total + part, total)
    return total
