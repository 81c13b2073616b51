"""What molora chat writes and reads: traces, reports, conversations, and an adapter that joins."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molora_cli import load
from molora_cli.core.conversation import load as load_conversation
from molora_cli.errors import InputError


@pytest.fixture
def repl(chat_model: Any, make_repl: Callable[..., Any]) -> Any:
    return make_repl(chat_model)


def test_a_trace_opens_in_inspect_and_a_report_is_written(
    repl: Any, tmp_path: Path, chat_bundle: Path
) -> None:
    from molora_cli.core.inspection import recognise
    from molora_cli.core.trace_files import load_trace

    for line in ("/trace x.trace", "/report x.html"):
        with pytest.raises(InputError, match="no answer yet"):
            repl.handle(line)
    repl.said("/system be brief")
    repl.said("hällo")
    repl.said("and now?")
    session, file = repl.session, tmp_path / "routes of a chat.trace"
    assert "routes saved" in repl.said(f"/trace '{file}'")
    assert recognise(file) == "trace"
    trace = load_trace(file)
    assert trace.adapters == ("math", "code") and trace.scores is not None
    assert trace.meta["bundle"] == str(chat_bundle) and trace.meta["router"] == "vocab"
    # prompt and answer but for its last token, which the model has not read
    ids = [*session.last.prompt, *(event.id for event in session.last.events)]
    assert trace.token_ids.tolist() == ids[:-1]
    # the route of a row is that of the event after it
    assert trace.indices[-4:, 0, 0].tolist() == [event.route.top for event in session.last.events[1:]]
    held = trace.token_ids[trace.content]
    text = (
        "".join(trace.text(int(i)) for i in held).encode("utf-8", "surrogateescape").decode(errors="replace")
    )
    said_so_far = "".join(m["content"] for m in session.conversation.messages())
    assert said_so_far.startswith(text[: len(text) - 4]) and "im_start" not in text
    page = tmp_path / "routes.html"
    assert "wrote" in repl.said(f"/report {page}")
    assert "<html" in page.read_text()[:200]
    for line in (f"/trace '{file}'", f"/report {page}", f"/save {page}"):
        with pytest.raises(InputError, match="exists"):
            repl.handle(line)
    with pytest.raises(InputError, match="HTML"):
        repl.handle(f"/report {tmp_path / 'x.txt'}")
    with pytest.raises(InputError, match="no folder"):
        repl.handle(f"/trace {tmp_path / 'none' / 'x.trace'}")
    repl.said("/only code")
    repl.said("third")
    repl.said(f"/trace {tmp_path / 'fixed.trace'}")
    assert set(load_trace(tmp_path / "fixed.trace").indices.ravel().tolist()) == {1}


def test_a_saved_conversation_brings_settings_and_routing(
    repl: Any, tmp_path: Path, chat_model: Any, make_repl: Callable[..., Any]
) -> None:
    with pytest.raises(InputError, match="first time"):
        repl.handle("/save")
    for line in (
        "/system be brief",
        "hello",
        "/set seed 7",
        "/temperature 0.5",
        "/set router-temperature 2",
        "/mute math",
    ):
        repl.said(line)
    file = tmp_path / "talk.json"
    assert "--resume" in repl.said(f"/save {file}")
    turns = [dict(turn) for turn in repl.session.conversation.turns]
    repl.said("/auto")
    repl.said("/only code")
    repl.said("/clear")
    other = make_repl(chat_model)
    text = other.said(f"/load {file}")
    assert "2 turns" in text and "the last question was: hello" in text
    session = other.session
    assert session.conversation.turns == turns and session.conversation.system == "be brief"
    assert (session.settings.seed, session.settings.temperature) == (7, 0.5)
    assert session.route == "auto" and chat_model.muted == {"math"} and chat_model.temperature == 2
    other.said("more")
    other.said("/save")  # over the file that it came from
    assert len(load_conversation(file).conversation.turns) == 4
    with pytest.raises(InputError, match="exists"):
        repl.handle(f"/save {tmp_path}")


def test_a_place_that_cannot_be_written_does_not_end_the_chat(
    repl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", f"/save {tmp_path}/none/talk.json", "/trace /dev/none/x", "/stats"])

    class Reader:
        unfinished = False

        def read(self, prompt: str) -> str:
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

    monkeypatch.setattr(repl, "_editor", Reader)
    repl.run()
    text = repl.out.stderr.file.getvalue()
    assert text.count("error: ") == 2 and "5 tokens in 1 answer" in text


def test_what_a_saved_conversation_cannot_bring_is_said(repl: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    body = {"format": "molora-chat", "format_version": 1, "system": None, "turns": []}
    settings = {"temperature": "hot", "seed": 4, "new": 1}
    routing = {"route": "legal", "muted": ["tax"], "topk": "x", "temperature": [1]}
    file.write_text(json.dumps({**body, "settings": settings, "routing": routing}))
    text = repl.said(f"/load {file}")
    for part in ("temperature is 'hot'", "no setting 'new'", "no adapter 'legal'", "'tax'", "k is 'x'"):
        assert part in text
    assert repl.session.settings.seed == 4 and repl.session.route == "auto"
    file.write_text(json.dumps(body))  # as older ones are
    assert "0 turns" in repl.said(f"/load {file}")
    file.write_text(json.dumps({**body, "settings": 3}))
    with pytest.raises(InputError, match="tables"):
        repl.handle(f"/load {file}")


def test_an_adapter_joins_the_chat(
    chat_bundle: Path, trio: dict[str, Path], make_repl: Callable[..., Any]
) -> None:
    repl = make_repl(load(chat_bundle), force_terminal=True, color_system="truecolor")
    repl.said("hello")
    text = repl.said(f"/load legal={trio['new']}")
    assert re.search(r"adapter legal, 8 modules, in \d\.\d\d s", text)
    assert "vocab router does not know it" in text and "molora add keeps it" in text and "legal" in text
    assert "legal" in repl._words()["only"]
    repl.said("/only legal")
    assert "legal 100 %" in repl.said("and now?")
    repl.said("/auto")
    repl.said("/compare legal")
    assert "legal" in repl.answered()
    for line in ("/load legal=", "/load math=x", "/load x=nowhere/at/all/x"):
        with pytest.raises(InputError):
            repl.handle(line)
    assert repl.session.model.adapters == ("math", "code", "legal")
