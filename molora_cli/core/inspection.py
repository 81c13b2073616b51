"""What a path holds, told by content, and the facts that headers give of it. No torch, no tensor is read."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from molora_cli.core.adapter.config import base_hint, classify
from molora_cli.core.adapter.files import read_json, read_start, shown
from molora_cli.core.adapter.header import read_header
from molora_cli.core.adapter.names import parse_key
from molora_cli.core.bundle.manifest import MANIFEST_FILE, AdapterEntry
from molora_cli.core.bundle.store import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Bundle
from molora_cli.core.trace_files import is_trace_file
from molora_cli.errors import InputError

What = Literal["bundle", "adapter", "config", "trace"]
_TAKES = "molora inspect takes a bundle, an adapter folder, an adapter_config.json or a saved trace"


def recognise(path: Path) -> What:
    """What lies at `path`. Raises InputError where it is none of the four, saying what it is instead."""
    if not os.path.lexists(path):
        raise InputError(f"{shown(path)} does not exist", f"check the path; {_TAKES}")
    if path.is_dir():
        return _recognise_folder(path)
    start = read_start(path, 64)
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        found = read_json(path, path.name)
        if found.get("format") == "molora-bundle":
            raise InputError(
                f"{shown(path)} is a bundle's manifest", f"give its folder: {shown(path.parent)}"
            )
        return "config"
    if is_trace_file(path):
        return "trace"
    if start[8:9] == b"{":
        read_header(path)
        raise InputError(f"{shown(path)} holds tensors, and no trace", f"give its folder; {_TAKES}")
    raise InputError(f"{shown(path)} is a file of no kind known here", _TAKES)


def _recognise_folder(path: Path) -> What:
    names = {p.name for p in path.iterdir()}
    if MANIFEST_FILE in names:
        return "bundle"
    if names & {
        ADAPTER_CONFIG,
        ADAPTER_WEIGHTS,
        "adapter_model.bin",
        "adapters.safetensors",
        "xlora_config.json",
    }:
        return "adapter"
    if "config.json" in names:
        raise InputError(
            f"{shown(path)} is a model, not an adapter or a bundle", "molora compose --base takes it"
        )
    inner = sorted(p.name for p in path.iterdir() if (p / ADAPTER_CONFIG).is_file())
    hint = f"; adapters lie in {', '.join(inner[:6])}" if inner else ""
    raise InputError(f"{shown(path)} is no bundle and no adapter{hint}", _TAKES)


def bundle_facts(bundle: Bundle, base: str | None = None) -> dict[str, Any]:
    """Base, adapters and router of a bundle as a JSON-ready document; nothing is downloaded.

    base: a base that was named instead of the recorded one.
    """
    manifest = bundle.manifest
    place, warnings = _base_place(bundle, base)
    return {
        "what": "bundle",
        "path": str(bundle.path),
        "format_version": manifest.format_version,
        "created_by": manifest.created_by,
        "digest": bundle.digest,
        "base": {"id": manifest.base.id, "revision": manifest.base.revision, **place},
        "adapters": [_adapter_facts(entry) for entry in manifest.adapters],
        "router": _router_facts(bundle),
        "warnings": warnings,
    }


def _base_place(bundle: Bundle, base: str | None) -> tuple[dict[str, Any], list[str]]:
    """Where the base lies on this machine, or why it was not found; and what was found odd about it."""
    from molora_cli.core.base.lookup import find_base

    try:
        path, warnings = find_base(bundle.manifest.base, base, network=False)
    except InputError as error:
        return {"path": None, "problem": error.message}, []
    return {"path": str(path), "problem": None}, warnings


def _adapter_facts(entry: AdapterEntry) -> dict[str, Any]:
    ranks = Counter(m.rank for m in entry.modules.values())
    scales = sorted({m.scale for m in entry.modules.values()})
    return {
        "name": entry.name,
        "source": entry.source,
        "revision": entry.revision,
        "licence": entry.licence,
        "dtype": entry.dtype,
        "parameters": entry.parameters,
        "modules": len(entry.modules),
        "targets": _targets(entry.modules),
        "ranks": {str(rank): count for rank, count in sorted(ranks.items())},
        "scales": scales,
        "coverage": entry.coverage.model_dump() if entry.coverage else None,
        "effect": entry.effect.model_dump() if entry.effect else None,
        "notes": entry.notes,
    }


def _targets(modules: Any) -> dict[str, int]:
    """Last part of the module paths -> how many modules: {"q_proj": 30, "v_proj": 30}."""
    return dict(sorted(Counter(str(module).rpartition(".")[2] for module in modules).items()))


def _router_facts(bundle: Bundle) -> dict[str, Any] | None:
    """The router's header; kinds this molora does not know are shown as they stand."""
    spec = bundle.router_spec
    if spec is None:
        return None
    stages = [stage.model_dump(mode="json") for stage in spec.stages]
    return {
        "kind": spec.kind,
        "format_version": spec.format_version,
        "stages": stages,
        "training": spec.training,
    }


def adapter_facts(path: Path) -> dict[str, Any]:
    """An adapter folder or its config alone: verdict with reasons, base, and what the tensors' header tells.

    Raises InputError where the config is missing or cannot be read.
    """
    folder = path if path.is_dir() else None
    config_file = path / ADAPTER_CONFIG if folder else path
    config = read_json(config_file)
    facts: dict[str, Any] = {"what": "adapter", "path": str(path), **classify(config).as_dict()}
    facts["base"] = base_hint(config)
    known = (
        "peft_type",
        "task_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "lora_bias",
        "bias",
        "target_modules",
    )
    facts["config"] = {name: config[name] for name in known if config.get(name) is not None}
    facts["weights"] = _weights_facts(folder) if folder else None
    if folder and facts["weights"].get("problem"):
        facts["verdict"] = "refused"
    return facts


def _weights_facts(folder: Path) -> dict[str, Any]:
    """Ranks, targets, dtypes and parameters from the header of an adapter's tensors."""
    file = folder / ADAPTER_WEIGHTS
    if not os.path.lexists(file):
        other = [
            n for n in ("adapter_model.bin", "adapters.safetensors", "adapters.npz") if (folder / n).exists()
        ]
        if "adapter_model.bin" in other:
            return {
                "file": other[0],
                "problem": None,
                "note": "a .bin file: its tensors are read when it is composed",
            }
        return {
            "file": None,
            "problem": f"there is no {ADAPTER_WEIGHTS}" + (f" ({other[0]} is)" if other else ""),
        }
    try:
        header = read_header(file)
    except InputError as error:
        return {"file": file.name, "problem": error.message}
    named = [(parse_key(name), info) for name, info in header.tensors.items()]
    factors = [(key, info) for key, info in named if key is not None]
    downs = [(key.module, info.shape[0]) for key, info in factors if key.role == "A" and len(info.shape) == 2]
    if not downs:
        return {"file": file.name, "problem": f"none of its {len(named)} tensors is a LoRA factor"}
    return {
        "file": file.name,
        "problem": None,
        "tensors": len(named),
        "modules": len({module for module, _ in downs}),
        "targets": _targets({module for module, _ in downs}),
        "ranks": {str(rank): count for rank, count in sorted(Counter(rank for _, rank in downs).items())},
        "dtypes": sorted({info.dtype for _, info in factors}),
        "parameters": sum(info.count for _, info in factors),
    }
