"""Routing around a base model's forward: a hook before it decides and plans, a hook after it remembers.

Routers that read hidden states decide the rest while it runs, in hooks on the layers they read (`live`).

Hooks, and not a forward of our own: `generate`, pipelines, streamers and trainers of transformers call the
base.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from molora_cli.core.routed.attach import routed_modules
from molora_cli.core.routed.call import Call, argument_names, check_route, checkpoints, one_token, read_call
from molora_cli.core.routed.context import Context, layer_ranges
from molora_cli.core.routed.first_pass import FirstPass
from molora_cli.core.routed.live import Enough, LayerHooks, ModuleHooks
from molora_cli.core.routed.modules import RoutedModule
from molora_cli.core.routed.next_token import (
    Joining,
    NextToken,
    Planned,
    PlannedToken,
    given_next,
    known_state,
    single_next,
)
from molora_cli.core.routed.outputs import Routed, add_trace, cache_in
from molora_cli.core.routed.route import BASE, Route
from molora_cli.core.routed.state import RouterState, bind, state_of
from molora_cli.errors import InputError
from molora_cli.text import printable

if TYPE_CHECKING:
    from molora_cli.core.router.deciding import Deciding, Decision
    from molora_cli.core.router.stack import RouterStack

AUTO, OFF = "auto", "off"


@dataclass
class _Running:
    """A forward between its two hooks. route: what was given or chosen for all tokens; deciding: the router's
    decision, finished when the last layer it reads has run; first: keys and values of a first pass."""

    call: Call
    past: RouterState | None
    route: Route | None = None
    deciding: Deciding | None = None
    first: Cache | None = None


class Engine:
    """Routes every forward of one base.

    adapters: names, a route's index points into them. mode: "auto" (the router decides), "off" (base only) or
    "only" with `chosen`, the index of the adapter that all tokens take. A route given with the call goes
    first.
    """

    def __init__(
        self, base: PreTrainedModel, context: Context, adapters: tuple[str, ...], router: RouterStack | None
    ) -> None:
        self.context, self.adapters = context, adapters
        self.mode, self.chosen = AUTO, BASE
        self.meta: dict[str, Any] = {}
        self._base = base
        self._anchor = next((m, n) for m in base.modules() for n, p in m._parameters.items() if p is not None)
        self._names = argument_names(base)
        self._running: _Running | None = None
        self._deciding: Deciding | None = None  # kept for layers that run again in the backward pass
        self._hooks: list[LayerHooks | ModuleHooks] = []
        self._first_pass: FirstPass | None = None
        self._taps: list[int] = []  # layers that the router reads in the routed forward
        self._asks_modules = False
        self._router: RouterStack | None = None
        self.router = router
        self._handles = [
            base.register_forward_pre_hook(torch.compiler.disable(self._before), with_kwargs=True),
            base.register_forward_hook(
                torch.compiler.disable(self._after), with_kwargs=True, always_call=True
            ),
        ]

    @property
    def router(self) -> RouterStack | None:
        return self._router

    @router.setter
    def router(self, router: RouterStack | None) -> None:
        """Raises InputError where the router reads layers that cannot be found in the base."""
        self._unhook()
        self._router = router
        if router is None or not router.live:
            return
        plain = [stage for stage in router.live if not (stage.first_pass or stage.per_module)]
        self._taps = [tap for stage in plain for tap in stage.taps]
        self._asks_modules = any(stage.per_module for stage in router.live)
        if self._taps:
            self._hooks.append(LayerHooks(self._base, self._taps, self._at_layer))
        if self._asks_modules:
            self._hooks.append(ModuleHooks(self._base, self._at_module))
        early = {t for stage in router.live if stage.first_pass for t in stage.taps}
        if early:
            self._first_pass = FirstPass(self._base, self.context, self._names, early)

    def _unhook(self) -> None:
        for hook in [*self._hooks, *([self._first_pass] if self._first_pass else [])]:
            hook.remove()
        self._hooks, self._first_pass, self._deciding = [], None, None
        self._taps, self._asks_modules = [], False

    def check_modules(self, paths: Iterable[str]) -> None:
        """Raises InputError where one of them would become routed and the router decides module by module,
        from what it was attached with."""
        if not self._asks_modules:
            return
        known = {module.path for module in routed_modules(self._base)}
        new = sorted(set(paths) - known)
        if new:
            raise InputError(
                f"the {self._router.spec.kind if self._router else ''} router decides module by module and "
                f"does not know {printable(new[0])}, which the adapter changes",
                "add the adapter to the bundle (molora add) and attach the router again",
            )

    @property
    def device(self) -> torch.device:
        # the base's own property walks through its modules, and this is asked for every token
        module, name = self._anchor
        weight = module._parameters.get(name)
        return self._base.device if weight is None else weight.device

    @property
    def config(self) -> Any:
        return self._base.config

    def remove(self) -> None:
        """Take the hooks off the base."""
        self._unhook()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def decide(self, ids: Tensor, mask: Tensor | None = None) -> Decision:
        """The router's decision about whole sequences, without finishing the forward.

        ids (B, T) int64; mask (B, T) bool, False = padding. The base runs up to the deepest layer that the
        router reads, not at all for a router on ids. Raises InputError where there is no router.
        """
        router = self.router
        if router is None or not router.live:
            self._need_router()
            assert router is not None
            return router.decide(ids, mask, router.start(len(ids)))[0]

        def stop(layer: int, hidden: Tensor) -> None:
            if self._deciding is not None:  # not yet in a first pass
                raise Enough

        # behind the router's own hook on the same layer; modules that decide by themselves are on all layers
        last = self.context.n_layers if self._asks_modules else max([0, *self._taps])
        hook = LayerHooks(self._base, [last], stop)
        mode, self.mode = self.mode, AUTO
        try:
            attention = None if mask is None else mask.long()
            self._base(input_ids=ids, attention_mask=attention, use_cache=False)
        except Enough:
            pass
        finally:
            self.mode = mode
            hook.remove()
        deciding, self._deciding = self._deciding, None
        assert deciding is not None  # the hook before the forward has made it
        return deciding.decision()

    # -- before the forward --------------------------------------------------
    def _before(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        kwargs = dict(kwargs)
        given = kwargs.pop("route", None)
        self._deciding = None
        call = read_call(self._names, args, kwargs)
        past = self._history(call, routed=given is None and self.mode == AUTO)
        running = _Running(call, past, route=self._given(call, given))
        if running.route is None:
            self._begin(running, args, kwargs)
        else:
            # nothing to add: the base's modules run alone and the result is theirs bit for bit
            plain = self.mode == OFF if given is None else given.all_base
            ranges = None if self.router is None else self.router.group_ranges
            layers = layer_ranges(running.route.groups, self.context.n_layers, ranges)
            self.context.set(None if plain else running.route, layers, call.keep, call.ids.device)
        self.context.active = True
        if torch.is_grad_enabled() and module.training and checkpoints(module):
            self.context.pending += 1
        self._running = running
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

    def _given(self, call: Call, given: Route | None) -> Route | None:
        """The route that came with the call or that all tokens take; None where the router is to decide."""
        if given is not None:
            check_route(given, call, self.adapters)
            return given
        if self.mode == AUTO:
            return None
        chosen = self.chosen if self.mode != OFF else BASE
        return Route.constant([chosen], [1.0], call.batch, call.length, call.ids.device)

    def _begin(self, running: _Running, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the router decide what it can before the forward, and plan it."""
        self._need_router()
        call, past, router = running.call, running.past, self.router
        assert router is not None
        if not call.has_ids and router.needs_ids:
            raise InputError(
                "the router reads token ids, but only inputs_embeds were given",
                "give input_ids, or the routes themselves with route=",
            )
        before = self._stages(call, past)
        seen: dict[int, Tensor] = {}
        if self._first_pass is not None:
            seen, running.first = self._first_pass.run(call, past, args, kwargs)
        with router.gradients():
            deciding = router.begin(call.ids, call.mask, before)
            for layer, hidden in seen.items():
                deciding.tap(layer, hidden)
            self.context.set(None, [], call.keep, call.ids.device)
            for group in deciding.ready:
                self._plan(deciding, group)
        running.deciding = self._deciding = deciding

    def _need_router(self) -> None:
        if self.router is None:
            raise InputError(
                "no router decides which adapter a token takes",
                "give route=, choose an adapter with only(), or run: molora train-router BUNDLE ...",
            )

    def _plan(self, deciding: Deciding, group: int) -> None:
        layers = deciding.stack.group_ranges[group]
        self.context.set_group(layers, deciding.group(group))

    def _stages(self, call: Call, past: RouterState | None) -> list[dict[str, Tensor]]:
        """The router's running state before the call's first token, recomputed from the ids where the cache
        was cropped, or filled under routes that were not this router's."""
        assert self.router is not None
        if past is None or past.length == 0:
            return self.router.start(call.batch)
        if past.stages is not None and past.router is self.router:
            return past.stages
        if not self.router.needs_ids:
            return self.router.start(past.batch)
        if not past.complete:
            raise InputError(
                "the cache holds tokens whose ids the router never saw (inputs_embeds, or another model's)",
                "start with an empty cache, or keep giving route=",
            )
        with torch.no_grad():
            return self.router.begin(past.history.ids, past.history.mask, self.router.start(past.batch)).after

    # -- while it runs -------------------------------------------------------
    def _at_layer(self, layer: int, hidden: Tensor) -> None:
        """hidden (B, T, d): the input of a layer that the router reads. Plans the layers decided from it."""
        deciding = self._deciding
        if deciding is None:  # a route was given, or this is a first pass
            return
        with deciding.stack.gradients():
            for group in deciding.tap(layer, hidden):
                self._plan(deciding, group)

    def _at_module(self, module: RoutedModule, x: Tensor) -> None:
        """x (B, T, in) or (B*T, in): the input of a routed module. Plans that module alone."""
        deciding = self._deciding
        if deciding is None:
            return
        with deciding.stack.gradients():
            route = deciding.ask(module.path, module.layer, x)
            if route is not None:
                self.context.set_group((module.layer, module.layer + 1), route)

    # -- after the forward ---------------------------------------------------
    def _after(self, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        running, self._running = self._running, None
        self.context.active = False
        if running is None or output is None:  # the forward, or the hook before it, has failed
            return output
        call = running.call
        routed, stages = self._routed(running)
        cache = call.cache if call.cache is not None else cache_in(output)
        if cache is not None:
            self._remember(cache, running, routed, stages)
        return add_trace(output, routed)

    def _remember(
        self, cache: Cache, running: _Running, routed: Routed, stages: list[dict[str, Tensor]] | None
    ) -> None:
        call = running.call
        before = running.past or RouterState(self, call.batch, call.ids.device)
        state = before.extended(call.ids, call.mask, routed.route, routed.scores, stages, self.router)
        state.first = running.first
        bind(cache, state)

    def _routed(self, running: _Running) -> tuple[Routed, list[dict[str, Tensor]] | None]:
        """What the call decided, and the router's state after it."""
        call, meta = running.call, [*self.meta.items()]
        if running.deciding is None:
            assert running.route is not None
            route = running.route.grouped
            return Routed(call.ids, call.mask, route, self.adapters, meta=tuple(meta)), None
        deciding = running.deciding
        decision, stack = deciding.decision(), deciding.stack
        # the router decided, and cut the layers
        meta += [("router", stack.spec.kind)]
        meta += [("groups", [list(layers) for layers in stack.group_ranges])]
        routed = Routed(
            call.ids,
            call.mask,
            decision.route,
            self.adapters,
            decision.scores,
            decision.experts,
            tuple(meta),
        )
        return routed, deciding.after

    # -- instead of a forward ------------------------------------------------
    @property
    def step_taps(self) -> tuple[int, ...] | None:
        """Layers that the router reads on the way of a token; None where that is not all it reads."""
        router = self.router
        if router is None or not router.live:
            return ()
        if self._asks_modules or self._first_pass is not None or max(self._taps) >= self.context.n_layers:
            return None
        return tuple(sorted(set(self._taps)))

    @torch.no_grad()
    def next_token(self, token: int, cache: Cache, given: Route | None = None) -> NextToken | None:
        """What a forward of one more token after `cache` would decide; None where only it can tell.

        given: (1, 1, [G,] k), as `route` of a call. Raises InputError as the forward would.
        """
        router, routed_by_router = self.router, given is None and self.mode == AUTO
        taps = self.step_taps
        if routed_by_router and (router is None or taps is None):
            return None
        known = known_state(self, cache)
        if known is not None:
            into = Joining(token, known, self.adapters, self.meta)
            if routed_by_router:
                one: NextToken | None = single_next(router, taps or (), into)
            else:
                chosen = self.chosen if self.mode != OFF else BASE
                route = given or Route.constant([chosen], [1.0], 1, 1)
                one = given_next(route, self.context.n_layers, into)
            if one is not None:
                return one
        call = one_token(token, cache, self.device)
        past = self._history(call, routed=routed_by_router)
        running = _Running(call, past, route=self._given(call, given))

        def finish() -> Routed:
            routed, stages = self._routed(running)
            self._remember(cache, running, routed, stages)
            return routed

        if running.route is not None:
            ranges = None if router is None else router.group_ranges
            layers = layer_ranges(running.route.groups, self.context.n_layers, ranges)
            planned = (
                [] if running.route.all_base else [*zip(layers, running.route.each_group(), strict=True)]
            )
            width = running.route.indices.shape[-1]
            return PlannedToken(planned, width, (), lambda layer, hidden: [], finish)
        assert router is not None
        # one token is no padding
        deciding = running.deciding = router.begin(call.ids, None, self._stages(call, past))

        def decided(groups: list[int]) -> Planned:
            return [(deciding.stack.group_ranges[group], deciding.group(group)) for group in groups]

        def tap(layer: int, hidden: Tensor) -> Planned:
            return decided(deciding.tap(layer, hidden))

        return PlannedToken(decided(deciding.ready), router.k, taps or (), tap, finish)
