"""Text of a growing list of token ids, piece by piece, without ever cutting a letter."""

from __future__ import annotations

import re
from typing import Any

_REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


class TextStream:
    """Decodes ids as they come; the pieces joined equal the tokenizer's decode of all ids.

    Text that later tokens can still change is held back: the bytes of an unfinished letter (at most three),
    and a run of byte pieces of a SentencePiece vocabulary, which is decoded as a whole. Each step decodes a
    short window that starts at an earlier boundary, so that a step costs the same however long the text is.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # the window's first token
        self._boundary = 0  # every token before it was given out completely
        self._given = ""  # what was given out of the window so far

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:], skip_special_tokens=False))

    def _in_byte_run(self) -> bool:
        return bool(_BYTE_PIECE.match(str(self._tokenizer.convert_ids_to_tokens(self._ids[-1]))))

    def push(self, token: int) -> tuple[str, bool]:
        """The text that `token` makes certain, and whether nothing is held back after it."""
        self._ids.append(token)
        if self._in_byte_run():
            return "", False
        text = self._decode(self._start)
        settled = text
        for _ in range(3):
            settled = settled.removesuffix(_REPLACEMENT)
        new = settled[len(self._given) :]
        complete = len(settled) == len(text)
        if complete:
            # the window keeps one earlier chunk: some decoders treat the first token of a text otherwise
            self._start, self._boundary = self._boundary, len(self._ids)
            self._given = self._decode(self._start)
        else:
            self._given += new
        return new, complete

    def flush(self) -> str:
        """What was held back, replacement characters for bytes that never became a letter."""
        if not self._ids:
            return ""
        rest = self._decode(self._start)[len(self._given) :]
        self._start = self._boundary = len(self._ids)
        self._given = ""
        return rest
