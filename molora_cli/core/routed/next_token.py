"""A decision about one token, which somebody else runs: a compiled step instead of the base's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor
from transformers.cache_utils import Cache

from molora_cli.core.routed.history import OneRouted
from molora_cli.core.routed.outputs import Routed
from molora_cli.core.routed.route import BASE, Route, write_route
from molora_cli.core.routed.state import RouterState, cached_length, state_of
from molora_cli.core.trace import Trace
from molora_cli.errors import MoloraError

if TYPE_CHECKING:
    from molora_cli.core.router.single import OneToken
    from molora_cli.core.router.stack import RouterStack

Planned = list[tuple[tuple[int, int], Route]]  # [first, end) of layers with their route (1, 1, 1, k)


class Traced(Protocol):
    def trace(self) -> Trace: ...


class NextToken(Protocol):
    """slots and gates are a step's tables, (L, 1, TOP) int64 and float32; rows that are not written take the
    base. width: adapters that the token takes at most. taps: layers whose input tells the rest."""

    @property
    def width(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def write(self, slots: Tensor, gates: Tensor) -> None:
        """What is known before the token runs."""

    def tap(self, layer: int, hidden: Tensor, slots: Tensor, gates: Tensor) -> None:
        """What is known with hidden (1, 1, d), the input of one of `taps`."""

    def finish(self) -> Traced:
        """To be called once the token's keys and values are cached."""


@dataclass(frozen=True)
class PlannedToken:
    """A route that was given, or any router's. planned: what is known before; more: of a tap."""

    planned: Planned
    width: int
    taps: tuple[int, ...]
    more: Callable[[int, Tensor], Planned]
    finish: Callable[[], Routed]

    def write(self, slots: Tensor, gates: Tensor) -> None:
        for layers, route in self.planned:
            write_route(route, layers, slots, gates)

    def tap(self, layer: int, hidden: Tensor, slots: Tensor, gates: Tensor) -> None:
        for layers, route in self.more(layer, hidden):
            write_route(route, layers, slots, gates)


@dataclass(frozen=True)
class Joining:
    """A token of one text on its way to `past`, the state of the cache. adapters, meta: of its trace."""

    token: int
    past: RouterState
    adapters: tuple[str, ...]
    meta: Mapping[str, Any]


class SingleNext:
    """A router's, by `SingleToken`."""

    def __init__(self, one: OneToken, taps: tuple[int, ...], into: Joining) -> None:
        self._one, self._into, self.taps = one, into, taps
        self._tables: tuple[Tensor, Tensor] | None = None
        self.width, self.tap = one.single.width, one.tap

    def write(self, slots: Tensor, gates: Tensor) -> None:
        self._tables = slots, gates
        self._one.write(slots, gates)

    def finish(self) -> Traced:
        one, into, single = self._one, self._into, self._one.single
        said = [part for part in one.scores if part is not None]
        if self._tables is None or len(said) < len(one.scores):
            raise MoloraError(
                "the router never saw the input of a layer that it reads",
                "the base must run all its layers in order; use a router on token ids with this one",
            )
        routed = OneRouted(into.token, *self._tables, single.firsts, self.width, said)
        into.past.push(routed, one.after, single.stack)
        return _OneTraced(routed, into, single.stack.experts, single.meta)


class GivenNext:
    """A route (1, 1, [1,] k) that every layer takes."""

    taps = ()

    def __init__(self, route: Route, layers: int, into: Joining) -> None:
        self._route, self._layers, self._into = route.grouped, layers, into
        self._tables: tuple[Tensor, Tensor] | None = None
        self.width = route.indices.shape[-1]

    def write(self, slots: Tensor, gates: Tensor) -> None:
        self._tables = slots, gates
        write_route(self._route, (0, self._layers), slots, gates)

    def tap(self, layer: int, hidden: Tensor, slots: Tensor, gates: Tensor) -> None:
        """Nothing is left to tell."""

    def finish(self) -> Traced:
        assert self._tables is not None
        routed = OneRouted(self._into.token, *self._tables, (0,), self.width)
        self._into.past.push(routed, None, None)
        return _OneTraced(routed, self._into)


@dataclass(frozen=True)
class _OneTraced:
    """own: what the router adds to the meta of a trace."""

    routed: OneRouted
    into: Joining
    experts: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)

    def trace(self) -> Trace:
        indices, gates = self.routed.route()
        scores = self.routed.scores()
        return Trace(
            token_ids=np.array([self.routed.token]),
            starts=np.zeros(1, dtype=np.int64),
            indices=indices[None].astype(np.int16),
            gates=gates[None],
            adapters=self.into.adapters,
            scores=None if scores is None else scores[None],
            experts=self.experts,
            domains=(None,),
            meta={**self.into.meta, **self.own},
        )


def known_state(owner: object, cache: Cache) -> RouterState | None:
    """The state of a cache with one text, where it is up to date and `owner`'s."""
    past = state_of(cache)
    if past is None or past.owner is not owner or past.batch != 1 or past.first is not None:
        return None
    return past if past.length == cached_length(cache) else None


def single_next(router: RouterStack | None, taps: tuple[int, ...], into: Joining) -> SingleNext | None:
    """By the router's compiled operators; None where it has none, or its state before the token is not
    known."""
    single = None if router is None else router.single
    if single is None or into.past.stages is None or into.past.router is not router:
        return None
    one = single.begin(into.token, into.past.stages)
    return None if one is None else SingleNext(one, taps, into)


def given_next(route: Route, layers: int, into: Joining) -> GivenNext | None:
    """By a route (1, 1, [1,] k) for all layers; None for any other, and for adapters that there are not."""
    if route.indices.shape[:2] != (1, 1) or route.groups != 1 or not route.indices.is_cpu:
        return None
    if not all(BASE <= index < len(into.adapters) for index in route.indices.flatten().tolist()):
        return None
    return GivenNext(route, layers, into)
