"""What `molora eval` found, as tables: the gain recovered, who is ahead, NLLs, where tokens went, what rows
cost, answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.text import printable
from molora_cli.views.tables import Cell, Rows

_RECOVERED = (
    "recovered, %: (base - x) / (base - own) of the NLL per completion token, mean over domains and each "
    "domain; [95 % interval over documents]"
)
_AHEAD = (
    "{first} ahead by: its recovered share minus the row's, in points; paired over documents, so that an "
    "interval above 0 says that it is better than the row"
)
_AHEAD_NLL = (
    "{first} ahead by: the row's NLL minus its own, in nats; paired over documents, so that an interval "
    "above 0 says that it is better than the row"
)


class EvaluationView:
    """document: what `core.evaluation.job.evaluate` returned."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sets = self.document["sets"]
        if "tuned" in self.document:
            yield from _tuned(self.document["tuned"])
        for name, one in sets.items():
            tokens = f"{one['tokens']:,} completion tokens"
            yield Text(f"{printable(name)}: {one['documents']} documents, {tokens}", style="bold")
            yield from _nll(one) if one["blended"] else _shares(one)
            yield from _routing(one)
            yield from _routers_apart(one)
            yield Text()
        if len(sets) > 1:
            yield from _summary(sets)
        yield from _costs(self.document)
        for name, models in self.document.get("tasks", {}).items():
            yield from _answers(name, models)
        if "lm_eval" in self.document:
            yield from _harness(self.document["lm_eval"])


def _interval(value: dict[str, Any] | None, scale: float = 100, digits: int = 1) -> str:
    """ "98.4 [97.8, 99.0]"; "" where there is nothing."""
    if value is None or value["value"] is None:
        return ""
    said = f"{value['value'] * scale:.{digits}f}"
    if value["low"] is None:
        return said
    return f"{said} [{value['low'] * scale:.{digits}f}, {value['high'] * scale:.{digits}f}]"


def _point(value: dict[str, Any] | None, scale: float = 100, digits: int = 1) -> str:
    return "" if value is None or value["value"] is None else f"{value['value'] * scale:.{digits}f}"


def _named(row: dict[str, Any]) -> Text:
    return Text(printable(row["name"]), style="bold" if row["group"] == "router" and row["default"] else "")


def _ahead(one: dict[str, Any]) -> dict[str, str]:
    """Row -> by how much the first router is better than it, as text."""
    first = one["first_router"]
    said = {}
    for d in one["differences"]:
        if d["router"] == first:
            if d["of"] == "recovered":
                said[d["baseline"]] = _signed(d, 100, 1)
            else:  # of two NLLs the lower one is better
                turned = {"value": d["value"], "low": d["high"], "high": d["low"]}
                said[d["baseline"]] = _signed(turned, -1, 4)
    return said


def _signed(value: dict[str, Any], scale: float, digits: int) -> str:
    if value["value"] is None or value["low"] is None:
        return ""
    low, high = (f"{value[k] * scale + 0.0:+.{digits}f}" for k in ("low", "high"))
    return f"{value['value'] * scale + 0.0:+.{digits}f} [{low}, {high}]"


def _shares(one: dict[str, Any]) -> RenderResult:
    domains, ahead, first = one["domains"], _ahead(one), one["first_router"]
    shown = [printable(d) for d in domains]
    shares: list[Sequence[Cell]] = []
    for row in one["rows"]:
        found = row["recovered"]
        line: list[Cell] = [_named(row), _interval(found["mean"])]
        line += [] if first is None else [ahead.get(row["name"], "")]
        shares.append([*line, *(_point(found["domains"].get(d)) for d in domains)])
    gap = [] if first is None else [f"{printable(first)} ahead by"]
    yield Rows(["", "recovered", *gap, *shown], shares)
    yield Text(_RECOVERED, style="dim")
    if first is not None:
        yield Text(_AHEAD.format(first=printable(first)), style="dim")
    nlls: list[Sequence[Cell]] = [
        [_named(row), *(_point(row["nll"][d], 1, 3) for d in domains)] for row in one["rows"]
    ]
    yield Rows(["NLL per completion token", *shown], nlls)


def _nll(one: dict[str, Any]) -> RenderResult:
    ahead, first = _ahead(one), one["first_router"]
    table: list[Sequence[Cell]] = [
        [
            _named(row),
            _interval(row["nll_per_token"], 1, 4),
            *([] if first is None else [ahead.get(row["name"], "")]),
        ]
        for row in one["rows"]
    ]
    gap = [] if first is None else [f"{printable(first)} ahead by"]
    yield Rows(["", "NLL per completion token", *gap], table)
    yield Text(
        "skills are blended in each token: there is no own adapter, and nothing to recover", style="dim"
    )
    if first is not None:
        yield Text(_AHEAD_NLL.format(first=printable(first)), style="dim")


def _summary(sets: dict[str, Any]) -> RenderResult:
    """All sets in one table, and what the first router is ahead by in another."""
    names = list(dict.fromkeys(row["name"] for one in sets.values() for row in one["rows"]))
    found = {n: {row["name"]: row for row in one["rows"]} for n, one in sets.items()}
    ahead = {n: _ahead(one) for n, one in sets.items()}
    columns = [f"{printable(n)}{' (NLL)' if one['blended'] else ''}" for n, one in sets.items()]
    table: list[Sequence[Cell]] = []
    gaps: list[Sequence[Cell]] = []
    for name in names:
        rows = {n: found[n].get(name) for n in sets}
        title = _named(next(row for row in rows.values() if row is not None))
        table.append([title, *(_figure(row) for row in rows.values())])
        if any(name in said for said in ahead.values()):
            gaps.append([title, *(ahead[n].get(name, "") for n in sets)])
    yield Rows(["all sets: recovered, %", *columns], table)
    yield Text()
    if gaps:
        first = next(one["first_router"] for one in sets.values() if one["first_router"] is not None)
        yield Rows([f"{printable(first)} ahead by", *columns], gaps)
        yield Text("above 0: it is better than the row", style="dim")
        yield Text()


def _figure(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["recovered"] is None:
        return _interval(row["nll_per_token"], 1, 3)
    return _interval(row["recovered"]["mean"])


def _costs(document: dict[str, Any]) -> RenderResult:
    """Passes, CPU time and keys and values of each row, over all sets."""
    kept = document.get("cache_bytes_per_token")
    rows: dict[str, list[dict[str, Any]]] = {}
    for one in document["sets"].values():
        for row in one["rows"]:
            rows.setdefault(row["name"], []).append(row)
    if not rows:
        return
    timed = any(row["time"] is not None for found in rows.values() for row in found)
    table: list[Sequence[Cell]] = []
    for found in rows.values():
        caches = max(row["caches"] for row in found)
        size = "none" if not caches else "" if kept is None else f"{caches * kept:,.0f}"
        times = [_range(row["time"] for row in found)] if timed else []
        table.append([_named(found[0]), _range(row["passes"] for row in found), *times, size])
    yield Rows(["cost", "passes", *(["CPU time, x base"] if timed else []), "KV bytes/token"], table)
    yield Text(
        "passes of the base per token, from the set with fewest to the one with most"
        + ("; CPU time of scoring a token over the base's, taken in turns" if timed else "")
        + "; keys and values held per token (none: the whole text runs again for every token)",
        style="dim",
    )
    yield Text()


def _range(values: Iterable[float | None]) -> str:
    known = [v for v in values if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    return f"{low:.3g}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g}"


def _tuned(tuned: dict[str, Any]) -> RenderResult:
    """What was tried on the rows of --tune."""
    sets = list(tuned["sets"])
    said = ", ".join(f"{printable(n)} {facts['rows']}" for n, facts in tuned["sets"].items())
    yield Text(f"settings chosen on other rows ({said})", style="bold")
    table: list[Sequence[Cell]] = []
    for one in tuned["tried"]:
        mark = Text(printable(one["row"]), style="bold" if one["chosen"] else "")
        shares = [f"{100 * one['sets'][n]:.1f}" for n in sets]
        table.append([mark, "<-" if one["chosen"] else "", f"{100 * one['recovered']:.1f}", *shares])
    yield Rows(["tried", "", "recovered, %, mean", *map(printable, sets)], table)
    yield Text()


def _routing(one: dict[str, Any]) -> RenderResult:
    routed = [row for row in one["rows"] if row["routing"] is not None]
    if not routed:
        return
    takers = list(next(iter(routed[0]["routing"]["usage"].values()), {}))
    table: list[Sequence[Cell]] = []
    for row in routed:
        found = row["routing"]
        right = [_share(found["accuracy"][part]) for part in ("prompt", "completion", "template")]
        passes = "" if row["passes"] is None else f"{row['passes']:g}"
        table.append([_named(row), *right, f"{found['switches_per_100']:.1f}", passes])
    yield Rows(["", "right: prompt", "answer", "template", "switches", "passes"], table)
    yield Text(
        "first choice right, % of tokens; switches per 100 neighbouring tokens; passes of the base per token",
        style="dim",
    )
    row = next((r for r in routed if r["default"]), routed[0])
    usage = [
        [printable(domain), *(_share(shares[t]) for t in takers)]
        for domain, shares in row["routing"]["usage"].items()
    ]
    yield Rows([f"{printable(row['name'])} takes, %", *(f"→{printable(t)}" for t in takers)], usage)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _routers_apart(one: dict[str, Any]) -> RenderResult:
    """Where several routers were measured: the first one against the others, domain by domain."""
    defaults = {row["name"] for row in one["rows"] if row["group"] == "router" and row["default"]}
    first = one["first_router"]
    found = [d for d in one["differences"] if d["router"] == first and d["baseline"] in defaults]
    if not found or one["blended"]:
        return
    domains = list(found[0]["domains"])
    table: list[Sequence[Cell]] = [
        [printable(d["baseline"]), *(_signed(d["domains"][n], 100, 1) for n in domains)] for d in found
    ]
    yield Rows([f"{printable(first)} ahead of", *map(printable, domains)], table)


def _answers(name: str, models: dict[str, Any]) -> RenderResult:
    metrics = [k for k, v in next(iter(models.values())).items() if isinstance(v, dict)]
    rows = next(iter(models.values()))["rows"]
    yield Text(f"{printable(name)}: answers to {rows} questions, greedy", style="bold")
    table: list[Sequence[Cell]] = []
    for model, found in models.items():
        cells = [
            f"{_interval(found[m])} ({found[m]['right']} of {found[m]['counted']})".strip() for m in metrics
        ]
        table.append([printable(model), *cells])
    yield Rows(["", *(f"{m}, %" for m in metrics)], table)
    yield Text()


def _harness(models: dict[str, Any]) -> RenderResult:
    yield Text("lm-evaluation-harness", style="bold")
    table: list[Sequence[Cell]] = []
    for model, tasks in models.items():
        for task, values in tasks.items():
            said = ", ".join(f"{k} {v:.4g}" for k, v in values.items() if "stderr" not in k)
            table.append([printable(model), printable(task), printable(said)])
    yield Rows(["", "task", "result"], table)
