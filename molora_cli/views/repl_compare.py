"""One question answered twice: in two columns that grow row by row, or one answer below the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from molora_cli.core.chat_session import Answer
from molora_cli.views.chat import AnswerPrinter, Marker, statistics
from molora_cli.views.interrupt import interruptible
from molora_cli.views.wrapping import Wrapper

if TYPE_CHECKING:
    from molora_cli.core.generate import TokenEvent
    from molora_cli.views.repl import Repl

_LEAST = 76  # columns that two answers need to stand side by side


@dataclass
class _Side:
    """One of the two. title: the routing it runs under."""

    title: str
    events: Generator[TokenEvent, None, str]
    answer: Answer = field(default_factory=Answer)
    ended: bool = False

    def step(self) -> TokenEvent | None:
        """The next event, kept in the answer; None where there is no more."""
        try:
            event = next(self.events)
        except StopIteration as end:
            self.answer.stop, self.ended = end.value, True
            return None
        self.answer.events.append(event)
        return event


def show_comparison(repl: Repl, name: str, question: str | None) -> None:
    """Answer under the routing of now and under `name`; the conversation stays as it is."""
    with interruptible() as stopped, contextlib.ExitStack() as stack:
        sides = []
        for route, events in repl.session.compare(name, question):
            stack.callback(events.close)
            sides.append(_Side({"auto": "router", "off": "base"}.get(route, route), events))
        console = repl.out.stdout
        wide = console.is_terminal and not console.is_dumb_terminal and console.width >= _LEAST
        (_side_by_side if wide else _one_below_the_other)(repl, sides, stopped)
        size = max(len(side.title) for side in sides)
        for side in sides:
            said = statistics(side.answer, repl.palette, speed=False, routes=repl.routing != "off")
            repl.out.note(f"{side.title:<{size}}  {said}")
        repl.out.note("nothing of this enters the conversation")


def _one_below_the_other(repl: Repl, sides: Sequence[_Side], stopped: Callable[[], bool]) -> None:
    console = repl.out.stdout
    for side in sides:
        console.print(Text(f"[{side.title}]", style="bold"), soft_wrap=True)
        printer = AnswerPrinter(console, repl.palette, marks=repl.routing != "off")
        try:
            while not stopped() and (event := side.step()) is not None:
                printer.token(event)
        finally:
            printer.end()
        if stopped():
            return


def _side_by_side(repl: Repl, sides: Sequence[_Side], stopped: Callable[[], bool]) -> None:
    """Both run in turns, a token each; a row is printed when both have reached its end."""
    table = _Columns(repl.out.stdout, [side.title for side in sides])
    markers = [
        Marker(repl.palette, wrapper, marks=repl.routing != "off", ascii_only=table.ascii_only)
        for wrapper in table.wrappers
    ]
    try:
        while not stopped() and not all(side.ended for side in sides):
            for side, marker, wrapper in zip(sides, markers, table.wrappers, strict=True):
                if side.ended:
                    continue
                event = side.step()
                if event is None:
                    wrapper.end()
                else:
                    marker.token(event)
            table.show([side.ended for side in sides])
    finally:
        for wrapper in table.wrappers:
            wrapper.end()
        table.show([True, True])


class _Columns:
    """Lines of two texts beside each other; the width is that of the beginning."""

    def __init__(self, console: Console, titles: Sequence[str]) -> None:
        self.console = console
        self.ascii_only = not console.encoding.lower().startswith("utf")
        self._bar = " | " if self.ascii_only else " │ "
        self._width = (console.width - len(self._bar)) // 2
        self._lines: list[list[Text]] = [[Text(end="")] for _ in titles]  # the last of each is unfinished
        self._shown = 0
        self.wrappers = [
            Wrapper(lambda: self._width, self._writer(lines), hard=True) for lines in self._lines
        ]
        heads = [Text(set_cell_size(title, self._width), style="bold") for title in titles]
        self._row(heads[0], heads[1])

    def _writer(self, lines: list[Text]) -> Callable[[str, Style], None]:
        def write(text: str, style: Style) -> None:
            if text == "\n":
                lines.append(Text(end=""))
            else:
                lines[-1].append(text, style)

        return write

    def show(self, ended: Sequence[bool]) -> None:
        """Print the rows that will not change any more. ended: which texts have all their lines."""
        finished = [len(lines) - 1 for lines in self._lines]
        ready = [count for count, done in zip(finished, ended, strict=True) if not done]
        until = min(ready) if ready else max(finished)
        while self._shown < until:
            row = [
                lines[self._shown] if self._shown < count else Text(end="")
                for lines, count in zip(self._lines, finished, strict=True)
            ]
            self._row(row[0], row[1])
            self._shown += 1

    def _row(self, left: Text, right: Text) -> None:
        row = left.copy()
        row.end = "\n"
        row.append(" " * max(0, self._width - left.cell_len)).append(self._bar, "dim").append_text(right)
        self.console.print(row, soft_wrap=True)
