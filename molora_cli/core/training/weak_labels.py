"""Labels for rows that have none: each token of an answer takes the adapter under which it is likeliest.

    n_k(t)  NLL of token t with adapter k on every token of the row
    m_k(t)  the mean of n_k over the tokens around t in its message, weighted a^|distance|, a = 0.9
    label   argmin_k m_k(t)

A single token's NLL says little (and reads the very token), hence the mean. A question takes the label that
most of its answer has; a row of which nearly all tokens agree is a row of that adapter alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from molora_cli.core.training.data import Example, Segment, read_examples
from molora_cli.core.training.encode import Encoded, encode_all
from molora_cli.core.training.lm_rows import forwards, token_losses
from molora_cli.core.training.mixing import labelled
from molora_cli.core.training.router_rows import TokenRow
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

if TYPE_CHECKING:
    from molora_cli.core.routed.model import RoutedModel

DECAY = 0.9
WHOLE = 0.9  # share of a row's tokens that makes it a row of one adapter
ROWS = 80  # per adapter that are labelled at most: each costs a forward for every adapter
_BATCH_TOKENS = 1024


@dataclass
class Weak:
    """domains: adapter -> rows of it alone; mixed: rows of several, with segments. agreement: adapter ->
    share of its rows' tokens that chose it."""

    domains: dict[str, list[Example]]
    mixed: list[Example] = field(default_factory=list)
    agreement: dict[str, float] = field(default_factory=dict)


@torch.no_grad()
def label_rows(
    model: RoutedModel,
    tokenizer: Any,
    rows: Sequence[Example],
    max_length: int,
    *,
    ticker: Ticker = no_ticks,
) -> Weak:
    """Label rows by the model's adapters; labels that they have are not read.

    One forward per adapter and row. Raises InputError where no row has an answer, or none is likeliest under
    some adapter (the router could not learn of it).
    """
    names = model.adapters
    encoded = encode_all(tokenizer, rows, max_length, no_ticks)
    tokens = [_unlabelled(row) for row in encoded]
    usable = [i for i, row in enumerate(tokens) if bool(row.completion[1:].any())]
    if not usable:
        raise InputError("no row has an answer that adapters could be told apart by", "give chats or texts")
    parts = forwards([tokens[i] for i in usable], _BATCH_TOKENS)
    place = {id(tokens[i]): i for i in usable}
    losses: dict[int, list[Tensor]] = {i: [] for i in usable}
    mode, chosen = model.engine.mode, model.engine.chosen
    done = 0
    try:
        for name in names:
            model.only(name)
            for part in parts:
                found = token_losses(model, part)[0].double().cpu()
                counts = [int(row.completion[1:].sum()) for row in part]
                for row, own in zip(part, found.split(counts), strict=True):
                    losses[place[id(row)]].append(own)
                done += len(part)
                ticker(done, len(usable) * len(names), "labels")
    finally:
        model.engine.mode, model.engine.chosen = mode, chosen
    weak = Weak({name: [] for name in names})
    agreed: dict[str, list[float]] = {name: [] for name in names}
    for i in usable:
        _place(weak, agreed, rows[i], encoded[i], torch.stack(losses[i]), names)
    weak.domains = {name: found for name, found in weak.domains.items() if found}
    missing = [name for name in names if name not in weak.domains]
    if missing:
        raise InputError(
            f"no row is likeliest under {', '.join(missing)}", "give rows of that adapter's domain, or labels"
        )
    weak.agreement = {name: round(sum(a) / len(a), 4) for name, a in agreed.items() if a}
    return weak


def read_unlabelled(specs: Sequence[str], most: int, seed: int) -> list[Example]:
    """At most `most` rows of `--data` values, FILE or NAME=FILE, whose names and labels are not read."""
    rows = []
    for spec in specs:
        _, sep, value = spec.partition("=")
        rows += read_examples(Path(value if sep and not Path(spec).exists() else spec).expanduser())
    return rows if len(rows) <= most else random.Random(seed).sample(rows, most)


def smoothed(losses: Tensor, message: Sequence[int], decay: float = DECAY) -> Tensor:
    """Means m (K, N) of losses (K, N) over the tokens around each one in its message (N,)."""
    where = torch.arange(losses.shape[1])
    of = torch.tensor(list(message))
    weight = decay ** (where[:, None] - where[None, :]).abs().double()  # (N, N)
    weight = weight * (of[:, None] == of[None, :])
    return losses.double() @ weight / weight.sum(0)


def _unlabelled(row: Encoded) -> TokenRow:
    """Every token counts for the loss where it is part of an answer."""
    ids = torch.tensor(row.ids, dtype=torch.int64)
    return TokenRow(ids, torch.zeros_like(ids), torch.tensor(row.completion, dtype=torch.bool))


def _place(
    weak: Weak,
    agreed: dict[str, list[float]],
    row: Example,
    encoded: Encoded,
    losses: Tensor,
    names: Sequence[str],
) -> None:
    """Put one row where its tokens say. losses (K, N) of its answers' tokens."""
    tokens = [t for t in range(1, len(encoded.ids)) if encoded.completion[t]]
    # an end of turn is of no message: it goes with the message before it
    message, last = [], 0
    for t in tokens:
        last = encoded.message[t] if encoded.message[t] >= 0 else last
        message.append(last)
    labels = [names[k] for k in smoothed(losses, message).argmin(0).tolist()]
    best, count = Counter(labels).most_common(1)[0]
    if count >= WHOLE * len(labels):
        agreed[best].append(count / len(labels))
        weak.domains[best].append(labelled(replace(row, label=best), best))
        return
    segments = _runs(encoded, tokens, labels)
    segments += _questions(row, segments)
    weak.mixed.append(
        replace(row, label=None, segments=tuple(sorted(segments, key=lambda s: (s.message, s.start))))
    )


def _runs(encoded: Encoded, tokens: Sequence[int], labels: Sequence[str]) -> list[Segment]:
    """Neighbouring tokens of one message and one label, as characters."""
    found: list[Segment] = []
    for t, label in zip(tokens, labels, strict=True):
        message = encoded.message[t]
        if message < 0:
            continue
        before = found[-1] if found else None
        if before is not None and (before.message, before.label) == (message, label):
            found[-1] = replace(before, end=max(before.end, encoded.end[t]))
        else:
            start = before.end if before is not None and before.message == message else encoded.start[t]
            found.append(Segment(message, start, max(start, encoded.end[t]), label))
    return [segment for segment in found if segment.end > segment.start]


def _questions(row: Example, answers: Sequence[Segment]) -> list[Segment]:
    """Each user's message with the label that most characters of the answer after it have."""
    found = []
    for number, message in enumerate(row.messages):
        if message.role != "user" or not message.content:
            continue
        sizes: Counter[str] = Counter()
        following = min((s.message for s in answers if s.message > number), default=None)
        for segment in answers:
            if segment.message == following:
                sizes[segment.label] += segment.end - segment.start
        if sizes:
            found.append(Segment(number, 0, len(message.content), sizes.most_common(1)[0][0]))
    return found
