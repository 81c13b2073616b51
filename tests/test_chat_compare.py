"""/compare in molora chat: two answers to one question, and a conversation that stays as it is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from molora_cli.errors import InputError


@pytest.fixture
def repl(chat_model: Any, make_repl: Callable[..., Any]) -> Any:
    return make_repl(chat_model)


def state(repl: Any) -> tuple[Any, ...]:
    session = repl.session
    turns = [dict(turn) for turn in session.conversation.turns]
    return turns, session.last, len(session.all_events), session.answers, list(session._cache.ids)


def test_a_comparison_changes_nothing_and_answers_as_one_would(repl: Any, chat_model: Any) -> None:
    session = repl.session
    session.settings.temperature, session.settings.seed = 1.0, 3
    repl.said("one")
    repl.said("two")
    before, answer = state(repl), session.last.text
    repl.answered()
    text = repl.said("/compare")
    shown = repl.answered()
    assert state(repl) == before
    # the same seed: the router's side is the answer that stands in the conversation
    history = session.conversation.messages()[:-1]
    options = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    other = "".join(e.text for e in chat_model.stream(history, route="off", **options))
    assert shown == f"[router]\n{printed(answer)}\n[base]\n{printed(other)}\n"
    assert "router  5 tokens" in text and "base    5 tokens | base 100 %" in text
    repl.said("/compare code what is new?")
    assert "[code]" in repl.answered() and state(repl) == before
    repl.said("three")
    assert session.conversation.turns[-2]["content"] == "three"


def printed(text: str) -> str:
    from molora_cli.text import printable

    return printable(text, keep="\n\t")


def test_unseeded_drawing_takes_one_seed_for_both_sides(repl: Any) -> None:
    repl.session.settings.temperature = 1.0
    repl.session.only("math")
    repl.said("one")
    repl.session.auto()
    repl.session.model.muted = {"code"}
    sides = repl.session.compare("off")
    texts = [[event.id for event in events] for _, events in sides]
    again = [[event.id for event in events] for _, events in repl.session.compare("off")]
    assert texts != again and len(texts[0]) == len(texts[1]) == 5


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("/compare", "no question"),
        ("/compare nobody", "no adapter 'nobody'"),
        ("/compare auto x", "both sides"),
        ("/compare base " + "x" * 400, "256"),
    ],
)
def test_a_comparison_that_cannot_be(repl: Any, line: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        repl.handle(line)


WORDS = "one two three four five six seven eight nine ten. one two three four five."


def force(monkeypatch: pytest.MonkeyPatch, chat_model: Any, *texts: str) -> None:
    """Whatever the model thinks, its answers are these texts, one after the other."""
    from molora_cli.core import generate

    runs = [chat_model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    own: dict[int, Iterator[int]] = {}

    def draw(self: Any, logits: Any) -> int:
        if id(self) not in own:
            own[id(self)] = iter([*runs.pop(0), 4])
        return next(own[id(self)])

    monkeypatch.setattr(generate.Sampler, "__call__", draw)


def test_two_columns_hold_both_answers(
    chat_model: Any, monkeypatch: pytest.MonkeyPatch, make_repl: Callable[..., Any]
) -> None:
    repl = make_repl(chat_model, width=80, force_terminal=True, color_system=None)
    repl.said("/set max-new-tokens 200")
    repl.said("/set ignore-eos off")
    repl.said("/routing off")
    force(monkeypatch, chat_model, "short 日本語\n\n- item", WORDS)
    repl.said("/compare base hello?")
    rows = repl.answered().splitlines()
    assert all(row.count(" │ ") == 1 for row in rows)
    left, right = zip(*(row.split(" │ ") for row in rows), strict=True)
    assert [line.strip() for line in left] == [
        "router",
        "short 日本語",
        "",
        "- item",
        *[""] * (len(rows) - 4),
    ]
    assert " ".join(" ".join(right).split()) == f"base {WORDS}".strip()
    assert max(len(line) for line in right) <= 38


def test_a_narrow_screen_has_one_below_the_other(
    chat_model: Any, monkeypatch: pytest.MonkeyPatch, make_repl: Callable[..., Any]
) -> None:
    repl = make_repl(chat_model, width=40, force_terminal=True, color_system=None)
    repl.said("/set max-new-tokens 200")
    repl.said("/set ignore-eos off")
    force(monkeypatch, chat_model, WORDS, WORDS)
    repl.said("/routing off")
    repl.said("/compare base hello?")
    shown = repl.answered()
    assert shown.startswith("[router]\n") and "\n[base]\n" in shown and "│" not in shown
    assert max(map(len, shown.splitlines())) <= 40


def test_ctrl_c_ends_a_comparison_between_two_tokens(repl: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    from molora_cli.core import generate

    repl.said("/set max-new-tokens 100")
    before, count = state_after_one(repl), [0]

    def draw(self: Any, logits: Any) -> int:
        count[0] += 1
        if count[0] == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return 100

    monkeypatch.setattr(generate.Sampler, "__call__", draw)
    text = repl.said("/compare")
    assert text.count("interrupted") == 2 and state(repl) == before


def state_after_one(repl: Any) -> tuple[Any, ...]:
    repl.session.settings.max_new_tokens = 3
    repl.said("one")
    repl.session.settings.max_new_tokens = 100
    return state(repl)
