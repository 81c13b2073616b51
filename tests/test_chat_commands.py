"""The slash commands of molora chat, without a terminal: what each says and does."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from molora_cli import load
from molora_cli.core.chat_session import ChatSession, Settings
from molora_cli.core.conversation import load as load_conversation
from molora_cli.errors import InputError
from molora_cli.out import Out
from molora_cli.views.palette import Palette
from molora_cli.views.repl import COMMANDS, Repl
from molora_cli.views.repl_commands import GROUPS


@pytest.fixture(scope="session")
def loaded(chat_bundle: Path) -> Any:
    return load(chat_bundle)


@pytest.fixture
def model(loaded: Any) -> Iterator[Any]:
    yield loaded
    loaded.auto()
    loaded.muted = frozenset()
    loaded.router.k = loaded.router.temperature = None


def make_repl(model: Any, width: int = 200, **console: Any) -> Repl:
    session = ChatSession(model, notify=lambda message: None)
    session.settings = Settings(max_new_tokens=5, ignore_eos=True)
    out = Out()
    out.stdout = Console(file=io.StringIO(), width=width, _environ={}, **console)
    out.stderr = Console(file=io.StringIO(), width=width, _environ={})
    return Repl(session, out, Palette(model.adapters, out.stdout))


@pytest.fixture
def repl(model: Any) -> Repl:
    return make_repl(model)


def take(console: Any) -> str:
    text = str(console.file.getvalue())
    console.file.seek(0)
    console.file.truncate()
    return text


def said(repl: Repl, line: str) -> str:
    """What one line says beside the answer."""
    take(repl.out.stderr)
    assert repl.handle(line)
    return take(repl.out.stderr)


def test_the_tables_agree_and_every_command_has_its_line_of_help(repl: Repl) -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    text = said(repl, "/help")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  /{name}\b.*{re.escape(command.help)}$", text, re.MULTILINE)
    assert said(repl, "/?") == text and repl.handle("/quit") is False and repl.handle("/exit") is False
    repl.out.stderr = Console(file=io.StringIO(), width=40, _environ={})
    assert all(len(line) <= 40 or line.startswith("      ") for line in said(repl, "/help").splitlines())


def test_settings_of_drawing_and_of_the_router_are_told_apart(repl: Repl) -> None:
    session = repl.session
    assert "temperature is 0: always the likeliest" in said(repl, "/temperature")
    assert "router-temperature" in said(repl, "/temperature 0.5")
    assert session.settings.temperature == 0.5 and session.model.temperature is None
    assert "is 2" in said(repl, "/set router-temperature 2")
    assert session.settings.temperature == 0.5 and session.model.temperature == 2
    assert "file" in said(repl, "/set router-temperature none") and session.model.temperature is None
    assert "max-new-tokens is 7" in said(repl, "/set max-new-tokens=7")
    shown = said(repl, "/show")
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


def test_topk_is_the_routers_and_says_what_it_gives(repl: Repl) -> None:
    assert "gives a token 1 adapter" in said(repl, "/topk")
    text = said(repl, "/topk 2")  # rules give one: the router says so
    assert "vocab" in text or "up to 2" in text
    with pytest.raises(InputError, match="topk"):
        repl.handle("/topk 0")


def test_muting_and_choosing(repl: Repl) -> None:
    model = repl.session.model
    assert "muted: math" in said(repl, "/mute math") and model.muted == {"math"}
    assert "every adapter is muted" in said(repl, "/mute code")
    assert "muted" in said(repl, "/show")
    assert "among all" in said(repl, "/only auto") and model.muted == frozenset()
    assert "the base alone answers" in said(repl, "/only base") and repl.session.route == "off"
    assert "base 100 %" in said(repl, "hello")
    assert "code 100 %" in (said(repl, "/only code") and said(repl, "and now?"))
    assert "the route was fixed" in said(repl, "/why 1")


def test_a_model_without_router_says_what_can_be_done(pair: Path) -> None:
    repl = make_repl(load(pair))
    repl.session.only("one")
    for line in ("/auto", "/topk", "/topk 2", "/set router-temperature 1", "/compare auto x"):
        with pytest.raises(InputError, match="no router"):
            repl.handle(line)
    assert "one on every token" in said(repl, "/show")


# -- the routes of an answer --------------------------------------------------
def test_routes_are_shown_as_asked(model: Any) -> None:
    repl = make_repl(model, force_terminal=True, color_system="truecolor")
    assert "by colour" in said(repl, "/routing")
    assert "code" in said(repl, "hello") and "\x1b[" in take(repl.out.stdout)
    said(repl, "/routing off")
    text = said(repl, "hello")
    assert "%" not in text and "\x1b[" not in take(repl.out.stdout)
    said(repl, "/routing bars")
    text = said(repl, "hello")
    assert re.search(r"^ c  code +\S* +\d+ %$", text, re.MULTILINE), text
    assert "\x1b[" in take(repl.out.stdout)
    said(repl, "/routing color")
    assert repl.routing == "colour"
    with pytest.raises(InputError, match="off, colour, bars"):
        repl.handle("/routing rainbow")


def test_why_lists_tokens_and_explains_one(repl: Repl) -> None:
    said(repl, "hello")
    assert re.search(r"1 .*\b5 ", said(repl, "/why"), re.DOTALL)
    text = said(repl, "/why 1")
    # the answer's first token was decided at the newline that the template ends with, id 201: code's range
    assert "takes code at gate 1.00" in text
    assert re.search(r"code +1\.000", text) and re.search(r"runner-up \w+, margin 1\.000", text)
    assert "learns from no examples" in text
    for number in ("0", "6", "x", "²"):
        with pytest.raises(InputError, match="1 to 5"):
            repl.handle(f"/why {number}")


def stage_of(kind: str, bundle: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A stage of a kind with random numbers, for the tiny base (4 layers, width 64)."""
    from molora_cli.core.base.embedding import read_embedding
    from molora_cli.core.router.context import ContextNet, sample_rows
    from molora_cli.core.router.moments import Moments
    from molora_cli.core.router.spec import StageSpec
    from molora_cli.core.router.taps import tap_groups

    torch.manual_seed(0)
    names = list(bundle.adapters)
    if kind in ("taps", "layer", "hidden"):
        groups = {"taps": tap_groups((1, 2), 4), "layer": tap_groups(range(4), 4), "hidden": []}[kind]
        heads = {"taps": 2, "layer": 4, "hidden": 1}[kind]
        tensors = {}
        for i in range(heads):
            tensors |= {f"taps.{i}.weight": torch.randn(64, 2), f"taps.{i}.bias": torch.zeros(2)}
        params = {"head": "lda", **({"tap": 2} if kind == "hidden" else {})}
        return StageSpec(kind=kind, experts=names, groups=groups, params=params), tensors
    embedding = read_embedding(bundle.base_path)
    if kind == "sequence":
        shapes = {"centre": (64,), "project": (64, 8), "weight": (8, 2), "bias": (2,)}
        return StageSpec(kind=kind, experts=names), {k: torch.randn(*s) for k, s in shapes.items()}
    net = ContextNet(64, 2, projection=8, hidden=8, decays=(0.5, 0.9))
    sampled, samples = sample_rows(embedding)
    params = {"decays": [0.5, 0.9], "projection": 8, "hidden": 8, "scale": 1.0, "sampled": sampled}
    moments = Moments.empty(2, 24)
    for label in range(2):
        moments.add(label, torch.randn(30, 24).double() + label)
    tensors = {**net.state_dict(), "centre": torch.zeros(64), "samples": samples, **moments.tensors()}
    return StageSpec(kind="context", experts=names, params=params), tensors


LEARNT = {"context": True, "centroid": True, "sequence": True, "taps": True, "layer": True, "hidden": True}


@pytest.mark.parametrize(
    "kind",
    ["fixed", "uniform", "vocab", "centroid", "context", "sequence", "taps", "layer", "hidden", "arrow"],
)
def test_why_explains_the_routes_of_every_kind(pair: Path, tmp_path: Path, kind: str) -> None:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.router.attach import Request as Rules
    from molora_cli.core.router.attach import attach
    from molora_cli.core.router.files import join_tensors
    from molora_cli.core.router.kinds import _HOMES
    from molora_cli.core.router.spec import RouterSpec

    assert kind in _HOMES and len(_HOMES) == 10, "a kind without a test of /why"
    bundle = Bundle.open(pair)
    more: dict[str, Any] = {}
    if kind == "fixed":
        more = {"experts": ("one",)}
    elif kind == "vocab":
        more = {"rules": ("one=range:0-100",), "rest": "two"}
    elif kind == "centroid":
        rows = {"one": ["ab ab ab"] * 6, "two": ["xy xy xy"] * 6}
        for name, texts in rows.items():
            (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
        more = {"data": tuple(f"{name}={tmp_path / name}.jsonl" for name in rows)}
    if kind in ("fixed", "uniform", "vocab", "centroid", "arrow"):
        made = attach(bundle, Rules(kind=kind, **more))
        bundle.set_router(made.spec, made.tensors)
    else:
        stage, tensors = stage_of(kind, bundle)
        documents = {"documents": {"one": 12, "two": 30}}
        bundle.set_router(RouterSpec(stages=[stage], training=documents), join_tensors([tensors]))
    repl = make_repl(load(pair))
    said(repl, "hello")
    text = said(repl, "/why 3")
    assert "token 3 " in text and "decided at the token before it" in text
    assert re.search(r"\bone\b", text) and ("margin " in text or kind == "fixed")
    if kind in LEARNT:
        assert re.search(r"nearest training domain( by score)?: (one|two) \(learnt from \d+ texts\)", text)
    else:
        assert "learns from no examples" in text
    if kind in ("context", "centroid"):
        assert re.search(r"distance from each domain's mean: (one|two) \d+\.\d\d, (one|two) \d+\.\d\d", text)
    if kind in ("taps", "layer"):
        assert re.search(r"layers? [\d-]+: .*; scores ", text)


def test_why_says_what_was_muted(repl: Repl) -> None:
    repl.session.settings.max_new_tokens = 30
    said(repl, "/mute code")
    said(repl, "hello")
    assert re.search(r"code +1\.000  muted", said(repl, "/why 1"))


# -- comparing ----------------------------------------------------------------
def state(repl: Repl) -> tuple[Any, ...]:
    session = repl.session
    turns = [dict(turn) for turn in session.conversation.turns]
    return turns, session.last, len(session.all_events), session.answers, list(session._cache.ids)


def test_a_comparison_changes_nothing_and_answers_as_one_would(repl: Repl, model: Any) -> None:
    session = repl.session
    session.settings.temperature, session.settings.seed = 1.0, 3
    said(repl, "one")
    said(repl, "two")
    before, answer = state(repl), session.last.text
    take(repl.out.stdout)
    text = said(repl, "/compare")
    shown = take(repl.out.stdout)
    assert state(repl) == before
    # the same seed: the router's side is the answer that stands in the conversation
    history = session.conversation.messages()[:-1]
    options = {"max_new_tokens": 5, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    other = "".join(e.text for e in model.stream(history, route="off", **options))
    assert shown == f"[router]\n{printed(answer)}\n[base]\n{printed(other)}\n"
    assert "router  5 tokens" in text and "base    5 tokens | base 100 %" in text
    said(repl, "/compare code what is new?")
    assert "[code]" in take(repl.out.stdout) and state(repl) == before
    said(repl, "three")
    assert session.conversation.turns[-2]["content"] == "three"


def printed(text: str) -> str:
    from molora_cli.text import printable

    return printable(text, keep="\n\t")


def test_unseeded_drawing_takes_one_seed_for_both_sides(repl: Repl) -> None:
    repl.session.settings.temperature = 1.0
    repl.session.only("math")
    said(repl, "one")
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
def test_a_comparison_that_cannot_be(repl: Repl, line: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        repl.handle(line)


WORDS = "one two three four five six seven eight nine ten. one two three four five."


def force(monkeypatch: pytest.MonkeyPatch, model: Any, *texts: str) -> None:
    """Whatever the model thinks, its answers are these texts, one after the other."""
    from molora_cli.core import generate

    runs = [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    own: dict[int, Iterator[int]] = {}

    def draw(self: Any, logits: Any) -> int:
        if id(self) not in own:
            own[id(self)] = iter([*runs.pop(0), 4])
        return next(own[id(self)])

    monkeypatch.setattr(generate.Sampler, "__call__", draw)


def test_two_columns_hold_both_answers(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    repl = make_repl(model, width=80, force_terminal=True, color_system=None)
    said(repl, "/set max-new-tokens 200")
    said(repl, "/set ignore-eos off")
    said(repl, "/routing off")
    force(monkeypatch, model, "short 日本語\n\n- item", WORDS)
    said(repl, "/compare base hello?")
    rows = take(repl.out.stdout).splitlines()
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


def test_a_narrow_screen_has_one_below_the_other(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    repl = make_repl(model, width=40, force_terminal=True, color_system=None)
    said(repl, "/set max-new-tokens 200")
    said(repl, "/set ignore-eos off")
    force(monkeypatch, model, WORDS, WORDS)
    said(repl, "/routing off")
    said(repl, "/compare base hello?")
    shown = take(repl.out.stdout)
    assert shown.startswith("[router]\n") and "\n[base]\n" in shown and "│" not in shown
    assert max(map(len, shown.splitlines())) <= 40


def test_ctrl_c_ends_a_comparison_between_two_tokens(repl: Repl, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    from molora_cli.core import generate

    said(repl, "/set max-new-tokens 100")
    before, count = state_after_one(repl), [0]

    def draw(self: Any, logits: Any) -> int:
        count[0] += 1
        if count[0] == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return 100

    monkeypatch.setattr(generate.Sampler, "__call__", draw)
    text = said(repl, "/compare")
    assert text.count("interrupted") == 2 and state(repl) == before


def state_after_one(repl: Repl) -> tuple[Any, ...]:
    repl.session.settings.max_new_tokens = 3
    said(repl, "one")
    repl.session.settings.max_new_tokens = 100
    return state(repl)


# -- files --------------------------------------------------------------------
def test_a_trace_opens_in_inspect_and_a_report_is_written(
    repl: Repl, tmp_path: Path, chat_bundle: Path
) -> None:
    from molora_cli.core.inspection import recognise
    from molora_cli.core.trace_files import load_trace

    for line in ("/trace x.trace", "/report x.html"):
        with pytest.raises(InputError, match="no answer yet"):
            repl.handle(line)
    said(repl, "/system be brief")
    said(repl, "hällo")
    said(repl, "and now?")
    session, file = repl.session, tmp_path / "routes of a chat.trace"
    assert "routes saved" in said(repl, f"/trace '{file}'")
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
    assert "wrote" in said(repl, f"/report {page}")
    assert "<html" in page.read_text()[:200]
    for line in (f"/trace '{file}'", f"/report {page}", f"/save {page}"):
        with pytest.raises(InputError, match="exists"):
            repl.handle(line)
    with pytest.raises(InputError, match="HTML"):
        repl.handle(f"/report {tmp_path / 'x.txt'}")
    with pytest.raises(InputError, match="no folder"):
        repl.handle(f"/trace {tmp_path / 'none' / 'x.trace'}")
    said(repl, "/only code")
    said(repl, "third")
    said(repl, f"/trace {tmp_path / 'fixed.trace'}")
    assert set(load_trace(tmp_path / "fixed.trace").indices.ravel().tolist()) == {1}


def test_a_saved_conversation_brings_settings_and_routing(repl: Repl, tmp_path: Path, model: Any) -> None:
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
        said(repl, line)
    file = tmp_path / "talk.json"
    assert "--resume" in said(repl, f"/save {file}")
    turns = [dict(turn) for turn in repl.session.conversation.turns]
    said(repl, "/auto")
    said(repl, "/only code")
    said(repl, "/clear")
    other = make_repl(model)
    text = said(other, f"/load {file}")
    assert "2 turns" in text and "the last question was: hello" in text
    session = other.session
    assert session.conversation.turns == turns and session.conversation.system == "be brief"
    assert (session.settings.seed, session.settings.temperature) == (7, 0.5)
    assert session.route == "auto" and model.muted == {"math"} and model.temperature == 2
    said(other, "more")
    said(other, "/save")  # over the file that it came from
    assert len(load_conversation(file).conversation.turns) == 4
    with pytest.raises(InputError, match="exists"):
        repl.handle(f"/save {tmp_path}")


def test_what_a_saved_conversation_cannot_bring_is_said(repl: Repl, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    body = {"format": "molora-chat", "format_version": 1, "system": None, "turns": []}
    settings = {"temperature": "hot", "seed": 4, "new": 1}
    routing = {"route": "legal", "muted": ["tax"], "topk": "x", "temperature": [1]}
    file.write_text(json.dumps({**body, "settings": settings, "routing": routing}))
    text = said(repl, f"/load {file}")
    for part in ("temperature is 'hot'", "no setting 'new'", "no adapter 'legal'", "'tax'", "k is 'x'"):
        assert part in text
    assert repl.session.settings.seed == 4 and repl.session.route == "auto"
    file.write_text(json.dumps(body))  # as older ones are
    assert "0 turns" in said(repl, f"/load {file}")
    file.write_text(json.dumps({**body, "settings": 3}))
    with pytest.raises(InputError, match="tables"):
        repl.handle(f"/load {file}")


def test_an_adapter_joins_the_chat(chat_bundle: Path, trio: dict[str, Path]) -> None:
    repl = make_repl(load(chat_bundle), force_terminal=True, color_system="truecolor")
    said(repl, "hello")
    text = said(repl, f"/load legal={trio['new']}")
    assert re.search(r"adapter legal, 8 modules, in \d\.\d\d s", text)
    assert "vocab router does not know it" in text and "molora add keeps it" in text and "legal" in text
    assert "legal" in repl._words()["only"]
    said(repl, "/only legal")
    assert "legal 100 %" in said(repl, "and now?")
    said(repl, "/auto")
    said(repl, "/compare legal")
    assert "legal" in take(repl.out.stdout)
    for line in ("/load legal=", "/load math=x", "/load x=nowhere/at/all/x"):
        with pytest.raises(InputError):
            repl.handle(line)
    assert repl.session.model.adapters == ("math", "code", "legal")


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
def test_a_wrong_command_says_what_is_right(repl: Repl, line: str, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        repl.handle(line)
    assert reason in str(caught.value)


def test_a_space_makes_a_question_of_it(repl: Repl) -> None:
    assert "5 tokens" in said(repl, " /usr/bin is full")
    assert repl.session.conversation.turns[0]["content"] == "/usr/bin is full"


def test_the_rest(repl: Repl) -> None:
    assert repl.handle("   ")
    said(repl, "hello")
    assert "5 tokens in 1 answer," in said(repl, "/stats")
    assert "5 tokens" in said(repl, "/regen")
    assert "be\nbrief" in said(repl, "/system be\nbrief")
    assert "(none)" in said(repl, "/system none")
    assert "empty" in said(repl, "/clear") and repl.session.conversation.turns == []
