"""Text that is safe to show: bytes from models, prompts, names and files never reach a terminal raw."""

from __future__ import annotations

import os
import unicodedata

# Cc: controls, Cs: lone surrogates, Zl/Zp: line and paragraph separators. Cf (format) is shown escaped only
# where it can reorder or hide text; joiners inside emoji and Indic scripts must stay.
_KEPT_FORMAT = {"\u200c", "\u200d", "\u00ad"}


def is_unsafe(char: str) -> bool:
    """True for a character that can move the cursor, reorder the line or hide text."""
    category = unicodedata.category(char)
    if category in ("Cc", "Cs", "Zl", "Zp"):
        return True
    if category == "Cf" and char not in _KEPT_FORMAT:
        # tag characters (U+E0020..) build flag emoji and are invisible on their own
        return not 0xE0020 <= ord(char) <= 0xE007F
    return False


def _escape(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def printable(text: str, *, keep: str = "") -> str:
    """`text` with every unsafe character escaped; characters in `keep` (say, newline and tab) pass."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escape(c) if c not in keep and is_unsafe(c) else c for c in text)


def shorten(text: str, width: int = 80) -> str:
    """`printable` text cut to `width` characters with an ellipsis, for messages."""
    shown = printable(text)
    return shown if len(shown) <= width else shown[: max(1, width - 1)] + "…"


def argument_text(text: str) -> str:
    """An argument of the command line as text: bytes that Python could not decode are read as UTF-8, and what
    is no UTF-8 becomes U+FFFD, for no tokenizer takes lone surrogates."""
    if not any("\udc80" <= char <= "\udcff" for char in text):
        return text
    return os.fsencode(text).decode("utf-8", "replace")
