"""What a router has seen and decided, kept with the KV cache and following everything that happens to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from molora_cli.core.routed.route import BASE, Route

UNKNOWN = -1  # in the id history: a position whose token is not known
State = dict[str, Tensor]


class RouterState:
    """History of one cache: aligned with its positions, padding included.

    ids: (B, P) int64, -1 = unknown. mask: (B, P) bool, False = padding. indices, gates: (B, P, G, k), what
    was decided; the base fills up where blocks differ in k. scores: (B, P, G, E), or None where some block
    was not scored. stages: the router's running state after these tokens, or None where it has to be computed
    from `ids` first. owner: whose routes these are (the engine of one routed model). router: whose `stages`.
    first: keys and values of the base alone, for routers that read a first pass; None = to be computed again.
    """

    def __init__(self, owner: object, batch: int, device: torch.device) -> None:
        self.owner = owner
        self.router: object = None
        self.stages: list[State] | None = None
        self.first: Cache | None = None
        self._device = device
        self._clear(batch)

    def _clear(self, batch: int) -> None:
        self.ids = torch.zeros(batch, 0, dtype=torch.int64, device=self._device)
        self.mask = torch.zeros(batch, 0, dtype=torch.bool, device=self._device)
        self.indices = torch.zeros(batch, 0, 1, 1, dtype=torch.int16, device=self._device)
        self.gates = torch.zeros(batch, 0, 1, 1, device=self._device)
        self.scores: Tensor | None = None
        self.stages = None
        self.first = None

    @classmethod
    def unknown(cls, owner: object, batch: int, length: int, device: torch.device) -> RouterState:
        """The state of a cache that was filled by somebody else: positions without known tokens."""
        state = cls(owner, batch, device)
        ids = torch.full((batch, length), UNKNOWN, device=device)
        nothing = torch.full((batch, length, 1, 1), BASE, device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        return state.extended(ids, mask, Route(nothing, torch.zeros_like(nothing, dtype=torch.float32)))

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def complete(self) -> bool:
        """Every real token of the history is known, so that a router can be run over it."""
        return not bool(((self.ids == UNKNOWN) & self.mask).any())

    def extended(
        self,
        ids: Tensor,
        mask: Tensor,
        route: Route,
        scores: Tensor | None = None,
        stages: list[State] | None = None,
        router: object = None,
    ) -> RouterState:
        """A new state with T more tokens: ids (B, T), mask (B, T), route (B, T, [G,] k), scores (B, T, G,
        E)."""
        route = route.grouped
        new = copy.copy(self)
        new.ids = torch.cat([self.ids, ids.to(self._device)], dim=1)
        new.mask = torch.cat([self.mask, mask.to(self._device)], dim=1)
        new.indices = _joined(self.indices, route.indices.to(self._device, torch.int16), BASE)
        new.gates = _joined(self.gates, route.gates.detach().to(self._device, torch.float32), 0.0)
        new.scores = None
        if scores is not None:
            scores = scores.detach().to(self._device, torch.float32)
            if self.length == 0:
                new.scores = scores
            elif self.scores is not None and self.scores.shape[2:] == scores.shape[2:]:
                new.scores = torch.cat([self.scores, scores], dim=1)
        new.stages, new.router, new.first = stages, router, None
        return new

    # -- what happens to the cache ------------------------------------------
    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order (beams, or a smaller batch). rows: (B',) int64."""
        self._each(lambda tensor: tensor.index_select(0, rows.to(tensor.device)))
        if self.first is not None:
            self.first.batch_select_indices(rows)

    def repeat(self, times: int) -> None:
        """Each row `times` in a row."""
        self._each(lambda tensor: tensor.repeat_interleave(times, dim=0))
        if self.first is not None:
            self.first.batch_repeat_interleave(times)

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on. Running averages cannot be taken back: they are
        recomputed."""
        if length >= self.length:
            return
        if self.first is not None:
            try:
                self.first.crop(length - self.length)  # negative: that many from the end, in every version
            except RuntimeError:  # sliding windows and recurrent states cannot go back
                self.first = None
        self.stages = None
        self._each(lambda tensor: tensor[:, :length])

    def reset(self) -> None:
        """Back to before the first token."""
        self._clear(self.batch)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.ids, self.mask = change(self.ids), change(self.mask)
        self.indices, self.gates = change(self.indices), change(self.gates)
        self.scores = None if self.scores is None else change(self.scores)
        if self.stages is not None:
            self.stages = [{name: change(t) for name, t in stage.items()} for stage in self.stages]

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterState:
        # the tensors are copied; the model and the router they belong to are the same ones
        new = copy.copy(self)
        memo[id(self)] = new
        new._each(torch.clone)
        new.first = copy.deepcopy(self.first, memo)
        return new


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


class _Follows:
    """Mixed into a cache's own class: the router's state does what the keys and values do."""

    molora_state: RouterState

    def reorder_cache(self, beam_idx: Tensor) -> Any:
        result = super().reorder_cache(beam_idx)  # type: ignore[misc]
        self.molora_state.select(beam_idx)
        return result

    def batch_select_indices(self, indices: Tensor) -> Any:
        result = super().batch_select_indices(indices)  # type: ignore[misc]
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self.molora_state.select(indices)
        return result

    def batch_repeat_interleave(self, repeats: int) -> Any:
        result = super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self.molora_state.repeat(repeats)
        return result

    def crop(self, *args: Any, **kwargs: Any) -> Any:
        # the argument's meaning differs between versions of transformers: ask the cache what is left
        result = super().crop(*args, **kwargs)  # type: ignore[misc]
        self.molora_state.truncate(int(self.get_seq_length()))  # type: ignore[attr-defined]
        return result

    def reset(self) -> Any:
        result = super().reset()  # type: ignore[misc]
        self.molora_state.reset()
        return result


_following: dict[type, type] = {}


def bind(cache: Cache, state: RouterState) -> None:
    """Make `state` the router state of `cache` from here on. The cache stays an instance of its own class."""
    kind = type(cache)
    if not issubclass(kind, _Follows):
        if kind not in _following:
            _following[kind] = type(kind.__name__, (_Follows, kind), {"__module__": kind.__module__})
        cache.__class__ = _following[kind]
    cache.molora_state = state  # type: ignore[attr-defined]


def state_of(cache: Cache | None) -> RouterState | None:
    """The router state of a cache, None where it has none."""
    return getattr(cache, "molora_state", None)


def cached_length(cache: Cache | None) -> int:
    """Positions that a cache holds; 0 where there is none, or where it keeps no positions (recurrent
    states)."""
    if cache is None:
        return 0
    try:
        return int(cache.get_seq_length())
    except (ValueError, TypeError, NotImplementedError):
        state = state_of(cache)
        return 0 if state is None else state.length
