"""The one sink for what a command says: results to stdout, everything else to stderr.

Modes: human (rich), json (one document on stdout) and quiet (result only). Commands never print on their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from molora_cli.errors import MoloraError
from molora_cli.text import printable

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = 1


class Ticker(Protocol):
    """What long work calls as it goes; core code takes one and knows nothing of terminals."""

    def __call__(self, done: float, total: float | None = None, note: str = "") -> None: ...


def no_ticks(done: float, total: float | None = None, note: str = "") -> None:
    """The ticker of work that nobody watches."""


def _width() -> int | None:
    """None lets rich ask the terminal; COLUMNS=0 or nonsense falls back to 80."""
    columns = os.environ.get("COLUMNS", "")
    if columns and not (columns.isdigit() and int(columns) > 0):
        return 80
    if not columns and os.environ.get("TERM") in ("dumb", "unknown"):
        return shutil.get_terminal_size((80, 24)).columns  # rich takes 80, however narrow the terminal is
    return None


@dataclass
class Out:
    json_mode: bool = False
    quiet: bool = False

    # rich is imported where something is printed: it takes as long as all else that --help does
    @cached_property
    def stdout(self) -> Console:
        from rich.console import Console

        return Console(highlight=False, soft_wrap=False, width=_width())

    @cached_property
    def stderr(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, highlight=False, width=_width())

    # -- results ------------------------------------------------------------
    def result(self, document: dict[str, Any], human: Callable[[Console], None] | None = None) -> None:
        """The command's result: `document` as one JSON document, or `human(console)` for people."""
        if self.json_mode:
            body = {"schema_version": SCHEMA_VERSION, **document}
            sys.stdout.write(json.dumps(body, ensure_ascii=True, allow_nan=False, default=str) + "\n")
            sys.stdout.flush()
        elif human is not None:
            human(self.stdout)

    def line(self, record: dict[str, Any]) -> None:
        """One record of a JSON Lines result."""
        sys.stdout.write(json.dumps(record, ensure_ascii=True, allow_nan=False, default=str) + "\n")
        sys.stdout.flush()

    # -- notes --------------------------------------------------------------
    def note(self, message: str) -> None:
        if not self.quiet:
            from rich.text import Text

            # words are wrapped on a terminal only: a log keeps its lines whole
            text = Text(printable(message, keep="\n"))
            self.stderr.print(text, style="dim", soft_wrap=not self.stderr.is_terminal)

    def warn(self, message: str) -> None:
        from rich.text import Text

        text = Text("warning: ", style="yellow").append(printable(message, keep="\n"), style="default")
        self.stderr.print(text, soft_wrap=not self.stderr.is_terminal)

    def error(self, error: MoloraError) -> None:
        from rich.text import Text

        text = Text("error: ", style="bold red").append(printable(error.message, keep="\n"), style="default")
        if error.remedy:
            text.append("\nremedy: ", style="green").append(
                printable(error.remedy, keep="\n"), style="default"
            )
        self.stderr.print(text, soft_wrap=True)

    # -- progress -----------------------------------------------------------
    @contextlib.contextmanager
    def progress(self, title: str) -> Iterator[Ticker]:
        """A bar with an estimate on a terminal; nothing where there is none."""
        if (
            self.quiet
            or not self.stderr.is_terminal
            or threading.current_thread() is not threading.main_thread()
        ):
            yield no_ticks
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.stderr, transient=True) as bar:
            task = bar.add_task(title, total=None, note="")

            def tick(done: float, total: float | None = None, note: str = "") -> None:
                bar.update(task, completed=done, total=total, note=printable(note))

            yield tick
