"""Regexes out of adapter configs, run so that none can hang the program.

A pattern from a stranger may backtrack for ever. Plain names are matched here; everything else runs in a
child process that is ended after a deadline.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from molora_cli.errors import InputError
from molora_cli.text import shorten

MAX_PATTERN = 20_000  # characters
DEADLINE = 0.5  # seconds for the patterns of one field
# letters, digits, escaped dots and plain dots: nothing repeats, so nothing can backtrack
_PLAIN = re.compile(r"(?:[\w\-.]|\\\.)*\Z")
_CHILD = """
import json, re, sys
job = json.load(sys.stdin)
found = []
for pattern in job["patterns"]:
    compiled = re.compile(pattern)
    found.append([bool(compiled.match(name)) for name in job["names"]])
json.dump(found, sys.stdout)
"""


class TooSlow(Exception):
    """The patterns did not finish before the deadline."""


def check_pattern(pattern: str, field: str) -> None:
    """Raises InputError where `pattern` is no regex, with the position, or is absurdly long."""
    if len(pattern) > MAX_PATTERN:
        raise InputError(
            f"{field} is a pattern of {len(pattern)} characters; at most {MAX_PATTERN} are read",
            f"list the modules in {field} by name",
        )
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        where = f" at position {error.pos}" if isinstance(error, re.error) and error.pos is not None else ""
        reason = error.msg if isinstance(error, re.error) else "nested too deeply"
        raise InputError(
            f"{field} is no valid regular expression: {reason}{where} in '{shorten(pattern, 100)}'",
            f"correct {field} in adapter_config.json, or list the modules by name",
        ) from error


def match_all(patterns: Sequence[str], names: Iterable[str], deadline: float = DEADLINE) -> list[list[bool]]:
    """For each pattern, whether `re.match` finds it in each name. Raises TooSlow after `deadline` seconds."""
    wanted = list(names)
    if all(_PLAIN.match(_core(p)) for p in patterns):
        compiled = [re.compile(p) for p in patterns]
        return [[bool(c.match(name)) for name in wanted] for c in compiled]
    job = json.dumps({"patterns": list(patterns), "names": wanted})
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=job,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=deadline,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TooSlow from error
    if done.returncode != 0:
        raise TooSlow
    result: list[list[bool]] = json.loads(done.stdout)
    return result


# what `pattern_key` and `full` wrap around a config's own text; linear on their own
_WRAPS = (("(.*\\.)?(", ")$"), ("(?:", ")\\Z"))


def _core(pattern: str) -> str:
    for before, after in _WRAPS:
        if pattern.startswith(before) and pattern.endswith(after):
            return pattern[len(before) : len(pattern) - len(after)]
    return pattern + "*"  # not one of ours: never plain


def pattern_key(key: str) -> str:
    """The regex PEFT builds from a key of rank_pattern or alpha_pattern: a suffix of the module's path."""
    return _WRAPS[0][0] + key + _WRAPS[0][1]


def full(pattern: str) -> str:
    """`pattern` so that `re.match` behaves as `re.fullmatch`, as PEFT reads a textual target_modules."""
    return _WRAPS[1][0] + pattern + _WRAPS[1][1]
