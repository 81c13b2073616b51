"""Separate projections of an adapter on a base that fuses them (Phi-3: q, k, v in qkv_proj).

Exact: with A_i (r_i, in) and B_i (out_i, r_i), the fused factors are A = [A_1; A_2; ...] and B block-
diagonal, each B_i in the rows of its projection; rows of a projection without an adapter are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.core.adapter.types import ModuleLora

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

# model type -> fused leaf -> separate leaves in the order of the rows. Only families that were checked.
_LAYOUTS = {"phi3": {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}}


def _number(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _phi3_rows(config: Mapping[str, Any]) -> dict[str, int]:
    heads = _number(config, "num_attention_heads")
    dim = _number(config, "head_dim") or (_number(config, "hidden_size") // heads if heads else 0)
    pairs = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size")
    return {
        "q_proj": heads * dim, "k_proj": pairs * dim, "v_proj": pairs * dim,
        "gate_proj": inner, "up_proj": inner,
    }  # fmt: skip


def fused_home(
    path: str, base: BaseModules, find: Callable[[str], str | None]
) -> tuple[str, tuple[int, int]] | None:
    """For a separate projection's path, the base's fused module and the rows it takes there, or None.

    `find` maps a file's module path to the base's. The rows must add up to the fused module's size.
    """
    parent, _, leaf = path.rpartition(".")
    for fused, leaves in _LAYOUTS.get(base.model_type, {}).items():
        if leaf not in leaves:
            continue
        module = find(f"{parent}.{fused}")
        rows = _phi3_rows(base.config)
        if module is None or sum(rows[name] for name in leaves) != base[module].out_features:
            return None
        start = sum(rows[name] for name in leaves[: leaves.index(leaf)])
        return module, (start, start + rows[leaf])
    return None


def factor_arrays(file: TensorFile, module: ModuleLora) -> dict[str, tuple[str, NDArray[Any]]]:
    """The arrays of one module by role ("A", "B", "bias", "magnitude") with their safetensors dtypes.

    As they are in the file, except for a module made of parts: those come as float32, each part's scale
    relative to the module's folded into its rows of B.
    """
    if not module.parts:
        return {role: (file.infos[key].dtype, file.array(key)) for role, key in module.keys.items()}
    a = np.concatenate([file.floats(part.keys["A"]) for part in module.parts])
    b = np.zeros((module.out_features, module.rank), np.float32)
    column = 0
    for part in module.parts:
        ratio = np.float32(part.scale / module.scale)
        b[part.rows[0] : part.rows[1], column : column + part.rank] = ratio * file.floats(part.keys["B"])
        column += part.rank
    return {"A": ("F32", a), "B": ("F32", b)}
