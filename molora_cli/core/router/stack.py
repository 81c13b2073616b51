"""The router of a bundle: its stages in order, from token ids to a `Route`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from molora_kernels import cpu_ops
from torch import Tensor

from molora_cli.core.routed.route import BASE
from molora_cli.core.router.deciding import MODULES, Deciding, Decision
from molora_cli.core.router.files import load_tensors, stage_tensors
from molora_cli.core.router.hysteresis import start_held
from molora_cli.core.router.kinds import (
    BASE_EXPERT,
    IdStage,
    LiveStage,
    Stage,
    State,
    Surroundings,
    kind_class,
)
from molora_cli.core.router.single import SingleToken
from molora_cli.core.router.spec import ROUTER_FILE, RouterSpec, check_experts, check_layers
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle

# Scores are compared on this grid, so that two experts with equal scores tie (and the first one wins)
# although a full and a chunked run differ in the last bits.
_GRID = 2.0**-30


class RouterStack:
    """Stages in order; for each token and layer the first stage that decides wins, and the base takes the
    rest.

    k and temperature: None = what each stage's spec says; a number set here wins for every tunable stage.
    muted: adapters (or "__base__") that no token may take; where a stage has nothing else the base is taken.
    Raises InputError for unknown kinds, experts that the bundle lacks, or groups that do not fit the base.
    """

    def __init__(
        self, spec: RouterSpec, tensors: Mapping[str, Tensor], around: Surroundings, adapters: Sequence[str]
    ) -> None:
        check_experts(spec, adapters)
        check_layers(spec, around.n_layers)
        self.spec = spec
        self.adapters = tuple(adapters)
        self.device = torch.device(around.device)
        if self.device.type == "mps":  # has no float64
            self.device = torch.device("cpu")
        around = replace(around, device=self.device)
        self.stages: list[Stage] = []
        for index, stage in enumerate(spec.stages):
            own = {name: t.to(self.device) for name, t in stage_tensors(tensors, index).items()}
            made = kind_class(stage.kind)(stage, own, around)
            if stage.margin > 0 and (made.abstains or not isinstance(made, IdStage)):
                # a live stage's state cannot be found again from the ids of a cropped cache
                raise InputError(
                    f"router stage {index} ({stage.kind}) asks for a margin of {stage.margin}",
                    "only gates on token ids hold a route back (context, centroid); set its margin to 0",
                )
            self.stages.append(made)
        self.group_ranges = _group_ranges(self.stages)
        # per group: (stage, its own group) of the stages that know its layers, in order
        self.covering = [_covering(self.stages, first) for first, _ in self.group_ranges]
        self.waits = [self._wait(covering) for covering in self.covering]
        self.priors = [self._prior_of(stage) for stage in self.stages]
        self.experts = self._all_experts()
        column = {name: i for i, name in enumerate(self.experts)}
        self.columns = [
            torch.tensor([column[e] for e in stage.experts], device=self.device) for stage in self.stages
        ]
        place = {BASE_EXPERT: BASE, **{name: i for i, name in enumerate(self.adapters)}}
        self.places = [
            torch.tensor([place[e] for e in stage.experts], device=self.device) for stage in self.stages
        ]
        # groups of one stage that knows every expert: what it says is the decision
        self.alone = {
            group
            for group, covering in enumerate(self.covering)
            if len(covering) == 1 and tuple(self.stages[covering[0][0]].experts) == self.experts
        }
        self._single: tuple[object, SingleToken | None] = (None, None)
        # whether gates carry gradients to the live stages' parameters (training through the base's loss)
        self.differentiable = False
        self._k: int | None = None
        self._temperature: float | None = None
        self._muted: frozenset[str] = frozenset()

    # -- settings -----------------------------------------------------------
    @property
    def groups(self) -> int:
        """Number of layer groups of a route."""
        return len(self.group_ranges)

    @property
    def live(self) -> list[LiveStage]:
        """The stages that read hidden states: with one of them a route is known only as the base runs."""
        return [stage for stage in self.stages if isinstance(stage, LiveStage)]

    @property
    def needs_ids(self) -> bool:
        """Whether some stage reads token ids."""
        return any(isinstance(stage, IdStage) for stage in self.stages)

    @property
    def k(self) -> int:
        """Adapters a token may take at most: the last dimension of a route."""
        return max(self.k_of(stage) for stage in self.stages)

    @k.setter
    def k(self, value: int | None) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"k is {value!r}; it must be a whole number, 1 or more", "set k to 1 or 2")
        self._k = value

    @property
    def chosen_k(self) -> int | None:
        """The k that was set here; None = each stage's own."""
        return self._k

    @property
    def temperature(self) -> float | None:
        return self._temperature

    @temperature.setter
    def temperature(self, value: float | None) -> None:
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"the router temperature is {value!r}; it must be above 0", "set it to 1.0")
        self._temperature = value

    @property
    def muted(self) -> frozenset[str]:
        return self._muted

    @muted.setter
    def muted(self, names: Iterable[str]) -> None:
        wanted = frozenset(names)
        unknown = sorted(wanted - {*self.adapters, BASE_EXPERT})
        if unknown:
            raise InputError(
                f"no adapter '{unknown[0]}' to mute", f"the bundle has {', '.join(self.adapters)}"
            )
        self._muted = wanted

    # -- routing ------------------------------------------------------------
    @property
    def single(self) -> SingleToken | None:
        """The way for single tokens as the settings are now, None where there is none."""
        settings = (self._k, self._temperature, self._muted, cpu_ops.loaded())
        if self._single[0] != settings:
            self._single = settings, SingleToken.of(self)
        return self._single[1]

    def gradients(self) -> torch.set_grad_enabled:
        """The context that its stages run in."""
        return torch.set_grad_enabled(self.differentiable and torch.is_grad_enabled())

    def start(self, batch: int) -> list[State]:
        """State before the first token, one entry per stage; every tensor's first dimension is the batch."""
        found = []
        for stage in self.stages:
            state = stage.start(batch)
            if stage.spec.margin > 0:
                state = start_held(state, batch, stage.groups, self.device)
            found.append(state)
        return found

    def begin(self, ids: Tensor, mask: Tensor | None, state: list[State]) -> Deciding:
        """The decision about the next block of tokens as far as token ids tell it; `state` is left unchanged.

        ids (B, T) integers; mask (B, T) bool, False = padding, None = none. The base's forward gives what
        live stages read. Routes are on the device of ids, scores and state on the router's.
        """
        return Deciding(self, ids, mask, state)

    def decide(self, ids: Tensor, mask: Tensor | None, state: list[State]) -> tuple[Decision, list[State]]:
        """Routes of the next block of tokens, and the state after it. Arguments as for `begin`.

        Raises InputError where a stage reads hidden states.
        """
        if self.live:
            raise InputError(
                f"a {self.spec.kind} router reads hidden states: token ids alone give no route",
                "run the base too: load the bundle and call the model, or molora inspect with --base PATH",
            )
        deciding = self.begin(ids, mask, state)
        return deciding.decision(), deciding.after

    def k_of(self, stage: Stage) -> int:
        """Adapters that a token may take by one stage as it is now."""
        wanted = self._k if self._k is not None and stage.tunable else stage.spec.k
        return min(wanted, len(stage.experts))

    def temperature_of(self, stage: Stage) -> float:
        """The temperature of one stage as it is now."""
        own = self._temperature if stage.tunable else None
        return stage.spec.temperature if own is None else own

    def choose(self, logp: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """(..., E) scores of stage `number` -> adapter indices and gates (..., k): softmax over the k best,
        ties to the first expert. A choice that scores -inf is the base at gate 0. Differentiable in logp."""
        stage = self.stages[number]
        scores = logp / self.temperature_of(stage)
        silent = [i for i, name in enumerate(stage.experts) if name in self._muted]
        if silent:
            scores = scores.clone()
            scores[..., silent] = -torch.inf
        order = (scores / _GRID).round().sort(dim=-1, descending=True, stable=True).indices
        best = order[..., : self.k_of(stage)]
        top = scores.gather(-1, best)  # (..., k)
        possible = top > -torch.inf
        indices = torch.where(possible, self.places[number][best], BASE)
        # nothing left to take: the base, at gate 1
        nothing = ~possible.any(-1, keepdim=True)
        top = torch.where(nothing, 0.0, top)
        gates = torch.softmax(top, dim=-1)
        return indices, gates

    def _wait(self, covering: Sequence[tuple[int, int]]) -> int | None:
        """The layer whose input the group waits for, MODULES, or None = known before the forward."""
        taps = []
        for number, own in covering:
            stage = self.stages[number]
            if isinstance(stage, LiveStage):
                if stage.per_module:
                    return MODULES
                taps.append(stage.taps[0] if stage.first_pass else stage.layers[own][0])
        return max(taps, default=None)

    def _prior_of(self, stage: Stage) -> int | None:
        """The stage on token ids whose scores a live stage reads. Raises InputError where there is none."""
        kind = stage.prior if isinstance(stage, LiveStage) else None
        if kind is None:
            return None
        for number, other in enumerate(self.stages):
            if other.kind == kind and isinstance(other, IdStage):
                return number
        raise InputError(
            f"the router's {stage.kind} stage reads the scores of a {kind} stage, and there is none",
            "attach or train the router again",
        )

    def _all_experts(self) -> tuple[str, ...]:
        """Columns of the scores: experts of all stages in order of appearance; the base where it is used."""
        names = [name for stage in self.stages for name in stage.experts]
        if any(all(self.stages[n].abstains for n, _ in group) for group in self.covering):
            names.append(BASE_EXPERT)
        return tuple(dict.fromkeys(names))


def load_router(bundle: Bundle, around: Surroundings) -> RouterStack | None:
    """The bundle's router, or None where it has none. Raises InputError where it cannot be used."""
    spec = bundle.router_spec
    if spec is None:
        return None
    return RouterStack(spec, load_tensors(bundle.path / ROUTER_FILE), around, bundle.adapters)


def _group_ranges(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """The coarsest layer groups that fit into every stage's own; layers that no stage names are in none."""
    edges = sorted({edge for stage in stages for layers in stage.layers for edge in layers})
    return [pair for pair in itertools.pairwise(edges) if _covering(stages, pair[0])]


def _covering(stages: Sequence[Stage], layer: int) -> list[tuple[int, int]]:
    """(number of the stage, its own group) of the stages that decide a layer, in order."""
    return [
        (number, own)
        for number, stage in enumerate(stages)
        for own, (first, end) in enumerate(stage.layers)
        if first <= layer < end
    ]
