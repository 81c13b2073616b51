"""A streamed answer in a terminal: words wrapped whole, tokens in the colour of their adapter; its
figures."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from molora_cli.core.chat_session import Answer, shares
from molora_cli.text import printable
from molora_cli.views.palette import BASE, Palette

if TYPE_CHECKING:
    from molora_cli.core.generate import TokenEvent, TokenRoute

_JOINER = "\u200d"
_TAB = 4
_FENCE = ("```", "~~~")
_HELD = 24  # cells of a word that are waited for before it is shown unfinished


class AnswerPrinter:
    """Prints token events as they come.

    On a terminal words are wrapped whole (very long ones by the terminal itself), and letters that belong
    together (double-width, joined emoji, combining marks) are never cut at the right edge; in fenced code
    only such letters are moved. Elsewhere the answer goes out as it is, without marks. Control characters
    are escaped either way. marks=False: no colours and no letters.
    """

    def __init__(self, console: Console, palette: Palette, *, marks: bool = True) -> None:
        self.console = console
        self.palette = palette
        self.marks = marks and console.is_terminal
        self._previous: int | None = None
        self._column = 0
        self._word: list[tuple[str, Style]] = []  # letters not yet written
        self._alone = False  # the held letters may be parted from what follows
        self._begun = False  # the word that is held has a part on the screen already
        self._line = ""  # the head of the source line, to see a fence
        self._fenced = False

    def token(self, event: TokenEvent) -> None:
        """Show one event."""
        if not self.console.is_terminal:
            text = printable(event.text, keep="\n\t")
            self.console.file.write(text)
            self.console.file.flush()
            self._column = 0 if text.endswith("\n") else self._column + len(text)
            return
        index = event.route.top
        if self.marks and event.text:
            blank = not event.text.strip()
            strength = event.route.strength
            shown = self.palette.token(event.text, index, strength, index if blank else self._previous)
            self._previous = self._previous if blank else index
            self._feed(shown.plain, self.palette.style(index, strength))
        else:
            self._feed(printable(event.text, keep="\n\t"), Style.null())

    def end(self) -> None:
        """Show what was held back and leave the cursor at the start of a line."""
        self._flush()
        if self._column:
            self._write("\n", Style.null())
            self._column = 0

    # -- wrapping -----------------------------------------------------------
    def _feed(self, text: str, style: Style) -> None:
        for char in text:
            if char == "\n":
                self._newline()
            elif self._word and (cell_len(char) == 0 or self._word[-1][0].endswith(_JOINER)):
                last, its_style = self._word[-1]
                self._word[-1] = (last + char, its_style)
            elif char in " \t":
                self._flush()
                self._space(1 if char == " " else _TAB - self._column % _TAB, style)
            else:
                if self._alone:
                    self._flush()
                self._word.append((char, style))
                self._alone = self._fenced or cell_len(char) > 1
            if char != "\n" and len(self._line) < len(_FENCE[0]):
                self._line = (self._line + char).lstrip()
        held = sum(cell_len(cluster) for cluster, _ in self._word)
        if len(self._word) > 1 and (self._fenced or held >= min(_HELD, self.console.width)):
            # all but the last letter, which may still grow
            newest, alone = self._word.pop(), self._alone
            self._flush()
            self._word, self._alone, self._begun = [newest], alone, not self._fenced

    def _newline(self) -> None:
        self._flush()
        if self._line in _FENCE:
            self._fenced = not self._fenced
        self._line = ""
        self._write("\n", Style.null())
        self._column = 0

    def _space(self, count: int, style: Style) -> None:
        for _ in range(count):
            if self._column >= self.console.width:
                self._column = 0
                if not self._fenced:
                    self._write("\n", Style.null())
                    return
            self._write(" ", style)
            self._column += 1

    def _flush(self) -> None:
        """Write the held letters, on a new line where they do not fit on this one."""
        word, self._word, self._alone = self._word, [], False
        whole, self._begun = not (self._fenced or self._begun), False
        width = self.console.width
        cells = sum(cell_len(cluster) for cluster, _ in word)
        if whole and self._column > 0 and cells <= width < self._column + cells:
            self._write("\n", Style.null())
            self._column = 0
        run, run_style = "", Style.null()
        for cluster, style in word:
            size = cell_len(cluster)
            full = self._column > 0 and self._column + size > width
            if run and (full or style != run_style):
                self._write(run, run_style)
                run = ""
            if full:
                # in the middle of a word a full line is wrapped by the terminal, which copies it in one piece
                if self._column < width:
                    self._write("\n", Style.null())
                self._column = 0
            run, run_style = run + cluster, style
            self._column += size
        if run:
            self._write(run, run_style)

    def _write(self, text: str, style: Style) -> None:
        self.console.print(Text(text, style=style, end=""), end="", soft_wrap=True)


# -- figures ----------------------------------------------------------------
def route_record(route: TokenRoute) -> dict[str, Any]:
    """A route for JSON: (G, k) lists of indices, gates and names."""
    return {"indices": route.indices, "gates": route.gates, "names": route.names}


def event_record(event: TokenEvent, number: int) -> dict[str, Any]:
    """One line of `--json`; number counts from 1."""
    return {
        "type": "token",
        "n": number,
        "id": event.id,
        "text": event.text,
        "route": route_record(event.route),
        "logprob": event.logprob,
    }


def summary_record(answer: Answer, palette: Palette, schema_version: int) -> dict[str, Any]:
    """The last line of `--json`. Times in seconds; share: fraction of tokens and layer groups by adapter."""
    return {
        "type": "summary",
        "schema_version": schema_version,
        "text": answer.text,
        "stop": answer.stop,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": len(answer.events),
        "seconds": round(answer.seconds, 4),
        "first_token_seconds": round(answer.first_token_seconds, 4),
        "tokens_per_second": round(answer.tokens_per_second, 2),
        "share": {palette.name(index): round(part, 4) for index, part in shares(answer.events).items()},
    }


_STOPS = {"length": "stopped at --max-new-tokens", "context": "context full", "interrupted": "interrupted"}


def statistics(answer: Answer, palette: Palette) -> str:
    """One line: tokens, speed, share per adapter, and why it stopped where that is not the end of the
    turn."""
    parts = [f"{len(answer.events)} tokens"]
    if answer.tokens_per_second:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    ranked = sorted(shares(answer.events).items(), key=lambda item: -item[1])
    if ranked:
        parts.append("  ".join(f"{palette.name(index)} {100 * part:.0f} %" for index, part in ranked))
    if answer.stop in _STOPS:
        parts.append(_STOPS[answer.stop])
    return " | ".join(parts)


def why(event: TokenEvent, number: int, palette: Palette, muted: Collection[str] = ()) -> Text:
    """The route of answer token `number` (from 1) in words: gates, scores, runner-up, margin per layer group.

    Scores are the router's probabilities before temperature and muting; margin: best minus second.
    """
    route = event.route
    shown = printable(event.text) or "(part of a letter)"
    text = Text(
        f"token {number} '{shown}' (id {event.id}, probability {math.exp(event.logprob):.3f})\n", end=""
    )
    for group, (indices, gates) in enumerate(zip(route.indices, route.gates, strict=True)):
        where = f"layer group {group + 1} of {len(route.indices)}: " if len(route.indices) > 1 else ""
        taken = ", ".join(
            palette.name(i) if i == BASE else f"{palette.name(i)} at gate {g:.2f}"
            for i, g in zip(indices, gates, strict=True)
        )
        text.append(f"{where}{taken}\n")
        if not route.scores:
            text.append("no router decided: the route was fixed\n")
            continue
        ranked = sorted(route.scores[group], key=lambda item: -item[1])
        size = max(cell_len(name) for name, _ in ranked)
        for name, logp in ranked:
            note = "  muted" if name in muted else ""
            text.append(f"  {name:<{size}}  {math.exp(logp):.3f}{note}\n")
        if len(ranked) > 1:
            margin = math.exp(ranked[0][1]) - math.exp(ranked[1][1])
            text.append(f"  runner-up {ranked[1][0]}, margin {margin:.3f}\n")
    text.append("decided at the token before it, from what had been read until then")
    return text
