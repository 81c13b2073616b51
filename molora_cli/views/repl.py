"""The conversation at the terminal: a prompt with history and completion, slash commands, Ctrl-C."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rich.text import Text

from molora_cli.core.chat_session import ChatSession
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Out
from molora_cli.text import printable, shorten
from molora_cli.views.chat import AnswerPrinter, share_bars, statistics
from molora_cli.views.interrupt import interruptible
from molora_cli.views.palette import Palette
from molora_cli.views.repl_commands import ALIASES, COMMANDS, ROUTINGS, tell_resumed

if TYPE_CHECKING:
    from molora_cli.core.generate import TokenEvent

_QUOTES = '"""'


class LineReader(Protocol):
    """Where lines come from: `views.prompt.Editor`, or `PlainReader`."""

    @property
    def unfinished(self) -> bool: ...

    def read(self, prompt: str) -> str: ...


class PlainReader:
    """Lines as the terminal itself edits them, for one that cannot move its cursor."""

    unfinished = False

    def __init__(self, out: Out) -> None:
        self._out = out

    def read(self, prompt: str) -> str:
        """One entry. Raises EOFError, KeyboardInterrupt, and InputError for a line that the terminal cut."""
        from molora_cli.views.pasting import read_pasted

        self._out.stderr.file.write(prompt)
        self._out.stderr.file.flush()
        text, cut = read_pasted(sys.stdin)
        if cut:
            raise InputError(
                "the line reached what this terminal keeps of one, 4095 bytes, and its end may be gone",
                "break it into lines, or pipe it in: molora chat BUNDLE < FILE",
            )
        return text


class Repl:
    """Reads questions and slash commands until the user leaves. Answers go to stdout, all else to stderr.

    routing: how routes are shown in answers, one of ROUTINGS.
    """

    def __init__(self, session: ChatSession, out: Out, palette: Palette) -> None:
        self.session = session
        self.out = out
        self.palette = palette
        self.routing = ROUTINGS[1]

    def run(self) -> None:
        """Until /exit or Ctrl-D. Raises KeyboardInterrupt at the second Ctrl-C in a row at an empty
        prompt."""
        editor = self._editor()
        self.show_legend()
        if self.session.conversation.turns:
            tell_resumed(self)
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
            except MoloraError as error:
                self.out.error(error)
                continue
            warned = False
            try:
                if not self.handle(line):
                    return
            except MoloraError as error:
                self.out.error(error)
            except KeyboardInterrupt:
                self.out.note("stopped")
            except BrokenPipeError:  # nobody reads the answers any more
                raise
            except OSError as error:  # a full disk, say, is no reason to lose the conversation
                where = f" ({error.filename})" if error.filename else ""
                self.out.error(MoloraError(f"{error.strerror or error}{where}", "choose another place"))

    def _editor(self) -> LineReader:
        shown = self.out.stderr.is_terminal or self.out.stdout.is_terminal
        if self.out.stderr.is_dumb_terminal or not shown:
            return PlainReader(self.out)
        from molora_cli.views.prompt import Editor

        return Editor(self._words)

    def _words(self) -> Mapping[str, Sequence[str]]:
        """What may follow each command, for the completion."""
        adapters = self.session.model.adapters
        known: dict[str, Sequence[str]] = {
            "only": (*adapters, "base"),
            "compare": ("base", *adapters),
            "mute": adapters,
            "set": (*self.session.settings.shown(), "router-temperature"),
            "routing": ROUTINGS,
        }
        return {name: known.get(name, ()) for name in COMMANDS}

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
            self.answer(lambda: self.session.ask(line.strip()))
            return True
        name, argument = ([*line[1:].split(maxsplit=1), "", ""])[:2]
        name = ALIASES.get(name.lower(), name.lower())
        if name == "exit":
            return False
        if name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
            lost = "/help lists the commands; for a question that begins with /, write a space before it"
            hint = f"did you mean /{close[0]}?" if close else lost
            raise InputError(f"there is no command '/{shorten(name, 40)}'", hint)
        command, argument = COMMANDS[name], argument.strip()
        if not argument and command.argument and not command.argument.startswith("["):
            raise InputError(
                f"/{name} needs {command.argument}", f"write /{name} {command.argument}: {command.help}"
            )
        if argument and not command.argument:
            raise InputError(f"/{name} takes nothing after it", f"/{name}: {command.help}")
        command.action(self, argument)
        return True

    # -- what commands use --------------------------------------------------
    def say(self, text: Text | str) -> None:
        """Something for the reader that is no answer."""
        self.out.stderr.print(Text(printable(text, keep="\n")) if isinstance(text, str) else text)

    def show_legend(self) -> None:
        """Every adapter with its colour or letter."""
        self.say(self.palette.legend(width=self.out.stderr.width))

    def answer(self, start: Callable[[], Generator[TokenEvent, None, None]]) -> None:
        """Show the answer that `start` begins. All of it counts as answering for Ctrl-C, from reading on."""
        printer = AnswerPrinter(self.out.stdout, self.palette, marks=self.routing != "off")
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
            if self.routing == "bars" and answer.events:
                self.say(share_bars(answer.events, self.palette, self.out.stderr.width))
            self.out.note(statistics(answer, self.palette, routes=self.routing == "colour"))
            if answer.stop == "interrupted":
                self.out.note("stopped; what came so far stays in the conversation, /regen answers again")
