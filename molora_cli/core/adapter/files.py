"""Files from strangers: opened where regular, read up to a bound, told apart by their first bytes."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from molora_cli.errors import InputError
from molora_cli.text import printable, shorten

MAX_CONFIG = 8 << 20  # bytes; real configs hold a few kB, target lists of huge models some hundred


def shown(path: Path) -> str:
    """A path as it may appear in a message."""
    return printable(str(path))


def check_regular(path: Path) -> int:
    """The size in bytes of a regular file. A FIFO or device is never opened: reading one may hang.

    Raises InputError where the path is missing, a folder, a broken or looping link, special, or unreadable.
    """
    try:
        info = path.stat()
    except FileNotFoundError as error:
        if path.is_symlink():
            raise InputError(
                f"{shown(path)} is a broken link (to {shorten(str(path.readlink()))})",
                "copy the file itself here",
            ) from error
        raise InputError(f"{shown(path)} does not exist", "check the path") from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(
                f"{shown(path)} is a link that leads back to itself", "copy the file itself here"
            ) from error
        raise InputError(f"{shown(path)} cannot be read: {error.strerror}", "check the path") from error
    except ValueError as error:  # an embedded NUL
        raise InputError(f"'{shorten(str(path))}' is no path: {error}", "check the path") from error
    if stat.S_ISDIR(info.st_mode):
        raise InputError(f"{shown(path)} is a directory where a file is needed", "download the file again")
    if not stat.S_ISREG(info.st_mode):
        raise InputError(f"{shown(path)} is not a regular file", "give an ordinary file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{shown(path)} cannot be read: permission denied", f"chmod u+r {shown(path)}")
    if info.st_size == 0:
        raise InputError(f"{shown(path)} is empty (0 bytes)", "download or save it again")
    return info.st_size


def read_start(path: Path, count: int = 1024) -> bytes:
    """The first bytes of a regular file. Raises InputError as `check_regular` does."""
    check_regular(path)
    try:
        with path.open("rb") as handle:
            return handle.read(count)
    except OSError as error:
        raise InputError(
            f"{shown(path)} cannot be read: {error.strerror}", "check the disk and the permissions"
        ) from error


_LFS_SIZE = re.compile(rb"^size (\d{1,18})\s*$", re.MULTILINE)


def refuse_impostors(path: Path, start: bytes) -> None:
    """Say what a file really is where its first bytes are those of a pointer, a page or another format.

    Raises InputError for a Git LFS pointer, a git-annex pointer, a web page, a gzip archive.
    """
    head = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"version https://git-lfs"):
        match = _LFS_SIZE.search(start)
        size = f", the real file has {int(match.group(1))} bytes" if match else ""
        raise InputError(
            f"{shown(path)} is a Git LFS pointer, not the file itself{size}",
            f"git -C {shown(path.parent)} lfs pull, or download the file",
        )
    if b"/annex/objects/" in start[:300] and len(start) < 1024:
        raise InputError(
            f"{shown(path)} is a git-annex pointer, not the file itself", "git annex get the file"
        )
    if head[:1] == b"<":
        raise InputError(
            f"{shown(path)} is a web page, not the file it is named as (gated model? not logged in?)",
            "log in (hf auth login), accept the licence, and download it again",
        )
    if start.startswith(b"\x1f\x8b"):
        raise InputError(f"{shown(path)} is a gzip archive", "unpack it first")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise ValueError(f"'{shorten(key)}' is given twice with different values")
        found[key] = value
    return found


def parse_json(raw: bytes, path: Path, what: str) -> dict[str, Any]:
    """A JSON object from bytes; `what` names it in messages ("adapter_config.json").

    A UTF-8 byte order mark is accepted. Raises InputError with the byte, or line and column, at fault.
    """
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or (len(raw) > 3 and raw[1:2] == b"\0"):
        raise InputError(f"{shown(path)} is UTF-16 text", "save it as UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown(path)} is not valid UTF-8 at byte {error.start} (0x{raw[error.start]:02x})",
            "save it as UTF-8",
        ) from error
    if not text.strip():
        raise InputError(f"{shown(path)} is empty", "download or save it again")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{shown(path)} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            f"repair {what}, or download it again",
        ) from error
    except RecursionError as error:
        raise InputError(
            f"{shown(path)} is nested too deeply for {what}", "this file is damaged or hostile"
        ) from error
    except ValueError as error:  # duplicates, integers of thousands of digits
        raise InputError(f"{shown(path)}: {shorten(str(error), 120)}", f"repair {what}") from error
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a bare value")
        raise InputError(f"{shown(path)} must hold a JSON object, it holds {kind}", f"repair {what}")
    return value


def read_json(path: Path, what: str = "adapter_config.json") -> dict[str, Any]:
    """A JSON object from a file of at most 8 MiB. Raises InputError."""
    size = check_regular(path)
    if size > MAX_CONFIG:
        raise InputError(
            f"{shown(path)} has {size >> 20} MiB, more than the {MAX_CONFIG >> 20} MiB that {what} may have",
            "this is another file, or it is damaged",
        )
    raw = path.read_bytes()
    refuse_impostors(path, raw[:1024])
    return parse_json(raw, path, what)


def listing(folder: Path, limit: int = 6) -> str:
    """What a folder holds, for messages."""
    try:
        names = sorted(entry.name + ("/" if entry.is_dir() else "") for entry in os.scandir(folder))
    except OSError:
        return "nothing readable"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(shorten(n, 60) for n in names[:limit]) or "nothing") + more
