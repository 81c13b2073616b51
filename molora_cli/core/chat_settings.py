"""How a chat draws its answers: the settings, each checked as it is set."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from molora_cli.errors import InputError
from molora_cli.text import shorten


@dataclass
class Settings:
    """How answers are drawn; see `core.generate.stream`."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False

    def set(self, name: str, text: str) -> None:
        """Set one by its name, hyphens or underscores. Raises InputError: unknown, or not a usable value."""
        key = name.replace("-", "_")
        checks: dict[str, Callable[[str], Any]] = {
            "max_new_tokens": lambda t: number(name, t, int, 1),
            "temperature": lambda t: number(name, t, float, 0),
            "top_p": lambda t: number(name, t, float, 1e-9, 1),
            "top_k": lambda t: number(name, t, int, 0),
            "seed": lambda t: None if t == "none" else number(name, t, int, 0),
            "ignore_eos": lambda t: _switch(name, t),
        }
        if key not in checks:
            raise InputError(
                f"there is no setting '{shorten(name, 40)}'",
                f"settings are: {', '.join(checks)}, router-temperature",
            )
        setattr(self, key, checks[key](text))

    def check(self) -> None:
        """Raises InputError for a value out of range."""
        for name, value in self.shown().items():
            if isinstance(value, bool):
                continue
            self.set(name, "none" if value is None else str(value))

    def shown(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}


def number(name: str, text: str, kind: type, low: float, high: float = math.inf) -> Any:
    """`text` as an int or float in [low, high]. Raises InputError, which says what is allowed."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high) or value == math.inf:
        what = "whole number" if kind is int else "number"
        least = "above 0" if 0 < low < 1 else f"of at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise InputError(f"{name} is '{shorten(text, 40)}'", f"give a {what} {least}{most}")
    return value


def _switch(name: str, text: str) -> bool:
    if text.lower() in ("on", "off", "true", "false"):
        return text.lower() in ("on", "true")
    raise InputError(f"{name} is '{shorten(text, 40)}'", "give on or off")
