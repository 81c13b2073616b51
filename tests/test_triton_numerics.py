"""The Triton kernels in Triton's interpreter against the oracle, in a process of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.runtime", reason="triton is not installed")
SCRIPT = Path(__file__).parent / "triton_numerics.py"
NAMES = re.findall(r"@check\ndef (\w+)", SCRIPT.read_text())


def run(*arguments: str) -> dict[str, str | None]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["check"]: row["error"] for row in rows}


@pytest.fixture(scope="module")
def results() -> dict[str, str | None]:
    return run()


@pytest.mark.parametrize("name", NAMES)
def test_check(results: dict[str, str | None], name: str) -> None:
    assert results[name] is None, results[name]


def test_every_check_was_found(results: dict[str, str | None]) -> None:
    assert set(results) == set(NAMES) and len(NAMES) > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_random_sweep() -> None:
    assert run("sweep") == {"sweep": None}
