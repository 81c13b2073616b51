"""From an adapter's named tensors to modules of a base: all land, with the right shape and scale, or none."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from molora_cli.core.adapter.config import LoraSettings
from molora_cli.core.adapter.fuse import fused_home
from molora_cli.core.adapter.names import ModuleIndex, Named
from molora_cli.core.adapter.targets import resolve_pattern
from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.core.adapter.types import ModuleLora, Part
from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer|block)\.(\d+)(?:\.|\Z)")
_SPLIT = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
_FUSED = frozenset({"qkv_proj", "query_key_value", "Wqkv", "c_attn", "gate_up_proj", "W_pack"})
_WRONG_BASE = "give the base that it was trained on: --base ..."


@dataclass(frozen=True)
class Matched:
    """modules: by path in the base; in_file: how many the file adapts; renamed: file path -> base path."""

    modules: dict[str, ModuleLora]
    in_file: int
    renamed: dict[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Numbers:
    rank: int
    alpha: float
    scale: float


def match(
    found: Mapping[str, Mapping[str, Named]],
    file: TensorFile,
    base: BaseModules,
    settings: LoraSettings,
    where: str,
) -> Matched:
    """Lay grouped tensors (module path in the file -> role -> Named) onto the base.

    Raises InputError that names the module at fault: missing halves, unknown modules, layers out of range,
    shapes or ranks that disagree with each other, the config or the base.
    """
    _check_halves(found, settings, where)
    index = ModuleIndex(base)
    homes, fused = _homes(found, index, base, where)
    ranks, alphas, notes = _patterns(found, settings, where)
    modules: dict[str, ModuleLora] = {}
    wrong_rank: list[tuple[str, int, int]] = []
    numbers: dict[str, _Numbers] = {}
    for path, roles in found.items():
        rank = _check_shapes(path, roles, file, base, homes, fused, where)
        expected, alpha = settings.fixed.get(path) or (
            int(ranks.get(path, settings.r)),
            float(alphas.get(path, settings.alpha)),
        )
        if rank != expected:
            wrong_rank.append((path, expected, rank))
        numbers[path] = _Numbers(rank, alpha, settings.scale(rank, alpha))
    if wrong_rank:
        path, expected, rank = wrong_rank[0]
        raise InputError(
            f"{where}: the config says rank {expected} for {shorten(path)}, its tensors have rank {rank} "
            f"({len(wrong_rank)} of {len(found)} modules): the scale alpha / r would be wrong",
            "correct r and rank_pattern in adapter_config.json to what the adapter was trained with",
        )
    for path, home in homes.items():
        roles, shape, n = found[path], base[home], numbers[path]
        keys = {role: named.key for role, named in roles.items()}
        modules[home] = ModuleLora(
            home, n.rank, n.alpha, n.scale, shape.in_features, shape.out_features,
            file.infos[keys["A"]].dtype, keys, shape.kind,
        )  # fmt: skip
    for home, rows in fused.items():
        modules[home] = _fused_module(home, rows, found, numbers, base, settings)
    order = {module: i for i, module in enumerate(base)}
    ordered = dict(sorted(modules.items(), key=lambda item: order[item[0]]))
    renamed = {path: home for path, home in homes.items() if path != home}
    notes += _notes(ordered, renamed, fused, base)
    return Matched(ordered, len(found), renamed, tuple(notes))


def _check_halves(found: Mapping[str, Mapping[str, Named]], settings: LoraSettings, where: str) -> None:
    again = "save the adapter again; this file is incomplete"
    for path, roles in found.items():
        for half in ("A", "B"):
            if half not in roles:
                have = next(iter(roles.values())).key
                raise InputError(
                    f"{where}: lora_{half} of {shorten(path)} is missing (there is '{shorten(have)}')", again
                )
    for role, wanted, name in (
        ("magnitude", settings.dora, "use_dora"),
        ("bias", settings.bias, "lora_bias"),
    ):
        having = [p for p, roles in found.items() if role in roles]
        if wanted and len(having) < len(found):
            lacking = next(p for p, roles in found.items() if role not in roles)
            raise InputError(
                f"{where}: {name} is on, but the {role} of {shorten(lacking)} is missing "
                f"({len(found) - len(having)} of {len(found)} modules)",
                again,
            )
        if having and not wanted:
            raise InputError(
                f"{where}: '{shorten(found[having[0]][role].key)}' is there, but {name} is off in the config",
                f"set {name} in adapter_config.json to what the adapter was trained with",
            )


def _homes(
    found: Mapping[str, Mapping[str, Named]], index: ModuleIndex, base: BaseModules, where: str
) -> tuple[dict[str, str], dict[str, list[tuple[str, tuple[int, int]]]]]:
    """file path -> module of the base, and fused module -> its separate projections with their rows."""
    homes: dict[str, str] = {}
    fused: dict[str, list[tuple[str, tuple[int, int]]]] = {}
    lost: list[str] = []
    for path, roles in found.items():
        if {"experts", "base_layer"} & set(path.split(".")):
            raise InputError(
                f"{where}: {shorten(path)} lies in a list of experts; adapters of experts are not supported",
                "give an adapter of the attention and the shared layers only",
            )
        home = index.find(path)
        if home is not None:
            homes[path] = home
            continue
        place = fused_home(path, base, index.find)
        if place is None:
            lost.append(path)
        elif {"magnitude", "bias"} & set(roles):
            raise InputError(
                f"{where}: {shorten(path)} has DoRA or lora_bias; the base fuses it ({place[0]}), "
                "and these cannot be fused exactly",
                _WRONG_BASE,
            )
        else:
            fused.setdefault(place[0], []).append((path, place[1]))
    if lost:
        raise _lost(lost, found, base, where)
    taken: dict[str, str] = {}
    for path, home in [
        *homes.items(),
        *((p, h) for h, rows in fused.items() for p, _ in rows if h in homes.values()),
    ]:
        if home in taken:
            raise InputError(
                f"{where}: {shorten(taken[home])} and {shorten(path)} both mean {home} of the base",
                "save the adapter again, without wrappers",
            )
        taken[home] = path
    return homes, fused


def _packed(base: BaseModules) -> str | None:
    """How the base's weights are packed, if in a way that hides their shapes."""
    said, own = base.config.get("quantization_config"), base.config.get("quantization")
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if isinstance(method, str) and method not in ("bitsandbytes", "fp8"):
        return shorten(method, 40)
    return "MLX" if isinstance(own, Mapping) and "bits" in own else None


def _unseen(packed: str, where: str) -> InputError:
    return InputError(
        f"{where}: the base's weights are packed by {packed}, so the modules that the adapter needs are not "
        "to be seen in it",
        "give the same base in full precision, or packed by bitsandbytes: --base ...",
    )


def _lost(lost: Sequence[str], found: Mapping[str, object], base: BaseModules, where: str) -> InputError:
    """The error for modules that the base does not have, told by its likeliest cause."""
    if (packed := _packed(base)) is not None:
        return _unseen(packed, where)
    layers = sorted({int(m.group(1)) for p in lost if (m := _LAYER.search(p))})
    beyond = [n for n in layers if n >= base.n_layers]
    if beyond:
        shown = ", ".join(map(str, beyond[:6])) + (", ..." if len(beyond) > 6 else "")
        return InputError(
            f"{where}: adapter has layer{'s' if len(beyond) > 1 else ''} {shown}, base has {base.n_layers} "
            f"({shorten(next(p for p in lost if (m := _LAYER.search(p)) and int(m.group(1)) in beyond))})",
            _WRONG_BASE,
        )
    leaves = {p.rpartition(".")[2] for p in lost}
    fused = sorted({m.rpartition(".")[2] for m in base} & _FUSED)
    if leaves <= _SPLIT and fused:
        return InputError(
            f"{where}: the adapter was trained on separate projections ({', '.join(sorted(leaves))}), "
            f"the base fuses them ({', '.join(fused)}) in a layout that is not known",
            _WRONG_BASE,
        )
    some = ", ".join(shorten(p, 70) for p in lost[:3]) + (", ..." if len(lost) > 3 else "")
    if len(lost) == len(found):
        examples = ", ".join(list(base)[:3])
        return InputError(
            f"{where}: none of its {len(found)} modules exists in the base, a {base.model_type or 'model'} "
            f"(adapter: {some}; base: {examples}, ...)",
            _WRONG_BASE,
        )
    return InputError(
        f"{where}: {len(lost)} of {len(found)} adapted modules do not exist in the base ({some}), "
        f"{len(found) - len(lost)} do; an adapter is never applied in part",
        _WRONG_BASE,
    )


def _patterns(
    found: Mapping[str, object], settings: LoraSettings, where: str
) -> tuple[dict[str, float], dict[str, float], list[str]]:
    paths = list(found)
    ranks, idle_ranks = resolve_pattern(settings.rank_pattern, paths, "rank_pattern", where)
    alphas, idle_alphas = resolve_pattern(settings.alpha_pattern, paths, "alpha_pattern", where)
    return ranks, alphas, idle_ranks + idle_alphas


def _check_shapes(
    path: str,
    roles: Mapping[str, Named],
    file: TensorFile,
    base: BaseModules,
    homes: Mapping[str, str],
    fused: Mapping[str, list[tuple[str, tuple[int, int]]]],
    where: str,
) -> int:
    """The rank of one module, after every shape was held against the base's."""
    a, b = file.infos[roles["A"].key].shape, file.infos[roles["B"].key].shape
    name = shorten(path)
    if len(a) != 2 or len(b) != 2:
        raise InputError(
            f"{where}: {name} has factors of shape {list(a)} and {list(b)}, not matrices", _WRONG_BASE
        )
    home = homes.get(path)
    if home is not None:
        shape = base[home]
        inputs, outputs = shape.in_features, shape.out_features
        if roles["A"].embedding != (shape.kind == "embedding"):
            raise InputError(f"{where}: {name} is {shape.kind} in the base, its tensors are not", _WRONG_BASE)
    else:
        module, rows = next((m, r) for m, parts in fused.items() for p, r in parts if p == path)
        inputs, outputs = base[module].in_features, rows[1] - rows[0]
    if a[1] != inputs and b[0] != outputs and a[0] == inputs and b[1] == outputs:
        raise InputError(
            f"{where}: the factors of {name} are transposed: A is {list(a)} where (r, {inputs}) belongs, "
            f"B is {list(b)} where ({outputs}, r) belongs (the orientation of MLX)",
            "convert the adapter with a tool that knows its format",
        )
    if a[0] != b[1]:
        raise InputError(
            f"{where}: A and B of {name} disagree on the rank: {list(a)} and {list(b)}",
            "save the adapter again; this file is damaged",
        )
    for side, have, need in (("input", a[1], inputs), ("output", b[0], outputs)):
        if have != need and (packed := _packed(base)) is not None:
            raise _unseen(packed, where)
        if have != need:
            raise InputError(
                f"{where}: {name} has {side} size {have} against {need} in the base",
                _WRONG_BASE,
            )
    for role in ("magnitude", "bias"):
        if role in roles and file.infos[roles[role].key].count != outputs:
            have_shape = list(file.infos[roles[role].key].shape)
            raise InputError(
                f"{where}: the {role} of {name} is {have_shape} where ({outputs},) belongs", _WRONG_BASE
            )
    return a[0]


def _fused_module(
    home: str,
    rows: Sequence[tuple[str, tuple[int, int]]],
    found: Mapping[str, Mapping[str, Named]],
    numbers: Mapping[str, _Numbers],
    base: BaseModules,
    settings: LoraSettings,
) -> ModuleLora:
    parts = tuple(
        Part({r: n.key for r, n in found[path].items()}, numbers[path].rank, numbers[path].scale, span)
        for path, span in sorted(rows, key=lambda item: item[1])
    )
    rank, scale = sum(p.rank for p in parts), parts[0].scale
    alpha = scale * (rank**0.5 if settings.rslora else rank)
    shape = base[home]
    return ModuleLora(
        home, rank, alpha, scale, shape.in_features, shape.out_features, "F32", {}, shape.kind, parts
    )


def _notes(
    modules: Mapping[str, ModuleLora],
    renamed: Mapping[str, str],
    fused: Mapping[str, list[tuple[str, tuple[int, int]]]],
    base: BaseModules,
) -> list[str]:
    notes = []
    if renamed:
        first = next(iter(renamed))
        notes.append(f"module names were mapped: {shorten(first, 70)} is {renamed[first]} of the base")
    if fused:
        notes.append(
            f"separate projections were fused exactly into {len(fused)} modules ({next(iter(fused))}, ...)"
        )
    layers = sorted({int(m.group(1)) for name in modules if (m := _LAYER.search(name))})
    if layers and len(layers) < base.n_layers:
        shown = ", ".join(map(str, layers[:8])) + (", ..." if len(layers) > 8 else "")
        notes.append(f"adapts {len(layers)} of {base.n_layers} layers ({shown})")
    return notes
