"""Counts routes into `core.stats.Stats`, trace by trace, in memory that does not grow with the text.

Quantiles are exact up to `EXACT` tokens of a domain; beyond, values are kept in `FINE` equal steps of their
range. All other numbers are exact. Numpy only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.pieces import show_piece
from molora_cli.core.stats import BINS, MIN_COUNT, PSEUDO, Group, Part, Spread, Stats, TopToken
from molora_cli.core.trace import BASE_EXPERT, Trace

EXACT = 1 << 17
FINE = 1 << 14
_BLOCK = 1 << 18
_POSITIONS = 64  # bins of doubling length: more than any text has
Array = NDArray[np.float64]


def summarise(trace: Trace, *, top: int = 10, template: bool = False) -> Stats:
    """Statistics of a checked trace.

    top: how many tokens to list per expert. template: count the tokens of chat templates too.
    """
    counting = Counting(template=template)
    counting.add(trace)
    return counting.stats(trace.text, top=top)


class Counting:
    """Statistics of one router's routes; give it traces of whole documents. template: count the tokens that
    chat templates add too."""

    def __init__(self, *, template: bool = False) -> None:
        self.template = template
        self.tokens = 0  # all of them, those of templates included
        self.documents = 0
        self._of_template = 0
        self._head: Trace | None = None
        self._knows_base = False
        self._named = False
        self._groups: list[_GroupCount] = []

    def add(self, trace: Trace) -> None:
        """Count one more trace; adapters, experts and groups are as in the first."""
        if self._head is None:
            self._head = trace
            self._groups = [_GroupCount(trace, number) for number in range(trace.groups)]
        self.tokens += len(trace)
        self.documents += len(trace.starts)
        self._of_template += trace.of_template()
        self._knows_base = self._knows_base or bool((trace.indices == -1).any())
        self._named = self._named or bool(trace.domains)
        if not self.template:
            trace = trace.without_template()
        text = _Text(trace)
        for count in self._groups:
            count.add(text)

    def stats(self, text: Callable[[int], str], *, top: int = 10) -> Stats:
        """What was counted. text: of a token id, for the `top` tokens that are listed per expert."""
        head = self._head
        assert head is not None  # there is a trace before there are numbers
        ranges = head.meta.get("groups") or []
        knows_base = self._knows_base or BASE_EXPERT in head.experts
        experts = len(head.experts) or len(head.adapters) + knows_base
        groups = []
        for number, count in enumerate(self._groups):
            layers = (int(ranges[number][0]), int(ranges[number][1])) if number < len(ranges) else None
            groups.append(count.group(layers, head.adapters, text, top, self._named))
        return Stats(
            names=[*head.adapters, "base"],
            experts=experts,
            knows_base=knows_base,
            uniform=1 / max(1, experts),
            groups=groups,
            template_tokens=self._of_template,
            template_counted=self.template,
        )


class _Text:
    """What is the same for every group of a trace: its domains, neighbours, positions and token ids.

    inside (N - 1,): token i + 1 is of the document of token i.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        lengths = trace.lengths()
        self.names: list[str | None] = list(dict.fromkeys(trace.domains)) if trace.domains else [None]
        place = {name: i for i, name in enumerate(self.names)}
        of_document = np.array([place[name] for name in trace.domains], dtype=np.int64)
        self.of_document = of_document if trace.domains else np.zeros(len(lengths), dtype=np.int64)
        self.of_token = np.repeat(self.of_document, lengths)
        document = np.repeat(np.arange(len(lengths)), lengths)
        self.inside = document[1:] == document[:-1]
        position = np.arange(len(trace)) - np.repeat(trace.starts, lengths)
        self.bins = np.log2(position + 1).astype(np.int64)


class _Split:
    """One group's tokens: first choice (N,), column of each choice, its weight in `share`, gate: (N, k)."""

    def __init__(self, trace: Trace, group: int, columns: int) -> None:
        indices = trace.indices[:, group].astype(np.int64)
        self.column = np.where(indices < 0, columns - 1, indices)
        self.gates = trace.gates[:, group].astype(np.float64)
        best = self.gates == self.gates.max(axis=1, keepdims=True)
        self.weight = best / best.sum(axis=1, keepdims=True)
        first, _ = trace.first(group)
        self.first = np.where(first < 0, columns - 1, first).astype(np.int64)
        self.scored = _entropy_and_margin(trace, group)


class _GroupCount:
    """One group of layers."""

    def __init__(self, trace: Trace, number: int) -> None:
        self.number = number
        self.columns = len(trace.adapters) + 1
        self.limits = (float(np.log2(max(2, len(trace.experts)))), 1.0)
        self.total = self._new()
        self.domains: dict[str | None, _PartCount] = {}
        self.transitions = np.zeros((self.columns, self.columns), dtype=np.int64)
        self.positions = np.zeros((_POSITIONS, self.columns))
        self.position_tokens = np.zeros(_POSITIONS, dtype=np.int64)
        self.taken = np.zeros((0, self.columns))  # by token id
        self.count = np.zeros(0, dtype=np.int64)

    def _new(self) -> _PartCount:
        return _PartCount(self.columns, self.limits)

    def add(self, text: _Text) -> None:
        trace, columns = text.trace, self.columns
        split = _Split(trace, self.number, columns)
        self.total.add(len(trace.starts), None, text.inside, split)
        for i, name in enumerate(text.names):
            part = self.domains.setdefault(name, self._new())
            part.add(int((text.of_document == i).sum()), text.of_token == i, text.inside, split)
        pairs = split.first[:-1][text.inside] * columns + split.first[1:][text.inside]
        self.transitions += np.bincount(pairs, minlength=columns**2).reshape(columns, columns)
        cells = text.bins[:, None] * columns + split.column
        sums = np.bincount(cells.ravel(), split.weight.ravel(), _POSITIONS * columns)
        self.positions += sums.reshape(_POSITIONS, columns)
        self.position_tokens += np.bincount(text.bins, minlength=_POSITIONS)
        self._add_ids(trace.token_ids, split)

    def _add_ids(self, ids: NDArray[np.int64], split: _Split) -> None:
        """Who took which token id."""
        distinct, place = np.unique(ids, return_inverse=True)
        size = int(distinct[-1]) + 1 if len(distinct) else 0
        if size > len(self.count):
            grown = max(size, min(2 * len(self.count), size + (1 << 20)))
            self.count = np.concatenate([self.count, np.zeros(grown - len(self.count), dtype=np.int64)])
            self.taken = np.concatenate([self.taken, np.zeros((grown - len(self.taken), self.columns))])
        cells = place[:, None] * self.columns + split.column
        sums = np.bincount(cells.ravel(), split.weight.ravel(), len(distinct) * self.columns)
        self.taken[distinct] += sums.reshape(len(distinct), self.columns)
        self.count[distinct] += np.bincount(place, minlength=len(distinct))

    def group(
        self,
        layers: tuple[int, int] | None,
        adapters: tuple[str, ...],
        text: Callable[[int], str],
        top: int,
        named: bool,
    ) -> Group:
        """named: the texts came under domains."""
        total = self.total.part(None, whole=True)
        kept = int(np.flatnonzero(self.position_tokens).max(initial=-1)) + 1
        seen = np.maximum(1, self.position_tokens[:kept, None])
        apart = named and (len(self.domains) > 1 or None not in self.domains)
        unused = [n for n, m, s in zip(adapters, total.mass, total.share, strict=False) if m == 0 == s]
        return Group(
            layers=layers,
            total=total,
            domains=[part.part(name) for name, part in self.domains.items()] if apart else [],
            top_tokens=self._top_tokens(total.share, text, top),
            dead=unused if total.tokens else [],
            transitions=self.transitions.tolist(),
            positions=(self.positions[:kept] / seen).tolist(),
            position_tokens=self.position_tokens[:kept].tolist(),
        )

    def _top_tokens(self, share: list[float], text: Callable[[int], str], top: int) -> list[list[TopToken]]:
        listed: list[list[TopToken]] = []
        ids = np.flatnonzero(self.count >= MIN_COUNT)
        count = self.count[ids]
        for column in range(self.columns):
            taken = self.taken[ids, column]
            if share[column] <= 0 or top <= 0:
                listed.append([])
                continue
            lift = (taken + PSEUDO * share[column]) / (count + PSEUDO) / share[column]
            wanted = np.flatnonzero(lift > 1)
            order = wanted[np.lexsort((ids[wanted], -count[wanted], -lift[wanted]))][:top]
            listed.append([])
            for i in order:
                token = int(ids[i])
                shown = show_piece(text(token))
                listed[-1].append(TopToken(token, shown, float(taken[i]), int(count[i]), float(lift[i])))
        return listed


class _PartCount:
    """One domain, or all text. limits: the largest entropy and margin."""

    def __init__(self, columns: int, limits: tuple[float, float]) -> None:
        self.documents = self.tokens = self.neighbours = self.changed = 0
        self.share, self.mass = np.zeros(columns), np.zeros(columns)
        self.spreads = [_SpreadCount(limit) for limit in limits]

    def add(
        self, documents: int, rows: NDArray[np.bool_] | None, inside: NDArray[np.bool_], split: _Split
    ) -> None:
        """rows: which tokens are of the domain; None = all."""
        every = slice(None) if rows is None else rows
        column = split.column[every]
        self.documents += documents
        self.tokens += len(column)
        self.share += np.bincount(column.ravel(), split.weight[every].ravel(), len(self.share))
        self.mass += np.bincount(column.ravel(), split.gates[every].ravel(), len(self.mass))
        pairs = inside if rows is None else inside & rows[1:]
        self.neighbours += int(pairs.sum())
        self.changed += int((pairs & (split.first[1:] != split.first[:-1])).sum())
        for spread, values in zip(self.spreads, split.scored or (), strict=False):
            spread.add(values[every])

    def part(self, name: str | None, *, whole: bool = False) -> Part:
        entropy, margin = (spread.spread() for spread in self.spreads)
        tokens = max(1, self.tokens)
        return Part(
            name=name,
            documents=self.documents,
            tokens=self.tokens,
            share=(self.share / tokens).tolist(),
            mass=(self.mass / tokens).tolist(),
            neighbours=self.neighbours,
            switch_rate=100 * self.changed / self.neighbours if self.neighbours else None,
            entropy=entropy,
            margin=margin,
            whole=whole,
        )


class _SpreadCount:
    """Values between 0 and `limit`: as they are while they are few, then by how many lie in each step."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.count, self.sum = 0, 0.0
        self.bins = np.zeros(BINS, dtype=np.int64)
        self.values: list[Array] = []
        self.fine: NDArray[np.int64] | None = None

    def add(self, values: Array) -> None:
        self.count += len(values)
        self.sum += float(values.sum())
        self.bins += self._steps(values, BINS)
        if self.fine is None:
            self.values.append(values)
            if self.count > EXACT:
                self.fine = self._steps(np.concatenate(self.values), FINE)
                self.values = []
        else:
            self.fine += self._steps(values, FINE)

    def _steps(self, values: Array, steps: int) -> NDArray[np.int64]:
        place = np.clip(values / self.limit * steps, 0, steps - 1)  # the limit itself is in the last
        return np.bincount(place.astype(np.int64), minlength=steps)

    def spread(self) -> Spread | None:
        """None where there is no value."""
        if not self.count:
            return None
        quantiles = (0.1, 0.5, 0.9)
        if self.fine is None:
            found = np.quantile(np.concatenate(self.values), quantiles)
        else:
            ranks = np.array(quantiles) * (self.count - 1)
            found = (np.searchsorted(np.cumsum(self.fine), ranks, side="right") + 0.5) * self.limit / FINE
        p10, p50, p90 = (float(q) for q in found)
        return Spread(self.sum / self.count, p10, p50, p90, self.limit, self.bins.tolist())


def _entropy_and_margin(trace: Trace, group: int) -> tuple[Array, Array] | None:
    """Entropy in bits and margin of every token, (N,) each; None where nothing was scored against another."""
    if trace.scores is None or len(trace.experts) < 2:
        return None
    entropy, margin = np.empty(len(trace)), np.empty(len(trace))
    for start in range(0, len(trace), _BLOCK):
        block = slice(start, start + _BLOCK)
        p = np.exp(trace.scores[block, group].astype(np.float64))
        entropy[block] = -(p * np.log2(p, where=p > 0, out=np.zeros_like(p))).sum(axis=1)
        two = np.partition(p, -2, axis=1)[:, -2:]
        margin[block] = two[:, 1] - two[:, 0]
    return entropy, margin
