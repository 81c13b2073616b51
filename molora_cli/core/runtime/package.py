"""Compiled steps on disk: their names, and the process that makes one.

A package is one file, there as a whole or not at all. Where a build failed, a file with the reason lies in
its place, so that it is not tried again with the same versions.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
from molora_kernels import cpu_build

SOURCES = ("step.py", "build.py")  # a change in these makes other packages


class PackageError(Exception):
    """A package cannot be made or used; the message says why in one line."""


def folder() -> Path:
    """Where packages are kept: steps/ in $MOLORA_CACHE or the user's cache folder."""
    root = os.environ.get("MOLORA_CACHE") or platformdirs.user_cache_dir("molora")
    return Path(root).expanduser() / "steps"


def package_path(document: Mapping[str, Any]) -> Path:
    """Where the package for a shape (`step.Shape.document`) is, or would be: its name covers the shape, this
    processor, torch, transformers and the code that makes it."""
    from transformers import __version__

    digest = hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode())
    # this name covers processor, torch and the operators
    library = cpu_build.library_path(cpu_build.native_flags()).name
    for part in (library, __version__, os.environ.get("CXX", "")):
        digest.update(part.encode() + b"\0")
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes() + b"\0")
    return folder() / f"step-{digest.hexdigest()[:16]}.pt2"


def failure(path: Path) -> str | None:
    """Why the package could not be made, None where nothing is known of that."""
    try:
        return path.with_suffix(".failed").read_text(encoding="utf-8").strip() or "unknown"
    except OSError:
        return None


def is_building(path: Path) -> bool:
    """Whether a process that is alive makes this package."""
    for place in path.parent.glob(f".{path.stem}-*"):
        try:
            os.kill(int(place.name.rpartition("-")[2]), 0)
        except (ValueError, OSError):
            continue
        return True
    return False


def start(document: Mapping[str, Any], path: Path) -> subprocess.Popen[bytes] | None:
    """Begin the build in a process of its own with low priority, which outlives this one; None where another
    is at it.

    Raises PackageError where there is no compiler or the folder cannot be written.
    """
    try:
        cpu_build.find_compiler()
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_building(path):
            return None
        order = path.with_suffix(".json")
        temporary = order.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(document, default=str), encoding="utf-8")
        temporary.replace(order)
    except cpu_build.BuildError as error:
        raise PackageError(str(error)) from error
    except OSError as error:
        raise PackageError(f"{path.parent} cannot be written ({error.strerror})") from error
    low = ["nice", "-n", "10"] if shutil.which("nice") else []
    return subprocess.Popen(
        [*low, sys.executable, "-m", "molora_cli.core.runtime.build", str(order), str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def make_now(document: Mapping[str, Any], path: Path) -> None:
    """The same, and wait until the build is through, whoever does it."""
    begun = start(document, path)
    while begun.poll() is None if begun is not None else is_building(path):
        time.sleep(0.2)
