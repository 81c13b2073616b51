"""What a target format cannot say, told by name before anything is written. No torch.

(MLX: mlx_lm/tuner/utils.py and tuner/lora.py. GGUF: llama.cpp's convert_lora_to_gguf.py and its loader.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from molora_cli.core.adapter.gguf_layout import gguf_layout
from molora_cli.core.adapter.types import Adapter
from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

MLX_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\Z")
_MLX_WHOLE = frozenset({"model.embed_tokens", "lm_head"})
_MERGE = "fold it into a full model: molora convert ... --to merged-model, or keep it as PEFT"


def having(adapter: Adapter, role: str) -> list[str]:
    """Paths of the modules that hold a tensor of this role ("bias", "magnitude")."""
    return [path for path, module in adapter.modules.items() if role in module.keys]


def _refuse(adapter: Adapter, modules: Sequence[str], what: str, remedy: str) -> None:
    if modules:
        more = f" and {len(modules) - 1} more modules" if len(modules) > 1 else ""
        raise InputError(f"adapter '{adapter.name}': {shorten(modules[0])}{more}: {what}", remedy)


def check_mlx_adapter(adapter: Adapter, base: BaseModules) -> list[str]:
    """Raises InputError for what MLX-LM's adapter format cannot hold; returns notes."""
    _refuse(adapter, having(adapter, "bias"), "lora_bias has no place in an MLX adapter", _MERGE)
    odd = [m for m in adapter.modules if not MLX_LAYER.match(m) and m not in _MLX_WHOLE]
    _refuse(adapter, odd, f"MLX-LM's {base.model_type} has no module of this path", "keep it as PEFT")
    conv = [m for m, v in adapter.modules.items() if v.kind == "conv1d"]
    _refuse(adapter, conv, "MLX-LM's adapters know no Conv1D", "keep it as PEFT, or export GGUF")
    if base.tied and not mlx_tied(adapter, base):
        whole = [m for m in adapter.modules if m in _MLX_WHOLE]
        _refuse(
            adapter,
            whole,
            "the base's head is its embedding; MLX applies one adapter to both or to neither",
            "train without embed_tokens and lm_head, or fold it: --to merged-model",
        )
    dora = having(adapter, "magnitude")
    if not dora:
        return []
    _refuse(
        adapter,
        [m for m in adapter.modules if m not in dora],
        "an MLX adapter is DoRA in all modules or in none",
        _MERGE,
    )
    _refuse(
        adapter,
        [m for m in dora if adapter.modules[m].kind == "embedding"],
        "DoRA on an embedding differs between PEFT and MLX",
        _MERGE,
    )
    _refuse(
        adapter,
        mlx_gaps(adapter, base),
        "MLX adapts the same modules in each of the last layers; the adapter skips this one, "
        "and a DoRA module cannot be written as unchanged",
        _MERGE,
    )
    return []


def mlx_tied(adapter: Adapter, base: BaseModules) -> bool:
    """Whether the adapter changes a tied head just as it changes the embedding, which is what MLX does."""
    one, other = adapter.modules.get(base.embedding or ""), adapter.modules.get(base.head or "")
    if not base.tied or one is None or other is None or one.scale != other.scale:
        return False
    if set(one.keys) != {"A", "B"} or set(other.keys) != {"A", "B"}:
        return False
    file = adapter.open()
    return all(
        np.array_equal(file.floats(one.keys[role]).T, file.floats(other.keys[its]))
        for role, its in (("A", "B"), ("B", "A"))
    )


def mlx_layers(adapter: Adapter, base: BaseModules) -> tuple[int, list[str]]:
    """How many layers from the end MLX has to adapt, and the module names below a layer."""
    found = [match.groups() for module in adapter.modules if (match := MLX_LAYER.match(module))]
    first = min((int(layer) for layer, _ in found), default=base.n_layers)
    return base.n_layers - first, sorted({name for _, name in found})


def mlx_gaps(adapter: Adapter, base: BaseModules) -> list[str]:
    """Modules that MLX adapts with the others (same name, a later layer) and the adapter does not."""
    count, names = mlx_layers(adapter, base)
    wanted = [f"model.layers.{i}.{n}" for i in range(base.n_layers - count, base.n_layers) for n in names]
    return [module for module in wanted if module in base and module not in adapter.modules]


def check_gguf_adapter(adapter: Adapter, base: BaseModules) -> list[str]:
    """Raises InputError for what llama.cpp cannot load or would apply otherwise; returns notes."""
    _refuse(adapter, having(adapter, "magnitude"), "GGUF adapters know no DoRA", _MERGE)
    _refuse(adapter, having(adapter, "bias"), "GGUF adapters know no lora_bias", _MERGE)
    layout = gguf_layout(base)
    if base.tied:
        whole = [m for m in adapter.modules if m in (base.head, base.embedding)]
        _refuse(
            adapter,
            whole,
            "the base's head is its embedding; llama.cpp has one tensor for both and cannot adapt one",
            "train without embed_tokens and lm_head, or fold it: --to merged-model",
        )
    lost = [m for m in adapter.modules if m not in layout.names]
    _refuse(adapter, lost, f"it has no tensor in GGUF's {layout.architecture}", "keep it as PEFT")
    return []


def check_merge(
    adapters: Sequence[Adapter], base: BaseModules, to: str, method: str, weights: Mapping[str, float]
) -> list[str]:
    """Raises InputError where a merge could not be exact in its own terms; returns notes."""
    notes = []
    used = [a for a in adapters if weights[a.name] != 0]
    left_out = [a.name for a in adapters if weights[a.name] == 0]
    if left_out:
        notes.append(f"left out, as their weight is 0: {', '.join(left_out)}")
    for adapter in used:
        if to == "merged-peft":
            _refuse(
                adapter,
                having(adapter, "magnitude"),
                "DoRA rescales the base's rows, which no sum of low-rank factors can say",
                "leave the adapter out, or merge into the model: --to merged-model",
            )
        if method in ("ties", "dare"):
            _refuse(
                adapter,
                having(adapter, "bias"),
                f"--method {method} is defined on weights, not on lora_bias",
                "use --method cat or svd",
            )
    if to == "merged-peft" and any(having(a, "bias") for a in used):
        for adapter in used:
            whole = [m for m, v in adapter.modules.items() if v.kind == "embedding"]
            _refuse(adapter, whole, "PEFT has no lora_bias on embeddings", "merge into the model")
    if to == "merged-model":
        for adapter in used:
            lost = [m for m in having(adapter, "bias") if not _has_bias(base, m)]
            _refuse(
                adapter,
                lost,
                "the base's module has no bias to fold lora_bias into",
                "keep it as PEFT: --to peft",
            )
    return notes


def _has_bias(base: BaseModules, module: str) -> bool:
    from molora_cli.core.base.structure import read_tensor_shapes

    stored = base.tensors.get(module, "")
    return stored.removesuffix(".weight") + ".bias" in read_tensor_shapes(base.path)
