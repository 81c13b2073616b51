"""Streaming generation: one token event at a time, with the route that made it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.chat_template import encode_messages, encode_text, need_tokenizer, turn_end_ids
from molora_cli.core.detokenize import TextStream
from molora_cli.core.routed.route import BASE, Route
from molora_cli.errors import InputError, MoloraError

Notify = Callable[[str], None]


@dataclass(frozen=True)
class TokenRoute:
    """The route of one token over G groups of layers (G = 1: one route for all layers), k choices each.

    indices: (G, k) ints, -1 = base; gates: (G, k); names: (G, k), "base" for -1. scores: per group the
    router's log-probability of each expert by name (empty where no router decided).
    """

    indices: tuple[tuple[int, ...], ...]
    gates: tuple[tuple[float, ...], ...]
    names: tuple[tuple[str, ...], ...]
    scores: tuple[tuple[tuple[str, float], ...], ...] = ()

    @property
    def top(self) -> int:
        """The adapter of the largest gate in the last group, the one nearest the output; -1 = base."""
        gates = self.gates[-1]
        return self.indices[-1][max(range(len(gates)), key=gates.__getitem__)]

    @property
    def strength(self) -> float:
        """The largest gate in the last group, cut to [0, 1]; 1 for the base."""
        return 1.0 if self.top == BASE else min(1.0, max(0.0, max(self.gates[-1])))


@dataclass(frozen=True)
class TokenEvent:
    """One generated token.

    text: what the token adds to the answer; empty while bytes of an unfinished letter are held back. Joined,
    the texts are the tokenizer's decode of all ids. logprob: natural logarithm of the model's own probability
    of the token (temperature 1, nothing cut off). route: the route of the position that predicted the token,
    which is the last prompt token for the first event and the token before it for the others; in a trace of
    the whole text, whose rows are the tokens fed, it is the row before the token's own.
    """

    id: int
    text: str
    route: TokenRoute
    logprob: float


_Events = Generator[TokenEvent, None, str]


@dataclass
class DecodeCache:
    """Keys and values kept between two answers, with the ids they hold and the routing they were made under.

    A prefix is used again only where ids and routing agree (a wrongly routed prefix costs a part of the
    gain); routers are causal, so equal ids under equal routing have equal routes.
    """

    ids: list[int] = field(default_factory=list)
    routing: object = None
    past: Any = None

    def take(self, ids: Sequence[int], routing: object) -> tuple[Any, int]:
        """(past, n): keys and values of the first n of `ids`, n < len(ids); (None, 0) where nothing agrees.

        Hands them out: a run that breaks off in the middle of a forward leaves an empty cache, not a damaged
        one.
        """
        past, self.past = self.past, None
        if past is None or routing != self.routing:
            return None, 0
        length = min(len(self.ids), len(ids) - 1)
        common = next((i for i in range(length) if self.ids[i] != ids[i]), length)
        if common == 0:
            return None, 0
        if common < len(self.ids):
            try:
                past.crop(common - len(self.ids))  # negative: that many from the end, in every version
            except RuntimeError:  # recurrent states and full sliding windows cannot go back
                return None, 0
        return past, common

    def put(self, past: Any, ids: list[int], routing: object) -> None:
        self.past, self.ids, self.routing = past, ids, routing


def context_length(config: Any) -> int | None:
    """Tokens the base can hold, None where its config sets no limit."""
    value = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(value) if isinstance(value, int) and value > 0 else None


def stop_ids(model: Any) -> set[int]:
    """Ids that end an answer: eos of tokenizer, config and generation_config, and the template's end of
    turn."""
    tokenizer = model.tokenizer
    found: set[int] = set(turn_end_ids(tokenizer))
    generation = getattr(model.base, "generation_config", None)
    for source in (tokenizer, model.base.config.get_text_config(), generation):
        value = getattr(source, "eos_token_id", None)
        values = value if isinstance(value, Iterable) else [value]
        found.update(int(v) for v in values if v is not None)
    return found


def encode_prompt(
    model: Any, prompt: str | Sequence[Mapping[str, str]], notify: Notify | None = None
) -> list[int]:
    """Prompt ids of a text (as it is) or of messages (through the chat template). Raises InputError."""
    tokenizer = need_tokenizer(model.tokenizer)
    ids = (
        encode_text(tokenizer, prompt)
        if isinstance(prompt, str)
        else encode_messages(tokenizer, prompt, notify)
    )
    if not ids:
        raise InputError("the prompt has no tokens", "give a text")
    return ids


def stream(
    model: Any,
    messages_or_text: str | Sequence[Mapping[str, str]],
    *,
    route: str = "auto",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    ignore_eos: bool = False,
    cache: DecodeCache | None = None,
    notify: Notify | None = None,
) -> _Events:
    """Answer `messages_or_text` token by token; the generator's return value says why it stopped.

    messages_or_text: a text is taken as it is, messages (role, content) go through the chat template. route:
    "auto" the model's own routing, "off" the base alone, NAME one adapter on every token. temperature 0 is
    greedy; top_k 0 and top_p 1 cut nothing off. seed: None draws one. The answer ends at eos or the
    template's end of turn, which are not shown ("stop"), at max_new_tokens ("length"), or at the end of the
    base's context ("context", and `notify` is told). cache: kept between calls to prefill only what is new.
    Raises InputError for a prompt that does not fit the context, an unknown route, or settings out of range.
    """
    ids = encode_prompt(model, messages_or_text, notify)
    return stream_ids(
        model,
        ids,
        route=route,
        max_new_tokens=max_new_tokens,
        sampler=Sampler(temperature, top_p, top_k, seed),
        stop=frozenset() if ignore_eos else frozenset(stop_ids(model)),
        cache=cache,
        notify=notify,
    )


class Sampler:
    """Draws the next id from logits (V,): greedy at temperature 0, else after temperature, top_k, then top_p.

    top_p keeps the smallest set of ids whose probability reaches it (Holtzman et al. 2020, nucleus sampling).
    Draws on the CPU in float32, so that a seed means the same on every device. Raises InputError.
    """

    def __init__(
        self, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0, seed: int | None = None
    ) -> None:
        if not 0 <= temperature < float("inf"):
            raise InputError(f"temperature is {temperature}", "give 0 (greedy) or a positive number, say 0.7")
        if not 0 < top_p <= 1:
            raise InputError(f"top-p is {top_p}", "give a number above 0 and up to 1")
        if top_k < 0:
            raise InputError(f"top-k is {top_k}", "give 0 (no cut) or a positive number")
        self.temperature, self.top_p, self.top_k = temperature, top_p, top_k
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed % 2**63)

    def __call__(self, logits: Tensor) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        scaled = logits.float() / self.temperature
        if 0 < self.top_k < scaled.shape[0]:
            scaled = scaled.masked_fill(scaled < scaled.topk(self.top_k).values[-1], float("-inf"))
        if self.top_p < 1:
            ordered, order = scaled.sort(descending=True)
            before = ordered.softmax(0).cumsum(0) - ordered.softmax(0)
            scaled = scaled.index_fill(0, order[before >= self.top_p], float("-inf"))
        return int(torch.multinomial(scaled.softmax(0), 1, generator=self.generator))


def check_route(model: Any, route: str) -> str:
    """`route` where it names a routing of this model, else InputError."""
    if route in ("auto", "off") or route in model.adapters:
        return route
    raise InputError(
        f"there is no adapter '{route}' in this bundle",
        f"use auto, off, or one of: {', '.join(model.adapters)}",
    )


def _last_route(trace: Any, adapters: Sequence[str]) -> TokenRoute:
    indices = tuple(tuple(int(i) for i in group) for group in trace.indices[-1])
    gates = tuple(tuple(float(g) for g in group) for group in trace.gates[-1])
    names = tuple(tuple("base" if i == BASE else adapters[i] for i in group) for group in indices)
    scores: tuple[tuple[tuple[str, float], ...], ...] = ()
    if trace.scores is not None:
        experts = ["base" if e == "__base__" else e for e in trace.experts]
        scores = tuple(tuple(zip(experts, map(float, group), strict=True)) for group in trace.scores[-1])
    return TokenRoute(indices, gates, names, scores)


def stream_ids(
    model: Any,
    ids: Sequence[int],
    *,
    route: str = "auto",
    max_new_tokens: int = 256,
    sampler: Callable[[Tensor], int] | None = None,
    stop: frozenset[int] = frozenset(),
    cache: DecodeCache | None = None,
    notify: Notify | None = None,
) -> _Events:
    """`stream` on prompt ids. Errors are raised here, before the first token is asked for."""
    check_route(model, route)
    if max_new_tokens < 1:
        raise InputError(f"max-new-tokens is {max_new_tokens}", "give 1 or more")
    limit = context_length(model.base.config)
    if limit is not None and len(ids) >= limit:
        raise InputError(
            f"the prompt has {len(ids)} tokens and this base holds {limit}: no room for an answer",
            "shorten the prompt",
        )
    room = max_new_tokens if limit is None else min(max_new_tokens, limit - len(ids))
    fixed = None if route == "auto" else model.adapters.index(route) if route != "off" else BASE
    routing = model.routing if route == "auto" else route
    run = _Run(model, fixed, routing, sampler or Sampler(), stop, cache or DecodeCache())
    return run.decode(list(ids), room, limit if room < max_new_tokens else None, notify)


@dataclass
class _Run:
    """The decode loop of one answer; `fixed` is the adapter of every token, -1 the base, None the router's
    choice."""

    model: Any
    fixed: int | None
    routing: object
    sampler: Callable[[Tensor], int]
    stop: frozenset[int]
    cache: DecodeCache

    def _forward(self, block: list[int], past: Any) -> tuple[Tensor, Any, Any]:
        """Logits (V,) float32 after a block of ids, the trace of the block's routes, and keys and values."""
        given = None
        if self.fixed is not None:
            gate = float(self.fixed != BASE)
            given = Route.constant([self.fixed], [gate], 1, len(block), self.model.device)
        runtime = getattr(self.model, "runtime", None)
        if runtime is not None and past is None:
            past = runtime.new_cache()
        elif runtime is not None and len(block) == 1:

            def eager() -> tuple[Tensor, Any]:
                return self._eager(block, past, given)[:2]

            stepped = runtime.token(block[0], past, given, eager)
            if stepped is not None:
                return stepped.logits, stepped.trace, past
        return self._eager(block, past, given)

    def _eager(self, block: list[int], past: Any, given: Route | None) -> tuple[Tensor, Any, Any]:
        takes = inspect.signature(self.model.base.forward).parameters
        # renamed in transformers 5.24
        name = "cache" if "cache" in takes else "past_key_values"
        named: dict[str, Any] = {name: past, "use_cache": True, "route": given}
        if "logits_to_keep" in takes:
            named["logits_to_keep"] = 1
        with torch.no_grad():
            output = self.model.forward(torch.tensor([block], device=self.model.device), **named)
        return output.logits[0, -1].float().cpu(), output.trace, getattr(output, name)

    def decode(self, ids: list[int], room: int, limit: int | None, notify: Notify | None) -> _Events:
        """Up to `room` events after the prompt `ids`; limit: the context length where it is what set
        `room`."""
        past, known = self.cache.take(ids, self.routing)
        fed, block = ids[:known], ids[known:]
        text = TextStream(self.model.tokenizer)
        held: list[TokenEvent] = []
        reason = "length" if limit is None else "context"
        for made in range(1, room + 1):
            self.cache.past = None  # until the forward is through
            logits, trace, past = self._forward(block, past)
            fed.extend(block)
            self.cache.put(past, fed, self.routing)
            if logits.isnan().any():
                raise MoloraError("the model's logits are not numbers (NaN)", "try --dtype float32")
            token = self.sampler(logits)
            if token in self.stop:
                reason = "stop"
                break
            piece, complete = text.push(token)
            route = _last_route(trace, self.model.adapters)
            logprob = float(logits[token] - logits.logsumexp(0))
            held.append(TokenEvent(token, piece, route, logprob))
            # the last event waits while a letter is unfinished, so that there is one to carry what the end
            # flushes
            while len(held) > (0 if complete and made < room else 1):
                yield held.pop(0)
            block = [token]
        for event in held:
            yield replace(event, text=event.text + text.flush())
        if reason == "context":
            message = f"the answer was cut: the context of {limit} tokens is full"
            notify(message) if notify else warnings.warn(message, stacklevel=2)
        return reason
