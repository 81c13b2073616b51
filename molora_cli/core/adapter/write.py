"""Write an adapter as the plain PEFT folder that PEFT and every server of PEFT adapters open."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.fuse import factor_arrays
from molora_cli.core.adapter.locate import CONFIG, WEIGHTS
from molora_cli.core.adapter.names import canonical_key
from molora_cli.core.adapter.types import Adapter


def write_peft(adapter: Adapter, folder: Path) -> None:
    """adapter_config.json and adapter_model.safetensors in `folder`, which is made where it is missing.

    Bytes are copied where the source is canonical already; else names are PEFT's, target_modules lists the
    adapted modules in full, differing ranks and alphas stand in the patterns, copies of base weights
    are left out.
    Files are flushed to disk; making the whole folder appear at once is the caller's part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if adapter.canonical:
        shutil.copyfile(adapter.path / CONFIG, folder / CONFIG)
        shutil.copyfile(adapter.weights, folder / WEIGHTS[0])
    else:
        text = json.dumps(peft_config(adapter), indent=2, sort_keys=True, allow_nan=False)
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
        _write_tensors(adapter, folder / WEIGHTS[0])
    for name in (CONFIG, WEIGHTS[0]):
        with (folder / name).open("rb") as handle:
            os.fsync(handle.fileno())


def peft_config(adapter: Adapter) -> dict[str, Any]:
    """A PEFT LoraConfig, as JSON, that gives exactly the adapter's modules, ranks and scales."""
    modules = adapter.modules
    rank = Counter(m.rank for m in modules.values()).most_common(1)[0][0]
    alpha = Counter(m.alpha for m in modules.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base_hint,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": bool(adapter.config.get("use_rslora")),
        "use_dora": any("magnitude" in m.keys for m in modules.values()),
        "lora_bias": any("bias" in m.keys for m in modules.values()),
        "fan_in_fan_out": any(m.kind == "conv1d" for m in modules.values()),
        "init_lora_weights": True,
        # PEFT reads these keys as regular expressions
        "rank_pattern": {re.escape(p): m.rank for p, m in modules.items() if m.rank != rank},
        "alpha_pattern": {re.escape(p): _plain(m.alpha) for p, m in modules.items() if m.alpha != alpha},
        "target_modules": sorted(modules),
    }


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else value


def _write_tensors(adapter: Adapter, path: Path) -> None:
    """The weights as safetensors (the format is described in header.py), sorted by name."""
    file = adapter.open()
    tensors: dict[str, tuple[str, NDArray[Any]]] = {}
    for module, lora in adapter.modules.items():
        for role, (dtype, array) in factor_arrays(file, lora).items():
            flat = array.reshape(-1) if role in ("magnitude", "bias") else array
            tensors[canonical_key(module, role, lora.kind == "embedding")] = dtype, flat
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    # widest types first, as readers expect tensors aligned to their own size
    for name, (dtype, array) in sorted(tensors.items(), key=lambda t: (-t[1][1].itemsize, t[0])):
        end = position + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for name in list(header)[1:]:
            handle.write(np.ascontiguousarray(tensors[name][1]).tobytes())
