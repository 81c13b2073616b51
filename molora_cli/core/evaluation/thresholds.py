"""`--min KEY=PERCENT`: what a result must reach for the command to end well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from molora_cli.errors import InputError
from molora_cli.text import shorten

_HOW = "write SET=PERCENT, SET/ROW=PERCENT, SET/ROW/DOMAIN=PERCENT or tasks/DOMAIN/METRIC=PERCENT"


def parse_minimum(texts: Sequence[str]) -> dict[str, float]:
    """Key -> percent. Raises InputError."""
    found = {}
    for text in texts:
        key, sep, value = text.rpartition("=")
        try:
            number = float(value) if sep and key else float("nan")
        except ValueError:
            number = float("nan")
        if not abs(number) <= 1e6:
            raise InputError(f"--min {shorten(text, 60)} is no threshold", _HOW)
        found[key] = number
    return found


def check_sets(minimum: dict[str, float], sets: Sequence[str]) -> None:
    """Before the long work: a threshold must name a set that there is. Raises InputError."""
    for key in minimum:
        if key.partition("/")[0] not in (*sets, "tasks"):
            raise InputError(
                f"--min {shorten(key, 60)} names no set", f"there are: {', '.join(sets) or 'none'}; {_HOW}"
            )


def measures(document: dict[str, Any]) -> dict[str, float | None]:
    """Everything that a threshold can name, in percent.

    SET: recovered, by the first router as its file says; SET/ROW: by a row of the table; SET/ROW/DOMAIN: one
    domain's share. tasks/DOMAIN/METRIC: of the first router; tasks/DOMAIN/METRIC/MODEL: of another one.
    """
    found: dict[str, float | None] = {}
    for name, one in document["sets"].items():
        for row in one["rows"]:
            if row["recovered"] is None:
                continue
            mean = row["recovered"]["mean"]["value"]
            found[f"{name}/{row['name']}"] = _percent(mean)
            if row["group"] == "router" and (row["default"] and name not in found):
                found[name] = _percent(mean)
            for domain, share in row["recovered"]["domains"].items():
                found[f"{name}/{row['name']}/{domain}"] = _percent(share["value"])
    for domain, models in document.get("tasks", {}).items():
        for model, metrics in models.items():
            for metric, result in metrics.items():
                if not isinstance(result, dict):
                    continue
                found[f"tasks/{domain}/{metric}/{model}"] = _percent(result["value"])
                if model not in ("base", "own"):
                    found.setdefault(f"tasks/{domain}/{metric}", _percent(result["value"]))
    return found


def check(document: dict[str, Any], minimum: dict[str, float]) -> list[dict[str, Any]]:
    """The thresholds that are not met: key, wanted, found. Raises InputError for a key that names nothing."""
    if not minimum:
        return []
    known = measures(document)
    failed = []
    for key, wanted in minimum.items():
        if key not in known:
            listed = ", ".join(list(known)[:12]) or "nothing was measured that a threshold can name"
            raise InputError(
                f"--min {shorten(key, 60)} names nothing that was measured", f"there are: {listed}"
            )
        value = known[key]
        if value is None or value < wanted:
            failed.append({"key": key, "wanted": wanted, "found": value})
    return failed


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value, 4)
