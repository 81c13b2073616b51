"""Names of bases and adapters: a local path, `org/name@revision` on a hub, or a built-in alias."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from molora_cli.errors import InputError

_HUB = re.compile(r"[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*(@[\w.\-/]+)?\Z")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_\-]{0,63}\Z")
_RESERVED = frozenset({"base", "__base__", "auto", "off", "on", "all", "none", "default"})
BUILTIN_BASES = ("smollm2",)


@dataclass(frozen=True)
class Ref:
    """Where a base or an adapter comes from. kind: "local" (path), "hub" (repo, revision) or "builtin"."""

    kind: str
    text: str
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.text


def parse_ref(text: str) -> Ref:
    """An existing path wins; `./x`, `/x` and `~x` are always local; `org/name[@rev]` is a hub id.

    Raises InputError for a text that is none of these.
    """
    if not text:
        raise InputError("an empty name was given where a path or a hub id is needed")
    looks_local = text.startswith((".", "/", "~")) or (os.sep == "\\" and ":" in text)
    path = Path(text).expanduser()
    if text in BUILTIN_BASES and not path.exists():
        return Ref("builtin", text)
    if looks_local or os.path.lexists(path):
        return Ref("local", text, path=path)
    if _HUB.match(text):
        repo, _, revision = text.partition("@")
        return Ref("hub", text, repo=repo, revision=revision or None)
    raise InputError(
        f"'{text}' is neither an existing path nor a hub id of the form org/name[@revision]",
        "check the path; a local folder in doubt is written ./name",
    )


def check_adapter_name(name: str) -> str:
    """A name that is safe as a folder, in a flag and in a legend. Raises InputError."""
    if not _NAME.match(name):
        raise InputError(
            f"'{name}' cannot name an adapter: letters, digits, '_' and '-', first a letter or digit",
            "name it yourself: NAME=PATH, say math=./adapters/my.adapter",
        )
    if name.lower() in _RESERVED:
        raise InputError(
            f"'{name}' is a reserved word and cannot name an adapter", f"use another name: my-{name}=PATH"
        )
    return name


def parse_named(text: str) -> tuple[str, str]:
    """`NAME=VALUE` into its halves; without '=' the last path component is the name. Raises InputError."""
    name, sep, value = text.partition("=")
    if not sep or os.path.lexists(text):
        name, value = Path(text.partition("@")[0].rstrip("/")).name, text
    if not value:
        raise InputError(f"'{text}' has nothing after '='", "write NAME=PATH")
    return check_adapter_name(name), value


def cache_dir() -> Path:
    """Where converted bases and compiled kernels are kept: $MOLORA_CACHE or the user's cache folder."""
    return Path(os.environ.get("MOLORA_CACHE") or platformdirs.user_cache_dir("molora")).expanduser()


def state_dir() -> Path:
    """Where the default bundle's path and the chat history are kept: $MOLORA_HOME or the user's folder."""
    return Path(os.environ.get("MOLORA_HOME") or platformdirs.user_data_dir("molora")).expanduser()


def offline() -> bool:
    """True where the user said that no network may be used."""
    yes = {"1", "ON", "YES", "TRUE"}
    return any(
        os.environ.get(k, "").upper() in yes
        for k in ("HF_HUB_OFFLINE", "MOLORA_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
