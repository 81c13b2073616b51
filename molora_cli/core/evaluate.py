"""How well a routed model does: NLL per completion token by domain, and the share of the gain it recovers.

    recovered = (base - x) / (base - own), each the mean NLL per completion token of a domain, in nats

where *own* is the segment's own adapter on every token of the whole sequence. Domains count alike in the
mean. Intervals are bootstrapped over documents: rows are drawn with replacement, 95 % of the draws lie in
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from molora_cli.core.routed.route import BASE, Route
from molora_cli.core.training.data import Example
from molora_cli.core.training.encode import TEMPLATE, encode_all, segment_labels
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

if TYPE_CHECKING:
    from molora_cli.core.router.stack import RouterStack

# (ids (B, T) int64, mask (B, T) bool) -> the route of these tokens; None = the model's own router decides
Router = Callable[[Tensor, Tensor], Route | None]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class EvalRow:
    """One document as tokens. labels: domain of each token as an index, -1 = none; counted: a completion
    token of a segment, or the end of the turn after one: what the NLL is taken over."""

    ids: Tensor  # (T,) int64
    labels: Tensor  # (T,) int64
    counted: Tensor  # (T,) bool


@dataclass(frozen=True)
class Tally:
    """NLL sums and token counts of N rows by L labels, both (N, L)."""

    sums: Floats
    counts: Floats

    def means(self, rows: NDArray[Any] | None = None) -> Floats:
        """Mean NLL per token of each label (L,), NaN where a label has none. rows: a bootstrap draw (n,)."""
        sums = self.sums if rows is None else self.sums[rows]
        counts = self.counts if rows is None else self.counts[rows]
        total = counts.sum(0)
        return np.divide(sums.sum(0), total, out=np.full(total.shape, np.nan), where=total > 0)


@dataclass(frozen=True)
class Interval:
    """A value with the 95 % interval of its bootstrap."""

    value: float
    low: float
    high: float


def evaluation_rows(
    tokenizer: Any, examples: Sequence[Example], labels: Sequence[str], max_length: int = 640
) -> list[EvalRow]:
    """Rows with `segments` as tokens. labels: names that the segments carry; others raise InputError."""
    index = {name: i for i, name in enumerate(labels)}
    encoded = encode_all(tokenizer, examples, max_length)
    rows = []
    for example, found in zip(examples, encoded, strict=True):
        named = segment_labels(found, example.segments)
        numbers, last = [], -1
        for name, message in zip(named, found.message, strict=True):
            if name is not None and name not in index:
                raise InputError(f"line {example.line}: no domain '{name}'", f"there are {', '.join(labels)}")
            last = index[name] if name is not None else last
            # the end of a turn belongs to the segment before it; words that join segments to none
            numbers.append(last if name is not None or message == TEMPLATE else -1)
        label = torch.tensor(numbers, dtype=torch.int64)
        counted = torch.tensor(found.completion, dtype=torch.bool) & (label >= 0)
        if bool(counted[1:].any()):
            rows.append(EvalRow(torch.tensor(found.ids, dtype=torch.int64), label, counted))
    return rows


def constant(indices: Sequence[int], gates: Sequence[float]) -> Router:
    """The same adapters and gates for every token."""

    def route(ids: Tensor, mask: Tensor) -> Route:
        return Route.constant(list(indices), list(gates), ids.shape[0], ids.shape[1])

    return route


def base_only() -> Router:
    return constant([BASE], [1.0])


def uniform(adapters: int) -> Router:
    return constant(range(adapters), [1.0 / adapters] * adapters)


def routed(stack: RouterStack, k: int | None) -> Router:
    """What a bundle's router decides with top-k; None = all experts by their probability ("soft").

    A router that reads hidden states decides within the model, whose router it must be.
    """
    wanted = len(stack.experts) if k is None else k

    def route(ids: Tensor, mask: Tensor) -> Route | None:
        if stack.live:
            stack.k = wanted
            return None
        before = stack.k
        stack.k = wanted
        try:
            return stack.decide(ids, mask, stack.start(ids.shape[0]))[0].route
        finally:
            stack.k = before

    return route


def _batches(rows: Sequence[EvalRow], tokens: int) -> list[list[int]]:
    """Row numbers by length, so that little is padded; at most `tokens` padded tokens a batch."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
    found: list[list[int]] = []
    for i in order:
        if found and len(rows[i].ids) * (len(found[-1]) + 1) <= tokens:
            found[-1].append(i)
        else:
            found.append([i])
    return found


@torch.no_grad()
def evaluate(
    model: Any,
    rows: Sequence[EvalRow],
    router: Router,
    labels: int,
    *,
    tokens: int = 1500,
    ticker: Ticker = no_ticks,
    only: Sequence[bool] | None = None,
) -> Tally:
    """NLL of the counted tokens of `rows` under a router.

    model: a RoutedModel, or anything that takes input_ids, attention_mask, route and logits_to_keep.
    labels: L. only: rows to run (the others count nothing). The head runs on counted positions only.
    """
    sums = np.zeros((len(rows), labels))
    counts = np.zeros((len(rows), labels))
    wanted = [i for i in range(len(rows)) if only is None or only[i]]
    chosen = [rows[i] for i in wanted]
    done = 0
    for batch in _batches(chosen, tokens):
        parts = [chosen[i] for i in batch]
        width = max(len(r.ids) for r in parts)
        ids = torch.zeros(len(parts), width, dtype=torch.int64)
        mask = torch.zeros(len(parts), width, dtype=torch.bool)
        target = torch.full((len(parts), width), -1)  # label of the counted token that position t predicts
        for b, row in enumerate(parts):
            n = len(row.ids)
            ids[b, :n], mask[b, :n] = row.ids, True
            target[b, : n - 1] = torch.where(row.counted[1:], row.labels[1:], -1)
        keep = (target >= 0).any(0).nonzero().squeeze(1)  # (P,) positions that predict something in some row
        logits = model(
            input_ids=ids,
            attention_mask=mask.long(),
            route=router(ids, mask),
            logits_to_keep=keep,
            use_cache=False,
        ).logits  # (B, P, V)
        seen = target[:, keep]  # (B, P)
        here = seen >= 0
        nll = F.cross_entropy(logits[here].float(), ids[:, keep + 1][here], reduction="none").double()
        where = torch.arange(len(parts))[:, None].expand_as(seen)[here]
        rows_at = np.asarray([wanted[i] for i in batch])[where.numpy()]
        np.add.at(sums, (rows_at, seen[here].numpy()), nll.numpy())
        np.add.at(counts, (rows_at, seen[here].numpy()), 1.0)
        done += len(parts)
        ticker(done, len(chosen))
    return Tally(sums, counts)


def own_tally(tallies: Sequence[Tally]) -> Tally:
    """The own-adapter row from each adapter's tally on every token: column l out of tally l."""
    sums = np.stack([t.sums[:, i] for i, t in enumerate(tallies)], 1)
    counts = np.stack([t.counts[:, i] for i, t in enumerate(tallies)], 1)
    return Tally(sums, counts)


def has_label(rows: Sequence[EvalRow], label: int) -> list[bool]:
    """Which rows count a token of this label."""
    return [bool((r.labels[r.counted] == label).any()) for r in rows]


def _recovered(base: Floats, found: Floats, own: Floats) -> Floats:
    return (base - found) / (base - own)


def recovered(
    base: Tally, found: Tally, own: Tally, *, draws: int = 1000, seed: int = 0
) -> tuple[Interval, list[float]]:
    """Share of the gain recovered: the mean over domains with its interval, and each domain's own share."""
    by_domain = _recovered(base.means(), found.means(), own.means())
    rng = np.random.default_rng(seed)
    n = base.sums.shape[0]
    values = []
    for _ in range(draws):
        rows = rng.integers(0, n, size=(n,))
        values.append(np.nanmean(_recovered(base.means(rows), found.means(rows), own.means(rows))))
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Interval(float(np.nanmean(by_domain)), float(low), float(high)), [float(x) for x in by_domain]


def mean_nll(tally: Tally, *, draws: int = 1000, seed: int = 0) -> Interval:
    """NLL per counted token over all labels, with its interval."""
    rng = np.random.default_rng(seed)
    n = tally.sums.shape[0]
    sums, counts = tally.sums.sum(1), tally.counts.sum(1)
    values = []
    for _ in range(draws):
        rows = rng.integers(0, n, size=(n,))
        values.append(sums[rows].sum() / max(1.0, counts[rows].sum()))
    low, high = np.percentile(values, [2.5, 97.5])
    return Interval(float(sums.sum() / counts.sum()), float(low), float(high))
