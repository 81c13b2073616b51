"""Adapters swapped in storage that stays: both backends, and a compiled graph that goes on serving."""

from __future__ import annotations

import pytest
import torch
from molora_kernels import HotBank, make_plan, mixed_linear, resolve, routed_linear
from molora_kernels.testing import Case, SlotFactors, assert_close, oracle, random_case


@pytest.fixture(scope="module", params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        return resolve(request.param)
    except ValueError as error:
        pytest.skip(str(error))


def example(seed: int, ranks: list[int], **options: object) -> Case:
    return random_case(seed, tokens=6, inputs=20, outputs=14, ranks=ranks, top=2, base_share=0.2, **options)


def put(hot: HotBank, slot: int, f: SlotFactors | None) -> None:
    if f is None:
        hot.clear(slot)
        return
    bias = None if f.bias is None else f.bias * f.scale
    hot.put(slot, f.A, f.B, f.scale, out_scale=f.out_scale, out_bias=bias)


def test_swapped_adapters_are_the_ones_that_run(backend: str) -> None:
    hot = HotBank([8, 8, 8], 20, 14, dora=True, biases=True)
    tensors = [hot.A, hot.B, hot.extent, hot.scale, hot.owner, hot.row_scale, hot.out_scale, hot.out_bias]
    places = [t.data_ptr() for t in tensors]
    for seed, ranks in enumerate([[8, 1, 3], [2, 0, 8], [0, 5, 1]]):
        case = example(seed, ranks, dora=True)
        for slot, factors in enumerate(case.factors, start=1):
            put(hot, slot, factors)
        plan = make_plan(case.slots, case.weights, 4, [hot.layout()], (6,))
        result = mixed_linear(case.x, case.weight, None, hot.bank(), plan, backend)
        assert_close(result, oracle(case), max_error=1e-4, rms_error=1e-5)
    assert places == [t.data_ptr() for t in tensors]


def test_a_compiled_graph_takes_the_new_adapter(backend: str) -> None:
    hot, graphs = HotBank([4, 4], 20, 14), []
    made, layout = hot.bank(), hot.layout()

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    def call(x: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return mixed_linear(x, weight, None, made, make_plan(slots, gates, 3, [layout], (6,)), backend)

    compiled = torch.compile(call, fullgraph=True, backend=count)
    for seed, ranks in enumerate([[4, 2], [1, 0], [3, 4]]):
        case = example(seed, ranks)
        for slot, factors in enumerate(case.factors, start=1):
            put(hot, slot, factors)
        with torch.no_grad():
            result = compiled(case.x, case.weight, case.slots, case.weights)
        assert_close(result, oracle(case), max_error=1e-4, rms_error=1e-5)
    assert len(graphs) == 1


def test_an_empty_slot_is_the_base(backend: str) -> None:
    case = example(3, [4, 4])
    hot = HotBank([4, 4], 20, 14)
    for slot, factors in enumerate(case.factors, start=1):
        put(hot, slot, factors)
    hot.clear(1)
    hot.clear(2)
    plan = make_plan(case.slots, case.weights, 3, [hot.layout()], (6,))
    none = make_plan(torch.zeros_like(case.slots), case.weights, 3, [hot.layout()], (6,))
    made = hot.bank()
    empty, base = (mixed_linear(case.x, case.weight, None, made, p, backend) for p in (plan, none))
    assert torch.equal(empty, base)


def test_memory_is_what_the_capacities_sum_to() -> None:
    hot = HotBank([4, 0, 16], 100, 50, dtype=torch.bfloat16)
    assert hot.A.shape == (20, 100) and hot.B.shape == (50, 20)


def test_poison_in_the_room_of_a_smaller_adapter_is_not_read() -> None:
    case = example(4, [3, 2])
    hot = HotBank([8, 8], 20, 14)
    for slot, factors in enumerate(case.factors, start=1):
        put(hot, slot, factors)
    hot.A[3:8], hot.B[:, 10:] = float("nan"), float("inf")
    plan = make_plan(case.slots, case.weights, 3, [hot.layout()], (6,))
    y = torch.nn.functional.linear(case.x, case.weight)
    assert_close(routed_linear(case.x, y, hot.bank(), plan), oracle(case), max_error=1e-4, rms_error=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    hot = HotBank([4], 20, 14)
    A, B = torch.zeros(5, 20), torch.zeros(14, 5)
    for slot, a, b, message in [
        (0, A, B, "no slot 0"),
        (2, A, B, "no slot 2"),
        (1, A, B, "rank 5 is above the 4"),
        (1, A[:3], B, "do not fit"),
        (1, A[:3, :7], B[:, :3], "do not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            hot.put(slot, a, b, 1.0)
    with pytest.raises(ValueError, match="without room"):
        hot.put(1, A[:2], B[:, :2], 1.0, out_scale=torch.ones(14))
