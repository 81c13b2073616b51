"""What the routed modules of one base model share during a forward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from molora_kernels import Layout, Plan, make_plan, prepared
from torch import Tensor

from molora_cli.core.routed.route import Route
from molora_cli.errors import InputError, MoloraError


@dataclass
class Context:
    """The plans of the running forward; every routed module looks up its own layer's.

    backend: what runs the operators. plans: one per layer of the base, None = base only. head: the plan of
    what the output head sees. Between forwards the plans are kept (activation checkpointing runs layers
    again in the backward pass) but only a backward pass may use them.
    """

    n_layers: int
    n_adapters: int
    backend: str = "torch"
    plans: list[Plan | None] = field(default_factory=list)
    head: Plan | None = None
    layouts: list[Layout] = field(default_factory=list)
    active: bool = False
    # `logits_to_keep` of the running forward
    keep: int | Tensor = 0
    # forwards under activation checkpointing whose layers may still have to run again
    pending: int = 0

    def __post_init__(self) -> None:
        self.plans = [None] * self.n_layers

    def layout(self, owner: Tensor, scale: Tensor) -> int:
        """Index of the layout with these (R,) owners and scales, added where it is new."""
        for index, known in enumerate(self.layouts):
            if torch.equal(known.owner, owner) and torch.equal(known.scale, scale):
                return index
        self.layouts.append(Layout(owner, scale))
        return len(self.layouts) - 1

    def plan(self, layer: int, is_head: bool) -> Plan | None:
        """The plan for one module. Raises MoloraError outside a forward of the causal model."""
        if not self.active:
            self._check_rerun()
        return self.head if is_head else self.plans[layer]

    def _check_rerun(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            raise MoloraError(
                "a routed module was called outside a forward of the routed model: its tokens have no route",
                "call the causal language model itself (RoutedModel or its .base), not an inner part of it",
            )
        if self.pending > 1:
            raise MoloraError(
                "under activation checkpointing two routed forwards ran before one backward pass: "
                "the routes of the first are gone",
                "run the backward pass after each forward, or turn activation checkpointing off",
            )
        self.pending = 0

    def set(
        self,
        route: Route | None,
        ranges: Sequence[tuple[int, int]],
        keep: int | Tensor = 0,
        device: torch.device | None = None,
    ) -> None:
        """Plans of the next forward. route: (B, T, G, k) or (B, T, k), None = base only; ranges: [first, end)
        layers of each group, layers in no range take the base; keep: `logits_to_keep` of the causal model;
        device: where the base runs, None = where the route is."""
        self.plans = [None] * self.n_layers
        self.head, self.keep = None, keep
        if route is None:
            return
        for layers, one in zip(ranges, route.each_group(), strict=False):
            self.set_group(layers, one, device)

    def set_group(self, layers: tuple[int, int], route: Route, device: torch.device | None = None) -> None:
        """The plan of layers [first, end) alone, while the forward runs or before it. route: (B, T, k)."""
        batch, length = route.indices.shape[:2]
        device = route.indices.device if device is None else device
        self.layouts = [layout.to(device) for layout in self.layouts]
        slots = (route.indices.to(device, torch.int64) + 1).flatten(0, 1).flatten(1)  # (B*T, k)
        weights = route.gates.to(device).flatten(0, 1).flatten(1)
        plan = self._make(slots, weights, (batch, length))
        first, end = layers
        self.plans[first:end] = [plan] * (end - first)
        if end == self.n_layers:
            self.head = self._kept(plan, self.keep)

    def _kept(self, plan: Plan | None, keep: int | Tensor) -> Plan | None:
        """The plan for the positions that reach the head."""
        if plan is None or (isinstance(keep, int) and keep == 0):
            return plan
        rows = torch.arange(len(plan.slots), device=plan.slots.device).view(plan.shape)  # (B, T)
        if isinstance(keep, int):
            rows = rows[:, -keep:]
        elif keep.dim() == 2 and keep.dtype == torch.bool:
            rows = rows[keep.to(rows.device)]  # (kept,)
        elif keep.dim() == 2:
            rows = rows.gather(1, keep.to(rows.device))
        else:
            rows = rows[:, keep.to(rows.device)]
        slots, weights = plan.slots[rows.flatten()], plan.weights[rows.flatten()]
        return self._make(slots, weights, tuple(rows.shape))

    def _make(self, slots: Tensor, weights: Tensor, shape: tuple[int, ...]) -> Plan:
        plan = make_plan(slots, weights, self.n_adapters + 1, self.layouts, shape)
        return prepared(plan, self.backend)


def layer_ranges(
    groups: int, n_layers: int, router_ranges: Sequence[tuple[int, int]] | None
) -> list[tuple[int, int]]:
    """The layers of each group of a given route: one group = all layers; the router's where the counts agree;
    otherwise they are split evenly. Raises InputError where `groups` fits neither the router nor the base."""
    if groups == 1:
        return [(0, n_layers)]
    if router_ranges is not None and len(router_ranges) == groups:
        return list(router_ranges)
    if router_ranges is not None and len(router_ranges) > 1:
        raise InputError(
            f"the route has {groups} layer groups, the router {len(router_ranges)}",
            f"give a route with {len(router_ranges)} groups, or with one",
        )
    if not 0 < groups <= n_layers:
        raise InputError(
            f"the route has {groups} layer groups, the base {n_layers} layers",
            "give at most one group a layer",
        )
    edges = [group * n_layers // groups for group in range(groups + 1)]
    return list(itertools.pairwise(edges))
