"""Tile sizes: a table chosen by estimate, and an optional measurement on the GPU that is kept in a file.

Measuring is never a side effect of an op: it would break the capture of a CUDA graph. The tile of the
base's product depends on nothing but the module's sizes and dtype, never on the adapters: the same order of
summation with and without them is what makes a base-only token bit-identical.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

TILE_LIMIT = 4096  # elements of a one-hot tile of the sort: 32 registers in each of 128 threads


class Decode(NamedTuple):
    """outputs and inputs per step of the base's product; warps."""

    bn: int
    bk: int
    warps: int


class Prefill(NamedTuple):
    """tokens, outputs, inputs per tile; warps; pipeline stages of shrink and of expand."""

    bm: int
    bn: int
    bk: int
    warps: int
    shrink_stages: int
    expand_stages: int


DECODE = (Decode(16, 256, 4), Decode(8, 512, 4), Decode(32, 128, 4), Decode(16, 512, 8))
PREFILL = (Prefill(32, 128, 64, 4, 3, 2), Prefill(64, 128, 64, 8, 3, 2), Prefill(64, 64, 64, 4, 3, 2))


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def decode_step(max_rank: int, split: bool) -> int:
    """Columns of low rank per step: bounded, so that registers are too. Not `split`, the tile holds rows of A
    besides."""
    return min(32 if split else 16, power_of_two(max_rank, 4))


def prefill_step(max_rank: int, dtype: torch.dtype) -> int:
    """Likewise for the sorted kernels; `tl.dot` takes 16 at least; its fp32 operands lie in registers."""
    return 16 if dtype == torch.float32 else min(64, power_of_two(max_rank, 16))


def prefill_outputs(tile: Prefill, outputs: int, dtype: torch.dtype) -> int:
    """Outputs per tile of expand."""
    most = 32 if dtype == torch.float32 else tile.bn  # without tensor cores the operands lie in registers
    return min(most, power_of_two(outputs, 16))


def registers(scaled: bool) -> dict[str, int]:
    """Launch options of the larger kernels. With an output scale the assembler rather spills a little than
    loses occupancy, so it is told the limit; HIP has no such option."""
    return {"maxnreg": 255} if scaled and torch.version.hip is None else {}


def sort_block(n_slots: int) -> int:
    """Tokens per block of the sort, such that the one-hot tile stays below `TILE_LIMIT`."""
    return max(2, min(128, TILE_LIMIT // power_of_two(n_slots, 2)))


def decode_tile(outputs: int, inputs: int, dtype: torch.dtype) -> Decode:
    """The tile for (outputs, inputs): measured if `tune_decode` ran here, else the first of the table."""
    found = _measured().get(_decode_key(outputs, inputs, dtype))
    tile = Decode(*found) if found else DECODE[0]
    return tile._replace(bk=min(tile.bk, power_of_two(inputs, 16)))


@torch.compiler.assume_constant_result
def sort_rows() -> int:
    """BM of the sorted kernels: part of the sort's result, so one for all modules."""
    return prefill_tile().bm


def prefill_tile() -> Prefill:
    """The tile of the sorted kernels."""
    found = _measured().get("prefill")
    return Prefill(*found) if found else PREFILL[0]


def tune_decode(outputs: int, inputs: int, dtype: torch.dtype, run: Callable[[], object]) -> Decode:
    """Measure `run`, which launches the op once, with every decode tile, and keep the fastest."""
    return Decode(*_keep(_decode_key(outputs, inputs, dtype), DECODE, run))


def tune_prefill(run: Callable[[], object]) -> Prefill:
    """Likewise for the sorted kernels; run() sorts, shrinks and expands."""
    return Prefill(*_keep("prefill", PREFILL, run))


def _decode_key(outputs: int, inputs: int, dtype: torch.dtype) -> str:
    return f"decode {outputs}x{inputs} {dtype}"


def _keep(key: str, candidates: Sequence[tuple], run: Callable[[], object]) -> tuple:
    table = _measured()
    before = table.get(key)
    times = []
    try:
        for tile in candidates:
            table[key] = list(tile)
            times.append(measure(run))
        table[key] = list(candidates[times.index(min(times))])
    except BaseException:
        table.pop(key)
        if before:
            table[key] = before
        raise
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(table, indent=1, sort_keys=True))
    beside.replace(path)
    return tuple(table[key])


def measure(run: Callable[[], object]) -> float:
    """Milliseconds of one call: median by CUDA events, caches warm."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=5, rep=20, return_mode="median"))


def _file() -> Path:
    """Beside Triton's own cache, one file per GPU and version of Triton."""
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "interpreter"
    label = "".join(c if c.isalnum() else "-" for c in f"{name}-{triton.__version__}")
    root = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return Path(root) / f"molora-tiles-{label}.json"


@functools.cache
def _measured() -> dict[str, list[int]]:
    """What earlier measurements kept; a file that is damaged counts as none."""
    try:
        table = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}
