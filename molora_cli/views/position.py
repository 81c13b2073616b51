"""Shares per adapter along the text as stacked bars, at any width from 40 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.core.stats import Stats
from molora_cli.core.trace import Trace
from molora_cli.views.coloured import chosen_groups, layer_range, skipped_note
from molora_cli.views.histogram import template_note
from molora_cli.views.palette import BASE, Palette


class Positions:
    """A bar per step of places in the text (1, 2-3, 4-7, ...) with the tokens it is made of behind it."""

    def __init__(self, trace: Trace, stats: Stats) -> None:
        self.trace = trace
        self.stats = stats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        palette = Palette(self.trace.adapters, console)
        yield Text("Share of tokens by first choice, by place in the text (behind: tokens there)")
        if note := template_note(self.stats):
            yield Text(note, style="dim")
        chosen = chosen_groups(len(self.stats.groups))
        for number in chosen:
            group = self.stats.groups[number]
            if len(self.stats.groups) > 1:
                yield Text(
                    f"layers {layer_range(self.trace, number)}", style="bold" if palette.colours else ""
                )
            names = [place(i) for i in range(len(group.positions))]
            counts = [f"{n:,}" for n in group.position_tokens]
            label, tail = (max((len(t) for t in texts), default=0) for texts in (names, counts))
            room = max(8, options.max_width - label - tail - 3)
            for name, count, shares in zip(names, counts, group.positions, strict=True):
                line = Text(f"{name:>{label}} ").append_text(self._bar(shares, palette, room))
                yield line.append(f" {count:>{tail}}")
            if not names:
                yield Text("no token", style="dim")
        if note := skipped_note(len(self.stats.groups), chosen):
            yield Text(note, style="dim")
        yield palette.legend(width=options.max_width, base=self.stats.knows_base)
        yield Text()

    def _bar(self, shares: Sequence[float], palette: Palette, room: int) -> Text:
        bar = Text(end="")
        columns = [*range(len(self.trace.adapters)), BASE]
        for index, cells in zip(columns, split_cells(shares, room), strict=True):
            # the base has no tint, and a terminal without colours has none at all: letters fill those cells
            letter = palette.glyph(index)
            plain = index == BASE or not palette.colours
            fill = letter * cells if plain else letter.center(cells) if cells else ""
            bar.append(fill, palette.style(index))
        return bar


def place(number: int) -> str:
    """The tokens that step `number` holds, the first of a text being 1."""
    first, last = 2**number, 2 ** (number + 1) - 1
    return str(first) if first == last else f"{first:,}-{last:,}"


def split_cells(shares: Sequence[float], cells: int) -> list[int]:
    """`cells` divided by shares that sum to 1, by largest remainder; all zero where the shares are."""
    exact = [share * cells for share in shares]
    found = [int(e) for e in exact]
    missing = round(sum(exact)) - sum(found)
    order = sorted(range(len(exact)), key=lambda i: found[i] - exact[i])
    for i in order[:missing]:
        found[i] += 1
    return found
