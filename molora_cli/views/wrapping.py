"""Text that arrives in pieces, broken into lines of a screen as a reader would have it.

Words stay whole, letters that belong together (double-width, joined emoji, combining marks) are never cut,
line breaks and indentation stay as they were written, what wraps in a list item stands under its text, and
fenced code and table rows are never broken between words: a terminal wraps those itself, so that they can be
copied in one piece.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len
from rich.style import Style

Write = Callable[[str, Style], None]

_JOINER = "\u200d"
_TAB = 4
_FENCE = re.compile(r" {0,3}(```+|~~~+)([^`]*)\Z")
_HELD = 24  # cells of a word that are waited for before it is shown unfinished
_HEAD = 80  # characters of a line that are looked at for a fence or a list mark
_ITEM = re.compile(r"[ \t]*(?:(?:[-*+•]|\d{1,3}[.)])[ \t]+)?")


class Wrapper:
    """Gives styled runs to `write`, "\\n" where a line ends.

    width: cells of a line, asked for each time, so that a screen may change its size. hard: for a column
    beside another one, where no line may be longer: code and tables are wrapped like all else, and a word
    that is too long is broken.
    """

    def __init__(self, width: Callable[[], int], write: Write, *, hard: bool = False) -> None:
        self._width, self._write, self._hard = width, write, hard
        self._column = 0
        self._word: list[tuple[str, Style]] = []  # letters not yet written
        self._alone = False  # the held letters may be parted from what follows
        self._begun = False  # the word that is held has a part on the screen already
        self._head = ""  # the source line's first characters
        self._fence = ""  # what opened the code that the line stands in

    def feed(self, text: str, style: Style, *, source: bool = True) -> None:
        """More text. source: False for marks of ours, which are no part of the text's own lines."""
        for char in text:
            if char == "\n":
                self._newline()
            elif self._word and (cell_len(char) == 0 or self._word[-1][0].endswith(_JOINER)):
                last, its_style = self._word[-1]
                self._word[-1] = (last + char, its_style)
            elif char in " \t":
                self._flush()
                self._space(1 if char == " " else _TAB - self._column % _TAB, style)
            else:
                if self._alone:
                    self._flush()
                self._word.append((char, style))
                self._alone = self._verbatim or cell_len(char) > 1
            if source and char != "\n" and len(self._head) < _HEAD:
                self._head += char
        held = sum(cell_len(cluster) for cluster, _ in self._word)
        if len(self._word) > 1 and (self._verbatim or held >= min(_HELD, self._width())):
            # all but the last letter, which may still grow
            newest, alone = self._word.pop(), self._alone
            self._flush()
            self._word, self._alone, self._begun = [newest], alone, not self._verbatim

    def end(self) -> None:
        """Write what was held back and end the line."""
        self._flush()
        if self._column:
            self._break(0)
        self._head, self._fence = "", ""

    @property
    def _verbatim(self) -> bool:
        code = bool(self._fence) or self._head.lstrip(" \t").startswith("|")
        return code and not self._hard

    def _indent(self, width: int) -> int:
        """Cells that wrapped lines of this source line are moved in by; none in a narrow screen."""
        found = _ITEM.match(self._head)
        size = 0 if found is None else len(found[0].expandtabs(_TAB))
        return size if size <= width // 3 else 0

    def _break(self, indent: int) -> None:
        self._write("\n", Style.null())
        if indent:
            self._write(" " * indent, Style.null())
        self._column = indent

    def _newline(self) -> None:
        self._flush()
        found = _FENCE.match(self._head)
        if found and not self._fence:
            self._fence = found[1]
        elif found and found[1].startswith(self._fence) and not found[2].strip():
            self._fence = ""
        self._head = ""
        self._break(0)

    def _space(self, count: int, style: Style) -> None:
        width = self._width()
        for _ in range(count):
            if self._column >= width:
                if not self._verbatim:
                    self._break(self._indent(width))
                    return
                self._column = 0
            self._write(" ", style)
            self._column += 1

    def _flush(self) -> None:
        """Write the held letters, on a new line where they do not fit on this one."""
        word, self._word, self._alone = self._word, [], False
        whole, self._begun = not (self._verbatim or self._begun), False
        if not word:
            return
        width = self._width()
        indent = self._indent(width)
        cells = sum(cell_len(cluster) for cluster, _ in word)
        if whole and self._column > indent and cells <= width - indent and self._column + cells > width:
            self._break(indent)
        run, run_style = "", Style.null()
        for cluster, style in word:
            size = cell_len(cluster)
            full = self._column > 0 and self._column + size > width
            if run and (full or style != run_style):
                self._write(run, run_style)
                run = ""
            if full:
                # in the middle of a word a full line is wrapped by the terminal, which copies it in one piece
                if self._column < width or self._hard:
                    self._break(0)
                self._column = 0
            run, run_style = run + cluster, style
            self._column += size
        if run:
            self._write(run, run_style)
