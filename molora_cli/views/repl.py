"""The conversation at the terminal: a prompt with history and completion, slash commands, Ctrl-C."""

from __future__ import annotations

import contextlib
import difflib
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rich.text import Text

from molora_cli.core.chat_session import ChatSession, shares
from molora_cli.core.conversation import Conversation
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Out
from molora_cli.text import printable, shorten
from molora_cli.views.chat import AnswerPrinter, statistics, why
from molora_cli.views.palette import Palette

if TYPE_CHECKING:
    from molora_cli.core.generate import TokenEvent

_QUOTES = '"""'


class Command(NamedTuple):
    """A slash command: what follows its name, and one line of help."""

    argument: str
    help: str


COMMANDS = {
    "help": Command("", "this list"),
    "exit": Command("", "leave (also Ctrl-D)"),
    "clear": Command("", "forget the conversation, keep system text and settings"),
    "regen": Command("", "answer the last question again"),
    "system": Command("[TEXT]", "show or set the system text; /system none takes it away"),
    "set": Command("NAME VALUE", "change a setting, say /set temperature 0.7"),
    "show": Command("", "settings, routing and system text"),
    "only": Command("NAME", "one adapter on every token; base for none"),
    "mute": Command("NAME", "the router chooses among the others"),
    "auto": Command("", "the router chooses among all adapters"),
    "why": Command("N", "explain the route of token N of the last answer"),
    "stats": Command("", "tokens, speed and shares so far"),
    "save": Command("FILE", "save the conversation as JSON"),
    "load": Command("FILE", "take up a saved conversation"),
}


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only sets a flag (the yielded function reads it), the second raises.

    An answer stops between two tokens, so that the keys and values kept for the next one stay whole.
    """
    hits = 0

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal hits
        hits += 1
        if hits > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: hits > 0
    finally:
        signal.signal(signal.SIGINT, before)


class LineReader(Protocol):
    """Where lines come from: `views.prompt.Editor`, or `PlainReader`."""

    @property
    def unfinished(self) -> bool: ...

    def read(self, prompt: str) -> str: ...


class PlainReader:
    """Lines as the terminal itself edits them, for one that cannot move its cursor."""

    unfinished = False

    def read(self, prompt: str) -> str:
        return input(prompt)


class Repl:
    """Reads questions and slash commands until the user leaves. Answers go to stdout, all else to stderr."""

    def __init__(self, session: ChatSession, out: Out, palette: Palette) -> None:
        self.session = session
        self.out = out
        self.palette = palette
        self._actions: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "clear": self._clear,
            "regen": lambda argument: self._answer(self.session.regenerate),
            "system": self._system,
            "set": self._set,
            "show": self._show,
            "only": self._only,
            "mute": self._mute,
            "auto": self._auto,
            "why": self._why,
            "stats": self._stats,
            "save": self._save,
            "load": self._load,
        }

    def run(self) -> None:
        """Until /exit or Ctrl-D. Raises KeyboardInterrupt at the second Ctrl-C in a row at an empty
        prompt."""
        editor = self._editor()
        self.say(self.palette.legend(width=self.out.stderr.width))
        self.out.note('/help lists the commands; """ opens a text of several lines; Ctrl-D leaves')
        warned = False
        while True:
            try:
                line = self._read(editor)
            except KeyboardInterrupt:
                if editor.unfinished:
                    continue
                if warned:
                    raise
                warned = True
                self.out.note("Ctrl-C again leaves, and so do Ctrl-D and /exit")
                continue
            except EOFError:
                return
            warned = False
            try:
                if not self.handle(line):
                    return
            except MoloraError as error:
                self.out.error(error)

    def _editor(self) -> LineReader:
        if self.out.stderr.is_dumb_terminal:
            return PlainReader()
        from molora_cli.views.prompt import Editor

        adapters = self.session.model.adapters
        known = {"only": (*adapters, "base"), "mute": adapters, "set": tuple(self.session.settings.shown())}
        return Editor({name: known.get(name, ()) for name in COMMANDS})

    def _read(self, editor: LineReader) -> str:
        text = editor.read("> ")
        if not text.lstrip().startswith(_QUOTES):
            return text
        body = text.lstrip()[len(_QUOTES) :]
        while not body.rstrip().endswith(_QUOTES):
            body += "\n" + editor.read(". ")
        return body.rstrip()[: -len(_QUOTES)].strip("\n")

    def handle(self, line: str) -> bool:
        """Do what one line asks for; False where it asks to leave. A space before "/" makes it a question."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self._answer(lambda: self.session.ask(line.strip()))
            return True
        name, _, argument = line[1:].partition(" ")
        name = name.strip().lower()
        if name == "exit":
            return False
        if name not in self._actions:
            close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
            raise InputError(f"there is no command '/{shorten(name, 40)}'", hint)
        argument = argument.strip()
        wanted = COMMANDS[name].argument
        if not argument and wanted and not wanted.startswith("["):
            raise InputError(f"/{name} needs {wanted}", f"write /{name} {wanted}: {COMMANDS[name].help}")
        self._actions[name](argument)
        return True

    def say(self, text: Text | str) -> None:
        """Something for the reader that is no answer."""
        self.out.stderr.print(Text(printable(text, keep="\n")) if isinstance(text, str) else text)

    # -- answers ------------------------------------------------------------
    def _answer(self, start: Callable[[], Generator[TokenEvent, None, None]]) -> None:
        """Show the answer that `start` begins. All of it counts as answering for Ctrl-C, from reading on."""
        printer = AnswerPrinter(self.out.stdout, self.palette)
        with interruptible() as stopped:
            with contextlib.closing(start()) as events:
                try:
                    for event in events:
                        printer.token(event)
                        if stopped():
                            break
                finally:
                    printer.end()
            answer = self.session.last
            if not answer.text.strip():
                self.out.note("(an empty answer)")
            self.out.note(statistics(answer, self.palette))
            if answer.stop == "interrupted":
                self.out.note("stopped; what came so far stays in the conversation, /regen answers again")

    # -- commands -----------------------------------------------------------
    def _help(self, argument: str) -> None:
        rows = {f"/{name} {command.argument}".strip(): command.help for name, command in COMMANDS.items()}
        size = max(map(len, rows))
        self.say("\n".join(f"{usage:<{size}}  {text}" for usage, text in rows.items()))

    def _clear(self, argument: str) -> None:
        self.session.clear()
        self.out.note("the conversation is empty")

    def _system(self, argument: str) -> None:
        conversation = self.session.conversation
        if argument:
            conversation.system = None if argument == "none" else argument
        self.say(f"system: {conversation.system or '(none)'}")

    def _set(self, argument: str) -> None:
        name, _, value = argument.replace("=", " ").partition(" ")
        self.session.settings.set(name, value.strip())
        self.out.note(f"{name} is {value.strip()}")

    def _show(self, argument: str) -> None:
        session = self.session
        rows: dict[str, Any] = {**session.settings.shown(), "route": session.route}
        if session.model.muted:
            rows["muted"] = ", ".join(sorted(session.model.muted))
        rows["system"] = session.conversation.system or "(none)"
        rows["turns"] = len(session.conversation.turns)
        size = max(map(len, rows))
        self.say("\n".join(f"{name:<{size}}  {value}" for name, value in rows.items()))

    def _only(self, argument: str) -> None:
        self.session.only(argument)
        self.out.note(f"every token takes {argument} now; /auto gives the choice back to the router")

    def _mute(self, argument: str) -> None:
        self.session.mute(argument)
        self.out.note(f"muted: {', '.join(sorted(self.session.model.muted))}; /auto unmutes")

    def _auto(self, argument: str) -> None:
        self.session.auto()
        self.out.note("the router chooses among all adapters")

    def _why(self, argument: str) -> None:
        events = self.session.last.events
        if not events:
            raise InputError("there is no answer yet", "ask something first")
        if not argument.isdecimal() or not 1 <= int(argument) <= len(events):
            raise InputError(f"the last answer has tokens 1 to {len(events)}", "/why N takes one of these")
        number = int(argument)
        self.say(why(events[number - 1], number, self.palette, self.session.model.muted))

    def _stats(self, argument: str) -> None:
        session = self.session
        count = len(session.all_events)
        speed = f", {count / session.seconds:.1f} tokens/s with reading" if session.seconds else ""
        self.say(f"{count} tokens in {session.answers} answers{speed}")
        self.say(self.palette.legend(shares(session.all_events), width=self.out.stderr.width))

    def _save(self, argument: str) -> None:
        path = Path(argument).expanduser()
        self.session.conversation.save(path, {"settings": self.session.settings.shown()})
        self.out.note(f"saved as {path}")

    def _load(self, argument: str) -> None:
        conversation = Conversation.load(Path(argument).expanduser())
        self.session.clear()
        self.session.conversation = conversation
        self.out.note(f"{len(conversation.turns)} turns taken up")
