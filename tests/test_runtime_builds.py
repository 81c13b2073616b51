"""Builders beside a chat: what they run, who builds, what is kept of a failure, and what is loaded."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from molora_kernels import builders, cpu_build

from molora_cli.core.runtime import build, package
from molora_cli.core.runtime.package import PackageError, PassingError

owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
locks = pytest.mark.skipif(builders.fcntl is None, reason="no locks here")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a package would be. A compiler is found, and no process begins."""
    monkeypatch.setattr(cpu_build, "find_compiler", lambda: ["c++"])
    return tmp_path / "steps" / "step-0.pt2"


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Builds that are begun, each with the lock it holds until it is closed; none does anything."""
    held: list[int] = []

    def begin(module: str, arguments: Any, path: Path, descriptor: int) -> None:
        held.append(descriptor)

    monkeypatch.setattr(builders, "begin", begin)
    return held


def names(folder: Path) -> list[str]:
    return sorted(place.name for place in folder.iterdir())


PROBE = """
import json, os, sys
from pathlib import Path
import helper
from molora_kernels_probe import held
told = {"cwd": os.getcwd(), "cache": os.environ["MOLORA_CACHE"], "cxx": os.environ["CXX"]}
told["held"] = held(sys.argv[1])
Path(sys.argv[2]).write_text(json.dumps(told))
"""


@locks
def test_a_builder_runs_nothing_of_the_folder_the_user_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths in the environment go on to mean the same, and the builder holds the lock."""
    lib, here, cache = tmp_path / "lib", tmp_path / "downloaded", tmp_path / "cache"
    for folder in (lib, here, cache):
        folder.mkdir()
    (lib / "probe.py").write_text(PROBE)
    (lib / "helper.py").write_text("")
    (lib / "molora_kernels_probe.py").write_text(
        "import fcntl, os\n"
        "def held(path):\n"
        "    try: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
        "    except BlockingIOError: return True\n"
    )
    for name in ("probe", "helper", "json", "sitecustomize", "platformdirs"):
        (here / f"{name}.py").write_text(f"open({str(here / 'EXECUTED')!r}, 'w').close()\n")
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "../lib"]))
    monkeypatch.setenv("MOLORA_CACHE", "../cache")
    monkeypatch.setenv("CXX", "./c++ -pipe")
    path, answer = builders.cache_root() / "a.so", tmp_path / "answer"
    lock = builders.take(path)
    assert lock is not None
    begun = builders.begin("probe", [str(builders.lock_path(path)), str(answer)], path, lock)
    assert begun.wait(60) == 0
    assert not (here / "EXECUTED").exists()
    told = json.loads(answer.read_text())
    assert Path(told["cwd"]).samefile(cache) and Path(told["cache"]).samefile(cache) and told["held"]
    assert told["cxx"] == f"{here}/c++ -pipe"
    assert not builders.is_held(path)  # it has ended, with or without a word


def test_one_builds_and_a_killed_one_blocks_nobody(path: Path, began: list[int]) -> None:
    """What was left has the number of a process that is alive, here the parent's."""
    left = path.parent / f".{path.stem}-{os.getppid()}"
    other = path.parent / ".step-9-1"
    for folder in (left, other):
        folder.mkdir(parents=True)
    assert not package.is_building(path)
    package.start({}, path)
    assert not left.exists() and not other.exists()
    assert package.is_building(path)
    busy = path.parent / f".{path.stem}-7"
    busy.mkdir()
    assert package.start({}, path) is None and len(began) == 1
    package.start({}, path.with_name("step-1.pt2"))
    assert len(began) == 2 and busy.exists()
    os.close(began[0])  # it is killed
    assert not package.is_building(path) or builders.fcntl is None


@locks
def test_a_builder_that_says_nothing_is_begun_four_times(path: Path, began: list[int]) -> None:
    for _ in range(package.TRIES):
        assert package.failure(path) is None
        package.start({}, path)
        assert package.failure(path) is None  # one that runs may succeed
        os.close(began[-1])
    assert len(began) == package.TRIES and "were stopped" in str(package.failure(path))
    old = time.time() - package.DAY - 1
    os.utime(path.with_suffix(".tries"), (old, old))
    assert package.failure(path) is None and package.tries(path) == 0
    package.heard(path)
    assert names(path.parent) == [f".{path.stem}.lock"]


def test_failures_of_the_machine_expire(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir()
    for text in ("", "\n"):
        path.with_suffix(".failed").write_text(text)
        assert package.failure(path) is None
    package.write_failure(path, PackageError("its attention\nhas softcap"))
    lasting, passing = path, path.with_name("step-1.pt2")
    package.write_failure(passing, PassingError("OSError: disk full"))
    assert package.failure(lasting) == "its attention has softcap"
    assert package.failure(passing) == "OSError: disk full"
    assert names(path.parent) == ["step-0.failed", "step-1.failed"]
    now = time.time()
    monkeypatch.setattr(package.time, "time", lambda: now + package.DAY + 5)
    assert package.failure(passing) is None and package.failure(lasting) is not None


@pytest.mark.parametrize(
    ("exporting", "error", "passes"),
    [
        (True, ValueError("no model of transformers"), False),
        (True, MemoryError(), True),
        (True, OSError(errno.ENOSPC, "No space left on device"), True),
        (True, cpu_build.BuildError("no C++ compiler was found"), True),
        (False, RuntimeError("C++ compile error"), True),
    ],
)
def test_which_failures_may_pass(
    exporting: bool, error: Exception, passes: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(build, "_export", fail if exporting else lambda document: (None, ""))
    monkeypatch.setattr(build, "_compile", fail)
    with pytest.raises(PackageError, match=re.escape(str(error)) or type(error).__name__) as raised:
        build.build({}, path)
    assert isinstance(raised.value, PassingError) == passes
    assert names(path.parent) == []


def test_the_process_leaves_a_package_or_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(program: Any, about: str, made: Path) -> None:
        if about == "bad":
            raise RuntimeError("C++ compile error")
        made.write_text("package")
        made.chmod(0o664)

    monkeypatch.setattr(build, "_export", lambda document: (None, document["about"]))
    monkeypatch.setattr(build, "_compile", compile)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(build.tempfile, "tempdir", None)
    order = path.with_suffix(".json")
    monkeypatch.setattr(sys, "argv", ["build", str(order), str(path)])
    path.parent.mkdir(mode=0o700)
    for about, left in (("bad", "step-0.failed"), ("good", "step-0.pt2")):
        order.write_text(json.dumps({"about": about}))
        path.with_suffix(".tries").write_text("1")
        builders.lock_path(path).touch()
        build.main()
        assert names(path.parent) == [left]
    assert package.trusted(path) is None


def test_where_no_process_can_begin_the_chat_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(PackageError, match=r"no process can be begun \(Resource"):
        package.start({}, path)
    assert names(path.parent) == [] and package.failure(path) is None


@owners
def test_packages_that_others_may_have_written_are_not_trusted(
    path: Path, began: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    package.start({}, path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.write_text("code")
    path.chmod(0o644)
    path.parent.chmod(0o775)  # made by ourselves, with a wide umask
    assert package.trusted(path) is None and path.parent.stat().st_mode & 0o777 == 0o755
    path.chmod(0o664)
    assert "others could write" in str(package.trusted(path)) and not path.exists()
    path.write_text("code")
    path.chmod(0o644)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    if path.stat().st_uid != 0:
        assert "belongs to another user" in str(package.trusted(path))
    path.parent.chmod(0o777)
    assert package.trusted(path) is not None and path.exists()
    with pytest.raises(PackageError, match=r"others may write to|belongs to another"):
        package.start({}, path)


def test_what_is_no_whole_package_is_damaged(tmp_path: Path) -> None:
    def packed(**files: str) -> Path:
        with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
            for name, text in files.items():
                archive.writestr(f"model/data/aotinductor/model/{name}", text)
        return tmp_path / "a.pt2"

    about = {"a.wrapper_metadata.json": json.dumps({"molora": "{}"})}
    assert not package.damaged(packed(**about, **{"a.wrapper.so": "library"}))
    whole = (tmp_path / "a.pt2").read_bytes()
    assert not package.damaged(tmp_path / "not there.pt2")
    for bad in (b"", b"text", whole[:-30], whole.replace(b"library", b"l1brary")):
        (tmp_path / "b.pt2").write_bytes(bad)
        assert package.damaged(tmp_path / "b.pt2")
    assert package.damaged(packed(**about))
    assert package.damaged(packed(**{"a.wrapper_metadata.json": "{}", "a.wrapper.so": "library"}))


def test_all_that_shapes_the_graph_names_the_package() -> None:
    assert all(source.is_file() for source in package.SOURCES)
    shaping = {"step.py", "build.py", "attach.py", "int8.py", "live.py", "modules.py", "cpu_ops.py"}
    assert {source.name for source in package.SOURCES} == shaping
