"""One token of one text through a whole router, in compiled operators.

An answer asks for one token at a time, and between two of them the base's weights pass through every cache:
Python and torch then run ten times slower than in a loop of their own. So the common routers (`context`,
`taps` and `layer` with trained heads, both together) get by with two operators a decision, and what a trace
needs is read from the step's tables afterwards. The twin is `Deciding`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from molora_kernels import cpu_ops
from torch import Tensor

from molora_cli.core.routed.route import Route, write_route
from molora_cli.core.router.deciding import FLOOR
from molora_cli.core.router.kinds import IdStage, Stage, State
from molora_cli.core.router.taps import LayerStage, TapHead, TapsStage

if TYPE_CHECKING:
    from molora_cli.core.router.stack import RouterStack


@dataclass(frozen=True)
class _Rule:
    """How one group of layers is decided. stage: its number. k, temperature, places (E) int64, muted (E)
    bool: as `choose` takes them. head: what reads the input of the group's first layer, None = a stage on
    ids decides. prior: whether the head reads the stage on ids too."""

    stage: int
    layers: tuple[int, int]
    k: int
    temperature: float
    places: Tensor
    muted: Tensor
    head: TapHead | None
    prior: bool


class SingleToken:
    """What a router does to single tokens; made anew when k, temperature or muted change."""

    def __init__(self, stack: RouterStack, rules: Sequence[_Rule]) -> None:
        self._stack, self.rules = weakref.ref(stack), rules  # which holds this one
        self.width = max(rule.k for rule in rules)
        self.before = [group for group, rule in enumerate(rules) if rule.head is None]
        self.at = {rule.layers[0]: group for group, rule in enumerate(rules) if rule.head is not None}
        self.firsts = [rule.layers[0] for rule in rules]
        # of a trace
        self.meta = {"router": stack.spec.kind, "groups": [list(rule.layers) for rule in rules]}

    @property
    def stack(self) -> RouterStack:
        stack = self._stack()
        assert stack is not None  # whoever asks has this object from it
        return stack

    @classmethod
    def of(cls, stack: RouterStack) -> SingleToken | None:
        """None where the router is of another kind."""
        stages = stack.stages
        if len(stack.alone) != stack.groups or stack.device.type != "cpu" or not cpu_ops.loaded():
            return None
        if sum(isinstance(stage, IdStage) for stage in stages) > 1 or any(not _plain(s) for s in stages):
            return None
        rules = []
        for (number, own), layers in zip((c[0] for c in stack.covering), stack.group_ranges, strict=True):
            stage, source = stages[number], stack.priors[number]
            head: Any = None if isinstance(stage, IdStage) else stage.heads[own]  # type: ignore[attr-defined]
            if stage.layers[own] != layers or not (head is None or isinstance(head, TapHead)):
                return None
            if source is not None and stages[source].experts != stage.experts:
                return None
            muted = torch.tensor([name in stack.muted for name in stage.experts])
            setting = (stack.k_of(stage), stack.temperature_of(stage), stack.places[number], muted)
            rules.append(_Rule(number, layers, *setting, head, source is not None))
        return cls(stack, rules)

    def begin(self, token: int, state: Sequence[State]) -> OneToken | None:
        """The decision about a token after `state`, one entry per stage; None where `Deciding` is to make it.

        `state` is left unchanged.
        """
        after, said = list(state), None
        for number, stage in enumerate(self.stack.stages):
            if isinstance(stage, IdStage):
                found = stage.score_token(token, state[number])
                if found is None:
                    return None
                said, after[number] = found
        return OneToken(self, said, after)


class OneToken:
    """One token's decision on its way. said (1, 1, E): log-probabilities by the stage on ids. after: the
    state behind the token. Slots and gates are a step's tables, (L, 1, TOP)."""

    def __init__(self, single: SingleToken, said: Tensor | None, after: list[State]) -> None:
        self.single, self.after = single, after
        self._said = said
        self._prior = None if said is None or not single.at else said.clamp(min=FLOOR)
        self.scores: list[Tensor | None] = [said if rule.head is None else None for rule in single.rules]

    def write(self, slots: Tensor, gates: Tensor) -> None:
        """The groups that are decided before the forward."""
        for group in self.single.before:
            assert self._said is not None
            self._choose(group, self._said, slots, gates)

    def tap(self, layer: int, hidden: Tensor, slots: Tensor, gates: Tensor) -> None:
        """The group that waits for hidden (1, 1, d), the input of `layer`."""
        group = self.single.at.get(layer)
        if group is None:  # of a graph that was made for more layers
            return
        rule = self.single.rules[group]
        assert rule.head is not None
        logp = rule.head.log_probabilities(hidden, self._prior if rule.prior else None).double()
        self.scores[group] = logp
        self._choose(group, logp, slots, gates)

    def _choose(self, group: int, logp: Tensor, slots: Tensor, gates: Tensor) -> None:
        rule = self.single.rules[group]
        setting = (rule.k, rule.temperature, rule.places, rule.muted)
        if not torch.ops.molora_cpu.choose(logp, *setting, slots, gates, *rule.layers):
            indices, weights = self.single.stack.choose(logp, rule.stage)
            write_route(Route(indices.unsqueeze(2), weights.unsqueeze(2)), rule.layers, slots, gates)


def _plain(stage: Stage) -> bool:
    """Whether it decides every token of one text by itself, without holding on to an expert."""
    kind = isinstance(stage, IdStage) or type(stage) in (TapsStage, LayerStage)
    return kind and not stage.abstains and stage.spec.margin == 0
