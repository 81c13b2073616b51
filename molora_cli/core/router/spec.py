"""`router.safetensors`: one JSON header plus tensors. Reading the header needs no torch.

(The format is described for other readers in docs/bundle-format.md.)
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

ROUTER_FILE = "router.safetensors"
ROUTER_FORMAT = "1.0"


class StageSpec(BaseModel):
    """One stage. Unknown fields of a newer minor version survive a rewrite."""

    model_config = ConfigDict(extra="allow")

    kind: str
    input: str = "ids"
    experts: list[str]
    # [first, end) layer ranges from the input up; empty = one group, all layers
    groups: list[tuple[int, int]] = Field(default_factory=list)
    k: int = 1
    temperature: float = 1.0
    margin: float = 0.0
    params: dict[str, Any] = Field(default_factory=dict)


class RouterSpec(BaseModel):
    """The whole header. `tensors` of stage i are stored as `stages.<i>.<name>`."""

    model_config = ConfigDict(extra="allow")

    format: str = "molora-router"
    format_version: str = ROUTER_FORMAT
    stages: list[StageSpec]
    tokenizer: str | None = None  # fingerprint of the tokenizer the router was made with
    embedding: str | None = None  # fingerprint of the base's input embedding
    training: dict[str, Any] = Field(default_factory=dict)  # digests of data, seed, metrics
