"""The CPU operators against the float64 oracle and the twin: odd shapes, ranks, routes and strides."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from molora_kernels import bank, cpu_ops, dispatch, ops
from molora_kernels.cpu_build import BuildError
from molora_kernels.testing import Case, assert_close, case_plan, make_bank, oracle, random_case

LIMITS = {
    torch.float32: 2e-6,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}  # RMS; the largest may be ten times it
SHAPES = [
    (1, 16, 16, [4, 4]),
    (7, 33, 17, [1, 3, 0, 5]),
    (5, 64, 48, [256, 1]),
    (13, 1, 1, [1]),
    (0, 8, 8, [2, 2]),
    (31, 24, 40, [0, 2]),
    (2, 576, 192, [16, 16, 16, 16]),
    (16, 100, 65, [7, 64]),
    (17, 100, 65, [7, 64]),
    (70, 130, 300, [9, 4, 33]),
]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    try:
        cpu_ops.load()
    except BuildError as error:
        pytest.skip(str(error))


def make_case_bank(case: Case) -> tuple[bank.Bank, bank.Layout]:
    """The case's bank, with scales and biases per slot in float32 as the modules keep them."""
    made, layout = make_bank(case.factors, case.weight.shape[0], case.base_bias)
    exact = {
        name: None if (t := getattr(made, name)) is None else t.float() for name in ("out_scale", "out_bias")
    }
    return dataclasses.replace(made, **exact), layout


def run(case: Case, backend: str = "cpu") -> torch.Tensor:
    made, layout = make_case_bank(case)
    return ops.mixed_linear(case.x, case.weight, case.base_bias, made, case_plan(case, layout), backend)


def run_delta(case: Case) -> torch.Tensor:
    made, layout = make_case_bank(case)
    return ops.mixed_delta(case.x, case.y, made, case_plan(case, layout), "cpu")


def close(actual: torch.Tensor, case: Case, factor: float = 1.0) -> None:
    limit = LIMITS[case.x.dtype] * factor
    assert actual.dtype == case.x.dtype
    assert_close(actual, oracle(case), max_error=10 * limit, rms_error=limit)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("top", [1, 2, 3, 4])
@pytest.mark.parametrize(("tokens", "inputs", "outputs", "ranks"), SHAPES)
def test_linear_and_delta_match_the_oracle(
    top: int, tokens: int, inputs: int, outputs: int, ranks: list[int], dtype: torch.dtype
) -> None:
    case = random_case(top, tokens=tokens, inputs=inputs, outputs=outputs, ranks=ranks, top=top, dtype=dtype)
    close(run(case), case)
    close(run_delta(case), case, 2)  # what it is given is rounded already


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_dora_and_biases_match_the_oracle(tokens: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        case = random_case(
            seed,
            tokens=tokens,
            inputs=20,
            outputs=270,
            ranks=[3, 5, 2, 0],
            top=2,
            dora=True,
            biases=True,
            dtype=dtype,
        )
        close(run(case), case, 2)
        close(run_delta(case), case, 4)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("tokens", "inputs", "outputs"), [(1, 577, 66), (4, 64, 130), (16, 3, 5), (40, 65, 9)]
)
def test_plain_product(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    case = random_case(
        0,
        tokens=tokens,
        inputs=inputs,
        outputs=outputs,
        ranks=[1],
        top=1,
        base_share=2,
        biases=True,
        dtype=dtype,
    )
    assert ops.cpu_ops.takes(case.x, case.weight)
    close(ops.plain_linear(case.x, case.weight, case.base_bias, "cpu"), case)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
def test_base_tokens_keep_the_bits_of_the_base_alone(tokens: int, dtype: torch.dtype) -> None:
    case = random_case(
        3,
        tokens=tokens,
        inputs=90,
        outputs=70,
        ranks=[4, 8],
        top=2,
        dora=True,
        biases=True,
        base_share=0.6,
        dtype=dtype,
    )
    case.slots[0] = 0
    base = (case.slots == 0).all(1)
    alone = torch.cat([ops.plain_linear(row[None], case.weight, case.base_bias, "cpu") for row in case.x])
    result = run(case)
    assert torch.equal(result[base], alone[base])
    case = dataclasses.replace(case, slots=torch.zeros_like(case.slots))
    assert torch.equal(run(case), alone)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_int8_weights_are_their_float_values(tokens: int, dtype: torch.dtype) -> None:
    """The same case with the weight as int8 times a scale per row; the adapters stay as they are."""
    case = random_case(5, tokens=tokens, inputs=70, outputs=33, ranks=[3, 8], top=2, biases=True, dtype=dtype)
    scale = case.weight.float().abs().amax(1) / 127
    weight = (case.weight.float() / scale[:, None]).round().to(torch.int8)
    exact = dataclasses.replace(case, weight=weight.double() * scale[:, None].double())
    made, layout = make_case_bank(case)
    args = cpu_ops.adapters(made, case_plan(case, layout))
    # few tokens meet such weights as 16-bit integers
    factor = 10.0 if dtype == torch.float32 else 1.0
    close(torch.ops.molora_cpu.linear(case.x, weight, case.base_bias, scale, *args), exact, factor)
    none = dataclasses.replace(exact, slots=torch.zeros_like(case.slots))
    close(torch.ops.molora_cpu.gemv(case.x, weight, case.base_bias, scale), none, factor)


def test_base_tokens_of_a_long_block_keep_them_too() -> None:
    case = random_case(
        3, tokens=50, inputs=90, outputs=70, ranks=[4, 8], top=1, base_share=0.5, dtype=torch.bfloat16
    )
    base = (case.slots == 0).all(1)
    assert 0 < int(base.sum()) < 50
    alone = ops.plain_linear(case.x, case.weight, None, "cpu")
    assert torch.equal(run(case)[base], alone[base])


def test_one_slot_named_twice_adds_up() -> None:
    for tokens in (6, 40):
        case = random_case(2, tokens=tokens, inputs=8, outputs=8, ranks=[2, 3], top=2, base_share=0)
        close(
            run(dataclasses.replace(case, slots=torch.full_like(case.slots, 2))),
            dataclasses.replace(case, slots=torch.full_like(case.slots, 2)),
        )


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("blocks", [(3, 4), (5, 9)])
def test_any_strides_and_leading_dimensions(blocks: tuple[int, int], dtype: torch.dtype) -> None:
    n = blocks[0] * blocks[1]
    case = random_case(4, tokens=n, inputs=16, outputs=10, ranks=[3, 4], top=2, biases=True, dtype=dtype)
    made, layout = make_bank(case.factors, 10, case.base_bias)
    made = dataclasses.replace(made, out_bias=made.out_bias.float().t().contiguous().t())
    plan = case_plan(case, layout)
    plan = dataclasses.replace(
        plan, slots=plan.slots.t().contiguous().t(), weights=plan.weights.repeat(1, 2)[:, :2]
    )
    x = torch.randn(*blocks, 48).to(dtype)[..., 16:32]
    x.copy_(case.x.reshape(*blocks, 16))
    turned = case.x.t().contiguous().t().unflatten(0, blocks)
    wide = torch.full((10, 40), float("nan"), dtype=dtype)
    wide[:, 8:24] = case.weight
    every = [
        (x, case.weight, made),
        (turned, wide[:, 8:24], made),
        (x, case.weight.t().contiguous().t(), dataclasses.replace(made, A=made.A.t().contiguous().t())),
        (x, case.weight, dataclasses.replace(made, B=made.B.contiguous())),
    ]
    for x_, weight, bank_ in every:
        result = ops.mixed_linear(x_, weight, case.base_bias, bank_, plan, "cpu")
        assert result.shape == (*blocks, 10)
        close(result.reshape(n, 10), case)
    y = torch.empty(10, *blocks, dtype=dtype).permute(1, 2, 0)
    y.copy_(case.y.reshape(*blocks, 10))
    before = y.clone()
    close(ops.mixed_delta(turned, y, made, plan, "cpu").reshape(n, 10), case, 2)
    assert torch.equal(y, before)


def test_many_tokens_are_masked_where_that_is_faster() -> None:
    """All adapters at once: as close to the oracle as one by one; tokens of the base keep the base's bits."""
    case = random_case(6, tokens=90, inputs=48, outputs=40, ranks=[4, 0, 7], top=2, base_share=0.5)
    made, layout = make_case_bank(case)
    plan = case_plan(case, layout)
    assert ops._masks(case.x, made, plan)
    assert not ops._masks(case.x, dataclasses.replace(made, finite=False), plan)
    assert not ops._masks(case.x.bfloat16(), made, plan)
    one = dataclasses.replace(case, slots=case.slots[:, :1] * 0, weights=case.weights[:, :1])
    assert ops._masks(case.x, made, case_plan(one, layout))
    mixed = run(case)
    close(mixed, case)
    base = (case.slots == 0).all(1)
    assert base.any() and torch.equal(mixed[base], ops.plain_linear(case.x, case.weight, None, "cpu")[base])
    many = random_case(6, tokens=90, inputs=48, outputs=40, ranks=[4] * 7, top=2)
    made, layout = make_case_bank(many)
    assert not ops._masks(many.x, made, case_plan(many, layout))  # seven adapters, two of them chosen


@pytest.mark.parametrize("tokens", [8, 40])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_only_the_slots_that_a_token_takes_are_read(poison: float, tokens: int) -> None:
    clean = random_case(5, tokens=tokens, inputs=17, outputs=12, ranks=[3, 3], top=1, dora=True, biases=True)
    made, layout = make_bank(clean.factors, 12, clean.base_bias)
    plan, hit = case_plan(clean, layout), (clean.slots == 2).any(1)
    # room between and behind the slots, and all of slot 2
    A, B = torch.full((12, 17), poison), torch.full((12, 12), poison)
    A[2:5], B[:, 2:5] = made.A[:3], made.B[:, :3]
    extent = torch.tensor([[0, 0], [2, 3], [7, 3]])
    bad = dataclasses.replace(made, A=A, B=B, extent=extent, out_scale=made.out_scale.clone())
    bad.out_scale[2] = poison
    result = ops.mixed_linear(clean.x, clean.weight, clean.base_bias, bad, plan, "cpu")
    assert not bool(result[hit].isfinite().all())
    assert_close(result[~hit], oracle(clean)[~hit], max_error=1e-5, rms_error=2e-6)


def test_poisoned_tokens_stay_in_their_rows() -> None:
    for tokens in (9, 40):
        clean = random_case(6, tokens=tokens, inputs=16, outputs=12, ranks=[3, 300], top=1)
        case = dataclasses.replace(clean, x=clean.x.clone())
        case.x[4] = float("nan")
        rest = torch.arange(tokens) != 4
        assert_close(run(case)[rest], oracle(clean)[rest], max_error=1e-4, rms_error=1e-5)


def test_a_call_that_cannot_be_right_is_refused() -> None:
    case = random_case(1, tokens=4, inputs=8, outputs=6, ranks=[2, 3], top=1)
    made, layout = make_bank(case.factors, 6)
    for slot in (-1, 3):
        with pytest.raises(IndexError, match=f"slot {slot} of 3"):
            plan = dataclasses.replace(case_plan(case, layout), slots=torch.full_like(case.slots, slot))
            ops.mixed_linear(case.x, case.weight, None, made, plan, "cpu")
    with pytest.raises(RuntimeError, match="do not fit"):
        ops.mixed_linear(case.x, torch.zeros(6, 9), None, made, case_plan(case, layout), "cpu")
    with pytest.raises(RuntimeError, match="reaches beyond"):
        far = dataclasses.replace(made, extent=made.extent + 1)
        ops.mixed_linear(case.x, case.weight, None, far, case_plan(case, layout), "cpu")


@pytest.mark.parametrize("wanted", ["x", "A", "B", "weight", "gates"])
def test_no_gradient_is_dropped(wanted: str) -> None:
    case = random_case(8, tokens=5, inputs=6, outputs=4, ranks=[2, 3], top=2, base_share=0)
    tensors = {"x": case.x, "weight": case.weight, "gates": case.weights.clone()}
    made, layout = make_bank(case.factors, 4)
    tensors |= {"A": made.A, "B": made.B}
    grads = []
    for backend in ("cpu", "torch"):
        leaf = tensors[wanted].clone().requires_grad_()
        t = {**tensors, wanted: leaf}
        plan = bank.make_plan(case.slots, t["gates"], 3, [layout], (5,))
        made_ = dataclasses.replace(made, A=t["A"], B=t["B"])
        y = ops.mixed_linear(t["x"], t["weight"], None, made_, plan, backend)
        grads.append(torch.autograd.grad(y.square().sum(), leaf, retain_graph=True)[0])
        if wanted != "weight":
            given = torch.nn.functional.linear(t["x"], t["weight"]).detach()
            y = ops.mixed_delta(t["x"], given, made_, plan, backend)
            grads[-1] = grads[-1] + torch.autograd.grad(y.square().sum(), leaf)[0]
    assert float(grads[0].abs().sum()) > 0
    assert torch.equal(*grads)


def test_the_bare_operator_refuses_to_lose_a_gradient() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no derivative"):
        torch.ops.molora_cpu.gemv(x, torch.randn(3, 4), None, None)
    with torch.no_grad():
        assert torch.ops.molora_cpu.gemv(x, torch.randn(3, 4), None, None).shape == (2, 3)


def test_other_devices_and_dtypes_take_the_twin() -> None:
    case = random_case(3, tokens=4, inputs=8, outputs=6, ranks=[2, 3], top=2, dtype=torch.float64)
    made, layout = make_bank(case.factors, 6)
    twin = dispatch.routed_linear(case.x, case.y, made, case_plan(case, layout))
    assert torch.equal(run(case), twin)
    meta = torch.empty(2, 8, device="meta")
    assert ops.plain_linear(meta, torch.empty(3, 8, device="meta"), None, "cpu").shape == (2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert ops.plain_linear(torch.randn(2, 8), torch.randn(3, 8), None, "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [2, 30])
def test_operators_are_registered_as_torch_wants_them(tokens: int) -> None:
    case = random_case(10, tokens=tokens, inputs=16, outputs=12, ranks=[3, 4], top=2)
    made, layout = make_bank(case.factors, 12)
    args = cpu_ops.adapters(made, case_plan(case, layout))
    library = torch.ops.molora_cpu
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for op, given in (
        (library.gemv, (case.x, case.weight, None, None)),
        (library.linear, (case.x, case.weight, None, None, *args)),
        (library.delta, (case.y, case.x, None, *args)),
    ):
        torch.library.opcheck(op.default, given, test_utils=tests)


@pytest.mark.parametrize("tokens", [1, 30])
def test_one_graph_serves_all_routes(tokens: int) -> None:
    case = random_case(10, tokens=tokens, inputs=16, outputs=12, ranks=[3, 4, 0], top=2)
    made, layout = make_bank(case.factors, 12)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    def call(x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        plan = bank.make_plan(slots, weights, 4, [layout], (tokens,))
        return (
            ops.mixed_linear(x, case.weight, None, made, plan, "cpu")
            + ops.plain_linear(x, case.weight, None, "cpu")
            - ops.mixed_delta(x, case.y, made, plan, "cpu")
        )

    compiled = torch.compile(call, fullgraph=True, backend=count)
    routes = (case.slots, torch.zeros_like(case.slots), 3 - case.slots)
    with torch.inference_mode():
        for slots in routes:
            result = compiled(case.x, slots, case.weights)
            assert_close(result, case.y.double(), max_error=1e-4, rms_error=1e-5)
    assert len(graphs) == 1
    targets = [node.target for node in graphs[0].graph.nodes]
    assert {torch.ops.molora_cpu.linear, torch.ops.molora_cpu.gemv, torch.ops.molora_cpu.delta} <= {
        getattr(t, "overloadpacket", t) for t in targets
    }


def test_threads_do_not_change_a_bit() -> None:
    before = torch.get_num_threads()
    try:
        for tokens in (1, 3, 80):
            case = random_case(
                1, tokens=tokens, inputs=512, outputs=1030, ranks=[16, 5, 64], top=2, dtype=torch.bfloat16
            )
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(run(case) if tokens < 17 else run_delta(case))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("special", [False, True])
def test_room_for_more_adapters_than_are_taken_changes_no_bit(tokens: int, special: bool) -> None:
    case = random_case(
        9, tokens=tokens, inputs=40, outputs=300, ranks=[3, 8, 16], top=2, dora=special, biases=special
    )
    for slots in (case.slots, torch.zeros_like(case.slots), case.slots.index_fill(1, torch.tensor(0), 0)):
        narrow = dataclasses.replace(case, slots=slots)
        more = torch.zeros(tokens, 6, dtype=torch.int64)
        wide = dataclasses.replace(
            narrow, slots=torch.cat([slots, more], 1), weights=torch.cat([case.weights, 1.0 + more], 1)
        )
        assert torch.equal(run(wide), run(narrow))
        close(run(wide), narrow)
