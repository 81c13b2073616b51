"""What a command does to be there sooner."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Nobody looks for cyclic garbage inside. For imports and loading: torch and transformers make a million
    objects that all stay, and to go through them again and again is a fifth of the time of a start."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
