"""The decision for each token: which adapters, at which gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from molora_cli.errors import InputError

BASE = -1


@dataclass(frozen=True)
class Route:
    """Per token, the adapters it takes and their gates.

    indices: (B, T, k) or (B, T, G, k) integers, -1 = base only; G groups of layers, from the input up.
    gates: the same shape, float. The mixture is y = W x + sum_k gates_k (f_k(x) - W x), f_k the module with
    adapter k alone (design: for plain LoRA W x + sum_k gates_k s_k B_k A_k x).
    Raises InputError where shapes or dtypes disagree.
    """

    indices: Tensor
    gates: Tensor

    def __post_init__(self) -> None:
        if self.indices.shape != self.gates.shape:
            raise InputError(
                f"route indices have shape {tuple(self.indices.shape)} and gates {tuple(self.gates.shape)}",
                "give both as (B, T, k), or (B, T, G, k) over groups of layers",
            )
        if self.indices.dim() not in (3, 4):
            raise InputError(
                f"a route is (B, T, k) or (B, T, G, k), not {tuple(self.indices.shape)}",
                "add the missing dimensions",
            )
        if self.indices.is_floating_point() or not self.gates.is_floating_point():
            raise InputError("route indices must be integers and gates floats", "convert them")

    @property
    def grouped(self) -> Route:
        """The same route with an explicit group dimension, (B, T, G, k)."""
        if self.indices.dim() == 4:
            return self
        return Route(self.indices.unsqueeze(2), self.gates.unsqueeze(2))

    @property
    def groups(self) -> int:
        return self.indices.shape[2] if self.indices.dim() == 4 else 1

    def each_group(self) -> list[Route]:
        """The routes (B, T, 1, k) of its groups."""
        own = self.grouped
        pairs = zip(own.indices.split(1, dim=2), own.gates.split(1, dim=2), strict=True)
        return [Route(indices, gates) for indices, gates in pairs]

    @property
    def all_base(self) -> bool:
        """Whether no token takes an adapter, and no gradient is wanted of the gates."""
        return not self.gates.requires_grad and not bool((self.indices != BASE).any())

    @classmethod
    def constant(
        cls, indices: list[int], gates: list[float], batch: int, length: int, device: object = None
    ) -> Route:
        """One route for every token of a (batch, length) block."""
        shape = (batch, length, len(indices))
        return cls(
            torch.tensor(indices, device=device).expand(shape),  # type: ignore[arg-type]
            torch.tensor(gates, dtype=torch.float32, device=device).expand(shape),  # type: ignore[arg-type]
        )


def write_route(route: Route, layers: tuple[int, int], slots: Tensor, gates: Tensor) -> None:
    """One token's route (1, 1, 1, k) into the rows [first, end) of a decode step's tables (L, 1, TOP)."""
    first, end = layers
    k = route.indices.shape[-1]
    to_slots, to_gates = slots.numpy(), gates.numpy()  # the same memory, in fewer and shorter calls
    to_slots[first:end, 0, :k] = route.indices.numpy()[0, 0, 0] + 1
    to_gates[first:end, 0, :k] = route.gates.detach().float().numpy()[0, 0, 0]
