"""What a router did with the tokens of a set: right or not, to which adapter, how often it changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.evaluation.rows import PARTS, Batch
from molora_cli.core.trace import Trace

_FLOOR = -30.0  # a score of minus infinity (an expert that a stage does not know) in a sum over a prompt


@dataclass
class Observed:
    """Sums over the rows of a set under one router.

    adapters: names; the base is one column more. labels: L. weights: share of the base's layers per group of
    the route. right, seen: tokens by PARTS, a token counting by the layers whose first choice is its label's
    adapter. mass: (L, K + 1) gates over prompt and completion tokens, mean over layers. prompt: row -> for
    each of its answers the column with the best sum of scores over the tokens since the answer before.
    """

    adapters: tuple[str, ...]
    labels: int
    right: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(PARTS)))
    seen: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(PARTS)))
    switches: float = 0.0
    neighbours: int = 0
    mass: NDArray[np.float64] = field(init=False)
    prompt: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mass = np.zeros((self.labels, len(self.adapters) + 1))

    def add(self, batch: Batch, trace: Trace, layers: Sequence[tuple[int, int]]) -> None:
        """The routes of one batch. layers: [first, end) of each group of the route."""
        groups = trace.indices.shape[1]
        sizes = np.array([end - first for first, end in layers], dtype=float)
        weights = sizes / sizes.sum() if len(sizes) == groups else np.full(groups, 1.0 / groups)
        base = len(self.adapters)
        columns = np.where(trace.indices < 0, base, trace.indices)  # (N, G, k)
        gates = np.abs(trace.gates)
        first = np.take_along_axis(columns, gates.argmax(-1)[..., None], -1)[..., 0]  # (N, G)
        for place, row in enumerate(batch.rows):
            start = int(trace.starts[place])
            here = slice(start, start + len(row.ids))
            labels, part = row.labels.numpy(), row.part.numpy()
            self._accuracy(first[here], labels, part, weights)
            self._mass(columns[here], trace.gates[here], labels, part, weights)
            if len(row.ids) > 1:
                moved = first[here][1:] != first[here][:-1]
                self.switches += float((moved * weights).sum())
                self.neighbours += len(row.ids) - 1
            found, before = [], 0
            for answer, end in row.spans:
                prompt = slice(start + before, start + max(before + 1, answer))
                found.append(self._best(trace, columns, prompt, weights))
                before = end
            self.prompt[batch.at[place]] = found

    def _accuracy(self, first: Any, labels: Any, part: Any, weights: Any) -> None:
        single = (labels >= 0) & (labels < len(self.adapters))  # a blend has no adapter of its own
        hit = ((first == labels[:, None]) * weights).sum(1)
        np.add.at(self.right, part[single], hit[single])
        np.add.at(self.seen, part[single], 1.0)

    def _mass(self, columns: Any, gates: Any, labels: Any, part: Any, weights: Any) -> None:
        real = (labels >= 0) & (part != PARTS.index("template"))
        spread = gates[real] * weights[None, :, None]  # (n, G, k)
        where = np.broadcast_to(labels[real][:, None, None], spread.shape)
        np.add.at(self.mass, (where.ravel(), columns[real].ravel()), spread.ravel())

    def _best(self, trace: Trace, columns: Any, prompt: slice, weights: Any) -> int:
        """The column with the best sum of scores over the tokens of `prompt`."""
        base = len(self.adapters)
        total = np.zeros(base + 1)
        if trace.scores is None or not trace.experts:
            spread = trace.gates[prompt] * weights[None, :, None]
            np.add.at(total, columns[prompt].ravel(), spread.ravel())
            return int(total.argmax())
        total[:] = -np.inf
        scores = np.maximum(trace.scores[prompt], _FLOOR)  # (n, G, E)
        for expert, name in enumerate(trace.experts):
            column = self.adapters.index(name) if name in self.adapters else base
            total[column] = float((scores[..., expert] * weights).sum())
        return int(total.argmax())

    def document(self, names: Sequence[str]) -> dict[str, Any]:
        """For JSON. names: of the labels."""
        right = {
            part: round(float(self.right[i] / self.seen[i]), 6) if self.seen[i] else None
            for i, part in enumerate(PARTS)
        }
        usage = {}
        for label, name in enumerate(names):
            total = self.mass[label].sum()
            if total > 0:
                shares = [*self.adapters, "base"]
                usage[name] = {
                    s: round(float(m / total), 6) for s, m in zip(shares, self.mass[label], strict=True)
                }
        return {
            "accuracy": right,
            "switches_per_100": round(100 * self.switches / max(1, self.neighbours), 4),
            "usage": usage,
        }
