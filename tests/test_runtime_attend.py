"""The attention of one token against float64, the room that it reads and writes, and its routes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from molora_cli.core.routed.route import Route, write_route
from molora_cli.core.runtime.cache import new_cache

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "shared", "width", "out", "length", "room"),
    [(9, 3, 64, 64, 65, 512), (4, 1, 16, 16, 1, 3), (2, 2, 80, 48, 700, 700), (1, 1, 7, 5, 129, 130)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_softmax_of_all_positions(
    dtype: torch.dtype, heads: int, shared: int, width: int, out: int, length: int, room: int, threads: int
) -> None:
    gen = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(dtype)

    kept = heads // shared
    q, k, v = 3 * normal(1, heads, 1, width), normal(1, kept, 1, width), normal(1, kept, 1, out)
    keys, values = normal(1, kept, room, width), normal(1, kept, room, out)
    keys[:, :, length:], values[:, :, length:] = float("nan"), float("nan")  # nobody reads there
    wanted_keys, wanted_values = keys.clone(), values.clone()
    wanted_keys[:, :, length - 1], wanted_values[:, :, length - 1] = k[:, :, 0], v[:, :, 0]
    K = wanted_keys[0, :, :length].double().repeat_interleave(shared, 0)
    V = wanted_values[0, :, :length].double().repeat_interleave(shared, 0)
    scores = (q[0].double() @ K.transpose(1, 2)) * 0.3
    wanted = (scores.softmax(-1) @ V)[:, 0]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = torch.ops.molora_cpu.attend(q, k, v, keys, values, torch.tensor([length - 1]), 0.3)
    finally:
        torch.set_num_threads(before)
    assert y.shape == (1, 1, heads, out) and y.dtype == dtype
    limit = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    assert float((y[0, 0].double() - wanted).abs().max()) < limit * max(1.0, float(wanted.abs().max()))
    for got, expected in ((keys, wanted_keys), (values, wanted_values)):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_a_position_outside_the_room_is_refused() -> None:
    q, kept = torch.zeros(1, 2, 1, 8), torch.zeros(1, 1, 4, 8)
    for at in (-1, 4):
        with pytest.raises(IndexError, match="position"):
            torch.ops.molora_cpu.attend(q, q[:, :1], q[:, :1], kept, kept.clone(), torch.tensor([at]), 1.0)
    with pytest.raises(RuntimeError, match="not fit"):
        torch.ops.molora_cpu.attend(
            q[..., :4], q[:, :1], q[:, :1], kept, kept.clone(), torch.tensor([0]), 1.0
        )


def test_it_has_no_derivative() -> None:
    q = torch.zeros(1, 1, 1, 8, requires_grad=True)
    kept = torch.zeros(1, 1, 4, 8)
    with pytest.raises(RuntimeError, match="no derivative"):
        torch.ops.molora_cpu.attend(
            q, kept[:, :, :1], kept[:, :, :1], kept, kept.clone(), torch.tensor([0]), 1.0
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_gates_of_any_kind_are_written(dtype: torch.dtype) -> None:
    slots, gates = torch.zeros(3, 1, 4, dtype=torch.int64), torch.zeros(3, 1, 4)
    route = Route(torch.tensor([[[[2, -1]]]]), torch.tensor([[[[0.75, 0.25]]]], dtype=dtype))
    write_route(route, (1, 3), slots, gates)
    assert slots[:, 0].tolist() == [[0] * 4, [3, 0, 0, 0], [3, 0, 0, 0]]
    assert gates[:, 0].tolist() == [[0] * 4, [0.75, 0.25, 0, 0], [0.75, 0.25, 0, 0]]


@torch.no_grad()
def test_the_room_is_a_cache_like_any_other(tiny_llama: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    ids = torch.arange(70, 100).unsqueeze(0)
    wanted = base(ids).logits[0, -1]
    cache = new_cache(base.config)
    assert cache is not None
    base(ids[:, :20], cache=cache, use_cache=True)
    base(ids[:, 5:9], cache=cache, use_cache=True)
    cache.crop(-4)
    got = base(ids[:, 20:], cache=cache, use_cache=True).logits[0, -1]
    torch.testing.assert_close(got, wanted)
    cache.batch_repeat_interleave(2)
    assert cache.rooms() is None  # two texts
    cache.batch_select_indices(torch.tensor([1]))
    cache.crop(-1)
    assert cache.rooms() is not None and cache.get_seq_length() == ids.shape[1] - 1
    torch.testing.assert_close(base(ids[:, -1:], cache=cache, use_cache=True).logits[0, -1], wanted)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(base(ids, cache=cache, use_cache=True).logits[0, -1], wanted)
