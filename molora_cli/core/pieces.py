"""The text of single tokens, so that pieces joined in order give back the text they were cut from.

A token can hold part of a character. Its bytes then stand as lone surrogates (Python's `surrogateescape`),
which `join_pieces` turns back into characters once all their bytes are there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


def token_pieces(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """Token id -> text for the ids a `tokenizers.Tokenizer` knows; special tokens as they are written."""
    added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
    kinds = _decoder_kinds(tokenizer)
    found = {}
    for i in ids:
        token = added.get(i) or tokenizer.id_to_token(i)
        if token is not None:
            found[i] = token if i in added else _piece(token, kinds)
    return found


def join_pieces(pieces: Iterable[str]) -> str:
    """Pieces as one text; bytes that never become a character are shown as U+FFFD."""
    return "".join(pieces).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def show_piece(piece: str) -> str:
    """One piece on its own: bytes that are no whole character as `\\xf0`."""
    return piece.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def split_tail(text: str) -> tuple[str, str]:
    """`text` of pieces as (whole characters, bytes of a character that is not yet whole)."""
    data = text.encode("utf-8", "surrogateescape")
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead >= 0xC0:
            wanted = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            if length < wanted:
                return data[:-length].decode("utf-8", "replace"), data[-length:].decode(
                    "utf-8", "surrogateescape"
                )
            break
        if lead < 0x80:
            break
    return data.decode("utf-8", "replace"), ""


def _decoder_kinds(tokenizer: Any) -> frozenset[str]:
    """Names of the steps by which a tokenizer makes text of tokens, from its own description."""
    text = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"{}"
    decoder = json.loads(text)
    steps = decoder.get("decoders") or [decoder]
    return frozenset(str(step.get("type", "")) for step in steps)


def _piece(token: str, kinds: frozenset[str]) -> str:
    if "ByteLevel" in kinds:
        table = _byte_table()
        if all(c in table for c in token):
            return bytes(table[c] for c in token).decode("utf-8", "surrogateescape")
        return token
    byte = _BYTE.match(token)
    if byte and "ByteFallback" in kinds:
        return bytes([int(byte.group(1), 16)]).decode("utf-8", "surrogateescape")
    if "WordPiece" in kinds:
        return token[2:] if token.startswith("##") else " " + token
    return token.replace("▁", " ")


@lru_cache(maxsize=1)
def _byte_table() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable bytes as they are, others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in shown}
    hidden = [b for b in range(256) if b not in set(shown)]
    table.update({chr(0x100 + n): b for n, b in enumerate(hidden)})
    return table
