"""Layers against adapters as a map of shares, at any width from 40 columns.

Every cell is a number, so that a terminal without colours shows the same map: percent where the adapters fit
beside each other, else one digit for tenths.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.core.stats import Part, Stats
from molora_cli.core.trace import Trace
from molora_cli.text import printable, shorten
from molora_cli.views.coloured import layer_range
from molora_cli.views.histogram import template_note
from molora_cli.views.palette import BASE, Palette

_WIDE = 4  # cells of a column with percent, the gap included
_LABEL = 16
_CORNER = "layers"


class Heatmap:
    """Rows are groups of layers, a block per domain and one for all text; with one group they are domains."""

    def __init__(self, trace: Trace, stats: Stats) -> None:
        self.trace = trace
        self.stats = stats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        palette = Palette(self.trace.adapters, console)
        columns = [*range(len(self.trace.adapters)), *([BASE] if self.stats.knows_base else [])]
        blocks = self._blocks()
        label = min(_LABEL, max([len(_CORNER), *(cell_len(name) for _, rows in blocks for name, _ in rows)]))
        room = options.max_width - label - 1
        wide = _WIDE * len(columns) <= room
        unit = "in percent" if wide else "in tenths (X all, . less than half of one)"
        yield Text(f"Share of tokens by first choice, {unit}")
        if self.trace.groups == 1:
            yield Text("one route holds for all layers; the rows are domains", style="dim")
        if note := template_note(self.stats):
            yield Text(note, style="dim")
        size = _WIDE if wide else 1
        each = max(1, room // size)
        for title, rows in blocks:
            if title:
                yield Text(title, style="bold" if palette.colours else "")
            for start in range(0, len(columns), each):
                yield from self._table(rows, columns[start : start + each], palette, label, wide)
        yield palette.legend(width=options.max_width, base=self.stats.knows_base)
        yield Text()

    def _blocks(self) -> list[tuple[str, list[tuple[str, Part]]]]:
        """(title, [(row name, what it holds)]) for each block."""
        groups = self.stats.groups
        first = groups[0]
        if len(groups) == 1:
            parts = first.domains if len(first.domains) == 1 else [*first.domains, first.total]
            return [("", [(shorten(part.label, _LABEL), part) for part in parts])]
        layers = [layer_range(self.trace, g) for g in range(len(groups))]
        blocks = [(_title(first.total), [(n, g.total) for n, g in zip(layers, groups, strict=True)])]
        if len(first.domains) > 1:
            for i, domain in enumerate(first.domains):
                blocks.append(
                    (_title(domain), [(n, g.domains[i]) for n, g in zip(layers, groups, strict=True)])
                )
        return blocks

    def _table(
        self, rows: list[tuple[str, Part]], columns: list[int], palette: Palette, label: int, wide: bool
    ) -> RenderResult:
        corner = Text(_CORNER if self.trace.groups > 1 else "", style="dim", end="")
        corner.truncate(label, overflow="crop", pad=True)
        head = Text().append_text(corner).append(" ")
        for index in columns:
            glyph = palette.glyph(index)
            head.append(f" {glyph:>2} " if wide else glyph)
        yield head
        for name, part in rows:
            line = Text(name)
            line.truncate(label, overflow="crop", pad=True)
            line.append(" ")
            for index in columns:
                share = part.share[index]
                shown = f"{100 * share:3.0f} " if wide else _tenth(share)
                # the tint starts at a third of the hue: below half a percent there is none
                line.append(shown, palette.style(index, share) if share >= 0.005 else None)
            yield line


def _tenth(share: float) -> str:
    if share < 0.05:
        return "." if share > 0 else " "
    return "X" if share >= 0.95 else str(round(10 * share))


def _title(part: Part) -> str:
    name = printable(part.label)
    return f"{name}  {part.tokens:,} tokens, {part.documents:,} text{'' if part.documents == 1 else 's'}"
