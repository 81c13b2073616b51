"""What building beside a process takes: folders that nobody else writes to, locks, processes of their own.

Whoever builds a file holds its lock, `.NAME.lock` beside it, until it ends, however it ends: a builder hands
the descriptor on, and the system lets go of it with the last process that has it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import platformdirs

try:
    import fcntl
except ImportError:  # no locks that outlive a process here: the age of the file has to do
    fcntl = None  # type: ignore[assignment]

LONGEST = 3600.0  # seconds; without fcntl a lock file that is older was left by a builder that was killed
_OTHERS = 0o022  # the mode bits that let group and others write


def cache_root() -> Path:
    """$MOLORA_CACHE or the user's cache folder, absolute."""
    root = os.environ.get("MOLORA_CACHE") or platformdirs.user_cache_dir("molora")
    return Path(root).expanduser().absolute()


def make_private(folder: Path) -> None:
    """Create a folder for code, or close one that is this user's own to others. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "geteuid"):
        status = folder.stat()
        if status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
            folder.chmod(status.st_mode & 0o7777 & ~_OTHERS)


def publish(made: Path, path: Path) -> None:
    """Put a file that is whole in its place, where only this user may write to it. Raises OSError."""
    made.chmod(made.stat().st_mode & 0o7777 & ~_OTHERS)
    made.replace(path)


def trusted(path: Path) -> str | None:
    """Why code out of the file `path` must not run, None where only this user or root can have written it.

    A folder of this user's that others may write to (an earlier version made it, with a wide umask) is closed
    to them; a file of this user's that others may write to is removed, since nobody knows what is in it: it
    is made again. On systems without owners and modes everything is trusted.
    """
    if not hasattr(os, "geteuid"):
        return None
    user = os.geteuid()
    try:
        make_private(path.parent)
        real = path.resolve(strict=True)
        for place in dict.fromkeys((path.parent, real.parent, real)):
            status = place.stat()
            if status.st_uid not in (0, user):
                return f"{place} belongs to another user"
            if not status.st_mode & _OTHERS:
                continue
            if place != real or status.st_uid != user:
                return f"others may write to {place}"
            path.unlink()
            return f"others could write to {place}; it is removed"
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return None


def refused(folder: Path) -> str | None:
    """Make a folder to build in; why nothing must be built there, or None. Raises OSError."""
    make_private(folder)
    if not hasattr(os, "geteuid"):
        return None
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{folder} belongs to another user"
    return f"others may write to {folder}" if status.st_mode & _OTHERS else None


def lock_path(path: Path) -> Path:
    """The lock file for the building of `path`."""
    return path.parent / f".{path.stem}.lock"


def take(path: Path) -> int | None:
    """Begin to hold the lock of `path`: the descriptor for `begin` or `release`, or None where another holds
    it. Raises OSError."""
    place = lock_path(path)
    if fcntl is None:
        return _take_by_age(place)
    for _ in range(3):  # `is_held` takes a lock for a moment, and a file may be removed before it is locked
        descriptor = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if place.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        time.sleep(0.01)
    return None


def _take_by_age(place: Path) -> int | None:
    if place.exists() and time.time() - place.stat().st_mtime > LONGEST:
        place.unlink(missing_ok=True)
    try:
        return os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return None


def release(path: Path, descriptor: int) -> None:
    """Hold the lock of `path` no more."""
    if fcntl is None:  # an open file cannot be removed there
        os.close(descriptor)
        lock_path(path).unlink(missing_ok=True)
        return
    lock_path(path).unlink(missing_ok=True)  # first, so that nobody else's file is removed
    os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether `path` is being built."""
    try:
        if fcntl is None:
            return time.time() - lock_path(path).stat().st_mtime <= LONGEST
        descriptor = os.open(lock_path(path), os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def sweep(folder: Path, but: Path) -> None:
    """Remove what killed builders left in `folder`: working folders `.NAME-*` whose lock nobody holds. but:
    the file whose lock the caller holds."""
    for place in folder.glob(".*-*"):
        owner = folder / place.name[1:].rpartition("-")[0]
        if not place.is_dir() or (owner.name != but.stem and is_held(owner)):
            continue
        shutil.rmtree(place, ignore_errors=True)


def begin(module: str, arguments: Sequence[str], path: Path, descriptor: int) -> subprocess.Popen[bytes]:
    """Run `python -m module` with low priority in a process that outlives this one and holds the lock of
    `path`, which this process then holds no more. The process removes the lock file when it is done.

    Raises OSError where no process can be begun.
    """
    low = ["nice", "-n", "10"] if shutil.which("nice") else []
    try:
        return subprocess.Popen(
            [*low, sys.executable, "-m", module, *arguments],
            # -m would look for modules in the folder the user stands in, whoever filled it. Python 3.10 knows
            # no safe path: there it is the cache folder that is looked into
            cwd=path.parent,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if fcntl is None else (descriptor,),
        )
    except OSError:
        lock_path(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _environment() -> dict[str, str]:
    """This process's own, which means the same in another folder."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "MOLORA_CACHE": str(cache_root())}
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    environment["PYTHONPATH"] = os.pathsep.join(str(Path(place).absolute()) for place in places)
    if os.environ.get("TMPDIR"):
        environment["TMPDIR"] = str(Path(os.environ["TMPDIR"]).absolute())
    compiler = shlex.split(os.environ.get("CXX", ""))
    if compiler and Path(compiler[0]).name != compiler[0]:
        environment["CXX"] = shlex.join([str(Path(compiler[0]).absolute()), *compiler[1:]])
    return environment
