"""NLLs that were measured before, so that a second run only runs what is new.

One SQLite file in the cache folder. A row's key is the digest of all that its NLL depends on: base, adapters,
method with its settings, dtype, and the row's tokens and labels. Routers are not kept: how they decide may
change.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from molora_cli.core.evaluation.rows import EvalRow, first_turns
from molora_cli.core.evaluation.tally import Tally

FILE = "nll.sqlite"
FORMAT = "1"  # raise it where what is measured changes
_MANY = 500  # keys of one query; SQLite's limit is 999 in old versions


class NllStore:
    """Tallies by key. folder: None keeps nothing. A file that cannot be used is left alone and not used."""

    def __init__(self, folder: Path | None, about: Sequence[str]) -> None:
        """about: what every NLL of this run depends on."""
        self._about = "\0".join([FORMAT, *about])
        self._folder = folder
        self._connection: sqlite3.Connection | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(folder / FILE, timeout=30)
            self._connection.execute("CREATE TABLE IF NOT EXISTS nll (key TEXT PRIMARY KEY, value TEXT)")
        except (OSError, sqlite3.Error):
            self._connection = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _key(self, method: str, row: EvalRow) -> str:
        return hashlib.sha256(f"{self._about}\0{method}\0{row.digest}".encode()).hexdigest()

    def file(self, method: str) -> Path | None:
        """Where something that was trained for a method may be kept; None where nothing is."""
        if self._folder is None or self._connection is None:
            return None
        name = hashlib.sha256(f"{self._about}\0{method}".encode()).hexdigest()[:32]
        return self._folder / f"{name}.safetensors"

    def fill(self, method: str, rows: Sequence[EvalRow], tally: Tally, wanted: Sequence[int]) -> list[int]:
        """Write what is known of the rows numbered `wanted` into `tally` (a line per answer); returns those
        that are missing."""
        if self._connection is None or not method:
            return list(wanted)
        keys = {i: self._key(method, rows[i]) for i in wanted}
        known: dict[str, str] = {}
        listed = list(dict.fromkeys(keys.values()))
        try:
            for first in range(0, len(listed), _MANY):
                part = listed[first : first + _MANY]
                marks = ",".join("?" * len(part))
                known |= dict(
                    self._connection.execute(f"SELECT key, value FROM nll WHERE key IN ({marks})", part)
                )
        except sqlite3.Error:
            return list(wanted)
        starts = first_turns(rows)
        for i, key in keys.items():
            for cell, (total, count) in json.loads(known.get(key, "{}")).items():
                label, _, turn = cell.partition("/")
                at = int(starts[i]) + int(turn or 0), int(label)
                tally.sums[at], tally.counts[at] = total, count
        return [i for i in wanted if keys[i] not in known]

    def put(self, method: str, rows: Sequence[EvalRow], tally: Tally, done: Sequence[int]) -> None:
        """Keep the rows numbered `done`."""
        if self._connection is None or not method:
            return
        values: list[tuple[str, str]] = []
        starts = first_turns(rows)
        for i in done:
            counted: dict[str, list[float]] = {}  # "LABEL" in the first answer, "LABEL/TURN" in a later one
            for turn in range(rows[i].turns):
                line = int(starts[i]) + turn
                for label in tally.counts[line].nonzero()[0]:
                    cell = f"{label}/{turn}" if turn else str(label)
                    counted[cell] = [float(tally.sums[line, label]), float(tally.counts[line, label])]
            values.append((self._key(method, rows[i]), json.dumps(counted)))
        try:
            with self._connection:
                self._connection.executemany("INSERT OR REPLACE INTO nll VALUES (?, ?)", values)
        except sqlite3.Error:
            self._connection = None
