"""The slash commands of molora chat, without a terminal: what each says and does."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from molora_cli import load
from molora_cli.errors import InputError
from molora_cli.views.repl import COMMANDS
from molora_cli.views.repl_commands import GROUPS


@pytest.fixture
def repl(chat_model: Any, make_repl: Callable[..., Any]) -> Any:
    return make_repl(chat_model)


def test_the_tables_agree_and_every_command_has_its_line_of_help(repl: Any) -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    text = repl.said("/help")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  /{name}\b.*{re.escape(command.help)}$", text, re.MULTILINE)
    assert repl.said("/?") == text and repl.handle("/quit") is False and repl.handle("/exit") is False
    repl.out.stderr = Console(file=io.StringIO(), width=40, _environ={})
    assert all(len(line) <= 40 or line.startswith("      ") for line in repl.said("/help").splitlines())


def test_settings_of_drawing_and_of_the_router_are_told_apart(repl: Any) -> None:
    session = repl.session
    assert "temperature is 0: always the likeliest" in repl.said("/temperature")
    assert "router-temperature" in repl.said("/temperature 0.5")
    assert session.settings.temperature == 0.5 and session.model.temperature is None
    assert "is 2" in repl.said("/set router-temperature 2")
    assert session.settings.temperature == 0.5 and session.model.temperature == 2
    assert "file" in repl.said("/set router-temperature none") and session.model.temperature is None
    assert "max-new-tokens is 7" in repl.said("/set max-new-tokens=7")
    shown = repl.said("/show")
    for part in (
        "temperature         0.5",
        "the vocab router decides",
        "1 adapter per token",
        "max-new-tokens",
    ):
        assert part in shown
    for line in ("/temperature hot", "/set heat 3", "/set temperature", "/set router-temperature 0"):
        with pytest.raises(InputError):
            repl.handle(line)


def test_topk_is_the_routers_and_says_what_it_gives(repl: Any) -> None:
    assert "gives a token 1 adapter" in repl.said("/topk")
    text = repl.said("/topk 2")  # rules give one: the router says so
    assert "vocab" in text or "up to 2" in text
    with pytest.raises(InputError, match="topk"):
        repl.handle("/topk 0")


def test_muting_and_choosing(repl: Any) -> None:
    model = repl.session.model
    assert "muted: math" in repl.said("/mute math") and model.muted == {"math"}
    assert "every adapter is muted" in repl.said("/mute code")
    assert "muted" in repl.said("/show")
    assert "among all" in repl.said("/only auto") and model.muted == frozenset()
    assert "the base alone answers" in repl.said("/only base") and repl.session.route == "off"
    assert "base 100 %" in repl.said("hello")
    assert "code 100 %" in (repl.said("/only code") and repl.said("and now?"))
    assert "the route was fixed" in repl.said("/why 1")


def test_a_model_without_router_says_what_can_be_done(pair: Path, make_repl: Callable[..., Any]) -> None:
    repl = make_repl(load(pair))
    repl.session.only("one")
    for line in ("/auto", "/topk", "/topk 2", "/set router-temperature 1", "/compare auto x"):
        with pytest.raises(InputError, match="no router"):
            repl.handle(line)
    assert "one on every token" in repl.said("/show")


# -- the routes of an answer --------------------------------------------------
def test_routes_are_shown_as_asked(chat_model: Any, make_repl: Callable[..., Any]) -> None:
    repl = make_repl(chat_model, force_terminal=True, color_system="truecolor")
    assert "by colour" in repl.said("/routing")
    assert "code" in repl.said("hello") and "\x1b[" in repl.answered()
    repl.said("/routing off")
    text = repl.said("hello")
    assert "%" not in text and "\x1b[" not in repl.answered()
    repl.said("/routing bars")
    text = repl.said("hello")
    assert re.search(r"^ c  code +\S* +\d+ %$", text, re.MULTILINE), text
    assert "\x1b[" in repl.answered()
    repl.said("/routing color")
    assert repl.routing == "colour"
    with pytest.raises(InputError, match="off, colour, bars"):
        repl.handle("/routing rainbow")


# -- wrong lines --------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/hepl", "did you mean /help"),
        ("/xyzzy", "/help lists"),
        ("/usr/bin is full", "a space before it"),
        ("/only", "needs NAME"),
        ("/only nobody", "nobody"),
        ("/mute nobody", "nobody"),
        ("/why 1", "no answer yet"),
        ("/why", "no answer yet"),
        ("/set heat 3", "heat"),
        ("/load nowhere.json", "cannot read"),
        ("/regen now", "takes nothing"),
        ("/trace", "needs FILE"),
        ("/report", "needs FILE"),
    ],
)
def test_a_wrong_command_says_what_is_right(repl: Any, line: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        repl.handle(line)
    assert reason in str(caught.value)


def test_a_space_makes_a_question_of_it(repl: Any) -> None:
    assert "5 tokens" in repl.said(" /usr/bin is full")
    assert repl.session.conversation.turns[0]["content"] == "/usr/bin is full"


def test_the_rest(repl: Any) -> None:
    assert repl.handle("   ")
    repl.said("hello")
    assert "5 tokens in 1 answer," in repl.said("/stats")
    assert "5 tokens" in repl.said("/regen")
    assert "be\nbrief" in repl.said("/system be\nbrief")
    assert "(none)" in repl.said("/system none")
    assert "empty" in repl.said("/clear") and repl.session.conversation.turns == []
