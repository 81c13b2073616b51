"""A bundle on disk: opened, checked, asked for its parts, given a router. Knows no tensor and needs no
torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from molora_cli.core.bundle.manifest import BUNDLE_FORMAT, MANIFEST_FILE, AdapterEntry, Manifest, RoutingEntry
from molora_cli.core.bundle.writing import MARKER, new_file, write_text
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import check_adapter_name, state_dir
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.router.spec import RouterSpec

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_MANIFEST_LIMIT = 64 << 20


def sha256_file(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as handle:
        digest = hashlib.sha256()
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def dump_manifest(manifest: Manifest) -> str:
    """The manifest as the text of molora.json: indented for people, a row of numbers on one line."""
    document = manifest.model_dump(mode="json", exclude_none=True)
    text = json.dumps(document, indent=1, ensure_ascii=True, allow_nan=False)
    # a line break inside brackets is layout: within a JSON string it would be escaped
    return re.sub(r"\[\n[-+.\de,\s]+\]", lambda row: re.sub(r"\s+", " ", row.group()), text) + "\n"


def read_manifest(path: Path) -> Manifest:
    """molora.json of the bundle folder `path`. Raises InputError: missing, damaged, newer, or not a
    bundle."""
    file = path / MANIFEST_FILE
    if not path.exists():
        raise InputError(f"{path} does not exist", "molora compose -o BUNDLE ... makes a bundle")
    if (path / MARKER).exists():
        raise InputError(f"{path} is incomplete: its writer was stopped", "compose it again with --force")
    if not file.is_file():
        what = "is a file" if path.is_file() else f"has no {MANIFEST_FILE}"
        raise InputError(f"{path} is not a bundle: it {what}", "name the folder that molora compose wrote")
    if file.stat().st_size > _MANIFEST_LIMIT:
        raise InputError(f"{file} is too large for a manifest", "compose the bundle again")
    try:
        raw = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{file} cannot be read as JSON: {shorten(str(error))}", "compose the bundle again"
        ) from error
    if not isinstance(raw, dict) or raw.get("format") != "molora-bundle":
        raise InputError(f"{file} is not a molora manifest", "name the folder that molora compose wrote")
    version = str(raw.get("format_version", ""))
    major, own = version.partition(".")[0], BUNDLE_FORMAT.partition(".")[0]
    if major != own:
        raise InputError(
            f"{path} has bundle format {shorten(version, 20) or '(none)'}, this molora reads {own}.x",
            f"install the molora that wrote it: {shorten(str(raw.get('created_by') or 'a newer one'), 40)}",
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{file}: {shorten(where)}: {first['msg']}", "compose the bundle again") from error


def _inside(root: Path, relative: str) -> Path:
    """`relative` below `root`, following links. Raises InputError where it leaves the folder."""
    if "\0" in relative or Path(relative).is_absolute() or ".." in Path(relative).parts:
        raise InputError(
            f"{root / MANIFEST_FILE} names a path that leaves the bundle: {shorten(relative)}", _REFUSED
        )
    path = root / relative
    if not path.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{path} is a link that leaves the bundle", _REFUSED)
    return path


_REFUSED = "do not use this bundle unless you know who made it; compose it again from its adapters"


class Bundle:
    """An opened bundle. `path`: its folder; `manifest`: what molora.json says; `adapters`: names in order."""

    def __init__(self, path: Path, manifest: Manifest, base: str | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.warnings: list[str] = []
        self._base = base

    @classmethod
    def open(cls, path: str | os.PathLike[str], base: str | None = None) -> Bundle:
        """Open and check a bundle; `base` (a path, a .gguf file, a hub id) is used instead of the recorded
        one.

        Reads the manifest only. The base is looked up at the first use of `base_path`.
        Raises InputError: not a bundle, damaged, half-written, a newer format, paths that leave the
        folder, or adapters that are missing.
        """
        folder = Path(path).expanduser()
        bundle = cls(folder, read_manifest(folder), base)
        bundle._check_adapters()
        return bundle

    def _check_adapters(self) -> None:
        entries = self.manifest.adapters
        if not entries:
            raise InputError(f"{self.path} holds no adapter", "compose it again")
        seen: set[str] = set()
        for entry in entries:
            check_adapter_name(entry.name)
            if entry.name.lower() in seen:
                raise InputError(
                    f"{self.path / MANIFEST_FILE} names '{entry.name}' twice", "compose the bundle again"
                )
            seen.add(entry.name.lower())
            if Path(entry.folder).as_posix() != f"adapters/{entry.name}":
                raise InputError(
                    f"{self.path / MANIFEST_FILE}: adapter '{entry.name}' must be in adapters/{entry.name}, "
                    f"not {shorten(entry.folder)}",
                    _REFUSED,
                )
        missing = [e.name for e in entries if not self._whole(e)]
        if missing:
            root = self.path / "adapters"
            found = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
            raise InputError(
                f"{self.path} lacks adapter {', '.join(missing)}; "
                f"found: {shorten(', '.join(found) or 'none')}",
                "put the folder back, or compose the bundle again",
            )

    def _whole(self, entry: AdapterEntry) -> bool:
        files = [_inside(self.path, f"{entry.folder}/{name}") for name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG)]
        return all(file.is_file() for file in files)

    # -- adapters -----------------------------------------------------------
    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.manifest.adapters)

    def entry(self, name: str) -> AdapterEntry:
        """The manifest's entry of an adapter. Raises InputError that lists the names there are."""
        for entry in self.manifest.adapters:
            if entry.name == name:
                return entry
        raise InputError(
            f"{self.path} has no adapter '{shorten(name)}'; it has {', '.join(self.adapters)}",
            "use one of these names",
        )

    def folder(self, name: str) -> Path:
        """The PEFT folder of an adapter. Raises InputError."""
        return _inside(self.path, self.entry(name).folder)

    def verify(self) -> None:
        """Compare every file's digest with the manifest. Raises InputError naming the file that changed."""
        for entry in self.manifest.adapters:
            file = self.folder(entry.name) / ADAPTER_WEIGHTS
            if sha256_file(file) != entry.sha256:
                raise InputError(
                    f"{file} was changed after the bundle was made (its digest differs from the manifest)",
                    "copy the bundle again, or compose it again",
                )

    @cached_property
    def digest(self) -> str:
        """One digest of what the bundle computes: base, adapters in order, router."""
        parts: list[Any] = [self.manifest.base.fingerprint.model_dump(mode="json")]
        parts += [
            [e.name, e.sha256, {m: v.scale for m, v in e.modules.items()}] for e in self.manifest.adapters
        ]
        parts.append(self.manifest.routing.sha256 if self.manifest.routing else None)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    # -- base ---------------------------------------------------------------
    @cached_property
    def base_path(self) -> Path:
        """Local folder of the base, found and checked against the fingerprint at first use."""
        return self.find_base()

    def find_base(self, *, ticker: Ticker = no_ticks) -> Path:
        """As `base_path`, with progress; warnings are added to `warnings`. Raises InputError."""
        if "base_path" in self.__dict__:
            return self.base_path
        from molora_cli.core.base.lookup import find_base

        path, warnings = find_base(self.manifest.base, self._base, ticker=ticker)
        self.warnings += warnings
        self.__dict__["base_path"] = path
        return path

    # -- router -------------------------------------------------------------
    @property
    def router_file(self) -> Path | None:
        """The router's file; None where the bundle has no router yet. Raises InputError for a torn write."""
        routing = self.manifest.routing
        if routing is None:
            return None
        file = _inside(self.path, routing.file)
        again = (
            f"attach it again: molora attach-router {self.path} ... or molora train-router {self.path} ..."
        )
        if not file.is_file():
            raise InputError(f"{self.path} names the router {shorten(routing.file)}, which is missing", again)
        if sha256_file(file) != routing.sha256:
            raise InputError(
                f"{file} is not the router that the manifest names (a write was stopped?)", again
            )
        return file

    @cached_property
    def router_spec(self) -> RouterSpec | None:
        """The router's header, None without a router. Raises InputError."""
        file = self.router_file
        if file is None:
            return None
        from molora_cli.core.router.spec import check_experts, read_spec

        spec = read_spec(file)
        check_experts(spec, self.adapters, f"the router of {self.path}")
        return spec

    def set_router(self, spec: RouterSpec, tensors: Mapping[str, Any]) -> None:
        """Write the router: its file, the manifest's entry, the card, in this order.

        tensors: name -> array, named as `RouterSpec` says. A stop between the first two steps leaves a digest
        that disagrees, which `router_file` reports. Raises InputError or MoloraError.
        """
        from molora_cli.core.bundle.card import write_card
        from molora_cli.core.router.files import save
        from molora_cli.core.router.spec import ROUTER_FILE

        with new_file(self.path / ROUTER_FILE) as work:
            save(work, spec, tensors)
            digest = sha256_file(work)
        kind = "+".join(stage.kind for stage in spec.stages)
        self.manifest = self.manifest.model_copy(
            update={"routing": RoutingEntry(file=ROUTER_FILE, kind=kind, sha256=digest)}
        )
        write_text(self.path / MANIFEST_FILE, dump_manifest(self.manifest))
        write_card(self.path, self.manifest)
        for name in ("router_spec", "digest"):
            self.__dict__.pop(name, None)


# -- the bundle that commands take when none is named -------------------------
def _default_file() -> Path:
    return state_dir() / "default-bundle"


def default_bundle() -> Path:
    """The bundle that `molora chat` and `molora inspect` take when none is named. Raises InputError
    without one."""
    file = _default_file()
    hint = "name a bundle, or make one the default: molora compose ... --default"
    if not file.is_file():
        raise InputError("no bundle was named and there is no default one", hint)
    path = Path(file.read_text(encoding="utf-8").strip())
    if not path.is_dir():
        raise InputError(f"the default bundle {shorten(str(path), 200)} is gone", hint)
    return path


def set_default_bundle(path: Path) -> None:
    """Make `path` the default bundle. Raises MoloraError where the state folder cannot be written."""
    file = _default_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, f"{path.resolve()}\n")
    except OSError as error:
        raise MoloraError(
            f"the default bundle cannot be recorded in {file.parent}: {error.strerror}",
            "set MOLORA_HOME to another folder",
        ) from error
