"""Folders and files that appear whole or not at all.

A folder is built beside its place as `.NAME.tmp-PID-xxxx` with a marker file inside, synced to disk and
renamed. A reader refuses a folder that still holds the marker.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from molora_cli.errors import InputError, MoloraError

MARKER = "INCOMPLETE"
_FULL = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "file too large",
}
_LEFTOVER = re.compile(r"\.(?P<kind>tmp|old)-(?P<pid>\d+)-\w+\Z")


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk; some file systems cannot sync folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    """Flush everything below `folder`; some writers leave files that only their owner may read."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o666 & ~_umask())
            _sync(path)
    _sync(folder)


@contextlib.contextmanager
def _plain_errors(target: Path) -> Iterator[None]:
    """A full disk as one line. Writers in other languages hide the number, so the text is looked at too."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise MoloraError(
                f"{_FULL[error.errno]} while writing {target}", "free some space and run it again"
            ) from error
        if error.errno is None and "requested and" in str(error):  # numpy's tofile keeps no number
            raise MoloraError(
                f"no space left while writing {target}", "free some space and run it again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise InputError(
                f"{target} cannot be written: {error.strerror}", "choose another place"
            ) from error
        raise
    except Exception as error:
        if "No space left" in str(error) or "File too large" in str(error):
            raise MoloraError(
                f"no space left while writing {target}", "free some space and run it again"
            ) from error
        raise


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def tidy(target: Path) -> None:
    """Clear what dead writers of `target` left; a bundle that one had moved aside and not yet replaced
    returns."""
    for path in target.parent.glob(f".{_glob_safe(target.name)}.*"):
        match = _LEFTOVER.search(path.name)
        if not match or path.name[: match.start()] != f".{target.name}" or _alive(int(match["pid"])):
            continue
        if match["kind"] == "old" and not os.path.lexists(target):
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _glob_safe(name: str) -> str:
    """`name` with glob's special characters made literal."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def check_target(target: Path, *, force: bool, own_file: str) -> None:
    """Refuse a place that cannot or must not be written, before any work.

    own_file: what a folder must hold to count as ours; `force` replaces only such a folder (or an empty one).
    Raises InputError.
    """
    if not target.name:
        raise InputError(f"{target} cannot be written", "name a new folder")
    if target.is_symlink() and not target.exists():
        raise InputError(f"{target} is a broken link", "remove it, or choose another place")
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} exists and is a file", "name a folder that does not exist yet")
    if target.is_dir():
        inside = {p.name for p in target.iterdir()}
        if inside and own_file not in inside and MARKER not in inside:
            raise InputError(
                f"{target} is a folder with other things in it (no {own_file})",
                "name a folder that does not exist yet",
            )
        if inside and not force:
            raise InputError(f"{target} exists", "--force replaces it")
    parent = next((p for p in target.absolute().parents if os.path.lexists(p)), None)
    if parent is None or not parent.is_dir():
        raise InputError(f"{target} cannot be made: {parent} is not a folder", "choose another place")
    if not os.access(parent, os.W_OK):
        raise InputError(f"{target} cannot be made: {parent} is not writable", "choose another place")


@contextlib.contextmanager
def new_folder(target: Path, *, force: bool, own_file: str) -> Iterator[Path]:
    """A folder to fill; it becomes `target` when the block ends well, and is removed when it does not.

    With `force` an older `target` changes places with the new one and is deleted last, so that there is
    always one whole folder. A link to a folder is followed. Two writers: the slower one is told. Raises
    InputError (place taken) or MoloraError (disk full).
    """
    target = target.resolve() if target.is_dir() else target.absolute()
    with _plain_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        tidy(target)
        check_target(target, force=force, own_file=own_file)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-{os.getpid()}-", dir=target.parent))
        try:
            (work / MARKER).write_text("This folder is being written, or its writer was stopped.\n")
            yield work
            _sync_tree(work)
            (work / MARKER).unlink()
            work.chmod(0o777 & ~_umask())
            _sync(work)
            _swap(work, target, force)
            _sync(target.parent)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _exchange(one: Path, other: Path) -> bool:
    """Two folders change places in one step (renameat2 of Linux, RENAME_EXCHANGE); False where this system
    or its disk cannot."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    return bool(renameat2(here, os.fsencode(one), here, os.fsencode(other), swap) == 0)


def _swap(work: Path, target: Path, force: bool) -> None:
    """Put `work` in the place of `target`. What was there is at `work` then, or gone."""
    if force and target.exists() and _exchange(work, target):
        return
    aside: Path | None = None
    if force and target.exists():  # killed between the two renames, `tidy` puts the old folder back
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-{os.getpid()}-", dir=target.parent))
        with contextlib.suppress(FileNotFoundError):  # another writer was faster
            target.rename(aside)
    try:
        work.rename(target)
    except OSError as error:
        if aside is not None and not os.path.lexists(target):
            aside.rename(target)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise InputError(
                f"{target} was written by someone else meanwhile", "--force replaces it"
            ) from error
        raise
    if aside is not None:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def new_file(target: Path) -> Iterator[Path]:
    """A path to write; it replaces `target` when the block ends well. Raises MoloraError for a full disk."""
    with _plain_errors(target):
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.tmp-{os.getpid()}-", dir=target.parent)
        os.close(handle)
        work = Path(name)
        try:
            yield work
            work.chmod(0o666 & ~_umask())
            _sync(work)
            work.replace(target)
            _sync(target.parent)
        finally:
            work.unlink(missing_ok=True)


@contextlib.contextmanager
def new_file_apart(target: Path, *, force: bool) -> Iterator[Path]:
    """As `new_file`, in a folder of its own beside the target: the work has the target's name and suffix,
    and what a killed writer left is cleared by the next. Raises InputError where another one was faster."""
    target = target.absolute()
    with _plain_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        tidy(target)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp-{os.getpid()}-", dir=target.parent))
        try:
            work = folder / target.name
            yield work
            _sync_tree(folder)
            try:
                if force:
                    work.replace(target)
                else:
                    target.hardlink_to(work)  # unlike a rename it never replaces
            except FileExistsError as error:
                raise InputError(
                    f"{target} was written by someone else meanwhile", "--force replaces it"
                ) from error
            _sync(target.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """`text` as UTF-8, whole or not at all."""
    with new_file(target) as work:
        work.write_text(text, encoding="utf-8")
