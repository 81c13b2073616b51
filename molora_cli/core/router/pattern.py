"""Which texts a regular expression matches, in bounded time.

A pattern such as (a+)+b can take for ever on one text, and Python's matcher cannot be interrupted, so it runs
in a process of its own that is killed when its time is up. No torch; run as a program only by `matching`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence

from molora_cli.errors import InputError, MoloraError
from molora_cli.text import shorten

SECONDS = 20.0
_LONGEST = 1000  # characters of a pattern


def matching(pattern: str, texts: Sequence[str], seconds: float = SECONDS) -> list[int]:
    """Indices of the texts in which `pattern` is found (re.search: ^ and $ anchor it to the whole text).

    Raises InputError for a pattern that does not compile or needs longer than `seconds` over all texts.
    """
    shown = shorten(pattern, 60)
    if len(pattern) > _LONGEST:
        raise InputError(f"the pattern '{shown}' is longer than {_LONGEST} characters", "shorten it")
    request = json.dumps({"pattern": pattern, "texts": list(texts)})
    try:
        done = subprocess.run(
            [sys.executable, "-s", "-m", __name__],
            input=request.encode("ascii"),
            capture_output=True,
            timeout=seconds,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"the pattern '{shown}' needs more than {seconds:g} s over {len(texts)} token texts",
            "write it without nested repetition such as (a+)+",
        ) from None
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip()[-200:]
        raise MoloraError(f"matching '{shown}' failed: {shorten(reason, 200)}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise InputError(f"'{shown}' is not a regular expression: {answer['error']}", "correct the pattern")
    found: list[int] = answer["found"]
    return found


def _serve() -> None:
    request = json.loads(sys.stdin.buffer.read())
    try:
        search = re.compile(request["pattern"]).search
    except (re.error, OverflowError, RecursionError) as error:
        answer: dict[str, object] = {"error": str(error)}
    else:
        answer = {"found": [i for i, text in enumerate(request["texts"]) if search(text)]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _serve()
