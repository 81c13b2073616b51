"""NLL per completion token, and the share of the gain recovered, with intervals bootstrapped over documents.

    recovered = (base - x) / (base - own), each the mean NLL per completion token of a domain, in nats

where *own* is the segment's own adapter on every token of the whole sequence. Domains count alike in the
mean. Documents are drawn with replacement (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
section 13.3); 95 % of the draws lie within an interval. All methods of a set see the same draws, so that the
interval of a difference is a paired one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """NLL sums (nats) and token counts of N lines by L labels, both (N, L); a line is one answer of a row."""

    sums: Floats
    counts: Floats

    @classmethod
    def zeros(cls, rows: int, labels: int) -> Tally:
        return cls(np.zeros((rows, labels)), np.zeros((rows, labels)))

    def by_document(self, documents: NDArray[np.int64]) -> Tally:
        """Rows of one document added up. documents: (N,) numbers from 0."""
        n = int(documents.max()) + 1 if len(documents) else 0
        out = Tally.zeros(n, self.sums.shape[1])
        np.add.at(out.sums, documents, self.sums)
        np.add.at(out.counts, documents, self.counts)
        return out


@dataclass(frozen=True)
class Interval:
    """A value with the 95 % interval of its bootstrap; all NaN where there is nothing to measure."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: Floats) -> Interval:
        if np.isnan(value) or not np.isfinite(draws).any():
            return cls(float(value), float("nan"), float("nan"))
        low, high = np.nanpercentile(draws, [2.5, 97.5])
        return cls(float(value), float(low), float(high))

    def document(self, scale: float = 1.0) -> dict[str, float | None]:
        """For JSON, which has no NaN."""
        values = {"value": self.value, "low": self.low, "high": self.high}
        return {k: None if np.isnan(v) else round(v * scale, 6) for k, v in values.items()}


@dataclass(frozen=True)
class Means:
    """Mean NLL per label: value (L,), and per draw (D, L); NaN where a label has no token."""

    value: Floats
    draws: Floats

    def interval(self, label: int) -> Interval:
        return Interval.of(float(self.value[label]), self.draws[:, label])


class Bootstrap:
    """The draws of one set. documents: (N,) the document of each row, numbered from 0."""

    def __init__(self, documents: Sequence[str], *, draws: int = 1000, seed: int = 0) -> None:
        order = {name: i for i, name in enumerate(dict.fromkeys(documents))}
        self.documents = np.array([order[d] for d in documents], dtype=np.int64)
        n = max(1, len(order))
        rng = np.random.default_rng(seed)
        self.weights = rng.multinomial(n, np.full(n, 1.0 / n), size=draws).astype(np.float64)  # (D, N)

    def means(self, tally: Tally) -> Means:
        """Mean NLL per counted token of each label."""
        whole = tally.by_document(self.documents)
        value = _ratio(whole.sums.sum(0), whole.counts.sum(0))
        return Means(value, _ratio(self.weights @ whole.sums, self.weights @ whole.counts))

    def overall(self, tally: Tally) -> Means:
        """The same over all labels together, L = 1."""
        return self.means(Tally(tally.sums.sum(1, keepdims=True), tally.counts.sum(1, keepdims=True)))


@dataclass(frozen=True)
class Recovered:
    """Share of the gain: per label (L,) and (D, L), and the mean over labels with its draws (D,)."""

    value: Floats
    draws: Floats

    @property
    def mean(self) -> Interval:
        return Interval.of(self._value, self._draws)

    @property
    def _value(self) -> float:
        return float(_nanmean(self.value[None])[0])

    @property
    def _draws(self) -> Floats:
        return _nanmean(self.draws)

    def interval(self, label: int) -> Interval:
        return Interval.of(float(self.value[label]), self.draws[:, label])

    def minus(self, other: Recovered) -> Interval:
        """The paired difference of the means."""
        return Interval.of(self._value - other._value, self._draws - other._draws)

    def minus_at(self, other: Recovered, label: int) -> Interval:
        """The paired difference of one label's shares."""
        draws = self.draws[:, label] - other.draws[:, label]
        return Interval.of(float(self.value[label] - other.value[label]), draws)


def recovered(base: Means, found: Means, own: Means) -> Recovered:
    """A label whose own adapter gains nothing has no share: NaN, and it is left out of the mean."""
    gain = base.value - own.value
    value = np.where(gain > 0, _ratio(base.value - found.value, gain), np.nan)
    draws = _ratio(base.draws - found.draws, base.draws - own.draws)
    return Recovered(value, np.where(np.isnan(value)[None], np.nan, draws))


def difference(one: Means, other: Means) -> Interval:
    """The paired difference of two NLLs over all labels (L = 1 each)."""
    return Interval.of(float(one.value[0] - other.value[0]), one.draws[:, 0] - other.draws[:, 0])


def own_tally(tallies: Sequence[Tally], base: Tally) -> Tally:
    """Column l out of adapter l's tally; a label beyond the adapters has none of its own: the base's."""
    columns = [tallies[i] if i < len(tallies) else base for i in range(base.sums.shape[1])]
    sums = np.stack([t.sums[:, i] for i, t in enumerate(columns)], 1)
    counts = np.stack([t.counts[:, i] for i, t in enumerate(columns)], 1)
    return Tally(sums, counts)


def chosen_tally(tallies: Sequence[Tally], choice: NDArray[np.int64]) -> Tally:
    """Row n out of tally choice[n]. choice: (N,) indices into `tallies`."""
    rows = np.arange(len(choice))
    sums = np.stack([t.sums for t in tallies])[choice, rows]
    counts = np.stack([t.counts for t in tallies])[choice, rows]
    return Tally(sums, counts)


def best_choice(tallies: Sequence[Tally], groups: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """(N,) the tally with the lowest NLL over each line's counted tokens: it reads the answer. groups: (N,)
    numbers from 0 of lines that must take the same one."""
    totals = np.stack([t.sums.sum(1) for t in tallies])  # (K, N)
    if groups is None:
        return totals.argmin(0)
    whole = np.zeros((len(tallies), int(groups.max()) + 1))
    for one, total in zip(whole, totals, strict=True):
        np.add.at(one, groups, total)
    best: NDArray[np.int64] = whole.argmin(0)
    return best[groups]


def _ratio(above: Any, below: Any) -> Floats:
    out = np.full(np.shape(above), np.nan)
    np.divide(above, below, out=out, where=np.abs(below) > 0)
    return out


def _nanmean(values: Floats) -> Floats:
    """Over the last axis, NaN where all of it is."""
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0.0).sum(-1), known.sum(-1).astype(np.float64))
