"""A trace: the routes of some text with its token ids. Numpy only, so that reading one needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Trace:
    """Routes of N tokens in D documents, G layer groups, k choices, E experts scored.

    token_ids (N,) int64; starts (D,) int64, first token of each document; indices (N, G, k) int16, -1 = base;
    gates (N, G, k) float32; scores (N, G, E) float32 log-probabilities over `experts`, or None for routers that
    score nothing; adapters: names that `indices` point into; experts: names of the score columns, "__base__"
    among them where the router knows the base; domains: one name or None per document; pieces: token id -> text
    for display (may be empty until filled from a tokenizer); meta: bundle path and digest, router kind, groups.
    """

    token_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    indices: NDArray[np.int16]
    gates: NDArray[np.float32]
    adapters: tuple[str, ...]
    scores: NDArray[np.float32] | None = None
    experts: tuple[str, ...] = ()
    domains: tuple[str | None, ...] = ()
    pieces: dict[int, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def groups(self) -> int:
        return int(self.indices.shape[1])

    @property
    def k(self) -> int:
        return int(self.indices.shape[2])

    def documents(self) -> Iterator[slice]:
        """The token range of each document."""
        ends = [*self.starts[1:].tolist(), len(self)]
        for start, end in zip(self.starts.tolist(), ends, strict=True):
            yield slice(int(start), int(end))
