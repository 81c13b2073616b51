"""Documents as tokens: which domain a token belongs to, and which tokens the NLL is taken over."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molora_cli.core.training.data import Example
from molora_cli.core.training.encode import TEMPLATE, encode_all, segment_labels
from molora_cli.core.training.router_rows import document_key
from molora_cli.errors import InputError

NO_LABEL = -1
PARTS = ("template", "prompt", "completion")  # what `EvalRow.part` counts


@dataclass(frozen=True)
class EvalRow:
    """One document as tokens.

    labels: (T,) int64, the domain of each token as an index into `names`, -1 = none: the template before the
    first message, and words that join segments. part: (T,) int64, an index into PARTS; the end of an
    assistant's turn is completion. counted: (T,) bool, the completion tokens that have a label. turn: (T,)
    int64, the answer that a completion token belongs to, from 0; other tokens have that of the answer before.
    document: rows of one document are drawn together by the bootstrap.
    """

    ids: Tensor
    labels: Tensor
    part: Tensor
    counted: Tensor
    turn: Tensor
    names: tuple[str, ...]
    document: str

    @cached_property
    def turns(self) -> int:
        """Answers in it, 1 or more."""
        return int(self.turn.max()) + 1

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """[first, end) of the completion tokens of each answer, (0, 0) where none of them is counted."""
        found = []
        for number in range(self.turns):
            at = (self.counted & (self.turn == number)).nonzero().squeeze(1).tolist()
            found.append((at[0], at[-1] + 1) if at else (0, 0))
        return found

    @cached_property
    def digest(self) -> str:
        """Of the ids and of what each token's label is called."""
        found = hashlib.sha256(self.ids.numpy().tobytes())
        used = sorted(set(self.labels.tolist()) - {NO_LABEL})
        found.update("\0".join(f"{i} {self.names[i]}" for i in used).encode())
        found.update(self.labels.numpy().tobytes() + self.counted.numpy().tobytes())
        if self.turns > 1:
            found.update(self.turn.numpy().tobytes())
        return found.hexdigest()

    def has(self, label: int) -> bool:
        """Whether a token of this label is counted."""
        return bool((self.labels[self.counted] == label).any())


def evaluation_rows(
    tokenizer: Any, examples: Sequence[Example], names: Sequence[str], max_length: int
) -> tuple[list[EvalRow], int]:
    """Rows with `segments` as tokens, and how many of the examples were cut to `max_length` tokens.

    names: labels that the segments may carry. A row without a counted token is left out.
    Raises InputError for another label, and as `encode_all` does.
    """
    index = {name: i for i, name in enumerate(names)}
    encoded = encode_all(tokenizer, examples, max_length)
    rows = []
    for example, found in zip(examples, encoded, strict=True):
        numbers, parts, turns, last = [], [], [0], NO_LABEL
        answer = TEMPLATE  # the message that is being answered with
        named = segment_labels(found, example.segments)
        for name, message, completion in zip(named, found.message, found.completion, strict=True):
            if name is not None and name not in index:
                raise InputError(f"line {example.line}: no domain '{name}'", f"there are {', '.join(names)}")
            last = last if name is None else index[name]
            # role markers and ends of turn belong to the segment before them; joining words to none
            numbers.append(last if name is not None or message == TEMPLATE else NO_LABEL)
            parts.append(PARTS.index("completion" if completion else "template" if message < 0 else "prompt"))
            begins = completion and message not in (TEMPLATE, answer)
            turns.append(turns[-1] + int(begins and answer != TEMPLATE))
            answer = message if begins else answer
        labels = torch.tensor(numbers, dtype=torch.int64)
        counted = torch.tensor(found.completion, dtype=torch.bool) & (labels >= 0)
        counted[:1] = False  # nothing predicts the first token
        if bool(counted.any()):
            ids = torch.tensor(found.ids, dtype=torch.int64)
            part = torch.tensor(parts, dtype=torch.int64)
            turn = torch.tensor(turns[1:], dtype=torch.int64)
            rows.append(EvalRow(ids, labels, part, counted, turn, tuple(names), document_key(example)))
    return rows, sum(e.cut for e in encoded)


def first_turns(rows: Sequence[EvalRow]) -> NDArray[np.int64]:
    """(N + 1,) where each row's answers begin among the answers of all rows; the last entry is how many there
    are. A `Tally` of rows has one line per answer."""
    return np.concatenate([[0], np.cumsum([r.turns for r in rows], dtype=np.int64)]).astype(np.int64)


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right. ids, labels (padding -1): (B, T) int64; mask (B, T) bool; at: row numbers."""

    ids: Tensor
    labels: Tensor
    mask: Tensor
    rows: tuple[EvalRow, ...]
    at: tuple[int, ...]


def batches(rows: Sequence[EvalRow], wanted: Sequence[int], tokens: int) -> list[Batch]:
    """The rows numbered `wanted`, by length so that little is padded; `tokens` padded tokens a batch or fewer
    (a longer row goes alone)."""
    order = sorted(wanted, key=lambda i: (len(rows[i].ids), i))
    groups: list[list[int]] = []
    for i in order:
        if groups and len(rows[i].ids) * (len(groups[-1]) + 1) <= tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [_padded(rows, group) for group in groups]


def _padded(rows: Sequence[EvalRow], at: Sequence[int]) -> Batch:
    parts = tuple(rows[i] for i in at)
    width = max(len(r.ids) for r in parts)
    ids = torch.zeros(len(parts), width, dtype=torch.int64)
    labels = torch.full((len(parts), width), NO_LABEL)
    mask = torch.zeros(len(parts), width, dtype=torch.bool)
    for b, row in enumerate(parts):
        n = len(row.ids)
        ids[b, :n], labels[b, :n], mask[b, :n] = row.ids, row.labels, True
    return Batch(ids, labels, mask, parts, tuple(at))
