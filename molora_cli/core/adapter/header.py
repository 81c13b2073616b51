"""The header of a .safetensors file, checked before a byte of data is touched. No torch.

Format: 8 bytes little-endian header length N, N bytes of JSON {name: {dtype, shape, data_offsets}}, data.
Tensors must cover the data part exactly, without gaps or overlaps.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molora_cli.core.adapter.files import check_regular, parse_json, read_start, refuse_impostors, shown
from molora_cli.errors import InputError
from molora_cli.text import shorten

# bytes; parsing takes some twenty times the header's size in memory, and 16 MiB describe 100 000 tensors
MAX_HEADER = 16 << 20
MAX_DIMENSIONS = 16
SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
_AGAIN = "download or save it again"


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: dtype as safetensors spells it ("F32", "BF16"), shape, and where its bytes lie
    (start and stop from the beginning of the file; both 0 where the tensor is held in memory)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int = 0
    stop: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A checked header: tensors by name in file order, and the free text metadata."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """The header of a safetensors file: every offset, shape and dtype checked against the file's size.

    Raises InputError that names the file, and the tensor where one is at fault.
    """
    size = check_regular(path)
    start = read_start(path)
    refuse_impostors(path, start)
    _refuse_other_formats(path, start)
    if size < 10:
        raise InputError(f"{shown(path)} is too short for a safetensors file ({size} bytes)", _AGAIN)
    length = struct.unpack("<Q", start[:8])[0]
    if length > MAX_HEADER:
        raise InputError(
            f"{shown(path)} is no safetensors file, or damaged: its header claims {length} bytes "
            f"(the file has {size}, a header at most {MAX_HEADER >> 20} MiB)",
            _AGAIN,
        )
    if length > size - 8:
        raise InputError(
            f"{shown(path)} is incomplete: its header alone needs {length + 8} bytes, the file has {size}",
            _AGAIN,
        )
    with path.open("rb") as handle:
        handle.seek(8)
        raw = handle.read(length)
    if not raw.lstrip().startswith(b"{"):
        raise InputError(f"{shown(path)} has a damaged header (it is not a JSON object)", _AGAIN)
    # a tensor takes three brackets in some fifty bytes; a header of brackets only costs time and memory
    if raw.count(b"[") + raw.count(b"{") > 100 + length // 10 and length > 1 << 20:
        raise InputError(f"{shown(path)} has a damaged header (it is no list of tensors)", _AGAIN)
    try:
        entries = parse_json(raw, path, "the header")
    except InputError as error:
        raise InputError(f"damaged header: {error.message}", _AGAIN) from error
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict):
        metadata = {}
    tensors = {name: _tensor(path, name, entry, length + 8, size) for name, entry in entries.items()}
    _check_cover(path, list(tensors.values()), length + 8, size)
    return Header(path, tensors, {str(k): str(v) for k, v in metadata.items()})


def _refuse_other_formats(path: Path, start: bytes) -> None:
    if start.startswith(b"PK\x03\x04"):
        raise InputError(
            f"{shown(path)} is a zip archive (a torch .bin file?), not safetensors", "rename it to .bin"
        )
    if start.startswith(b"GGUF"):
        raise InputError(
            f"{shown(path)} is a GGUF file, not safetensors", "give it its own name, ending in .gguf"
        )
    if start[:1] in (b"{", b"[") and start[:8].isascii() and start[:8].decode().isprintable():
        raise InputError(
            f"{shown(path)} is JSON text, not weights: {shorten(start.decode('utf-8', 'replace'))}", _AGAIN
        )


def _tensor(path: Path, name: str, entry: Any, data: int, size: int) -> TensorInfo:
    def damaged(why: str) -> InputError:
        return InputError(f"{shown(path)}: tensor '{shorten(name, 120)}' {why}", _AGAIN)

    if not isinstance(entry, dict):
        raise damaged("has a damaged entry in the header")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise damaged(f"has dtype {shorten(str(dtype), 20)}, which is not known")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(_is_size(n) for n in shape):
        raise damaged("has a shape that is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise damaged("has offsets that are no pair of positions")
    begin, end = offsets
    needed = math.prod(shape) * SIZES[dtype]  # Python integers: no overflow
    if end < begin or end - begin != needed:
        raise damaged(
            f"of shape {shape} and dtype {dtype} needs {needed} bytes, "
            f"its offsets {begin} to {end} give {end - begin}"
        )
    if data + end > size:
        raise InputError(
            f"{shown(path)} is incomplete: it needs {data + end} bytes, has {size} "
            f"(tensor '{shorten(name, 120)}')",
            _AGAIN,
        )
    return TensorInfo(name, dtype, tuple(shape), data + begin, data + end)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _check_cover(path: Path, tensors: list[TensorInfo], data: int, size: int) -> None:
    position = data
    for info in sorted(tensors, key=lambda t: (t.start, t.stop)):
        if info.start != position:
            what = "shares bytes with another tensor" if info.start < position else "leaves a gap before it"
            raise InputError(
                f"{shown(path)}: tensor '{shorten(info.name, 120)}' {what} (byte {info.start})", _AGAIN
            )
        position = info.stop
    if position != size:
        raise InputError(
            f"{shown(path)} has {size - position} bytes of no tensor (it needs {position}, has {size})",
            _AGAIN,
        )
