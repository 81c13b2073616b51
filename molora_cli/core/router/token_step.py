"""One token of one text through a `context` network by a compiled operator.

An answer asks for one token at a time, and torch then takes a few hundred calls for a few thousand
multiplications. The twin is `context.ContextNet.corrected`: both are float64 and agree to about 1e-13, so
that routes, which are compared on a coarser grid (see `stack`), are the same.
"""

from __future__ import annotations

import torch
from molora_kernels import cpu_ops
from torch import Tensor

from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.features import STATE as AVERAGES
from molora_cli.core.router.kinds import State
from molora_cli.core.router.spans import DECAY, LEAST
from molora_cli.core.router.spans import STATE as SPANS


class TokenStep:
    """net: float64 on the CPU, frozen."""

    def __init__(self, net: ContextNet) -> None:
        layers = [net.inner, net.outer, *([net.ahead.inner, net.ahead.outer] if net.ahead else [])]
        self._net = [part.detach() for layer in layers for part in (layer.weight, layer.bias)]
        self._decays = list(net.decays)
        self._names = [*AVERAGES, *(SPANS if net.ahead else ())]

    @classmethod
    def of(cls, net: ContextNet) -> TokenStep | None:
        """The step of a network, None where the operator cannot run it."""
        weight = net.inner.weight
        return cls(net) if weight.is_cpu and weight.dtype == torch.float64 else None

    @property
    def ready(self) -> bool:
        """Whether the operator is compiled and loaded here: nobody waits for it."""
        return cpu_ops.loaded()

    def __call__(self, table: Tensor, token: int, cut: bool, state: State) -> tuple[Tensor, Tensor, State]:
        """Features (1, 1, F) and log-probabilities (1, 1, E) of a token, and the state after it.

        table (V, p) float32: the projected vectors; cut: whether the token begins a span; state: of one text,
        not changed.
        """
        before = [state[name] for name in self._names]
        features, logp, *after = torch.ops.molora_cpu.context(
            table, token, cut, self._decays, DECAY, LEAST, self._net, before
        )
        return features, logp, dict(zip(self._names, after, strict=True))
