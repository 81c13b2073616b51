"""What `molora bench` found, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.text import printable
from molora_cli.views.tables import Cell, Rows

_EXPLAINED = (
    "ratios are taken within a round, median [quartiles], below 1 = faster than what is named; reading, "
    "product: share of the ceiling that the least bytes and operations make"
)


class BenchView:
    """document: what `core.bench.job.run` returned."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self.document
        machine, settings = found["machine"], found["settings"]
        yield Text(f"{found['bench']}: {printable(found['case'])}", style="bold")
        yield Text(
            f"{settings['dtype']}, {settings['threads']} thread(s), backend {found['backend']}, "
            f"{found['clock']}; {printable(machine['machine'])}, {machine['cores']} cores, "
            f"load {machine['load']}, {' '.join(machine['features'])}",
            style="dim",
        )
        yield Text("; ".join(_ceiling(name, c) for name, c in found["ceilings"].items()), style="dim")
        held = {r for side in found["sides"] for r in side["ratios"]}
        references = [side["name"] for side in found["sides"] if side["name"] in held]
        # each side against another one: named in the cell
        single = len(held) > 1 and all(len(side["ratios"]) < 2 for side in found["sides"])
        columns = ["", "ms", *(["to"] if single else [f"to {r}" for r in references])]
        table = []
        for side in found["sides"]:
            row: list[Cell] = [printable(side["name"]), f"{side['seconds']['median'] * 1e3:.2f}"]
            if single:
                row.append("".join(f"{_spread(v, 1, 2)} {r}" for r, v in side["ratios"].items()))
            else:
                row += [_spread(side["ratios"].get(r), 1, 2) for r in references]
            table.append([*row, _percent(side["of_reading"]), _percent(side["of_product"])])
        yield Rows([*columns, "reading", "product"], table)
        yield Text(f"ms: {found['unit']}, median of {settings['rounds']} rounds; {_EXPLAINED}", style="dim")
        for side in found["sides"]:
            few = side["seconds"]["rounds"]
            more = f"; {few} rounds only" if few < settings["rounds"] else ""
            yield Text.assemble((printable(side["name"]), "bold"), f": {printable(_said(side))}{more}")
        if found["compiled"] is not None:
            graphs = found["compiled"]
            yield Text(f"graphs compiled: {graphs['graphs']}, again while timing: {graphs['recompiled']}")


def _ceiling(name: str, one: Mapping[str, Any]) -> str:
    title = one["title"].removeprefix("ceiling: ")
    return f"{name} ceiling {_spread(one, 1, 1)} {one['unit']} ({title})"


def _spread(value: Mapping[str, Any] | None, scale: float, digits: int) -> str:
    """ "1.06 [1.02, 1.10]"; "" where there is nothing."""
    if value is None:
        return ""
    middle, low, high = (f"{value[key] * scale:.{digits}f}" for key in ("median", "p25", "p75"))
    return f"{middle} [{low}, {high}]"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _said(side: Mapping[str, Any]) -> str:
    """Title, paths, changes of route and notes of a side."""
    parts = [side["title"]]
    parts += [f"{count} modules: {way}" for way, count in side.get("paths", {}).items()]
    if "route_changes" in side:
        parts.append(f"route changes at {_percent(side['route_changes'])} of the tokens")
    if "memory" in side:
        parts.append(f"memory {side['memory']:.2f} of base and adapters")
    first = side.get("first_token_seconds")
    if first is not None:
        parts.append(f"first token after {_spread(first, 1, 2)} s")
    return "; ".join([*parts, *side["notes"]])
