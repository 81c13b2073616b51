"""The Triton kernels compile for GPUs that are not there, without spills and within a bound of registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="triton is not installed")
SCRIPT = Path(__file__).parent / "triton_compile.py"


def compiled(*arguments: str) -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def judge(rows: list[dict], bound: int) -> None:
    for row in rows:
        assert row["spilled"] == 0, row
        assert row["registers"] <= bound, row
        assert row["shared"] <= 99 * 1024, row  # what every GPU from compute capability 8.0 on has
        dots = row["kernel"] in ("shrink_sorted", "expand_sorted") and row["dtype"] != "fp32"
        assert (row["mma"] is not None) == dots, row


def test_the_corners_of_the_matrix() -> None:
    rows = compiled("few", "sm_80", "sm_90")
    judge(rows, 192)
    names = {row["kernel"] for row in rows}
    assert names == {
        "hist",
        "scan",
        "scatter",
        "shrink_rows",
        "linear_rows",
        "shrink_sorted",
        "expand_sorted",
    }
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_the_whole_matrix(arch: str) -> None:
    rows = compiled("all", arch)
    judge(rows, 255 if arch != "gfx942" else 512)
    assert {row["rank"] for row in rows} == {0, 4, 8, 16, 32, 64, 128, 256}
    assert {row["dtype"] for row in rows} == {"i32", "bf16", "fp16", "fp32"}
