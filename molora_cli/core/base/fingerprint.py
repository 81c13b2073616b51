"""What makes a base that base, and whether another folder is the same one.

Three steps: structure (architecture, sizes, rope, vocabulary) and tokenizer must agree; then the cosine
between sampled rows of a few tensors tells the same weights (also at another precision) from others. No
torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.header import TensorInfo
from molora_cli.core.base.structure import (
    BaseModules,
    config_number,
    read_structure,
    read_tensor_infos,
    text_config,
)
from molora_cli.core.bundle.manifest import BaseEntry, Fingerprint
from molora_cli.errors import InputError
from molora_cli.text import shorten

SAME = 0.999  # cosine of sampled rows: the same base
OTHER_PRECISION = 0.98  # the same base, quantised or rounded otherwise
_TENSORS = 8
_ROWS = 4
_COLUMNS = 64
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


# -- step one: structure ------------------------------------------------------
def structure(base: BaseModules) -> dict[str, Any]:
    """The numbers that must agree. Values that the config leaves to their defaults are filled in."""
    text = text_config(base.config)
    heads = config_number(text, "num_attention_heads", "n_head", "num_heads")
    hidden = config_number(text, "hidden_size", "n_embd", "d_model")
    head_dim = config_number(text, "head_dim")
    if head_dim is None and heads and hidden:
        head_dim = hidden // heads
    found = {
        "model_type": base.model_type,
        "layers": base.n_layers,
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": config_number(text, "num_key_value_heads", "n_head_kv") or heads,
        "head_dim": head_dim,
        "vocabulary": base[base.embedding].in_features
        if base.embedding
        else config_number(text, "vocab_size"),
        "experts": config_number(text, "num_local_experts", "num_experts", "n_routed_experts"),
        "tied": base.tied,
        **_rope(text),
    }
    return {key: value for key, value in found.items() if value is not None}


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """Theta and type, from the old fields or the new `rope_parameters`; kinds of layers may each have
    their own."""
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        return {}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        return {"rope": json.dumps(parameters, sort_keys=True)}
    theta = parameters.get("rope_theta", text.get("rope_theta"))
    found: dict[str, Any] = {}
    if isinstance(theta, int | float):
        found["rope_theta"] = float(theta)
        found["rope_type"] = str(parameters.get("rope_type") or parameters.get("type") or "default")
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        if isinstance(parameters.get(name), int | float):
            found[f"rope_{name}"] = float(parameters[name])
    return found


def structure_differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What disagrees, as "heads 4 against 8"; a key that only one side has does not count."""
    found = []
    for key in mine.keys() & theirs.keys():
        a, b = mine[key], theirs[key]
        close = (
            isinstance(a, float) and isinstance(b, int | float) and abs(a - b) <= 1e-6 * max(abs(a), abs(b))
        )
        if a != b and not close:
            found.append(f"{key} {shorten(str(a), 40)} against {shorten(str(b), 40)}")
    return sorted(found)


# -- step two: tokenizer ------------------------------------------------------
def tokenizer_digest(base_path: Path) -> str | None:
    """Digest of what maps text to ids (vocabulary, added tokens, merges); None where there is no tokenizer.

    The same vocabulary saved by another library or version gives the same digest.
    """
    file = base_path / "tokenizer.json"
    if file.is_file():
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            model = raw["model"]
            vocabulary = model["vocab"]
            pairs = (
                dict(vocabulary)
                if isinstance(vocabulary, dict)
                else {str(entry[0]): index for index, entry in enumerate(vocabulary)}
            )
            pairs |= {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
            merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(
                f"{file} is not a tokenizer: {shorten(str(error))}", "download the base again"
            ) from error
        text = json.dumps([sorted(pairs.items(), key=lambda item: (str(item[1]), item[0])), merges])
        return "ids:" + hashlib.sha256(text.encode()).hexdigest()
    for name in ("tokenizer.model", "vocab.json", "spiece.model"):
        if (base_path / name).is_file():
            return f"{name}:" + hashlib.sha256((base_path / name).read_bytes()).hexdigest()
    return None


# -- step three: sampled rows -------------------------------------------------
def _chosen(base: BaseModules, modules: Iterable[str]) -> list[str]:
    """The embedding and up to eight of `modules` spread over the depth."""
    wanted = [m for m in modules if m in base.tensors and m != base.embedding] or [
        m for m in base.tensors if base.layer_of(m) is not None
    ]
    wanted.sort(key=lambda m: (base.layer_of(m) or 0, m))
    count = min(_TENSORS, len(wanted))
    spread = [wanted[round(i * (len(wanted) - 1) / max(1, count - 1))] for i in range(count)]
    return ([base.embedding] if base.embedding else []) + list(dict.fromkeys(spread))


def _read_rows(info: TensorInfo, file: Path, rows: list[int], columns: int) -> NDArray[np.float64] | None:
    """(rows, columns) of a two-dimensional tensor; None where it is not stored as floats."""
    kind = _FLOATS.get(info.dtype)
    if kind is None or len(info.shape) != 2 or max(rows) >= info.shape[0] or columns > info.shape[1]:
        return None
    item = np.dtype(kind).itemsize
    found = np.empty((len(rows), columns), dtype=np.float64)
    with file.open("rb") as handle:
        for place, row in enumerate(rows):
            handle.seek(info.start + row * info.shape[1] * item)
            raw = np.frombuffer(handle.read(columns * item), dtype=kind)
            if info.dtype == "BF16":  # the upper half of a float32
                raw = (raw.astype("<u4") << 16).view("<f4")
            found[place] = raw
    return found


def sample(base: BaseModules, modules: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Module path -> {"rows", "columns", "values"}: the first columns of a few rows of the stored weight."""
    infos = read_tensor_infos(base.path)
    samples: dict[str, dict[str, Any]] = {}
    for module in _chosen(base, modules):
        info, file = infos[base.tensors[module]]
        if len(info.shape) != 2:
            continue
        count, columns = info.shape[0], min(_COLUMNS, info.shape[1])
        # not the very first rows: those of an embedding are special tokens, often untrained
        rows = sorted({(2 * i + 1) * count // (2 * _ROWS) for i in range(_ROWS)})
        values = _read_rows(info, file, rows, columns)
        if values is not None and np.isfinite(values).all() and np.any(values):
            numbers = [[float(f"{x:.5g}") for x in row] for row in values]
            samples[module] = {"rows": rows, "columns": columns, "values": numbers}
    return samples


def fingerprint(path: Path, modules: Iterable[str], *, base: BaseModules | None = None) -> Fingerprint:
    """The fingerprint of the base in `path`; samples come from `modules` (those the adapters target) and the
    embedding. Raises InputError where the folder is not a base."""
    base = base or read_structure(path)
    return Fingerprint(
        structure=structure(base), tokenizer=tokenizer_digest(path), samples=sample(base, modules)
    )


def _cosines(base: BaseModules, wanted: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Module path -> cosine between its recorded and its stored rows; modules that cannot be compared are
    left out."""
    infos = read_tensor_infos(base.path)
    found: dict[str, float] = {}
    for module, entry in wanted.items():
        if module not in base.tensors:
            continue
        try:
            rows = [int(row) for row in entry["rows"]]
            recorded = np.asarray(entry["values"], dtype=np.float64)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the fingerprint of {shorten(module)} is damaged", "compose the bundle again"
            ) from error
        if recorded.ndim != 2 or recorded.shape[0] != len(rows) or not rows or min(rows) < 0:
            raise InputError(f"the fingerprint of {shorten(module)} is damaged", "compose the bundle again")
        info, file = infos[base.tensors[module]]
        stored = _read_rows(info, file, rows, recorded.shape[1])
        if stored is None:
            continue
        norms = float(np.linalg.norm(stored) * np.linalg.norm(recorded))
        found[module] = float(np.sum(stored * recorded) / norms) if norms > 0 else 0.0
    return found


def check_base(path: Path, entry: BaseEntry) -> list[str]:
    """Is the base in `path` the one that `entry` was made with? Returns warnings for the user.

    Raises InputError naming both where structure, tokenizer or weights disagree.
    """
    remedy = f"name the right base: --base PATH of {shorten(entry.id)}"
    base = read_structure(path)
    different = structure_differences(entry.fingerprint.structure, structure(base))
    if different:
        raise InputError(
            f"the bundle's base is {shorten(entry.id)}, {path} is another model: {'; '.join(different[:4])}",
            remedy,
        )
    warnings: list[str] = []
    recorded = entry.fingerprint.tokenizer
    digest = tokenizer_digest(path)
    if recorded and digest is None:
        warnings.append(f"{path} has no tokenizer to compare with that of {entry.id}")
    elif recorded and recorded.partition(":")[0] == (digest or "").partition(":")[0] and recorded != digest:
        raise InputError(
            f"the bundle's base is {shorten(entry.id)}, {path} has another tokenizer "
            "(vocabulary or merges differ)",
            remedy,
        )
    cosines = _cosines(base, entry.fingerprint.samples)
    if not cosines:
        if entry.fingerprint.samples:
            warnings.append(
                f"the weights of {path} are packed and cannot be compared with those of {entry.id}"
            )
        return warnings
    worst = min(cosines, key=cosines.__getitem__)
    if cosines[worst] < OTHER_PRECISION:
        raise InputError(
            f"the bundle's base is {shorten(entry.id)}, {path} has other weights "
            f"(cosine {cosines[worst]:.3f} at {shorten(worst)})",
            remedy,
        )
    if cosines[worst] < SAME:
        warnings.append(f"{path} is {entry.id} in another precision (cosine {cosines[worst]:.4f} at {worst})")
    return warnings
