"""The slash commands of `molora chat`: one table, one function each."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from molora_cli.core.chat_session import shares
from molora_cli.core.conversation import load
from molora_cli.errors import InputError
from molora_cli.text import printable, shorten
from molora_cli.views.chat import why
from molora_cli.views.coloured import NEWLINE
from molora_cli.views.interrupt import interruptible
from molora_cli.views.palette import Palette

if TYPE_CHECKING:
    from molora_cli.views.repl import Repl

ROUTINGS = ("off", "colour", "bars")
ALIASES = {"quit": "exit", "bye": "exit", "?": "help"}
_NARROW = 76  # columns below which help stands under each command instead of beside it
_IN = " " * 6
_FEW = 12  # letters of a token that the numbered list shows


class Command(NamedTuple):
    """A slash command. argument: what follows its name, in brackets where it may be left out."""

    argument: str
    help: str
    action: Callable[[Repl, str], None]


# -- the conversation ---------------------------------------------------------
def _help(repl: Repl, argument: str) -> None:
    width = repl.out.stderr.width
    lines = []
    for title, names in GROUPS.items():
        lines.append(title)
        rows = {f"/{name} {COMMANDS[name].argument}".strip(): COMMANDS[name].help for name in names}
        for usage, text in rows.items():
            # the longest usage of all groups, so that the help of all stands in one column
            if width >= _NARROW:
                lines.append(f"  {usage:<{_usage()}}  {text}")
                continue
            lines += [f"  {usage}", textwrap.fill(text, width, initial_indent=_IN, subsequent_indent=_IN)]
    repl.say("\n".join(lines))


def _usage() -> int:
    return max(len(f"/{name} {command.argument}".strip()) for name, command in COMMANDS.items())


def _exit(repl: Repl, argument: str) -> None:
    """Leaving is the loop's own affair."""


def _clear(repl: Repl, argument: str) -> None:
    repl.session.clear()
    repl.out.note("the conversation is empty")


def _regen(repl: Repl, argument: str) -> None:
    repl.answer(repl.session.regenerate)


def _compare(repl: Repl, argument: str) -> None:
    from molora_cli.views.repl_compare import show_comparison

    name, _, text = argument.partition(" ")
    if name not in ("base", "auto", *repl.session.model.adapters):
        if argument and not text:
            raise InputError(
                f"there is no adapter '{shorten(name, 40)}'",
                f"use base or one of: {', '.join(repl.session.model.adapters)}; or give a whole question",
            )
        name, text = "base", argument
    show_comparison(repl, name, text.strip() or None)


def _system(repl: Repl, argument: str) -> None:
    conversation = repl.session.conversation
    if argument:
        conversation.system = None if argument == "none" else argument
    repl.say(f"system: {conversation.system or '(none)'}")


# -- routing ------------------------------------------------------------------
def _only(repl: Repl, argument: str) -> None:
    if argument == "auto":
        _auto(repl, "")
        return
    repl.session.only(argument)
    back = "" if repl.session.model.router is None else "; /auto gives the choice back to the router"
    who = (
        "no adapter: the base alone answers"
        if argument in ("base", "off")
        else f"every token takes {argument}"
    )
    repl.out.note(f"{who} now{back}")


def _mute(repl: Repl, argument: str) -> None:
    session = repl.session
    session.mute(argument)
    muted = sorted(session.model.muted)
    repl.out.note(f"muted: {', '.join(muted)}; /auto unmutes")
    if set(session.model.adapters) <= set(muted):
        repl.out.note("every adapter is muted: the base alone answers")


def _auto(repl: Repl, argument: str) -> None:
    session = repl.session
    if session.model.router is None:
        raise InputError(
            "this bundle has no router that could choose", "/only NAME chooses an adapter, /only base none"
        )
    session.auto()
    repl.out.note("the router chooses among all adapters")


def _topk(repl: Repl, argument: str) -> None:
    model = repl.session.model
    if argument:
        asked, given = argument, repl.session.set_topk(argument)
        if str(given) != asked:
            repl.out.note(
                f"a router of kind {shorten(model.router.spec.kind, 40)} gives at most {given} here"
            )
    elif model.router is None:
        raise InputError("there is no router", "/only NAME chooses an adapter")
    repl.out.note(f"the router gives a token {_adapters(model.topk)}")


def _adapters(count: int) -> str:
    return "1 adapter" if count == 1 else f"up to {count} adapters"


def _load(repl: Repl, argument: str) -> None:
    name, is_adapter, place = argument.partition("=")
    if is_adapter and not _path(argument).exists() and "/" not in name:
        _load_adapter(repl, name.strip(), str(_path(place)) if place.strip() else "")
        return
    path = _path(argument)
    resume(repl, path)


def _load_adapter(repl: Repl, name: str, place: str) -> None:
    from molora_cli.core.chat_load import load_adapter

    if not place:
        raise InputError(f"/load {name}= has no path", f"write /load {name}=FOLDER, the folder of an adapter")
    model = repl.session.model
    with interruptible():  # Ctrl-C waits: half an adapter would be worse than one too many
        done = load_adapter(model, name, place)
    repl.palette = Palette(model.adapters, repl.out.stdout)
    for note in done.notes:
        repl.out.warn(f"{name}: {note}")
    repl.out.note(
        f"adapter {name}, {done.modules} modules, in {done.seconds:.2f} s; it is here until you leave, "
        f"molora add keeps it in the bundle"
    )
    if model.router is not None:
        kind = shorten(model.router.spec.kind, 40)
        taught = (
            f"molora add BUNDLE {name}=PATH --data {name}=FILE gives it a column"
            if "centroid" in kind or "context" in kind
            else "molora train-router teaches it"
        )
        repl.out.note(f"the {kind} router does not know it and gives it no token ({taught})")
    repl.out.note(f"/only {name} gives it every token, /compare {name} shows what it would say")
    repl.show_legend()


# -- what one sees ------------------------------------------------------------
def _why(repl: Repl, argument: str) -> None:
    from molora_cli.core.chat_why import training_note

    session = repl.session
    events = session.last.events
    if not events:
        raise InputError("there is no answer yet", "ask something first")
    if not argument:
        _number_tokens(repl)
        return
    if not argument.isdecimal() or not 1 <= int(argument) <= len(events):
        raise InputError(
            f"the last answer has tokens 1 to {len(events)}", "/why N takes one of these, /why lists them"
        )
    number = int(argument)
    event = events[number - 1]
    router, note = session.model.router, ""
    if router is not None and event.route.scores:
        best = max(event.route.scores[-1], key=lambda item: item[1])[0]
        note = training_note(session.model, session.read_before(number), best)
    layers = () if router is None else router.group_ranges
    hold = 0.0 if router is None else max(stage.spec.margin for stage in router.stages)
    repl.say(why(event, number, repl.palette, session.model.muted, layers, note, hold))


def _number_tokens(repl: Repl) -> None:
    """Every token of the last answer behind its number, in its colour."""
    text, line, width = Text(end=""), 0, repl.out.stderr.width
    newline = NEWLINE if repl.out.stderr.encoding.lower().startswith("utf") else "\\n"
    for number, event in enumerate(repl.session.last.events, start=1):
        shown = printable(event.text.replace("\n", newline))
        shown = shown if len(shown) <= _FEW else shown[: _FEW - 1] + "…"
        entry = repl.palette.token(shown or "…", event.route.top, event.route.strength)
        label = Text(f"{number} ", style="dim")
        size = label.cell_len + entry.cell_len + 2
        if line + size > width and line:
            text.append("\n")
            line = 0
        text.append_text(label).append_text(entry).append("  ")
        line += size
    repl.say(text)
    repl.say("/why N explains one of them")


def _routing(repl: Repl, argument: str) -> None:
    chosen = argument.lower().replace("color", "colour")
    if chosen and chosen not in ROUTINGS:
        raise InputError(
            f"routes cannot be shown as '{shorten(argument, 40)}'", f"give {', '.join(ROUTINGS)}"
        )
    repl.routing = chosen or repl.routing
    means = {
        "off": "plain text",
        "colour": "in the text, by colour" if repl.palette.colours else "in the text, by letter",
        "bars": "in the text, and as bars under each answer",
    }
    repl.out.note(f"routing {repl.routing}: {means[repl.routing]}")


def _stats(repl: Repl, argument: str) -> None:
    session = repl.session
    count = len(session.all_events)
    answers = "1 answer" if session.answers == 1 else f"{session.answers} answers"
    speed = f", {count / session.seconds:.1f} tokens/s with reading" if session.seconds else ""
    repl.say(f"{count} tokens in {answers}{speed}")
    repl.say(repl.palette.legend(shares(session.all_events), width=repl.out.stderr.width))


def _trace(repl: Repl, argument: str) -> None:
    from molora_cli.core.trace_files import save_trace

    path = _new_file(argument)
    trace = repl.session.trace()
    save_trace(path, trace)
    repl.out.note(f"{len(trace):,} routes saved in {path}; molora inspect {path} shows them")


def _report(repl: Repl, argument: str) -> None:
    from molora_cli.core.counting import summarise
    from molora_cli.core.inspection import bundle_facts
    from molora_cli.views.report import Side, check_report, write_report

    path = _new_file(argument)
    check_report(path, force=False)
    trace = repl.session.trace()
    bundle = repl.session.model.bundle
    facts = bundle_facts(bundle) if bundle else None
    size = write_report(path, Side("chat", trace, summarise(trace), facts))
    repl.out.note(f"wrote {path} ({size / 1e6:.1f} MB); open it in a browser")


# -- settings and files -------------------------------------------------------
def _set(repl: Repl, argument: str) -> None:
    name, _, value = argument.replace("=", " ").partition(" ")
    if not value.strip():
        raise InputError(f"/set {shorten(name, 40)} has no value", "write /set NAME VALUE; /show lists them")
    repl.out.note(f"{name} is {repl.session.set(name, value.strip())}")


def _temperature(repl: Repl, argument: str) -> None:
    if argument:
        repl.session.set("temperature", argument)
    value = repl.session.settings.temperature
    means = "always the likeliest token" if value == 0 else "tokens are drawn"
    repl.out.note(f"temperature is {value:g}: {means} (the router's is /set router-temperature)")


def _show(repl: Repl, argument: str) -> None:
    session = repl.session
    model, router = session.model, session.model.router
    rows: dict[str, Any] = {
        name.replace("_", "-"): "none" if value is None else value
        for name, value in session.settings.shown().items()
    }
    rows["ignore-eos"] = "on" if session.settings.ignore_eos else "off"
    kind = "" if router is None else f"the {shorten(router.spec.kind, 40)} router decides"
    rows["route"] = {"auto": kind, "off": "base alone"}.get(session.route, f"{session.route} on every token")
    if model.muted:
        rows["muted"] = ", ".join(sorted(model.muted))
    if router is not None:
        rows["topk"] = f"{_adapters(model.topk)} per token"
        rows["router-temperature"] = "as in its file" if model.temperature is None else model.temperature
    rows["routing"] = f"{repl.routing} (how answers show it)"
    rows["adapters"] = ", ".join(model.adapters)
    rows["system"] = session.conversation.system or "(none)"
    rows["turns"] = len(session.conversation.turns)
    if model.bundle is not None:
        rows["bundle"] = model.bundle.path
    if session.file:
        rows["file"] = session.file
    size = max(map(len, rows))
    repl.say("\n".join(f"{name:<{size}}  {value}" for name, value in rows.items()))


def _save(repl: Repl, argument: str) -> None:
    session = repl.session
    if not argument and session.file is None:
        raise InputError("/save needs FILE the first time", "write /save talk.json")
    path = _path(argument) if argument else session.file
    assert path is not None
    session.save(path)
    repl.out.note(f"saved as {path}; /load {path} or molora chat --resume {path} takes it up")


def resume(repl: Repl, path: Path) -> None:
    """Take up a saved conversation and say where it stands."""
    session = repl.session
    for left in session.resume(load(path), path):
        repl.out.warn(left)
    tell_resumed(repl)


def tell_resumed(repl: Repl) -> None:
    """What there is of a conversation that was taken up."""
    turns = repl.session.conversation.turns
    repl.out.note(f"{len(turns)} turns taken up, with their settings and routing (/show)")
    last = next((turn["content"] for turn in reversed(turns) if turn["role"] == "user"), None)
    if last is not None:
        repl.out.note(f"the last question was: {shorten(' '.join(last.split()), 200)}")


def _path(text: str) -> Path:
    """A path as people write it: perhaps in quotes, perhaps with ~."""
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return Path(text).expanduser()


def _new_file(argument: str) -> Path:
    path = _path(argument)
    if path.exists():
        raise InputError(f"{path} exists", "choose another name")
    return path


COMMANDS = {
    "help": Command("", "this list", _help),
    "exit": Command("", "leave (also Ctrl-D)", _exit),
    "clear": Command("", "forget the conversation, keep system text and settings", _clear),
    "regen": Command("", "answer the last question again", _regen),
    "compare": Command("[base|NAME] [QUESTION]", "the last question, answered both ways", _compare),
    "system": Command("[TEXT]", "show or set the system text; /system none takes it away", _system),
    "only": Command("NAME", "one adapter on every token; base for none", _only),
    "mute": Command("NAME", "the router chooses among the others", _mute),
    "auto": Command("", "the router chooses among all adapters", _auto),
    "topk": Command("[K]", "adapters that the router may give one token", _topk),
    "why": Command("[N]", "number the last answer's tokens, or explain token N", _why),
    "routing": Command("[off|colour|bars]", "how answers show who made each token", _routing),
    "stats": Command("", "tokens, speed and shares so far", _stats),
    "trace": Command("FILE", "save the routes for molora inspect FILE", _trace),
    "report": Command("FILE.html", "write the routes as a page for a browser", _report),
    "temperature": Command("[T]", "of the drawing: 0 = the likeliest token, above 0 varies", _temperature),
    "set": Command("NAME VALUE", "change a setting, say /set max-new-tokens 512", _set),
    "show": Command("", "settings, routing and system text", _show),
    "save": Command("[FILE]", "save conversation, settings and routing", _save),
    "load": Command("FILE|NAME=PATH", "take up a saved conversation, or add an adapter", _load),
}

GROUPS = {
    "conversation": ("help", "exit", "clear", "regen", "compare", "system"),
    "routing": ("only", "mute", "auto", "topk"),
    "seeing it": ("why", "routing", "stats", "trace", "report"),
    "settings and files": ("temperature", "set", "show", "save", "load"),
}
