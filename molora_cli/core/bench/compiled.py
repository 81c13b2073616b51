"""How many graphs torch.compile made: once before the rounds, and none during them if all is well."""

from __future__ import annotations

from typing import Any

import torch


class Graphs:
    """Counts from when it is made."""

    def __init__(self) -> None:
        self._first = self._warm = _count()

    def warm(self) -> None:
        """Warming up is over: whatever is compiled from here on is compiled again."""
        self._warm = _count()

    def document(self) -> dict[str, int] | None:
        """None where nothing was compiled."""
        end = _count()
        if end == self._first:
            return None
        return {"graphs": self._warm - self._first, "recompiled": end - self._warm}


def compile_forward(base: Any) -> None:
    """Compile a model's forward in place, for one token at a time: longer texts run as before. Hooks around
    it (routing) stay outside the graph."""
    eager, compiled = base.forward, torch.compile(base.forward, dynamic=False)

    def forward(input_ids: Any = None, **named: Any) -> Any:
        single = input_ids is not None and input_ids.shape[1] == 1
        return (compiled if single else eager)(input_ids=input_ids, **named)

    base.forward = forward


def _count() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
