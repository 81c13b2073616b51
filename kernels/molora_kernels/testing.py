"""For tests of every backend: a float64 oracle that is too simple to be wrong, cases, and the comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molora_kernels.bank import Bank, Layout, Plan, make_extent, make_plan


@dataclass(frozen=True)
class SlotFactors:
    """One adapter of a module as the oracle takes it. A (r, in), B (out, r), magnitude ratio and bias
    (out,)."""

    A: Tensor
    B: Tensor
    scale: float
    out_scale: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True)
class Case:
    """Inputs of one op call. factors[k] belongs to slot k + 1, None = that adapter leaves the module
    alone."""

    x: Tensor  # (N, in)
    weight: Tensor  # (out, in)
    base_bias: Tensor | None  # (out,)
    factors: list[SlotFactors | None]
    slots: Tensor  # (N, J)
    weights: Tensor  # (N, J)

    @property
    def y(self) -> Tensor:
        return torch.nn.functional.linear(self.x, self.weight, self.base_bias)


def make_bank(
    factors: Sequence[SlotFactors | None], out: int, base_bias: Tensor | None = None
) -> tuple[Bank, Layout]:
    """The bank and layout (index 0) of a case's adapters."""
    present = [(slot, f) for slot, f in enumerate(factors, start=1) if f is not None]
    A = torch.cat([f.A for _, f in present])
    B = torch.cat([f.B for _, f in present], dim=1)
    owner = torch.cat([torch.full((f.A.shape[0],), slot, device=A.device) for slot, f in present])
    scale = torch.cat([torch.full((f.A.shape[0],), f.scale, device=A.device) for _, f in present])
    out_scale = out_bias = None
    if any(f.out_scale is not None for _, f in present):
        out_scale = torch.ones(len(factors) + 1, out, dtype=A.dtype, device=A.device)
        for slot, f in present:
            if f.out_scale is not None:
                out_scale[slot] = f.out_scale
    if any(f.bias is not None for _, f in present):
        out_bias = torch.zeros(len(factors) + 1, out, dtype=A.dtype, device=A.device)
        for slot, f in present:
            if f.bias is not None:
                out_bias[slot] = f.bias * f.scale
    every = [A, B] + [t for t in (out_scale, out_bias) if t is not None]
    finite = all(bool(t.isfinite().all()) for t in every)
    ranks = [0] + [0 if f is None else f.A.shape[0] for f in factors]
    extent = make_extent(ranks, A.device)
    slot_scale = torch.tensor([0.0] + [0.0 if f is None else f.scale for f in factors], device=A.device)
    # kernels take the transpose of B row by row
    stored = B.t().contiguous().t()
    bank = Bank(A, stored, owner, 0, out_scale, out_bias, base_bias, finite, extent, slot_scale)
    return bank, Layout(owner, scale.float())


def case_plan(case: Case, layout: Layout) -> Plan:
    return make_plan(case.slots, case.weights, len(case.factors) + 1, [layout], (case.x.shape[0],))


def oracle(case: Case) -> Tensor:
    """(N, out) float64, token by token and adapter by adapter, straight from the definition of the
    mixture."""
    x, W = case.x.double(), case.weight.double()
    bias = torch.zeros(W.shape[0], dtype=torch.float64) if case.base_bias is None else case.base_bias.double()
    rows = []
    for t in range(x.shape[0]):
        base = W @ x[t] + bias
        row = base.clone()
        for slot, weight in zip(case.slots[t].tolist(), case.weights[t].double(), strict=True):
            f = case.factors[slot - 1] if slot > 0 else None
            if f is None:
                continue
            own = W @ x[t] + f.scale * (f.B.double() @ (f.A.double() @ x[t]))
            if f.out_scale is not None:
                own = f.out_scale.double() * own
            own = own + bias
            if f.bias is not None:
                own = own + f.scale * f.bias.double()
            row = row + weight * (own - base)
        rows.append(row)
    return torch.stack(rows) if rows else torch.zeros(0, W.shape[0], dtype=torch.float64)


def random_case(
    seed: int,
    *,
    tokens: int,
    inputs: int,
    outputs: int,
    ranks: Sequence[int],
    top: int,
    dora: bool = False,
    biases: bool = False,
    base_share: float = 0.25,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A random case; a rank of 0 is an adapter that leaves the module alone; `base_share` of the choices are
    base."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    factors: list[SlotFactors | None] = []
    for index, rank in enumerate(ranks):
        if rank == 0:
            factors.append(None)
            continue
        out_scale = 1 + 0.3 * normal(outputs) if dora and index % 2 == 0 else None
        bias = normal(outputs) if biases and index % 2 == 1 else None
        factors.append(
            SlotFactors(
                normal(rank, inputs) / inputs**0.5, normal(outputs, rank), 0.5 + index, out_scale, bias
            )
        )
    slots = torch.randint(1, len(ranks) + 1, (tokens, top), generator=gen)
    slots = torch.where(torch.rand(tokens, top, generator=gen) < base_share, torch.zeros_like(slots), slots)
    weights = torch.rand(tokens, top, generator=gen)
    weight = normal(outputs, inputs) / inputs**0.5
    return Case(normal(tokens, inputs), weight, normal(outputs) if biases else None, factors, slots, weights)


def assert_close(actual: Tensor, expected: Tensor, *, max_error: float, rms_error: float) -> None:
    """Both errors are relative to the RMS of `expected`. Raises AssertionError with the numbers."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    wrong = (actual.double() - expected.double()).abs()
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    largest, rms = float(wrong.max() / scale), float(wrong.square().mean().sqrt() / scale)
    # written so that NaN fails
    assert largest <= max_error and rms <= rms_error, (
        f"error relative to the RMS of the reference: max {largest:.3g} (allowed {max_error:.3g}), "
        f"RMS {rms:.3g} (allowed {rms_error:.3g})"
    )
