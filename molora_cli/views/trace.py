"""A trace in a terminal: one view of it, or the ones that say most, in turn."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.core.agreement import Agreement
from molora_cli.core.stats import Stats
from molora_cli.core.trace import Trace
from molora_cli.text import shorten
from molora_cli.views.coloured import ColouredDocuments
from molora_cli.views.figure import View
from molora_cli.views.heatmap import Heatmap
from molora_cli.views.histogram import Histogram
from molora_cli.views.position import Positions
from molora_cli.views.tables import Rows, StatsView


class TraceView:
    """view: which one alone; None: coloured text, shares, layers where they differ, and the tables.

    tokens: False leaves the coloured text out; limit: how many tokens of it.
    """

    def __init__(
        self, trace: Trace, stats: Stats, *, view: View | None = None, tokens: bool | None, limit: int
    ) -> None:
        self.trace = trace
        self.stats = stats
        self.view = view
        self.tokens = tokens
        self.limit = limit
        self._compared: tuple[Agreement | None, tuple[str, str]] | None = None

    def compare(self, found: Agreement | None, names: tuple[str, str]) -> None:
        """Add how far a second trace agrees. names: of both traces."""
        self._compared = found, names

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        trace, stats = self.trace, self.stats
        if self.view == "heatmap":
            yield Heatmap(trace, stats)
        elif self.view == "position":
            yield Positions(trace, stats)
        if self.view in (None, "tokens") and self.tokens is not False:
            yield ColouredDocuments(trace, limit=self.limit, template=stats.template_counted)
        if self.view in (None, "histogram"):
            yield Histogram(trace, stats)
        if self.view is None:
            yield Text()
            if trace.groups > 1:
                yield Heatmap(trace, stats)
                yield Text()
            yield StatsView(trace, stats)
        if self._compared is not None:
            yield from _agreement(*self._compared)


def _agreement(found: Agreement | None, names: tuple[str, str]) -> RenderResult:
    first, second = (shorten(name, 60) for name in names)
    yield Text()
    if found is None:
        yield Text(f"{second} holds other text, so no token can be compared")
        return
    share = 100 * found.agreed / max(1, found.tokens)
    yield Text(f"{share:.1f} % of {found.tokens:,} tokens take an expert of the same name in both")
    yield Text(f"rows {first}, columns {second}, tokens", style="dim")
    rows, columns = found.names
    yield Rows(
        ["", *columns], [[name, *map(str, line)] for name, line in zip(rows, found.matrix, strict=True)]
    )
