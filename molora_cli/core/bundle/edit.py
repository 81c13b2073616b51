"""Add an adapter to a bundle, or take one out: what stays keeps every bit, and the change appears whole.

The new bundle is built beside the old one out of hard links, and takes its place by renaming.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.resolve import ResolvedBase
from molora_cli.core.base.structure import BaseModules, read_structure
from molora_cli.core.bundle.card import CARD_FILE, write_card
from molora_cli.core.bundle.grow import Router, grown_router, takes_columns
from molora_cli.core.bundle.manifest import MANIFEST_FILE, Manifest, RoutingEntry
from molora_cli.core.bundle.store import Bundle, dump_manifest, sha256_file
from molora_cli.core.bundle.writing import MARKER, new_folder, tidy, write_text
from molora_cli.core.router.spec import ROUTER_FILE
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import parse_ref
from molora_cli.text import shorten


@dataclass(frozen=True)
class AddRequest:
    """adapters: (name, path or hub id). data: `--data` values, rows of the new adapters. saved_rank: see
    `read_adapter`."""

    bundle: Path
    adapters: tuple[tuple[str, str], ...]
    data: tuple[str, ...] = ()
    base: str | None = None
    allow_noop: bool = False
    saved_rank: int | None = None
    trust_remote_code: bool = False
    seed: int = 0
    dry_run: bool = False


@dataclass
class Edited:
    """bundle: as it is now (as it was, in a dry run). report: for --json and the terminal."""

    bundle: Bundle
    report: dict[str, Any]
    notes: list[str] = field(default_factory=list)


# -- add ------------------------------------------------------------------------
def add(request: AddRequest, *, ticker: Ticker = no_ticks) -> Edited:
    """The bundle with more adapters, each checked and measured as `compose` does.

    A `centroid` or `context` router gets a column for an adapter with rows; otherwise the router stays, byte
    for byte, and the adapter is reachable by name. Raises InputError or MoloraError; the bundle is as it was
    then.
    """
    from molora_cli.core import compose

    with _only_writer(request.bundle) as place:
        bundle = Bundle.open(place, request.base)
        bundle.verify()
        _check_names(bundle, request.adapters)
        before = _state(place)
        path = bundle.find_base(ticker=ticker)
        modules = read_structure(path)
        new = tuple(
            read_adapter(
                name,
                parse_ref(text),
                modules,
                allow_noop=request.allow_noop,
                saved_rank=request.saved_rank,
            )
            for name, text in request.adapters
        )
        notes = [*bundle.warnings, *(f"{a.name}: {note}" for a in new for note in a.notes)]
        domains = _rows(request)
        report = _report(bundle, new)
        if request.dry_run:
            return Edited(bundle, {**report, "written": False}, notes)
        work = _as_plan(request, bundle, path, modules, new)
        effects, remarks = compose.measure_effect(work, ticker)
        router = grown_router(bundle, domains, request.seed, notes, report) if domains else None
        _tell_reach(bundle, new, router is not None, domains, notes)
        with new_folder(place, force=True, own_file=MANIFEST_FILE) as folder:
            skipped = {MANIFEST_FILE, CARD_FILE, *([ROUTER_FILE] if router else [])}
            _link_tree(place, folder, skipped)
            entries = list(bundle.manifest.adapters)
            for adapter in new:
                home = folder / "adapters" / adapter.name
                write_peft(adapter, home)
                made = compose.adapter_entry(
                    adapter, home, modules, effects[adapter.name], remarks.get(adapter.name)
                )
                entries.append(made)
            manifest = bundle.manifest.model_copy(update={"adapters": entries})
            _finish(folder, manifest, router, place)
            _unchanged(place, before)
        return Edited(Bundle.open(place, request.base), {**report, "written": True}, notes)


def _check_names(bundle: Bundle, adapters: Sequence[tuple[str, str]]) -> None:
    taken = {name.lower(): name for name in bundle.adapters}
    for name, text in adapters:
        if name.lower() in taken:
            raise InputError(
                f"{bundle.path} has an adapter '{taken[name.lower()]}' already",
                f"use another name: my-{name}={shorten(text)}, or molora remove {bundle.path} {name} first",
            )


def _as_plan(
    request: AddRequest, bundle: Bundle, path: Path, modules: BaseModules, new: tuple[Adapter, ...]
) -> Any:
    from molora_cli.core import compose

    base = bundle.manifest.base
    asked = compose.Request(
        bundle.path,
        request.adapters,
        allow_noop=request.allow_noop,
        trust_remote_code=request.trust_remote_code,
    )
    return compose.Plan(asked, ResolvedBase(path, base.id, base.revision), modules, new, (), ())


def _report(bundle: Bundle, new: Sequence[Adapter]) -> dict[str, Any]:
    return {
        "bundle": str(bundle.path),
        "kept": list(bundle.adapters),
        "added": [
            {"name": a.name, "source": a.source, "ranks": a.ranks, "modules": len(a.modules)} for a in new
        ],
    }


def _rows(request: AddRequest) -> dict[str, list[Any]]:
    if not request.data:
        return {}
    from molora_cli.core.training.data import read_domains

    return read_domains(request.data, known=[name for name, _ in request.adapters])


def _way_in(bundle: Bundle, name: str) -> str:
    """How an adapter that the router does not know gets its tokens."""
    place, spec = takes_columns(bundle.router_spec), bundle.router_spec
    if spec is None or place is None:
        return f"molora train-router {bundle.path} --data NAME=FILE ... --force trains it anew"
    if spec.stages[place].kind == "context":
        return f"molora train-router {bundle.path} --only {name} --data {name}=FILE adds it"
    return f"add it with --data {name}=FILE"


def _tell_reach(
    bundle: Bundle, new: Sequence[Adapter], grown: bool, domains: Mapping[str, Any], notes: list[str]
) -> None:
    routing = bundle.manifest.routing
    for adapter in new:
        if routing is None:
            notes.append(f"{adapter.name}: no router yet; molora train-router {bundle.path} makes one")
        elif not (grown and adapter.name in domains):
            notes.append(
                f"{adapter.name}: reachable by name only, the {shorten(routing.kind, 40)} router gives it no "
                f"token; {_way_in(bundle, adapter.name)}"
            )


# -- remove ---------------------------------------------------------------------
def remove(path: Path, name: str, *, force: bool = False, dry_run: bool = False) -> Edited:
    """The bundle without an adapter. Needs no base.

    force: tokens that a rule gave to it take the base. Raises InputError where it is the only adapter, or
    the router cannot do without it; the bundle is as it was then.
    """
    with _only_writer(path) as place:
        bundle = Bundle.open(place)
        bundle.entry(name)
        if len(bundle.adapters) == 1:
            raise InputError(
                f"'{name}' is the only adapter of {bundle.path}",
                "compose another bundle, or delete the folder",
            )
        before = _state(place)
        router, notes = _shrunk_router(bundle, name, force)
        kept = [e for e in bundle.manifest.adapters if e.name != name]
        report = {"bundle": str(bundle.path), "removed": name, "kept": [e.name for e in kept]}
        if dry_run:
            return Edited(bundle, {**report, "written": False}, notes)
        with new_folder(place, force=True, own_file=MANIFEST_FILE) as folder:
            skipped = {MANIFEST_FILE, CARD_FILE, f"adapters/{name}", *([ROUTER_FILE] if router else [])}
            _link_tree(place, folder, skipped)
            manifest = bundle.manifest.model_copy(update={"adapters": kept})
            _finish(folder, manifest, router, place)
            _unchanged(place, before)
        return Edited(Bundle.open(place), {**report, "written": True}, notes)


def _shrunk_router(bundle: Bundle, name: str, force: bool) -> tuple[Router | None, list[str]]:
    spec, file = bundle.router_spec, bundle.router_file
    if spec is None or file is None or not any(name in s.experts for s in spec.stages):
        return None, []
    from molora_cli.core.router.columns import drop_expert
    from molora_cli.core.router.files import load_tensors

    smaller, tensors, notes = drop_expert(spec, load_tensors(file), name, force=force)
    return (smaller, tensors), notes


# -- the folder -----------------------------------------------------------------
@contextlib.contextmanager
def _only_writer(path: Path) -> Iterator[Path]:
    """The bundle's real folder, held against other `add` and `remove` as long as the block runs.

    What a killed writer left is cleared first: a bundle it had moved aside returns.
    """
    place = path.expanduser().resolve()
    if place.parent.is_dir() and os.access(place.parent, os.W_OK):
        tidy(place)
    if not place.is_dir():
        yield place  # Bundle.open says what is wrong
        return
    if not os.access(place.parent, os.W_OK):
        raise InputError(
            f"{place} cannot be changed: {place.parent} is not writable", "copy the bundle elsewhere first"
        )
    descriptor = os.open(place, os.O_RDONLY)
    try:
        _lock(descriptor, place)
        yield place
    finally:
        os.close(descriptor)


def _lock(descriptor: int, place: Path) -> None:
    busy = InputError(
        f"{place} is being changed by another molora", "run it again when that one has finished"
    )
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise busy from error
    except (ImportError, OSError):
        return  # a file system without locks: `_unchanged` still looks before the swap
    if not place.exists() or os.fstat(descriptor).st_ino != place.stat().st_ino:
        raise busy  # swapped between opening and locking


def _state(place: Path) -> str:
    return sha256_file(place / MANIFEST_FILE)


def _unchanged(place: Path, before: str) -> None:
    """Raises InputError where the bundle was changed while the new one was built."""
    if not (place / MANIFEST_FILE).is_file() or _state(place) != before:
        raise InputError(f"{place} was changed by someone else meanwhile", "run it again")


def _link_tree(source: Path, target: Path, skipped: set[str], below: str = "") -> None:
    """Every file of `source` in `target`: hard links where the disk can, links copied as links."""
    for entry in sorted(os.scandir(source), key=lambda e: e.name):
        relative = f"{below}{entry.name}"
        if relative in skipped or relative == MARKER:
            continue
        there = target / entry.name
        if entry.is_symlink():
            there.symlink_to(Path(entry.path).readlink())
        elif entry.is_dir():
            there.mkdir()
            _link_tree(Path(entry.path), there, skipped, f"{relative}/")
        else:
            try:
                os.link(entry.path, there)
            except OSError:
                shutil.copy2(entry.path, there)


def _finish(folder: Path, manifest: Manifest, router: Router | None, place: Path) -> None:
    if router is not None:
        from molora_cli.core.router.files import save

        spec, tensors = router
        save(folder / ROUTER_FILE, spec, tensors)
        entry = RoutingEntry(file=ROUTER_FILE, kind=spec.kind, sha256=sha256_file(folder / ROUTER_FILE))
        manifest = manifest.model_copy(update={"routing": entry})
    write_text(folder / MANIFEST_FILE, dump_manifest(manifest))
    write_card(folder, manifest, place.name)
