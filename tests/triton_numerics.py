"""Runs the Triton kernels in Triton's interpreter against the float64 oracle; prints one JSON line per check.

    TRITON_INTERPRET=1 python tests/triton_numerics.py [sweep]

A process of its own, because the variable must be set before triton is imported and spoils compiling:
`tests/test_triton_numerics.py` starts it. bf16 is upcast for the interpreter's dots and truncated by its
stores, so its limits are wide; the real ones hold on a GPU (docs/benchmarks/gpu_kernels.py).
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import time
import traceback
from collections.abc import Callable

import torch
from molora_kernels import HotBank, make_plan
from molora_kernels.bank import Bank, Plan
from molora_kernels.testing import Case, assert_close, case_plan, make_bank, oracle, random_case
from molora_kernels.triton_ops import available, linear
from molora_kernels.triton_ops.prefill import prefill_extended, widen
from molora_kernels.triton_ops.sort import sort_by_slot, sort_by_slot_torch
from torch import Tensor

LIMITS = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 4e-3), torch.bfloat16: (2e-1, 4e-2)}
CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def made(case: Case) -> tuple[Bank, Plan, int]:
    bank, layout = make_bank(case.factors, case.weight.shape[0], case.base_bias)
    return bank, case_plan(case, layout), linear.highest_rank(bank)


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    largest, rms = LIMITS[dtype]
    assert_close(actual, expected, max_error=largest, rms_error=rms)


def both_ways(case: Case, path: str) -> None:
    """The op with W, and the op that adds to y, against the oracle; `path` is what the rule must choose."""
    bank, plan, rank = made(case)
    found = linear.choose(case.x.shape[0], bank, plan.slots.shape[1], rank, plain=True, wide=False)
    assert found == path, f"{found}, expected {path}"
    want = oracle(case)
    got = linear.mixed_linear(case.x, case.weight, case.base_bias, bank, plan, max_rank=rank)
    assert got.dtype == case.x.dtype
    near(got, want, case.x.dtype)
    if path.startswith("fused"):
        near(linear.mixed_delta(case.x, case.y, bank, plan, max_rank=rank), want, case.x.dtype)


@check
def sort_equals_stable_argsort() -> None:
    gen = torch.Generator().manual_seed(0)
    for tokens, n_slots, choices, block in ((1, 2, 1, 16), (0, 3, 2, 16), (129, 5, 2, 32), (150, 70, 1, 64)):
        slots = torch.randint(0, n_slots, (tokens, choices), generator=gen)
        for given in (slots.int(), slots.t().contiguous().t(), torch.zeros_like(slots)):
            want = sort_by_slot_torch(given, n_slots, block)
            for a, b in zip(sort_by_slot(given, n_slots, block)[:3], want[:3], strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b)


@check
def decode_in_one_launch() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        both_ways(
            random_case(1, tokens=1, inputs=33, outputs=19, ranks=[7, 0, 16], top=1, dtype=dtype), "fused"
        )
        case = random_case(2, tokens=3, inputs=48, outputs=16, ranks=[4, 3, 1], top=4, dtype=dtype)
        both_ways(case, "fused")


@check
def decode_in_two_launches() -> None:
    both_ways(random_case(3, tokens=1, inputs=20, outputs=9, ranks=[256], top=1, base_share=0), "fused-split")
    for dtype in (torch.float32, torch.float16):
        case = random_case(
            4, tokens=3, inputs=64, outputs=9, ranks=[33, 5, 0], top=1, base_share=0, dtype=dtype
        )
        both_ways(case, "fused-split")


@check
def decode_added_to_a_base_that_ran() -> None:
    for dtype in (torch.float32, torch.float16):
        case = random_case(5, tokens=5, inputs=31, outputs=15, ranks=[5, 20], top=2, dtype=dtype)
        both_ways(case, "delta")


@check
def decode_with_scales_and_biases() -> None:
    for dtype in (torch.float32, torch.float16):
        case = random_case(
            6, tokens=3, inputs=24, outputs=15, ranks=[6, 4, 2], top=2, dora=True, biases=True, dtype=dtype
        )
        both_ways(case, "fused")


@check
def prefill_sorted_by_slot() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        case = random_case(7, tokens=67, inputs=40, outputs=33, ranks=[12, 0, 33], top=2, dtype=dtype)
        both_ways(case, "sorted")
    both_ways(random_case(1, tokens=65, inputs=70, outputs=150, ranks=[4, 100], top=1), "sorted")


@check
def prefill_with_scales_and_biases() -> None:
    case = random_case(8, tokens=66, inputs=24, outputs=40, ranks=[6, 256], top=2, dora=True, biases=True)
    both_ways(case, "sorted")


@check
def prefill_extended_product() -> None:
    for biases in (False, True):
        case = random_case(9, tokens=70, inputs=24, outputs=40, ranks=[6, 5, 0], top=3, biases=biases)
        bank, plan, rank = made(case)
        wide, inside = widen(case.weight, bank)
        assert linear.choose(70, inside, 3, rank, plain=True, wide=True) == "extended"
        got = linear.mixed_linear(
            case.x, wide[:, :24], case.base_bias, inside, plan, max_rank=rank, wide=wide
        )
        near(got, oracle(case), torch.float32)
        assert torch.equal(got, prefill_extended(case.x, wide, case.base_bias, inside, plan))
        # the weight inside the wide buffer and B inside it serve decode as well
        few = dataclasses.replace(case, x=case.x[:2], slots=case.slots[:2], weights=case.weights[:2])
        _, short, _ = made(few)
        got = linear.mixed_linear(few.x, wide[:, :24], few.base_bias, inside, short, max_rank=rank)
        near(got, oracle(few), torch.float32)


@check
def base_only_tokens_keep_their_bits() -> None:
    for dtype in (torch.float32, torch.float16):
        case = random_case(10, tokens=3, inputs=40, outputs=24, ranks=[4, 4], top=2, biases=True, dtype=dtype)
        case.slots[0] = 0
        case.weights[0] = float("nan")  # a base choice has no weight
        bank, plan, rank = made(case)
        got = linear.mixed_linear(case.x, case.weight, case.base_bias, bank, plan, max_rank=rank)
        plain = linear.plain_linear(case.x, case.weight, case.base_bias)
        assert torch.equal(got[0], plain[0]) and not torch.equal(got, plain)
        assert torch.equal(linear.mixed_delta(case.x, case.y, bank, plan, max_rank=rank)[0], case.y[0])
    case = random_case(11, tokens=70, inputs=16, outputs=24, ranks=[4, 4], top=2, dora=True, base_share=0.7)
    bank, plan, rank = made(case)
    got = linear.mixed_linear(case.x, case.weight, None, bank, plan, max_rank=rank)
    base = (case.slots == 0).all(1)
    assert base.any() and torch.equal(got[base], case.y[base])
    assert not torch.equal(got[~base], case.y[~base])


def poisoned(t: Tensor) -> Tensor:
    """The same values inside a larger buffer of NaN, rows apart and not aligned."""
    around = t.new_full((t.shape[0] + 2, t.shape[1] + 5), float("nan"))
    inside = around[1:-1, 3:-2]
    inside.copy_(t)
    return inside


@check
def strided_inputs_and_poisoned_padding() -> None:
    for tokens in (3, 66):
        case = random_case(12, tokens=tokens, inputs=21, outputs=18, ranks=[5, 3], top=2, biases=True)
        bank, plan, rank = made(case)
        bank = dataclasses.replace(bank, A=poisoned(bank.A), B=poisoned(bank.B.t()).t())
        x, weight = poisoned(case.x), poisoned(case.weight)
        want = oracle(case)
        plan = dataclasses.replace(
            plan, slots=plan.slots.t().contiguous().t(), weights=poisoned(plan.weights)
        )
        near(linear.mixed_linear(x, weight, case.base_bias, bank, plan, max_rank=rank), want, torch.float32)
        y = poisoned(case.y)
        near(linear.mixed_delta(x, y, bank, plan, max_rank=rank), want, torch.float32)
        # unit strides nowhere: every operand transposed in memory
        turned = [t.t().contiguous().t() for t in (case.x, case.weight, bank.A)]
        other = dataclasses.replace(bank, A=turned[2], B=bank.B.contiguous())
        got = linear.mixed_linear(turned[0], turned[1], case.base_bias, other, plan, max_rank=rank)
        near(got, want, torch.float32)


@check
def nothing_leaks_from_an_adapter_that_was_not_chosen() -> None:
    for tokens in (3, 66):
        case = random_case(13, tokens=tokens, inputs=16, outputs=16, ranks=[4, 4], top=1, base_share=0)
        case.slots[: tokens // 2] = 1
        case.slots[tokens // 2 :] = 2
        case.factors[1].A[0, 0] = float("inf")
        bank, plan, rank = made(case)
        assert not bank.finite
        got = linear.mixed_linear(case.x, case.weight, None, bank, plan, max_rank=rank)
        assert got[: tokens // 2].isfinite().all() and not got[tokens // 2 :].isfinite().any()


@check
def no_tokens_and_a_slot_named_twice() -> None:
    case = random_case(14, tokens=0, inputs=8, outputs=8, ranks=[2], top=1)
    bank, plan, rank = made(case)
    assert linear.mixed_linear(case.x, case.weight, None, bank, plan, max_rank=rank).shape == (0, 8)
    case = random_case(15, tokens=2, inputs=16, outputs=8, ranks=[2, 3], top=2)
    case.slots[:] = 2
    both_ways(case, "fused")


@check
def repeated_runs_have_the_same_bits() -> None:
    for tokens in (2, 70):
        case = random_case(16, tokens=tokens, inputs=24, outputs=24, ranks=[4, 8], top=2, dtype=torch.float16)
        bank, plan, rank = made(case)
        runs = [linear.mixed_linear(case.x, case.weight, None, bank, plan, max_rank=rank) for _ in range(2)]
        assert torch.equal(*runs)


@check
def adapters_swapped_in_place() -> None:
    hot = HotBank([8, 8], 16, 24, dora=True, biases=True)
    for seed, ranks in ((17, [8, 3]), (18, [2, 5])):
        for tokens in (2, 66):
            case = random_case(
                seed, tokens=tokens, inputs=16, outputs=24, ranks=ranks, top=2, dora=True, biases=True
            )
            case = dataclasses.replace(case, base_bias=None)
            for slot, f in enumerate(case.factors, start=1):
                bias = None if f.bias is None else f.bias * f.scale
                hot.put(slot, f.A, f.B, f.scale, out_scale=f.out_scale, out_bias=bias)
                hot.A[int(hot.extent[slot, 0]) + f.A.shape[0] : 8 * slot] = float("nan")  # never read
            plan = make_plan(case.slots, case.weights, 3, [hot.layout()], (tokens,))
            got = linear.mixed_linear(case.x, case.weight, None, hot.bank(), plan, max_rank=8)
            near(got, oracle(case), torch.float32)
    hot.clear(1)
    hot.clear(2)
    got = linear.mixed_linear(case.x[:3], case.weight, None, hot.bank(), few(plan, 3), max_rank=8)
    assert torch.equal(got, linear.plain_linear(case.x[:3], case.weight, None))


def few(plan: Plan, n: int) -> Plan:
    return dataclasses.replace(
        plan, slots=plan.slots[:n], weights=plan.weights[:n], gates=plan.gates[:n], chosen=plan.chosen[:n]
    )


@check
def one_graph_whatever_the_routes() -> None:
    torch._dynamo.reset()
    for tokens in (2, 66):
        case = random_case(19, tokens=tokens, inputs=16, outputs=24, ranks=[4, 4], top=1)
        bank, plan, rank = made(case)
        graphs = []

        def count(graph: torch.fx.GraphModule, _: list, graphs: list = graphs) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        def step(
            x: Tensor, plan: Plan, rank: int = rank, bank: Bank = bank, W: Tensor = case.weight
        ) -> Tensor:
            return linear.mixed_linear(x, W, None, bank, plan, max_rank=rank)

        compiled = torch.compile(step, backend=count, fullgraph=True)
        with torch.no_grad():
            near(compiled(case.x, plan), oracle(case), torch.float32)
            other = dataclasses.replace(case, slots=2 - case.slots.clamp_max(1))
            bank, plan, rank = made(other)
            near(compiled(case.x, plan), oracle(other), torch.float32)
        assert len(graphs) == 1, f"{len(graphs)} graphs"


@check
def fake_kernels_agree() -> None:
    case = random_case(20, tokens=3, inputs=16, outputs=8, ranks=[4], top=1)
    bank, plan, rank = made(case)
    factors = (bank.A, bank.B, bank.extent, bank.scale)
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.molora_triton
    decode = (case.x, case.weight, None, None, *factors, plan.slots, plan.weights, None, None, rank, False)
    torch.library.opcheck(ops.decode.default, decode, test_utils=tests)
    torch.library.opcheck(ops.sort_by_slot.default, (plan.slots, 2, 16), test_utils=tests)
    segments = sort_by_slot(plan.slots, 2, 16)
    prefill = (case.x, case.y, None, *factors, plan.weights, None, None, *segments, rank)
    torch.library.opcheck(ops.prefill.default, prefill, test_utils=tests)


@check
def what_the_kernels_leave_to_torch() -> None:
    """Autocast, wanted gradients and unlike dtypes: the same as torch, for few tokens as for many."""
    weight, bias = torch.randn(6, 8), torch.randn(6)
    for tokens in (1, 5):
        x = torch.randn(tokens, 8)
        with torch.autocast("cpu", torch.bfloat16):
            assert linear.plain_linear(x, weight, bias).dtype == torch.bfloat16
        wanted = bias.clone().requires_grad_()
        linear.plain_linear(x, weight, wanted).sum().backward()
        assert wanted.grad is not None
        try:
            linear.plain_linear(x.bfloat16(), weight, None)
        except RuntimeError:
            continue
        raise AssertionError("a half input met single weights")


@check
def whole_model() -> None:
    """A routed model on this backend against the one in torch: a prompt long enough to be sorted, then one
    token, two adapters of unlike ranks, one of them DoRA with a bias, another route for every token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from molora_cli.core.adapter.factors import Factors
    from molora_cli.core.routed.model import RoutedModel
    from molora_cli.core.routed.route import Route

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    )  # fmt: skip
    base = LlamaForCausalLM(config).eval()
    linears = {n: m for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)}

    def adapter(rank: int, dora: bool, leave: str) -> dict[str, Factors]:
        made = {}
        for path, m in linears.items():
            if leave in path:
                continue
            outputs, inputs = m.weight.shape
            A, B = torch.randn(rank, inputs) * 0.2, torch.randn(outputs, rank) * 0.2
            bias = torch.randn(outputs) * 0.1 if dora else None
            made[path] = Factors(A, B, 0.7, bias, torch.rand(outputs) + 0.5 if dora else None)
        return made

    adapters = {"a": adapter(4, False, "lm_head"), "b": adapter(6, True, "down_proj")}
    gen = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 40, (1, 67), generator=gen)
    route = Route(torch.randint(-1, 2, (1, 67, 2), generator=gen), torch.rand(1, 67, 2, generator=gen))
    called: list[str] = []
    kept = {name: getattr(linear, name) for name in ("decode", "prefill")}
    for name, op in kept.items():
        setattr(linear, name, lambda *args, name=name, op=op: (called.append(name), op(*args))[1])
    logits = {}
    try:
        for backend in ("torch", "triton"):
            model = RoutedModel.from_parts(copy.deepcopy(base), adapters, backend=backend)
            assert model.backend == backend
            with torch.no_grad():
                early = Route(route.indices[:, :66], route.gates[:, :66])
                first = model(ids[:, :66], route=early, use_cache=True)
                found, cache = [first.logits], first.past_key_values
                one = Route(route.indices[:, 66:], route.gates[:, 66:])
                found.append(model(ids[:, 66:], route=one, past_key_values=cache, use_cache=True).logits)
            logits[backend] = torch.cat(found, dim=1)
            assert bool(called) == (backend == "triton")
    finally:
        for name, op in kept.items():
            setattr(linear, name, op)
    assert called.count("prefill") == 8 and called.count("decode") == 8, called
    near(logits["triton"], logits["torch"].double(), torch.float32)
    nobody = Route(torch.full((1, 3, 1), -1), torch.ones(1, 3, 1))
    plain = RoutedModel.from_parts(copy.deepcopy(base), {}, backend="triton")
    with torch.no_grad():
        bare = plain(ids[:, :3], route=nobody).logits
        kept_out = model(ids[:, :3], route=nobody).logits
    assert torch.equal(bare, kept_out)


def sweep() -> None:
    """Random shapes, ranks, routes and dtypes through whatever path the rule takes: minutes."""
    gen = torch.Generator().manual_seed(1)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (1,), generator=gen))]

    for seed in range(40):
        case = random_case(
            seed,
            tokens=pick(1, 2, 4, 5, 33, 65, 100),
            inputs=pick(1, 15, 64, 257),
            outputs=pick(1, 16, 50, 130),
            ranks=[pick(0, 1, 4, 6, 16, 24, 31, 64, 128, 256) for _ in range(pick(1, 2, 5))] + [pick(4, 12)],
            top=pick(1, 2, 3, 4),
            dora=bool(pick(0, 1)),
            biases=bool(pick(0, 1)),
            dtype=(torch.float32, torch.float16)[seed % 2],
        )
        bank, plan, rank = made(case)
        want = oracle(case)
        for got in (
            linear.mixed_linear(case.x, case.weight, case.base_bias, bank, plan, max_rank=rank),
            linear.mixed_delta(case.x, case.y, bank, plan, max_rank=rank),
        ):
            near(got, want, case.x.dtype)


def main() -> int:
    if sys.argv[1:] == ["sweep"]:
        CHECKS.clear()
        check(sweep)
    assert available() is None, available()
    torch.set_num_threads(1)
    for name, function in CHECKS.items():
        began = time.process_time()
        error = None
        try:
            function()
        except Exception:  # reported to the test that asks for this check
            error = traceback.format_exc()
        seconds = round(time.process_time() - began, 2)
        print(json.dumps({"check": name, "seconds": seconds, "error": error}), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
