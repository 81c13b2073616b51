"""Adapters that come and go in storage that stays: compiled and captured graphs keep their addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from molora_kernels.bank import Bank, Layout, make_extent


class HotBank:
    """The adapters of one module in slots of fixed place and size.

    capacities: the largest rank of slots 1, 2, ... (0 = this slot never touches the module): memory is what
    their sum takes, so a bundle's own ranks waste nothing and equal ones let any adapter take any slot. All
    tensors are written in place. Slot 0 is the zero adapter and owns nothing.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        inputs: int,
        outputs: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        base_bias: Tensor | None = None,
        dora: bool = False,
        biases: bool = False,
    ) -> None:
        """base_bias: (out,), the module's own, needed beside `dora`; dora, biases: room for DoRA factors and
        biases.
        """
        slots, rows = len(capacities) + 1, sum(capacities)
        self.capacities = (0, *capacities)
        self.A = torch.zeros(rows, inputs, dtype=dtype, device=device)
        self.B = torch.zeros(rows, outputs, dtype=dtype, device=device).t()  # (out, R), stored by columns
        self.extent = make_extent(self.capacities, device)
        self.extent[:, 1] = 0
        self.scale = torch.zeros(slots, device=device)
        self.owner = torch.zeros(rows, dtype=torch.int64, device=device)
        self.row_scale = torch.zeros(rows, device=device)
        self.out_scale = torch.ones(slots, outputs, device=device) if dora else None
        self.out_bias = torch.zeros(slots, outputs, device=device) if biases else None
        self.base_bias = base_bias

    def bank(self, layout: int = 0) -> Bank:
        """The bank over this storage; it stays right whatever is put in or cleared."""
        return Bank(
            self.A,
            self.B,
            self.owner,
            layout,
            self.out_scale,
            self.out_bias,
            self.base_bias,
            # what comes later is not known: the twin keeps the slots apart
            finite=False,
            extent=self.extent,
            scale=self.scale,
            max_rank=max(self.capacities),
        )

    def layout(self) -> Layout:
        """Owners and scales of the columns for the torch twin, over the same storage."""
        return Layout(self.owner, self.row_scale)

    def put(
        self,
        slot: int,
        A: Tensor,
        B: Tensor,
        scale: float,
        *,
        out_scale: Tensor | None = None,
        out_bias: Tensor | None = None,
    ) -> None:
        """Copy an adapter into a slot, in place of what was there.

        A (r, in), B (out, r) without scale; out_scale, out_bias: (out,) as in `Bank`. Raises ValueError for
        a slot that is not there, or factors that do not fit it.
        """
        rank = A.shape[0]
        if not 0 < slot < len(self.capacities):
            raise ValueError(f"there is no slot {slot} (slots: 1 to {len(self.capacities) - 1})")
        sizes = (tuple(A.shape[1:]), tuple(B.shape))
        if sizes != (tuple(self.A.shape[1:]), (self.B.shape[0], rank)):
            raise ValueError(f"factors {tuple(A.shape)} and {tuple(B.shape)} do not fit the module")
        if rank > self.capacities[slot]:
            raise ValueError(
                f"rank {rank} is above the {self.capacities[slot]} that slot {slot} has room for"
            )
        if (out_scale is not None and self.out_scale is None) or (
            out_bias is not None and self.out_bias is None
        ):
            raise ValueError("this bank was made without room for DoRA factors or biases")
        self.clear(slot)
        first = int(self.extent[slot, 0])
        rows = slice(first, first + rank)
        self.A[rows].copy_(A)
        self.B[:, rows].copy_(B)
        self.owner[rows] = slot
        self.row_scale[rows] = scale
        self.scale[slot] = scale
        if self.out_scale is not None and out_scale is not None:
            self.out_scale[slot].copy_(out_scale)
        if self.out_bias is not None and out_bias is not None:
            self.out_bias[slot].copy_(out_bias)
        self.extent[slot, 1] = rank

    def clear(self, slot: int) -> None:
        """Empty a slot: tokens that choose it get the base."""
        first = int(self.extent[slot, 0])
        rows = slice(first, first + self.capacities[slot])
        self.extent[slot, 1] = 0
        self.A[rows] = 0
        self.B[:, rows] = 0
        self.owner[rows] = 0
        self.row_scale[rows] = 0
        self.scale[slot] = 0
        if self.out_scale is not None:
            self.out_scale[slot] = 1
        if self.out_bias is not None:
            self.out_bias[slot] = 0
