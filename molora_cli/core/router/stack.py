"""The router of a bundle: its stages in order, from token ids to a `Route`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molora_cli.core.routed.route import BASE, Route
from molora_cli.core.router.files import load_tensors, stage_tensors
from molora_cli.core.router.kinds import BASE_EXPERT, IdStage, Scores, State, Surroundings, kind_class
from molora_cli.core.router.spec import ROUTER_FILE, RouterSpec, check_experts, check_layers
from molora_cli.errors import InputError, MoloraError

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle

# Scores are compared on this grid, so that two experts with equal scores tie (and the first one wins)
# although a full and a chunked run differ in the last bits.
_GRID = 2.0**-30


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


class RouterStack:
    """Stages in order; for each token the first stage that decides it wins, and the base takes the rest.

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
        self.stages: list[IdStage] = []
        for index, stage in enumerate(spec.stages):
            if stage.margin > 0:
                raise InputError(
                    f"router stage {index} ({stage.kind}) asks for a margin of {stage.margin}; this molora "
                    "cannot hold a route back yet",
                    "set its margin to 0, or use a newer molora",
                )
            own = {name: t.to(self.device) for name, t in stage_tensors(tensors, index).items()}
            self.stages.append(kind_class(stage.kind)(stage, own, around))
        self.group_ranges = _group_ranges(self.stages, around.n_layers)
        self.experts = self._all_experts()
        column = {name: i for i, name in enumerate(self.experts)}
        self._columns = [
            torch.tensor([column[e] for e in stage.experts], device=self.device) for stage in self.stages
        ]
        place = {BASE_EXPERT: BASE, **{name: i for i, name in enumerate(self.adapters)}}
        self._places = [
            torch.tensor([place[e] for e in stage.experts], device=self.device) for stage in self.stages
        ]
        self._k: int | None = None
        self._temperature: float | None = None
        self._muted: frozenset[str] = frozenset()

    # -- settings -----------------------------------------------------------
    @property
    def groups(self) -> int:
        """Number of layer groups of a route."""
        return len(self.group_ranges)

    @property
    def k(self) -> int:
        """Adapters a token may take at most: the last dimension of a route."""
        return max(self._stage_k(stage) for stage in self.stages)

    @k.setter
    def k(self, value: int | None) -> None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"k is {value!r}; it must be a whole number, 1 or more", "set k to 1 or 2")
        self._k = value

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
    def start(self, batch: int) -> list[State]:
        """State before the first token, one entry per stage; every tensor's first dimension is the batch."""
        return [stage.start(batch) for stage in self.stages]

    def decide(self, ids: Tensor, mask: Tensor | None, state: list[State]) -> tuple[Decision, list[State]]:
        """Routes of the next block of tokens, and the state after it; `state` is left unchanged.

        ids (B, T) integers; mask (B, T) bool, False = padding, None = none. The route is on the device of
        ids, scores and state are on the router's.
        """
        where = ids.device
        ids = ids.to(self.device, torch.int64)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.to(self.device, torch.bool)
        batch, length = ids.shape
        shape = (batch, length, self.groups)
        indices = torch.full((*shape, self.k), BASE, device=self.device)
        gates = torch.zeros((*shape, self.k), dtype=torch.float64, device=self.device)
        scores = torch.full((*shape, len(self.experts)), -torch.inf, dtype=torch.float64, device=self.device)
        open_ = real  # (B, T) tokens that no stage has decided yet
        after: list[State] = []
        for number, stage in enumerate(self.stages):
            said, new_state = stage.score(ids, real, state[number])
            after.append(new_state)
            logp = self._checked(said, stage, shape)
            taken = open_ if said.decided is None else open_ & said.decided
            chosen, weights = self._choose(logp, number)
            here = taken[:, :, None, None]
            width = chosen.shape[-1]
            indices[..., :width] = torch.where(here, chosen, indices[..., :width])
            gates[..., :width] = torch.where(here, weights, gates[..., :width])
            columns = self._columns[number]
            scores[..., columns] = torch.where(here, logp, scores[..., columns])
            open_ = open_ & ~taken
        if BASE_EXPERT in self.experts:
            left = open_[:, :, None].expand(shape)
            scores[..., self.experts.index(BASE_EXPERT)][left] = 0.0
            gates[..., 0][left] = 1.0
        route = Route(indices.to(where), gates.to(torch.float32).to(where))
        return Decision(route, scores, self.experts), after

    def _stage_k(self, stage: IdStage) -> int:
        wanted = self._k if self._k is not None and stage.tunable else stage.spec.k
        return min(wanted, len(stage.experts))

    def _choose(self, logp: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """(B, T, G, E) scores -> adapter indices and gates (B, T, G, k): softmax over the k best, ties to the
        first expert. A choice that scores -inf is the base at gate 0."""
        stage = self.stages[number]
        temperature = stage.spec.temperature
        if self._temperature is not None and stage.tunable:
            temperature = self._temperature
        scores = logp / temperature
        silent = [i for i, name in enumerate(stage.experts) if name in self._muted]
        if silent:
            scores = scores.clone()
            scores[..., silent] = -torch.inf
        order = (scores / _GRID).round().sort(dim=-1, descending=True, stable=True).indices
        best = order[..., : self._stage_k(stage)]
        top = scores.gather(-1, best)  # (B, T, G, k)
        possible = top > -torch.inf
        indices = torch.where(possible, self._places[number][best], BASE)
        # nothing left to take: the base, at gate 1
        nothing = ~possible.any(-1, keepdim=True)
        top = torch.where(nothing, 0.0, top)
        gates = torch.softmax(top, dim=-1)
        return indices, gates

    def _checked(self, said: Scores, stage: IdStage, shape: tuple[int, int, int]) -> Tensor:
        """The stage's scores, (B, T, G or 1, E), spread over the router's groups."""
        batch, length, groups = shape
        wanted = (batch, length, stage.groups, len(stage.experts))
        if tuple(said.logp.shape) != wanted:
            raise MoloraError(
                f"a router stage of kind '{stage.kind}' gave scores {tuple(said.logp.shape)}, not {wanted}"
            )
        if said.decided is not None and not stage.abstains:
            raise MoloraError(
                f"a router stage of kind '{stage.kind}' left tokens undecided and did not say so"
            )
        return said.logp.to(torch.float64).expand(batch, length, groups, -1)

    def _all_experts(self) -> tuple[str, ...]:
        """Columns of the scores: experts of all stages in order of appearance; the base where it is used."""
        names = [name for stage in self.stages for name in stage.experts]
        if all(stage.abstains for stage in self.stages):
            names.append(BASE_EXPERT)
        return tuple(dict.fromkeys(names))


def load_router(bundle: Bundle, around: Surroundings) -> RouterStack | None:
    """The bundle's router, or None where it has none. Raises InputError where it cannot be used."""
    spec = bundle.router_spec
    if spec is None:
        return None
    return RouterStack(spec, load_tensors(bundle.path / ROUTER_FILE), around, bundle.adapters)


def _group_ranges(stages: Sequence[IdStage], n_layers: int) -> list[tuple[int, int]]:
    """The layer groups that every stage fits: one for all layers, or those of stages with several."""
    found: list[tuple[int, int]] | None = None
    for stage in stages:
        own = [(first, end) for first, end in stage.spec.groups]
        if len(own) < 2:
            continue
        if found is not None and own != found:
            raise InputError(
                f"two router stages cut the layers differently: {found} and {own}",
                "give both stages the same layer groups",
            )
        found = own
    return found or [(0, n_layers)]
