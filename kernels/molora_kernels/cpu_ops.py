"""The CPU backend's operators with their shapes; the code is in cpu/, compiled by `cpu_build`.

    gemv    (x, weight, bias, row_scale) -> y               y = W x + bias
    linear  (x, weight, bias, row_scale, *adapters) -> y    the mixture of a module with a dense weight
    delta   (y, x, base_bias, *adapters) -> y'              the mixture where W x + bias = y is given
    attend  (q, k, v, keys, values, position, scale) -> y   one token's attention; k and v are written there
    context (table, token, cut, decays, span_decay, least, net, state) -> [features, logp, *state]
                                                            one token through a context router's network
    head    (hidden, prior, net) -> logp                    one token through a head of a `taps` router
    choose  (logp, k, temperature, places, muted, slots, gates, first, end) -> done
                                                            the experts of one token, into a step's tables

x (..., in), y (..., out) float32, bfloat16 or float16; weight (out, in) of the same dtype, or int8 with
row_scale (out,) float32; bias (out,) of x's dtype or None. adapters: A (R, in), B (out, R) of x's dtype,
best stored by columns; extent (S, 2) int64; scale (S,) float32; slots (N, J) int64 in [0, S), 0 = none;
gates (N, J) float32; out_scale, out_bias (S, out) float32 or None. N is the product of x's leading sizes.
Any strides. Sums are fp32.

attend: q (1, H, 1, D); k (1, G, 1, D) and v (1, G, 1, E) go to `position`, (1,) int64, of keys (1, G, P, D)
and values (1, G, P, E); y (1, 1, H, E) = softmax(scale q K^T) V over positions 0 .. position. Query heads
h * H / G .. + H / G read key head h.

context: float64, one token. table (V, p) float32: projected vectors by token; cut: whether it begins a span;
net: weight and bias of the layers, four tensors, or eight where the network looks ahead; state: two
tensors, or ten, in the order of `ContextState` (cpu/context.h) and not changed. Features are (1, 1, F), logp
(1, 1, E).

head: hidden of d numbers in any of the dtypes above; prior of E float64 or None; net: weight and bias of two
layers, float64; logp (1, 1, E) float64.

choose: logp of E float64; places (E) int64, the adapter of each expert, -1 = the base; muted (E) bool. Writes
rows [first, end) of slots and gates (L, 1, TOP), int64 and float32: k choices and zeros behind them. False,
and nothing is written, where a score is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from molora_kernels import cpu_build
from molora_kernels.bank import Bank, Plan

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_registered: set[str] = set()


def load(
    notify: Callable[[str], None] | None = None,
    flags: tuple[str, ...] | None = None,
    library: str = cpu_build.LIBRARY,
) -> Any:
    """The operators' namespace, `torch.ops.molora_cpu`, built and registered on the first call.

    flags, library: another build beside it, for tests. Raises BuildError.
    """
    if library not in _registered:
        cpu_build.load(notify, flags, library)
        for name, fake in _FAKES.items():
            torch.library.register_fake(f"{library}::{name}", fake)
        _registered.add(library)
    return getattr(torch.ops, library)


def loaded() -> bool:
    """Whether the operators are there, `torch.ops.molora_cpu`."""
    return cpu_build.LIBRARY in _registered


def _fake_linear(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_delta(y: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(y, memory_format=torch.contiguous_format)


def _fake_attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((1, 1, q.shape[1], values.shape[3]))


_FAKES: dict[str, Callable[..., Tensor]] = {
    "gemv": _fake_linear,
    "linear": _fake_linear,
    "delta": _fake_delta,
    "attend": _fake_attend,
}


def takes(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the operators can run on these: one half or single dtype, on the CPU, no gradient wanted."""
    dtype = x.dtype
    if dtype not in DTYPES or not x.is_cpu or torch.is_autocast_enabled("cpu"):
        return False
    for t in others:
        if t is not None and (t.dtype != dtype or not t.is_cpu):
            return False
    if not torch.is_grad_enabled():
        return True
    return not (x.requires_grad or any(t is not None and t.requires_grad for t in others))


def adapters(bank: Bank, plan: Plan) -> tuple[Tensor | None, ...]:
    """The arguments that the operators take of a module's adapters and of the routes."""
    gates = plan.weights if plan.weights.dtype == torch.float32 else plan.weights.float()
    return (bank.A, bank.B, bank.extent, bank.scale, plan.slots, gates, bank.out_scale, bank.out_bias)
