"""One chat: model, conversation, settings and routing. Knows nothing of terminals; imports torch when
asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from molora_cli.core.conversation import Conversation
from molora_cli.errors import InputError, MoloraError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.generate import DecodeCache, TokenEvent

Notify = Callable[[str], None]


@dataclass
class Settings:
    """How answers are drawn; see `core.generate.stream`."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False

    def set(self, name: str, text: str) -> None:
        """Set one by its name, hyphens or underscores. Raises InputError: unknown, or not a usable value."""
        key = name.replace("-", "_")
        checks: dict[str, Callable[[str], Any]] = {
            "max_new_tokens": lambda t: _number(name, t, int, 1),
            "temperature": lambda t: _number(name, t, float, 0),
            "top_p": lambda t: _number(name, t, float, 1e-9, 1),
            "top_k": lambda t: _number(name, t, int, 0),
            "seed": lambda t: None if t == "none" else _number(name, t, int, 0),
            "ignore_eos": lambda t: _switch(name, t),
        }
        if key not in checks:
            raise InputError(
                f"there is no setting '{shorten(name, 40)}'", f"settings are: {', '.join(checks)}"
            )
        setattr(self, key, checks[key](text))

    def check(self) -> None:
        """Raises InputError for a value out of range."""
        for name, value in self.shown().items():
            if isinstance(value, bool):
                continue
            self.set(name, "none" if value is None else str(value))

    def shown(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def _number(name: str, text: str, kind: type, low: float, high: float = math.inf) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high) or value == math.inf:
        what = "whole number" if kind is int else "number"
        least = "above 0" if 0 < low < 1 else f"of at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise InputError(f"{name} is '{shorten(text, 40)}'", f"give a {what} {least}{most}")
    return value


def _switch(name: str, text: str) -> bool:
    if text.lower() in ("on", "off"):
        return text.lower() == "on"
    raise InputError(f"{name} is '{shorten(text, 40)}'", "give on or off")


@dataclass
class Answer:
    """What became of one question. stop: "stop" (end of turn), "length", "context", or "interrupted"."""

    events: list[TokenEvent] = field(default_factory=list)
    prompt_tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    stop: str = "interrupted"

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token, whose time is mostly that of reading the prompt."""
        rest = self.seconds - self.first_token_seconds
        return (len(self.events) - 1) / rest if len(self.events) > 1 and rest > 0 else 0.0


def shares(events: list[TokenEvent]) -> dict[int, float]:
    """Fraction of tokens and layer groups whose largest gate is that of adapter `index` (-1 = base)."""
    counts: dict[int, int] = {}
    for event in events:
        for indices, gates in zip(event.route.indices, event.route.gates, strict=True):
            top = indices[max(range(len(gates)), key=gates.__getitem__)]
            counts[top] = counts.get(top, 0) + 1
    total = sum(counts.values())
    return {index: count / total for index, count in sorted(counts.items())}


class ChatSession:
    """A conversation with a routed model.

    route: "auto", "off" or an adapter's name. plain: prompts are continued as text, each on its own, without
    chat template. notify: told of what a user should know (old turns dropped, answer cut).
    """

    def __init__(self, model: Any, *, plain: bool = False, notify: Notify = lambda message: None) -> None:
        self.model = model
        self.plain = plain
        self.notify = notify
        self.conversation = Conversation()
        self.settings = Settings()
        self.route = "auto"
        self.last = Answer()
        self.all_events: list[TokenEvent] = []
        self.seconds = 0.0
        self.answers = 0
        self._attempt = 0
        self._cache: DecodeCache | None = None
        self._stop: frozenset[int] = frozenset()
        self._told: set[str] = set()

    # -- routing ------------------------------------------------------------
    def only(self, name: str) -> None:
        """One adapter on every token, "base"/"off" for none, "auto" for the router. Raises InputError.

        The history is read again under the new routing, so that the talk goes on as if it had always been so.
        """
        from molora_cli.core.generate import check_route

        self.route = check_route(self.model, "off" if name in ("base", "off") else name)

    def mute(self, name: str) -> None:
        """The router chooses among the others. Raises InputError for an unknown name or a fixed route."""
        if name not in self.model.adapters:
            raise InputError(
                f"there is no adapter '{shorten(name, 40)}'", f"use one of: {', '.join(self.model.adapters)}"
            )
        if self.route != "auto":
            raise InputError(f"every token takes '{self.route}' now, so muting has no effect", "/auto first")
        self.model.muted = self.model.muted | {name}

    def auto(self) -> None:
        """The router decides again and nothing is muted."""
        self.route = "auto"
        if self.model.muted:
            self.model.muted = frozenset()

    def clear(self) -> None:
        """Forget what was said; the system text, the settings and the routing stay."""
        self.conversation.turns = []
        self.last = Answer()
        self.all_events, self.seconds, self.answers = [], 0.0, 0

    # -- answers ------------------------------------------------------------
    def ask(self, text: str) -> Generator[TokenEvent, None, None]:
        """Answer `text`. Closing the generator ends the answer; what came so far stays in the history.

        Raises InputError for a question that does not fit; the history is then as before.
        """
        before = list(self.conversation.turns)
        self.conversation.add("user", text)
        self._attempt = 0
        return self._answer(before)

    def regenerate(self) -> Generator[TokenEvent, None, None]:
        """Answer the last question again; a seed counts one up for it. Raises InputError."""
        before = list(self.conversation.turns)
        if not self.conversation.take_back_answer():
            raise InputError("there is no question to answer again", "ask one")
        self._attempt += 1
        return self._answer(before)

    def _answer(self, before: list[dict[str, str]]) -> Generator[TokenEvent, None, None]:
        """Answer the open question. before: the turns to go back to where that fails."""
        try:
            ids = self._prompt_ids()
            events = self._events(ids)
        except MoloraError:
            self.conversation.turns = before
            raise
        return self._record(events, len(ids), before)

    def _notify_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.notify(message)

    def _prompt_ids(self) -> list[int]:
        from molora_cli.core.generate import context_length, encode_prompt

        if self.plain:
            return encode_prompt(self.model, self.conversation.turns[-1]["content"])
        context = context_length(self.model.base.config)
        ids, dropped = self.conversation.fit(
            lambda messages: encode_prompt(self.model, messages, self._notify_once),
            context,
            self.settings.max_new_tokens,
        )
        if dropped:
            turns = (
                "the oldest question and its answer" if dropped == 1 else f"the {dropped} oldest questions"
            )
            self.notify(f"the conversation filled the context of {context} tokens: {turns} left it")
        return ids

    def _events(self, ids: list[int]) -> Generator[TokenEvent, None, str]:
        from molora_cli.core.generate import DecodeCache, Sampler, stop_ids, stream_ids

        if self._cache is None:
            self._cache = DecodeCache()
            self._stop = frozenset(stop_ids(self.model))
        own = self.settings
        seed = None if own.seed is None else own.seed + self._attempt
        return stream_ids(
            self.model,
            ids,
            route=self.route,
            max_new_tokens=own.max_new_tokens,
            sampler=Sampler(own.temperature, own.top_p, own.top_k, seed),
            stop=frozenset() if own.ignore_eos else self._stop,
            cache=self._cache,
            notify=self.notify,
        )

    def _record(
        self, events: Generator[TokenEvent, None, str], prompt_tokens: int, before: list[dict[str, str]]
    ) -> Generator[TokenEvent, None, None]:
        """Hand the events on; put the answer into the history, also where the reader stops early."""
        answer = self.last = Answer(prompt_tokens=prompt_tokens)
        start = time.perf_counter()
        try:
            while True:
                try:
                    event = next(events)
                except StopIteration as end:
                    answer.stop = end.value
                    break
                answer.seconds = time.perf_counter() - start
                if not answer.events:
                    answer.first_token_seconds = answer.seconds
                answer.events.append(event)
                yield event
        except MoloraError:
            self.conversation.turns = before
            raise
        finally:
            events.close()
            self.all_events.extend(answer.events)
            self.seconds += answer.seconds
            self.answers += 1
            if self.conversation.turns is not before:
                self.conversation.add("assistant", answer.text)
