"""Compiled steps on disk: their names, and the process that makes one.

A package is one file, there as a whole or not at all. Where a build failed, a file with the reason lies in
its place, so that it is not tried again with the same versions: never where the model was the reason, for a
day where it was the machine. Builders that are killed leave a count of how often one was begun.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from molora_kernels import builders, cpu_build
from molora_kernels.builders import trusted as trusted  # the check of a package before it is loaded

_HERE, _KERNELS = Path(__file__).parent, Path(cpu_build.__file__).parent
# a change in these makes other packages
SOURCES = (
    *(_HERE / name for name in ("step.py", "build.py")),
    *(_HERE.parent / "routed" / name for name in ("attach.py", "int8.py", "live.py", "modules.py")),
    _KERNELS / "cpu_ops.py",
)
DAY = 86400.0  # seconds
TRIES = 4  # builds begun within a day of which nothing was heard


class PackageError(Exception):
    """A package cannot be made or used; the message says why in one line."""


class PassingError(PackageError):
    """The same, for a reason that may be gone tomorrow: memory, disk, the compiler."""


def folder() -> Path:
    """Where packages are kept: steps/ in $MOLORA_CACHE or the user's cache folder."""
    return builders.cache_root() / "steps"


def package_path(document: Mapping[str, Any]) -> Path:
    """Where the package for a shape (`step.Shape.document`) is, or would be: its name covers the shape, this
    processor, torch, transformers and the code that makes it."""
    from transformers import __version__

    digest = hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode())
    # this name covers processor, torch and the operators
    library = cpu_build.library_path(cpu_build.native_flags()).name
    for part in (library, __version__, os.environ.get("CXX", "")):
        digest.update(part.encode() + b"\0")
    for source in SOURCES:
        digest.update(source.read_bytes() + b"\0")
    return folder() / f"step-{digest.hexdigest()[:16]}.pt2"


def damaged(path: Path) -> bool:
    """Whether the file is no whole package, so that it is of no use to anyone; False where it cannot be read
    now."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return True
            names = archive.namelist()
            about = [json.loads(archive.read(n)) for n in names if n.endswith("wrapper_metadata.json")]
            return not any(n.endswith(".so") for n in names) or not any("molora" in each for each in about)
    except OSError:
        return False
    except Exception:  # what zipfile and its decompressors say of bytes that are none of theirs
        return True


def failure(path: Path) -> str | None:
    """Why the package could not be made, None where nothing is known of that or it may be tried again."""
    try:
        lines = path.with_suffix(".failed").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    if lines and lines[0].strip() and (len(lines) == 1 or time.time() < _until(lines[1])):
        return lines[0].strip()
    if tries(path) >= TRIES and not is_building(path):
        return f"{TRIES} builds were stopped before they were through"
    return None


def write_failure(path: Path, error: PackageError) -> None:
    """Leave the reason where `failure` finds it: for a day where it may pass. Raises OSError."""
    reason = " ".join(str(error).split()) or type(error).__name__
    lines = [reason, f"until {time.time() + DAY:.0f}"] if isinstance(error, PassingError) else [reason]
    _write(path.with_suffix(".failed"), "\n".join(lines) + "\n")


def _until(line: str) -> float:
    try:
        return float(line.removeprefix("until "))
    except ValueError:
        return 0.0


def tries(path: Path) -> int:
    """How many builds were begun, a day or less apart, that have left neither a package nor a reason."""
    place = path.with_suffix(".tries")
    try:
        return int(place.read_text(encoding="utf-8")) if time.time() - place.stat().st_mtime < DAY else 0
    except (OSError, ValueError):
        return 0


def _write(place: Path, text: str) -> None:
    temporary = place.with_name(f"{place.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(place)


def is_building(path: Path) -> bool:
    """Whether a process makes this package."""
    return builders.is_held(path)


def start(document: Mapping[str, Any], path: Path) -> subprocess.Popen[bytes] | None:
    """Begin the build in a process of its own with low priority, which outlives this one; None where another
    is at it, or was a moment ago.

    Raises PackageError where there is no compiler, the folder cannot be written or is open to others, or no
    process can be begun.
    """
    try:
        cpu_build.find_compiler()
        reason = builders.refused(path.parent)
        if reason is not None:
            raise PackageError(reason)
        lock = builders.take(path)
    except cpu_build.BuildError as error:
        raise PackageError(f"{error}; {error.remedy}") from error
    except OSError as error:
        raise PackageError(f"{path.parent} cannot be written ({error.strerror})") from error
    if lock is None:
        return None
    if path.is_file():  # another was faster
        builders.release(path, lock)
        return None
    builders.sweep(path.parent, path)
    order = path.with_suffix(".json")
    try:
        _write(order, json.dumps(document, default=str))
        _write(path.with_suffix(".tries"), str(tries(path) + 1))
    except OSError as error:
        builders.release(path, lock)
        raise PackageError(f"{path.parent} cannot be written ({error.strerror})") from error
    try:
        arguments = [str(order.absolute()), str(path.absolute())]
        return builders.begin("molora_cli.core.runtime.build", arguments, path, lock)
    except OSError as error:
        heard(path)
        raise PackageError(f"no process can be begun ({error.strerror})") from error


def heard(path: Path) -> None:
    """The build has come to an end and said which: remove what it was begun with."""
    path.with_suffix(".tries").unlink(missing_ok=True)
    path.with_suffix(".json").unlink(missing_ok=True)


def make_now(document: Mapping[str, Any], path: Path) -> None:
    """The same, and wait until the build is through, whoever does it."""
    begun = start(document, path)
    while begun.poll() is None if begun is not None else is_building(path):
        time.sleep(0.2)
