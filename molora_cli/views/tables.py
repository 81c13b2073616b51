"""Facts and figures as tables that fold into one `name: value` block per row where the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from molora_cli.core.stats import Part, Spread, Stats
from molora_cli.core.trace import Trace
from molora_cli.text import printable, shorten
from molora_cli.views.coloured import chosen_groups, layer_range
from molora_cli.views.palette import BASE, Palette

Cell = str | Text
_LEGEND = (
    "switches per 100 neighbouring tokens; entropy of the scores in bits; margin of the best score over the "
    "second, mean and lowest tenth (low)"
)


class Rows:
    """A table where every column fits, else a block per row. The first column names the row."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.columns = [Text(c) for c in columns]
        self.rows = [[c if isinstance(c, Text) else Text(printable(c)) for c in row] for row in rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [max(c.cell_len for c in column) for column in zip(self.columns, *self.rows, strict=True)]
        if sum(widths) + 2 * (len(widths) - 1) <= options.max_width:
            table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
            for i, column in enumerate(self.columns):
                table.add_column(column, justify="left" if i == 0 or not self._numeric(i) else "right")
            for row in self.rows:
                table.add_row(*row)
            yield table
            return
        for row in self.rows:
            yield row[0]
            for column, cell in zip(self.columns[1:], row[1:], strict=True):
                if cell.plain:
                    yield Padding(
                        Text.assemble((f"{column.plain}: ", "dim"), cell), (0, 0, 0, 2), expand=False
                    )

    def _numeric(self, column: int) -> bool:
        return all(not c or c[0] in "0123456789-+." for c in (row[column].plain for row in self.rows))


def facts(pairs: Sequence[tuple[str, Cell | None]]) -> Table:
    """Two columns: a name, and a value that wraps under itself. Pairs without a value are left out."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None:
            table.add_row(name, value if isinstance(value, Text) else Text(printable(value)))
    return table


class BundleView:
    """What `core.inspection.bundle_facts` says."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self.document
        palette = Palette([a["name"] for a in found["adapters"]], console)
        base, router = found["base"], found["router"]
        yield facts(
            [
                ("bundle", found["path"]),
                ("base", base["id"] + (f"@{base['revision']}" if base["revision"] else "")),
                ("", base["path"] or f"not found: {base['problem']}"),
            ]
        )
        yield Text()
        yield Rows(
            ["adapter", "rank", "modules", "scale", "parameters", "dtype", "licence", "effect"],
            [self._adapter(palette.label(i), a) for i, a in enumerate(found["adapters"])],
        )
        yield Text(
            "effect: RMS change of the logits on a probe text, in percent of their own RMS", style="dim"
        )
        lines: list[tuple[str, Cell | None]] = []
        for adapter in found["adapters"]:
            lines.append(
                (printable(adapter["name"]), f"from {adapter['source']}" + _revision(adapter["revision"]))
            )
            lines += [
                ("", _targets(adapter["targets"])),
                *(("", f"note: {note}") for note in adapter["notes"]),
            ]
        yield facts(lines)
        yield Text()
        yield from _router(router, found["path"])

    def _adapter(self, label: Text, adapter: dict[str, Any]) -> list[Cell]:
        cover, effect = adapter["coverage"], adapter["effect"]
        modules = f"{cover['matched']} of {cover['in_base']}" if cover else str(adapter["modules"])
        change = (
            f"{100 * effect['rms'] / effect['base_rms']:.1f} %"
            if effect and effect["base_rms"]
            else "not measured"
        )
        scales = [f"{s:g}" for s in adapter["scales"]]
        return [
            label,
            " ".join(adapter["ranks"]) if len(adapter["ranks"]) < 4 else _range(list(adapter["ranks"])),
            modules,
            " ".join(scales) if len(scales) < 3 else _range(scales),
            f"{adapter['parameters']:,}",
            adapter["dtype"],
            shorten(adapter["licence"] or "not stated", 20),
            change,
        ]


def _range(values: list[str]) -> str:
    return f"{values[0]} to {values[-1]}"


def _revision(revision: str | None) -> str:
    return f"@{revision}" if revision else ""


def _targets(targets: dict[str, int]) -> str:
    return ", ".join(f"{name} x{count}" for name, count in targets.items())


def _router(router: dict[str, Any] | None, path: str) -> RenderResult:
    if router is None:
        yield facts([("router", f"none yet: molora train-router {path} --data NAME=FILE ...")])
        return
    yield facts([("router", router["kind"])])
    for stage in router["stages"]:
        groups = stage["groups"]
        layers = (
            ", ".join(f"{first}-{end - 1}" for first, end in groups) if len(groups) > 1 else "all together"
        )
        settings = f"top-{stage['k']}, temperature {stage['temperature']:g}, layers: {layers}"
        experts = ", ".join("base" if e == "__base__" else e for e in stage["experts"])
        yield facts([(f"  {printable(stage['kind'])}", settings), ("", f"experts: {experts}")])
    training = {k: v for k, v in router["training"].items() if isinstance(v, (str, int, float, bool))}
    if training:
        yield facts([("  training", ", ".join(f"{k} {v}" for k, v in training.items()))])


class AdapterView:
    """What `core.inspection.adapter_facts` says."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found, weights = self.document, self.document["weights"]
        refused = found["verdict"] == "refused"
        verdict = Text(found["verdict"], style="bold red" if refused else "bold green")
        rows: list[tuple[str, Cell | None]] = [
            ("adapter", found["path"]),
            ("kind", found["kind"]),
            ("verdict", verdict),
        ]
        for reason in found["reasons"]:
            where = f"{reason['field']}: " if reason["field"] else ""
            rows += [("because", f"{where}{reason['why']}"), ("remedy", reason["remedy"] or None)]
        rows += [("note", note) for note in found["notes"]]
        rows.append(("base", found["base"] or "not named"))
        hidden = ("peft_type", "task_type")
        config = {k: v for k, v in found["config"].items() if k not in hidden and v not in (False, "none")}
        rows.append(("config", ", ".join(f"{k} {_value(v)}" for k, v in config.items()) or None))
        if weights is not None:
            if weights.get("problem"):
                rows.append(("because", weights["problem"]))
            elif "ranks" in weights:
                ranks = ", ".join(f"{rank} in {count}" for rank, count in weights["ranks"].items())
                rows += [
                    ("weights", f"{weights['parameters']:,} parameters, {', '.join(weights['dtypes'])}"),
                    ("rank", f"{ranks} module{'' if weights['modules'] == 1 else 's'}"),
                    ("targets", _targets(weights["targets"])),
                ]
            else:
                rows.append(("weights", weights["note"]))
        yield facts(rows)


def _value(value: Any) -> str:
    return ", ".join(sorted(map(str, value))) if isinstance(value, list) else str(value)


class StatsView:
    """Switches, entropy and margin per domain, and the tokens each expert takes most."""

    def __init__(self, trace: Trace, stats: Stats) -> None:
        self.trace = trace
        self.stats = stats

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        palette = Palette(self.trace.adapters, console)
        for number in chosen_groups(len(self.stats.groups)):
            group = self.stats.groups[number]
            if len(self.stats.groups) > 1:
                yield Text(f"layers {layer_range(self.trace, number)}", style="bold")
            parts = group.domains if len(group.domains) == 1 else [*group.domains, group.total]
            scored = any(part.entropy for part in parts)
            columns = ["", "tokens", "switches"] + [
                "entropy",
                "margin",
                "low",
            ] * scored
            yield Rows(columns, [self._part(part, scored) for part in parts])
            yield Text(_LEGEND if scored else _LEGEND.partition(";")[0], style="dim")
            yield Text()
            yield from self._top(number, palette, options)

    def _part(self, part: Part, scored: bool) -> list[Cell]:
        switches = "" if part.switch_rate is None else f"{part.switch_rate:.1f}"
        row: list[Cell] = [part.label, f"{part.tokens:,}", switches]
        if scored:
            low = f"{part.margin.p10:.2f}" if part.margin else ""
            row += [_mean(part.entropy), _mean(part.margin), low]
        return row

    def _top(self, number: int, palette: Palette, options: ConsoleOptions) -> RenderResult:
        listed = self.stats.groups[number].top_tokens
        if not any(listed):
            return
        yield Text("Tokens taken more than the share says (taken of seen)")
        for column, tokens in enumerate(listed):
            index = BASE if column == len(self.trace.adapters) else column
            if not tokens:
                continue
            line = Text("  ").append_text(palette.label(index)).append(" ")
            room = options.max_width - line.cell_len
            for token in tokens:
                entry = f" {_quoted(token.text)} {token.taken:.0f}/{token.count}"
                if cell_len(entry) > room:
                    break
                line.append(entry)
                room -= cell_len(entry)
            yield line


def _mean(spread: Spread | None) -> str:
    return f"{spread.mean:.2f}" if spread else ""


def _quoted(text: str) -> str:
    """A token's text between quotes, blanks and breaks visible, cut to a few characters."""
    shown = text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
    return f"'{shorten(shown, 16)}'"
