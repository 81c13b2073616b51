"""Running a program that a model wrote: only where it is asked for, apart, and with limits.

A process of its own in Python's isolated mode, in an empty temporary folder, without the caller's
environment; limits on CPU time, memory, processes, files and what it writes; no network, and no signals to
other processes, where namespaces can be made (Linux, `unshare`); another user where the caller is root. It is
the leader of its own session and is killed with all of it. What this does not stop is said in docs/eval.md.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from molora_cli.errors import InputError

SECONDS = 10  # by the clock
_NOBODY = 65534
_LIMITS = {
    "RLIMIT_CPU": 5,  # seconds
    "RLIMIT_AS": 1 << 30,
    "RLIMIT_DATA": 1 << 29,
    "RLIMIT_FSIZE": 1 << 20,
    "RLIMIT_NOFILE": 64,
    "RLIMIT_NPROC": 0,
    "RLIMIT_CORE": 0,
}
_OUTPUT = 1 << 16
_UNSHARE = ["--net", "--ipc", "--uts", "--pid", "--fork", "--kill-child"]


@dataclass(frozen=True)
class Fence:
    """How programs are run here. namespaces: arguments of unshare, () = none; user: to drop to, None = the
    caller's own; python: the interpreter."""

    python: str
    namespaces: tuple[str, ...]
    user: int | None

    @property
    def described(self) -> str:
        """In words, for a report."""
        net = "no network" if self.namespaces else "the network is NOT cut off"
        who = "another user" if self.user is not None else "the caller's own user"
        return f"{net}, {who}, limits on time, memory, processes and files"


@dataclass(frozen=True)
class Outcome:
    """finished: the program came to its end without an error; output: what it printed, cut."""

    finished: bool
    output: str


@functools.cache
def fence() -> Fence:
    """The strictest fence that works here, tried out with a program that does nothing. Raises InputError."""
    if os.name != "posix":
        raise InputError(
            "programs cannot be fenced in on this system, so none is run", "leave out --allow-code-execution"
        )
    root = os.geteuid() == 0
    unshare = shutil.which("unshare")
    kinds: list[tuple[str, ...]] = []
    if unshare is not None and root:
        kinds.append((unshare, *_UNSHARE))
    elif unshare is not None:
        kinds.append((unshare, "--user", "--map-current-user", *_UNSHARE))
        kinds.append((unshare, "--user", "--map-root-user", *_UNSHARE))
    kinds.append(())
    pythons = [sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")]
    for namespaces in kinds:
        for python in dict.fromkeys(p for p in pythons if p):
            made = Fence(python, namespaces, _NOBODY if root else None)
            if run("print('ready')", made).output.strip() == "ready":
                return made
    raise InputError(
        "no program can be run here as another user, and this is root's session",
        "run it as an ordinary user, install python3 for all users, or leave out --allow-code-execution",
    )


def passes(program: str, tests: Sequence[str]) -> bool:
    """Whether a program runs and its tests (assert statements) pass after it, all within the limits."""
    mark = secrets.token_hex(16)  # printed last, so that a program which leaves early has not passed
    whole = "\n".join([program, *tests, f"print({mark!r})"])
    outcome = run(whole, fence())
    return outcome.finished and outcome.output.rstrip().endswith(mark)


def output_of(program: str) -> str | None:
    """What a program prints, None where it fails."""
    outcome = run(program, fence())
    return outcome.output if outcome.finished else None


def run(program: str, made: Fence, seconds: float = SECONDS) -> Outcome:
    """Run one program inside a fence. Its session is killed at the end, whatever happened."""
    with tempfile.TemporaryDirectory(prefix="molora-run-", ignore_cleanup_errors=True) as place:
        outer = Path(place)
        inner = outer / "work"
        inner.mkdir()
        (outer / "program.py").write_text(program, encoding="utf-8", errors="replace")
        shutil.copyfile(Path(__file__).with_name("guard.py"), outer / "guard.py")
        limits = {"folder": str(inner), "user": made.user, "limits": _LIMITS}
        (outer / "limits.json").write_text(json.dumps(limits), encoding="utf-8")
        if made.user is not None:
            outer.chmod(0o711)
            for name in ("program.py", "guard.py", "limits.json"):
                (outer / name).chmod(0o644)
            os.chown(inner, made.user, made.user)
        command = [*made.namespaces, made.python, "-I", "-B", str(outer / "guard.py")]
        command += [str(outer / "limits.json"), str(outer / "program.py")]
        with (outer / "output").open("w+b") as output:
            code = _wait(command, output.fileno(), inner, seconds)
            output.seek(0)
            text = output.read(_OUTPUT).decode("utf-8", "replace")
        return Outcome(code == 0, text)


def _wait(command: Sequence[str], output: int, folder: Path, seconds: float) -> int | None:
    """The exit status, None where it took too long or could not be started."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin"},
            start_new_session=True,
            close_fds=True,
        )
    except OSError:
        return None
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
