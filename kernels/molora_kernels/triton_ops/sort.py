"""The routing plan on the device: for each choice j, the tokens in stable order of their slots."""

from __future__ import annotations

import torch
from torch import Tensor

from molora_kernels.bank import Sorted
from molora_kernels.triton_ops import tiles


def sort_by_slot(slots: Tensor, n_slots: int, block: int) -> Sorted:
    """Sort (N, J) integer slots in [0, n_slots) with three launches; shapes depend on N, J and S alone.

    No host sync: it may be captured in a CUDA graph. Raises ValueError for a `block` that is no power of two.
    """
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    order, offsets, upto = _sort(slots, n_slots, block)
    return Sorted(order, offsets, upto, block)


def sort_by_slot_torch(slots: Tensor, n_slots: int, block: int) -> Sorted:
    """The twin: the same integers from torch.argsort(stable=True)."""
    order = torch.argsort(slots, dim=0, stable=True).t().int()
    chosen = slots[:, :, None] == torch.arange(n_slots, device=slots.device)  # (N, J, S)
    counts = chosen.sum(0)
    offsets = torch.nn.functional.pad(counts.cumsum(1), (1, 0)).int()
    return Sorted(order.contiguous(), offsets, ((counts + block - 1) // block).cumsum(1).int(), block)


@torch.library.custom_op("molora_triton::sort_by_slot", mutates_args=())
def _sort(slots: Tensor, n_slots: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    from molora_kernels.triton_ops import _sort as device

    tokens, choices = slots.shape
    order, offsets, upto = _empty(slots, n_slots)
    if tokens == 0:
        return order, offsets.zero_(), upto.zero_()
    width = tiles.power_of_two(n_slots, 2)
    rows = tiles.sort_block(n_slots)
    blocks = -(-tokens // rows)
    counts = slots.new_empty(choices, blocks, width, dtype=torch.int32)
    base = torch.empty_like(counts)
    strides = (slots.stride(0), slots.stride(1))
    with torch.cuda.device_of(slots):  # Triton launches on the current device
        device.hist[(blocks, choices)](slots, counts, tokens, *strides, SP=width, BT=rows)
        chunk = max(2, min(tiles.power_of_two(blocks, 2), tiles.TILE_LIMIT // width))
        device.scan[(choices,)](counts, base, offsets, upto, blocks, n_slots, SP=width, NB=chunk, BM=block)
        device.scatter[(blocks, choices)](slots, base, order, tokens, *strides, SP=width, BT=rows)
    return order, offsets, upto


@_sort.register_fake
def _(slots: Tensor, n_slots: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(slots, n_slots)


def _empty(slots: Tensor, n_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, choices = slots.shape
    sizes = ((choices, tokens), (choices, n_slots + 1), (choices, n_slots))
    order, offsets, upto = (slots.new_empty(*size, dtype=torch.int32) for size in sizes)
    return order, offsets, upto
