"""Compiles the Triton kernels for GPUs that are not there, and prints one JSON line for each.

    python tests/triton_compile.py few|all ARCH...        ARCH: sm_80, sm_90, gfx942

A process of its own, without TRITON_INTERPRET: `tests/test_triton_compile.py` starts it and judges.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from molora_kernels.triton_ops import _decode, _prefill, _sort, tiles
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {
    "extent": "*i64", "slots": "*i64", "scale": "*fp32", "weights": "*fp32", "z": "*fp32",
    "out_scale": "*fp32", "out_bias": "*fp32",
    **dict.fromkeys(("counts", "base", "offsets", "tiles", "order"), "*i32"),
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FACTORS = ("x", "W", "bias", "y", "A", "B", "out", "hidden")
# sizes and strides of real models are multiples of 16, which decides the width of loads
MULTIPLES = ("inputs", "outputs", "width", "s_xn", "s_wo", "s_yn", "s_ar", "s_br", "s_on", "s_ms", "s_cs")
ONES = ("s_bo", "s_sj", "s_gj")  # unit strides become constants


class Build(NamedTuple):
    """A kernel with its constants, and what it is to be compiled with."""

    kernel: Any
    dtype: str
    rank: int
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3


def builds(every: bool) -> Iterator[Build]:
    """The matrix: what the ops launch for ranks 4 to 256 and their tiles; without `every` its corners."""
    for kernel, constants in (
        (_sort.hist, {"SP": 8, "BT": 128}),
        (_sort.scan, {"SP": 8, "NB": 64, "BM": 32}),
        (_sort.scatter, {"SP": 8, "BT": 128}),
        (_sort.scan, {"SP": 256, "NB": 16, "BM": 32}),
        (_sort.scatter, {"SP": 256, "BT": 16}),
    )[: 5 if every else 3]:
        yield Build(kernel, "i32", 0, constants)
    ranks = (4, 8, 16, 32, 64, 128, 256) if every else (16, 64)
    for dtype, rank in itertools.product(("bf16", "fp16", "fp32") if every else ("bf16",), ranks):
        yield from _decode_builds(dtype, rank, every)
        yield from _prefill_builds(dtype, rank, every)


def _decode_builds(dtype: str, rank: int, every: bool) -> Iterator[Build]:
    yield Build(_decode.shrink_rows, dtype, rank, {"TOPK": 2, "BR": 4, "BK": 512})
    for tile in tiles.DECODE if every and rank == 16 else tiles.DECODE[:1]:
        for fused, split in ((True, False), (True, True), (False, True)) if every else ((True, rank > 16),):
            flags = {"HAS_W": fused, "HAS_Z": split}
            flags |= dict.fromkeys(("HAS_BIAS", "HAS_SCALE", "HAS_SLOT_BIAS"), rank != 16)
            sizes = {"TOPK": 4 if rank == 4 else 2, "BN": tile.bn, "BK": tile.bk}
            sizes["BR"] = tiles.decode_step(rank, split)
            yield Build(_decode.linear_rows, dtype, rank, {**flags, **sizes}, tile.warps)


def _prefill_builds(dtype: str, rank: int, every: bool) -> Iterator[Build]:
    step = tiles.prefill_step(rank, DTYPES[dtype])
    for tile in tiles.PREFILL if every and rank in (16, 64) else tiles.PREFILL[:1]:
        common = {"SP": 8, "BM": tile.bm, "BR": step, "UPCAST": False}
        shrink = {**common, "BK": tile.bk}
        yield Build(_prefill.shrink_sorted, dtype, rank, shrink, tile.warps, tile.shrink_stages)
        for first, dora in ((True, False), (False, False), (True, True)) if every else ((True, False),):
            flags = {"FIRST": first, "HAS_BIAS": dora, "HAS_SCALE": dora, "HAS_SLOT_BIAS": dora}
            expand = {**common, **flags, "BN": tiles.prefill_outputs(tile, 4096, DTYPES[dtype])}
            yield Build(_prefill.expand_sorted, dtype, rank, expand, tile.warps, tile.expand_stages)


def source(build: Build) -> ASTSource:
    """What Triton would make of a launch with these arguments."""
    constants = {**build.constants, **dict.fromkeys(ONES, 1)}
    signature, values, attributes = {}, {}, {}
    for place, name in enumerate(build.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(place,)] = constants[name]
            continue
        pointer = f"*{build.dtype}" if name in FACTORS else POINTERS.get(name)
        signature[name] = pointer or "i32"
        if pointer or name in MULTIPLES:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(fn=build.kernel, signature=signature, constexprs=values, attrs=attributes)


def report(build: Build, arch: str) -> dict[str, Any]:
    """Registers, spills, shared memory and the tensor-core instruction of one build for one GPU."""
    cuda = arch.startswith("sm_")
    target = GPUTarget("cuda", int(arch[3:]), 32) if cuda else GPUTarget("hip", arch, 64)
    options = {"num_warps": build.warps, "num_stages": build.stages}
    if cuda:
        options |= tiles.registers(build.constants.get("HAS_SCALE", False))
    made = triton.compile(source(build), target=target, options=options)
    row = {
        "arch": arch,
        "kernel": build.kernel.__name__,
        "dtype": build.dtype,
        "rank": build.rank,
        "constants": {k: v for k, v in build.constants.items() if k != "UPCAST"},
        "shared": made.metadata.shared,
    }
    if cuda:
        instruction = re.search(r"\b(wgmma\.mma_async|mma\.sync)", made.asm["ptx"])
        return {**row, **usage(made.asm["cubin"]), "mma": instruction[1] if instruction else None}
    text = made.asm["amdgcn"]

    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", text)[1])

    spilled = count("vgpr_spill_count") + count("sgpr_spill_count")
    instruction = "mfma" if "v_mfma" in text else None
    return {**row, "registers": count("vgpr_count"), "spilled": spilled, "mma": instruction}


def usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread and bytes of local memory (spills) from the binary: the driver's own figures need
    a driver."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = {key: int(n) for key, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


if __name__ == "__main__":
    every = sys.argv[1] == "all"
    for build, arch in itertools.product(builds(every), sys.argv[2:]):
        if not every and arch == "sm_80" and build.rank != 64:
            continue  # the heavier half stands for the other in the short run
        print(json.dumps(report(build, arch)), flush=True)  # noqa: T201
