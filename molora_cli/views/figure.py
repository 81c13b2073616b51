"""Pictures of a trace as files, PNG or SVG: shares per adapter and domain, and the coloured text.

matplotlib is an extra and is imported only when it draws: everything but the coloured text as SVG.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from molora_cli.core.bundle.writing import new_file
from molora_cli.core.stats import Stats
from molora_cli.core.trace import Trace
from molora_cli.errors import InputError
from molora_cli.text import printable, shorten
from molora_cli.views.coloured import ColouredDocuments, chosen_groups, layer_range
from molora_cli.views.palette import BASE, HUES

View = Literal["histogram", "tokens", "heatmap", "position"]
VIEWS: tuple[View, ...] = ("histogram", "tokens", "heatmap", "position")
GREY = "#8c8c8c"
WIDTH = 88  # columns of the coloured text
_HATCHES = ("", "//", "..", "xx")
_PAPER = TerminalTheme(
    (255, 255, 255),
    (32, 32, 32),
    [
        (0, 0, 0),
        (170, 0, 0),
        (0, 128, 0),
        (128, 96, 0),
        (0, 0, 170),
        (128, 0, 128),
        (0, 128, 128),
        (170, 170, 170),
    ],
)
# rich's own frame asks a web server for its font; this one takes what the reader has
_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>Tokens coloured by the adapter they took</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
<rect width="100%" height="100%" rx="8" fill="#ffffff" stroke="#d0d0d0" />
<g transform="translate({terminal_x}, 12)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def check_figure(path: Path, view: View, *, force: bool) -> None:
    """What can be refused before any work: name, place, a missing extra. Raises InputError."""
    if path.suffix.lower() not in (".png", ".svg"):
        raise InputError(
            f"{shorten(str(path))}: a figure is written as .png or .svg",
            "give --figure FILE.svg, or FILE.png",
        )
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(
            f"{shorten(str(path))} cannot be written there", "name a file in a folder that exists"
        )
    if path.exists() and not force:
        raise InputError(f"{shorten(str(path))} exists", "give --force to replace it, or another name")
    if not (view == "tokens" and path.suffix.lower() == ".svg"):
        _matplotlib()


def write_figure(
    path: Path, trace: Trace, stats: Stats, *, view: View = "histogram", limit: int = 400
) -> None:
    """Draw one view of a trace into a file. limit: tokens of the coloured text. Raises MoloraError."""
    kind = path.suffix.lower().lstrip(".")
    if view == "tokens" and kind == "svg":
        payload = tokens_svg(trace, limit=limit, template=stats.template_counted).encode("utf-8")
    elif view == "tokens":
        from molora_cli.views.figure_terminal import terminal_png

        payload = terminal_png(
            ColouredDocuments(trace, limit=limit, template=stats.template_counted), width=WIDTH
        )
    else:
        payload = _drawn(trace, stats, view, kind)
    with new_file(path) as work:
        work.write_bytes(payload)


def tokens_svg(trace: Trace, *, limit: int = 400, width: int = WIDTH, template: bool = False) -> str:
    """The terminal's coloured text as one SVG without outside parts; a trace always gives the same bytes."""
    console = Console(
        record=True,
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
        no_color=False,
        highlight=False,
        _environ={},
    )
    console.print(ColouredDocuments(trace, limit=limit, template=template))
    return console.export_svg(code_format=_SVG, theme=_PAPER, title="", unique_id="molora")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise InputError(
            "figures are drawn with matplotlib, which is not installed", "pip install 'molora[figures]'"
        ) from error
    return matplotlib


def _drawn(trace: Trace, stats: Stats, view: View, kind: str) -> bytes:
    """One figure as the bytes of a file. kind: png or svg; a trace always gives the same SVG."""
    matplotlib = _matplotlib()
    # text stays text in an SVG, and nothing in the file depends on the day or on chance
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "molora", "hatch.linewidth": 0.6}):
        if view == "histogram":
            figure = _histogram(trace, stats)
        else:
            from molora_cli.views import figure_maps

            draw = figure_maps.heatmap if view == "heatmap" else figure_maps.position
            figure = draw(trace, stats)
        buffer = io.BytesIO()
        # a name in a script that the font lacks is drawn as boxes (in an SVG it stays text): no news
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _histogram(trace: Trace, stats: Stats) -> Any:
    """Grouped bars: one group per domain, one bar per adapter and the base, one panel per group of layers."""
    from matplotlib.figure import Figure

    columns = drawn_columns(stats)
    chosen = chosen_groups(len(stats.groups))
    parts = [stats.groups[g].domains or [stats.groups[g].total] for g in chosen]
    bars = len(parts[0]) * (len(columns) + 1)
    size = (min(24.0, max(5.0, 1.6 + 0.28 * bars)), 0.9 + 2.7 * len(parts))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, sharex=True)[:, 0]
    for row, (panel, domains) in enumerate(zip(panels, parts, strict=True)):
        for place, index in enumerate(columns):
            x = [d + (place - (len(columns) - 1) / 2) * 0.8 / len(columns) for d in range(len(domains))]
            panel.bar(
                x, [100 * part.share[index] for part in domains], 0.8 / len(columns), **look(stats, index)
            )
        uniform = f"uniform (1 of {stats.experts})"
        panel.axhline(100 * stats.uniform, color="#303030", linestyle="--", linewidth=1, label=uniform)
        panel.set_ylim(0, 100)
        panel.set_ylabel("tokens, % by first choice")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(
            panel_title(trace, stats, chosen[row], "go", first=row == 0), fontsize="medium", loc="left"
        )
    names = [f"{plain(part.label)}\n{part.tokens:,} tokens" for part in parts[0]]
    panels[-1].set_xticks(range(len(names)), names)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")
    return figure


def drawn_columns(stats: Stats) -> list[int]:
    """Indices of the adapters, and of the base where it can be taken."""
    return [*range(len(stats.names) - 1), *([BASE] if stats.knows_base else [])]


def look(stats: Stats, index: int) -> dict[str, Any]:
    """Colour, hatch, edge and label of an adapter's bar, or of the base's (-1)."""
    turn, hue = divmod(index, len(HUES)) if index != BASE else (0, 0)
    return {
        "color": GREY if index == BASE else HUES[hue],
        "edgecolor": "#303030",
        "linewidth": 0.4,
        "hatch": _HATCHES[turn % len(_HATCHES)],
        "label": plain(stats.names[index]),
    }


def panel_title(trace: Trace, stats: Stats, group: int, verb: str, *, first: bool) -> str:
    """Title of a panel: its layers where there are several, and over the first what all are made of."""
    layers = f"layers {layer_range(trace, group)}" if len(stats.groups) > 1 else ""
    if not first:
        return layers
    left_out = " of messages" if stats.template_tokens and not stats.template_counted else ""
    return f"Where {stats.tokens:,} tokens{left_out} {verb}\n{layers}".rstrip()


def plain(text: str) -> str:
    """A name as matplotlib shows it literally: no control characters, no formulas between dollar signs."""
    return printable(text).replace("$", r"\$")
