"""What may be said of an adapter before its tensors are read: supported, or refused and why."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from molora_cli.errors import InputError
from molora_cli.text import shorten

MAX_RANK = 65536


@dataclass(frozen=True)
class Reason:
    """Why an adapter is refused: the field at fault ("": the file as a whole), why, the way out."""

    field: str
    why: str
    remedy: str

    def error(self, where: str) -> InputError:
        """The same as an error about the file `where`."""
        return InputError(f"{where}: {self.field + ': ' if self.field else ''}{self.why}", self.remedy)


@dataclass(frozen=True)
class Classification:
    """kind: "lora", "xlora", "mlx", "gguf", "peft-other" or "unknown". No `reasons`: supported."""

    kind: str
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def supported(self) -> bool:
        return not self.reasons

    def as_dict(self) -> dict[str, Any]:
        """As JSON: verdict "supported" or "refused", the kind, reasons with fields and remedies, notes."""
        return {
            "verdict": "supported" if self.supported else "refused",
            "kind": self.kind,
            "reasons": [{"field": r.field, "why": r.why, "remedy": r.remedy} for r in self.reasons],
            "notes": list(self.notes),
        }


class Findings:
    """Collects reasons and notes."""

    def __init__(self) -> None:
        self.reasons: list[Reason] = []
        self.notes: list[str] = []

    def refuse(self, name: str, why: str, remedy: str) -> None:
        self.reasons.append(Reason(name, why, remedy))


def active(value: Any) -> bool:
    """Whether a field of unknown meaning may change something: not null, false, empty, zero or "none"."""
    return not (value is None or value is False or value in ("", "none", 0) or value in ([], {}))


def check_rank(name: str, value: Any, found: Findings) -> None:
    """A rank is a whole number from 1 to MAX_RANK."""
    if isinstance(value, bool) or not isinstance(value, int):
        found.refuse(
            name, f"the rank must be a whole number, not {shorten(str(value), 30)}", f"correct {name}"
        )
    elif not 1 <= value <= MAX_RANK:
        found.refuse(
            name, f"the rank must be from 1 to {MAX_RANK}, not {shorten(str(value), 30)}", f"correct {name}"
        )


def check_factor(name: str, value: Any, found: Findings) -> None:
    """An alpha or scale is a finite number other than 0; a negative one is noted."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        found.refuse(name, f"must be a number, not {shorten(str(value), 30)}", f"correct {name}")
        return
    try:
        usable = math.isfinite(float(value)) and abs(float(value)) <= 1e30
    except OverflowError:
        usable = False
    if not usable:
        found.refuse(name, f"must be a finite number, not {shorten(str(value), 30)}", f"correct {name}")
    elif value == 0:
        found.refuse(name, "is 0: the adapter would change nothing", f"correct {name}")
    elif value < 0:
        found.notes.append(f"{name} is negative ({value}): the adapter is subtracted")
