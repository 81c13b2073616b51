"""What a kind of router is, and the one table of kinds.

A bundle's router is an ordered list of stages (rules first, the gate last). Each stage is built from its spec
(the JSON header of router.safetensors, see `spec`) and its tensors by the class registered for its kind; the
reader knows no kind by itself. A stage that decides from token ids alone implements `IdStage`, one that reads
hidden states while the base's forward runs `LiveStage`. The `groups` of a stage are the layers it decides:
for each token and layer the first stage that decides wins, and layers that no stage names take the base.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from molora_cli.core.router.spec import BASE_EXPERT
from molora_cli.errors import InputError, MoloraError

if TYPE_CHECKING:
    from molora_cli.core.router.spec import StageSpec

__all__ = [
    "BASE_EXPERT",
    "IdStage",
    "LiveStage",
    "Scores",
    "Stage",
    "State",
    "Surroundings",
    "kind_class",
    "register_kind",
    "stage_tensor",
]

State = dict[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """What a stage says of a block of tokens.

    logp: (B, T, G, E) float64 log-probabilities over the stage's experts, G its layer groups; -inf = never.
    decided: (B, T) bool, None = every token; a token that no stage decided takes the base.
    """

    logp: Tensor
    decided: Tensor | None = None


@dataclass(frozen=True)
class Surroundings:
    """What a stage may read of the model around it when it is built: never a file of its own choosing.

    embedding: (V, d) input embedding of the base, or None where no base is at hand. n_layers: of the base.
    device: where its tensors are to live. dtype: of the arithmetic of a trained `context` stage; with
    float32 its scores are near those that count, see `quick`.
    """

    n_layers: int
    embedding: Tensor | None = None
    device: Any = "cpu"
    dtype: torch.dtype = torch.float64
    extra: Mapping[str, Any] = field(default_factory=dict)


class Stage(ABC):
    """What all stages share. `tunable`: whether k and temperature may be changed at run time; a stage that
    states gates outright says no."""

    kind: ClassVar[str]
    needs_embedding: ClassVar[bool] = False
    tunable: ClassVar[bool] = True

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        self.spec = spec
        self.around = around

    @cached_property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.spec.experts)

    @property
    def groups(self) -> int:
        return max(1, len(self.spec.groups))

    @cached_property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of each of its layer groups; one group is all layers where the spec names none."""
        return tuple((a, b) for a, b in self.spec.groups) or ((0, self.around.n_layers),)

    @property
    def abstains(self) -> bool:
        """Whether some tokens may be left to the stages after this one."""
        return False

    def start(self, batch: int) -> State:
        """State before the first token: tensors whose first dimension is the batch."""
        return {}


class IdStage(Stage):
    """A stage that reads token ids only: its route is known before the forward and needs no base.

    Arithmetic is float64, so that a full, a chunked and a cached run agree on every route.
    """

    @abstractmethod
    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        """Scores of the next block of tokens and the state after it.

        ids (B, T) int64; mask (B, T) bool, False = padding: such tokens never enter the state and their
        scores are ignored. Pure: `state` is not changed in place, so that a beam can be copied and a cache
        cropped.
        """

    def score_token(self, token: int, state: State) -> tuple[Tensor, State] | None:
        """`score` for one token of one text: (1, 1, E) log-probabilities that hold for all its groups, and
        the state after it. None where only `score` can tell."""
        return None


class LiveStage(Stage):
    """A stage that reads the base's hidden states, one token at a time, while its forward runs.

    A group is decided from the input of its first layer, before that layer runs. `first_pass`: it reads a
    forward of the base alone that goes before the routed one, and all its groups are decided from the one
    layer in `taps`. `per_module`: it is asked in front of every routed module instead, with that module's
    input, or with `first_pass` with what `prepare` gave; its groups are what a trace shows. It keeps no
    state: what it reads at a token depends on the past through the base's keys and values alone.

    The same token has hidden states that differ in the last bits between a full and a cached run, so two
    experts whose scores differ by no more than that can change places between the two. Heads compute in
    float64, so that nothing is added to the difference.
    """

    first_pass: ClassVar[bool] = False
    per_module: ClassVar[bool] = False

    @cached_property
    def taps(self) -> tuple[int, ...]:
        """Layers whose input it reads, ascending; the number of layers = what the last layer gives, one more
        = what the decoder gives after its last norm (in a first pass)."""
        return tuple(first for first, _ in self.layers)

    @property
    def prior(self) -> str | None:
        """Kind of the stage on token ids whose scores it reads beside the hidden state, None = of none."""
        return None

    def prepare(self, hidden: Tensor) -> Tensor:
        """For `first_pass` and `per_module` stages: what `score_module` is to be given, once for all modules.
        hidden (B, T, d): of the layer in `taps`."""
        raise NotImplementedError

    def score_module(self, path: str, x: Tensor) -> Scores:
        """For `per_module` stages: scores (B, T, 1, E) for the routed module at `path` from its input x
        (B, T, in)."""
        raise NotImplementedError

    def score(self, tap: int, hidden: Tensor, mask: Tensor, prior: Tensor | None) -> Scores:
        """Scores of the group that begins at `tap` (of all groups for `first_pass`), logp (B, T, 1, E).

        hidden (B, T, d), the input of layer `tap`, in the base's dtype; mask (B, T) bool; prior (B, T, E)
        float64 log-probabilities over this stage's experts, not below -12, where `prior` names a stage.
        Differentiable in hidden, prior and its own parameters.
        """
        raise NotImplementedError


_KINDS: dict[str, type[Stage]] = {}
# Where the kinds of this molora live; a module registers its kinds when it is imported.
_HOMES = {
    "fixed": "molora_cli.core.router.constant",
    "uniform": "molora_cli.core.router.constant",
    "vocab": "molora_cli.core.router.vocab",
    "centroid": "molora_cli.core.router.centroid",
    "context": "molora_cli.core.router.context",
    "sequence": "molora_cli.core.router.sequence",
    "taps": "molora_cli.core.router.taps",
    "layer": "molora_cli.core.router.taps",
    "hidden": "molora_cli.core.router.taps",
    "arrow": "molora_cli.core.router.arrow",
    "xlora": "molora_cli.core.router.xlora",
    "xlora-modules": "molora_cli.core.router.xlora",
}
T = TypeVar("T", bound=type[Stage])


def register_kind(cls: T) -> T:
    """Class decorator: makes `cls.kind` loadable from a router file."""
    _KINDS[cls.kind] = cls
    return cls


def kind_class(kind: str) -> type[Stage]:
    """The class of a kind. Raises InputError for a kind this molora does not know."""
    if kind not in _KINDS and kind in _HOMES:
        importlib.import_module(_HOMES[kind])
    if kind not in _KINDS:
        known = ", ".join(sorted({*_KINDS, *_HOMES}))
        raise InputError(
            f"this molora does not know the router kind '{kind}' (it knows {known})",
            "use the molora that wrote the bundle, or attach another: molora attach-router BUNDLE --kind ...",
        )
    return _KINDS[kind]


def stage_tensor(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...], kind: str
) -> Tensor:
    """The tensor `name` of a stage with its shape checked (None = any size). Raises MoloraError."""
    again = "attach or train the router again"
    if name not in tensors:
        raise MoloraError(f"the router file lacks the tensor '{name}' of its {kind} stage", again)
    found = tuple(tensors[name].shape)
    fits = len(found) == len(shape) and all(want in (None, n) for want, n in zip(shape, found, strict=True))
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise MoloraError(
            f"the tensor '{name}' of the router's {kind} stage has shape {found}, not ({wanted})",
            f"the router was made for another base or is damaged: {again}",
        )
    return tensors[name]
