"""The tensors of one weights file as numpy arrays: safetensors mapped, torch's .bin by weights_only.

bfloat16 has no numpy type; such tensors come as the uint16 view of their bits.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.files import check_regular, read_start, refuse_impostors, shown
from molora_cli.core.adapter.header import TensorInfo, read_header
from molora_cli.core.adapter.npz import read_npz
from molora_cli.errors import InputError
from molora_cli.text import shorten

_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8", "C64": "<c8",
    "F8_E4M3": "u1", "F8_E5M2": "u1", "F8_E8M0": "u1",
}  # fmt: skip
FLOATS = ("F16", "BF16", "F32", "F64")
_CHUNK = 1 << 22  # elements scanned at a time


@dataclass(frozen=True)
class TensorFile:
    """infos: name -> TensorInfo. `held` keeps arrays that are already in memory (a .bin file)."""

    path: Path
    infos: dict[str, TensorInfo]
    held: Mapping[str, NDArray[Any]] = field(default_factory=dict)

    def array(self, name: str) -> NDArray[Any]:
        """One tensor, read-only, in the file's dtype (bfloat16 as uint16 bits), mapped and not copied."""
        if name in self.held:
            return self.held[name]
        info = self.infos[name]
        if info.count == 0:
            return np.zeros(info.shape, _NUMPY[info.dtype])
        dtype = np.dtype(_NUMPY[info.dtype])
        flat = self._mapped[info.start : info.start + info.count * dtype.itemsize].view(dtype)
        return flat.reshape(info.shape)

    @cached_property
    def _mapped(self) -> NDArray[np.uint8]:
        """The whole file, mapped once: a mapping for each tensor takes longer than to read a small one."""
        return np.memmap(self.path, dtype=np.uint8, mode="r")

    def floats(self, name: str) -> NDArray[np.float32]:
        """One float tensor widened or narrowed to float32."""
        return to_float32(self.array(name), self.infos[name].dtype)


@dataclass(frozen=True)
class Scan:
    """A pass over one tensor: how many values are not finite, and the largest magnitude among the rest."""

    bad: int
    largest: float


def to_float32(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """An array in a file's dtype as float32; bfloat16 bits are the upper half of a float32's."""
    if dtype == "BF16":
        return (np.ascontiguousarray(array).astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, dtype=np.float32)


def scan(file: TensorFile, name: str) -> Scan:
    """NaN and infinity counted, in chunks. A bfloat16 is not finite where its exponent is all ones."""
    dtype = file.infos[name].dtype
    flat = file.array(name).reshape(-1)
    bad, largest = 0, 0.0
    for begin in range(0, flat.size, _CHUNK):
        part = flat[begin : begin + _CHUNK]
        if dtype == "BF16":
            finite = (part & 0x7F80) != 0x7F80
            values = to_float32(part, dtype)
        else:
            values = np.asarray(part)
            finite = np.isfinite(values)
        count = int(np.count_nonzero(finite))
        bad += part.size - count
        if count:
            kept = values if count == part.size else values[finite]
            largest = max(largest, float(kept.max()), -float(kept.min()))
    return Scan(bad, largest)


def digest(path: Path) -> str:
    """sha256 of a file in hexadecimal."""
    total = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def open_tensors(path: Path) -> TensorFile:
    """The tensors of an adapter's weights file: safetensors, numpy's .npz, or torch's own format (.bin).

    Imports torch only for the latter. Raises InputError for what is none of these, damaged, or more than
    tensors.
    """
    start = read_start(path)
    refuse_impostors(path, start)
    if path.suffix == ".npz":
        return TensorFile(path, *read_npz(path))
    if path.suffix in (".bin", ".pt", ".pth"):
        return _open_bin(path)
    return TensorFile(path, read_header(path).tensors)


def _open_bin(path: Path) -> TensorFile:
    size = check_regular(path)
    if zipfile.is_zipfile(path):
        try:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(entry.file_size for entry in archive.infolist())
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise InputError(
                f"{shown(path)} is a damaged zip archive: {error}", "download or save it again"
            ) from error
        if unpacked > 2 * size + (1 << 20):  # torch stores its tensors uncompressed
            raise InputError(
                f"{shown(path)} has {size} bytes and would unpack to {unpacked}; torch writes no such files",
                "do not trust this file",
            )
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch raises whatever the damage leads to; weights_only never executes what the file names
        reason = shorten(
            str(error).split("\n")[0].partition("weights_only")[0].strip() or type(error).__name__, 120
        )
        raise InputError(
            f"{shown(path)} is refused: it is damaged, or a pickle that holds more than tensors ({reason})",
            "ask for the adapter as adapter_model.safetensors",
        ) from error
    return _from_state(path, state)


def _from_state(path: Path, state: Any) -> TensorFile:
    import torch

    if not isinstance(state, Mapping):
        raise InputError(
            f"{shown(path)} holds a {type(state).__name__}, not named tensors", "save the adapter again"
        )
    spelled = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}
    infos: dict[str, TensorInfo] = {}
    held: dict[str, NDArray[Any]] = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise InputError(
                f"{shown(path)}: '{shorten(str(name))}' is a {type(value).__name__}, not a tensor",
                "this looks like a training checkpoint; give the adapter that was exported from it",
            )
        if value.layout != torch.strided or value.is_quantized:
            raise InputError(
                f"{shown(path)}: tensor '{shorten(name)}' is not dense", "save the adapter again"
            )
        dense = value.detach().contiguous()
        dtype = spelled.get(value.dtype, str(value.dtype).removeprefix("torch."))
        held[name] = dense.view(torch.int16).numpy().view(np.uint16) if dtype == "BF16" else dense.numpy()
        infos[name] = TensorInfo(name, dtype, tuple(value.shape))
    return TensorFile(path, infos, held)
