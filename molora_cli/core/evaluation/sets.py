"""What an evaluation runs on: rows of one domain, rows that change domain, and mixes made from rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from molora_cli.core.training.data import Example, Message, Segment, read_examples
from molora_cli.core.training.mixing import as_questions, as_turns, characters, labelled
from molora_cli.errors import InputError
from molora_cli.text import shorten

SINGLE = "single"
TWO_TURN, ONE_TURN, NEW_TEMPLATE = "two-turn", "one-turn", "new-template"
BASE_LABEL = "base"
_CHARACTERS_PER_TOKEN = 3
# Wordings that no router is trained on: (before the first question, between, after; the same of the reply).
_NEW = (
    ("My list has two entries.\nEntry A >> ", "\nEntry B >> ", "", "Entry A >> ", "\nEntry B >> "),
    ("[begin]\n", "\n[then]\n", "\n[end]", "", "\n[then]\n"),
    ("", "\n=====\n", "\n=====\nKeep the line of equals signs in what you write.", "", "\n=====\n"),
)


@dataclass(frozen=True)
class EvalSet:
    """Rows with `segments`. names: the labels that may appear: adapters, then "base" and blends of them."""

    name: str
    rows: tuple[Example, ...]
    names: tuple[str, ...]
    adapters: int

    @property
    def blended(self) -> bool:
        """No segment has one adapter of its own: there is an NLL and nothing to recover."""
        used = {s.label for row in self.rows for s in row.segments}
        return not used & set(self.names[: self.adapters])


def blend_parts(label: str, adapters: Sequence[str]) -> tuple[str, ...]:
    """The adapters of a label like "math+code"; () for any other label."""
    parts = tuple(label.split("+"))
    return parts if len(parts) > 1 and all(p in adapters for p in parts) else ()


def read_sets(
    specs: Sequence[str], adapters: Sequence[str], limit: int | None, single: int | None
) -> tuple[dict[str, list[Example]], list[tuple[str, list[Example]]]]:
    """`--data` values to (rows per domain, sets of rows that carry segments).

    NAME=FILE with an adapter's name (or "base") is a domain; with any other name, or a FILE alone, its rows
    carry `segments`, or a `label` each. limit: rows per file, evenly spaced. Raises InputError.
    """
    domains: dict[str, list[Example]] = {}
    sets: list[tuple[str, list[Example]]] = []
    for spec in specs:
        name, sep, value = spec.partition("=")
        if not sep or Path(spec).exists():
            name, value = "", spec
        path = Path(value).expanduser()
        own = name in adapters or name == BASE_LABEL
        rows = spaced(read_examples(path), single if own else limit)
        if own:
            domains.setdefault(name, []).extend(
                r if r.segments else labelled(replace(r, label=name), name) for r in rows
            )
        elif all(r.segments for r in rows):
            sets.append((name or path.stem, rows))
        elif not name and all(r.label for r in rows):
            for row in rows:
                _check_label(str(row.label), adapters, f"{path}, line {row.line}")
                domains.setdefault(str(row.label), []).append(labelled(row, str(row.label)))
        else:
            what = f"'{shorten(name, 40)}' is no adapter here" if name else f"{path} names no adapter"
            raise InputError(
                f"--data {shorten(spec, 100)}: {what}, and its rows carry no 'segments'",
                f"use NAME=FILE with a name of {', '.join(adapters)}, or rows with segments",
            )
    taken = [name for name, _ in sets]
    twice = next((n for n in taken if taken.count(n) > 1 or n == SINGLE), None)
    if twice is not None:
        raise InputError(f"two sets are called '{shorten(twice, 40)}'", "name them: --data NAME=FILE")
    return domains, sets


def build_sets(
    domains: Mapping[str, Sequence[Example]],
    given: Sequence[tuple[str, Sequence[Example]]],
    adapters: Sequence[str],
    *,
    mixed: int,
    max_length: int,
    seed: int,
    fresh: Mapping[str, Sequence[Example]] | None = None,
) -> list[EvalSet]:
    """All sets in the order of the table: one domain, the mixes, the files.

    mixed: conversations of each mix. fresh: the rows that mixes are made from, where not all are to be.
    """
    made: list[tuple[str, Sequence[Example]]] = []
    if domains:
        made.append((SINGLE, [row for rows in domains.values() for row in rows]))
    if mixed > 0:
        made += make_mixes(domains if fresh is None else fresh, mixed, max_length=max_length, seed=seed)
    names = [name for name, _ in [*made, *given]]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise InputError(f"two sets are called '{shorten(twice, 40)}'", "name yours: --data NAME=FILE")
    return [_set(name, rows, adapters) for name, rows in [*made, *given]]


def _set(name: str, rows: Sequence[Example], adapters: Sequence[str]) -> EvalSet:
    labels = {s.label: row.line for row in rows for s in row.segments}
    for label, line in labels.items():
        _check_label(label, adapters, f"{name}, line {line}")
    extra = sorted(label for label in labels if label not in adapters)
    return EvalSet(name, tuple(rows), (*adapters, *extra), len(adapters))


def _check_label(label: str, adapters: Sequence[str], where: str) -> None:
    if label not in adapters and label != BASE_LABEL and not blend_parts(label, adapters):
        raise InputError(
            f"{where}: '{shorten(label, 40)}' is no adapter here; there are: {', '.join(adapters)}",
            'use one of these names, "base", or a blend such as '
            + (f'"{adapters[0]}+{adapters[1]}"' if len(adapters) > 1 else '"a+b"'),
        )


def spaced(rows: Sequence[Example], limit: int | None) -> list[Example]:
    """At most `limit` rows, evenly spaced."""
    return list(rows) if limit is None else list(rows[:: max(1, len(rows) // limit)][:limit])


def make_mixes(
    domains: Mapping[str, Sequence[Example]], count: int, *, max_length: int, seed: int
) -> list[tuple[str, list[Example]]]:
    """`count` conversations each: the subject changes between turns; two questions in one prompt, in the
    wordings that routers are trained with; the same in wordings they are not trained with.

    Every ordered pair of domains comes as often as any other, and rows are not used again before all of their
    domain were. Raises InputError where fewer than two domains have chats.
    """
    limit = max_length * _CHARACTERS_PER_TOKEN // 2
    usable = {
        name: [r for r in rows if r.messages and characters(r) <= limit] for name, rows in domains.items()
    }
    usable = {name: rows for name, rows in usable.items() if rows and name != BASE_LABEL}
    if len(usable) < 2:
        raise InputError(
            "--mixed puts chats of two domains together, and fewer than two have chats that are short enough",
            "give --data NAME=FILE for two adapters, or leave --mixed out",
        )
    made = []
    for number, kind in enumerate((TWO_TURN, ONE_TURN, NEW_TEMPLATE)):
        rng = random.Random(f"{seed} {number}")
        queues = {name: itertools.cycle(rng.sample(rows, len(rows))) for name, rows in usable.items()}
        pairs = itertools.cycle(itertools.permutations(usable, 2))
        rows = []
        for place, (one, two) in enumerate(itertools.islice(pairs, count)):
            parts = [next(queues[one]), next(queues[two])]
            if kind == TWO_TURN:
                rows.append(as_turns(parts))
            elif kind == ONE_TURN:
                rows.append(as_questions(parts, rng))
            else:
                rows.append(_in_new_words(parts, _NEW[place % len(_NEW)]))
        made.append((kind, rows))
    return made


def _in_new_words(rows: Sequence[Example], words: tuple[str, str, str, str, str]) -> Example:
    """Two first questions in one prompt and their answers in one reply, in one of the wordings above."""
    opening, between, closing, reply, reply_between = words
    asked = [next(m.content for m in row.messages if m.role == "user") for row in rows]
    told = [next((m.content for m in row.messages if m.role == "assistant"), "") for row in rows]
    messages, segments = [], []
    for number, (role, first, gap, texts, last) in enumerate(
        (("user", opening, between, asked, closing), ("assistant", reply, reply_between, told, ""))
    ):
        text = first
        for place, (part, row) in enumerate(zip(texts, rows, strict=True)):
            text += gap if place else ""
            segments.append(Segment(number, len(text), len(text) + len(part), str(row.label)))
            text += part
        messages.append(Message(role, text + last))
    return Example(tuple(messages), None, None, 0, tuple(segments))
