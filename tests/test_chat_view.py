"""What chat prints, and the conversation it keeps: no model needed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style

from molora_cli.core.conversation import Conversation, load
from molora_cli.core.generate import TokenEvent, TokenRoute
from molora_cli.errors import InputError
from molora_cli.views.chat import AnswerPrinter, why
from molora_cli.views.palette import Palette
from molora_cli.views.wrapping import Wrapper

LETTERS = "👩‍💻 日本 ď"
Run = Callable[..., tuple[int, str, str]]


# -- the printer --------------------------------------------------------------
def event(text: str, index: int = -1) -> TokenEvent:
    return TokenEvent(0, text, TokenRoute(((index,),), ((1.0,),), (("x",),)), -1.0)


def printed(pieces: list[TokenEvent], width: int, *, terminal: bool = True, colour: str | None = None) -> str:
    console = Console(
        file=io.StringIO(), force_terminal=terminal, width=width, color_system=colour, _environ={}
    )
    printer = AnswerPrinter(console, Palette(("math", "code"), console), marks=colour is not None)
    for piece in pieces:
        printer.token(piece)
    printer.end()
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [2, 10, 11, 40, 80])
@pytest.mark.parametrize("size", [1, 3, 100])
def test_no_letter_is_lost_or_passes_the_right_edge(width: int, size: int) -> None:
    text = "日本語のテキストと short words, é and e\u0301, 👩‍💻 emoji, ᄒ" + "x" * 50 + " 終わり。"
    text = text.replace("ᄒ", "")
    shown = printed([event(text[i : i + size]) for i in range(0, len(text), size)], width)
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    # a word longer than the line is left to the terminal to wrap; nothing else is wider than it
    for line in shown.split("\n"):
        assert cell_len(line) <= width or "x" * min(width, 24) in line or width == 2
    assert "👩‍💻" in shown
    assert "e\u0301" in shown


def test_words_are_wrapped_whole_and_paragraphs_stay() -> None:
    text = "one two three four\n\n- five six"
    assert printed([event(c) for c in text], 10) == "one two \nthree four\n\n- five six\n"


def test_fenced_code_is_left_to_the_terminal() -> None:
    code = "```\n" + "a b " * 30 + "\n```\n"
    shown = printed([event(code), event("word " * 5)], 12)
    assert shown.startswith(code)
    assert max(map(len, shown[len(code) :].split("\n"))) <= 12


def test_a_word_without_end_is_shown_as_it_comes() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None, _environ={})
    printer = AnswerPrinter(console, Palette(("math",), console), marks=False)
    for _ in range(100):
        printer.token(event("x"))
    assert len(console.file.getvalue()) > 70  # type: ignore[attr-defined]
    printer.end()
    # the terminal wraps it, so that it can be copied in one piece
    assert console.file.getvalue() == "x" * 100 + "\n"  # type: ignore[attr-defined]


def test_no_terminal_gets_the_text_alone() -> None:
    text = "日本語 and a long line that is not wrapped " * 5
    assert printed([event(text, 0)], 20, terminal=False, colour="truecolor") == text + "\n"


def test_control_characters_never_reach_the_screen() -> None:
    nasty = "a\x1b[31mb\x07\x00\r\u202ec\x9b2J"
    for terminal in (True, False):
        shown = printed([event(nasty)], 80, terminal=terminal)
        assert shown == "a\\x1b[31mb\\x07\\x00\\x0d\\u202ec\\x9b2J\n"


def test_colours_or_letters_tell_adapters_apart() -> None:
    pieces = [event("one", 0), event(" two", 0), event(" ", 1), event("three", 1), event(" four", -1)]
    console = Console(file=io.StringIO(), force_terminal=True, width=80, no_color=True, _environ={})
    printer = AnswerPrinter(console, Palette(("math", "code"), console))
    for piece in pieces:
        printer.token(piece)
    printer.end()
    assert console.file.getvalue() == "m·one two c·three -·four\n"  # type: ignore[attr-defined]
    coloured = printed(pieces, 80, colour="truecolor")
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == "one two three four\n"
    assert "\x1b[" in coloured


MARKDOWN = (
    "# Title\n\nSome **bold** text and `code`, [bold]not markup[/bold] :smile: \\[x].\n\n"
    "- first item\n    - nested item\n1. a number\n\n"
    "```python\ndef f(x):\n    if x:  # comment\n        return 1\n\n    return 2\n```\n\n"
    "| a   | b |\n|-----|---|\n| 1   | 2 |\n\n\tindented by a tab\n    by four blanks\n"
)


def unstyled(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_markdown_stays_as_it_was_written(size: int) -> None:
    pieces = [event(MARKDOWN[i : i + size], (i // size) % 2) for i in range(0, len(MARKDOWN), size)]
    shown = printed(pieces, 100, colour="truecolor")
    assert unstyled(shown) == MARKDOWN.replace("\t", "    ")
    assert "\x1b[" in shown
    # letters stand before words and shift nothing else; code is recognised behind one
    letters = re.sub(r"[mc-]·", "", printed_letters(pieces, 400))
    assert letters == MARKDOWN.replace("\t", "    ")


def printed_letters(pieces: list[TokenEvent], width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True, _environ={})
    printer = AnswerPrinter(console, Palette(("math", "code"), console))
    for piece in pieces:
        printer.token(piece)
    printer.end()
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_what_wraps_in_a_list_stands_under_its_text() -> None:
    text = "- one two three four five\n  - six seven eight nine\n12. ten eleven twelve thirteen\nplain words"
    shown = printed([event(c) for c in text], 20)
    assert [line.rstrip() for line in shown.splitlines()] == [
        "- one two three four",
        "  five",
        "  - six seven eight",
        "    nine",
        "12. ten eleven",
        "    twelve thirteen",
        "plain words",
    ]


@pytest.mark.parametrize("fence", ["```", "~~~", "````"])
def test_code_and_tables_are_not_broken_behind_letters_either(fence: str) -> None:
    inner = "" if fence == "```" else "```\n"  # no end of a fence of another kind or length
    code = f"{fence}sql\nSELECT name, age, country FROM users WHERE age > 65;\n{inner}{fence}\n"
    table = "| a long row | of a table | that is wide |\n"
    for show in (printed, printed_letters):
        shown = re.sub(r"[mc-]·", "", show([event(code, 0), event(table, 1), event("word " * 8)], 24))
        assert shown.startswith(code + table)
        assert max(map(len, shown[len(code + table) :].split("\n"))) <= 24


def test_another_size_in_the_middle_of_an_answer() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None, _environ={})
    printer = AnswerPrinter(console, Palette(("math",), console), marks=False)
    for width in (60, 20, 40):
        console.width = width
        for piece in re.findall(r"\S+\s", "some words of a text that goes on\nand on and on for a while "):
            printer.token(event(piece))
        printer.token(event("\n\n"))
    printer.end()
    parts = [part.strip("\n") for part in console.file.getvalue().split("\n\n")]  # type: ignore[attr-defined]
    longest = [max(map(len, part.split("\n"))) for part in parts[:3]]
    assert 25 < longest[0] <= 60 and longest[1] <= 20 and 20 < longest[2] <= 40


def test_a_column_never_gets_a_longer_line() -> None:
    lines = [""]

    def write(text: str, style: object) -> None:
        if text == "\n":
            lines.append("")
        else:
            lines[-1] += text

    wrapper = Wrapper(lambda: 12, write, hard=True)
    for text in (
        "words and averyveryverylongword 日本語日本語日本語\n",
        "```\na = some_function(of, names)\n```\n",
    ):
        for char in text:
            wrapper.feed(char, Style.null())
    wrapper.feed("| a | b | c | d |", Style.null())
    wrapper.end()
    assert max(cell_len(line) for line in lines) <= 12
    assert "```" in lines and re.sub(r"\s", "", "".join(lines)).endswith("|a|b|c|d|")


def test_a_route_that_was_held_back_is_said_to_be() -> None:
    scores = ((("math", -0.7), ("code", -0.75)),)
    held = TokenEvent(5, "x", TokenRoute(((1,),), ((1.0,),), (("code",),), scores), -1.0)
    palette = Palette(("math", "code"))
    assert "kept from the token before: math is not better by the margin 0.3" in why(
        held, 1, palette, hold=0.3
    )
    assert "kept" not in why(held, 1, palette).plain and "runner-up code, margin 0.0" in why(held, 1, palette)


# -- the conversation ---------------------------------------------------------
def words(messages: list[Any]) -> list[int]:
    return [0] * sum(len(m["content"].split()) for m in messages)


def test_the_oldest_turns_leave_first_and_the_system_text_stays() -> None:
    talk = Conversation("be brief")
    for number in range(4):
        talk.add("user", f"question {number}")
        talk.add("assistant", "answer")
    talk.add("user", "last question")
    ids, dropped = talk.fit(words, context=12, reserve=100)  # a quarter of the context is kept free
    assert (len(ids), dropped) == (7, 3)
    assert [turn["content"] for turn in talk.turns] == ["question 3", "answer", "last question"]
    assert talk.messages()[0] == {"role": "system", "content": "be brief"}
    # two old turns and a question that does not fit by itself: nothing is dropped for it
    assert talk.fit(words, context=4, reserve=1) == ([0] * 4, 0)
    assert talk.fit(words, context=6, reserve=1)[1] == 1
    assert [turn["content"] for turn in talk.turns] == ["last question"]
    assert talk.fit(words, context=None, reserve=1) == ([0] * 4, 0)


def test_a_conversation_is_saved_and_taken_up(tmp_path: Path) -> None:
    talk = Conversation("s", [])
    talk.add("user", "a \ud83d lone surrogate, " + LETTERS)
    file = tmp_path / "talk.json"
    talk.save(file, {"settings": {}})
    assert load(file).conversation == talk
    assert "\ufffd" in talk.turns[0]["content"]
    with pytest.raises(InputError, match="exists"):
        talk.save(file, {})
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("", "not JSON"),
        ("[1]", "not a saved"),
        ('{"format": "molora-chat", "format_version": 9}', "format 9"),
        ('{"format": "molora-chat", "format_version": 1, "turns": 3}', "'turns' a list"),
        ('{"format": "molora-chat", "format_version": 1, "turns": [{"role": "system"}]}', "turn 1"),
        (
            '{"format": "molora-chat", "format_version": 1, "turns": [{"role": "user", "content": 3}]}',
            "turn 1",
        ),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_damaged_conversation_is_refused(tmp_path: Path, body: str, reason: str) -> None:
    file = tmp_path / "talk.json"
    file.write_text(body)
    with pytest.raises(InputError, match=reason):
        load(file)
    with pytest.raises(InputError, match="cannot read"):
        load(tmp_path / "none.json")
