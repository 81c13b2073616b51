"""How much routing costs on the CPU: the linears of SmolLM2-135M alone, and the whole model, token by token.

    python docs/benchmarks/cpu_ops.py stack --threads 1 --dtype bfloat16
    python docs/benchmarks/cpu_ops.py prefill --tokens 512 --dtype float32
    python docs/benchmarks/cpu_ops.py model --dtype bfloat16 [--base FOLDER]

All sides run in turn within every round of one process. A line shows the median over the rounds of a side's
time, of its ratio to the first side and of its ratio to the engine without adapters in the same round, with
the spread of the latter (20th and 80th percentile). Weights are random unless --base names a model.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from molora_kernels import Layout, Plan, cpu_ops, make_plan, mixed_linear, plain_linear, routed_linear
from molora_kernels.testing import SlotFactors, make_bank
from torch import Tensor

LAYERS, HIDDEN, KEYS, INNER = 30, 576, 192, 1536
# (in, out) of a layer's linears: q, k, v, o, gate, up, down
SHAPES = [(HIDDEN, HIDDEN), (HIDDEN, KEYS), (HIDDEN, KEYS), (HIDDEN, HIDDEN)]
SHAPES += [(HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)]
ENGINE = "own GEMV, no adapters"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("stack", "prefill", "model"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tokens", type=int, default=512, help="of a prefill")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument(
        "--busy",
        action="store_true",
        help="cores are shared: count this process's own CPU time, one thread only",
    )
    parser.add_argument("--base", help="folder of a model in place of random weights")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    cpu_ops.load(print)
    dtype = getattr(torch, arguments.dtype)
    with torch.inference_mode():
        if arguments.what == "model":
            sides = model_sides(dtype, arguments.base)
        else:
            tokens = 1 if arguments.what == "stack" else arguments.tokens
            sides = stack_sides(dtype, tokens, arguments.layers)
        clock = time.process_time if arguments.busy and arguments.threads == 1 else time.perf_counter
        compare(sides, arguments.rounds, ENGINE, clock)
    how = f"{arguments.threads} thread(s), {clock.__name__}, torch {torch.__version__}"
    print(f"{arguments.what}, {arguments.dtype}, {how}")


def compare(
    sides: dict[str, Callable[[], object]], rounds: int, engine: str, clock: Callable[[], float]
) -> None:
    """Run the sides in turn, `rounds` times, and print the table."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(2):
        for call in sides.values():
            call()
    for _ in range(rounds):
        for name, call in sides.items():
            started = clock()
            call()
            times[name].append(clock() - started)
    first = next(iter(sides))
    print(f"{'':44s}{'ms':>9s}{'/ first':>9s}{'/ engine':>10s}{'p20':>7s}{'p80':>7s}")
    for name, own in times.items():
        to_first = statistics.median(a / b for a, b in zip(own, times[first], strict=True))
        ratios = sorted(a / b for a, b in zip(own, times[engine], strict=True))
        low, high = ratios[len(ratios) // 5], ratios[-1 - len(ratios) // 5]
        middle = statistics.median(ratios)
        took = statistics.median(own) * 1e3
        print(f"{name:44s}{took:9.2f}{to_first:9.3f}{middle:10.3f}{low:7.3f}{high:7.3f}")


def routes(tokens: int, adapters: int, top: int) -> Tensor:
    """(tokens, top) int64, different adapters per token, none of them the base."""
    return torch.stack([torch.randperm(adapters)[:top] + 1 for _ in range(tokens)])


def stack_sides(dtype: torch.dtype, tokens: int, layers: int) -> dict[str, Callable[[], object]]:
    """The linears of all layers, each with weights of its own, on the same `tokens` inputs."""
    shapes = SHAPES * layers
    weights = [(torch.randn(out, inner) / inner**0.5).to(dtype) for inner, out in shapes]
    inputs = {inner: torch.randn(tokens, inner).to(dtype) for inner, _ in SHAPES}
    sides: dict[str, Callable[[], object]] = {
        "torch linear, no adapters": lambda: [F.linear(inputs[w.shape[1]], w) for w in weights],
        ENGINE: lambda: [plain_linear(inputs[w.shape[1]], w, None, "cpu") for w in weights],
    }
    for adapters, rank, tops in ((4, 16, (1, 2)), (16, 16, (2,)), (4, 64, (2,))):
        banks = []
        for inner, out in shapes:
            factors = [
                SlotFactors(
                    (torch.randn(rank, inner) / inner**0.5).to(dtype), torch.randn(out, rank).to(dtype), 0.1
                )
                for _ in range(adapters)
            ]
            bank, layout = make_bank(factors, out)
            banks.append(bank)
        for top in tops:
            plans = changing_plans(tokens, adapters, top, layout)

            def fused(banks: list = banks, plans: Iterator[Plan] = plans) -> object:
                plan = next(plans)
                pairs = zip(weights, banks, strict=True)
                return [mixed_linear(inputs[w.shape[1]], w, None, b, plan, "cpu") for w, b in pairs]

            def masked(banks: list = banks, plans: Iterator[Plan] = plans) -> object:
                plan = next(plans)
                pairs = ((inputs[w.shape[1]], w, b) for w, b in zip(weights, banks, strict=True))
                return [routed_linear(x, F.linear(x, w), b, plan) for x, w, b in pairs]

            case = f"K={adapters} r={rank} top-{top}"
            sides[f"own, {case}"] = fused
            if top == 2:
                sides[f"torch dense-masked, {case}"] = masked
    return sides


def changing_plans(tokens: int, adapters: int, top: int, layout: Layout) -> Iterator[Plan]:
    """Eight plans in a circle: no route is that of the call before."""
    weights = torch.rand(tokens, top)
    plans = [
        make_plan(routes(tokens, adapters, top), weights, adapters + 1, [layout], (tokens,)) for _ in range(8)
    ]
    while True:
        yield from plans


def model_sides(dtype: torch.dtype, folder: str | None, adapters: int = 4) -> dict[str, Callable[[], object]]:
    """A token of a whole model per call: transformers, and the routed model with each backend."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from molora_cli.core.adapter.factors import Factors
    from molora_cli.core.routed.model import RoutedModel
    from molora_cli.core.routed.route import Route

    def base() -> torch.nn.Module:
        if folder:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True, max_position_embeddings=8192,
        )  # fmt: skip
        return LlamaForCausalLM(config).to(dtype).eval()

    def made(backend: str, rank: int) -> RoutedModel:
        model = base()
        linears = [
            (n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n
        ]
        factors = {
            f"a{k}": {
                n: Factors(A=torch.randn(rank, m.in_features) / m.in_features**0.5,
                           B=torch.randn(m.out_features, rank) * 0.01, scale=1.0)
                for n, m in linears
            }
            for k in range(adapters)
        }  # fmt: skip
        routed = RoutedModel(model, factors, backend=backend).eval()
        gc.collect()
        return routed

    def steps(model: torch.nn.Module, route: Callable[[], Route | None] | None) -> Callable[[], object]:
        prompt = torch.randint(3, 1000, (1, 64))
        more = {} if route is None else {"route": Route.constant([0], [1.0], 1, 64)}
        cache = model(prompt, use_cache=True, **more).past_key_values
        token = prompt[:, -1:]

        def step() -> object:
            extra = {} if route is None else {"route": route()}
            return model(token, past_key_values=cache, use_cache=True, **extra).logits

        return step

    def changing(top: int) -> Callable[[], Route]:
        circle = [routes(1, adapters, top) - 1 for _ in range(8)]
        gates, turn = torch.rand(1, 1, top), iter(range(10**9))
        return lambda: Route(circle[next(turn) % 8][None], gates)

    own, wide, twin = made("cpu", 16), made("cpu", 64), made("torch", 16)
    nothing = Route.constant([-1], [0.0], 1, 1)
    return {
        "transformers eager, no adapters": steps(base(), None),
        ENGINE: steps(own, lambda: nothing),
        "cpu backend, K=4 r=16 top-1": steps(own, changing(1)),
        "cpu backend, K=4 r=16 top-2": steps(own, changing(2)),
        "cpu backend, K=4 r=64 top-2": steps(wide, changing(2)),
        "torch backend, K=4 r=16 top-2": steps(twin, changing(2)),
    }


if __name__ == "__main__":
    main()
