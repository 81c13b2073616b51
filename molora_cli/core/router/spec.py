"""`router.safetensors`: one JSON header plus tensors. Reading the header needs no torch.

(The format is described for other readers in docs/bundle-format.md.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from molora_cli.errors import InputError
from molora_cli.text import shorten

ROUTER_FILE = "router.safetensors"
ROUTER_FORMAT = "1.0"
HEADER_KEY = "molora_router"  # the one key of the safetensors metadata
HEADER_LIMIT = 4 * 2**20  # characters; a header of a thousand experts is far below
BASE_EXPERT = "__base__"
_MANY = 4096  # stages, experts or groups: more is a damaged file


class StageSpec(BaseModel):
    """One stage. Unknown fields of a newer minor version survive a rewrite."""

    model_config = ConfigDict(extra="allow")

    kind: str
    input: str = "ids"
    experts: list[str]
    # [first, end) layer ranges from the input up that this stage decides; empty = one group, all layers
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

    @property
    def kind(self) -> str:
        """Kinds of the stages in order, as shown to people: "vocab+context"."""
        return "+".join(stage.kind for stage in self.stages)


def read_spec(path: Path) -> RouterSpec:
    """The header of a router file, checked. Imports no torch and reads no tensor. Raises InputError."""
    return parse_spec(_header_text(path), str(path))


def parse_spec(text: str, where: str) -> RouterSpec:
    """A router header from its JSON text; `where` names it in messages. Raises InputError."""
    if len(text) > HEADER_LIMIT:
        _bad(where, f"its header has {len(text)} characters, more than {HEADER_LIMIT}")
    try:
        raw = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _bad(where, f"its header is not JSON ({shorten(str(error))})")
    if not isinstance(raw, dict) or raw.get("format") != "molora-router":
        _bad(where, "its header does not say 'molora-router'")
    check_version(raw.get("format_version"), where)
    try:
        spec = RouterSpec.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        _bad(where, f"its header is not valid at '{shorten(field)}' ({shorten(first['msg'])})")
    check_spec(spec, where)
    return spec


def dump_spec(spec: RouterSpec) -> str:
    """The header's JSON text: the same spec gives the same bytes. Raises ValueError on NaN or infinity."""
    return json.dumps(spec.model_dump(mode="json"), sort_keys=True, ensure_ascii=True, allow_nan=False)


def check_version(version: object, where: str) -> None:
    """Refuse a newer major version by name; a newer minor one is read. Raises InputError."""
    major, dot, minor = version.partition(".") if isinstance(version, str) else ("", "", "")
    if not (dot and major.isascii() and major.isdigit() and minor.isascii() and minor.isdigit()):
        _bad(where, f"its format_version is {shorten(repr(version), 40)}, not MAJOR.MINOR")
    if len(major) > 6 or int(major) > int(ROUTER_FORMAT.partition(".")[0]):
        raise InputError(
            f"{where} has router format {shorten(str(version), 40)}; this molora reads {ROUTER_FORMAT}",
            "a newer molora reads it: pip install --upgrade molora",
        )


def check_spec(spec: RouterSpec, where: str) -> None:
    """What can be said of a header without the bundle or the base. Raises InputError."""
    if not 1 <= len(spec.stages) <= _MANY:
        _bad(where, f"it has {len(spec.stages)} stages")
    for index, stage in enumerate(spec.stages):
        name = f"stage {index} ({shorten(stage.kind, 40)})"
        if not stage.kind:
            _bad(where, f"stage {index} names no kind")
        if not 1 <= len(stage.experts) <= _MANY or len(set(stage.experts)) != len(stage.experts):
            _bad(where, f"{name} must name its experts, each once")
        if not 1 <= stage.k <= _MANY:
            _bad(where, f"{name} has k = {stage.k}; k is 1 or more")
        if not (math.isfinite(stage.temperature) and stage.temperature > 0):
            _bad(where, f"{name} has temperature {stage.temperature}; it must be above 0")
        if not (math.isfinite(stage.margin) and stage.margin >= 0):
            _bad(where, f"{name} has margin {stage.margin}; it must be 0 or more")
        if len(stage.groups) > _MANY:
            _bad(where, f"{name} has {len(stage.groups)} layer groups")
        end = stage.groups[0][0] if stage.groups else 0
        for first, after in stage.groups:
            if first != end or first < 0 or after <= first:
                _bad(where, f"{name} has layer groups {shorten(str(stage.groups))}, with a gap or an overlap")
            end = after


def check_experts(spec: RouterSpec, adapters: Sequence[str], where: str = "the router") -> None:
    """Every expert is an adapter of the bundle or the base. Raises InputError naming those that are not."""
    for stage in spec.stages:
        missing = [e for e in stage.experts if e != BASE_EXPERT and e not in adapters]
        if missing:
            raise InputError(
                f"{where} ({shorten(stage.kind, 40)}) routes to {_names(missing)}, which the bundle lacks "
                f"(it has {_names(adapters)})",
                "add the adapter to the bundle, or attach or train another router",
            )


def check_layers(spec: RouterSpec, n_layers: int, where: str = "the router") -> None:
    """Layer groups end with the base's last layer (a stage may leave layers to the others). Raises
    InputError."""
    ends = [stage.groups[-1][1] if stage.groups else n_layers for stage in spec.stages]
    last = max(range(len(ends)), key=ends.__getitem__)
    if ends[last] != n_layers:
        raise InputError(
            f"the layer groups of {where} ({shorten(spec.stages[last].kind, 40)}) end at layer {ends[last]}, "
            f"the base has {n_layers} layers",
            "use the base that the router was made for, or attach or train another router",
        )


def _header_text(path: Path) -> str:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"{path} is not a file", "attach a router: molora attach-router BUNDLE --kind ...")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        _bad(str(path), f"it is not a readable safetensors file ({shorten(str(error))})")
    if HEADER_KEY not in metadata:
        _bad(str(path), f"its metadata has no '{HEADER_KEY}'")
    return str(metadata[HEADER_KEY])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _names(names: Sequence[str]) -> str:
    return shorten(", ".join(f"'{name}'" for name in names), 200) if names else "none"


def _bad(where: str, why: str) -> NoReturn:
    raise InputError(
        f"{where} is not a router molora can use: {why}",
        "attach or train it again: molora attach-router BUNDLE --kind ..., or molora train-router BUNDLE ...",
    )
