"""What a router has seen and decided, kept with the KV cache and following everything that happens to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from molora_cli.core.routed.history import History, OneRouted
from molora_cli.core.routed.route import BASE, Route

_MOST_APART = 256  # single tokens, of some kilobytes each
UNKNOWN = -1  # in the id history: a position whose token is not known
State = dict[str, Tensor]


class RouterState:
    """History of one cache: aligned with its positions, padding included.

    stages: the router's running state after these tokens, or None where it has to be computed from the ids
    first. owner: whose routes these are (the engine of one routed model). router: whose `stages`. first: keys
    and values of the base alone, for routers that read a first pass; None = to be computed again.
    `extended` gives a new state and leaves this one as it is; `push` changes this one.
    """

    def __init__(self, owner: object, batch: int, device: torch.device) -> None:
        self.owner = owner
        self.router: object = None
        self.stages: list[State] | None = None
        self.first: Cache | None = None
        self._joined = History.empty(batch, device)
        self._tail: list[OneRouted] = []  # single tokens, joined to the others when somebody asks

    @classmethod
    def unknown(cls, owner: object, batch: int, length: int, device: torch.device) -> RouterState:
        """The state of a cache that was filled by somebody else: positions without known tokens."""
        state = cls(owner, batch, device)
        ids = torch.full((batch, length), UNKNOWN, device=device)
        nothing = torch.full((batch, length, 1, 1), BASE, device=device)
        mask = torch.ones_like(ids, dtype=torch.bool)
        return state.extended(ids, mask, Route(nothing, torch.zeros_like(nothing, dtype=torch.float32)))

    @property
    def history(self) -> History:
        """All tokens, their masks, routes and scores."""
        if self._tail:
            self._joined, self._tail = self._joined.with_tokens(self._tail), []
        return self._joined

    @property
    def batch(self) -> int:
        return self._joined.batch

    @property
    def length(self) -> int:
        return len(self._joined) + len(self._tail)

    @property
    def complete(self) -> bool:
        """Every real token of the history is known, so that a router can be run over it."""
        history = self.history
        return not bool(((history.ids == UNKNOWN) & history.mask).any())

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
        new = copy.copy(self)
        new._joined, new._tail = self.history.extended(ids, mask, route, scores), []
        new.stages, new.router, new.first = stages, router, None
        return new

    def push(self, token: OneRouted, stages: list[State] | None, router: object) -> None:
        """One more token of a single text, in place: nothing is copied between two tokens of an answer."""
        if self._tail and (len(self._tail) == _MOST_APART or not self._tail[-1].alike(token)):
            self._joined, self._tail = self.history, []
        self._tail.append(token)
        self.stages, self.router, self.first = stages, router, None

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
        self._joined = self.history.each(lambda tensor: tensor[:, :length])

    def reset(self) -> None:
        """Back to before the first token."""
        self._joined, self._tail = History.empty(self.batch, self._joined.ids.device), []
        self.stages = self.first = None

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self._joined = self.history.each(change)
        if self.stages is not None:
            self.stages = [{name: change(t) for name, t in stage.items()} for stage in self.stages]

    def __deepcopy__(self, memo: dict[int, Any]) -> RouterState:
        # the tensors are copied; the model and the router they belong to are the same ones
        new = copy.copy(self)
        new._joined, new._tail = self.history, []
        memo[id(self)] = new
        new._each(torch.clone)
        new.first = copy.deepcopy(self.first, memo)
        return new


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
