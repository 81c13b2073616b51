"""The adapters of one module, of different ranks, side by side; and the routes of one block of tokens.

    A  (R, in)   rows of all adapters, one adapter after another         R = sum of the ranks
    B  (out, R)  columns likewise
                 +--- slot 1 ---+-- slot 3 --+      slot 0 is the zero adapter: it owns no column,
    owner (R,)     1  1  1  1     3  3  3           an adapter that leaves this module alone owns none either

A slot is 1 + the adapter's place in the bundle, so that routes (-1 = base) map to slots by adding one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """What a module's columns get from each token: coefficient and membership.

    coefficient: (N, R) float, gate of the column's slot times the column's scale. chosen: (N, R) bool.
    """

    coefficient: Tensor
    chosen: Tensor


class Sorted(NamedTuple):
    """Of N tokens with J choices among S slots, for tiles of `block` rows.

    order: (J, N) int32 token ids by slot, ties in the order of the tokens. offsets: (J, S+1) int32: s owns
    order[j, offsets[j, s]:offsets[j, s+1]]. tiles: (J, S) int32: tiles of `block` rows for slots 0 to s.
    """

    order: Tensor
    offsets: Tensor
    tiles: Tensor
    block: int


@dataclass(frozen=True)
class Plan:
    """The routes of N tokens, ready for every module of a group of layers.

    slots: (N, J) int64, 0 = base. weights: (N, J) float. gates: (N, S) float, the weights summed per slot
    (the base's column is zero). chosen: (N, S) bool. columns: one entry per layout of the modules, in their
    order. shape: leading dimensions of the block, (B, T) or what a head sees of it; N is their product.
    segments: the tokens sorted by slot, for kernels that take one slot's tokens at a time (`ops.prepared`).
    """

    slots: Tensor
    weights: Tensor
    gates: Tensor
    chosen: Tensor
    columns: tuple[Columns, ...]
    shape: tuple[int, ...]
    segments: Sorted | None = None


@dataclass(frozen=True)
class Layout:
    """Which slot owns each column of a module, and its scale. Modules with equal layouts share their
    `Columns`.

    owner: (R,) int64 slot ids. scale: (R,) float32.
    """

    owner: Tensor
    scale: Tensor

    def columns(self, gates: Tensor, chosen: Tensor) -> Columns:
        """gates, chosen: (N, S) of a plan -> the (N, R) coefficients of this layout."""
        return Columns(gates.index_select(1, self.owner) * self.scale, chosen.index_select(1, self.owner))

    def to(self, device: torch.device) -> Layout:
        """The layout on a device; itself where it is there already."""
        if self.owner.device == device:
            return self
        return Layout(self.owner.to(device), self.scale.to(device))


def make_plan(
    slots: Tensor, weights: Tensor, n_slots: int, layouts: Sequence[Layout], shape: tuple[int, ...]
) -> Plan:
    """Plan of N tokens from slots (N, J) int64 in [0, n_slots) and weights (N, J) float.

    A slot named twice in one token's route gets the sum of its weights. Differentiable in `weights`; no host
    sync.
    """
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    empty = torch.zeros(slots.shape[0], n_slots, dtype=weights.dtype, device=slots.device)
    gates = empty.scatter_add(1, slots, torch.where(slots > 0, weights, torch.zeros_like(weights)))
    chosen = torch.zeros_like(empty, dtype=torch.bool).scatter(1, slots, True)
    chosen[:, 0] = False
    columns = tuple(layout.columns(gates, chosen) for layout in layouts)
    return Plan(slots, weights, gates, chosen, columns, shape)


def make_extent(ranks: Sequence[int], device: torch.device | None = None) -> Tensor:
    """(S, 2) int64: first column and number of columns of slots whose columns follow one another."""
    firsts = [0, *itertools.accumulate(ranks)][:-1]
    return torch.tensor(list(zip(firsts, ranks, strict=True)), dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Bank:
    """The factors of one module's adapters.

    A: (R, in), B: (out, R) as in the files, without scale. layout: index into `Plan.columns`. owner: (R,)
    int64. out_scale: (S, out) or None: per slot, the factor on the adapted output without the module's bias
    (DoRA's magnitude / row norm; one where a slot has none). out_bias: (S, out) or None, added per slot,
    scale folded in (lora_bias). base_bias: (out,) or None, the module's own bias, needed beside `out_scale`.
    finite: no NaN or Inf in any factor; otherwise the slots are computed apart, so that none leaks.
    extent: (S, 2) int64, first column and number of columns of each slot, and scale: (S,) float32, for
    kernels that gather by slot instead of masking; None where only the torch twin runs. max_rank: what no
    slot is above, now or later, so that buffers are sized without a look at the device; None = read it.
    """

    A: Tensor
    B: Tensor
    owner: Tensor
    layout: int
    out_scale: Tensor | None = None
    out_bias: Tensor | None = None
    base_bias: Tensor | None = None
    finite: bool = True
    extent: Tensor | None = None
    scale: Tensor | None = None
    max_rank: int | None = None
