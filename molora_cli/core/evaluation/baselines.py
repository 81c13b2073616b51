"""`--baselines`: which rows beside the routers are wanted, with their settings."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from molora_cli.core.convert.plan import METHODS as MERGES
from molora_cli.errors import InputError
from molora_cli.text import shorten

ADAPTERS, UNIFORM, ORACLE = "adapters", "uniform", "label-oracle"
SEQUENCE_ORACLE, SEQUENCE_ROUTER = "sequence-oracle", "sequence-router"
TURN_ORACLE, TURN_ROUTER = "turn-oracle", "turn-router"
PEFT = "peft-"  # PEFT's own merges: what follows is its combination_type
PEFT_MERGES = (PEFT + "linear", PEFT + "ties", PEFT + "dare_linear", PEFT + "dare_ties")
ARROW, XLORA, BLEND, PAIRS = "arrow", "xlora", "blend", "pairs"
DEFAULT = (ADAPTERS, UNIFORM, ORACLE, SEQUENCE_ORACLE, SEQUENCE_ROUTER, TURN_ORACLE, TURN_ROUTER)
# rows that follow from each adapter's on every token
FROM_ADAPTERS = (ADAPTERS, SEQUENCE_ORACLE, SEQUENCE_ROUTER, TURN_ORACLE, TURN_ROUTER)
_OWN_MERGES = tuple(m for m in MERGES if m != "linear")  # linear gives the same as svd
_GROUPS = {
    "none": (),
    "default": DEFAULT,
    "merges": _OWN_MERGES,
    "peft-merges": PEFT_MERGES,
    # X-LoRA is trained first: only where it is asked for by name
    "all": (*DEFAULT, PAIRS, *_OWN_MERGES, *PEFT_MERGES, ARROW),
}
# settings of a baseline and what they are when nothing is said
_SETTINGS: dict[str, dict[str, float]] = {
    "cat": {"weight": 0},
    "svd": {"weight": 0, "rank": 0},
    "linear": {"weight": 0, "rank": 0},
    "ties": {"rank": 0, "density": 0.5, "scale": 1},
    "dare": {"weight": 0, "rank": 0, "density": 0.5, "seed": 0},
    PEFT + "linear": {"weight": 0},
    PEFT + "ties": {"weight": 1, "density": 0.5},
    PEFT + "dare_linear": {"weight": 0, "density": 0.5, "seed": 0},
    PEFT + "dare_ties": {"weight": 1, "density": 0.5, "seed": 0},
    ARROW: {"k": 0, "temperature": 1},
    XLORA: {"tokens": 56_000, "lr": 1e-3, "depth": 1, "layerwise": 0, "seed": 0},
}
KNOWN = (*DEFAULT, PAIRS, *MERGES, *PEFT_MERGES, ARROW, XLORA, BLEND)


@dataclass(frozen=True)
class Baseline:
    """One wanted row (for "adapters", "pairs" and "arrow" several). settings: numbers by name; a merge's
    `weight` 0 means 1/n for each adapter, its `rank` 0 the largest of the adapters', `scale` multiplies what
    ties gave (its weights are relative). shares: of a blend."""

    name: str
    settings: dict[str, float] = field(default_factory=dict)
    shares: tuple[tuple[str, float], ...] = ()

    @property
    def title(self) -> str:
        """As the row is called: the name, and the settings that are not the usual ones."""
        if self.name == BLEND:
            return " + ".join(f"{share:g} {name}" for name, share in self.shares)
        plain = usual(self.name)
        said = [f"{k}={v:g}" for k, v in self.settings.items() if v != plain.get(k)]
        return self.name + (f" ({', '.join(said)})" if said else "")

    @property
    def row(self) -> str:
        """The title of its row in a table, of one that has one row."""
        if self.name != ARROW:
            return self.title
        temperature = self.settings["temperature"]
        return f"arrow top-{self.settings['k']:g}" + (
            f" (temperature={temperature:g})" if temperature != 1 else ""
        )


def usual(name: str) -> dict[str, float]:
    """A baseline's settings where nothing is said."""
    return dict(_SETTINGS.get(name, {}))


def parse_baselines(texts: Sequence[str], adapters: Sequence[str]) -> list[Baseline]:
    """`--baselines` values: names apart by commas, each `NAME` or `NAME:key=value:key=value`.

    "default", "merges", "peft-merges", "all" and "none" stand for several; () is "default". Raises
    InputError.
    """
    words = [w.strip() for text in texts or ("default",) for w in text.split(",") if w.strip()]
    found: list[Baseline] = []
    for word in words:
        name, *pairs = word.split(":")
        if name in _GROUPS:
            found += [Baseline(n, usual(n)) for n in _GROUPS[name]]
        elif name not in KNOWN:
            raise InputError(
                f"--baselines: '{shorten(name, 40)}' is not known",
                f"use {', '.join(KNOWN)}, or {', '.join(_GROUPS)}",
            )
        elif name == BLEND:
            found.append(Baseline(BLEND, shares=_shares(pairs, adapters)))
        else:
            found.append(Baseline(name, usual(name) | _numbers(name, pairs)))
    unique = {(b.name, tuple(b.settings.items()), b.shares): b for b in found}
    return list(unique.values())


def _numbers(name: str, pairs: Sequence[str]) -> dict[str, float]:
    plain = usual(name)
    values = {}
    for pair in pairs:
        key, _, text = pair.partition("=")
        if key not in plain:
            known = f"it has {', '.join(plain)}" if plain else "it has none"
            raise InputError(f"--baselines {name}: there is no setting '{shorten(key, 40)}'", known)
        values[key] = _number(name, key, text)
        if values[key] < 0 or (key == "density" and not 0 < values[key] <= 1):
            raise InputError(f"--baselines {name}: {key}={text} is out of range", "give a positive number")
    return values


def _shares(pairs: Sequence[str], adapters: Sequence[str]) -> tuple[tuple[str, float], ...]:
    shares = []
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in adapters:
            raise InputError(
                f"--baselines blend: there is no adapter '{shorten(name, 40)}'",
                f"it has {', '.join(adapters)}",
            )
        shares.append((name, _number(BLEND, name, text)))
    if not shares:
        raise InputError("--baselines blend names no adapter", "write blend:math=0.5:code=0.5")
    return tuple(shares)


def _number(name: str, key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) <= 1e9:
        raise InputError(f"--baselines {name}: '{shorten(text, 20)}' is no number", f"write {name}:{key}=0.5")
    return value


def pairs_of(adapters: Sequence[str]) -> list[Baseline]:
    """Half and half of every two adapters."""
    return [
        Baseline(BLEND, shares=((one, 0.5), (two, 0.5))) for one, two in itertools.combinations(adapters, 2)
    ]
