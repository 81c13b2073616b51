"""What `molora eval` found, as tables: the gain recovered, NLLs, where tokens went, differences, answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from molora_cli.text import printable
from molora_cli.views.tables import Cell, Rows

_RECOVERED = (
    "recovered, %: (base - x) / (base - own) of the NLL per completion token, mean over domains and each "
    "domain; [95 % interval over documents]"
)


class EvaluationView:
    """document: what `core.evaluation.job.evaluate` returned."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for name, one in self.document["sets"].items():
            tokens = f"{one['tokens']:,} completion tokens"
            yield Text(f"{printable(name)}: {one['documents']} documents, {tokens}", style="bold")
            yield from _nll(one) if one["blended"] else _shares(one)
            yield from _routing(one)
            yield from _differences(one)
            yield Text()
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


def _shares(one: dict[str, Any]) -> RenderResult:
    domains = one["domains"]
    table = []
    for row in one["rows"]:
        found = row["recovered"]
        line: list[Cell] = [_named(row), _interval(found["mean"])]
        line += [_point(found["domains"].get(d)) for d in domains]
        line += [_point(row["nll"][d], 1, 3) for d in domains]
        table.append(line)
    shown = [printable(d) for d in domains]
    yield Rows(["", "recovered", *shown, *(f"NLL {d}" for d in shown)], table)
    yield Text(_RECOVERED, style="dim")


def _nll(one: dict[str, Any]) -> RenderResult:
    table: list[Sequence[Cell]] = [
        [_named(row), _interval(row["nll_per_token"], 1, 4)] for row in one["rows"]
    ]
    yield Rows(["", "NLL per completion token"], table)
    yield Text(
        "skills are blended in each token: there is no own adapter, and nothing to recover", style="dim"
    )


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


def _differences(one: dict[str, Any]) -> RenderResult:
    wanted = {row["name"] for row in one["rows"] if row["group"] == "router" and row["default"]}
    found = [d for d in one["differences"] if d["router"] in wanted]
    if not found:
        return
    scale, digits = (100, 1) if found[0]["of"] == "recovered" else (1, 4)
    table: list[Sequence[Cell]] = [
        [f"{printable(d['router'])} - {printable(d['baseline'])}", _interval(d, scale, digits)] for d in found
    ]
    unit = "points of recovered" if found[0]["of"] == "recovered" else "NLL (below 0: the router is better)"
    yield Rows(["paired difference", unit], table)


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
