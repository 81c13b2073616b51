"""What a kind of router is, and the one table of kinds.

A bundle's router is an ordered list of stages (rules first, the gate last). Each stage is built from its spec
(the JSON header of router.safetensors, see `spec`) and its tensors by the class registered for its kind; the
reader knows no kind by itself. A stage that decides from token ids alone implements `IdStage`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from molora_cli.core.router.spec import BASE_EXPERT
from molora_cli.errors import InputError, MoloraError

if TYPE_CHECKING:
    from molora_cli.core.router.spec import StageSpec

__all__ = [
    "BASE_EXPERT",
    "IdStage",
    "Scores",
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
    device: where its tensors are to live.
    """

    n_layers: int
    embedding: Tensor | None = None
    device: Any = "cpu"
    extra: Mapping[str, Any] = field(default_factory=dict)


class IdStage(ABC):
    """A stage that reads token ids only: its route is known before the forward and needs no base.

    Arithmetic is float64, so that a full, a chunked and a cached run agree on every route. `tunable`: whether
    k and temperature may be changed at run time; a stage that states gates outright says no.
    """

    kind: ClassVar[str]
    needs_embedding: ClassVar[bool] = False
    tunable: ClassVar[bool] = True

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        self.spec = spec
        self.around = around

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.spec.experts)

    @property
    def groups(self) -> int:
        return max(1, len(self.spec.groups))

    @property
    def abstains(self) -> bool:
        """Whether some tokens may be left to the stages after this one."""
        return False

    def start(self, batch: int) -> State:
        """State before the first token: tensors whose first dimension is the batch."""
        return {}

    @abstractmethod
    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        """Scores of the next block of tokens and the state after it.

        ids (B, T) int64; mask (B, T) bool, False = padding: such tokens never enter the state and their
        scores are ignored. Pure: `state` is not changed in place, so that a beam can be copied and a cache
        cropped.
        """


_KINDS: dict[str, type[IdStage]] = {}
# Where the kinds of this molora live; a module registers its kinds when it is imported.
_HOMES = {
    "fixed": "molora_cli.core.router.constant",
    "uniform": "molora_cli.core.router.constant",
    "vocab": "molora_cli.core.router.vocab",
    "centroid": "molora_cli.core.router.centroid",
    "context": "molora_cli.core.router.context",
}
T = TypeVar("T", bound=type[IdStage])


def register_kind(cls: T) -> T:
    """Class decorator: makes `cls.kind` loadable from a router file."""
    _KINDS[cls.kind] = cls
    return cls


def kind_class(kind: str) -> type[IdStage]:
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
