"""Rows of a CSV file that only grows: one per side and reference of a run."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from molora_cli.errors import InputError, MoloraError
from molora_cli.text import shorten

COLUMNS = (
    *("date", "commit", "bench", "case", "side", "unit", "median_s", "p25_s", "p75_s", "rounds"),
    *("reference", "ratio", "ratio_p25", "ratio_p75", "gb_per_s", "of_reading", "gflop_per_s", "of_product"),
    *("dtype", "threads", "backend", "clock", "machine", "features", "versions", "command", "notes"),
)


def rows(document: Mapping[str, Any]) -> list[dict[str, str]]:
    """The rows of a run's document (`job.run`): per side one for each reference, or one without."""
    machine, settings = document["machine"], document["settings"]
    shared = {
        "date": machine["date"],
        "commit": machine["commit"],
        "bench": document["bench"],
        "case": document["case"],
        "unit": document["unit"],
        "dtype": settings["dtype"],
        "threads": str(settings["threads"]),
        "backend": document["backend"],
        "clock": document["clock"],
        "machine": f"{machine['machine']}, {machine['cores']} cores",
        "features": " ".join(machine["features"]),
        "versions": " ".join(f"{k}={v}" for k, v in machine["versions"].items()),
        "command": document["command"],
    }
    found = []
    for side in document["sides"]:
        own = {
            **shared,
            "side": side["name"],
            **{f"{key}_s": _number(side["seconds"][key]) for key in ("median", "p25", "p75")},
            "rounds": str(side["seconds"]["rounds"]),
            **{key: _number(side[key]) for key in ("gb_per_s", "of_reading", "gflop_per_s", "of_product")},
            "notes": "; ".join(side["notes"]),
        }
        for reference, ratio in side["ratios"].items() or [("", None)]:
            line = {**own, "reference": reference}
            for column, key in (("ratio", "median"), ("ratio_p25", "p25"), ("ratio_p75", "p75")):
                line[column] = "" if ratio is None else _number(ratio[key])
            found.append(line)
    return found


def append(path: Path, lines: Sequence[Mapping[str, str]]) -> None:
    """Add lines to the file, with a header where it is new or empty, in one write.

    Raises InputError for a file with other columns, MoloraError where it cannot be written.
    """
    try:
        with path.open("r", encoding="utf-8", newline="") as handle:
            header = handle.readline().strip()
    except FileNotFoundError:
        header = ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read as a CSV file ({error})", "name another: --append FILE.csv"
        ) from error
    if header and header != ",".join(COLUMNS):
        raise InputError(
            f"{path} has other columns ({shorten(header, 60)})", "name another file: --append FILE.csv"
        )
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    if not header:
        writer.writeheader()
    writer.writerows(lines)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", newline="") as handle:
            handle.write(text.getvalue())
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise MoloraError(
            f"{path} cannot be written ({error.strerror})", "--append FILE.csv, or --append none"
        ) from error


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
