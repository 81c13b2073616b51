"""Rows to token ids: which token belongs to which message, and which are completion.

A chat is rendered whole by the tokenizer's own template and tokenised once, so the ids are those of real use.
Where each message lies in the rendered string is found by rendering the conversation with placeholders.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.training.data import Example, Message, Segment
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

_CHUNK = 256
TEMPLATE = -1


@dataclass(frozen=True)
class Encoded:
    """One row as tokens; the lists have one entry per token.

    message: index of the message whose content the token belongs to, -1 for tokens of the template.
    completion: the token is part of what the model should learn to say: an assistant's content and the
    end-of-turn token after it; every token of a plain `text` row. start, end: character range within that
    message, (-1, -1) for tokens of the template. full_length: tokens before the cut to `max_length`.
    """

    ids: list[int]
    message: list[int]
    completion: list[bool]
    start: list[int]
    end: list[int]
    full_length: int

    @property
    def cut(self) -> bool:
        """True where the row was longer than `max_length`."""
        return self.full_length > len(self.ids)


@dataclass(frozen=True)
class _Span:
    """Characters [start, end) of the rendered string are those from `origin` on of the message's content."""

    start: int
    end: int
    origin: int


def encode(tokenizer: Any, example: Example, max_length: int) -> Encoded:
    """One row through the tokenizer (and for a chat its template), cut to `max_length` tokens.

    Raises InputError where the tokenizer has no chat template, gives no character offsets, or the template
    refuses the roles of the conversation.
    """
    return encode_all(tokenizer, [example], max_length)[0]


def encode_all(
    tokenizer: Any, examples: Sequence[Example], max_length: int, ticker: Ticker = no_ticks
) -> list[Encoded]:
    """`encode` for many rows, tokenised in batches. Raises InputError as `encode` does."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer {type(tokenizer).__name__} gives no offsets, so messages cannot be told apart",
            "use a base that has a tokenizer.json",
        )
    special = _special_ids(tokenizer)
    done: dict[int, Encoded] = {}
    for plain in (True, False):  # a text gets the tokenizer's own special tokens, a chat has its template's
        rows = [(i, e) for i, e in enumerate(examples) if (e.text is not None) == plain]
        for first in range(0, len(rows), _CHUNK):
            chunk = rows[first : first + _CHUNK]
            laid = [_lay_out(tokenizer, e) for _, e in chunk]
            strings = [text for text, _ in laid]
            batch = tokenizer(
                strings,
                add_special_tokens=plain,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for row, (index, example) in enumerate(chunk):
                ids, offsets = batch["input_ids"][row], batch["offset_mapping"][row]
                done[index] = _assign(ids, offsets, laid[row][1], example, special, max_length)
            ticker(len(done), len(examples))
    return [done[i] for i in range(len(examples))]


def segment_labels(encoded: Encoded, segments: Iterable[Segment]) -> list[str | None]:
    """The label of each token: that of the segment which covers the token's first character; None outside."""
    by_message: dict[int, list[Segment]] = {}
    for segment in segments:
        by_message.setdefault(segment.message, []).append(segment)
    labels: list[str | None] = []
    for message, start, end in zip(encoded.message, encoded.start, encoded.end, strict=True):
        found = None
        for segment in by_message.get(message, ()):
            # a token that starts in the gap before a segment (its leading space) still belongs to it
            if segment.start <= start < segment.end or (found is None and start < segment.start < end):
                found = segment.label
        labels.append(found)
    return labels


def message_index(
    tokenizer: Any, rendered: str, messages: Sequence[Message], offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    """`Encoded.message` of a chat that was rendered and tokenised elsewhere, without a step per token.

    rendered: the messages through the tokenizer's template. offsets: (N, 2) characters of each token in it.
    Returns (N,), -1 for tokens of the template. Raises InputError where the template refuses a conversation
    with other contents, by which the contents are found.
    """
    _, passed, inside = _place(offsets, _message_spans(tokenizer, rendered, messages, 0))
    return np.where(inside, passed, TEMPLATE)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def _lay_out(tokenizer: Any, example: Example) -> tuple[str, list[_Span]]:
    """The string that is tokenised and where each message lies in it."""
    if example.text is not None:
        return example.text, [_Span(0, len(example.text), 0)]
    rendered = _render(tokenizer, example.messages, example.line)
    return rendered, _message_spans(tokenizer, rendered, example.messages, example.line)


def _message_spans(tokenizer: Any, rendered: str, messages: Sequence[Message], line: int) -> list[_Span]:
    pieces = _skeleton(tokenizer, str(tokenizer.chat_template), tuple(m.role for m in messages))
    contents = [m.content for m in messages]
    if pieces is not None:
        for prepared in (contents, [c.strip() for c in contents]):
            spans = _verbatim(rendered, pieces, prepared, contents)
            if spans is not None:
                return spans
    return _search(tokenizer, rendered, messages, line)


def _render(tokenizer: Any, messages: Sequence[Message], line: int) -> str:
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            "the base's tokenizer has no chat template, so 'messages' rows cannot be rendered",
            "use rows with 'text', or a base that was tuned for chat",
        )
    chat = [{"role": m.role, "content": m.content} for m in messages]
    try:
        rendered: str = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception as error:  # a template may raise whatever it likes
        raise InputError(
            f"line {line}: the chat template refuses this conversation ({shorten(str(error), 120)})",
            "check the roles and their order: user and assistant take turns; not every base knows 'system'",
        ) from error
    return rendered


def _placeholder(index: int) -> str:
    """Private-use characters: no template trims or splits them, and no text is likely to hold them."""
    return f"\uf8f0{index}\uf8f1"


@functools.lru_cache(maxsize=512)
def _skeleton(tokenizer: Any, template: str, roles: tuple[str, ...]) -> tuple[str, ...] | None:
    """The len(roles) + 1 literal pieces around the contents; None where the template reads contents."""
    try:
        text = _render(tokenizer, [Message(r, _placeholder(i)) for i, r in enumerate(roles)], 0)
    except InputError:
        return None
    pieces = []
    for index in range(len(roles)):
        before, found, text = text.partition(_placeholder(index))
        if not found:
            return None
        pieces.append(before)
    return (*pieces, text)


def _verbatim(
    rendered: str, pieces: Sequence[str], prepared: Sequence[str], contents: Sequence[str]
) -> list[_Span] | None:
    """Spans where the rendered string is exactly pieces and prepared contents in turn, else None."""
    at = 0
    spans = []
    for piece, text, content in zip(pieces, prepared, contents, strict=False):
        if not rendered.startswith(piece, at) or not rendered.startswith(text, at + len(piece)):
            return None
        at += len(piece)
        spans.append(_Span(at, at + len(text), content.index(text)))
        at += len(text)
    return spans if rendered[at:] == pieces[-1] else None


def _search(tokenizer: Any, rendered: str, messages: Sequence[Message], line: int) -> list[_Span]:
    """For templates that change contents: what varies when one message alone is replaced is that message."""
    spans: list[_Span] = []
    for index, message in enumerate(messages):
        changed = list(messages)
        changed[index] = Message(message.role, _placeholder(index))
        other = _render(tokenizer, changed, line)
        if other == rendered:  # the template leaves this message out; spans must rise
            at = spans[-1].end if spans else 0
            spans.append(_Span(at, at, 0))
            continue
        start = _common(rendered, other)
        tail = _common(rendered[start:][::-1], other[start:][::-1])
        end = len(rendered) - tail
        spans.append(_Span(start, end, max(0, message.content.find(rendered[start:end]))))
    return spans


def _common(a: str, b: str) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _assign(
    ids: list[int],
    offsets: Sequence[tuple[int, int]],
    spans: Sequence[_Span],
    example: Example,
    special: frozenset[int],
    max_length: int,
) -> Encoded:
    n = min(len(ids), max_length)
    message, completion = [TEMPLATE] * n, [False] * n
    start, end = [-1] * n, [-1] * n
    plain = example.text is not None
    assistant = [True] if plain else [m.role == "assistant" for m in example.messages]
    flat = itertools.chain.from_iterable(offsets[:n])  # numpy reads a list of pairs much more slowly
    places = _place(np.fromiter(flat, dtype=np.int64, count=2 * n).reshape(n, 2), spans)
    current = 0
    closing = False  # between an assistant's content and its end-of-turn token
    for i, (first, passed, inside) in enumerate(zip(*(a.tolist() for a in places), strict=True)):
        if passed > current:
            current = passed
            closing = assistant[current - 1] and not plain
        if plain and ids[i] in special and offsets[i] == (0, 0):
            continue  # a beginning-of-text token the tokenizer adds
        if inside:
            span = spans[passed]
            closing = False
            message[i] = passed
            completion[i] = assistant[passed]
            start[i] = max(first, span.start) - span.start + span.origin
            end[i] = min(offsets[i][1], span.end) - span.start + span.origin
        elif closing and ids[i] in special:  # the first special token after the content ends the turn
            completion[i] = True
            closing = False
    return Encoded(ids[:n], message, completion, start, end, len(ids))


def _place(
    offsets: NDArray[np.int64], spans: Sequence[_Span]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Where tokens lie among rising spans. offsets: (N, 2) characters.

    Returns, (N,) each: the token's first character; how many spans end before it; whether it shares a
    character with the span after those.
    """
    first, last = offsets[:, 0], offsets[:, 1]
    # tokenizers that trim offsets leave a token of blanks empty at its end
    first = np.where(first == last, np.maximum(first - 1, 0), first)
    passed = np.searchsorted([s.end for s in spans], first, side="right")
    starts = np.array([*(s.start for s in spans), np.iinfo(np.int64).max])
    return first, passed, last > starts[passed]
