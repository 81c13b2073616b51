"""Sides timed in turn, round by round; ratios are taken within a round. Knows nothing of models."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from molora_cli.out import Ticker, no_ticks

SLOW_TURN = 3.0  # seconds: a side that takes longer sits out most rounds
SLOW_ROUNDS = 3  # rounds that such a side takes part in

Times = list[float | None]  # seconds a unit, one entry per round; None where the side sat out


@dataclass
class Side:
    """One thing to time.

    name: what --sides and tables call it; title: what it is, for people. call: one turn. units: tokens (or
    calls) a turn yields; times are per unit. moved, flops: bytes that a unit must read at the least, and its
    floating-point operations (a multiplication and an addition are two); None = not counted. before: runs
    untimed ahead of every turn. after: once, when all rounds are done: what else there is to say. timed:
    `call` returns the seconds itself (another process does the work).
    """

    name: str
    title: str
    call: Callable[[], object]
    units: int = 1
    moved: float | None = None
    flops: float | None = None
    before: Callable[[], object] | None = None
    after: Callable[[], Mapping[str, Any]] | None = None
    timed: bool = False


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` values."""

    median: float
    low: float
    high: float
    count: int

    def document(self) -> dict[str, float]:
        return {"median": self.median, "p25": self.low, "p75": self.high, "rounds": self.count}


def spread(values: Sequence[float]) -> Spread | None:
    """None where there are no values."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratios(own: Times, reference: Times) -> list[float]:
    """own / reference of every round in which both took part."""
    return [a / b for a, b in zip(own, reference, strict=True) if a is not None and b is not None and b > 0]


def interleave(
    sides: Sequence[Side],
    rounds: int,
    clock: Callable[[], float],
    *,
    warmup: int = 2,
    warm: Callable[[], object] | None = None,
    ticker: Ticker = no_ticks,
) -> dict[str, Times]:
    """Times of each side by name: all sides in turn within a round, after `warmup` untimed turns each.

    A side whose warm turn took SLOW_TURN seconds or more is warmed up once only and takes part in SLOW_ROUNDS
    rounds, spread evenly. warm: called between warming up and the first round.
    """
    slow: set[str] = set()
    for side in sides:
        for _ in range(warmup):
            ticker(0, rounds, f"warming up {side.name}")
            if _turn(side, clock) >= SLOW_TURN:
                slow.add(side.name)
                break
    if warm is not None:
        warm()
    wanted = min(rounds, SLOW_ROUNDS)
    special = {round((i + 0.5) * rounds / wanted - 0.5) for i in range(wanted)}
    times: dict[str, Times] = {side.name: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            ticker(number, rounds, side.name)
            sits_out = side.name in slow and number not in special
            times[side.name].append(None if sits_out else _turn(side, clock) / side.units)
    ticker(rounds, rounds)
    return times


def _turn(side: Side, clock: Callable[[], float]) -> float:
    """Seconds of one turn."""
    if side.before is not None:
        side.before()
    started = clock()
    result = side.call()
    took = clock() - started
    return float(result) if side.timed else took  # type: ignore[arg-type]
