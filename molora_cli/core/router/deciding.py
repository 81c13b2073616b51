"""One block of tokens on its way through a router's stages: some groups of layers before the base's forward,
the others while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molora_cli.core.routed.route import BASE, Route
from molora_cli.core.router.hysteresis import HELD, hold, traded
from molora_cli.core.router.kinds import BASE_EXPERT, IdStage, LiveStage, Scores, Stage, State
from molora_cli.errors import MoloraError

if TYPE_CHECKING:
    from molora_cli.core.router.stack import RouterStack

MODULES = -1  # a group that waits for the input of each routed module, not of a layer
FLOOR = -12.0  # least log-probability of another stage that a live stage reads: -inf would spoil its sums


@dataclass(frozen=True)
class Decision:
    """The routes of a block of tokens and the scores behind them.

    route: (B, T, G, k), indices into the bundle's adapters, -1 = base; padding gets -1 and gate 0.
    scores: (B, T, G, E) float64 log-probabilities over `experts` by the stage that decided, before
    temperature and muting; -inf for an expert that this stage does not know. A token that no stage decided
    has 0 for the base; padding has -inf everywhere.
    """

    route: Route
    scores: Tensor
    experts: tuple[str, ...]


class Deciding:
    """The decision for ids (B, T) with mask (B, T), None = no padding, after `state`, one entry per stage.

    `after`: the state after the block. `ready`: groups that are decided, in order. Groups of live stages
    follow with `tap`, and `decision` is there once all are. Raises MoloraError for scores of a wrong shape.
    """

    def __init__(self, stack: RouterStack, ids: Tensor, mask: Tensor | None, state: list[State]) -> None:
        self.stack = stack
        self.where = ids.device
        ids = ids.to(stack.device, torch.int64)
        self._padded = mask is not None
        everything = torch.ones_like(ids, dtype=torch.bool)
        self.real = everything if mask is None else mask.to(stack.device, torch.bool)  # (B, T)
        # (stage, its own group) -> log-probabilities (B, T, E), and which tokens are decided, None = all
        self._said: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        self.after: list[State] = []
        self._held: dict[int, Tensor] = {}  # (B, T, G of the stage), for stages with a margin
        for number, stage in enumerate(stack.stages):
            new_state = state[number]
            if isinstance(stage, IdStage):
                found, new_state = stage.score(ids, self.real, state[number])
                said = self._checked(found, stage)
                if HELD in state[number]:
                    before = state[number][HELD]
                    self._held[number], held = hold(said.logp, self.real, before, stage.spec.margin)
                    new_state = {**new_state, HELD: held}
                for own in range(stage.groups):
                    self._said[number, own] = said.logp[:, :, own], said.decided
            self.after.append(new_state)
        self._prepared: dict[int, Tensor] = {}  # of stages that go by modules and read a first pass
        self._found: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        # per layer group of a per-module stage: sums over its modules of gates (B, T, 1 + adapters) and of
        # probabilities (B, T, E), and how many they are
        self._sums: dict[int, tuple[Tensor, Tensor, int]] = {}
        for group, tap in enumerate(stack.waits):
            if tap is None:
                self._resolve(group)

    @property
    def ready(self) -> list[int]:
        """Groups that are decided."""
        return sorted(self._found)

    def tap(self, layer: int, hidden: Tensor) -> list[int]:
        """Decide what waits for hidden (B, T, d), the input of `layer`; returns the groups decided now.

        Called again with the same layer (a layer runs twice under activation checkpointing) it decides the
        same groups again.
        """
        for number, stage in enumerate(self.stack.stages):
            if not isinstance(stage, LiveStage) or layer not in stage.taps:
                continue
            if stage.per_module and stage.first_pass:
                self._prepared[number] = stage.prepare(hidden.to(self.stack.device))
            elif not stage.per_module:
                said = stage.score(layer, hidden.to(self.stack.device), self.real, self._prior(number))
                said = self._checked(said, stage, 1)
                # a first pass decides all groups at once
                first = [first for first, _ in stage.layers]
                for own in range(stage.groups) if stage.first_pass else (first.index(layer),):
                    self._said[number, own] = said.logp[:, :, 0], said.decided
        now = [group for group, tap in enumerate(self.stack.waits) if tap == layer]
        for group in now:
            self._resolve(group)
        return now

    def ask(self, path: str, layer: int, x: Tensor) -> Route | None:
        """The route (B, T, 1, k) of one routed module from its input x (B, T, in) or (B*T, in); None where no
        stage goes by modules there."""
        stack = self.stack
        group = next((g for g, (a, b) in enumerate(stack.group_ranges) if a <= layer < b), None)
        if group is None or stack.waits[group] != MODULES:
            return None
        for number, _ in stack.covering[group]:
            stage = stack.stages[number]
            if isinstance(stage, LiveStage) and stage.per_module:
                hidden = self._prepared.get(number)
                if hidden is None:
                    hidden = x.to(stack.device).reshape(*self.real.shape, x.shape[-1])
                said = self._checked(stage.score_module(path, hidden), stage, 1)
                for own in range(stage.groups):
                    self._said[number, own] = said.logp[:, :, 0], said.decided
        self._resolve(group)
        route = self.group(group)
        self._add(group)
        return route

    def _add(self, group: int) -> None:
        indices, gates, scores = self._found[group]
        dense = gates.new_zeros(*gates.shape[:2], len(self.stack.adapters) + 1)
        dense = dense.scatter_add(-1, indices + 1, gates)
        chance = scores.exp()
        if group in self._sums:
            before, other, count = self._sums[group]
            self._sums[group] = (before + dense, other + chance, count + 1)
        else:
            self._sums[group] = (dense, chance, 1)

    def _mean(self, group: int) -> None:
        """What a trace shows of a layer whose modules chose apart: the k largest mean gates."""
        dense, chance, count = self._sums[group]
        gates, slots = (dense / count).topk(min(self.stack.k, dense.shape[-1]), dim=-1)
        pad = self.stack.k - gates.shape[-1]
        indices = torch.where(gates > 0, slots - 1, BASE)
        self._found[group] = (
            torch.nn.functional.pad(indices, (0, pad), value=BASE),
            torch.nn.functional.pad(gates, (0, pad)),
            (chance / count).log(),
        )

    def group(self, group: int) -> Route:
        """The route of one decided group, (B, T, 1, k), on the device of ids."""
        indices, gates, _ = self._found[group]
        return Route(indices.unsqueeze(2).to(self.where), gates.unsqueeze(2).float().to(self.where))

    def decision(self) -> Decision:
        """All groups. Raises MoloraError where one was never decided: a layer did not run."""
        for group in self._sums:
            self._mean(group)
        missing = [g for g in range(self.stack.groups) if g not in self._found]
        if missing:
            first, end = self.stack.group_ranges[missing[0]]
            raise MoloraError(
                f"the router never saw the input of layer {first}, so layers {first} to {end - 1} have no "
                "route",
                "the base must run all its layers in order; use a router on token ids with this one",
            )
        if self.stack.groups == 1:
            indices, gates, scores = (part.unsqueeze(2) for part in self._found[0])
        else:
            indices, gates, scores = (
                torch.stack([self._found[g][part] for g in range(self.stack.groups)], dim=2)
                for part in range(3)
            )
        route = Route(indices.to(self.where), gates.to(torch.float32).to(self.where))
        return Decision(route, scores, self.stack.experts)

    def _prior(self, number: int) -> Tensor | None:
        """(B, T, E) log-probabilities of the stage that stage `number` reads, in the order of its experts."""
        source = self.stack.priors[number]
        if source is None:
            return None
        from_, to = self.stack.stages[source], self.stack.stages[number]
        logp, _ = self._said[source, from_.groups - 1]  # of a stage on ids: it has spoken
        if from_.experts == to.experts:
            return logp.clamp(min=FLOOR)
        columns = [from_.experts.index(e) if e in from_.experts else -1 for e in to.experts]
        prior = logp[:, :, columns].clamp(min=FLOOR)
        absent = [i for i, column in enumerate(columns) if column < 0]
        prior[..., absent] = FLOOR
        return prior

    def _resolve(self, group: int) -> None:
        """Choose the experts of one group; the stages that know its layers are asked in order."""
        stack = self.stack
        if not self._padded and group in stack.alone:
            number, own = stack.covering[group][0]
            logp, decided = self._said[number, own]
            if decided is None:
                held = self._held.get(number)
                ordered = logp if held is None else traded(logp, held[:, :, own])
                chosen, weights = stack.choose(ordered, number)
                if chosen.shape[-1] == stack.k:
                    self._found[group] = (chosen, weights, logp)
                    return
        batch, length = self.real.shape
        device = stack.device
        indices = torch.full((batch, length, stack.k), BASE, device=device)
        gates = torch.zeros((batch, length, stack.k), dtype=torch.float64, device=device)
        scores = torch.full(
            (batch, length, len(stack.experts)), -torch.inf, dtype=torch.float64, device=device
        )
        open_ = self.real  # (B, T) tokens that no stage has decided yet
        for number, own in stack.covering[group]:
            logp, decided = self._said[number, own]  # its tap is at or before the group's own
            taken = open_ if decided is None else open_ & decided
            held = self._held.get(number)
            ordered = logp if held is None else traded(logp, held[:, :, own])
            chosen, weights = stack.choose(ordered, number)
            here = taken.unsqueeze(-1)
            width = chosen.shape[-1]
            if width == stack.k:
                indices, gates = torch.where(here, chosen, indices), torch.where(here, weights, gates)
            else:
                indices[..., :width] = torch.where(here, chosen, indices[..., :width])
                gates[..., :width] = torch.where(here, weights, gates[..., :width])
            columns = stack.columns[number]
            scores[..., columns] = torch.where(here, logp, scores[..., columns])
            open_ = open_ & ~taken
        if BASE_EXPERT in stack.experts:
            scores[..., stack.experts.index(BASE_EXPERT)][open_] = 0.0
            gates[..., 0][open_] = 1.0
        self._found[group] = (indices, gates, scores)

    def _checked(self, said: Scores, stage: Stage, groups: int | None = None) -> Scores:
        wanted = (*self.real.shape, stage.groups if groups is None else groups, len(stage.experts))
        if tuple(said.logp.shape) != wanted:
            raise MoloraError(
                f"a router stage of kind '{stage.kind}' gave scores {tuple(said.logp.shape)}, not {wanted}"
            )
        if said.decided is not None and not stage.abstains:
            raise MoloraError(
                f"a router stage of kind '{stage.kind}' left tokens undecided and did not say so"
            )
        return Scores(said.logp.to(torch.float64), said.decided)
