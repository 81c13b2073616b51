"""Checks and times the Triton kernels on one GPU, in under five minutes; random weights, no network.

    python docs/benchmarks/gpu_kernels.py [--tune] [--model smollm2|qwen3] [--rounds 15] [--json FILE]
    python docs/benchmarks/gpu_kernels.py --dry          # without a GPU: interpreter, tiny shapes, no capture

Needs torch, triton, transformers and this checkout (PYTHONPATH=kernels if it is not installed). In order:
numbers against a float64 oracle (fp32, fp16, bf16); capture in a CUDA graph, a swap of adapters, replay; then
whole models in the shapes of SmolLM2-135M and Qwen3-1.7B with K=4 adapters r=16 on all linears: decode of 1
and 32 sequences and prefill of 4096 tokens, each as a CUDA graph, against the same engine without adapters.
Sides run in turn in each round; a line shows the median of the ratio with the 20th and 80th percentile. Exit
code 1 where a check fails; the aims (1.10 decode, 1.08 prefill) are printed, not enforced.
"""

# ruff: noqa: E402 - the interpreter has to be asked for before triton is imported

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from gpu_models import qwen3, smollm2
from molora_kernels import HotBank, Plan, make_plan
from molora_kernels.testing import Case, SlotFactors, assert_close, case_plan, make_bank, oracle, random_case
from molora_kernels.triton_ops import available, linear, tiles
from molora_kernels.triton_ops.prefill import widen
from molora_kernels.triton_ops.sort import Sorted, sort_by_slot, sort_by_slot_torch
from torch import Tensor, nn

DEVICE = torch.device("cpu" if DRY else "cuda")
LIMITS = {torch.float32: (1e-4, 1e-5), torch.float16: (2e-2, 4e-3), torch.bfloat16: (8e-2, 1e-2)}
if DRY:
    LIMITS[torch.bfloat16] = (2e-1, 4e-2)  # the interpreter's stores truncate
EXPERTS, RANK = 4, 4 if DRY else 16
CONTEXT, STEPS = (4, 1) if DRY else (64, 20)  # steps per block between two readings of the clock
LINE = "{model:8} {case:14} {side:20} {ms:10.3f} ms  {ratio:.3f} [{low:.3f}, {high:.3f}]"
AIMS = {"decode": 1.10, "prefill": 1.08}


def main() -> int:
    options = arguments()
    reason = available()
    if reason:
        print(f"the Triton kernels cannot run here: {reason}")
        return 1
    torch.manual_seed(0)
    name = "interpreter" if DRY else torch.cuda.get_device_name()
    rows: list[dict[str, Any]] = []
    failed = [check.__name__ for check in (sorting, numbers, swap_and_replay) if not passes(check)]
    models = {"smollm2": lambda: smollm2(DRY), "qwen3": lambda: qwen3(DRY)}
    for label in [options.model] if options.model else list(models):
        with torch.inference_mode():
            engine = Engine(models[label]())
            if options.tune and not DRY:
                engine.tune()
            failed += [f"{label}: {text}" for text in engine.check_replay()]
            for row in engine.timings(options.rounds):
                rows.append({"model": label, "gpu": name, "torch": torch.__version__, **row})
                # the interpreter's times say nothing
                print(
                    f"{label} {row['case']} {row['side']}: ran" if DRY else LINE.format(**rows[-1]),
                    flush=True,
                )
            del engine
    print(f"{name}, torch {torch.__version__}; aims: {AIMS['decode']} decode, {AIMS['prefill']} prefill")
    print("failed: " + "; ".join(failed) if failed else "all checks passed")
    if options.json:
        options.json.write_text(json.dumps({"failed": failed, "rows": rows}, indent=1))
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--tune", action="store_true", help="measure the decode tiles first, and keep them")
    parser.add_argument("--model", choices=("smollm2", "qwen3"))
    parser.add_argument("--rounds", type=int, default=1 if DRY else 15)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def passes(check: Callable[[], None]) -> bool:
    began = time.perf_counter()
    try:
        check()
    except Exception as error:  # the other checks are worth having too
        print(f"{check.__name__}: FAILED {type(error).__name__}: {str(error)[:600]}")
        return False
    print(f"{check.__name__}: ok ({time.perf_counter() - began:.1f} s)")
    return True


def sorting() -> None:
    for tokens, n_slots, choices in (
        ((1, 2, 1), (70, 5, 2)) if DRY else ((1, 2, 1), (5000, 5, 2), (4097, 200, 4))
    ):
        slots = torch.randint(0, n_slots, (tokens, choices), device=DEVICE)
        want = sort_by_slot_torch(slots, n_slots, 32)
        for a, b in zip(sort_by_slot(slots, n_slots, 32)[:3], want[:3], strict=True):
            assert torch.equal(a, b)


def numbers() -> None:
    sizes = ((1, 40, 24, [4, 7]), (66, 24, 40, [12, 0, 33])) if DRY else (
        (1, 576, 1536, [4, 7]), (3, 2048, 1000, [64, 256, 0]), (33, 577, 190, [16, 100]),
        (64, 2048, 6144, [16] * 4), (513, 1536, 576, [12, 0, 33]), (1000, 576, 576, [4, 64, 128, 256]),
    )  # fmt: skip
    for dtype in LIMITS:
        for seed, (tokens, inputs, outputs, ranks) in enumerate(sizes):
            for dora in (False, True):
                case = random_case(
                    seed, tokens=tokens, inputs=inputs, outputs=outputs, ranks=ranks, top=1 + seed % 4,
                    dora=dora, biases=dora, dtype=dtype,
                )  # fmt: skip
                mine = moved(case)
                bank, layout = make_bank(mine.factors, outputs, mine.base_bias)
                plan, rank = case_plan(mine, layout), linear.highest_rank(bank)
                got = linear.mixed_linear(mine.x, mine.weight, mine.base_bias, bank, plan, max_rank=rank)
                check_close(got, oracle_rows(case, 24), dtype)
                base = (mine.slots == 0).all(1)
                if tokens <= linear.FUSED_TOKENS:
                    plain = linear.plain_linear(mine.x, mine.weight, mine.base_bias)
                else:
                    plain = F.linear(mine.x, mine.weight, mine.base_bias)
                assert torch.equal(got[base], plain[base]), "base-only tokens lost their bits"


def moved(case: Case) -> Case:
    def to(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(DEVICE)
        if isinstance(value, list):
            return [to(item) for item in value]
        if dataclasses.is_dataclass(value):
            return type(value)(**{f.name: to(getattr(value, f.name)) for f in dataclasses.fields(value)})
        return value

    return to(case)


def oracle_rows(case: Case, count: int) -> dict[str, Tensor]:
    """The oracle's rows of some tokens, the first and the last among them: it goes token by token."""
    index = torch.linspace(0, case.x.shape[0] - 1, min(count, case.x.shape[0])).long()
    part = dataclasses.replace(case, x=case.x[index], slots=case.slots[index], weights=case.weights[index])
    return {"index": index, "rows": oracle(part)}


def check_close(got: Tensor, want: dict[str, Tensor], dtype: torch.dtype) -> None:
    largest, rms = LIMITS[dtype]
    assert_close(got.cpu()[want["index"]], want["rows"], max_error=largest, rms_error=rms)


def swap_and_replay() -> None:
    """A captured graph stays right when routes, adapters and ranks change in their fixed places."""
    for tokens in (2, 66) if DRY else (1, 32, 700):
        replayed(tokens, *((24, 32) if DRY else (576, 1536)))


def replayed(tokens: int, inputs: int, outputs: int) -> None:
    half = torch.float16
    hot = HotBank([16, 16], inputs, outputs, dtype=half, device=DEVICE)
    x = torch.zeros(tokens, inputs, dtype=half, device=DEVICE)
    weight = torch.zeros(outputs, inputs, dtype=half, device=DEVICE)
    slots = torch.zeros(tokens, 2, dtype=torch.int64, device=DEVICE)
    weights = torch.zeros(tokens, 2, device=DEVICE)

    def step() -> Tensor:
        plan = make_plan(slots, weights, 3, [hot.layout()], (tokens,))
        return linear.mixed_linear(x, weight, None, hot.bank(), plan, max_rank=16)

    replay = Captured(step)
    for seed, ranks in ((1, [16, 3]), (2, [5, 12]), (3, [1, 16])):
        case = random_case(
            seed, tokens=tokens, inputs=inputs, outputs=outputs, ranks=ranks, top=2, dtype=half
        )
        for slot, f in enumerate(case.factors, start=1):
            hot.put(slot, f.A, f.B, f.scale)
        new = (case.x, case.weight, case.slots, case.weights)
        for there, value in zip((x, weight, slots, weights), new, strict=True):
            there.copy_(value)
        check_close(replay(), oracle_rows(case, 24), half)


class Captured:
    """A function as a CUDA graph, warmed up first; without a GPU the function itself."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self.function = function
        self.graph = None
        with torch.no_grad():
            if DRY:
                return
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.out = function()

    def __call__(self) -> Tensor:
        if self.graph is None:
            with torch.no_grad():
                return self.function()
        self.graph.replay()
        return self.out


class Routes:
    """What all modules of the model read: the side that runs, and the routes in their fixed buffers."""

    side = "base"
    plan: Plan
    segments: Sorted | None = None


class Mixed(nn.Module):
    """A linear layer with four adapters whose path `Routes` decides."""

    def __init__(self, layer: nn.Linear, routes: Routes, experts: int) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape
        self.routes, self.bank, self.wide = routes, None, None
        self.weight = layer.weight.detach()
        if experts:
            self.bank, self.layout = make_bank(
                [random_adapter(layer.weight) for _ in range(experts)], outputs
            )
            self.wide, self.inside = widen(layer.weight, self.bank)
            self.weight = self.wide[:, :inputs]

    def forward(self, x: Tensor) -> Tensor:
        side = self.routes.side
        if side == "cublas":
            return F.linear(x, self.weight, None)
        if side == "base" or self.bank is None:
            return linear.plain_linear(x, self.weight, None)
        wide, bank = (self.wide, self.inside) if side == "extended" else (None, self.bank)
        return linear.mixed_linear(
            x, self.weight, None, bank, self.routes.plan, max_rank=RANK,
            segments=self.routes.segments, wide=wide,
        )  # fmt: skip


def random_adapter(weight: Tensor) -> SlotFactors:
    outputs, inputs = weight.shape
    A, B = weight.new_empty(RANK, inputs).normal_(), weight.new_empty(outputs, RANK).normal_()
    return SlotFactors(A / inputs**0.5, B / (4 * RANK**0.5), 1.0)


class Engine:
    """A causal model of transformers with every linear replaced; runs one side at a time."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModelForCausalLM

        dtype = torch.float16 if DRY else torch.bfloat16
        with torch.device(DEVICE):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="sdpa"
            ).eval()
        self.routes = Routes()
        self.shapes: set[tuple[int, int]] = set()
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    head = name == "lm_head"  # no adapters there, but the same product
                    setattr(parent, name, Mixed(child, self.routes, 0 if head else EXPERTS))
                    self.shapes.add(tuple(child.weight.shape))
        self.layout = next(m.layout for m in self.model.modules() if isinstance(m, Mixed) and m.bank)

    def tune(self) -> None:
        """Measure the decode tiles for the model's shapes."""
        dtype = torch.bfloat16
        for outputs, inputs in sorted(self.shapes):
            x = torch.randn(1, inputs, device=DEVICE, dtype=dtype)
            weight = torch.randn(outputs, inputs, device=DEVICE, dtype=dtype)
            tiles.tune_decode(outputs, inputs, dtype, lambda x=x, W=weight: linear.plain_linear(x, W, None))

    def decode_step(
        self, side: str, batch: int, choices: int
    ) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        """One token of each sequence over a static cache, captured; and what puts the cache back."""
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=CONTEXT + 4 * STEPS)
        ids = torch.randint(0, 60, (batch, 1), device=DEVICE)
        position = torch.full((batch, 1), CONTEXT, device=DEVICE)
        # every place is open, so that no mask is built: its cost is the same for all sides
        mask = torch.zeros(batch, 1, 1, CONTEXT + 4 * STEPS, dtype=self.model.dtype, device=DEVICE)
        plan = self.plan(batch, choices)

        def step() -> Tensor:
            self.routes.side, self.routes.plan, self.routes.segments = side, plan, None
            out = self.model(ids, position_ids=position, past_key_values=cache, attention_mask=mask)
            return out.logits[:, -1]

        def rewind() -> None:
            for layer in cache.layers:
                if layer.is_initialized:
                    layer.cumulative_length.fill_(CONTEXT)
                    layer.keys.zero_()
                    layer.values.zero_()

        step()
        rewind()
        self.slots, self.weights = plan.slots, plan.weights
        return Captured(step), rewind

    def prefill_step(self, side: str, tokens: int, choices: int) -> Callable[[], Tensor]:
        """A prompt of runs of 37 tokens per adapter; plan and sort are inside."""
        ids = torch.randint(0, 60, (1, tokens), device=DEVICE)
        slots = self.plan(tokens, choices).slots
        weights = torch.full((tokens, choices), 1.0 / choices, device=DEVICE)

        def step() -> Tensor:
            self.routes.side = side
            if side not in ("base", "cublas"):
                self.routes.plan = make_plan(slots, weights, EXPERTS + 1, [self.layout], (tokens,))
                self.routes.segments = linear.sort_plan(self.routes.plan) if side == "sorted" else None
            return self.model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]

        return Captured(step)

    def plan(self, tokens: int, choices: int) -> Plan:
        """Runs of tokens, each with its own adapters."""
        run = torch.arange(tokens, device=DEVICE)[:, None] // (1 if tokens <= 64 else 37)
        slots = 1 + (run + torch.arange(choices, device=DEVICE)) % EXPERTS
        weights = torch.full((tokens, choices), 1.0 / choices, device=DEVICE)
        return make_plan(slots, weights, EXPERTS + 1, [self.layout], (tokens,))

    def check_replay(self) -> list[str]:
        """Routes to the base have the bits of the engine without adapters; others change the logits."""
        wrong = []
        for batch in (1, 5) if DRY else (1, 32):
            torch.manual_seed(1)
            base, rewind = self.decode_step("base", batch, 1)
            rewind()
            want = base().clone()
            torch.manual_seed(1)
            routed, rewind = self.decode_step("routed", batch, 2)
            rewind()
            before = routed().clone()
            self.slots.zero_()
            rewind()
            if not torch.equal(routed(), want):
                wrong.append(f"batch {batch}: routes to the base differ from the engine without adapters")
            if torch.equal(before, want):
                wrong.append(f"batch {batch}: adapters had no effect")
        return wrong

    def timings(self, rounds: int) -> Iterator[dict[str, Any]]:
        for batch in (1, 5) if DRY else (1, 32):
            sides = {"base (this engine)": self.decode_step("base", batch, 1)}
            sides["base (cuBLAS)"] = self.decode_step("cublas", batch, 1)
            sides["routed top-1"] = self.decode_step("routed", batch, 1)
            sides["routed top-2"] = self.decode_step("routed", batch, 2)
            yield from compare(f"decode b{batch}", sides, rounds, STEPS)
        tokens = 70 if DRY else 4096
        plain: dict[str, Any] = {"base (this engine)": self.prefill_step("base", tokens, 1)}
        for choices in (1, 2):
            for side in ("extended", "sorted"):
                plain[f"{side} top-{choices}"] = self.prefill_step(side, tokens, choices)
        sides = {name: (step, lambda: None) for name, step in plain.items()}
        yield from compare(f"prefill {tokens}", sides, rounds, 1)


def compare(
    case: str, sides: dict[str, tuple[Callable[[], Tensor], Callable[[], None]]], rounds: int, steps: int
) -> Iterator[dict[str, Any]]:
    """All sides in turn per round; the first is what the ratios refer to."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + (0 if DRY else 2)):
        for name, (step, rewind) in sides.items():
            rewind()
            seconds = clock(step, steps)
            if DRY or turn >= 2:  # the first two warm up
                times[name].append(seconds * 1e3 / steps)
    first = next(iter(sides))
    for name, mine in times.items():
        ratios = sorted(a / b for a, b in zip(mine, times[first], strict=True))
        yield {
            "case": case, "side": name, "ms": statistics.median(mine), "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 5], "high": ratios[-1 - len(ratios) // 5],
        }  # fmt: skip


def clock(step: Callable[[], Tensor], steps: int) -> float:
    """Seconds of some steps."""
    if DRY:
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    sys.exit(main())
