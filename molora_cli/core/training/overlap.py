"""Documents that a router was trained on, small enough for its header, so that an evaluation finds them.

Five bytes of a SHA-256 a text: among 4000 known texts a new one is taken for known once in 3e8.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from molora_cli.core.training.data import Example

_BYTES = 5


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:_BYTES]


def text_key(row: Example) -> str:
    """The row's text but for blanks and case: what makes two rows the same document here."""
    return " ".join("\0".join(row.contents).split()).casefold()


def _question(row: Example) -> str | None:
    """The first user turn, where it is long enough to be nobody else's."""
    return _long(next((m.content for m in row.messages if m.role == "user"), ""))


def _long(text: str) -> str | None:
    text = " ".join(text.split()).casefold()
    return text if len(text) >= 24 else None


def pack(rows: Iterable[Example]) -> dict[str, str]:
    """{"texts", "questions"}: digests of whole rows and of their questions, sorted, in base64."""
    texts, questions = set(), set()
    for row in rows:
        texts.add(_digest(text_key(row)))
        question = _question(row)
        if question is not None:
            questions.add(_digest(question))
    return {"texts": _packed(texts), "questions": _packed(questions)}


def united(one: Mapping[str, str], other: Mapping[str, str]) -> dict[str, str]:
    """What `pack` would have given for the rows of both."""
    return {
        key: _packed(_unpacked(one.get(key)) | _unpacked(other.get(key))) for key in ("texts", "questions")
    }


class Seen:
    """The documents in a router's header. Old routers have none: `known` is False and nothing is found."""

    def __init__(self, training: Mapping[str, Any]) -> None:
        found = training.get("seen")
        self.known = isinstance(found, Mapping)
        self._texts = _unpacked(found.get("texts") if isinstance(found, Mapping) else None)
        self._questions = _unpacked(found.get("questions") if isinstance(found, Mapping) else None)

    def __contains__(self, row: Example) -> bool:
        """Whether the row's text, its question, or a segment of it that is a question, was trained on."""
        if _digest(text_key(row)) in self._texts:
            return True
        parts = [row.contents[s.message][s.start : s.end] for s in row.segments]
        asked = [_question(row), *(_long(part) for part in parts)]
        return any(text is not None and _digest(text) in self._questions for text in asked)


def _packed(digests: Iterable[bytes]) -> str:
    return base64.b64encode(b"".join(sorted(digests))).decode("ascii")


def _unpacked(text: Any) -> frozenset[bytes]:
    """Whatever is no such text holds nothing: a damaged note is no reason to refuse a router."""
    try:
        raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except ValueError:
        return frozenset()
    return frozenset(raw[i : i + _BYTES] for i in range(0, len(raw) - _BYTES + 1, _BYTES))
