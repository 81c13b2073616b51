"""Pastes as the line editor gets them: in one piece, however long, bracketed or not."""

from __future__ import annotations

import io
import os
import pty
import threading
import time
import tty
from collections.abc import Iterator

import pytest

from molora_cli.errors import InputError
from molora_cli.views.pasting import Pastes, line_breaks, paste_input, read_pasted

MEGABYTE = "seventeen letters\r" * 60_000


class Typist:
    """The other end of a pseudo-terminal: what it writes is read by `keys`."""

    def __init__(self, *, raw: bool) -> None:
        self._ours, theirs = pty.openpty()
        self.stdin = io.TextIOWrapper(open(theirs, "rb"), encoding="utf-8")  # noqa: SIM115, PTH123
        if raw:
            tty.setraw(self.stdin.fileno())

    def write(self, text: str) -> None:
        def work() -> None:
            data = text.encode()
            while data:
                data = data[os.write(self._ours, data[:4096]) :]

        threading.Thread(target=work, daemon=True).start()

    def close(self) -> None:
        self.stdin.close()
        os.close(self._ours)


@pytest.fixture
def typist() -> Iterator[Typist]:
    made = Typist(raw=True)
    yield made
    made.close()


def keys(typist: Typist, count: int) -> list[tuple[str, str]]:
    """The first `count` keys that arrive."""
    source, found = paste_input(typist.stdin), []
    end = time.monotonic() + 60
    while len(found) < count and time.monotonic() < end:
        found += [(str(getattr(k.key, "value", k.key)), k.data) for k in source.read_keys()]
        time.sleep(0.01)
    return found


def test_a_bracketed_megabyte_is_one_key(typist: Typist) -> None:
    start = time.process_time()
    typist.write(f"\x1b[200~{MEGABYTE}\x1b[201~\r")
    found = keys(typist, 2)
    assert found == [("<bracketed-paste>", MEGABYTE), ("c-m", "\r")]
    assert time.process_time() - start < 5


def test_a_megabyte_without_brackets_is_one_key_too(typist: Typist) -> None:
    start = time.process_time()
    # in the middle of it the terminal answers where its cursor is
    typist.write(MEGABYTE[:500_000] + "\x1b[12;40R" + MEGABYTE[500_000:])
    found = keys(typist, 2)
    assert [key for key, _ in found] == ["<cursor-position-response>", "<bracketed-paste>"]
    assert found[1][1] == MEGABYTE
    assert time.process_time() - start < 5


def test_typing_stays_typing(typist: Typist) -> None:
    typist.write("hé\x1b[A\x1b[200~a\rb\x1b[201~/why 3\r")
    found = [("h", "h"), ("é", "é"), ("up", "\x1b[A"), ("<bracketed-paste>", "a\rb")]
    assert keys(typist, 11) == [*found, *((c, c) for c in "/why 3"), ("c-m", "\r")]


def test_ctrl_c_in_a_burst_drops_it(typist: Typist) -> None:
    typist.write("x" * 3000 + "\x03")
    assert keys(typist, 1) == [("c-c", "\x03")]


def test_a_paste_whose_end_never_comes_is_a_paste(typist: Typist) -> None:
    typist.write("\x1b[200~half")
    assert keys(typist, 1) == [("<bracketed-paste>", "half")]


def test_long_pastes_stand_as_a_few_words_on_the_line() -> None:
    pastes = Pastes()
    assert pastes.stand_in("short\ntext") == "short\ntext"
    long, many = "x" * 1001, "\n" * 13
    words = [pastes.stand_in(long), pastes.stand_in(many)]
    assert words == ["[paste 1: 1,001 characters]", "[paste 2: 13 characters]"]
    assert pastes.expand(f"see {words[0]} and {words[1]}!") == f"see {long} and {many}!"
    with pytest.raises(InputError, match="not at hand"):
        pastes.expand("[paste 3: 5 characters]")
    assert line_breaks("a\r\nb\rc\n") == "a\nb\nc\n"


def test_where_the_terminal_edits_lines() -> None:
    typist = Typist(raw=False)
    typist.write("one\r")
    assert read_pasted(typist.stdin) == ("one", False)
    typist.write("x" * 9000 + "\r")
    text, cut = read_pasted(typist.stdin)
    assert cut and 4000 < len(text) < 4096
    typist.write("a line of a longer text\r" * 60)
    time.sleep(0.3)
    text, cut = read_pasted(typist.stdin)
    assert not cut and text == "\n".join(["a line of a longer text"] * 60)
    typist.write("\x04")
    with pytest.raises(EOFError):
        read_pasted(typist.stdin)
    typist.close()
