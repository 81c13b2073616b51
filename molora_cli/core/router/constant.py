"""Routers that look at nothing: `fixed` gives every token the same adapters, `uniform` all of them alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind
from molora_cli.core.router.spec import StageSpec
from molora_cli.errors import InputError


class ConstantStage(IdStage):
    """The same gates for every token: softmax over all experts of the logs of their weights."""

    tunable = False

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        weights = check_weights(self.weights(), self.kind)
        total = math.fsum(weights)
        self.logp = torch.tensor([math.log(w / total) for w in weights], dtype=torch.float64)
        self.logp = self.logp.to(around.device)  # (E,)

    def weights(self) -> list[float]:
        """One weight per expert."""
        return [1.0] * len(self.spec.experts)

    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        return Scores(self.logp.expand(*ids.shape, self.groups, -1)), state


@register_kind
class UniformStage(ConstantStage):
    """Every expert at gate 1/K."""

    kind = "uniform"


@register_kind
class FixedStage(ConstantStage):
    """One expert at gate 1, or several whose gates are their weights over the sum. params: weights (E,)."""

    kind = "fixed"

    def weights(self) -> list[float]:
        weights = self.spec.params.get("weights", super().weights())
        if not isinstance(weights, list) or len(weights) != len(self.spec.experts):
            raise InputError(
                f"a fixed router needs one weight for each of its {len(self.spec.experts)} experts",
                "attach the router again: molora attach-router BUNDLE --kind fixed --expert NAME ...",
            )
        return weights


def check_weights(weights: Sequence[object], kind: str) -> list[float]:
    """Weights as floats above 0. Raises InputError."""
    for weight in weights:
        number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not (number and 0 < weight < math.inf):  # type: ignore[operator]
            raise InputError(
                f"a {kind} router has the weight {weight!r}; weights are numbers above 0",
                "leave out an adapter that should not be used",
            )
    return [float(w) for w in weights]  # type: ignore[arg-type]


def fixed_spec(weights: Mapping[str, float]) -> StageSpec:
    """The stage that gives every token these adapters ("__base__" allowed). Raises InputError."""
    if not weights:
        raise InputError("a fixed router needs an adapter", "name it: --expert NAME")
    values = check_weights(list(weights.values()), "fixed")
    return StageSpec(
        kind="fixed", input="none", experts=list(weights), k=len(weights), params={"weights": values}
    )


def uniform_spec(adapters: Sequence[str]) -> StageSpec:
    """The stage that gives every token all of `adapters` at the same gate."""
    return StageSpec(kind="uniform", input="none", experts=list(adapters), k=len(adapters))
