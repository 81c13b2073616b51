"""Routing around a base model's forward: a hook before it decides and plans, a hook after it remembers.

Hooks, and not a forward of our own: `generate`, pipelines, streamers and trainers of transformers call the
base.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from molora_cli.core.routed.call import Call, argument_names, read_call
from molora_cli.core.routed.context import Context, layer_ranges
from molora_cli.core.routed.outputs import Routed, add_trace
from molora_cli.core.routed.route import BASE, Route
from molora_cli.core.routed.state import RouterState, bind, state_of
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from molora_cli.core.router.stack import RouterStack

AUTO, OFF = "auto", "off"


class Engine:
    """Routes every forward of one base.

    adapters: names, a route's index points into them. mode: "auto" (the router decides), "off" (base only) or
    "only" with `chosen`, the index of the adapter that all tokens take. A route given with the call goes
    first.
    """

    def __init__(
        self, base: PreTrainedModel, context: Context, adapters: tuple[str, ...], router: RouterStack | None
    ) -> None:
        self.context, self.adapters, self.router = context, adapters, router
        self.mode, self.chosen = AUTO, BASE
        self.meta: dict[str, Any] = {}
        self._names = argument_names(base)
        self._running: tuple[Call, RouterState | None, Routed, list[dict[str, Tensor]] | None] | None = None
        self._handles = [
            base.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True),
            base.register_forward_hook(
                torch.compiler.disable(self._after), with_kwargs=True, always_call=True
            ),
        ]

    def remove(self) -> None:
        """Take the hooks off the base."""
        for handle in self._handles:
            handle.remove()

    # -- before the forward --------------------------------------------------
    def _before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = dict(kwargs)
        given = kwargs.pop("route", None)
        call = read_call(self._names, args, kwargs)
        past = self._history(call, routed=given is None and self.mode == AUTO)
        routed, stages = self._decide(call, given, past)
        ranges = layer_ranges(routed.route.groups, self.context.n_layers, self._ranges())
        # nothing to add: the base's modules run alone and the result is theirs bit for bit
        plain = self.mode == OFF if given is None else _all_base(given)
        self.context.set(None if plain else routed.route, ranges, call.keep, call.ids.device)
        self.context.active = True
        if torch.is_grad_enabled() and module.training and _checkpoints(module):
            self.context.pending += 1
        self._running = (call, past, routed, stages)
        return args, kwargs

    def _history(self, call: Call, *, routed: bool) -> RouterState | None:
        """The state before this call; None without a cache. Raises InputError where a router needs one that
        the cache does not have."""
        if call.cache is None:
            return None
        state = state_of(call.cache)
        if call.past == 0:
            return RouterState(self, call.batch, call.ids.device)
        wrong = None
        if state is None:
            wrong = "it was filled without this routed model"
        elif state.owner is not self:
            wrong = "it was filled by another routed model"
        elif state.length != call.past:
            wrong = f"the router has seen {state.length} positions of it"
        elif state.batch != call.batch:
            wrong = f"the router has seen a batch of {state.batch}, now it is {call.batch}"
        if wrong is None:
            return state
        if routed:
            raise InputError(
                f"the cache holds {call.past} positions without matching router state: {wrong}",
                "start with an empty cache, give route=, or choose one adapter with only()",
            )
        return RouterState.unknown(self, call.batch, call.past, call.ids.device)

    def _decide(
        self, call: Call, given: Route | None, past: RouterState | None
    ) -> tuple[Routed, list[dict[str, Tensor]] | None]:
        if given is not None:
            self._check_route(given, call)
            return self._routed(call, given), None
        if self.mode != AUTO:
            chosen = self.chosen if self.mode != OFF else BASE
            device = call.ids.device
            return self._routed(call, Route.constant([chosen], [1.0], call.batch, call.length, device)), None
        if self.router is None:
            raise InputError(
                "no router decides which adapter a token takes",
                "give route=, choose an adapter with only(), or run: molora train-router BUNDLE ...",
            )
        if not call.has_ids:
            raise InputError(
                "the router reads token ids, but only inputs_embeds were given",
                "give input_ids, or the routes themselves with route=",
            )
        before = self._stages(call, past)
        with torch.no_grad():
            decision, after = self.router.decide(call.ids, call.mask, before)
        return self._routed(call, decision.route, decision.scores, decision.experts), after

    def _stages(self, call: Call, past: RouterState | None) -> list[dict[str, Tensor]]:
        """The router's running state before the call's first token, recomputed from the ids where the cache
        was cropped, or filled under routes that were not this router's."""
        assert self.router is not None
        if past is None or past.length == 0:
            return self.router.start(call.batch)
        if past.stages is not None and past.router is self.router:
            return past.stages
        if not past.complete:
            raise InputError(
                "the cache holds tokens whose ids the router never saw (inputs_embeds, or another model's)",
                "start with an empty cache, or keep giving route=",
            )
        with torch.no_grad():
            return self.router.decide(past.ids, past.mask, self.router.start(past.batch))[1]

    def _check_route(self, route: Route, call: Call) -> None:
        shape = tuple(route.indices.shape[:2])
        if shape != (call.batch, call.length):
            raise InputError(
                f"the route is for {shape} tokens, input_ids are {(call.batch, call.length)}",
                "give one route per new token, (B, T, k) or (B, T, G, k)",
            )
        if route.indices.numel() == 0:
            return
        low, high = int(route.indices.min()), int(route.indices.max())
        if low < BASE or high >= len(self.adapters):
            raise InputError(
                f"the route names adapter {low if low < BASE else high}; there are {len(self.adapters)}",
                f"use -1 for the base and 0 to {len(self.adapters) - 1} for {', '.join(self.adapters)}",
            )

    def _ranges(self) -> list[tuple[int, int]] | None:
        return None if self.router is None else list(self.router.group_ranges)

    def _routed(
        self, call: Call, route: Route, scores: Tensor | None = None, experts: tuple[str, ...] = ()
    ) -> Routed:
        meta = [*self.meta.items()]
        if scores is not None and self.router is not None:  # the router decided, and cut the layers
            meta += [("router", self.router.spec.kind)]
            meta += [("groups", [list(layers) for layers in self.router.group_ranges])]
        return Routed(call.ids, call.mask, route.grouped, self.adapters, scores, tuple(experts), tuple(meta))

    # -- after the forward ---------------------------------------------------
    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        running, self._running = self._running, None
        self.context.active = False
        if running is None or output is None:  # the forward, or the hook before it, has failed
            return output
        call, past, routed, stages = running
        cache = call.cache if call.cache is not None else _cache_in(output)
        if cache is not None:
            before = past if past is not None else RouterState(self, call.batch, call.ids.device)
            route = routed.route
            bind(cache, before.extended(call.ids, call.mask, route, routed.scores, stages, self.router))
        return add_trace(output, routed)


def _all_base(route: Route) -> bool:
    return not route.gates.requires_grad and not bool((route.indices != BASE).any())


def _checkpoints(base: Any) -> bool:
    """Whether the base runs layers again in the backward pass (renamed during transformers 5)."""
    renamed = getattr(base, "is_activation_checkpointing", None)
    return bool(base.is_gradient_checkpointing if renamed is None else renamed)


def _cache_in(output: Any) -> Cache | None:
    """The cache that a forward made by itself."""
    values = output if isinstance(output, tuple) else getattr(output, "values", tuple)()
    return next((value for value in values if isinstance(value, Cache)), None)
