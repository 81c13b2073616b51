"""A base whose linears hold int8 weights: a byte a weight to read for every token.

Only weights are rounded to a byte. Embedding, norms, adapters and everything that flows between modules stay
as they are loaded (a kernel may take inputs as 16-bit integers), so outliers among the activations, which
spoil 8-bit products, do no harm. A linear whose rows have such outliers themselves that rounding would cost
too much keeps its weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from molora_kernels import quantise_rows
from torch import nn
from transformers import PreTrainedModel

from molora_cli.core.routed.attach import put
from molora_cli.core.routed.int8 import Int8Linear
from molora_cli.errors import InputError
from molora_cli.text import shorten

FULL, INT8 = "full", "int8"
WEIGHTS = (FULL, INT8)
# the largest expected rounding error of a linear, as a share of its weight: normal rows of 500 to 10,000
# inputs lose 0.008 to 0.009
LIMIT = 0.03


def check_weights(name: str) -> None:
    """Raises InputError for a name that is not in WEIGHTS."""
    if name not in WEIGHTS:
        raise InputError(f"--weights {shorten(name)}: there is no such kind", f"one of: {', '.join(WEIGHTS)}")


@dataclass(frozen=True)
class Report:
    """What became of a base. taken: linears that are int8 now; kept: those that rounding would cost too much,
    with that cost; error: the largest cost among the taken, as a share of the weight."""

    taken: int
    kept: dict[str, float]
    error: float

    def lines(self) -> list[str]:
        """What the user should know: nothing where all went well."""
        if not self.kept:
            return []
        worst = max(self.kept, key=lambda path: self.kept[path])
        return [
            f"{len(self.kept)} of {self.taken + len(self.kept)} linears keep their weights: as int8 they "
            f"would be off by more than {LIMIT:.0%} ({worst}: {self.kept[worst]:.1%})"
        ]


@torch.no_grad()
def quantise_base(base: PreTrainedModel) -> Report:
    """Give a loaded base int8 weights, in place, module by module; its embedding stays.

    Raises InputError for a base that is not on the CPU, holds quantised weights already, or has no linear
    that can be taken.
    """
    if base.device.type != "cpu":
        raise InputError(
            f"int8 weights are for the CPU, and the base is on {base.device.type}",
            "leave --weights out, or use --device cpu",
        )
    linears = {path: m for path, m in base.named_modules() if type(m) is nn.Linear and path}
    if getattr(base, "is_quantized", False) or not linears:
        raise InputError("this base has no plain linears that could become int8", "leave --weights out")
    taken, kept, error = 0, {}, 0.0
    for path, module in linears.items():
        try:
            found = quantise_rows(module.weight)
        except ValueError as problem:
            raise InputError(
                f"the base's weight '{path}' cannot be int8: {problem}", "download the base again"
            ) from problem
        if found.error > LIMIT:
            kept[path] = found.error
            continue
        put(base, path, Int8Linear(found.q, found.scale, module.bias))
        taken, error = taken + 1, max(error, found.error)
    return Report(taken, kept, error)
