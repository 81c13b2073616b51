"""The line editor of `molora chat`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output

from molora_cli.refs import state_dir
from molora_cli.text import argument_text
from molora_cli.views.pasting import Pastes, line_breaks, paste_input

Words = Callable[[], Mapping[str, Sequence[str]]]


class CommandCompleter(Completer):
    """Completes slash commands, and the first word after one. arguments: asked each time, command -> words
    that may follow."""

    def __init__(self, arguments: Words) -> None:
        self.arguments = arguments

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        name, space, rest = document.text_before_cursor.partition(" ")
        if not name.startswith("/"):
            return
        known = self.arguments()
        words = known.get(name[1:], ()) if space else [f"/{command}" for command in known]
        typed = rest if space else name
        yield from (Completion(word, -len(typed)) for word in words if word.startswith(typed))


class Editor:
    """Lines with history in the state folder; Alt-Enter adds a line, Tab completes (`CommandCompleter`), long
    pastes are shown as a few words (`Pastes`)."""

    def __init__(self, arguments: Words) -> None:
        self._pastes = Pastes()
        history: History = InMemoryHistory()
        file = state_dir() / "chat_history"
        with contextlib.suppress(OSError):  # a home that cannot be written: history of this run only
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            history = FileHistory(str(file))
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add(Keys.BracketedPaste)
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text(self._pastes.stand_in(line_breaks(event.data)))

        self._session: PromptSession[str] = PromptSession(
            history=history,
            completer=CommandCompleter(arguments),
            complete_while_typing=False,
            key_bindings=keys,
            reserve_space_for_menu=4,
            input=paste_input(sys.stdin),
            output=create_output(always_prefer_tty=True),
        )

    def read(self, prompt: str) -> str:
        """One entry. Raises EOFError (Ctrl-D), KeyboardInterrupt, and InputError for a paste that is gone."""
        return argument_text(self._pastes.expand(self._session.prompt(prompt)))

    @property
    def unfinished(self) -> bool:
        """There was text on the line when it was left."""
        return bool(self._session.default_buffer.text)
