"""What a trace says in numbers: shares, switches, entropy, margins, tokens each adapter takes. Numpy only.

Everything is counted per group of layers. Columns of a (A + 1) vector are the A adapters, then the base. A
token's *first choice* is the expert with its largest gate; among several equal ones it is split evenly.

    share     tokens whose first choice is the expert / tokens
    mass      mean over the tokens of the gate the expert gets
    switches  neighbours within a document with different first choices, per 100 neighbours
    entropy   -sum_e p_e log2 p_e of the router's scores p, in bits; mean and quantiles over the tokens
    margin    p of the best expert minus p of the second, likewise
    bins      tokens in each of 20 equal steps of entropy, 0 to log2 of the experts, and of margin, 0 to 1
    lift      ((n_te + c s_e) / (n_t + c)) / s_e with n_te tokens of id t on expert e, n_t tokens of id t, s_e
              the expert's share and c = 5: how much more often than its share an expert takes that token,
              drawn towards 1 where the token is rare
    uniform   1 / number of experts: the share if routing said nothing

Tokens that a chat template adds (system prompt, role markers, ends of turns) are the same in every text and
would drown short ones. They are left out, as if the messages' content stood alone, unless they are asked for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.pieces import show_piece
from molora_cli.core.trace import BASE_EXPERT, Trace

PSEUDO = 5.0
MIN_COUNT = 3
COLLAPSED = 0.95
BINS = 20
_BLOCK = 1 << 18
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles over tokens, and how many lie in each of `BINS` equal steps from 0 to `limit`."""

    mean: float
    p10: float
    p50: float
    p90: float
    limit: float
    bins: list[int]


@dataclass(frozen=True)
class Part:
    """One domain (name None: the texts without one), or all text together (whole, name None).

    Lists have A + 1 entries, the base last.
    neighbours: pairs of adjacent tokens within documents, the sample behind `switch_rate`.
    """

    name: str | None
    documents: int
    tokens: int
    share: list[float]
    mass: list[float]
    neighbours: int
    switch_rate: float | None
    entropy: Spread | None
    margin: Spread | None
    whole: bool = False

    @property
    def label(self) -> str:
        """Its name in a view, not made safe to show."""
        return "all text" if self.whole else "other text" if self.name is None else self.name


@dataclass(frozen=True)
class TopToken:
    """A token id that an expert takes more than its share: `taken` of its `count` occurrences."""

    token: int
    text: str
    taken: float
    count: int
    lift: float


@dataclass(frozen=True)
class Group:
    """One group of layers. layers: [first, end), None = all.

    transitions: (A + 1, A + 1) pairs of neighbours, from row to column, by first choice. positions: shares by
    position in the document, in bins [1, 2), [2, 4), [4, 8), ... of `position_tokens` tokens each.
    """

    layers: tuple[int, int] | None
    total: Part
    domains: list[Part]
    top_tokens: list[list[TopToken]]
    dead: list[str]
    transitions: list[list[int]]
    positions: list[list[float]]
    position_tokens: list[int]


@dataclass(frozen=True)
class Stats:
    """All groups. names: the A adapters and "base". experts: how many experts the uniform line divides by.

    knows_base: the router may send a token to the base, or did. template_tokens: tokens that a chat template
    added; template_counted: they are in the numbers.
    """

    names: list[str]
    experts: int
    knows_base: bool
    uniform: float
    groups: list[Group]
    template_tokens: int = 0
    template_counted: bool = False

    @property
    def tokens(self) -> int:
        """The tokens that are counted."""
        return self.groups[0].total.tokens

    def document(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)

    def warnings(self) -> list[str]:
        """Dead adapters and collapse, one sentence each."""
        found = []
        for number, group in enumerate(self.groups):
            where = f" in layer group {number}" if len(self.groups) > 1 else ""
            if group.dead:
                found.append(
                    f"no token{where} goes to {', '.join(group.dead)} (of {group.total.tokens:,} tokens)"
                )
            top = int(np.argmax(group.total.share))
            if len(group.domains) > 1 and group.total.share[top] >= COLLAPSED:
                found.append(
                    f"{100 * group.total.share[top]:.1f} % of all tokens{where} go to {self.names[top]}, "
                    f"over {len(group.domains)} domains: the router may have collapsed"
                )
        return found


def summarise(trace: Trace, *, top: int = 10, template: bool = False) -> Stats:
    """Statistics of a checked trace.

    top: how many tokens to list per expert. template: count the tokens of chat templates too.
    """
    of_template = trace.of_template()
    if not template:
        trace = trace.without_template()
    columns = len(trace.adapters) + 1
    ranges = trace.meta.get("groups") or []
    lengths = trace.lengths()
    names: list[str | None] = list(dict.fromkeys(trace.domains)) if trace.domains else []
    place = {name: i for i, name in enumerate(names)}
    of_document = np.array([place[name] for name in trace.domains], dtype=np.int64)
    of_token = np.repeat(of_document, lengths) if trace.domains else np.zeros(len(trace), dtype=np.int64)
    document = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(trace)) - np.repeat(trace.starts, lengths)
    occurring = _Ids(trace)
    groups = []
    for number in range(trace.groups):
        split = _Split(trace, number, columns)
        whole = np.ones(len(trace), dtype=bool)
        inside = document[1:] == document[:-1]
        domains = []
        for i, name in enumerate(names):
            if name is not None or len(names) > 1:
                domains.append(_part(name, int((of_document == i).sum()), of_token == i, inside, split))
        total = replace(_part(None, len(lengths), whole, inside, split), whole=True)
        bins = np.log2(position + 1).astype(np.int64)
        groups.append(
            Group(
                layers=(int(ranges[number][0]), int(ranges[number][1])) if number < len(ranges) else None,
                total=total,
                domains=domains,
                top_tokens=_top_tokens(trace, occurring, split, total.share, top),
                dead=[
                    n for n, m, s in zip(trace.adapters, total.mass, total.share, strict=False) if m == 0 == s
                ]
                if len(trace)
                else [],
                transitions=_transitions(split.first, inside, columns),
                positions=[split.shares(bins == b) for b in range(int(bins.max(initial=-1)) + 1)],
                position_tokens=np.bincount(bins).tolist(),
            )
        )
    knows_base = BASE_EXPERT in trace.experts or bool((trace.indices == -1).any())
    experts = len(trace.experts) or len(trace.adapters) + knows_base
    return Stats(
        names=[*trace.adapters, "base"],
        experts=experts,
        knows_base=knows_base,
        uniform=1 / max(1, experts),
        groups=groups,
        template_tokens=of_template,
        template_counted=template,
    )


class _Split:
    """One group's tokens: first choice (N,), column of each choice, its weight in `share`, gate: (N, k)."""

    def __init__(self, trace: Trace, group: int, columns: int) -> None:
        self.columns = columns
        self.group = group
        self.trace = trace
        indices = trace.indices[:, group].astype(np.int64)
        self.column = np.where(indices < 0, columns - 1, indices)
        self.gates = trace.gates[:, group].astype(np.float64)
        best = self.gates == self.gates.max(axis=1, keepdims=True)
        self.weight = best / best.sum(axis=1, keepdims=True)
        first, _ = trace.first(group)
        self.first = np.where(first < 0, columns - 1, first).astype(np.int64)
        self.scored = _entropy_and_margin(trace, group)

    def shares(self, rows: NDArray[np.bool_]) -> list[float]:
        return self._mean(rows, self.weight)

    def masses(self, rows: NDArray[np.bool_]) -> list[float]:
        return self._mean(rows, self.gates)

    def spreads(self, rows: NDArray[np.bool_]) -> tuple[Spread | None, Spread | None]:
        """Of entropy and of margin."""
        if self.scored is None or not rows.any():
            return None, None
        entropy, margin = self.scored
        return _spread(entropy[rows], float(np.log2(len(self.trace.experts)))), _spread(margin[rows], 1.0)

    def _mean(self, rows: NDArray[np.bool_], weights: Array) -> list[float]:
        sums = np.bincount(self.column[rows].ravel(), weights[rows].ravel(), self.columns)
        result: list[float] = (sums / max(1, int(rows.sum()))).tolist()
        return result


def _part(
    name: str | None, documents: int, rows: NDArray[np.bool_], inside: NDArray[np.bool_], split: _Split
) -> Part:
    pairs = inside & rows[1:]
    changed = pairs & (split.first[1:] != split.first[:-1])
    neighbours = int(pairs.sum())
    entropy, margin = split.spreads(rows)
    return Part(
        name=name,
        documents=documents,
        tokens=int(rows.sum()),
        share=split.shares(rows),
        mass=split.masses(rows),
        neighbours=neighbours,
        switch_rate=100 * int(changed.sum()) / neighbours if neighbours else None,
        entropy=entropy,
        margin=margin,
    )


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


def _spread(values: Array, limit: float) -> Spread:
    p10, p50, p90 = (float(q) for q in np.quantile(values, (0.1, 0.5, 0.9)))
    place = np.clip(values / limit * BINS, 0, BINS - 1).astype(np.int64)  # the limit itself is in the last
    bins: list[int] = np.bincount(place, minlength=BINS).tolist()
    return Spread(float(values.mean()), p10, p50, p90, limit, bins)


def _transitions(first: NDArray[np.int64], inside: NDArray[np.bool_], columns: int) -> list[list[int]]:
    pairs = first[:-1][inside] * columns + first[1:][inside]
    matrix: list[list[int]] = (
        np.bincount(pairs, minlength=columns * columns).reshape(columns, columns).tolist()
    )
    return matrix


class _Ids:
    """The V token ids that occur, rising; every token's place among them, (N,); how often each occurs."""

    def __init__(self, trace: Trace) -> None:
        self.ids, self.place = np.unique(trace.token_ids, return_inverse=True)
        self.count = np.bincount(self.place, minlength=len(self.ids))


def _top_tokens(
    trace: Trace, occurring: _Ids, split: _Split, share: list[float], top: int
) -> list[list[TopToken]]:
    ids, count = occurring.ids, occurring.count
    cells = occurring.place[:, None] * split.columns + split.column
    sums = np.bincount(cells.ravel(), split.weight.ravel(), len(ids) * split.columns)
    of_expert = sums.reshape(len(ids), split.columns)
    listed: list[list[TopToken]] = []
    for column in range(split.columns):
        taken = of_expert[:, column]
        if share[column] <= 0 or top <= 0:
            listed.append([])
            continue
        lift = (taken + PSEUDO * share[column]) / (count + PSEUDO) / share[column]
        wanted = np.flatnonzero((count >= MIN_COUNT) & (lift > 1))
        order = wanted[np.lexsort((ids[wanted], -count[wanted], -lift[wanted]))][:top]
        listed.append(
            [
                TopToken(
                    int(ids[i]),
                    show_piece(trace.text(int(ids[i]))),
                    float(taken[i]),
                    int(count[i]),
                    float(lift[i]),
                )
                for i in order
            ]
        )
    return listed
