"""A streamed answer in a terminal: words wrapped whole, tokens in the colour of their adapter; its
figures."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from molora_cli.core.chat_session import Answer, shares
from molora_cli.text import printable
from molora_cli.views.palette import BASE, MARK, Palette
from molora_cli.views.wrapping import Wrapper

if TYPE_CHECKING:
    from molora_cli.core.generate import TokenEvent, TokenRoute

_BAR = 40  # cells of a full share bar at most


class AnswerPrinter:
    """Prints token events as they come.

    On a terminal lines are broken as `Wrapper` does; elsewhere the answer goes out as it is, without marks.
    Control characters are escaped either way. marks=False: no colours and no letters.
    """

    def __init__(self, console: Console, palette: Palette, *, marks: bool = True) -> None:
        self.console = console
        self._wrapper = Wrapper(lambda: self.console.width, self._write)
        self._marker = Marker(palette, self._wrapper, marks=marks, ascii_only=not _utf(console))
        self._open = False  # without a terminal: the line has text

    def token(self, event: TokenEvent) -> None:
        """Show one event."""
        if self.console.is_terminal:
            self._marker.token(event)
            return
        text = printable(event.text, keep="\n\t")
        self.console.file.write(text)
        self.console.file.flush()
        self._open = not text.endswith("\n") if text else self._open

    def end(self) -> None:
        """Show what was held back and leave the cursor at the start of a line."""
        self._wrapper.end()
        if self._open:
            self._write("\n", Style.null())
            self._open = False

    def _write(self, text: str, style: Style) -> None:
        self.console.print(Text(text, style=style, end=""), end="", soft_wrap=True)


class Marker:
    """Feeds events to a wrapper, each in its adapter's colour, or behind its letter where there are none."""

    def __init__(self, palette: Palette, wrapper: Wrapper, *, marks: bool, ascii_only: bool = False) -> None:
        self._palette, self._wrapper, self._marks = palette, wrapper, marks
        self._mark = ":" if ascii_only else MARK
        self._previous: int | None = None

    def token(self, event: TokenEvent) -> None:
        """One event. Blanks take the adapter's colour, but no letter of their own."""
        shown = printable(event.text, keep="\n\t")
        if not self._marks:
            self._wrapper.feed(shown, Style.null())
            return
        index = event.route.top
        style = self._palette.style(index, event.route.strength)
        body = shown.lstrip(" \n\t")
        self._wrapper.feed(shown[: len(shown) - len(body)], style)
        if not body:
            return
        if not self._palette.colours and index != self._previous:
            self._wrapper.feed(self._palette.glyph(index) + self._mark, style, source=False)
        self._previous = index
        self._wrapper.feed(body, style)


def _utf(console: Console) -> bool:
    return console.encoding.lower().startswith("utf")


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


_STOPS = {
    "length": "stopped at the limit max-new-tokens",
    "context": "context full",
    "interrupted": "interrupted",
}


def statistics(answer: Answer, palette: Palette, *, speed: bool = True, routes: bool = True) -> str:
    """One line: tokens, speed, share per adapter, and why it stopped where that is not the end of the
    turn. speed, routes: False leaves these out."""
    parts = [f"{len(answer.events)} tokens"]
    if answer.tokens_per_second and speed:
        parts.append(f"{answer.tokens_per_second:.1f} tokens/s")
    ranked = sorted(shares(answer.events).items(), key=lambda item: -item[1])
    if ranked and routes:
        parts.append("  ".join(f"{palette.name(index)} {100 * part:.0f} %" for index, part in ranked))
    if answer.stop in _STOPS:
        parts.append(_STOPS[answer.stop])
    return " | ".join(parts)


def share_bars(events: list[TokenEvent], palette: Palette, width: int) -> Text:
    """A bar per adapter that took tokens, the largest first; width: cells of the screen."""
    ranked = sorted(shares(events).items(), key=lambda item: -item[1])
    labels = {index: palette.label(index) for index, _ in ranked}
    size = min(max((label.cell_len for label in labels.values()), default=0), max(8, width // 2))
    room = max(4, min(_BAR, width - size - 8))
    text = Text(end="")
    for number, (index, share) in enumerate(ranked):
        label, filled = labels[index], max(1, round(share * room))
        label.truncate(size, overflow="crop", pad=True)
        # the base has no tint, and a terminal without colours has none at all: letters fill those bars
        fill = palette.glyph(index) if index == BASE or not palette.colours else " "
        text.append("\n" if number else "").append_text(label).append(" ")
        text.append(fill * filled, palette.style(index)).append(" " * (room - filled))
        text.append(f" {100 * share:3.0f} %")
    return text


def why(
    event: TokenEvent,
    number: int,
    palette: Palette,
    muted: Collection[str] = (),
    layers: Sequence[tuple[int, int]] = (),
    note: str = "",
    hold: float = 0.0,
) -> Text:
    """The route of answer token `number` (from 1) in words: gates, scores, runner-up, margin per layer group.

    Scores are the router's probabilities before temperature and muting; margin: best minus second. layers:
    [first, end) of each group; with several groups each gets one line. note: what is known of training. hold:
    the margin below which the router keeps the adapter of the token before.
    """
    route = event.route
    shown = printable(event.text) or "(part of a letter)"
    text = Text(
        f"token {number} '{shown}' (id {event.id}, probability {math.exp(event.logprob):.3f})\n", end=""
    )
    many = len(route.indices) > 1
    for group, (indices, gates) in enumerate(zip(route.indices, route.gates, strict=True)):
        where = _layers(layers, group) if many else "takes "
        taken = ", ".join(
            palette.name(i) if i == BASE else f"{palette.name(i)} at gate {g:.2f}"
            for i, g in zip(indices, gates, strict=True)
            if i != BASE or g > 0 or len(indices) == 1
        )
        text.append(f"{where}{taken}")
        if not route.scores:
            text.append("\nno router decided: the route was fixed (/only, or --route)\n")
            continue
        ranked = sorted(route.scores[group], key=lambda item: -item[1])
        if many:
            best = ", ".join(f"{name} {math.exp(logp):.3f}" for name, logp in ranked[:2])
            text.append(f"; scores {best}{_margin(ranked)}\n")
        else:
            text.append("\n").append(_scores(ranked, muted))
            best = next((name for name, _ in ranked if name not in muted), "")
            if hold > 0 and best and palette.name(route.top) != best:
                text.append(f"  kept from the token before: {best} is not better by the margin {hold:g}\n")
    if note:
        text.append(f"{note}\n")
    if route.scores:
        text.append("decided at the token before it, from what had been read until then\n")
    text.rstrip()
    return text


def _layers(layers: Sequence[tuple[int, int]], group: int) -> str:
    if group >= len(layers):
        return f"layer group {group + 1}: "
    first, end = layers[group]
    return f"layer {first}: " if end == first + 1 else f"layers {first}-{end - 1}: "


def _scores(ranked: Sequence[tuple[str, float]], muted: Collection[str]) -> str:
    """Every expert's score on a line, then runner-up and margin."""
    size = max(cell_len(name) for name, _ in ranked)
    lines = [
        f"  {name:<{size}}  {math.exp(logp):.3f}{'  muted' if name in muted else ''}\n"
        for name, logp in ranked
    ]
    if len(ranked) > 1:
        lines.append(f"  runner-up {ranked[1][0]}{_margin(ranked)}\n")
    return "".join(lines)


def _margin(ranked: Sequence[tuple[str, float]]) -> str:
    if len(ranked) < 2:
        return ""
    return f", margin {math.exp(ranked[0][1]) - math.exp(ranked[1][1]):.3f}"
