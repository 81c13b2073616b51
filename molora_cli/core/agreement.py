"""Two traces of one text against each other: how often both send a token to the same expert. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.trace import Trace
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle


@dataclass(frozen=True)
class Agreement:
    """Tokens of two traces by their expert; over several groups of layers that with the largest sum of gates.

    tokens: how many are counted; agreed: those whose experts have the same name; matrix: (A + 1, A' + 1)
    tokens, rows the first trace's experts and columns the second's, each with the base last; names: of both.
    """

    tokens: int
    agreed: int
    matrix: list[list[int]]
    names: tuple[list[str], list[str]]


def agreement(trace: Trace, other: Trace, *, template: bool = False) -> Agreement | None:
    """None where the two do not hold the same tokens in the same texts. template: count a template's too."""
    same = np.array_equal(trace.token_ids, other.token_ids) and np.array_equal(trace.starts, other.starts)
    if not same or len(trace) == 0:
        return None
    counted = np.ones(len(trace), dtype=bool)
    if trace.content is not None and not template:
        counted = trace.content
    names = ([*trace.adapters, "base"], [*other.adapters, "base"])
    height, width = len(names[0]), len(names[1])
    (rows, _), (columns, _) = overall(trace), overall(other)
    matrix = np.bincount((rows * width + columns)[counted], minlength=height * width).reshape(height, width)
    places = {name: i for i, name in enumerate(names[1])}
    agreed = sum(int(matrix[i, places[name]]) for i, name in enumerate(names[0]) if name in places)
    return Agreement(int(counted.sum()), agreed, matrix.tolist(), names)


def overall(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The column (A = base) with the largest sum of gates over all G groups, and that over G: (N,) each."""
    base = len(trace.adapters)
    if trace.groups == 1:
        first, gates = trace.first(0)
        return np.where(first < 0, base, first).astype(np.int64), gates
    mass = np.zeros((len(trace), base + 1), dtype=np.float32)
    rows = np.arange(len(trace))
    for group in range(trace.groups):
        for choice in range(trace.k):
            index = trace.indices[:, group, choice].astype(np.int64)
            # one choice at a time, so no place is written twice
            mass[rows, np.where(index < 0, base, index)] += trace.gates[:, group, choice]
    column = mass.argmax(axis=1)
    return column, mass[rows, column] / trace.groups


def trace_again(bundle: Bundle, trace: Trace, *, ticker: Ticker = no_ticks) -> Trace:
    """The tokens of a trace through another bundle's router.

    Raises InputError where the bundle's base is another, for there the same ids are other tokens.
    """
    from molora_cli.core.base.structure import read_structure
    from molora_cli.core.tracing import trace_texts

    where, base = shorten(str(bundle.path)), bundle.manifest.base.id
    if trace.meta.get("base") != base:
        raise InputError(
            f"{where} is for {shorten(base)}, the trace was made with {shorten(str(trace.meta.get('base')))}",
            f"trace the text with it and compare that: molora inspect {where} --data FILE --save-trace FILE",
        )
    structure = read_structure(bundle.base_path)
    vocabulary = structure[structure.embedding].in_features if structure.embedding else None
    if vocabulary is not None and len(trace) and int(trace.token_ids.max()) >= vocabulary:
        raise InputError(
            f"the trace has token {int(trace.token_ids.max())}, {shorten(base)} has {vocabulary} tokens",
            "make the trace again: molora inspect --save-trace",
        )
    ids = [trace.token_ids[tokens].tolist() for tokens in trace.documents()]
    found = trace_texts(bundle, ((trace.domain(i), row) for i, row in enumerate(ids)), ticker=ticker)
    found.content = trace.content
    return found
