"""The CPU backend's operators: compiled once per processor and torch version, then found in a cache folder.

Nothing is downloaded: the compiler on this machine and the headers inside torch are all it takes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from molora_kernels import builders

SOURCES = Path(__file__).parent / "cpu"
PARTS = ("kernels", "delta", "attend", "context", "ops")  # compiled side by side
LIBRARY = "molora_cpu"
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 600.0  # seconds for one compiler run, or for another process's build; a small board takes minutes


COMPILER = "install g++ or clang, or set CXX"
ELSEWHERE = "set MOLORA_CACHE to a folder of your own"


class BuildError(Exception):
    """The operators are neither cached nor can they be built; the message says why in one line, `remedy` what
    helps."""

    def __init__(self, message: str, remedy: str = COMPILER) -> None:
        super().__init__(message)
        self.remedy = remedy


def cache_folder() -> Path:
    """Where compiled operators are kept: kernels/ in $MOLORA_CACHE or the user's cache folder."""
    return builders.cache_root() / "kernels"


def native_flags() -> tuple[str, ...]:
    """The flags that let the compiler use all this processor has."""
    return ("-march=native",) if platform.machine().lower() in ("x86_64", "amd64") else ("-mcpu=native",)


@functools.cache
def processor() -> str:
    """What a build is tied to: machine, model and features."""
    lines = [platform.machine(), platform.processor()]
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "\n".join(lines)
    first = text.split("\n\n")[0].splitlines()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join([*lines, *(line for line in first if line.startswith(wanted))])


def library_path(flags: tuple[str, ...], library: str = LIBRARY) -> Path:
    """Where the build with these flags is, or would be."""
    digest = hashlib.sha256()
    for part in (torch.__version__, sys.platform, processor(), library, *flags):
        digest.update(part.encode() + b"\0")
    for file in sorted(SOURCES.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return cache_folder() / f"{library}-{digest.hexdigest()[:16]}.so"


def find_compiler() -> list[str]:
    """$CXX, or the first of the usual ones, with an absolute path. Raises BuildError where there is none."""
    asked = shlex.split(os.environ.get("CXX", ""))
    for command in [asked] if asked else [[name] for name in COMPILERS]:
        found = shutil.which(command[0])
        if found:
            return [str(Path(found).absolute()), *command[1:]]
    raise BuildError(f"CXX={os.environ['CXX']} is not there" if asked else "no C++ compiler was found")


def build(path: Path, compiler: list[str], flags: tuple[str, ...], library: str = LIBRARY) -> None:
    """Compile into `path`, all at once: it exists whole or not at all, whoever else builds it meanwhile.

    Raises BuildError where the compiler fails or the folder cannot be written.
    """
    try:
        builders.make_private(path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
            made = _compile(compiler, Path(folder), flags, library)
            builders.publish(made, path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror})", ELSEWHERE) from error


def load(
    notify: Callable[[str], None] | None = None, flags: tuple[str, ...] | None = None, library: str = LIBRARY
) -> None:
    """Make `torch.ops.<library>` available, compiling it where it is not cached.

    notify: told when compiling begins. flags: None = native_flags(). Raises BuildError, also where others may
    have written the build.
    """
    flags = native_flags() if flags is None else flags
    path = library_path(flags, library)
    reason = builders.trusted(path) if path.is_file() else None
    if not path.is_file():
        _build_or_wait(path, flags, library, notify)
        reason = builders.trusted(path)
    if reason is not None:
        raise BuildError(reason, ELSEWHERE)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        path.unlink(missing_ok=True)  # damaged: the next start builds it again
        raise BuildError(
            f"{path} cannot be loaded ({error})", "start again: they are compiled anew"
        ) from error


def is_cached() -> bool:
    """Whether `load` would find its build."""
    return library_path(native_flags()).is_file()


def start() -> None:
    """Begin the build in a process of its own, which outlives this one, unless one has begun already.

    Raises BuildError where there is no compiler, the folder cannot be written or is open to others, or no
    process can be begun.
    """
    find_compiler()
    path = library_path(native_flags())
    lock = _take(path)
    if lock is None:
        return
    try:
        builders.begin("molora_kernels.cpu_build", [str(path)], path, lock)
    except OSError as error:
        raise BuildError(f"no process can be begun ({error.strerror})", "start again") from error


def _take(path: Path) -> int | None:
    """The lock of `path`, in a folder without debris; None where another builds it. Raises BuildError."""
    try:
        reason = builders.refused(path.parent)
        if reason is not None:
            raise BuildError(reason, ELSEWHERE)
        lock = builders.take(path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error.strerror})", ELSEWHERE) from error
    if lock is not None:
        builders.sweep(path.parent, path)
    return lock


def _build_or_wait(
    path: Path, flags: tuple[str, ...], library: str, notify: Callable[[str], None] | None
) -> None:
    """Build, or let another process do so that has begun; where it fails it is this one's turn."""
    compiler = find_compiler()
    limit = time.monotonic() + TIMEOUT
    while (lock := _take(path)) is None and not path.is_file():
        if time.monotonic() > limit:
            raise BuildError(f"another process has not compiled them within {TIMEOUT:.0f} s", "start again")
        time.sleep(0.2)
    if lock is None:
        return
    try:
        if not path.is_file():
            if notify is not None:
                notify("compiling the CPU kernels, once for this machine: half a minute or less")
            build(path, compiler, flags, library)
    finally:
        builders.release(path, lock)


def compile_command(compiler: list[str], source: str, flags: tuple[str, ...], library: str) -> list[str]:
    """The compiler's command for one source, without its output."""
    include = Path(torch.__file__).parent / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    # the wrappers only pass on: more than this costs compilation and wins nothing
    level = "-O2" if source == "ops.cpp" else "-O3"
    openmp = () if _openmp_library() is None else _openmp_flags()
    return [
        *compiler,
        *("-std=c++20", level, "-fPIC", "-fno-math-errno", "-w"),
        *(*openmp, *flags),
        *(f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DMOLORA_LIBRARY={library}"),
        *(f"-I{include}", "-c", str(SOURCES / source)),
    ]


def _compile(compiler: list[str], folder: Path, flags: tuple[str, ...], library: str) -> Path:
    objects = [folder / f"{name}.o" for name in PARTS]
    commands = [[*compile_command(compiler, f"{o.stem}.cpp", flags, library), "-o", str(o)] for o in objects]
    _run_all(commands)
    made = folder / "library.so"
    torch_lib = Path(torch.__file__).parent / "lib"
    openmp = _openmp_library()
    undefined = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    linked = [*map(str, objects), f"-L{torch_lib}", "-ltorch_cpu", "-lc10", *undefined]
    _run_all([[*compiler, "-shared", *linked, *([] if openmp is None else [openmp]), "-o", str(made)]])
    return made


def _run_all(commands: list[list[str]]) -> None:
    """Run side by side. Raises BuildError with the first failing command's first complaint."""
    running = [
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        for command in commands
    ]
    complaints = []
    try:
        for process in running:
            _, text = process.communicate(timeout=TIMEOUT)
            if process.returncode != 0:
                lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
                complaints.append(lines[0] if lines else f"exit status {process.returncode}")
    except subprocess.TimeoutExpired:
        complaints.append(f"not done within {TIMEOUT:.0f} s")
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    if complaints:
        raise BuildError(f"{Path(commands[0][0]).name} failed: {complaints[0][:300]}")


@functools.cache
def _openmp_library() -> str | None:
    """The OpenMP runtime that torch itself has loaded: a second one would start threads of its own."""
    folder = Path(torch.__file__).parent / "lib"
    beside = folder.parent.parent / "torch.libs"
    found = [*folder.glob("libgomp*"), *folder.glob("libomp*"), *beside.glob("libgomp*")]
    return str(found[0]) if found else None


def _openmp_flags() -> tuple[str, ...]:
    return ("-Xpreprocessor", "-fopenmp") if sys.platform == "darwin" else ("-fopenmp",)


def main() -> None:
    """The process that `start` begins, which holds the lock."""
    path = Path(sys.argv[1])
    try:
        build(path, find_compiler(), native_flags())
    finally:
        builders.lock_path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main()
