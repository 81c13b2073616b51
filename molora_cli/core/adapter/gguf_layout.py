"""How llama.cpp lays out a base's modules: its tensor names, and which rows its converter reorders.

For rotary attention of the Llama family the converter stores the rows of q_proj and k_proj so that the two
halves of every head are interleaved: rows (head, half, i) become (head, i, half). An adapter's B follows
its weight. The family table holds only architectures whose conversion is known to do this and nothing else.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.base.structure import config_number, text_config
from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

# model_type of transformers -> (general.architecture of GGUF, whether q and k rows are interleaved)
_FAMILIES = {
    "llama": ("llama", True), "mistral": ("llama", True), "mixtral": ("llama", True),
    "granite": ("granite", True), "smollm3": ("smollm3", True), "arcee": ("arcee", True),
    "qwen2": ("qwen2", False), "qwen2_moe": ("qwen2moe", False),
    "qwen3": ("qwen3", False), "qwen3_moe": ("qwen3moe", False),
    "phi": ("phi2", False), "phi3": ("phi3", False),
    "gemma": ("gemma", False), "gemma2": ("gemma2", False),
    "gemma3": ("gemma3", False), "gemma3_text": ("gemma3", False),
    "gpt2": ("gpt2", False), "starcoder2": ("starcoder2", False), "olmo2": ("olmo2", False),
}  # fmt: skip
_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class GgufLayout:
    """architecture: as in general.architecture. names: module of the base -> tensor of GGUF without
    ".weight" ("blk.0.attn_q"). heads: module -> heads of its interleaved rows, for those that have them."""

    architecture: str
    names: dict[str, str]
    heads: dict[str, int]


def need_gguf(what: str) -> None:
    """Raises InputError where the optional package gguf is missing; `what` says what needs it."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"{what} needs the package gguf to be read or written", "pip install 'molora[gguf]'")


def gguf_architecture(base: BaseModules) -> str | None:
    """The base's general.architecture, or None for a family whose layout is not known here."""
    family = _FAMILIES.get(base.model_type)
    return family[0] if family else None


def gguf_layout(base: BaseModules) -> GgufLayout:
    """Names and row orders of the base's modules in GGUF, by the gguf library's own tables.

    Modules without a counterpart are left out of `names`. Raises InputError for a family that is not known,
    or where the package gguf is missing.
    """
    need_gguf(f"the GGUF layout of {base.model_type or 'this base'}")
    import gguf

    family = _FAMILIES.get(base.model_type)
    if family is None:
        raise InputError(
            f"the layout of {shorten(base.model_type or 'this base', 40)} in GGUF is not known",
            f"use a PEFT adapter; GGUF is known for {', '.join(sorted(_FAMILIES))}",
        )
    architecture, interleaved = family
    found = next((a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if found is None:
        raise InputError(
            f"the installed gguf package does not know the architecture {architecture}",
            "pip install -U 'molora[gguf]'",
        )
    table = gguf.get_tensor_name_map(found, min(base.n_layers, _MAX_LAYERS))
    names: dict[str, str] = {}
    for module in base:
        # the tables know a multimodal wrapper's decoder by its plain name
        name = table.get_name(module) or table.get_name(module.replace("language_model.", "", 1))
        # of embeddings llama.cpp applies an adapter to the tokens' alone
        if name is not None and (base[module].kind != "embedding" or name == "token_embd"):
            names[module] = name
    return GgufLayout(architecture, names, _interleaved(base, names) if interleaved else {})


def _interleaved(base: BaseModules, names: dict[str, str]) -> dict[str, int]:
    config: dict[str, Any] = text_config(base.config)
    queries = config_number(config, "num_attention_heads") or 0
    keys = config_number(config, "num_key_value_heads") or queries
    heads: dict[str, int] = {}
    for module in names:
        count = {"q_proj": queries, "k_proj": keys}.get(module.rpartition(".")[2])
        if count is None:
            continue
        rows = base[module].out_features
        if count < 1 or rows % (2 * count):
            raise InputError(
                f"{module} has {rows} rows, which {count} heads of the config do not divide",
                "check config.json of the base",
            )
        heads[module] = count
    return heads


def interleave_rows(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows (out, ...) of transformers' order in GGUF's: within each head, halves become alternating rows."""
    return _swap(array, heads, lambda rows: (2, rows // 2))


def separate_rows(array: NDArray[Any], heads: int) -> NDArray[Any]:
    """The inverse of `interleave_rows`: rows (out, ...) of GGUF's order in transformers'."""
    return _swap(array, heads, lambda rows: (rows // 2, 2))


def _swap(array: NDArray[Any], heads: int, split: Callable[[int], tuple[int, int]]) -> NDArray[Any]:
    rows = array.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise ValueError(f"{rows} rows cannot be split into halves of {heads} heads")
    parts = array.reshape(heads, *split(rows // heads), *array.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(array.shape)
