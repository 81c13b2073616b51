"""numpy's .npz archives: each array is looked at by its header, and read when it is asked for. No pickle."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.files import check_regular, shown
from molora_cli.core.adapter.header import MAX_DIMENSIONS, TensorInfo
from molora_cli.errors import InputError
from molora_cli.text import shorten

_MEMBERS = 200_000
_RATIO = 40  # an archive that unpacks to more than this many times its size is refused
_AGAIN = "download or save it again"
_DAMAGE = (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, RuntimeError, NotImplementedError)
# numpy has no bfloat16: MLX stores such arrays as two raw bytes
_SPELLED = {"f4": "F32", "f2": "F16", "f8": "F64", "V2": "BF16", "i4": "I32", "i8": "I64", "u1": "U8"}


class Lazy(Mapping[str, "NDArray[Any]"]):
    """Arrays by name, each made when it is asked for and kept by nobody."""

    def __init__(self, makers: Mapping[str, Callable[[], NDArray[Any]]]) -> None:
        self._makers = dict(makers)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._makers[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def read_npz(path: Path) -> tuple[dict[str, TensorInfo], Lazy]:
    """What the archive holds by name, and the arrays (bfloat16 as uint16 bits).

    Raises InputError for a damaged archive, one that unpacks to absurd sizes, or an array that is a pickle.
    """
    size = check_regular(path)
    infos: dict[str, TensorInfo] = {}
    makers: dict[str, Callable[[], NDArray[Any]]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            unpacked = sum(member.file_size for member in members)
            if len(members) > _MEMBERS or unpacked > _RATIO * size + (1 << 20):
                raise InputError(
                    f"{shown(path)} has {size} bytes and would unpack to {unpacked} in {len(members)} arrays",
                    "do not trust this file",
                )
            for member in members:
                name = member.filename.removesuffix(".npy")
                if name in infos:
                    raise InputError(f"{shown(path)}: '{shorten(name, 120)}' is there twice", _AGAIN)
                infos[name] = _header(archive, member, name, path)
                makers[name] = _maker(path, member.filename, infos[name])
    except _DAMAGE as error:
        raise InputError(
            f"{shown(path)} is no archive of arrays, or damaged: {shorten(str(error), 120)}", _AGAIN
        ) from error
    return infos, Lazy(makers)


def _header(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str, path: Path) -> TensorInfo:
    with archive.open(member) as handle:
        version = np.lib.format.read_magic(handle)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(handle)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(handle)
        else:
            raise ValueError(f"'{shorten(name, 80)}' has the unknown version {version}")
        left = member.file_size - handle.tell()
    if dtype.hasobject:
        raise InputError(
            f"{shown(path)}: '{shorten(name, 120)}' is a pickled object; such are never opened",
            "ask for the adapter as adapters.safetensors",
        )
    info = TensorInfo(name, _SPELLED.get(dtype.str[1:], str(dtype)), tuple(int(n) for n in shape))
    if len(shape) > MAX_DIMENSIONS or any(n < 0 for n in shape) or info.count * dtype.itemsize != left:
        raise ValueError(f"'{shorten(name, 80)}' is {list(shape)[:6]} and holds {left} bytes")
    return info


def _maker(path: Path, member: str, info: TensorInfo) -> Callable[[], NDArray[Any]]:
    def make() -> NDArray[Any]:
        try:
            with zipfile.ZipFile(path) as archive, archive.open(member) as handle:
                array: NDArray[Any] = np.lib.format.read_array(handle, allow_pickle=False)
        except _DAMAGE as error:
            raise InputError(
                f"{shown(path)}: '{shorten(info.name, 120)}' is damaged: {shorten(str(error), 100)}", _AGAIN
            ) from error
        if info.dtype == "BF16":
            return np.ascontiguousarray(array).view("<u2").reshape(info.shape)
        return array.astype(array.dtype.newbyteorder("<"), copy=False)

    return make
