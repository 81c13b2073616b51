"""The header of a GGUF file, checked against the file's size before anything is believed. No torch.

Format (version 2 and 3, little-endian): "GGUF", u32 version, u64 tensors, u64 fields; each field is a string
key, a u32 type and a value; each tensor a string name, u32 dimensions, u64 sizes (fastest first), u32 type
and u64 offset; then, aligned, the data. A string is a u64 length and its bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from molora_cli.core.adapter.files import check_regular, read_start, refuse_impostors, shown
from molora_cli.errors import InputError
from molora_cli.text import shorten

MAX_FIELDS = 65_536
MAX_TENSORS = 200_000
MAX_DIMENSIONS = 4  # as in ggml
_MAX_STRING = 1 << 20  # bytes of a key, name or text value
_MAX_ITEMS = 2_000_000  # items of all lists; a vocabulary has some 250 000
_KEPT_ITEMS = 1024  # longer lists are skipped, not kept
_MAX_DEPTH = 4  # lists in lists
_AGAIN = "download or save it again"
_STRING, _LIST = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


@dataclass(frozen=True)
class Skipped:
    """A list too long to be kept."""

    count: int


@dataclass(frozen=True)
class GgufTensor:
    """dims: sizes in the file's order, fastest first; type: ggml's number; start, stop: bytes in the file,
    stop only after `place_tensors`."""

    name: str
    dims: tuple[int, ...]
    type: int
    start: int
    stop: int = 0

    @property
    def count(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class GgufHeader:
    """fields: key -> number, text, list, or Skipped; tensors by name, in file order."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def text(self, key: str) -> str | None:
        """A field that is a text, else None."""
        value = self.fields.get(key)
        return value if isinstance(value, str) else None


class _Cursor:
    """Reads forward; an end of file is an InputError, never a short read."""

    def __init__(self, handle: BinaryIO, path: Path, size: int) -> None:
        self.handle, self.path, self.size = handle, path, size
        self.items = 0

    def take(self, count: int) -> bytes:
        raw = self.handle.read(count)
        if len(raw) != count:
            raise InputError(
                f"{shown(self.path)} is incomplete: its header goes on after the end at byte {self.size}",
                _AGAIN,
            )
        return raw

    def skip(self, count: int) -> None:
        if count > self.size - self.handle.tell():
            raise InputError(
                f"{shown(self.path)} is incomplete: a list of its header goes on after the end", _AGAIN
            )
        self.handle.seek(count, 1)

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self, what: str) -> str:
        length = self.number("Q")
        if length > _MAX_STRING:
            raise self.damaged(f"{what} claims a text of {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def damaged(self, why: str) -> InputError:
        return InputError(f"{shown(self.path)} has a damaged header: {why}", _AGAIN)


def read_gguf(path: Path) -> GgufHeader:
    """Fields and tensors of a GGUF file, every count and length bounded by the file.

    Raises InputError that names the file, and the field or tensor where one is at fault.
    """
    size = check_regular(path)
    start = read_start(path)
    refuse_impostors(path, start)
    if start[:4] != b"GGUF":
        raise InputError(f"{shown(path)} is not a GGUF file (it starts with {start[:4]!r})", _AGAIN)
    with path.open("rb") as handle:
        cursor = _Cursor(handle, path, size)
        cursor.take(4)
        version = cursor.number("I")
        if version not in (2, 3):
            big = version in (2 << 24, 3 << 24)
            why = "big-endian" if big else f"GGUF version {version}"
            raise InputError(
                f"{shown(path)} is {why}; versions 2 and 3, little-endian, are read", "convert it again"
            )
        tensors, fields = cursor.number("Q"), cursor.number("Q")
        if tensors > MAX_TENSORS or fields > MAX_FIELDS:
            raise cursor.damaged(f"it claims {tensors} tensors and {fields} fields")
        values = _fields(cursor, fields)
        found = _tensors(cursor, tensors)
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment not in [1 << n for n in range(3, 17)]:
            raise cursor.damaged(f"general.alignment is {shorten(str(alignment), 30)}")
        data = -(-handle.tell() // alignment) * alignment
    placed = {
        name: GgufTensor(name, dims, kind, data + offset) for name, (dims, kind, offset) in found.items()
    }
    return GgufHeader(path, values, placed)


def _fields(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string("a field's name")
        if key in values:
            raise cursor.damaged(f"field '{shorten(key)}' is given twice")
        values[key] = _value(cursor, key, cursor.number("I"), 0)
    return values


def _value(cursor: _Cursor, key: str, kind: int, depth: int) -> Any:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.string(f"field '{shorten(key)}'")
    if kind != _LIST or depth >= _MAX_DEPTH:
        raise cursor.damaged(f"field '{shorten(key)}' has the unknown type {kind}")
    inner, count = cursor.number("I"), cursor.number("Q")
    if inner in _SCALARS and count > _KEPT_ITEMS:
        cursor.skip(count * struct.calcsize("<" + _SCALARS[inner]))
        return Skipped(count)
    cursor.items += count
    if cursor.items > _MAX_ITEMS:
        raise cursor.damaged(f"field '{shorten(key)}' claims a list of {count}")
    if inner == _STRING and count > _KEPT_ITEMS:
        for _ in range(count):
            cursor.skip(cursor.number("Q"))
        return Skipped(count)
    if count > _KEPT_ITEMS:
        raise cursor.damaged(f"field '{shorten(key)}' is a list of {count} lists")
    return [_value(cursor, key, inner, depth + 1) for _ in range(count)]


def _tensors(cursor: _Cursor, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(count):
        name = cursor.string("a tensor's name")
        if name in found:
            raise cursor.damaged(f"tensor '{shorten(name)}' is there twice")
        rank = cursor.number("I")
        if rank > MAX_DIMENSIONS:
            raise cursor.damaged(f"tensor '{shorten(name)}' claims {rank} dimensions")
        dims = tuple(cursor.number("Q") for _ in range(rank))
        kind, offset = cursor.number("I"), cursor.number("Q")
        found[name] = dims, kind, offset
    return found


def place_tensors(header: GgufHeader, sizes: dict[int, tuple[int, int]]) -> dict[str, GgufTensor]:
    """The tensors with their last byte, each inside the file and in bytes of its own.

    sizes: ggml type -> (values in a block, bytes of a block). Raises InputError naming file and tensor.
    """
    size = check_regular(header.path)
    placed: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        shown_name = f"{shown(header.path)}: tensor '{shorten(name, 120)}'"
        if tensor.type not in sizes:
            raise InputError(f"{shown_name} has type {tensor.type}, which is not known", _AGAIN)
        block, width = sizes[tensor.type]
        first = tensor.dims[0] if tensor.dims else 1
        if first % block:
            raise InputError(
                f"{shown_name} has rows of {first} values, its type packs {block} at a time", _AGAIN
            )
        stop = tensor.start + tensor.count // block * width
        if stop > size:
            raise InputError(
                f"{shown(header.path)} is incomplete: it needs {stop} bytes, has {size} "
                f"(tensor '{shorten(name, 120)}')",
                _AGAIN,
            )
        placed[name] = GgufTensor(name, tensor.dims, tensor.type, tensor.start, stop)
    position = 0
    for tensor in sorted(placed.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start < position:
            raise InputError(
                f"{shown(header.path)}: tensor '{shorten(tensor.name, 120)}' shares bytes with another",
                _AGAIN,
            )
        position = tensor.stop
    return placed
