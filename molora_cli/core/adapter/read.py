"""Read one adapter against a base: every check, before anything is written. No torch for safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from molora_cli.core.adapter.config import Classification, base_hint, classify
from molora_cli.core.adapter.files import read_json, shown
from molora_cli.core.adapter.gguf_header import read_gguf
from molora_cli.core.adapter.gguf_lora import classify_gguf, gguf_base_hint, gguf_licence, read_gguf_lora
from molora_cli.core.adapter.locate import CONFIG, Located, locate
from molora_cli.core.adapter.match import Matched, match
from molora_cli.core.adapter.mlx import read_mlx
from molora_cli.core.adapter.names import group
from molora_cli.core.adapter.peft import is_canonical, read_peft
from molora_cli.core.adapter.source import Source
from molora_cli.core.adapter.targets import Targets, check_targets
from molora_cli.core.adapter.tensors import FLOATS, TensorFile, digest, open_tensors, scan
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.xlora import xlora_error, xlora_losses
from molora_cli.errors import InputError
from molora_cli.refs import Ref
from molora_cli.text import printable, shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

_README_BYTES = 64 << 10
_HALF_MAX = 65504.0  # largest finite float16


def read_adapter(
    name: str, ref: Ref, base: BaseModules, *, allow_noop: bool = False, saved_rank: int | None = None
) -> Adapter:
    """The adapter `ref` on `base`, fully checked: config, headers, names, shapes, scales, NaN and infinity.

    PEFT folders, MLX-LM adapters and llama.cpp's GGUF LoRA, told apart by what the files are.
    allow_noop: accept an adapter whose factors are zero and which therefore changes nothing.
    saved_rank: approximate full copies of modules (modules_to_save) by LoRA of this rank; None refuses them.
    Raises InputError naming the file, tensor, module or config field at fault, and the way out.
    """
    place = locate(ref)
    source, hint, licence = _open(place, base, saved_rank)
    where = shown(place.weights)
    _check_types(source, where)
    found = group(source.named, where)
    matched = match(found, source.file, base, source.settings, where)
    notes, targets = list(source.notes) + list(matched.notes), Targets(frozenset(), known=False)
    if place.format == "peft" and place.config is not None:
        trained = [path for path in found if path not in source.settings.fixed]
        said, targets = check_targets(source.config, trained, list(base), shown(place.config))
        notes += said
        notes += xlora_losses(source.file, targets, set(matched.modules))
    notes += _check_values(source.file, matched, allow_noop, where)
    unchanged = place.format == "peft" and not source.file.held
    return Adapter(
        name=name,
        path=place.folder,
        weights=place.weights,
        source=str(ref),
        config=source.config,
        modules=matched.modules,
        revision=place.revision,
        base_hint=hint,
        licence=licence,
        sha256=digest(place.weights),
        notes=tuple(notes),
        in_file=matched.in_file,
        canonical=unchanged and is_canonical(place, source, matched, targets),
        format=place.format,
        tensors=None if place.format == "peft" and saved_rank is None else source.file,
    )


def base_named(ref: Ref, *, saved_rank: int | None = None) -> str | None:
    """The base that an adapter's config names, made safe to show, after the checks that need no tensors.

    Raises InputError where the adapter is refused already by its files or its config.
    """
    place = locate(ref)
    if place.config is None:
        header = read_gguf(place.weights)
        refuse(classify_gguf(header), shown(place.weights))
        return gguf_base_hint(header)
    return base_hint(_config(place, saved_rank)[0])


def _open(place: Located, base: BaseModules, saved_rank: int | None) -> tuple[Source, str | None, str | None]:
    """The tensors, the base that the adapter names, and its licence."""
    licence = read_licence(place.folder)
    if place.config is None:
        header = read_gguf(place.weights)
        verdict = classify_gguf(header)
        refuse(verdict, shown(place.weights))
        source = read_gguf_lora(place.weights, base, header)
        return _noted(source, verdict), gguf_base_hint(header), gguf_licence(header) or licence
    config, verdict = _config(place, saved_rank)
    file = open_tensors(place.weights)
    if place.format == "mlx":
        source = read_mlx(file, config, base)
    else:
        source = read_peft(file, config, base, saved_rank)
    return _noted(source, verdict), base_hint(config), licence


def _noted(source: Source, verdict: Classification) -> Source:
    return replace(source, notes=(*verdict.notes, *source.notes))


def _config(place: Located, saved_rank: int | None) -> tuple[dict[str, Any], Classification]:
    """The config of an adapter that has one, and its verdict. Raises InputError where it is refused."""
    path = place.folder / CONFIG if place.config is None else place.config
    config = read_json(path)
    verdict = classify(config)
    if verdict.kind == "xlora":
        raise xlora_error(place, config)
    if place.format == "mlx" and verdict.kind != "mlx":
        raise InputError(
            f"{shown(path)} is no config of MLX-LM (lora_parameters is missing), "
            f"but {place.weights.name} is an adapter of MLX",
            'add "lora_parameters": {"rank": R, "scale": S} as in training',
        )
    if place.format == "peft" and verdict.kind == "mlx" and verdict.supported:
        raise InputError(
            f"{shown(path)} is a config of MLX-LM, but {place.weights.name} is named as PEFT's",
            f"rename {place.weights.name} to adapters.safetensors if MLX-LM wrote it",
        )
    if saved_rank is not None:
        kept = tuple(r for r in verdict.reasons if r.field != "modules_to_save")
        verdict = replace(verdict, reasons=kept)
    refuse(verdict, shown(path))
    return config, verdict


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


def _check_types(source: Source, where: str) -> None:
    file, named = source.file, source.named
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
