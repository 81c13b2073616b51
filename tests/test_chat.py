"""molora chat without a terminal: printer, conversation, session, slash commands, the command itself."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from molora_cli.app import main
from molora_cli.core import generate
from molora_cli.core.chat_session import ChatSession, Settings
from molora_cli.core.generate import TokenEvent
from molora_cli.errors import InputError

LETTERS = "👩‍💻 日本 ď"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments, stdin=None) -> exit code, stdout, stderr, through the program's own boundary."""

    def call(*arguments: object, stdin: bytes | None = None) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["molora", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin or b"")))
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capfd.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def bundle(chat_bundle: Path) -> Path:
    return chat_bundle


@pytest.fixture
def loaded(loaded_chat: Any) -> Any:
    return loaded_chat


@pytest.fixture
def model(chat_model: Any) -> Any:
    return chat_model


@pytest.fixture
def session(model: Any) -> ChatSession:
    told: list[str] = []
    made = ChatSession(model, notify=told.append)
    made.told = told  # type: ignore[attr-defined]
    made.settings = Settings(max_new_tokens=5, ignore_eos=True)
    return made


# -- the session --------------------------------------------------------------
def talk(session: ChatSession, *questions: str) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for question in questions:
        events = list(session.ask(question))
    return events


@pytest.mark.parametrize("route", ["math", "off"])
def test_only_in_mid_chat_equals_a_fresh_run(session: ChatSession, model: Any, route: str) -> None:
    talk(session, "first", "second")
    history = [dict(turn) for turn in session.conversation.turns]
    session.only(route)
    switched = talk(session, "third")
    messages = [*history, {"role": "user", "content": "third"}]
    fresh = list(model.stream(messages, route=route, max_new_tokens=5, ignore_eos=True))
    assert switched == fresh
    session.auto()
    again = talk(session, "fourth")
    messages = [dict(turn) for turn in session.conversation.turns[:-1]]
    fresh = list(model.stream(messages, max_new_tokens=5, ignore_eos=True))
    assert [e.id for e in again] == [e.id for e in fresh]


def test_a_followed_conversation_equals_one_read_at_once(session: ChatSession, model: Any) -> None:
    events = talk(session, "one", "two", "three")
    messages = [dict(turn) for turn in session.conversation.turns[:-1]]
    fresh = list(model.stream(messages, max_new_tokens=5, ignore_eos=True))
    assert [(e.id, e.route.indices) for e in events] == [(e.id, e.route.indices) for e in fresh]
    assert max(abs(a.logprob - b.logprob) for a, b in zip(events, fresh, strict=True)) < 1e-4


def test_muting_keeps_an_adapter_out(session: ChatSession, model: Any) -> None:
    session.settings.max_new_tokens = 30
    taken = {e.route.names[0][0] for e in talk(session, "one")}
    assert "math" in taken
    session.mute("math")
    assert "math" not in {e.route.names[0][0] for e in talk(session, "one")}
    session.auto()
    assert model.muted == frozenset()
    with pytest.raises(InputError, match="nobody"):
        session.mute("nobody")
    session.only("code")
    with pytest.raises(InputError, match="no effect"):
        session.mute("math")


def test_history_beyond_the_context_goes_on_with_a_notice(session: ChatSession) -> None:
    session.conversation.system = "stay"
    for number in range(12):
        talk(session, f"{number} " + "x" * 40)
    assert any("256" in message for message in session.told)  # type: ignore[attr-defined]
    assert session.conversation.messages()[0]["content"] == "stay"
    assert len(session.conversation.turns) < 8


def test_a_question_that_is_too_long_leaves_the_history_as_it_was(session: ChatSession) -> None:
    talk(session, "one")
    before = [dict(turn) for turn in session.conversation.turns]
    with pytest.raises(InputError, match=r"tokens.*256"):
        session.ask("x" * 400)
    assert session.conversation.turns == before
    assert len(talk(session, "two")) == 5


def test_an_interrupted_answer_stays_in_the_history(session: ChatSession) -> None:
    events = session.ask("one")
    seen = [next(events), next(events)]
    events.close()
    assert session.last.stop == "interrupted"
    assert session.conversation.turns[-1] == {"role": "assistant", "content": "".join(e.text for e in seen)}
    assert len(talk(session, "two")) == 5


def test_an_answer_broken_off_within_a_forward_harms_nothing(session: ChatSession, model: Any) -> None:
    talk(session, "one")
    hits = [0]

    def stop(*_: object) -> None:
        hits[0] += 1
        if hits[0] == 3:
            raise KeyboardInterrupt

    hook = model.base.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        talk(session, "two")
    hook.remove()
    assert len(session.last.events) == 2 and session.last.stop == "interrupted"
    with pytest.raises(InputError, match="broken off"):
        session.trace()
    events = talk(session, "three")
    messages = [dict(turn) for turn in session.conversation.turns[:-1]]
    assert [e.id for e in events] == [e.id for e in model.stream(messages, max_new_tokens=5, ignore_eos=True)]


def test_regenerate_replaces_the_answer(session: ChatSession) -> None:
    with pytest.raises(InputError, match="no question"):
        session.regenerate()
    session.settings.temperature, session.settings.seed = 1.0, 7
    first = talk(session, "one")
    second = list(session.regenerate())
    assert [e.id for e in first] != [e.id for e in second]
    assert [turn["role"] for turn in session.conversation.turns] == ["user", "assistant"]
    session.clear()
    assert [e.id for e in talk(session, "one")] == [e.id for e in first]


def test_settings_by_name() -> None:
    settings = Settings()
    settings.set("max-new-tokens", "7")
    settings.set("temperature", "0.5")
    settings.set("seed", "none")
    assert (settings.max_new_tokens, settings.temperature, settings.seed) == (7, 0.5, None)
    for name, value in [
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("top_p", "0"),
        ("top_k", "x"),
        ("heat", "1"),
    ]:
        with pytest.raises(InputError):
            settings.set(name, value)


# -- the command --------------------------------------------------------------
def force(monkeypatch: pytest.MonkeyPatch, ids: list[int]) -> None:
    """Whatever the model thinks, the answer is these ids."""
    rest = iter(ids)
    monkeypatch.setattr(generate.Sampler, "__call__", lambda self, logits: next(rest))


def test_forced_letters_come_out_exactly(
    run: Run, bundle: Path, loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = loaded.tokenizer(LETTERS, add_special_tokens=False)["input_ids"]
    force(monkeypatch, [*ids, 4])  # 4 ends the turn and is not shown
    code, out, err = run("chat", bundle, "-p", "hello")
    assert (code, out) == (0, LETTERS + "\n")
    assert "tokens/s" in err and "code" in err


def test_json_lines_hold_events_and_a_summary(run: Run, bundle: Path) -> None:
    code, out, _ = run("chat", bundle, "--json", "--max-new-tokens", 6, "--ignore-eos", stdin=b"hello\n")
    *events, summary = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and len(events) == 6
    assert [record["n"] for record in events] == [1, 2, 3, 4, 5, 6]
    assert "".join(record["text"] for record in events) == summary["text"]
    assert summary["type"] == "summary" and summary["schema_version"] == 1 and summary["stop"] == "length"
    assert sum(summary["share"].values()) == pytest.approx(1, abs=1e-3)
    assert all(record["logprob"] < 0 for record in events)


def test_route_and_mute_options(run: Run, bundle: Path) -> None:
    options = ("--json", "--max-new-tokens", 12, "--ignore-eos", "-p", "hi")
    assert '"share": {"math": 1.0}' in run("chat", bundle, *options, "--route", "math")[1]
    assert '"share": {"base": 1.0}' in run("chat", bundle, *options, "--route", "off")[1]
    assert "code" in run("chat", bundle, *options)[1]
    assert "code" not in run("chat", bundle, *options, "--mute", "code")[1]


def test_a_saved_conversation_is_resumed_and_options_go_first(
    run: Run, bundle: Path, session: ChatSession, tmp_path: Path
) -> None:
    file = tmp_path / "talk.json"
    session.settings.max_new_tokens = 3
    session.only("math")
    talk(session, "one")
    session.save(file)

    def summary(*options: object) -> dict[str, Any]:
        code, out, err = run("chat", bundle, "--resume", file, "-p", "two", "--json", *options)
        assert code == 0, err
        return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]

    resumed = summary()
    assert resumed["tokens"] == 3 and resumed["share"] == {"math": 1.0}
    alone = json.loads(run("chat", bundle, "-p", "two", "--json")[1].splitlines()[-1])
    assert resumed["prompt_tokens"] > alone["prompt_tokens"]
    changed = summary("--max-new-tokens", 2, "--route", "off")
    assert changed["tokens"] == 2 and changed["share"] == {"base": 1.0}
    code, _, err = run("chat", bundle, "--resume", tmp_path / "none.json", "-p", "x")
    assert code == 2 and "cannot read" in err and "loading" not in err


def test_the_same_seed_gives_the_same_answer(run: Run, bundle: Path) -> None:
    options = ("chat", bundle, "-p", "hi", "--temperature", 1.5, "--top-k", 40, "--max-new-tokens", 12)
    assert run(*options, "--seed", 3)[1] == run(*options, "--seed", 3)[1] != run(*options, "--seed", 4)[1]


def test_the_default_bundle_is_taken(run: Run, bundle: Path) -> None:
    from molora_cli.core.bundle.store import set_default_bundle

    code, _, err = run("chat", "-p", "hi")
    assert code == 2 and "default" in err
    set_default_bundle(bundle)
    assert run("chat", "-p", "hi", "--max-new-tokens", 1)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "stdin", "reason"),
    [
        (["--route", "nobody", "-p", "x"], b"", "nobody"),
        (["--mute", "nobody", "-p", "x"], b"", "nobody"),
        (["-p", " "], b"", "empty"),
        ([], b"", "empty"),
        ([], b"a\xff", "not UTF-8 at byte 1"),
        (["-p", "x", "--top-p", "0"], b"", "top_p"),
        (["-p", "x", "--temperature", "nan"], b"", "temperature"),
        (["-p", "x", "--max-new-tokens", "0"], b"", "max_new_tokens"),
        (["-p", "x" * 400], b"", "256"),
        (["-p", "x", "--chat-template", "nowhere.jinja"], b"", "nowhere.jinja"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(
    run: Run, bundle: Path, arguments: list[str], stdin: bytes, reason: str
) -> None:
    code, out, err = run("chat", bundle, "-q", *arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and reason in err
    assert "Traceback" not in err and len(err.splitlines()) <= 3


def test_a_bundle_without_router_says_what_to_do(run: Run, bundle: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "unrouted"
    shutil.copytree(bundle, copy)
    manifest = json.loads((copy / "molora.json").read_text())
    manifest["routing"] = None
    (copy / "molora.json").write_text(json.dumps(manifest))
    (copy / "router.safetensors").unlink()
    code, _, err = run("chat", copy, "-p", "x")
    assert code == 2 and "train-router" in err and "--route" in err
    assert run("chat", copy, "-p", "x", "--route", "math", "--max-new-tokens", 1)[0] == 0


def test_without_chat_template(run: Run, bundle: Path, tmp_path: Path, tiny_llama: Path) -> None:
    import shutil

    bare = tmp_path / "bare"
    shutil.copytree(tiny_llama, bare)
    (bare / "chat_template.jinja").unlink()
    code, _, err = run("chat", bundle, "-q", "--base", bare, "-p", "x")
    assert code == 2 and "chat_template.jinja" in err and "--chat-template FILE" in err and "--plain" in err
    plain = ("chat", bundle, "--base", bare, "-p", "x", "--max-new-tokens", 2, "--json")
    assert json.loads(run(*plain, "--plain")[1].splitlines()[-1])["prompt_tokens"] == 1
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    assert json.loads(run(*plain, "--chat-template", file)[1].splitlines()[-1])["prompt_tokens"] == 2
    for template in ("{% for i in range(10**9) %}x{% endfor %}", "{{ ().__class__ }}"):
        file.write_text(template)
        code, _, err = run("chat", bundle, "-q", "--base", bare, "-p", "x", "--chat-template", file)
        assert code == 2 and "chat template" in err


def test_help_shows_two_examples_without_torch() -> None:
    script = (
        "import sys; sys.argv = ['molora', 'chat', '--help']\n"
        "from molora_cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'prompt_toolkit'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("molora chat my-bundle") == 2


@pytest.mark.slow
def test_an_ascii_terminal_gets_replacement_characters(bundle: Path, loaded: Any) -> None:
    ids = loaded.tokenizer(LETTERS, add_special_tokens=False)["input_ids"]
    script = (
        "import sys\nfrom molora_cli.core import generate\n"
        f"rest = iter({[*ids, 4]})\n"
        "generate.Sampler.__call__ = lambda self, logits: next(rest)\n"
        f"sys.argv = ['molora', 'chat', {str(bundle)!r}, '-p', 'x']\n"
        "from molora_cli.app import main\nmain()\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"??? ?? ?\n"
    assert b"Traceback" not in done.stderr
