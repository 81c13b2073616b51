"""The torch dispatch against the float64 oracle, over odd shapes, ranks and routes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from molora_kernels import bank, dispatch, resolve
from molora_kernels.testing import Case, assert_close, case_plan, make_bank, oracle, random_case


def run(case: Case) -> torch.Tensor:
    made, layout = make_bank(case.factors, case.weight.shape[0], case.base_bias)
    return dispatch.routed_linear(case.x, case.y, made, case_plan(case, layout))


@pytest.mark.parametrize("top", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs", "ranks"),
    [
        (1, 16, 16, [4, 4]),
        (7, 33, 17, [1, 3, 0, 5]),
        (5, 64, 48, [256, 1]),
        (13, 1, 1, [1]),
        (0, 8, 8, [2, 2]),
        (31, 24, 40, [0, 2]),
    ],
)
def test_matches_oracle(top: int, tokens: int, inputs: int, outputs: int, ranks: list[int]) -> None:
    case = random_case(top, tokens=tokens, inputs=inputs, outputs=outputs, ranks=ranks, top=top)
    assert_close(run(case), oracle(case), max_error=1e-4, rms_error=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_dora_and_biases_match_oracle(seed: int) -> None:
    case = random_case(
        seed, tokens=9, inputs=20, outputs=12, ranks=[3, 5, 2, 0], top=2, dora=True, biases=True
    )
    assert_close(run(case), oracle(case), max_error=1e-4, rms_error=1e-5)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float16, 4e-3), (torch.float64, 1e-6)]
)
def test_other_dtypes(dtype: torch.dtype, limit: float) -> None:
    case = random_case(3, tokens=21, inputs=64, outputs=48, ranks=[8, 4, 16], top=2, dtype=dtype)
    result = run(case)
    assert result.dtype == dtype
    assert_close(result, oracle(case), max_error=6 * limit, rms_error=limit)


def test_all_base_is_the_base_bit_for_bit() -> None:
    case = random_case(0, tokens=11, inputs=32, outputs=24, ranks=[4, 8], top=2, base_share=1.1)
    assert torch.equal(run(case), case.y)


def test_base_tokens_in_a_mixed_block_are_untouched() -> None:
    case = random_case(
        1, tokens=40, inputs=32, outputs=24, ranks=[4, 8], top=1, dora=True, biases=True, base_share=0.5
    )
    base = (case.slots == 0).all(1)
    assert 0 < int(base.sum()) < 40
    assert torch.equal(run(case)[base], case.y[base])
    assert not torch.equal(run(case)[~base], case.y[~base])


def test_one_slot_named_twice_adds_up() -> None:
    case = random_case(2, tokens=6, inputs=8, outputs=8, ranks=[2, 3], top=2, base_share=0)
    case = dataclasses.replace(case, slots=torch.full_like(case.slots, 2))
    assert_close(run(case), oracle(case), max_error=1e-4, rms_error=1e-5)


def test_any_strides_and_leading_dimensions() -> None:
    case = random_case(4, tokens=12, inputs=16, outputs=10, ranks=[3, 4], top=2)
    made, layout = make_bank(case.factors, 10)
    plan = case_plan(case, layout)
    wide = torch.randn(3, 4, 48)
    x = wide[..., 16:32]
    x.copy_(case.x.reshape(3, 4, 16))
    y = torch.empty(10, 3, 4).permute(1, 2, 0)
    y.copy_(case.y.reshape(3, 4, 10))
    strided = dataclasses.replace(made, A=made.A.t().contiguous().t(), B=made.B.t().contiguous().t())
    result = dispatch.routed_linear(x, y, strided, plan)
    assert result.shape == (3, 4, 10)
    assert_close(result.reshape(12, 10), oracle(case), max_error=1e-4, rms_error=1e-5)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["A", "B", "out_scale", "bias"])
def test_poison_of_an_adapter_reaches_only_the_tokens_that_chose_it(poison: float, where: str) -> None:
    clean = random_case(
        5,
        tokens=30,
        inputs=16,
        outputs=12,
        ranks=[3, 3],
        top=1,
        dora=where == "out_scale",
        biases=where == "bias",
    )
    slot = 1 if where == "out_scale" else 2
    factors = clean.factors[slot - 1]
    assert factors is not None
    bad = {where: torch.full_like(getattr(factors, where), poison)}
    case = dataclasses.replace(clean, factors=list(clean.factors))
    case.factors[slot - 1] = dataclasses.replace(factors, **bad)
    hit = (case.slots == slot).any(1)
    result = run(case)
    assert bool(hit.any()) and not bool(result[hit].isfinite().all())
    assert_close(result[~hit], oracle(clean)[~hit], max_error=1e-4, rms_error=1e-5)


def test_poisoned_tokens_stay_in_their_rows() -> None:
    clean = random_case(6, tokens=9, inputs=16, outputs=12, ranks=[3, 300], top=1)
    case = dataclasses.replace(clean, x=clean.x.clone())
    case.x[4] = float("nan")
    rest = torch.arange(9) != 4
    assert_close(run(case)[rest], oracle(clean)[rest], max_error=1e-4, rms_error=1e-5)


def test_overflow_in_an_unchosen_adapter_does_not_leak() -> None:
    clean = random_case(7, tokens=8, inputs=16, outputs=12, ranks=[3, 3], top=1, base_share=0)
    factors = clean.factors[1]
    assert factors is not None
    case = dataclasses.replace(clean, factors=list(clean.factors), slots=torch.ones_like(clean.slots))
    case.factors[1] = dataclasses.replace(factors, A=torch.full_like(factors.A, 3e38))
    assert bool(run(case).isfinite().all())


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_reach_x_a_b_and_gates(dora: bool) -> None:
    case = random_case(
        8, tokens=5, inputs=6, outputs=4, ranks=[2, 3], top=2, dora=dora, biases=dora, dtype=torch.float64
    )
    made, layout = make_bank(case.factors, 4, case.base_bias)

    def call(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        plan = bank.make_plan(case.slots, weights, 3, [layout], (5,))
        y = torch.nn.functional.linear(x, case.weight, case.base_bias)
        return dispatch.routed_linear(x, y, dataclasses.replace(made, A=A, B=B), plan)

    inputs = [case.x, made.A, made.B, case.weights.double()]
    assert torch.autograd.gradcheck(call, [t.clone().requires_grad_() for t in inputs])


def test_embedding_is_the_linear_of_a_one_hot_row() -> None:
    case = random_case(9, tokens=7, inputs=13, outputs=6, ranks=[2, 3], top=2)
    ids = torch.tensor([0, 12, 5, 5, 1, 7, 3])
    case = dataclasses.replace(case, x=torch.nn.functional.one_hot(ids, 13).float())
    made, layout = make_bank(case.factors, 6)
    result = dispatch.routed_embedding(ids, case.y, made, case_plan(case, layout))
    assert_close(result, oracle(case), max_error=1e-4, rms_error=1e-5)


def test_traces_into_one_graph_that_serves_other_routes() -> None:
    case = random_case(10, tokens=6, inputs=16, outputs=12, ranks=[3, 4], top=2)
    made, layout = make_bank(case.factors, 12)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    def call(x: torch.Tensor, y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return dispatch.routed_linear(x, y, made, bank.make_plan(slots, weights, 3, [layout], (6,)))

    compiled = torch.compile(call, fullgraph=True, backend=count)
    for slots in (case.slots, torch.zeros_like(case.slots), case.slots.flip(0)):
        now = dataclasses.replace(case, slots=slots)
        result = compiled(now.x, now.y, slots, now.weights)
        assert_close(result, oracle(now), max_error=1e-4, rms_error=1e-5)
    assert len(graphs) == 1


def test_comparison_refuses_nan_and_wrong_numbers() -> None:
    right = torch.ones(3, 3)
    for wrong in (right * float("nan"), right + 1e-3, torch.ones(3, 2)):
        with pytest.raises(AssertionError):
            assert_close(wrong, right, max_error=1e-4, rms_error=1e-4)


def test_backends() -> None:
    assert resolve("torch") == resolve("auto", device="cuda") == "torch"
    with pytest.raises(ValueError, match=r"cannot run here: |does not run on cpu"):
        resolve("triton")
    with pytest.raises(ValueError, match="no backend 'gpu'"):
        resolve("gpu")
    with pytest.raises(ValueError, match="does not run on cuda"):
        resolve("cpu", device="cuda")
