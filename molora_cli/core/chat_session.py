"""One chat: model, conversation, settings and routing. Knows nothing of terminals; imports torch when
asked."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molora_cli.core.chat_settings import Settings, number
from molora_cli.core.conversation import Conversation, Saved
from molora_cli.errors import InputError, MoloraError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.generate import DecodeCache, TokenEvent
    from molora_cli.core.trace import Trace

Notify = Callable[[str], None]


@dataclass
class Answer:
    """What became of one question. prompt: token ids; stop: "stop" (end of turn), "length", "context", or
    "interrupted"."""

    events: list[TokenEvent] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    stop: str = "interrupted"

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

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
    chat template. notify: told of what a user should know (old turns dropped, answer cut). file: where the
    conversation was saved or taken from last.
    """

    def __init__(self, model: Any, *, plain: bool = False, notify: Notify = lambda message: None) -> None:
        self.model = model
        self.plain = plain
        self.notify = notify
        self.conversation = Conversation()
        self.settings = Settings()
        self.route = "auto"
        self.file: Path | None = None
        self.last = Answer()
        self.all_events: list[TokenEvent] = []
        self.seconds = 0.0
        self.answers = 0
        self._attempt = 0
        self._cache: DecodeCache | None = None
        self._stop: frozenset[int] | None = None
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

    def set(self, name: str, text: str) -> str:
        """Change a setting of sampling, or `router-temperature` ("none" = what its file says); returns the
        value as it is now. Raises InputError."""
        if name.replace("-", "_") == "router_temperature":
            self.model.temperature = None if text == "none" else number(name, text, float, 1e-9)
            return "what the router's file says" if text == "none" else f"{self.model.temperature:g}"
        self.settings.set(name, text)
        return str(self.settings.shown()[name.replace("-", "_")])

    def set_topk(self, text: str) -> int:
        """How many adapters the router may give a token; returns what it gives. Raises InputError."""
        self.model.topk = number("topk", text, int, 1, 4096)
        return int(self.model.topk)

    def routing(self) -> dict[str, Any]:
        """The routing as a saved conversation keeps it. topk and temperature: the router's, None = as in its
        file."""
        router = self.model.router
        return {
            "route": self.route,
            "muted": sorted(self.model.muted),
            "topk": None if router is None else router.chosen_k,
            "temperature": self.model.temperature,
        }

    # -- the conversation ---------------------------------------------------
    def clear(self) -> None:
        """Forget what was said; the system text, the settings and the routing stay."""
        self.conversation.turns = []
        self.last = Answer()
        self.all_events, self.seconds, self.answers = [], 0.0, 0

    def save(self, path: Path) -> None:
        """Write conversation, settings and routing; over `file` without asking, over nothing else. Raises
        InputError."""
        about = {
            "bundle": str(self.model.bundle.path) if self.model.bundle else None,
            "settings": self.settings.shown(),
            "routing": self.routing(),
        }
        own = self.file is not None and self.file.resolve() == path.resolve()
        self.conversation.save(path, about, force=own)
        self.file = path

    def resume(self, saved: Saved, path: Path) -> list[str]:
        """Take up what `save` wrote to `path`: the conversation, its settings and its routing.

        Returns what could not be taken over.
        """
        settings, left = Settings(), []
        for name, value in saved.settings.items():
            try:
                settings.set(name, "none" if value is None else str(value))
            except InputError as error:
                left.append(f"{error.message}: left as it is")
        self.clear()
        self.conversation, self.settings, self.file = saved.conversation, settings, path
        return [*left, *self._take_routing(saved.routing)]

    def _take_routing(self, routing: dict[str, Any]) -> list[str]:
        left: list[str] = []

        def attempt(change: Callable[[], object]) -> None:
            try:
                change()
            except InputError as error:
                left.append(f"{error.message}: the routing of now stays")

        model, route = self.model, routing.get("route")
        if isinstance(route, str) and not (route == "auto" and model.router is None):
            attempt(lambda: self.only(route) if route != "auto" else self.auto())
        if model.router is None:
            return left
        muted, topk, temperature = (routing.get(key) for key in ("muted", "topk", "temperature"))
        if isinstance(muted, list):
            attempt(lambda: setattr(model, "muted", frozenset(map(str, muted))))
        attempt(lambda: setattr(model, "topk", topk))
        if temperature is None or isinstance(temperature, int | float):
            attempt(lambda: setattr(model, "temperature", temperature))
        return left

    def trace(self) -> Trace:
        """The routes of the last answer and of the conversation before it. Raises InputError: no answer."""
        from molora_cli.core.chat_trace import held_trace

        if self._cache is None or not self.last.events:
            raise InputError("there is no answer yet", "ask something first")
        messages = None if self.plain else self.conversation.messages()
        return held_trace(self.model, self._cache.past, messages)

    def read_before(self, number: int) -> list[int]:
        """Ids that had been read when token `number` (from 1) of the last answer was decided."""
        answer = [event.id for event in self.last.events[: number - 1]]
        return [*self.last.prompt, *answer]

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

    def compare(
        self, name: str, text: str | None = None
    ) -> list[tuple[str, Generator[TokenEvent, None, str]]]:
        """The last question, or `text` as the next one, answered under the routing of now and under `name`
        ("base", "auto" or an adapter): (routing, events) of each, to be read in turns.

        Both draw with the same seed. The conversation, its cache and the last answer stay as they are. Raises
        InputError: no question, one that does not fit, an unknown name, or twice the same routing.
        """
        from molora_cli.core.generate import DecodeCache, check_route

        other = check_route(self.model, "off" if name in ("base", "off") else name)
        if other == self.route:
            raise InputError(
                f"every token takes {name} now, on both sides", "/auto first, or compare with another adapter"
            )
        if other == "auto" and self.model.router is None:
            raise InputError("there is no router to compare with", "compare with an adapter, or with base")
        talk = Conversation(self.conversation.system, list(self.conversation.turns))
        if text is not None:
            talk.add("user", text)
        elif not talk.take_back_answer():
            raise InputError("there is no question to answer again", "ask one, or /compare base QUESTION")
        ids = self._prompt_ids(talk)
        seed = random.randrange(2**31) if self._seed is None else self._seed
        return [(route, self._events(ids, route, seed, DecodeCache())) for route in (self.route, other)]

    def _answer(self, before: list[dict[str, str]]) -> Generator[TokenEvent, None, None]:
        """Answer the open question. before: the turns to go back to where that fails."""
        from molora_cli.core.generate import DecodeCache

        try:
            ids = self._prompt_ids(self.conversation)
            if self._cache is None:
                self._cache = DecodeCache()
            events = self._events(ids, self.route, self._seed, self._cache)
        except MoloraError:
            self.conversation.turns = before
            raise
        return self._record(events, ids, before)

    @property
    def _seed(self) -> int | None:
        return None if self.settings.seed is None else self.settings.seed + self._attempt

    def _notify_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.notify(message)

    def _prompt_ids(self, talk: Conversation) -> list[int]:
        from molora_cli.core.generate import context_length, encode_prompt

        if self.plain:
            return encode_prompt(self.model, talk.turns[-1]["content"])
        context = context_length(self.model.base.config)
        ids, dropped = talk.fit(
            lambda messages: encode_prompt(self.model, messages, self._notify_once),
            context,
            self.settings.max_new_tokens,
        )
        if dropped and talk is self.conversation:
            turns = (
                "the oldest question and its answer" if dropped == 1 else f"the {dropped} oldest questions"
            )
            self.notify(f"the conversation filled the context of {context} tokens: {turns} left it")
        return ids

    def _events(
        self, ids: list[int], route: str, seed: int | None, cache: DecodeCache
    ) -> Generator[TokenEvent, None, str]:
        from molora_cli.core.generate import Sampler, stop_ids, stream_ids

        if self._stop is None:
            self._stop = frozenset(stop_ids(self.model))
        own = self.settings
        return stream_ids(
            self.model,
            ids,
            route=route,
            max_new_tokens=own.max_new_tokens,
            sampler=Sampler(own.temperature, own.top_p, own.top_k, seed),
            stop=frozenset() if own.ignore_eos else self._stop,
            cache=cache,
            notify=self.notify,
        )

    def _record(
        self, events: Generator[TokenEvent, None, str], prompt: list[int], before: list[dict[str, str]]
    ) -> Generator[TokenEvent, None, None]:
        """Hand the events on; put the answer into the history, also where the reader stops early."""
        answer = self.last = Answer(prompt=prompt)
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
