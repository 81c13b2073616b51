"""A decision about one token, which somebody else runs: a compiled step instead of the base's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


class SingleNext:
    """A router's, by `SingleToken`. past: the state of the cache, which the token joins; adapters, meta: of
    its trace."""

    def __init__(
        self,
        one: OneToken,
        token: int,
        past: RouterState,
        taps: tuple[int, ...],
        adapters: tuple[str, ...],
        meta: Mapping[str, Any],
    ) -> None:
        self._one, self._token, self._past, self.taps = one, token, past, taps
        self._adapters, self._meta = adapters, meta
        self._tables: tuple[Tensor, Tensor] | None = None
        self.width, self.tap = one.single.width, one.tap

    def write(self, slots: Tensor, gates: Tensor) -> None:
        self._tables = slots, gates
        self._one.write(slots, gates)

    def finish(self) -> Traced:
        one, single = self._one, self._one.single
        said = [part for part in one.scores if part is not None]
        if self._tables is None or len(said) < len(one.scores):
            raise MoloraError(
                "the router never saw the input of a layer that it reads",
                "the base must run all its layers in order; use a router on token ids with this one",
            )
        routed = OneRouted(self._token, *self._tables, single.firsts, self.width, said)
        self._past.push(routed, one.after, single.stack)
        return _OneTraced(routed, self._adapters, single.stack.experts, self._meta, single.meta)


class GivenNext:
    """A route (1, 1, [1,] k) that every layer takes."""

    taps = ()

    def __init__(
        self,
        route: Route,
        layers: int,
        token: int,
        past: RouterState,
        adapters: tuple[str, ...],
        meta: Mapping[str, Any],
    ) -> None:
        self._route, self._layers, self._token, self._past = route.grouped, layers, token, past
        self._adapters, self._meta = adapters, meta
        self.width = route.indices.shape[-1]
        self._tables: tuple[Tensor, Tensor] | None = None

    def write(self, slots: Tensor, gates: Tensor) -> None:
        self._tables = slots, gates
        write_route(self._route, (0, self._layers), slots, gates)

    def tap(self, layer: int, hidden: Tensor, slots: Tensor, gates: Tensor) -> None:
        """Nothing is left to tell."""

    def finish(self) -> Traced:
        assert self._tables is not None
        routed = OneRouted(self._token, *self._tables, (0,), self.width)
        self._past.push(routed, None, None)
        return _OneTraced(routed, self._adapters, (), self._meta, {})


@dataclass(frozen=True)
class _OneTraced:
    routed: OneRouted
    adapters: tuple[str, ...]
    experts: tuple[str, ...]
    meta: Mapping[str, Any]
    own: Mapping[str, Any]

    def trace(self) -> Trace:
        indices, gates = self.routed.route()
        scores = self.routed.scores()
        return Trace(
            token_ids=np.array([self.routed.token]),
            starts=np.zeros(1, dtype=np.int64),
            indices=indices[None].astype(np.int16),
            gates=gates[None],
            adapters=self.adapters,
            scores=None if scores is None else scores[None],
            experts=self.experts,
            domains=(None,),
            meta={**self.meta, **self.own},
        )


def known_state(owner: object, cache: Cache) -> RouterState | None:
    """The state of a cache with one text, where it is up to date and `owner`'s."""
    past = state_of(cache)
    if past is None or past.owner is not owner or past.batch != 1 or past.first is not None:
        return None
    return past if past.length == cached_length(cache) else None


def single_next(
    router: RouterStack | None,
    taps: tuple[int, ...],
    token: int,
    past: RouterState,
    adapters: tuple[str, ...],
    meta: Mapping[str, Any],
) -> SingleNext | None:
    """By the router's compiled operators; None where it has none, or its state after `past` is not known."""
    single = None if router is None else router.single
    if single is None or past.stages is None or past.router is not router:
        return None
    one = single.begin(token, past.stages)
    return None if one is None else SingleNext(one, token, past, taps, adapters, meta)


def given_next(
    route: Route,
    layers: int,
    token: int,
    past: RouterState,
    adapters: tuple[str, ...],
    meta: Mapping[str, Any],
) -> GivenNext | None:
    """By a route (1, 1, [1,] k) for all layers; None for any other, and for adapters that there are not."""
    if route.indices.shape[:2] != (1, 1) or route.groups != 1 or not route.indices.is_cpu:
        return None
    if not all(BASE <= index < len(adapters) for index in route.indices.flatten().tolist()):
        return None
    return GivenNext(route, layers, token, past, adapters, meta)
