"""The rows of a set's table while they are being measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.evaluation.observed import Observed
from molora_cli.core.evaluation.rows import EvalRow, first_turns
from molora_cli.core.evaluation.sets import EvalSet
from molora_cli.core.evaluation.tally import Tally
from molora_cli.core.router.stack import RouterStack

BASE_ROW, OWN_ROW = "base", "own"


@dataclass
class Line:
    """One row of one set's table. group: base, adapter, own, oracle, baseline or router. default: it is what
    the router's file says.

    passes: forwards of the base per token of the set, None = not known. caches: sets of keys and values it
    holds while it answers; 0 where it keeps none and runs the whole text again for each token. time: CPU time
    of one forward over the base's, None = not taken.
    """

    title: str
    group: str
    tally: Tally
    observed: Observed | None = None
    passes: float | None = 1.0
    caches: int = 1
    time: float | None = None
    default: bool = False


@dataclass
class Measured:
    """One set: its token rows, and its table's rows in order. A tally has one line per answer of a row."""

    set: EvalSet
    rows: list[EvalRow]
    lines: dict[str, Line] = field(default_factory=dict)

    def tokens(self) -> int:
        return int(sum(int(r.counted.sum()) for r in self.rows))

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """(answers,) the row of each answer."""
        return np.repeat(np.arange(len(self.rows)), np.diff(first_turns(self.rows)))

    def empty(self) -> Tally:
        return Tally.zeros(len(self.owner), len(self.set.names))

    @property
    def documents(self) -> list[str]:
        """The document of each answer."""
        return [self.rows[i].document for i in self.owner.tolist()]


@dataclass
class RouterFile:
    """A router to measure. title: how its rows are called; stack: filled when it is built."""

    title: str
    path: Path
    stack: RouterStack | None = None
