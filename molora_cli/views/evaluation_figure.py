"""The recovered share of every row of every set, and the first router's lead, as one figure."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

from molora_cli.core.bundle.writing import new_file
from molora_cli.errors import InputError
from molora_cli.text import printable
from molora_cli.views import figure
from molora_cli.views.palette import HUES

_COLOURS = {"router": HUES[0], "baseline": "#707070", "oracle": "#303030", "adapter": "#a0a0a0"}


def check_figure(path: Path, *, force: bool) -> None:
    """What can be refused before any work. Raises InputError."""
    figure.check_figure(path, "histogram", force=force)


def write_figure(path: Path, document: dict[str, Any]) -> None:
    """Draw the sets where something can be recovered. Raises InputError where there is none."""
    sets = {name: one for name, one in document["sets"].items() if not one["blended"]}
    if not sets:
        raise InputError("no set has anything to recover, so there is nothing to draw", "leave out --figure")
    with new_file(path) as work:
        work.write_bytes(_drawn(sets, path.suffix.lower().lstrip(".")))


def _drawn(sets: dict[str, Any], kind: str) -> bytes:
    """One panel a set, one line a row, from the best down; below it what the first router is ahead by."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = {name: _points(one) for name, one in sets.items()}
    gaps = {name: _gaps(one) for name, one in sets.items()}
    bands = 2 if any(gaps.values()) else 1
    tallest = max(len(points) for points in panels.values())
    size = (1.6 + 3.4 * len(panels), bands * (1.2 + 0.28 * tallest))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "molora"}):
        drawing = Figure(figsize=size, layout="constrained")
        axes = drawing.subplots(bands, len(panels), squeeze=False)
        for place, (name, points) in enumerate(panels.items()):
            axis = axes[0][place]
            _draw(axis, points, 100.0)
            axis.set_xlim(left=min(0.0, *(100 * p[2]["low"] for p in points if p[2]["low"] > -1.0), 0.0))
            title = f"{_plain(name)}, {sets[name]['documents']} documents"
            axis.set_title(title, fontsize="medium", loc="left")
            axis.set_xlabel("gain recovered, %")
            if bands == 2:
                _draw(axes[1][place], gaps[name], 0.0)
                first = _plain(sets[name]["first_router"] or "")
                axes[1][place].set_xlabel(f"{first} ahead by, points", fontsize="small")
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            drawing.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


_Point = tuple[str, str, dict[str, Any]]


def _draw(axis: Any, points: list[_Point], line: float) -> None:
    """Values with their intervals from the top down, and a line to compare them with."""
    for place, (_, group, share) in enumerate(reversed(points)):
        value, low, high = (100 * share[k] for k in ("value", "low", "high"))
        axis.errorbar(
            value,
            place,
            xerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
            fmt="o",
            markersize=4,
            color=_COLOURS.get(group, "#707070"),
            capsize=2,
            linewidth=1,
        )
    axis.set_yticks(range(len(points)), [_plain(title) for title, _, _ in reversed(points)])
    axis.axvline(line, color="#303030", linestyle="--", linewidth=0.8)
    axis.tick_params(labelsize="small")
    axis.spines[["top", "right"]].set_visible(False)


def _points(one: dict[str, Any]) -> list[_Point]:
    """(row, group, share) from the best down; base and own are 0 and 100 by definition."""
    found = [
        (row["name"], row["group"], row["recovered"]["mean"])
        for row in one["rows"]
        if row["group"] not in ("base", "own") and row["recovered"]["mean"]["low"] is not None
    ]
    return sorted(found, key=lambda point: -point[2]["value"])


def _gaps(one: dict[str, Any]) -> list[_Point]:
    """(row, group, what the first router is ahead by), the rows in the order of `_points`."""
    ahead = {d["baseline"]: d for d in one["differences"] if d["router"] == one["first_router"]}
    return [
        (name, group, ahead[name])
        for name, group, _ in _points(one)
        if name in ahead and ahead[name]["low"] is not None
    ]


def _plain(text: str) -> str:
    return printable(text).replace("$", r"\$")
