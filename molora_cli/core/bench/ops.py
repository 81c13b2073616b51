"""`bench kernels`: the linears of all layers, each with its own weights and adapters, by one operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from molora_kernels import Layout, Plan, make_plan, mixed_linear, plain_linear, routed_linear
from molora_kernels.testing import SlotFactors, make_bank
from torch import Tensor

from molora_cli.core.adapter.factors import Factors
from molora_cli.core.bench.material import Material
from molora_cli.core.bench.runners import BASE, ENGINE
from molora_cli.core.bench.timing import Side
from molora_cli.errors import InputError

TWIN, GATHER, GROUPED = "twin", "gather-bmm", "grouped-mm"
_CIRCLE = 8  # routes that follow one another: none is that of the call before


@dataclass(frozen=True)
class _Routes:
    """Routes of one call, prepared outside the timed part: a forward prepares them once for all modules.

    slots, gates (N, J); order (N*J,) sorts the choices by slot, ends (K,) int32 are the ends of the groups.
    """

    plan: Plan
    slots: Tensor
    gates: Tensor
    order: Tensor
    ends: Tensor


def op_names(tops: Sequence[int]) -> list[str]:
    """Names of the sides for these top-k."""
    return [BASE, ENGINE, *(f"top{k}" for k in tops), TWIN, GATHER, GROUPED]


def op_sides(
    material: Material, wanted: set[str], tokens: int, tops: Sequence[int], backend: str, seed: int = 0
) -> list[Side]:
    """Sides over `tokens` random inputs; alternatives to our operators take the largest of `tops`.

    Raises InputError where the adapters are no plain LoRA on plain linears.
    """
    modules = [(m.weight.detach(), _factors(material, path)) for path, m in material.linears.items()]
    count, dtype = len(material.adapters), material.base.dtype
    generator = torch.Generator().manual_seed(seed)
    widths = {w.shape[1] for w, _ in modules}
    inputs = {n: torch.randn(tokens, n, generator=generator).to(dtype) for n in widths}
    read = float(sum(w.nbytes for w, _ in modules))
    lora = sum(f.A.nbytes + f.B.nbytes for _, own in modules for f in own) / count
    flops = 2.0 * tokens * sum(w.numel() for w, _ in modules)
    more = 2.0 * tokens * lora / dtype.itemsize
    made = [make_bank([SlotFactors(f.A, f.B, f.scale) for f in own], w.shape[0]) for w, own in modules]
    stacked = [_stacked(own) for _, own in modules]
    weights = [w for w, _ in modules]

    def side(name: str, title: str, call: Callable[[], object], top: int) -> Side:
        # many tokens choose all adapters among them
        factors = min(count, top * tokens) * lora if top else 0.0
        return Side(name, title, call, moved=read + factors, flops=flops + top * more)

    def every(run: Callable[[Tensor, int], object]) -> Callable[[], object]:
        return lambda: [run(inputs[w.shape[1]], i) for i, w in enumerate(weights)]

    circles = {top: _circle(tokens, count, top, made[0][1], generator) for top in tops}

    def routed(run: Callable[[Tensor, int, _Routes], object], top: int) -> Callable[[], object]:
        circle = itertools.cycle(circles[top])

        def call() -> object:
            routes = next(circle)
            return [run(inputs[w.shape[1]], i, routes) for i, w in enumerate(weights)]

        return call

    most = max(tops)
    sides = [
        side(BASE, "torch linear, no adapters", every(lambda x, i: F.linear(x, weights[i])), 0),
        side(
            ENGINE,
            "own linear, no adapters",
            every(lambda x, i: plain_linear(x, weights[i], None, backend)),
            0,
        ),
    ]
    for top in tops:
        run = lambda x, i, r: mixed_linear(x, weights[i], None, made[i][0], r.plan, backend)  # noqa: E731
        sides.append(side(f"top{top}", f"own fused, top-{top}", routed(run, top), top))
    sides += [
        side(
            TWIN,
            f"torch twin (all adapters, masked), top-{most}",
            routed(lambda x, i, r: routed_linear(x, F.linear(x, weights[i]), made[i][0], r.plan), most),
            most,
        ),
        side(
            GATHER,
            f"gather + bmm, top-{most}",
            routed(lambda x, i, r: F.linear(x, weights[i]) + _gathered(x, *stacked[i], r), most),
            most,
        ),
        side(
            GROUPED,
            f"sort + grouped_mm, top-{most}",
            routed(lambda x, i, r: F.linear(x, weights[i]) + _grouped(x, *stacked[i], r), most),
            most,
        ),
    ]
    return [s for s in sides if s.name in wanted]


def _factors(material: Material, path: str) -> list[Factors]:
    own = [factors.get(path) for factors in material.factors.values()]
    plain = [
        f for f in own if f is not None and f.magnitude is None and f.bias is None and f.kind == "linear"
    ]
    if len(plain) != len(own):
        raise InputError(
            f"not every adapter is a plain LoRA on {path}",
            "bench kernels with random adapters: leave --bundle out",
        )
    return plain


def _stacked(own: Sequence[Factors]) -> tuple[Tensor, Tensor]:
    """A (K, r, in) and B (K, out, r) with the scale in it, padded with zeros to the largest rank and to rows
    of 16 bytes, which grouped_mm wants."""
    step = max(1, 16 // own[0].A.itemsize)
    rank = -(-max(f.rank for f in own) // step) * step
    A = torch.stack([F.pad(f.A, (0, 0, 0, rank - f.rank)) for f in own])
    B = torch.stack([F.pad(f.B * f.scale, (0, rank - f.rank)) for f in own])
    return A, B


def _circle(tokens: int, count: int, top: int, layout: Layout, generator: torch.Generator) -> list[_Routes]:
    """Different adapters per token and per call, no token without one."""
    found = []
    for turn in range(_CIRCLE):
        first = (
            torch.randint(0, count, (tokens, 1), generator=generator)
            if tokens > 1
            else torch.tensor([[turn]])
        )
        slots = (first + torch.arange(top)) % count + 1  # (N, J)
        gates = torch.rand(tokens, top, generator=generator) + 0.1
        plan = make_plan(slots, gates, count + 1, [layout], (tokens,))
        flat = slots.flatten()
        ends = torch.bincount(flat - 1, minlength=count).cumsum(0).to(torch.int32)
        found.append(_Routes(plan, slots, gates, flat.argsort(stable=True), ends))
    return found


def _gathered(x: Tensor, A: Tensor, B: Tensor, routes: _Routes) -> Tensor:
    """(N, out): each token's own copies of its factors, multiplied in batches."""
    tokens, top = routes.slots.shape
    chosen = routes.slots.flatten() - 1
    wide = x.repeat_interleave(top, 0).unsqueeze(2)  # (N*J, in, 1)
    hidden = torch.bmm(A[chosen], wide) * routes.gates.to(x.dtype).flatten().view(-1, 1, 1)
    return torch.bmm(B[chosen], hidden).view(tokens, top, -1).sum(1)


def _grouped(x: Tensor, A: Tensor, B: Tensor, routes: _Routes) -> Tensor:
    """(N, out): choices sorted by adapter, one grouped product for A and one for B."""
    tokens, top = routes.slots.shape
    rows = x[routes.order // top]  # (N*J, in)
    hidden = F.grouped_mm(rows, A.transpose(1, 2), offs=routes.ends)
    hidden = hidden * routes.gates.to(x.dtype).flatten()[routes.order].unsqueeze(1)
    parts = F.grouped_mm(hidden, B.transpose(1, 2), offs=routes.ends)
    return torch.zeros(tokens, B.shape[1], dtype=x.dtype).index_add_(0, routes.order // top, parts)
