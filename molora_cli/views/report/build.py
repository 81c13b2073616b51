"""The page itself: template, style and scripts of this folder, with the data of one or two traces.

Everything that comes from outside (token text, names, paths) is data: it stands in a JSON block that no
markup can end, and the script shows it through `textContent` alone. A policy in the page's head allows the
one style and the one script by their hashes and nothing else, so that even a mistake here could load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

from molora_cli._version import __version__
from molora_cli.core.agreement import agreement
from molora_cli.core.bundle.writing import new_file
from molora_cli.errors import InputError
from molora_cli.text import printable, shorten
from molora_cli.views.palette import HUES, LEVELS, ink, tint
from molora_cli.views.report.payload import Side, side_payload

SCRIPTS = ("data.js", "charts.js", "detail.js", "text.js", "page.js")
_DARK = (0x22, 0x24, 0x28)


def check_report(path: Path, *, force: bool) -> None:
    """Refuse a name or place where no page can or may be written, before any work. Raises InputError."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{shorten(str(path))}: a report is an HTML page", "give --report FILE.html")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(
            f"{shorten(str(path))} cannot be written there", "name a file in a folder that exists"
        )
    if path.exists() and not force:
        raise InputError(f"{shorten(str(path))} exists", "give --force to replace it, or another name")


def write_report(path: Path, side: Side, other: Side | None = None, *, force: bool = False) -> int:
    """Write the page of one trace, or of two side by side, atomically; returns its bytes.

    Raises InputError as `check_report` does.
    """
    check_report(path, force=force)
    payload = page(side, other).encode("utf-8")
    with new_file(path) as work:
        work.write_bytes(payload)
    return len(payload)


def page(side: Side, other: Side | None = None) -> str:
    """The page as text; the same traces always give the same."""
    sides = [side] if other is None else [side, other]
    if other is not None and side.name == other.name:
        sides = [replace(side, name=f"{side.name} (first)"), replace(other, name=f"{other.name} (second)")]
    data = {
        "version": __version__,
        "sides": [side_payload(s) for s in sides],
        "compare": None if other is None else _compared(side, other),
    }
    style = _file("page.css") + _tints()
    script = "(() => {\n'use strict';\n" + "\n".join(_file(name) for name in SCRIPTS) + "})();\n"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {"policy": policy, "style": style, "data": _json(data), "script": script}
    # one pass, so that data which looks like a place to fill in stays data
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


def _json(data: Any) -> str:
    """JSON that cannot end or open an element, nor hold a character that a page shows raw."""
    text = json.dumps(_safe(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def _safe(value: Any) -> Any:
    """Every text within, keys too, with control, bidirectional and unpaired characters escaped."""
    if isinstance(value, str):
        return printable(value, keep="\n\t")
    if isinstance(value, dict):
        return {printable(str(key)): _safe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_safe(inner) for inner in value]
    return value


def _tints() -> str:
    """`.hX.sY`: hue X of the palette at step Y of the gate on light and on dark paper, with a legible ink."""
    rules = []
    for number, hue in enumerate(HUES):
        for step in range(LEVELS + 1):
            light, dark = tint(hue, step / LEVELS), tint(hue, step / LEVELS, _DARK)
            rules.append(
                f".h{number}.s{step}{{background-color:light-dark({light},{dark});"
                f"color:light-dark({ink(light)},{ink(dark)});--hue:light-dark({hue},{hue})}}"
            )
    return "\n" + "\n".join(rules) + "\n"


def _compared(side: Side, other: Side) -> dict[str, Any]:
    found = agreement(side.trace, other.trace, template=side.stats.template_counted)
    return {"same_text": False} if found is None else {"same_text": True, **asdict(found)}
