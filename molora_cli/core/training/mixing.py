"""Documents that change domain on the way: what makes a router learn tokens instead of sequences.

A router trained on documents of one domain each may decide by the first words and stay there. So a share
of the training rows is put together from two or three rows of different domains: as turns of one chat,
as several questions in one prompt with an answer in several parts, or as running text. Every character of a
segment carries its domain, and the words that join segments carry none.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from molora_cli.core.training.data import Example, Message, Segment

# words of these roles say nothing of the domain of a question
_UNLABELLED_ROLES = frozenset({"system", "developer", "tool"})

# How a prompt opens before its questions.
_OPENINGS = (
    "",
    "",
    "",
    "Two questions:\n",
    "Please answer these.\n\n",
    "I have a couple of questions.\n",
    "Help me with all of the following.\n\n",
    "Here is my list:\n",
    "Hi! ",
    "Could you look at these?\n\n",
    "Quick ones:\n",
    "Give an answer to each.\n\n",
    "There are several items below, reply to every one of them.\n",
)
# Markers before the parts, by position; "{n}" counts from 1, "{a}" from a, "{A}" from A.
_MARKERS = (
    "",
    "",
    "{n}. ",
    "{n}. ",
    "{n}) ",
    "({n}) ",
    "({a}) ",
    "{a}) ",
    "{A}. ",
    "{A}: ",
    "[{n}] ",
    "Q{n}: ",
    "Question {n}: ",
    "- ",
    "* ",
    "• ",
    "> ",
    "No. {n}: ",
    "**{n}** ",
)
_REPLY_MARKERS = (
    "",
    "",
    "",
    "{n}. ",
    "{n}. ",
    "{n}) ",
    "({n}) ",
    "({a}) ",
    "{A}: ",
    "[{n}] ",
    "A{n}: ",
    "Answer {n}: ",
    "Answer to {n}:\n",
    "- ",
    "* ",
    "**{n}** ",
    "Sure. ",
    "Here you go: ",
    "My answer:\n",
)
_BREAKS = ("\n\n", "\n\n", "\n\n", "\n", "\n", "\n\n\n", "\n---\n", "\n\n***\n\n", " ", "\n\n---\n\n")
_CLOSINGS = ("", "", "", "", "\nKeep it brief.", "\nShort answers, please.")
_TEXT_BREAKS = ("\n\n", "\n\n", "\n", " ", "\n---\n", "\n\n\n", "\n***\n")


@dataclass
class _Text:
    """A message that is being put together: its characters, and which of them belong to a domain."""

    text: str = ""
    marks: list[tuple[int, int, str]] = field(default_factory=list)

    def join(self, words: str) -> None:
        """Add words that belong to no domain."""
        self.text += words

    def add(self, words: str, label: str) -> None:
        """Add words of a domain."""
        self.marks.append((len(self.text), len(self.text) + len(words), label))
        self.text += words

    def segments(self, message: int) -> list[Segment]:
        return [Segment(message, start, end, label) for start, end, label in self.marks if end > start]


def labelled(example: Example, label: str) -> Example:
    """The row with all its characters as segments of domain `label`, but for the words of a system prompt."""
    if example.messages:
        spans = [
            Segment(i, 0, len(m.content), label)
            for i, m in enumerate(example.messages)
            if m.role not in _UNLABELLED_ROLES and m.content
        ]
    else:
        spans = [Segment(0, 0, len(example.text or ""), label)]
    return replace(example, label=label, segments=tuple(spans))


def _domain(example: Example) -> str:
    return example.label or ""


def _talk(example: Example) -> list[Message]:
    """The messages that are neither system prompt nor tool output."""
    return [m for m in example.messages if m.role not in _UNLABELLED_ROLES]


def _row(messages: Sequence[Message], segments: Sequence[Segment]) -> Example:
    return Example(tuple(messages), None, None, 0, tuple(segments))


def as_turns(rows: Sequence[Example]) -> Example:
    """The conversations one after the other; only the first keeps its system prompt."""
    messages: list[Message] = []
    segments: list[Segment] = []
    for i, row in enumerate(rows):
        for message in row.messages if i == 0 else _talk(row):
            if message.role not in _UNLABELLED_ROLES and message.content:
                segments.append(Segment(len(messages), 0, len(message.content), _domain(row)))
            messages.append(message)
    return _row(messages, segments)


def _parts(parts: Sequence[tuple[str, str]], marker: str, gap: str, opening: str = "") -> _Text:
    """Parts (words, domain) with a marker before each and a gap between them."""
    text = _Text()
    text.join(opening)
    for i, (words, label) in enumerate(parts):
        mark = marker.format(n=i + 1, a=chr(ord("a") + i), A=chr(ord("A") + i))
        text.join((gap if i else "") + mark)
        text.add(words, label)
    return text


def as_questions(rows: Sequence[Example], rng: random.Random) -> Example:
    """The first questions in one prompt, their answers as the parts of one reply."""
    asked, answers = [], []
    for row in rows:
        talk = _talk(row)
        asked.append((next((m.content for m in talk if m.role == "user"), talk[0].content), _domain(row)))
        answers += [(m.content, _domain(row)) for m in talk if m.role == "assistant"][:1]
    prompt = _parts(asked, rng.choice(_MARKERS), rng.choice(_BREAKS), rng.choice(_OPENINGS))
    prompt.join(rng.choice(_CLOSINGS))
    messages = [m for m in rows[0].messages[:1] if m.role in _UNLABELLED_ROLES]
    segments = prompt.segments(len(messages))
    messages.append(Message("user", prompt.text))
    if answers:
        reply = _parts(answers, rng.choice(_REPLY_MARKERS), rng.choice(_BREAKS))
        segments += reply.segments(len(messages))
        messages.append(Message("assistant", reply.text))
    return _row(messages, segments)


def as_text(rows: Sequence[Example], rng: random.Random) -> Example:
    """The rows as one running text; a conversation among them gives its messages as paragraphs."""
    gap = rng.choice(_TEXT_BREAKS)
    words = [row.text or "\n".join(m.content for m in _talk(row)) for row in rows]
    text = _parts([(w, _domain(r)) for w, r in zip(words, rows, strict=True)], "", gap)
    return Example((), text.text, None, 0, tuple(text.segments(0)))


def characters(example: Example) -> int:
    return sum(map(len, example.contents))


class Mixer:
    """Draws mixed rows from rows of several domains.

    rows: domain -> rows `labelled` with it (two domains or more, none empty). limit: characters that a mix
    should hold at most; rows too long for that are left out where shorter ones exist. seed: the same seed
    gives the same rows.
    """

    def __init__(self, rows: Mapping[str, Sequence[Example]], *, limit: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._limit = limit
        self._rows: dict[str, list[Example]] = {}
        for label, examples in rows.items():
            usable = [e for e in examples if not e.messages or _talk(e)]
            short = [e for e in usable if characters(e) <= limit // 2]
            # where all are long the shortest are taken and cut by the tokenizer's limit: better than no mix
            self._rows[label] = short or sorted(usable, key=characters)[: max(1, len(usable) // 4)]
        self._rows = {label: examples for label, examples in self._rows.items() if examples}

    def draw(self) -> Example:
        """A row with two segments of two domains, or three segments where there is room."""
        rng = self._rng
        labels = rng.sample(list(self._rows), 2)
        if rng.random() < 0.25:
            labels.append(rng.choice([x for x in self._rows if x != labels[-1]]))
        rows = [rng.choice(self._rows[x]) for x in labels]
        while len(rows) > 2 and sum(map(characters, rows)) > self._limit:
            rows.pop()
        if not all(r.messages for r in rows):
            return as_text(rows, rng)
        return as_turns(rows) if rng.random() < 0.3 else as_questions(rows, rng)
