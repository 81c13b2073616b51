"""A traced text with every token in the colour (or behind the letter) of its first choice."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.core.pieces import split_tail
from molora_cli.core.trace import BASE_EXPERT, Trace
from molora_cli.text import printable
from molora_cli.views.palette import BASE, Palette

NEWLINE = "⏎"


def coloured_text(
    trace: Trace,
    palette: Palette,
    tokens: slice,
    *,
    group: int = 0,
    ascii_only: bool = False,
    template: bool = False,
) -> Text:
    """The tokens of a range as one text: the tint follows the gate, ⏎ stands before a line break of the text.

    A character cut over several tokens takes the colour of the one that completes it. Tokens of a chat
    template are dim, or like any other where `template` says so.
    """
    first, gates = trace.first(group)
    text = Text()
    rest = ""
    previous: int | None = None
    for i in range(tokens.start, tokens.stop):
        whole, rest = split_tail(rest + trace.text(int(trace.token_ids[i])))
        if rest and not whole:
            continue
        index = int(first[i])
        mark = "" if ascii_only else NEWLINE
        shown = whole.replace("\r\n", "\n").replace("\n", mark + "\n")
        token = palette.token(shown, index, float(gates[i]), previous)
        if not template and trace.content is not None and not trace.content[i]:
            token.stylize("dim")
        text.append_text(token)
        previous = index
    if rest:
        text.append("\ufffd")
    return text


class ColouredDocuments:
    """Coloured documents with headings and a legend, cut after `limit` tokens with a note on what is left.

    template: a chat template's tokens count in the legend's shares, and are not dim.
    """

    def __init__(self, trace: Trace, *, limit: int, group: int | None = None, template: bool = False) -> None:
        self.trace = trace
        self.limit = limit
        self.group = group
        self.template = template

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        trace, palette = self.trace, Palette(self.trace.adapters, console)
        groups = chosen_groups(trace.groups) if self.group is None else [self.group]
        counted = trace if self.template else trace.without_template()
        shown = 0
        for number, tokens in self._chosen():
            if len(trace.starts) > 1:
                length = int(trace.lengths()[number])
                yield Text(self._heading(number, length), style="bold" if palette.colours else "")
            for group in groups:
                if trace.groups > 1:
                    yield Text(f"layers {layer_range(trace, group)}", style="dim")
                yield coloured_text(
                    trace,
                    palette,
                    tokens,
                    group=group,
                    ascii_only=options.ascii_only,
                    template=self.template,
                )
            yield Text()
            shown += tokens.stop - tokens.start
        if shown < len(trace):
            note = f"{shown:,} of {len(trace):,} tokens are shown; the statistics cover all"
            yield Text(note if counted is trace else f"{note} messages", style="dim")
        if self.group is None and (note := skipped_note(trace.groups, groups)):
            yield Text(note, style="dim")
        shares = _shares(counted, groups[0])
        base = BASE_EXPERT in trace.experts or not trace.experts or shares[BASE] > 0
        yield palette.legend(shares, width=options.max_width, base=base)
        yield Text()  # the legend leaves its line open
        if counted is not trace and console.color_system is not None:
            yield Text("dim: the chat template", style="dim")

    def _chosen(self) -> list[tuple[int, slice]]:
        """Documents and what is shown of each: with several domains the first text of each, else in order."""
        trace = self.trace
        ranges = list(trace.documents())
        filled = [i for i, tokens in enumerate(ranges) if tokens.stop > tokens.start]
        firsts = list({trace.domain(i): i for i in reversed(filled)}.values())[::-1]
        each = max(1, self.limit // len(firsts)) if len(firsts) > 1 else self.limit
        left, chosen = self.limit, []
        for i in firsts if len(firsts) > 1 else filled:
            size = min(each, left, ranges[i].stop - ranges[i].start)
            if size > 0:
                chosen.append((i, slice(ranges[i].start, ranges[i].start + size)))
                left -= size
        return chosen

    def _heading(self, number: int, length: int) -> str:
        domain = self.trace.domain(number)
        name = f"{printable(domain)}, " if domain else ""
        return f"{name}text {number + 1} ({length:,} tokens)"


def chosen_groups(count: int) -> list[int]:
    """The groups of layers that are shown one after the other: up to three all, else ends and middle."""
    return list(range(count)) if count <= 3 else [0, count // 2, count - 1]


def skipped_note(count: int, shown: Sequence[int]) -> str:
    """What is not shown of `count` groups of layers, and where it is; empty where all are."""
    if len(shown) == count:
        return ""
    note = f"{len(shown)} of {count} groups of layers are shown"
    return f"{note}; all of them: --view heatmap, or --report FILE.html"


def layer_range(trace: Trace, group: int) -> str:
    """`0-9` for a group of layers, `4` for one of a single layer, from the trace's own record."""
    ranges = trace.meta.get("groups") or []
    if group >= len(ranges):
        return f"of group {group}"
    first, end = ranges[group]
    return f"{first}-{last}" if (last := int(end) - 1) != first else str(first)


def _shares(trace: Trace, group: int) -> dict[int, float]:
    first, _ = trace.first(group)
    total = max(1, len(first))
    return {i: float((first == i).sum()) / total for i in (*range(len(trace.adapters)), BASE)}
