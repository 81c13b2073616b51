"""Which modules a config targets, by PEFT's rules; the tensors decide, a disagreement is reported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from molora_cli.core.adapter.patterns import TooSlow, full, match_all, pattern_key
from molora_cli.errors import InputError
from molora_cli.text import shorten

_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")  # PEFT: the first numbered segment


@dataclass(frozen=True)
class Targets:
    """Modules that the config targets among those asked about; known: whether that was worked out."""

    modules: frozenset[str]
    known: bool = True


def targeted(config: Mapping[str, Any], names: Sequence[str]) -> Targets:
    """The names that PEFT would adapt under this config.

    Not worked out for "all-linear", a missing target_modules (PEFT then has a table per model family),
    layer patterns, and patterns that take too long.
    """
    wanted, excluded = config.get("target_modules"), config.get("exclude_modules")
    if wanted is None or wanted == "all-linear" or config.get("layers_pattern"):
        return Targets(frozenset(), known=False)
    try:
        chosen = _chosen(wanted, names)
        if excluded:
            chosen -= _chosen(excluded, names)
    except TooSlow:
        return Targets(frozenset(), known=False)
    layers = config.get("layers_to_transform")
    if layers is not None and layers != [] and not isinstance(wanted, str):
        numbers = set(layers) if isinstance(layers, list) else {layers}
        chosen = {n for n in chosen if (m := _LAYER.match(n)) and int(m.group(1)) in numbers}
    return Targets(frozenset(chosen))


def _chosen(wanted: str | list[str], names: Sequence[str]) -> set[str]:
    if isinstance(wanted, str):
        return {name for name, hit in zip(names, match_all([full(wanted)], names)[0], strict=True) if hit}
    exact = set(wanted)
    return {n for n in names if n in exact or any(n.endswith("." + w) for w in exact)}


def check_targets(
    config: Mapping[str, Any], in_file: Sequence[str], in_base: Sequence[str], where: str
) -> tuple[list[str], Targets]:
    """Notes on a disagreement between config and tensors, and what the config targets in the base.

    in_file: the file's module paths; in_base: the base's. Raises InputError where the config targets none
    of either: PEFT would not open such an adapter, and it belongs to another model.
    """
    wanted = config.get("target_modules")
    names = sorted({*in_file, *in_base})
    found = targeted(config, names)
    if not found.known:
        if isinstance(wanted, str) and wanted != "all-linear":
            return [
                f"target_modules was not evaluated (pattern '{shorten(wanted, 60)}'); the tensors decide"
            ], found
        return [], found
    if not found.modules:
        shown = shorten(wanted if isinstance(wanted, str) else ", ".join(wanted or []), 80)
        some = ", ".join(shorten(n, 60) for n in in_base[:3])
        raise InputError(
            f"{where}: target_modules '{shown}' matches no module of the adapter or the base ({some}, ...)",
            "correct target_modules in adapter_config.json, or give the base that the adapter was trained on",
        )
    outside = [n for n in in_file if n not in found.modules]
    notes = []
    if outside:
        notes.append(
            f"{len(outside)} of {len(in_file)} adapted modules are not in target_modules "
            f"({shorten(outside[0], 60)}); the tensors decide"
        )
    layers = config.get("layers_to_transform")
    if layers is not None and not outside:
        numbers = set(layers) if isinstance(layers, list) else {layers}
        have = {int(m.group(1)) for n in in_file if (m := _LAYER.match(n))}
        if numbers - have:
            notes.append(f"layers_to_transform names layers without tensors: {sorted(numbers - have)}")
    return notes, Targets(found.modules & frozenset(in_base))


def resolve_pattern(
    pattern: Mapping[str, float], names: Sequence[str], field: str, where: str
) -> tuple[dict[str, float], list[str]]:
    """PEFT's rank_pattern or alpha_pattern for each matching name (the first key wins); notes on idle keys.

    Raises InputError where the patterns take too long.
    """
    keys = list(pattern)
    try:
        hits = match_all([pattern_key(k) for k in keys], names, deadline=1.2) if keys else []
    except TooSlow as error:
        raise InputError(
            f"{where}: {field} holds a pattern that takes too long to match",
            f"name the modules in {field} plainly",
        ) from error
    values: dict[str, float] = {}
    for key, row in zip(keys, hits, strict=True):
        for name, hit in zip(names, row, strict=True):
            if hit:
                values.setdefault(name, pattern[key])
    idle = [k for k, row in zip(keys, hits, strict=True) if not any(row)]
    return values, [f"{field}['{shorten(k, 60)}'] matches no adapted module" for k in idle]
