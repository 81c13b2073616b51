"""The ways to run a router that `--modes` names: 1, 2, soft, and each at a temperature: 2@3, soft@1.5."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.router.stack import RouterStack

SOFT = "soft"
MOST = 999


class Way(NamedTuple):
    """k: experts a token takes, temperature: of their scores; None = as the router's file says."""

    title: str
    k: int | None
    temperature: float | None


def parse_mode(mode: str) -> tuple[int | None, float | None]:
    """(k, temperature) of one mode; k None = all, temperature None = the file's. Raises InputError."""
    name, at, degree = mode.partition("@")
    try:
        temperature = float(degree) if at else None
    except ValueError:
        temperature = math.nan
    known = name == SOFT or (name.isascii() and name.isdecimal() and 0 < int(name) <= MOST)
    if not known or not (temperature is None or 0 < temperature < math.inf):
        raise InputError(
            f"--modes: '{shorten(mode, 20)}' is no way to route",
            "give numbers and soft, with a temperature if you like: 1,2,soft,2@3",
        )
    return (None if name == SOFT else int(name)), temperature


def usable_ways(stack: RouterStack, modes: Sequence[str]) -> list[Way]:
    """The wanted ways that a router has, each once. One whose stages all state their gates outright has one
    way: "as it is"."""
    if not any(stage.tunable for stage in stack.stages):
        return [Way("as it is", None, None)]
    experts = len(stack.experts)
    found: dict[str, Way] = {}
    for mode in modes:
        wanted, temperature = parse_mode(mode)
        k = experts if wanted is None else wanted
        if k <= experts:
            title = SOFT if wanted is None else f"top-{k}"
            title += "" if temperature is None else f" at {temperature!r}".removesuffix(".0")
            found.setdefault(title, Way(title, k, temperature))
    return list(found.values())
