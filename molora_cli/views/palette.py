"""Colours and letters of adapters in a terminal, the same in every view.

Seven hues of the Okabe-Ito set (Okabe and Ito 2008, "Color Universal Design"), told apart by readers with any
common colour vision; from the eighth adapter on they come again underlined, then italic, then both. A hue is
a background with its own foreground, so that it reads the same on dark and on light terminals. Terminals with
16 colours get named colours, those without colour a letter before the text (`m·word`). The base is plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

from molora_cli.text import printable

BASE = -1
BASE_NAME = "base"
BASE_GLYPH = "-"
MARK = "·"

# orange, sky blue, bluish green, reddish purple, yellow, vermillion, blue
HUES = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#0072b2")
_NAMED = ("yellow", "cyan", "green", "magenta", "white", "red", "blue")
_PAPER = (0xF4, 0xF4, 0xF4)
LEVELS = 4


def rgb(hue: str) -> tuple[int, int, int]:
    """`#rrggbb` into its three bytes."""
    return int(hue[1:3], 16), int(hue[3:5], 16), int(hue[5:7], 16)


def _luminance(colour: tuple[int, int, int]) -> float:
    """Relative luminance of WCAG 2, 0 to 1."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def tint(hue: str, strength: float, paper: tuple[int, int, int] = _PAPER) -> str:
    """`hue` mixed with light grey, or another `paper`: strength 1 is the hue, 0 a third of it; in steps, so
    few colours occur."""
    step = round(min(1.0, max(0.0, strength)) * LEVELS) / LEVELS
    weight = (1 + 2 * step) / 3
    mixed = [round(weight * h + (1 - weight) * p) for h, p in zip(rgb(hue), paper, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


def ink(background: str) -> str:
    """Black or white, whichever contrasts more (WCAG 2: (light + 0.05) / (dark + 0.05))."""
    luminance = _luminance(rgb(background)) + 0.05
    return "#000000" if luminance / 0.05 >= 1.05 / luminance else "#ffffff"


@lru_cache(maxsize=1024)
def _style(index: int, strength: float, system: str) -> Style:
    if index == BASE or system == "none":
        return Style.null()
    turn, place = divmod(index, len(HUES))
    if system == "named":
        background = _NAMED[place]
        front = "bright_white" if background in ("blue", "red", "magenta") else "black"
    else:
        background = tint(HUES[place], strength)
        front = ink(background)
    return Style(color=front, bgcolor=background, underline=bool(turn & 1), italic=bool(turn & 2))


def _glyphs(names: Sequence[str]) -> list[str]:
    """One mark per name: its first letter that is still free, else one of the alphabet, else a number."""
    taken: set[str] = set()
    glyphs = []
    for number, name in enumerate(names):
        candidates = [c for c in name.lower() if c.isascii() and c.isalpha()]
        candidates += [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", str(number)]
        glyph = next(c for c in candidates if c not in taken)
        taken.add(glyph)
        glyphs.append(glyph)
    return glyphs


class Palette:
    """Style and letter of each adapter.

    names: adapters in bundle order. console: where it is shown, asked for its colours; None = full colour.
    """

    def __init__(self, names: Sequence[str], console: Console | None = None) -> None:
        self.names = tuple(names)
        self._letters = _glyphs(self.names)
        if console is None or console.color_system in ("256", "truecolor"):
            self._system = "full"
        else:
            self._system = "none" if console.color_system is None else "named"
        if console is not None and console.no_color:
            self._system = "none"

    @property
    def colours(self) -> bool:
        """False where adapters are told apart by letters."""
        return self._system != "none"

    def name(self, index: int) -> str:
        return BASE_NAME if index == BASE else self.names[index]

    def glyph(self, index: int) -> str:
        return BASE_GLYPH if index == BASE else self._letters[index]

    def style(self, index: int, strength: float = 1.0) -> Style:
        """Style of adapter `index` (-1 = base); strength in [0, 1], say its gate, pales the tint."""
        return _style(index, round(strength * LEVELS) / LEVELS, self._system)

    def token(self, text: str, index: int, strength: float = 1.0, previous: int | None = None) -> Text:
        """One token's text, made safe, in its adapter's style.

        Without colours its letter stands before it, after leading spaces, and is left out where `previous`,
        the adapter of the token before, is the same. Newlines and tabs stay.
        """
        shown = printable(text, keep="\n\t")
        if not self.colours and index != previous:
            body = shown.lstrip(" \n\t")
            shown = f"{shown[: len(shown) - len(body)]}{self.glyph(index)}{MARK}{body}"
        return Text(shown, style=self.style(index, strength), end="")

    def label(self, index: int) -> Text:
        """`m math` as the legend and the tables show it."""
        name = printable(self.name(index))
        if not self.colours:
            return Text(f"{self.glyph(index)} {name}", end="")
        return Text(end="").append(f" {self.glyph(index)} ", style=self.style(index)).append(f" {name}")

    def legend(
        self, shares: Mapping[int, float] | None = None, width: int | None = None, *, base: bool = True
    ) -> Text:
        """Every adapter and the base with letter and name, and its share in percent where given.

        shares: index -> fraction of 1. width: an entry that would pass it starts a new line. base: False
        leaves the base out, for routers that never choose it.
        """
        legend = Text(end="")
        line = 0
        for index in (*range(len(self.names)), *([BASE] if base else [])):
            entry = self.label(index)
            if shares is not None:
                entry.append(f" {100 * shares.get(index, 0.0):.0f} %")
            size = cell_len(entry.plain)
            if line and width is not None and line + 2 + size > width:
                legend.append("\n")
                line = 0
            elif line:
                legend.append("  ")
                line += 2
            legend.append_text(entry)
            line += size
        return legend
