"""Texts around the subject that tell a domain by themselves: a system prompt, a header or a closing line that
the training rows of one domain have and the others do not.

A router learns such a wrapper before it learns the subject, is nearly always right on held-out rows, which
have it too, and goes wrong on the first prompt without it. Held-out accuracy cannot show that; the rows can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from molora_cli.core.training.data import Example
from molora_cli.text import shorten

OWN, OTHERS = 0.9, 0.05  # shares of a domain's rows and of all others' that have a wrapper
_LEAST_ROWS = 10
_MOST_WORDS = 60
_LEAST_CHARACTERS = 8

Words = tuple[str, ...]


def leaks(domains: Mapping[str, Sequence[Example]]) -> list[str]:
    """A line for each wrapper that OWN of a domain's rows or more have, and OTHERS of the others' at most."""
    apart = {
        name: (rows, [row for other, theirs in domains.items() if other != name for row in theirs])
        for name, rows in domains.items()
    }
    apart = {
        n: (own, others) for n, (own, others) in apart.items() if min(len(own), len(others)) >= _LEAST_ROWS
    }
    found = []
    for name, (rows, others) in apart.items():
        for what, read in _PLACES.items():
            wrapper = _common([read(row) for row in rows])
            if wrapper is None:
                continue
            elsewhere = sum(read(row)[: len(wrapper)] == wrapper for row in others) / len(others)
            if elsewhere <= OTHERS:
                words = wrapper[::-1] if what == _END else wrapper
                found.append(
                    f"{name}: {what} {shorten(' '.join(words), 60)!r} in nearly all of its rows and hardly "
                    "anywhere else: the router may learn this wrapper instead of the subject; add rows "
                    "without it, unless every real prompt has it"
                )
    if any(_SYSTEM in line for line in found):
        return found
    # without one the template's own default stands there, or nothing: that tells the domain as well
    return found + [
        f"{name}: hardly a row has a system prompt, and nearly all others have one: the router may learn "
        "that instead of the subject; use it in all domains' rows or in none"
        for name, (rows, others) in apart.items()
        if _bare(rows) >= OWN and _bare(others) <= OTHERS
    ]


def _bare(rows: Sequence[Example]) -> float:
    """Share of chats without a system prompt; NaN where there are no chats."""
    chats = [row for row in rows if row.text is None]
    return sum(not _system(row) for row in chats) / len(chats) if chats else float("nan")


def _common(texts: Sequence[Words]) -> Words | None:
    """The longest beginning that at least OWN of the texts share; None where it is too short to be one."""
    kept: Words = ()
    needed = OWN * len(texts)
    for length in range(1, _MOST_WORDS + 1):
        longer = (text[:length] for text in texts if len(text) >= length)
        counts = Counter(text for text in longer if text[:-1] == kept)
        best, count = counts.most_common(1)[0] if counts else ((), 0)
        if count < needed:
            break
        kept = best
    return kept if len(kept) > 1 and sum(map(len, kept)) >= _LEAST_CHARACTERS else None


def _system(row: Example) -> Words:
    return tuple(" ".join(m.content for m in row.messages if m.role == "system").split())


def _prompt(row: Example) -> Words:
    if row.text is not None:
        return tuple(row.text.split())
    return tuple(next((m.content for m in row.messages if m.role == "user"), "").split())


def _ending(row: Example) -> Words:
    """The first prompt's words from the last one back; a plain text has no prompt that ends."""
    return () if row.text is not None else _prompt(row)[::-1]


_SYSTEM, _END = "a system prompt says", "prompts end with"
_PLACES: dict[str, Callable[[Example], Words]] = {
    _SYSTEM: _system,
    "prompts begin with": _prompt,
    _END: _ending,
}
