"""What of the Triton backend needs neither a GPU nor triton: the rule, the twins, tiles, and the refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from molora_kernels import triton_ops
from molora_kernels.testing import assert_close, case_plan, make_bank, oracle, random_case
from molora_kernels.triton_ops import linear, tiles
from molora_kernels.triton_ops.prefill import prefill_extended, widen
from molora_kernels.triton_ops.sort import sort_by_slot, sort_by_slot_torch


@pytest.mark.slow
def test_the_package_imports_where_triton_is_missing() -> None:
    code = "import sys; sys.modules['triton'] = None; import molora_kernels.triton_ops.linear"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_the_reason_says_that_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n.startswith("triton") else find(n))
    assert "not installed" in (triton_ops.available() or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_reason_says_that_no_gpu_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton.runtime")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "device" in (triton_ops.available() or "")


def test_sort_twin_against_the_definition() -> None:
    slots = torch.tensor([[2, 0], [0, 0], [2, 1], [1, 0], [0, 3]])
    found = sort_by_slot_torch(slots, 4, 2)
    assert found.order.tolist() == [[1, 4, 3, 0, 2], [0, 1, 3, 2, 4]]
    assert found.offsets.tolist() == [[0, 2, 3, 5, 5], [0, 3, 4, 4, 5]]
    assert found.tiles.tolist() == [[1, 2, 3, 3], [2, 3, 3, 4]]


def test_sort_refuses_a_block_that_is_no_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        sort_by_slot(torch.zeros(3, 1, dtype=torch.int64), 2, 24)


def test_the_rule_of_paths() -> None:
    case = random_case(0, tokens=1, inputs=8, outputs=8, ranks=[16, 16], top=1)
    bank, _ = make_bank(case.factors, 8)

    def path(tokens: int, choices: int = 1, rank: int = 16, plain: bool = True, wide: bool = True) -> str:
        return linear.choose(tokens, bank, choices, rank, plain=plain, wide=wide)

    assert [path(1), path(1, 2), path(1, rank=64), path(1, plain=False), path(32)] == [
        "fused", "fused-split", "fused-split", "delta", "delta",
    ]  # fmt: skip
    assert [path(4096), path(4096, wide=False)] == ["extended", "sorted"]
    bank = dataclasses.replace(bank, finite=False)
    assert path(4096) == "sorted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extended_product_against_the_oracle(dtype: torch.dtype) -> None:
    case = random_case(3, tokens=40, inputs=30, outputs=20, ranks=[3, 0, 9], top=3, biases=True, dtype=dtype)
    bank, layout = make_bank(case.factors, 20, case.base_bias)
    wide, inside = widen(case.weight, bank)
    assert wide.shape[1] == 30 + 16 and inside.B.data_ptr() != bank.B.data_ptr()
    got = prefill_extended(case.x, wide, case.base_bias, inside, case_plan(case, layout))
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close(got, oracle(case), max_error=10 * limit, rms_error=limit)


def test_extended_product_refuses_what_it_would_get_wrong() -> None:
    case = random_case(4, tokens=5, inputs=8, outputs=8, ranks=[2], top=1, dora=True)
    bank, layout = make_bank(case.factors, 8)
    with pytest.raises(ValueError, match="output scale"):
        prefill_extended(case.x, widen(case.weight, bank)[0], None, bank, case_plan(case, layout))


@pytest.mark.parametrize("wants", ["x", "A", "weights"])
def test_a_wanted_gradient_takes_the_twin(wants: str) -> None:
    case = random_case(5, tokens=6, inputs=8, outputs=8, ranks=[2, 3], top=2, base_share=0)
    bank, layout = make_bank(case.factors, 8)
    tensor = {"x": case.x, "A": bank.A, "weights": case.weights}[wants].requires_grad_()
    out = linear.mixed_linear(case.x, case.weight, None, bank, case_plan(case, layout), max_rank=3)
    assert_close(out.detach(), oracle(case), max_error=1e-4, rms_error=1e-5)
    out.sum().backward()
    assert tensor.grad is not None and tensor.grad.abs().sum() > 0


def test_double_precision_takes_the_twin() -> None:
    case = random_case(6, tokens=2, inputs=8, outputs=8, ranks=[2], top=1, dtype=torch.float64)
    bank, layout = make_bank(case.factors, 8)
    got = linear.mixed_linear(case.x, case.weight, None, bank, case_plan(case, layout), max_rank=2)
    assert got.dtype == torch.float64
    assert_close(got, oracle(case), max_error=1e-5, rms_error=1e-6)


def test_a_measured_tile_is_kept_and_a_damaged_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton.runtime")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tiles._measured.cache_clear()
    times = iter([3.0, 1.0, 2.0, 4.0])
    monkeypatch.setattr(tiles, "measure", lambda launch: (launch(), next(times))[1])
    seen: list[tiles.Decode] = []

    def run() -> None:
        seen.append(tiles.decode_tile(64, 512, torch.bfloat16))

    try:
        assert tiles.decode_tile(64, 512, torch.bfloat16) == tiles.DECODE[0]
        assert tiles.tune_decode(64, 512, torch.bfloat16, run) == tiles.DECODE[1]
        assert seen == list(tiles.DECODE)
        assert tiles.decode_tile(64, 512, torch.bfloat16) == tiles.DECODE[1]
        assert tiles.decode_tile(64, 512, torch.float16) == tiles.DECODE[0]
        (file,) = tmp_path.glob("molora-tiles-*.json")
        assert json.loads(file.read_text()) == {"decode 64x512 torch.bfloat16": list(tiles.DECODE[1])}
        file.write_text("{")
        tiles._measured.cache_clear()
        assert tiles.decode_tile(64, 512, torch.bfloat16) == tiles.DECODE[0]
    finally:
        tiles._measured.cache_clear()


def test_steps_stay_bounded() -> None:
    assert tiles.prefill_step(256, torch.float32) == 16
    assert [tiles.prefill_step(r, torch.bfloat16) for r in (1, 16, 17, 256)] == [16, 16, 32, 64]
    assert [tiles.decode_step(r, split) for r in (1, 6, 256) for split in (True, False)] == [
        4, 4, 8, 8, 32, 16,
    ]  # fmt: skip
    for n_slots in (1, 2, 9, 257):
        assert tiles.sort_block(n_slots) * tiles.power_of_two(n_slots, 2) <= tiles.TILE_LIMIT
