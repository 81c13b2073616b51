"""Text that arrives faster than anyone types: read in one piece, and shown as a few words on the line.

A line editor that takes a long paste letter by letter redraws the growing line after each; a megabyte would
take it hours. Terminals say where a paste begins and ends (bracketed paste); from one that does not, whatever
is read at once and is longer than a person types counts as one. A paste never sends itself.
"""

from __future__ import annotations

import contextlib
import re
import select
import struct
import sys
from typing import TextIO

from prompt_toolkit.input import Input, create_input
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.keys import Keys

from molora_cli.errors import InputError

_BEGIN, _END = "\x1b[200~", "\x1b[201~"
_BURST = 256  # characters read at once that nobody types
_QUIET = 0.05  # seconds without a character that end a burst
_PATIENCE = 2.0  # and a bracketed paste whose end never comes
_CHUNK = 1 << 16
_STOP = "\x03"  # Ctrl-C
_KEPT = 4095  # bytes of a line that a terminal keeps which edits lines itself
LONG, LINES = 1000, 12  # a paste beyond these is shown as a few words
_REPLY = re.compile(r"\x1b\[\d+;\d+R")  # where the cursor is: the answer to the editor's question
_HELD = re.compile(r"\[paste (\d+): [\d,]+ characters\]")


class Pastes:
    """Long pasted texts of this run, each under the words that stand for it on the line."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def stand_in(self, text: str) -> str:
        """What to show for `text`: itself, or words that `expand` turns back into it."""
        if len(text) <= LONG and text.count("\n") <= LINES:
            return text
        words = f"[paste {len(self._texts) + 1}: {len(text):,} characters]"
        self._texts[words] = text
        return words

    def expand(self, line: str) -> str:
        """The line with every paste in its place. Raises InputError for one of an earlier run."""
        for found in _HELD.finditer(line):
            if found[0] not in self._texts:
                raise InputError(f"the text of {found[0]} is not at hand any more", "paste it again")
        return _HELD.sub(lambda found: self._texts[found[0]], line)


def line_breaks(text: str) -> str:
    """`text` with "\\n" for the "\\r" that terminals send."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def paste_input(stdin: TextIO) -> Input:
    """The editor's input, pastes read whole. Windows has a way of its own, which is left as it is."""
    if sys.platform == "win32":
        return create_input(stdin)
    from prompt_toolkit.input.vt100 import Vt100Input

    class PasteInput(Vt100Input):
        """Keys as ever, and one `BracketedPaste` key for each paste, bracketed or not."""

        def read_keys(self) -> list[KeyPress]:
            data = self.stdin_reader.read(_CHUNK)
            if any(data.endswith(_BEGIN[:size]) for size in range(2, len(_BEGIN))):
                data += self._rest(_QUIET, "~")  # a mark that was cut by the end of the block
            if _BEGIN in data:
                return self._bracketed(data)
            if len(data) < _BURST or "\x1b" in _REPLY.sub("", data):
                return self._typed(data)
            data += self._rest(_QUIET, "")
            if _STOP in data:  # somebody has thought better of it
                return [KeyPress(Keys.ControlC, _STOP)]
            return self._pasted(data)

        def _typed(self, data: str) -> list[KeyPress]:
            self.vt100_parser.feed(data)
            keys, self._buffer = self._buffer, []
            return keys

        def _bracketed(self, data: str) -> list[KeyPress]:
            before, _, text = data.partition(_BEGIN)
            if _END not in text:
                text += self._rest(_PATIENCE, _END)
            text, _, after = text.partition(_END)
            return [*self._typed(before), *self._pasted(text), *self._typed(after)]

        def _pasted(self, text: str) -> list[KeyPress]:
            """One key for the paste; what the terminal itself has put into it is taken out and heard."""
            replies = self._typed("".join(_REPLY.findall(text)))
            return [*replies, KeyPress(Keys.BracketedPaste, _REPLY.sub("", text))]

        def _rest(self, patience: float, end: str) -> str:
            """What else arrives, until `end` or a silence of `patience` seconds."""
            parts: list[str] = []
            tail = ""
            while not (end and end in tail) and select.select([self.fileno()], [], [], patience)[0]:
                more = self.stdin_reader.read(_CHUNK)
                if self.stdin_reader.closed:
                    break
                parts.append(more)
                if end:
                    tail = tail[-len(end) :] + more
            return "".join(parts)

    return PasteInput(stdin)


def read_pasted(stdin: TextIO) -> tuple[str, bool]:
    """One entry where the terminal itself edits lines, and whether a line was cut: it keeps 4095 bytes of
    each. Lines that wait behind the first, more than a person types ahead, belong to the same paste. Raises
    EOFError."""
    lines = [_line(stdin)]
    if len(lines[0]) >= _BURST or _pending(stdin) >= _BURST:
        with contextlib.suppress(EOFError):
            while select.select([stdin], [], [], _QUIET)[0]:
                lines.append(_line(stdin))
    text = b"".join(lines).decode(stdin.encoding or "utf-8", "replace")
    return text.rstrip("\n"), any(len(line) >= _KEPT for line in lines)


def _line(stdin: TextIO) -> bytes:
    line = stdin.buffer.readline()
    if not line:
        raise EOFError
    return line


def _pending(stdin: TextIO) -> int:
    """Bytes of whole lines that can be read now; 0 where the system does not tell."""
    try:
        import fcntl
        import termios

        return struct.unpack("i", fcntl.ioctl(stdin.fileno(), termios.FIONREAD, b"\0" * 4))[0]
    except (ImportError, OSError):
        return 0
