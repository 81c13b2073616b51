"""The recovered share of every row of every set as one figure: points with their intervals."""

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
    """One panel a set, one line a row, from the best down."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = {name: _points(one) for name, one in sets.items()}
    tallest = max(len(points) for points in panels.values())
    size = (1.6 + 3.4 * len(panels), 1.2 + 0.28 * tallest)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "molora"}):
        drawing = Figure(figsize=size, layout="constrained")
        axes = drawing.subplots(1, len(panels), squeeze=False)[0]
        for axis, (name, points) in zip(axes, panels.items(), strict=True):
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
            axis.axvline(100, color="#303030", linestyle="--", linewidth=0.8)
            axis.set_xlim(left=min(0.0, *(100 * p[2]["low"] for p in points if p[2]["low"] > -1.0), 0.0))
            axis.set_title(
                f"{_plain(name)}, {sets[name]['documents']} documents", fontsize="medium", loc="left"
            )
            axis.set_xlabel("gain recovered, %")
            axis.tick_params(labelsize="small")
            axis.spines[["top", "right"]].set_visible(False)
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            drawing.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _points(one: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """(row, group, share) from the best down; base and own are 0 and 100 by definition."""
    found = [
        (row["name"], row["group"], row["recovered"]["mean"])
        for row in one["rows"]
        if row["group"] not in ("base", "own") and row["recovered"]["mean"]["low"] is not None
    ]
    return sorted(found, key=lambda point: -point[2]["value"])


def _plain(text: str) -> str:
    return printable(text).replace("$", r"\$")
