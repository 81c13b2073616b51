"""Read one adapter against a base: every check, before anything is written. No torch for safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from molora_cli.core.adapter.config import Classification, base_hint, classify, settings
from molora_cli.core.adapter.files import read_json, shown
from molora_cli.core.adapter.locate import WEIGHTS, Located, locate
from molora_cli.core.adapter.match import Matched, match
from molora_cli.core.adapter.names import Named, foreign, group, parse_key
from molora_cli.core.adapter.targets import Targets, check_targets
from molora_cli.core.adapter.tensors import FLOATS, TensorFile, digest, open_tensors, scan
from molora_cli.core.adapter.types import Adapter
from molora_cli.errors import InputError
from molora_cli.refs import Ref
from molora_cli.text import printable, shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

_README_BYTES = 64 << 10
_AGAIN = "save the adapter again"
_HALF_MAX = 65504.0  # largest finite float16


def read_adapter(name: str, ref: Ref, base: BaseModules, *, allow_noop: bool = False) -> Adapter:
    """The adapter `ref` on `base`, fully checked: config, headers, names, shapes, scales, NaN and infinity.

    allow_noop: accept an adapter whose factors are zero and which therefore changes nothing.
    Raises InputError naming the file, tensor, module or config field at fault, and the way out.
    """
    place = locate(ref)
    config = read_json(place.config)
    verdict = classify(config)
    refuse(verdict, shown(place.config))
    file = open_tensors(place.weights)
    where = shown(place.weights)
    named, notes = _sort_tensors(file, where)
    _check_types(file, named, where)
    numbers = settings(config)
    found = group(named, where)
    in_base = list(base)
    matched = match(found, file, base, numbers, where)
    target_notes, targets = check_targets(config, list(found), in_base, shown(place.config))
    notes = [
        *verdict.notes,
        *notes,
        *matched.notes,
        *target_notes,
        *_check_values(file, matched, allow_noop, where),
    ]
    return Adapter(
        name=name,
        path=place.folder,
        weights=place.weights,
        source=str(ref),
        config=config,
        modules=matched.modules,
        revision=place.revision,
        base_hint=base_hint(config),
        licence=read_licence(place.folder),
        sha256=digest(place.weights),
        notes=tuple(notes),
        in_file=matched.in_file,
        canonical=_is_canonical(place, file, named, matched, targets),
    )


def classify_file(path: Path) -> Classification:
    """What an adapter_config.json on its own says. Raises InputError where it cannot be read as one."""
    return classify(read_json(path))


def refuse(verdict: Classification, where: str) -> None:
    """Raises InputError for a refused config: its first reason in full, the fields of the others."""
    if verdict.supported:
        return
    first = verdict.reasons[0].error(where)
    others = sorted({r.field for r in verdict.reasons[1:] if r.field and r.field != verdict.reasons[0].field})
    if others:
        raise InputError(f"{first.message} (also refused: {', '.join(others)})", first.remedy)
    raise first


def _sort_tensors(file: TensorFile, where: str) -> tuple[list[Named], list[str]]:
    """The LoRA tensors, and notes on those that may be left out; anything else is refused by name."""
    if not file.infos:
        raise InputError(
            f"{where} contains no tensors", f"{_AGAIN}; the training process saved an empty state"
        )
    named: list[Named] = []
    base_copies: list[str] = []
    xlora: list[str] = []
    others: list[str] = []
    for key in file.infos:
        parsed = parse_key(key)
        if parsed is not None:
            named.append(parsed)
        elif ".internal_xlora_classifier." in f".{key}" or key.startswith("base_model.lora_model."):
            xlora.append(key)
        elif key.rpartition(".")[0].endswith(".base_layer"):
            base_copies.append(key)
        else:
            others.append(key)
    for key in others:
        method = foreign(key)
        if method is not None:
            raise InputError(
                f"{where}: '{shorten(key, 120)}' is a tensor of {method}, not of a PEFT LoRA",
                "convert the adapter to PEFT, or give a LoRA adapter",
            )
    if not named:
        raise InputError(
            f"{where} holds no LoRA tensors (there: {_some(list(file.infos))})",
            "give the weights that belong to this adapter_config.json",
        )
    if others:
        raise InputError(
            f"{where}: {len(others)} tensors are no low-rank factors but full copies ({_some(others)})",
            "train without modules_to_save, or with LoRA on these modules",
        )
    notes = []
    if base_copies:
        notes.append(
            f"{len(base_copies)} copies of base weights were ignored ('{shorten(base_copies[0], 90)}')"
        )
    if xlora:
        notes.append(
            f"saved by X-LoRA: {len(xlora)} tensors of its classifier and copies of the base were ignored; "
            "such a save loses layers of its adapters, the original adapter is safer"
        )
    return named, notes


def _some(keys: list[str]) -> str:
    return ", ".join(f"'{shorten(k, 80)}'" for k in keys[:3]) + (", ..." if len(keys) > 3 else "")


def _check_types(file: TensorFile, named: list[Named], where: str) -> None:
    empty = [n.key for n in named if file.infos[n.key].count == 0]
    if empty:
        first = f"'{shorten(empty[0], 100)}' has shape {list(file.infos[empty[0]].shape)}"
        raise InputError(
            f"{where}: saved without its weights: {len(empty)} of {len(named)} tensors are empty, "
            f"typical of a sharded save ({first})",
            "gather the weights before saving, and save the adapter again",
        )
    for n in named:
        dtype = file.infos[n.key].dtype
        if dtype not in FLOATS:
            raise InputError(
                f"{where}: tensor '{shorten(n.key, 120)}' has dtype {dtype}, not one of {', '.join(FLOATS)}",
                "save the adapter in a floating-point type",
            )


def _check_values(file: TensorFile, matched: Matched, allow_noop: bool, where: str) -> list[str]:
    """NaN, infinity and zero factors; notes where half precision may overflow."""
    largest: dict[str, float] = {}
    bad: list[tuple[str, int]] = []
    for key in _keys(matched):
        result = scan(file, key)
        largest[key] = result.largest
        if result.bad:
            bad.append((key, result.bad))
    if bad:
        key, count = bad[0]
        more = f", and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise InputError(
            f"{where}: '{shorten(key, 120)}' has {count} values that are NaN or infinite{more}",
            "the training diverged: use an earlier checkpoint",
        )
    idle, risky = 0, 0
    pairs = [keys for module in matched.modules.values() for keys in _key_sets(module.keys, module.parts)]
    for keys in pairs:
        product = largest[keys["A"]] * largest[keys["B"]]
        biased = "bias" in keys and largest[keys["bias"]] > 0
        if product == 0 and not biased and "magnitude" not in keys:
            idle += 1
        rank = file.infos[keys["A"]].shape[0]
        if product * rank > _HALF_MAX and "F16" in (file.infos[keys["A"]].dtype, file.infos[keys["B"]].dtype):
            risky += 1
    if idle == len(pairs) and not allow_noop:
        raise InputError(
            f"{where}: B is zero in all {len(pairs)} modules: the adapter changes nothing (never trained?)",
            "give the trained adapter, or --allow-noop to keep it",
        )
    notes = [f"{idle} of {len(pairs)} modules have zero factors and change nothing"] if idle else []
    if risky:
        notes.append(f"the factors' product may exceed float16 in {risky} modules; use float32 or bfloat16")
    return notes


def _key_sets(keys: dict[str, str], parts: tuple[Any, ...]) -> list[dict[str, str]]:
    return [part.keys for part in parts] if parts else [keys]


def _keys(matched: Matched) -> list[str]:
    return [
        key
        for module in matched.modules.values()
        for keys in _key_sets(module.keys, module.parts)
        for key in keys.values()
    ]


def _is_canonical(
    place: Located, file: TensorFile, named: list[Named], matched: Matched, targets: Targets
) -> bool:
    """Whether PEFT opens these very files on this base and gets the same modules, and nothing besides."""
    if place.weights.name != WEIGHTS[0] or len(named) != len(file.infos) or matched.renamed:
        return False
    if any(module.parts for module in matched.modules.values()):
        return False
    return (
        targets.known
        and targets.modules == set(matched.modules)
        and all(n.key == canonical_key(n.module, n.role, n.embedding) for n in named)
    )


def canonical_key(module: str, role: str, embedding: bool) -> str:
    """The name under which PEFT saves a tensor of `module` (role "A", "B", "bias" or "magnitude")."""
    prefix = f"base_model.model.{module}."
    if role == "magnitude":
        return prefix + "lora_magnitude_vector"
    if role == "bias":
        return prefix + "lora_B.bias"
    return prefix + (f"lora_embedding_{role}" if embedding else f"lora_{role}.weight")


def read_licence(folder: Path) -> str | None:
    """`license` from the front matter of a README.md, as one short line; None where it has none."""
    try:
        with (folder / "README.md").open("rb") as handle:
            text = handle.read(_README_BYTES).decode("utf-8-sig", "replace")
    except (OSError, ValueError):
        return None
    lines = text.splitlines()
    if not lines or lines[0].strip() != "---" or "---" not in (line.strip() for line in lines[1:]):
        return None
    end = next(i for i, line in enumerate(lines[1:], 1) if line.strip() == "---")
    try:
        front: Any = yaml.safe_load("\n".join(lines[1:end]))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    value = front.get("license") if isinstance(front, Mapping) else None
    if isinstance(value, list):
        value = ", ".join(v for v in value[:5] if isinstance(v, str))
    return printable(value)[:100] if isinstance(value, str) and value else None
