"""What a path holds, told by content, and the facts that headers give of it. No torch, no tensor is read."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from molora_cli.core.adapter.config import base_hint, classify
from molora_cli.core.adapter.files import read_json, read_start, refuse_impostors, shown
from molora_cli.core.adapter.gguf_header import read_gguf
from molora_cli.core.adapter.gguf_lora import classify_gguf, gguf_base_hint, gguf_factors
from molora_cli.core.adapter.header import TensorInfo, read_header
from molora_cli.core.adapter.locate import locate
from molora_cli.core.adapter.mlx import mlx_factors
from molora_cli.core.adapter.mlx_config import WEIGHTS as MLX_WEIGHTS
from molora_cli.core.adapter.names import parse_key
from molora_cli.core.adapter.tensors import open_tensors
from molora_cli.core.bundle.manifest import MANIFEST_FILE, AdapterEntry
from molora_cli.core.bundle.store import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Bundle
from molora_cli.core.trace_files import is_trace_file
from molora_cli.errors import InputError
from molora_cli.refs import Ref

What = Literal["bundle", "adapter", "config", "trace"]
_TAKES = "molora inspect takes a bundle, an adapter, an adapter_config.json or a saved trace"
# what is shown of a config, of PEFT or of MLX, and of the fields of a GGUF file
_SHOWN = (
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "bias",
    "target_modules", "fine_tune_type", "num_layers", "lora_parameters",
)  # fmt: skip
_GGUF_FIELDS = ("general.architecture", "general.name", "adapter.type", "adapter.lora.alpha")


def recognise(path: Path) -> What:
    """What lies at `path`. Raises InputError where it is none of the four, saying what it is instead."""
    if not os.path.lexists(path):
        raise InputError(f"{shown(path)} does not exist", f"check the path; {_TAKES}")
    if path.is_dir():
        return _recognise_folder(path)
    start = read_start(path, 512)
    if start.startswith(b"GGUF"):
        return "adapter"
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
    if path.suffix == ".json":
        read_json(path, path.name)  # says what is there instead: a pointer, a web page, UTF-16
    refuse_impostors(path, start)
    raise InputError(f"{shown(path)} is a file of no kind known here", _TAKES)


def _recognise_folder(path: Path) -> What:
    names = {p.name for p in path.iterdir()}
    if MANIFEST_FILE in names:
        return "bundle"
    if names & {
        ADAPTER_CONFIG,
        ADAPTER_WEIGHTS,
        "adapter_model.bin",
        *MLX_WEIGHTS,
        "xlora_config.json",
    }:
        return "adapter"
    if sum(name.endswith(".gguf") for name in names) == 1 and "config.json" not in names:
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
    """An adapter (folder, .gguf, or a config alone): verdict with reasons, base, and what its header tells.

    Raises InputError where the config is missing or cannot be read.
    """
    folder = path if path.is_dir() else None
    gguf = _gguf_file(path)
    if gguf is not None:
        header = read_gguf(gguf)
        facts = {"what": "adapter", "path": str(path), **classify_gguf(header).as_dict()}
        facts["base"] = gguf_base_hint(header)
        facts["config"] = {
            name: _plain(header.fields[name]) for name in _GGUF_FIELDS if name in header.fields
        }
        facts["weights"] = _weights_facts(gguf.name, lambda: gguf_factors(header))
    else:
        if folder and not os.path.lexists(folder / ADAPTER_CONFIG):
            locate(Ref("local", str(path), path=path))  # says what such a folder lacks
        config = read_json(path / ADAPTER_CONFIG if folder else path)
        facts = {"what": "adapter", "path": str(path), **classify(config).as_dict()}
        facts["base"] = base_hint(config)
        facts["config"] = {name: _plain(config[name]) for name in _SHOWN if config.get(name) is not None}
        facts["weights"] = _folder_weights(folder, facts["kind"]) if folder else None
    if facts["weights"] and facts["weights"].get("problem"):
        facts["verdict"] = "refused"
    return facts


def _plain(value: Any) -> Any:
    """A field of a config as JSON can say it: NaN and infinity, which Python reads, as their names."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    usable = isinstance(value, str | int | None) or (isinstance(value, float) and math.isfinite(value))
    return value if usable else str(value)


def _gguf_file(path: Path) -> Path | None:
    """The .gguf file that a path means: itself, or the only one in a folder without other weights."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    found = sorted(path.glob("*.gguf"))
    others = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, "adapter_model.bin", *MLX_WEIGHTS)
    return found[0] if len(found) == 1 and not any((path / n).exists() for n in others) else None


def _folder_weights(folder: Path, kind: str) -> dict[str, Any]:
    """Ranks, targets, dtypes and parameters of a folder's tensors, by their header."""
    file = folder / ADAPTER_WEIGHTS
    if os.path.lexists(file):
        return _weights_facts(file.name, lambda: _peft_factors(file))
    mlx = next((folder / name for name in MLX_WEIGHTS if (folder / name).exists()), None)
    if mlx is not None and kind == "mlx":
        return _weights_facts(mlx.name, lambda: mlx_factors(open_tensors(mlx)))
    if (folder / "adapter_model.bin").exists():
        return {
            "file": "adapter_model.bin",
            "problem": None,
            "note": "a .bin file: its tensors are read when it is composed",
        }
    also = f" ({mlx.name} is)" if mlx is not None else ""
    return {"file": None, "problem": f"there is no {ADAPTER_WEIGHTS}{also}"}


def _peft_factors(file: Path) -> list[tuple[str, int, TensorInfo]]:
    """(module, rank, tensor) of every A and B."""
    found = []
    for name, info in read_header(file).tensors.items():
        key = parse_key(name)
        if key is not None and key.role in ("A", "B") and len(info.shape) == 2:
            found.append((key.module, info.shape[key.role == "B"], info))
    return found


def _weights_facts(name: str, read: Callable[[], list[tuple[str, int, TensorInfo]]]) -> dict[str, Any]:
    try:
        factors = read()
    except InputError as error:
        return {"file": name, "problem": error.message}
    if not factors:
        return {"file": name, "problem": "none of its tensors is a LoRA factor"}
    ranks = {module: rank for module, rank, _ in factors}
    return {
        "file": name,
        "problem": None,
        "tensors": len(factors),
        "modules": len(ranks),
        "targets": _targets(ranks),
        "ranks": {str(rank): count for rank, count in sorted(Counter(ranks.values()).items())},
        "dtypes": sorted({info.dtype for _, _, info in factors}),
        "parameters": sum(info.count for _, _, info in factors),
    }
