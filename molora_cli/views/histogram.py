"""Shares per adapter and domain as bars against the uniform line, at any width from 40 columns."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.core.stats import Part, Stats
from molora_cli.core.trace import Trace
from molora_cli.text import printable
from molora_cli.views.coloured import chosen_groups, layer_range, skipped_note
from molora_cli.views.palette import BASE, Palette

_NAME_CELLS = 20
_MOST = 14  # rows of one domain; more are summed in a last line


def template_note(stats: Stats) -> str:
    """What became of the tokens that a chat template added; empty where there are none."""
    if not stats.template_tokens:
        return ""
    if stats.template_counted:
        return f"the chat template's {stats.template_tokens:,} tokens are counted too"
    return f"template tokens, {stats.template_tokens:,}, are left out; --template counts them"


class Histogram:
    """One block of bars per domain, and one for all text where there are several; k > 1 adds mean gates."""

    def __init__(self, trace: Trace, stats: Stats) -> None:
        self.trace = trace
        self.stats = stats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        palette = Palette(self.trace.adapters, console)
        width, ascii_only = options.max_width, options.ascii_only
        line = "|" if ascii_only else "│"
        yield Text(
            f"Share of tokens by first choice ({line} = uniform, 1 of {self.stats.experts}: "
            f"{100 * self.stats.uniform:.0f} %){'; in brackets the mean gate' if self.trace.k > 1 else ''}"
        )
        note = template_note(self.stats)
        if note:
            yield Text(note, style="dim")
        chosen = chosen_groups(len(self.stats.groups))
        for number in chosen:
            group = self.stats.groups[number]
            if len(self.stats.groups) > 1:
                yield Text(
                    f"layers {layer_range(self.trace, number)}", style="bold" if palette.colours else ""
                )
            parts = group.domains if len(group.domains) == 1 else [*group.domains, group.total]
            for part in parts:
                yield from self._block(part, palette, width, line)
        if note := skipped_note(len(self.stats.groups), chosen):
            yield Text(note, style="dim")

    def _block(self, part: Part, palette: Palette, width: int, line: str) -> list[Text]:
        name = printable(part.label)
        count = f"{part.tokens:,} tokens, {part.documents:,} text{'' if part.documents == 1 else 's'}"
        rows = [Text(name, style="bold" if palette.colours else "").append(f"  {count}", style="dim")]
        columns = self._columns(part)
        names = [palette.label(i) for i in columns[:_MOST]]
        label = min(_NAME_CELLS, max((n.cell_len for n in names), default=0))
        figures = 15 if self.trace.k > 1 else 7
        room = max(8, width - 3 - label - figures)
        for index, text in zip(columns, names, strict=False):
            share, mass = part.share[index], part.mass[index]
            text.truncate(label, overflow="ellipsis" if line != "|" else "crop", pad=True)
            row = Text("  ").append_text(text).append(" ")
            row.append_text(self._bar(index, share, palette, room, line))
            row.append(f" {100 * share:4.0f} %")
            if self.trace.k > 1:
                row.append(f" ({100 * mass:3.0f} %)")
            rows.append(row)
        if len(columns) > _MOST:
            rest = sum(part.share[i] for i in columns[_MOST:])
            rows.append(Text(f"  {len(columns) - _MOST} others together {100 * rest:.0f} %"))
        return rows

    def _columns(self, part: Part) -> list[int]:
        """Adapters in bundle order and the base where it can be taken; beyond `_MOST` the largest first."""
        columns = list(range(len(self.trace.adapters)))
        if self.stats.knows_base:
            columns.append(BASE)
        if len(columns) > _MOST:
            columns.sort(key=lambda i: -part.share[i])
        return columns

    def _bar(self, index: int, share: float, palette: Palette, room: int, line: str) -> Text:
        filled = round(share * room)
        if share > 0:
            filled = max(1, filled)
        # the base has no tint, and a terminal without colours has none at all: letters fill those bars
        fill = palette.glyph(index) if index == BASE or not palette.colours else " "
        cells = [fill] * filled + [" "] * (room - filled)
        cells[min(room - 1, round(self.stats.uniform * room))] = line
        return Text().append("".join(cells[:filled]), palette.style(index)).append("".join(cells[filled:]))
