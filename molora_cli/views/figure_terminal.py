"""What a terminal would show, as a PNG drawn by matplotlib in its own monospaced font."""

from __future__ import annotations

import io
import warnings

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.segment import Segment
from rich.style import Style

from molora_cli.views.palette import rgb

_FONT = 10.0  # points; matplotlib's DejaVu Sans Mono is 0.602 em wide
_CELL = 0.602 * _FONT / 72  # inches
_LINE = 1.35 * _FONT / 72
_INK, _PAPER = "#202020", "#ffffff"
_DIM = 0.6  # of the ink that dim text keeps
_MOST = 2000  # lines; more would be no picture


def terminal_png(view: RenderableType, *, width: int, colours: bool = True, dpi: int = 120) -> bytes:
    """`view` at `width` columns on white, in full colour or with none, as the bytes of a PNG.

    Characters that the font lacks are drawn as boxes. Needs matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=not colours,
        legacy_windows=False,
        highlight=False,
        _environ={},
    )
    lines = console.render_lines(view, console.options, pad=False)[:_MOST]
    while lines and not any(segment.text.strip() for segment in lines[-1]):
        lines.pop()
    size = ((width + 2) * _CELL, (len(lines) + 1) * _LINE)
    figure = Figure(figsize=size, facecolor=_PAPER)
    for row, line in enumerate(lines):
        column = 0
        top = 1 - (row + 0.5) * _LINE / size[1]
        for segment in _pieces(line):
            cells = cell_len(segment.text)
            ink, paper, style = _look(segment.style)
            x = (column + 1) * _CELL / size[0]
            if paper:
                box = (x, top - _LINE / size[1])
                patch = Rectangle(box, cells * _CELL / size[0], _LINE / size[1], color=paper, linewidth=0)
                figure.add_artist(patch)
            if segment.text.strip():
                figure.text(
                    x,
                    top - 0.74 * _LINE / size[1],
                    segment.text.replace("$", r"\$"),
                    color=ink,
                    family="monospace",
                    fontsize=_FONT,
                    weight="bold" if style.bold else "normal",
                    style="italic" if style.italic else "normal",
                    va="baseline",
                )
            column += cells
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
        figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _pieces(line: list[Segment]) -> list[Segment]:
    """The line's text in parts that keep to the grid: wide characters stand alone."""
    parts: list[Segment] = []
    for segment in line:
        if segment.control:
            continue
        if cell_len(segment.text) == len(segment.text):
            parts.append(segment)
        else:
            parts += [Segment(char, segment.style) for char in segment.text]
    return parts


def _look(style: Style | None) -> tuple[str, str | None, Style]:
    """(ink, paper or None, style) of a segment."""
    style = style or Style.null()
    ink = style.color.triplet.hex if style.color and style.color.triplet else _INK
    paper = style.bgcolor.triplet.hex if style.bgcolor and style.bgcolor.triplet else None
    if style.dim:
        pairs = zip(rgb(ink), rgb(paper or _PAPER), strict=True)
        ink = "#{:02x}{:02x}{:02x}".format(*(round(_DIM * i + (1 - _DIM) * p) for i, p in pairs))
    return ink, paper, style
