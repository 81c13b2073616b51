"""X-LoRA folders as PEFT saves them: what their save loses, what can still be composed, and the classifier of
one that is whole.

PEFT drops names that hold another adapter's name as a path segment. X-LoRA's adapters are named "0", "1",
..., so `layers.0.weight` of the classifier goes, and layer 1 of adapter 0, layer 0 of adapter 1.
(peft/utils/save_and_load.py, 0.19 to 0.21)
"""

from __future__ import annotations

import math
import re
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.files import read_json, shown
from molora_cli.core.adapter.header import read_header
from molora_cli.core.adapter.locate import CONFIG, Located, locate
from molora_cli.core.adapter.names import parse_key
from molora_cli.core.adapter.targets import Targets
from molora_cli.core.adapter.tensors import FLOATS, TensorFile, open_tensors
from molora_cli.errors import InputError
from molora_cli.refs import parse_ref
from molora_cli.text import shorten

_CLASSIFIER = "internal_xlora_classifier."
CLASSIFIER = f"base_model.{_CLASSIFIER}layers."  # followed by a layer's number
_SUBFOLDER = re.compile(r"\d{1,4}\Z")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,9})\.")
_MAX_DEPTH = 64


def is_leftover(key: str) -> bool:
    """Whether a tensor is X-LoRA's classifier, or a copy of the base that its save swept up."""
    return _CLASSIFIER in key or key.startswith("base_model.lora_model.")


def xlora_error(place: Located, config: dict[str, Any]) -> InputError:
    """Why an X-LoRA folder is no adapter, what its classifier lost, and how to compose its adapters."""
    inner = _adapters(place.folder)
    if inner:
        named = " ".join(f"adapter{p.name}={shown(p)}" for p in inner[:4])
        remedy = f"compose its adapters: {named}{' ...' if len(inner) > 4 else ''}, then "
    else:
        remedy = "compose the adapters it was made from, then "
    lost = _lost(place, config)
    whole = f"molora attach-router BUNDLE --kind xlora --xlora {shown(place.folder)}"
    remedy += "molora train-router" if lost else whole
    why = f", and its classifier lost {', '.join(lost)} (PEFT's save drops such names)" if lost else ""
    return InputError(
        f"{shown(place.config or place.folder)} is of an X-LoRA, a router over several adapters, "
        f"not one adapter{why}",
        remedy,
    )


def _adapters(folder: Path) -> list[Path]:
    """The subfolders that hold its adapters, by number."""
    found = (p for p in folder.iterdir() if _SUBFOLDER.match(p.name) and (p / CONFIG).is_file())
    return sorted(found, key=lambda p: int(p.name))


def _linears(config: dict[str, Any]) -> list[str]:
    """Numbers of the classifier's linear layers, from its input up; what lies between has no tensors. []
    where the config does not tell."""
    depth, dropout = config.get("xlora_depth", 1), config.get("xlora_dropout_p", 0.2)
    if isinstance(depth, bool) or not isinstance(depth, int) or not 1 <= depth <= _MAX_DEPTH:
        return []
    step = 3 if isinstance(dropout, int | float) and dropout > 0 else 2
    return [str(n * step) for n in range(depth)]


def _lost(place: Located, config: dict[str, Any]) -> list[str]:
    """Linear layers of the classifier that the file lacks."""
    try:
        present = {key.rpartition(_CLASSIFIER)[2] for key in read_header(place.weights).tensors}
    except InputError:
        return []
    wanted = [f"layers.{number}.weight" for number in _linears(config)]
    return [name for name in wanted if name not in present]


@dataclass(frozen=True)
class XLoraFolder:
    """An X-LoRA model as PEFT saves it, with nothing lost. linears: numbers of its classifier's linear
    layers; adapters: the folders of its adapters in order."""

    folder: Path
    config: dict[str, Any]
    file: TensorFile
    linears: tuple[str, ...]
    adapters: tuple[Path, ...]

    @property
    def shown(self) -> str:
        return shown(self.folder)

    def number(self, name: str, default: float) -> float:
        """A number of its config. Raises InputError for anything else, and for NaN and infinity."""
        value = self.config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._refuse(name, value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value of its config. Raises InputError for anything else."""
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            self._refuse(name, value)
        return bool(value)

    def _refuse(self, name: str, value: object) -> None:
        raise InputError(
            f"{shown(self.folder / CONFIG)}: {name} is {shorten(repr(value), 40)}", "write a usable value"
        )

    def linear(self, number: str, part: str) -> NDArray[np.float32]:
        """weight (out, in) or bias (out,) of a linear layer. Raises InputError where it is no such tensor."""
        key = f"{CLASSIFIER}{number}.{part}"
        info = self.file.infos.get(key)
        if info is None or info.dtype not in FLOATS or len(info.shape) != (2 if part == "weight" else 1):
            raise InputError(
                f"{shown(self.file.path)} holds no usable tensor '{key}'", "save the X-LoRA model again"
            )
        values = self.file.floats(key)
        if not bool(np.isfinite(values).all()):
            raise InputError(f"{shown(self.file.path)}: '{key}' holds NaN or infinity", "take another save")
        return values


def open_xlora(path: Path) -> XLoraFolder:
    """The X-LoRA model in a local folder. Raises InputError for what is none, or lost tensors in its save."""
    place = locate(parse_ref(str(path.absolute())))
    config = read_json(place.config) if place.config is not None else {}
    if config.get("peft_type") != "XLORA":
        raise InputError(f"{shown(path)} is no X-LoRA model that PEFT saved", "name its folder")
    if _lost(place, config) or not _linears(config):
        raise xlora_error(place, config)
    adapters, named = _adapters(place.folder), config.get("adapters")
    if not isinstance(named, dict) or not named or len(adapters) != len(named):
        raise InputError(
            f"{shown(path)} has {len(adapters)} numbered folders of adapters, its config "
            f"{len(named) if isinstance(named, dict) else 0}",
            "put each adapter's folder into it: 0, 1, ...",
        )
    file = open_tensors(place.weights)
    return XLoraFolder(place.folder, config, file, tuple(_linears(config)), tuple(adapters))


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
