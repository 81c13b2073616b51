"""Ctrl-C that stops an answer between two tokens."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, the first Ctrl-C only sets a flag (the yielded function reads it), the second raises.

    An answer stops between two tokens, so that the keys and values kept for the next one stay whole.
    """
    hits = 0

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal hits
        hits += 1
        if hits > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: hits > 0
    finally:
        signal.signal(signal.SIGINT, before)
