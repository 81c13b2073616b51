"""Full copies of modules (PEFT's modules_to_save) as LoRA: the truncated singular value decomposition.

With D = saved - base and its R largest singular values, B A = D V V^T where V holds R right singular vectors:
the closest matrix of rank R (Eckart and Young, 1936). V comes from the smaller of D^T D and D D^T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.adapter.config import LoraSettings
from molora_cli.core.adapter.files import shown
from molora_cli.core.adapter.header import TensorInfo
from molora_cli.core.adapter.names import ModuleIndex, Named, strip_wrappers
from molora_cli.core.adapter.tensors import TensorFile, to_float32
from molora_cli.core.base.structure import read_tensor_infos
from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

_CHUNK = 1 << 22  # values of a matrix handled at a time
_MAX_SIDE = 16_384  # of the smaller side: its Gram matrix takes 2 GB
_REMEDY = "train without modules_to_save, or with LoRA on this module"


@dataclass(frozen=True)
class Reduced:
    """The file with the new factors in it, their names, settings that know their ranks, and notes."""

    file: TensorFile
    named: list[Named]
    settings: LoraSettings
    notes: list[str]


def parse_saved(text: str) -> int:
    """The rank R out of `svd:R`. Raises InputError."""
    kind, _, number = text.partition(":")
    if kind != "svd" or not (number.isascii() and number.isdigit()) or not 1 <= int(number[:9]) <= 4096:
        raise InputError(
            f"'{shorten(text, 40)}' is no way to keep saved modules",
            "--modules-to-save svd:16 (rank 1 to 4096)",
        )
    return int(number[:9])


def reduce_saved(
    file: TensorFile,
    copies: list[str],
    base: BaseModules,
    rank: int,
    settings: LoraSettings,
    adapted: Set[str],
) -> Reduced:
    """Each full copy as LoRA of at most `rank` with scale 1, in float32, its relative error in a note.

    adapted: modules that have LoRA in the file already. Raises InputError for copies that are no weight
    matrix of the base, of another shape, not finite, or beside DoRA or lora_bias.
    """
    where = shown(file.path)
    if settings.dora or settings.bias:
        raise InputError(
            f"{where}: full copies of modules beside {'use_dora' if settings.dora else 'lora_bias'} "
            "cannot be kept as LoRA",
            _REMEDY,
        )
    index, tensors = ModuleIndex(base), read_tensor_infos(base.path)
    infos, held = dict(file.infos), dict(file.held)
    named: list[Named] = []
    notes: list[str] = []
    fixed = dict(settings.fixed)
    for key in copies:
        home = index.find(_module(key))
        shown_key = f"{where}: '{shorten(key, 120)}'"
        if home is None or not key.endswith(".weight") or len(file.infos[key].shape) != 2:
            raise InputError(f"{shown_key} is no weight matrix of the base", _REMEDY)
        if home in fixed or _module(key) in adapted or home in adapted:
            raise InputError(f"{shown_key} is there beside LoRA on the same module", _REMEDY)
        if base.tied and home == base.embedding:
            raise InputError(
                f"{shown_key} is the embedding of a base whose head is tied to it: which of the two the copy "
                "replaces is not known",
                _REMEDY,
            )
        name = base.tensors.get(home) or base.tensors.get(base.embedding or "") or ""
        info, path = tensors[name]
        if info.shape != file.infos[key].shape:
            raise InputError(
                f"{shown_key} is {list(file.infos[key].shape)}, the base has {list(info.shape)}",
                "give the base that it was trained on (a resized vocabulary changes the shape)",
            )
        delta = _Delta(file, key, TensorFile(path, {name: info}), name)
        left, right, error = _factors(delta, rank, shown_key)
        if left is None or right is None:
            notes.append(f"{home}: the saved copy equals the base and was left out")
            continue
        kind = base[home].kind
        # D is (out, in) for a linear module, (in, out) for Conv1D, (V, d) for an embedding
        a, b = (right, left) if kind == "linear" else (left.T, right.T)
        got = int(a.shape[0])
        fixed[home] = (got, math.sqrt(got) if settings.rslora else float(got))
        for role, array in (("A", a), ("B", b)):
            new = f"{key} ({role})"
            held[new] = np.ascontiguousarray(array)
            infos[new] = TensorInfo(new, "F32", array.shape)
            named.append(Named(new, home, role, "", kind == "embedding"))
        notes.append(
            f"{home}: the saved copy was approximated by LoRA of rank {got}, "
            f"relative error {error:.2e} of the change"
        )
    return Reduced(TensorFile(file.path, infos, held), named, replace(settings, fixed=fixed), notes)


def _module(key: str) -> str:
    """The module path of a saved copy; PEFT before 0.4 left its wrapper's name in."""
    path = strip_wrappers(key.removesuffix(".weight"))
    return path.partition(".modules_to_save")[0]


@dataclass(frozen=True)
class _Delta:
    """saved - base, (m, n), in blocks of rows and never as a whole."""

    saved: TensorFile
    key: str
    base: TensorFile
    name: str

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.saved.infos[self.key].shape
        return rows, columns

    def blocks(self) -> Iterator[tuple[int, NDArray[np.float64]]]:
        rows, columns = self.shape
        step = max(1, _CHUNK // max(1, columns))
        ours, theirs = self.saved.array(self.key), self.base.array(self.name)
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            yield begin, _wide(self.saved, self.key, ours[part]) - _wide(self.base, self.name, theirs[part])


def _wide(file: TensorFile, name: str, part: NDArray[Any]) -> NDArray[np.float64]:
    return to_float32(part, file.infos[name].dtype).astype(np.float64)


def _factors(
    delta: _Delta, rank: int, shown_key: str
) -> tuple[NDArray[np.float32] | None, NDArray[np.float32] | None, float]:
    """L (m, r) and R (r, n) in float32 with L R closest to the delta, and |D - L R| / |D|."""
    rows, columns = delta.shape
    if min(rows, columns) > _MAX_SIDE:
        raise InputError(f"{shown_key} is {rows} by {columns}, too large to decompose here", _REMEDY)
    tall = columns <= rows
    total = 0.0
    gram = np.zeros((min(rows, columns),) * 2)
    whole = None if tall else np.concatenate([block for _, block in delta.blocks()])
    for _, block in delta.blocks():
        if not np.isfinite(block).all():
            raise InputError(f"{shown_key} holds NaN or infinity", "use an earlier checkpoint")
        total += float(np.sum(block * block))
        if whole is None:
            gram += block.T @ block
    if total == 0.0:
        return None, None, 0.0
    if whole is not None:
        gram = whole @ whole.T
    kept = np.linalg.eigh(gram)[1][:, ::-1][:, : min(rank, len(gram))]
    if whole is not None:
        left, right = kept, kept.T @ whole
    else:
        left, right = np.concatenate([block @ kept for _, block in delta.blocks()]), kept.T
    left, right = left.astype(np.float32), right.astype(np.float32)
    lost = 0.0
    for begin, block in delta.blocks():
        part = left[begin : begin + len(block)].astype(np.float64)
        lost += float(np.sum((block - part @ right.astype(np.float64)) ** 2))
    return left, right, math.sqrt(lost / total)
