"""What this machine can do at all: the fastest reader and product at hand, timed beside the sides.

Both are sides like the others, so that what is reached of them is a ratio within a round: other processes
slow the probe as they slow the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from molora_cli.core.bench.summary import PRODUCT, READ
from molora_cli.core.bench.timing import Side

READ_BYTES = 128 * 2**20  # far beyond any cache
EDGE = 1024  # of the square matrices


def probes(dtype: torch.dtype) -> list[Side]:
    """The two probes: a pass over READ_BYTES, and a square product in `dtype` or float32.

    Each is the fastest of a few candidates, chosen here.
    """
    size, edge = READ_BYTES, EDGE
    numbers = torch.ones(size // 8)  # two vectors of half the size, or both as one
    other, words = torch.ones_like(numbers), torch.ones(size // 8, dtype=torch.int64)
    readers: list[tuple[str, Callable[[], object]]] = [
        ("a dot product of two vectors", lambda: torch.dot(numbers, other)),
        ("a sum of integers", lambda: words.sum()),
    ]
    reader = _fastest(readers)
    products: list[tuple[str, Callable[[], object]]] = []
    for kind in dict.fromkeys((torch.float32, dtype)):
        left, right = torch.randn(edge, edge).to(kind), torch.randn(edge, edge).to(kind)
        products.append((f"{edge} x {edge} in {_said(kind)}", _product(left, right)))
    product = _fastest(products)
    return [
        Side(READ, f"ceiling: {reader[0]}", reader[1], moved=float(size)),
        Side(PRODUCT, f"ceiling: {product[0]}", product[1], flops=2.0 * edge**3),
    ]


def _product(left: Tensor, right: Tensor) -> Callable[[], object]:
    return lambda: left @ right


def _fastest(candidates: Sequence[tuple[str, Callable[[], object]]]) -> tuple[str, Callable[[], object]]:
    """The candidate with the shortest of three turns; one that takes half a second is run once."""

    def best(call: Callable[[], object]) -> float:
        found = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            call()
            found = min(found, time.perf_counter() - started)
            if found > 0.5:
                break
        return found

    return min(candidates, key=lambda candidate: best(candidate[1]))


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
