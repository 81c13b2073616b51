"""What a router has seen and decided at the positions of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from molora_cli.core.routed.route import BASE, Route


@dataclass(frozen=True)
class OneRouted:
    """One token and its route over G groups of layers, as a decode step had it: read when somebody asks.

    slots, gates: the step's tables (L, 1, TOP), which nobody writes again. firsts: first layer of each group.
    width: adapters that the token takes at most. said: (1, 1, E) float64 log-probabilities of each group,
    empty where it was not scored.
    """

    token: int
    slots: Tensor
    gates: Tensor
    firsts: Sequence[int]
    width: int
    said: Sequence[Tensor] = ()

    def alike(self, other: OneRouted) -> bool:
        """Whether both can be put together."""
        return (
            len(self.firsts) == len(other.firsts)
            and self.width == other.width
            and [part.shape for part in self.said] == [part.shape for part in other.said]
        )

    def route(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Indices (G, k), -1 = base, and gates (G, k)."""
        slots, gates = (t.numpy()[self.firsts, 0, : self.width] for t in (self.slots, self.gates))
        return slots - 1, gates

    def scores(self) -> NDArray[np.float32] | None:
        """Log-probabilities (G, E)."""
        if not self.said:
            return None
        return np.concatenate([part.numpy()[0] for part in self.said]).astype(np.float32)


@dataclass(frozen=True)
class History:
    """P positions of B texts, padding included.

    ids (B, P) int64, -1 = unknown; mask (B, P) bool, False = padding; indices int16 and gates float32
    (B, P, G, k), the base fills up where blocks differ in k; scores (B, P, G, E) float32, or None where some
    block was not scored.
    """

    ids: Tensor
    mask: Tensor
    indices: Tensor
    gates: Tensor
    scores: Tensor | None = None

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> History:
        return cls(
            torch.zeros(batch, 0, dtype=torch.int64, device=device),
            torch.zeros(batch, 0, dtype=torch.bool, device=device),
            torch.zeros(batch, 0, 1, 1, dtype=torch.int16, device=device),
            torch.zeros(batch, 0, 1, 1, device=device),
        )

    def __len__(self) -> int:
        return self.ids.shape[1]

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    def extended(self, ids: Tensor, mask: Tensor, route: Route, scores: Tensor | None) -> History:
        """With T more tokens: ids (B, T), mask (B, T), route (B, T, [G,] k), scores (B, T, G, E)."""
        route, where = route.grouped, self.ids.device
        joined = None
        if scores is not None:
            scores = scores.detach().to(where, torch.float32)
            if len(self) == 0:
                joined = scores
            elif self.scores is not None and self.scores.shape[2:] == scores.shape[2:]:
                joined = torch.cat([self.scores, scores], dim=1)
        return History(
            torch.cat([self.ids, ids.to(where)], dim=1),
            torch.cat([self.mask, mask.to(where)], dim=1),
            _joined(self.indices, route.indices.to(where, torch.int16), BASE),
            _joined(self.gates, route.gates.detach().to(where, torch.float32), 0.0),
            joined,
        )

    def with_tokens(self, tokens: Sequence[OneRouted]) -> History:
        """With single tokens of one text behind it, all alike."""
        ids = torch.tensor([[token.token for token in tokens]])
        routes = [token.route() for token in tokens]
        indices, gates = (torch.from_numpy(np.stack(each)[None]) for each in zip(*routes, strict=True))
        said = [scores for scores in (token.scores() for token in tokens) if scores is not None]
        scores = torch.from_numpy(np.stack(said)[None]) if said else None
        return self.extended(ids, torch.ones_like(ids, dtype=torch.bool), Route(indices, gates), scores)

    def each(self, change: Callable[[Tensor], Tensor]) -> History:
        """`change` applied to every tensor."""
        scores = None if self.scores is None else change(self.scores)
        return History(change(self.ids), change(self.mask), change(self.indices), change(self.gates), scores)


def _joined(before: Tensor, after: Tensor, fill: float) -> Tensor:
    """Both (B, T, G, k) along T; a single group is spread over all, and `fill` makes up for a smaller k."""
    if before.shape[2:] == after.shape[2:]:
        return torch.cat([before, after], dim=1)
    if 1 != before.shape[2] != after.shape[2] != 1:
        # cut into other layer groups than before: the earlier decisions have no place any more
        before = torch.full_like(before[:, :, :1], fill)
    groups, width = max(before.shape[2], after.shape[2]), max(before.shape[3], after.shape[3])
    parts = [part.expand(-1, -1, groups, -1) for part in (before, after)]
    return torch.cat([F.pad(part, (0, width - part.shape[3]), value=fill) for part in parts], dim=1)
