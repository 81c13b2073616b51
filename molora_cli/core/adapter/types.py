"""An adapter as it is known from its headers and one pass over its values: no tensor is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molora_cli.core.adapter.tensors import TensorFile, open_tensors


@dataclass(frozen=True)
class Part:
    """One of several separate projections that together make a fused module (q, k, v of qkv_proj).

    rows: the half-open range of the fused module's output rows; the rest as in ModuleLora.
    """

    keys: dict[str, str]
    rank: int
    scale: float
    rows: tuple[int, int]


@dataclass(frozen=True)
class ModuleLora:
    """One module's part of an adapter.

    module: path in the base, say "model.layers.0.self_attn.q_proj"; rank r; alpha; scale = alpha / r, or
    alpha / sqrt(r) with rsLoRA, resolved per module. kind: "linear", "conv1d" or "embedding".
    keys: the file's tensor names for A (r, in), B (out, r) and, where present, "bias" (out,) and
    "magnitude" (out,). parts: where the file holds separate projections of a fused module, they replace keys:
    A is then theirs one above the other, B block-diagonal.
    """

    module: str
    rank: int
    alpha: float
    scale: float
    in_features: int
    out_features: int
    dtype: str
    keys: dict[str, str]
    kind: str = "linear"
    parts: tuple[Part, ...] = ()

    @property
    def parameters(self) -> int:
        return self.rank * (self.in_features + self.out_features)


@dataclass(frozen=True)
class Adapter:
    """One adapter after its checks. `modules` is keyed by module path; `notes` are for the user.

    in_file: how many modules the file adapts (more than `modules` where separate projections were fused).
    canonical: config and weights are already what PEFT opens on this base, name by name, with nothing to add.
    format: "peft", "mlx" or "gguf". tensors: set where the factors are not those of `weights` as they stand.
    """

    name: str
    path: Path
    weights: Path
    source: str
    config: dict[str, Any]
    modules: dict[str, ModuleLora]
    revision: str | None = None
    base_hint: str | None = None
    licence: str | None = None
    sha256: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)
    in_file: int = 0
    canonical: bool = False
    format: str = "peft"
    tensors: TensorFile | None = field(default=None, compare=False, repr=False)

    def open(self) -> TensorFile:
        """The factors by the names that `modules` uses, in PEFT's orientation. Raises InputError."""
        return open_tensors(self.weights) if self.tensors is None else self.tensors

    @property
    def ranks(self) -> list[int]:
        return sorted({m.rank for m in self.modules.values()})

    @property
    def parameters(self) -> int:
        return sum(m.parameters for m in self.modules.values())
