"""X-LoRA folders as PEFT saves them: what their save loses, and what can still be composed.

PEFT drops names that hold another adapter's name as a path segment. X-LoRA's adapters are named "0", "1",
..., so `layers.0.weight` of the classifier goes, and layer 1 of adapter 0, layer 0 of adapter 1.
(peft/utils/save_and_load.py, 0.19 to 0.21)
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

from molora_cli.core.adapter.files import shown
from molora_cli.core.adapter.header import read_header
from molora_cli.core.adapter.locate import CONFIG, Located
from molora_cli.core.adapter.names import parse_key
from molora_cli.core.adapter.targets import Targets
from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.errors import InputError
from molora_cli.text import shorten

_CLASSIFIER = "internal_xlora_classifier."
_SUBFOLDER = re.compile(r"\d{1,4}\Z")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,9})\.")
_MAX_DEPTH = 64


def is_leftover(key: str) -> bool:
    """Whether a tensor is X-LoRA's classifier, or a copy of the base that its save swept up."""
    return _CLASSIFIER in key or key.startswith("base_model.lora_model.")


def xlora_error(place: Located, config: dict[str, Any]) -> InputError:
    """Why an X-LoRA folder is no adapter, what its classifier lost, and how to compose its adapters."""
    inner = sorted(
        (p for p in place.folder.iterdir() if _SUBFOLDER.match(p.name) and (p / CONFIG).is_file()),
        key=lambda p: int(p.name),
    )
    if inner:
        named = " ".join(f"adapter{p.name}={shown(p)}" for p in inner[:4])
        remedy = f"compose its adapters: {named}{' ...' if len(inner) > 4 else ''}, then molora train-router"
    else:
        remedy = "compose the adapters it was made from, then molora train-router"
    lost = _lost(place, config)
    why = f", and its classifier lost {', '.join(lost)} (PEFT's save drops such names)" if lost else ""
    return InputError(
        f"{shown(place.config or place.folder)} is of an X-LoRA, a router over several adapters, "
        f"not one adapter{why}",
        remedy,
    )


def _lost(place: Located, config: dict[str, Any]) -> list[str]:
    """Linear layers of the classifier that the file lacks. The layers between them have no tensors."""
    depth, dropout = config.get("xlora_depth", 1), config.get("xlora_dropout_p", 0.2)
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= _MAX_DEPTH:
        return []
    try:
        present = {key.rpartition(_CLASSIFIER)[2] for key in read_header(place.weights).tensors}
    except InputError:
        return []
    step = 3 if isinstance(dropout, int | float) and dropout > 0 else 2
    wanted = [f"layers.{n * step}.weight" for n in range(depth)]
    return [name for name in wanted if name not in present]


def xlora_losses(file: TensorFile, targets: Targets, adapted: Set[str]) -> list[str]:
    """Notes on an adapter out of an X-LoRA folder: the layers that its config targets and the save lost."""
    leftovers = [key for key in file.infos if is_leftover(key) and parse_key(key) is None]
    if not leftovers:
        return []
    notes = [f"saved by X-LoRA: {len(leftovers)} tensors of its classifier and of the base were ignored"]
    missing = sorted(targets.modules - adapted) if targets.known else []
    if missing:
        layers = sorted({int(m.group(1)) for name in missing if (m := _LAYER.search(name))})
        of = f" (layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers[:8]))})" if layers else ""
        notes.append(
            f"X-LoRA's save lost {len(missing)} of {len(targets.modules)} modules of this adapter{of}; "
            f"what is there is read exactly, the original adapter had more ({shorten(missing[0], 70)}, ...)"
        )
    return notes
