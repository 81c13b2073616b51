"""Text from outside: what a terminal is shown, and what a tokenizer is given."""

from __future__ import annotations

import os

from molora_cli.text import argument_text, printable


def test_arguments_that_python_could_not_decode_become_text() -> None:
    assert argument_text("naïve 🙂") == "naïve 🙂"
    for raw, text in ((b"caf\xc3\xa9", "café"), (b"\xff ok", "\ufffd ok")):
        undecoded = raw.decode("ascii", "surrogateescape")  # what Python makes of it in the C locale
        assert argument_text(undecoded) == text
        assert os.fsencode(undecoded) == raw


def test_controls_and_reordering_marks_are_shown_escaped() -> None:
    assert printable("a\x1b[31mb\u202ec\ud800") == "a\\x1b[31mb\\u202ec\\ud800"
    assert printable("x\ny", keep="\n") == "x\ny"
