"""llama.cpp's GGUF LoRA as PEFT's factors.

`NAME.weight.lora_a` (r, in) and `.lora_b` (out, r) in numpy's order; for `token_embd` lora_a is (V, r). The
product is added alpha / r times, or once where alpha is 0 or missing. Rows of lora_b follow the converter's
order of the weight's rows (gguf_layout.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.config import LoraSettings
from molora_cli.core.adapter.files import shown
from molora_cli.core.adapter.gguf_header import GgufHeader, GgufTensor, place_tensors, read_gguf
from molora_cli.core.adapter.gguf_layout import (
    GgufLayout,
    gguf_architecture,
    gguf_layout,
    need_gguf,
    separate_rows,
)
from molora_cli.core.adapter.header import TensorInfo
from molora_cli.core.adapter.names import Named
from molora_cli.core.adapter.npz import Lazy
from molora_cli.core.adapter.source import Offenders, Source, natural
from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.core.adapter.verdict import Classification, Reason
from molora_cli.errors import InputError
from molora_cli.text import printable, shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

# ggml type -> dtype as safetensors spells it; every other type is packed in blocks
_PLAIN = {0: "F32", 1: "F16", 30: "BF16", 28: "F64"}
_NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
_WHOLE_NUMBERS = (24, 25, 26, 27)
_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_REPO = re.compile(r"(?:https?://[^/]+/)?([\w.\-]+/[\w.\-]+)/?\Z", re.ASCII)
_ALORA = "adapter.alora.invocation_tokens"
_WRONG_BASE = "give the base that it was trained on: --base ..."
_AGAIN = "convert the adapter again, or give the base that it was trained on: --base ..."


def classify_gguf(header: GgufHeader) -> Classification:
    """Sort a GGUF file by its fields: a supported LoRA, or refused and why."""
    kind = header.text("general.type")
    if kind != "adapter":
        model = kind in (None, "model") and any(k.endswith(".block_count") for k in header.fields)
        why = "it is a whole model, not an adapter" if model else f"general.type is {_said(kind)}"
        remedy = "give it as --base, or give an adapter" if model else "give a LoRA made for llama.cpp"
        return Classification("gguf", (Reason("", why, remedy),))
    reasons = []
    if header.text("adapter.type") != "lora":
        said = _said(header.fields.get("adapter.type"))
        reasons.append(Reason("adapter.type", f"is {said}, not 'lora'", "give a LoRA made for llama.cpp"))
    if header.fields.get(_ALORA):
        why = "an activated LoRA works only after its invocation tokens; applied to other tokens it is wrong"
        reasons.append(Reason(_ALORA, why, "give a plain LoRA"))
    alpha = header.fields.get("adapter.lora.alpha", 0.0)
    number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not number or not math.isfinite(alpha) or abs(alpha) > 1e30:
        reasons.append(
            Reason("adapter.lora.alpha", f"must be a finite number, not {_said(alpha)}", "convert it again")
        )
    if header.text("general.architecture") is None:
        reasons.append(Reason("general.architecture", "is missing", "convert the adapter again"))
    notes = [
        f"{field} was not carried over ('{shorten(str(header.fields[field]), 60)}')"
        for field in ("adapter.lora.prompt_prefix", "adapter.lora.task_name")
        if header.fields.get(field)
    ]
    return Classification("gguf", tuple(reasons), tuple(notes))


def _said(value: Any) -> str:
    return "missing" if value is None else f"'{shorten(str(value), 40)}'"


def gguf_base_hint(header: GgufHeader) -> str | None:
    """The hub id of the base that a GGUF adapter names, if it names one."""
    for key in ("general.base_model.0.repo_url", "general.base_model.0.name"):
        if match := _REPO.match(header.text(key) or ""):
            return match.group(1)[:300]
    return None


def gguf_licence(header: GgufHeader) -> str | None:
    """general.license as a short line."""
    value = header.text("general.license")
    return printable(value)[:100] if value else None


def gguf_factors(header: GgufHeader) -> list[tuple[str, int, TensorInfo]]:
    """(weight's name in GGUF, rank, tensor) of every lora_a and lora_b, after checks of the file's extent.

    Raises InputError for a file that is not whole, or without the package gguf.
    """
    need_gguf(shown(header.path))
    tensors = place_tensors(header, _sizes())
    kinds = _type_names()
    found = []
    for name, tensor in tensors.items():
        stem, _, half = name.rpartition(".")
        if half not in ("lora_a", "lora_b"):
            continue
        for other in ("lora_a", "lora_b"):
            if f"{stem}.{other}" not in tensors:
                raise InputError(f"{shown(header.path)}: '{shorten(stem, 120)}.{other}' is missing", _AGAIN)
        b = tensors[f"{stem}.lora_b"]
        dtype = _PLAIN.get(tensor.type) or kinds.get(tensor.type, str(tensor.type))
        info = TensorInfo(name, dtype, tensor.dims[::-1])
        found.append((stem.removesuffix(".weight"), b.dims[0] if b.dims else 0, info))
    return found


def read_gguf_lora(path: Path, base: BaseModules, header: GgufHeader | None = None) -> Source:
    """The tensors of a GGUF LoRA that `classify_gguf` supports, in the base's names and order of rows.

    Packed tensors (Q8_0 and others) are unpacked to float32 when read. Raises InputError for another
    architecture, missing halves, unknown tensors, wrong shapes, incomplete files, or without the package
    gguf.
    """
    header = header or read_gguf(path)
    where = shown(path)
    need_gguf(where)
    made_for, own = header.text("general.architecture"), gguf_architecture(base)
    if own is not None and made_for != own:
        raise InputError(
            f"{where} was made for the architecture '{shorten(made_for or '', 40)}', the base is '{own}'",
            _WRONG_BASE,
        )
    layout = gguf_layout(base)
    tensors = place_tensors(header, _sizes())
    if not tensors:
        raise InputError(f"{where} contains no tensors", "convert the adapter again")
    pairs = _pairs(tensors, layout, base, where)
    alpha = float(header.fields.get("adapter.lora.alpha", 0.0))
    infos: dict[str, TensorInfo] = {}
    makers: dict[str, Callable[[], NDArray[Any]]] = {}
    named: list[Named] = []
    fixed: dict[str, tuple[int, float]] = {}
    for module, (a, b) in pairs.items():
        embedding = base[module].kind == "embedding"
        rank = b.dims[0]
        fixed[module] = (rank, alpha if alpha else float(rank))
        for role, tensor in (("A", a), ("B", b)):
            turn = embedding and role == "A"
            heads = layout.heads.get(module, 0) if role == "B" else 0
            shape = tensor.dims if turn else tensor.dims[::-1]
            infos[tensor.name] = TensorInfo(tensor.name, _PLAIN.get(tensor.type, "F32"), shape)
            makers[tensor.name] = _maker(path, tensor, turn, heads)
            named.append(Named(tensor.name, module, role, "", embedding))
    notes = ["read as a GGUF adapter of llama.cpp", *_notes(tensors, alpha)]
    lora = LoraSettings(r=1, alpha=1.0, rslora=False, dora=False, bias=False, fixed=fixed)
    return Source("gguf", TensorFile(path, infos, Lazy(makers)), named, lora, {}, tuple(notes))


def _sizes() -> dict[int, tuple[int, int]]:
    import gguf

    return {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}


def _type_names() -> dict[int, str]:
    import gguf

    return {int(kind): kind.name for kind in gguf.GGMLQuantizationType}


def _pairs(
    tensors: dict[str, GgufTensor], layout: GgufLayout, base: BaseModules, where: str
) -> dict[str, tuple[GgufTensor, GgufTensor]]:
    """module of the base -> (lora_a, lora_b), all of them whole, known and of the right shape."""
    faults = Offenders(where)
    modules = {name: module for module, name in layout.names.items()}
    halves: dict[str, dict[str, GgufTensor]] = {}
    for key in sorted(tensors, key=natural):
        stem, _, half = key.rpartition(".")
        if half not in ("lora_a", "lora_b"):
            faults.add(f"'{shorten(key, 120)}' is no lora_a or lora_b")
            continue
        module = modules.get(stem.removesuffix(".weight")) if stem.endswith(".weight") else None
        if module is None:
            match = _BLOCK.match(key)
            beyond = match is not None and int(match.group(1)) >= base.n_layers
            why = f"the base has {base.n_layers} layers" if beyond else "no such weight in the base"
            faults.add(f"'{shorten(key, 120)}': {why}")
            continue
        halves.setdefault(module, {})[half] = tensors[key]
    pairs: dict[str, tuple[GgufTensor, GgufTensor]] = {}
    for module, found in halves.items():
        for half in ("lora_a", "lora_b"):
            if half not in found:
                faults.add(f"'{layout.names[module]}.weight.{half}' is missing")
        if len(found) == 2:
            pairs[module] = (found["lora_a"], found["lora_b"])
            _check_shape(module, *pairs[module], base, faults)
    faults.refuse(len(tensors), _AGAIN)
    return pairs


def _check_shape(module: str, a: GgufTensor, b: GgufTensor, base: BaseModules, faults: Offenders) -> None:
    shape = base[module]
    for tensor in (a, b):
        if tensor.type in _WHOLE_NUMBERS:
            faults.add(f"'{shorten(tensor.name, 120)}' holds whole numbers")
    rank = b.dims[0] if b.dims else 0
    need_a = (rank, shape.in_features) if shape.kind == "embedding" else (shape.in_features, rank)
    need_b = (rank, shape.out_features)
    if rank < 1 or a.dims != need_a or b.dims != need_b:
        faults.add(
            f"{shorten(module, 100)}: lora_a is {list(a.dims[::-1])} and lora_b {list(b.dims[::-1])}, "
            f"the base needs {_needed(need_a)} and {_needed(need_b)}"
        )


def _needed(dims: tuple[int, int]) -> str:
    return str(list(dims[::-1]))


def _notes(tensors: dict[str, GgufTensor], alpha: float) -> list[str]:
    notes = []
    if not alpha:
        notes.append("alpha is 0 or missing: the product is added as it stands, as in llama.cpp")
    if packed := [name for name, tensor in tensors.items() if tensor.type not in _PLAIN]:
        notes.append(
            f"{len(packed)} of {len(tensors)} tensors are quantised and were unpacked to float32 "
            f"('{shorten(packed[0], 90)}')"
        )
    return notes


def _maker(path: Path, tensor: GgufTensor, turn: bool, heads: int) -> Callable[[], NDArray[Any]]:
    def make() -> NDArray[Any]:
        array = _array(path, tensor)
        if heads:
            array = separate_rows(array, heads)
        return array.T if turn else array

    return make


def _array(path: Path, tensor: GgufTensor) -> NDArray[Any]:
    """One tensor in numpy's order: plain types mapped, packed ones unpacked to float32."""
    shape = tensor.dims[::-1]
    dtype = _PLAIN.get(tensor.type)
    if tensor.count == 0:
        return np.zeros(shape, _NUMPY[dtype or "F32"])
    raw: NDArray[Any] = np.memmap(path, np.uint8, "r", tensor.start, (tensor.stop - tensor.start,))
    if dtype is not None:
        if tensor.start % np.dtype(_NUMPY[dtype]).itemsize:
            raw = np.array(raw)
        return raw.view(_NUMPY[dtype]).reshape(shape)
    import gguf

    try:
        rows = np.array(raw).reshape(*shape[:-1], -1)
        unpacked = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.type))
    except (ValueError, NotImplementedError, KeyError) as error:
        raise InputError(
            f"{shown(path)}: '{shorten(tensor.name, 120)}' has a type that the gguf package cannot unpack "
            f"({shorten(str(error), 80)})",
            "convert the adapter as f32 or f16",
        ) from error
    return np.asarray(unpacked, np.float32).reshape(shape)
