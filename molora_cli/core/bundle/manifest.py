"""`molora.json`, the bundle's manifest. (docs/bundle-format.md is the normative description.)"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

MANIFEST_FILE = "molora.json"
BUNDLE_FORMAT = "1.0"


class _Open(BaseModel):
    """Fields of a newer minor version survive a rewrite."""

    model_config = ConfigDict(extra="allow")


class Fingerprint(_Open):
    """What makes a base that base. structure: architecture, sizes, rope, vocabulary; tokenizer: digest of its
    vocabulary and merges; samples: tensor name -> a few rows as float lists, for the cosine check."""

    structure: dict[str, Any] = Field(default_factory=dict)
    tokenizer: str | None = None
    samples: dict[str, dict[str, Any]] = Field(default_factory=dict)


class BaseEntry(_Open):
    id: str
    revision: str | None = None
    path_hint: str | None = None
    fingerprint: Fingerprint = Field(default_factory=Fingerprint)


class ModuleEntry(_Open):
    rank: int
    alpha: float
    scale: float


class Coverage(_Open):
    """modules matched in the base / present in the adapter's file / adaptable in the base."""

    matched: int
    in_file: int
    in_base: int


class Effect(_Open):
    """Logit change on the probe text, adapter on every token: largest and RMS difference, and the RMS of the
    base's logits for scale."""

    max_abs: float
    rms: float
    base_rms: float
    probe: str = ""


class AdapterEntry(_Open):
    name: str
    folder: str
    source: str
    revision: str | None = None
    sha256: str
    licence: str | None = None
    dtype: str = ""
    parameters: int = 0
    modules: dict[str, ModuleEntry] = Field(default_factory=dict)
    coverage: Coverage | None = None
    effect: Effect | None = None
    notes: list[str] = Field(default_factory=list)


class RoutingEntry(_Open):
    """Which router file belongs to this manifest; its header is the home of everything else."""

    file: str
    kind: str
    sha256: str


class Manifest(_Open):
    format: str = "molora-bundle"
    format_version: str = BUNDLE_FORMAT
    created_by: str = ""
    base: BaseEntry
    adapters: list[AdapterEntry]
    routing: RoutingEntry | None = None
