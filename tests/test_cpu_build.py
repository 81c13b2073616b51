"""Compiling the CPU operators: cached, whole or not at all, and a notice where there is no compiler."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from molora_kernels import backend, builders, cpu_build, cpu_ops


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in a moment, and a cache of their own."""
    if not any(map(cpu_build.shutil.which, cpu_build.COMPILERS)):
        pytest.skip("no C++ compiler")
    folder = tmp_path / "cpu"
    folder.mkdir()
    (folder / "kernels.cpp").write_text("int molora_test() { return 1; }\n")
    for name in cpu_build.PARTS[1:]:
        (folder / f"{name}.cpp").write_text(f"int molora_test_{name}() {{ return 2; }}\n")
    monkeypatch.setattr(cpu_build, "SOURCES", folder)
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def test_a_build_is_used_again_without_a_compiler(
    small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    cpu_build.load(said.append, ())
    path = cpu_build.library_path(())
    assert path.is_file() and len(said) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing half-made is left
    monkeypatch.setenv("CXX", "/nothing/c++")
    cpu_build.load(said.append, ())
    assert len(said) == 1


def test_sources_flags_and_torch_make_another_build(
    small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {
        cpu_build.library_path(()),
        cpu_build.library_path(("-O0",)),
        cpu_build.library_path((), "other"),
    }
    (small_sources / "kernels.cpp").write_text("int molora_test() { return 3; }\n")
    paths.add(cpu_build.library_path(()))
    monkeypatch.setattr(torch, "__version__", "0.0")
    paths.add(cpu_build.library_path(()))
    monkeypatch.setattr(cpu_build, "processor", lambda: "another")
    paths.add(cpu_build.library_path(()))
    assert len(paths) == 6


def test_two_at_once_leave_one_whole_build(small_sources: Path) -> None:
    code = (
        "from pathlib import Path; from molora_kernels import cpu_build\n"
        f"cpu_build.SOURCES = Path({str(small_sources)!r})\n"
        "cpu_build.load(None, ()); print('loaded')\n"
    )
    environment = {**os.environ}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
        for _ in range(2)
    ]
    assert [p.communicate()[0].strip() for p in both] == ["loaded"] * 2
    assert len(list(cpu_build.cache_folder().iterdir())) == 1


def test_a_damaged_build_is_thrown_away(small_sources: Path) -> None:
    path = cpu_build.library_path(())
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    with pytest.raises(cpu_build.BuildError, match="cannot be loaded"):
        cpu_build.load(None, ())
    cpu_build.load(None, ())


def test_what_the_compiler_says_is_passed_on(small_sources: Path) -> None:
    (small_sources / "kernels.cpp").write_text("int molora_test( { }\n")
    with pytest.raises(cpu_build.BuildError, match=r"failed: .*kernels.cpp.*error"):
        cpu_build.load(None, ())
    assert list(cpu_build.cache_folder().iterdir()) == []


def test_a_build_in_the_background_is_waited_for(small_sources: Path) -> None:
    code = (
        "from pathlib import Path; from molora_kernels import cpu_build; import time\n"
        f"cpu_build.SOURCES = Path({str(small_sources)!r})\n"
        "real = cpu_build._compile\n"
        "def slow(*a):\n    print('begun', flush=True); time.sleep(1); return real(*a)\n"
        "cpu_build._compile = slow\n"
        "cpu_build.load()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdout.readline() == "begun\n"
    assert not cpu_build.is_cached()
    said: list[str] = []
    cpu_build.load(said.append)
    assert not said and cpu_build.is_cached() and other.wait() == 0


def test_a_build_that_was_killed_is_not_waited_for(small_sources: Path) -> None:
    """Also where another process has its number now; what it left goes."""
    path = cpu_build.library_path(cpu_build.native_flags())
    for name in (f".build-{os.getppid()}-x", f".{path.stem}-x"):
        (path.parent / name).mkdir(parents=True)
    builders.lock_path(path).touch()
    said: list[str] = []
    cpu_build.load(said.append)
    assert len(said) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_another_build_is_not_waited_for_without_end(
    small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_build, "TIMEOUT", 0.1)
    path = cpu_build.library_path(())
    path.parent.mkdir(parents=True)
    lock = builders.take(path)
    assert lock is not None
    with pytest.raises(cpu_build.BuildError, match="another process has not"):
        cpu_build.load(None, ())
    builders.release(path, lock)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_a_build_that_others_could_write_is_made_again(small_sources: Path) -> None:
    cpu_build.load(None, ())
    path = cpu_build.library_path(())
    path.parent.chmod(0o775)
    path.chmod(0o664)
    told: list[str] = []
    cpu_build.load(told.append, ())
    assert len(told) == 1
    assert path.stat().st_mode & 0o022 == 0 and path.parent.stat().st_mode & 0o022 == 0


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners here")
def test_a_build_of_another_user_is_refused(small_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_build.load(None, ())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    real = Path.stat

    def stat(self: Path, **options: bool) -> os.stat_result:
        found = list(real(self, **options)[:10])
        found[4] = 999  # st_uid
        return os.stat_result(found)

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(cpu_build.BuildError, match="belongs to another user"):
        cpu_build.load(None, ())


def test_where_no_process_can_begin_it_is_said(small_sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(builders.subprocess, "Popen", full)
    with pytest.raises(cpu_build.BuildError, match="no process can be begun"):
        cpu_build.start()
    assert list(cpu_build.cache_folder().iterdir()) == []


@pytest.fixture
def unresolved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not looked for a backend yet."""
    monkeypatch.setattr(backend, "_known", {})
    monkeypatch.setattr(backend, "_told", set())
    monkeypatch.setattr(cpu_ops, "_registered", set())


def test_without_a_compiler_the_torch_path_runs_after_one_notice(
    unresolved: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nothing/c++")
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path))
    said: list[str] = []
    assert [backend.resolve("auto", notify=said.append) for _ in range(2)] == ["torch", "torch"]
    assert len(said) == 1
    assert said[0].startswith("the CPU kernels are not available (CXX=/nothing/c++ is not there)")
    with pytest.raises(ValueError, match="the CPU kernels are not available: CXX=/nothing"):
        backend.resolve("cpu", notify=said.append)


def test_auto_begins_a_build_and_goes_on(
    unresolved: None, small_sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    monkeypatch.setattr(cpu_build, "start", lambda: begun.append(1))
    said: list[str] = []
    assert backend.resolve("auto", notify=said.append) == "torch"
    assert begun and "compiled in the background" in said[0]


def test_without_anyone_to_notify_it_is_a_warning(
    unresolved: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nothing/c++")
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path))
    with pytest.warns(UserWarning, match="install g\\+\\+ or clang, or set CXX"):
        assert backend.resolve() == "torch"


def test_a_folder_that_cannot_be_written_is_named(
    unresolved: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "file"))
    said: list[str] = []
    assert backend.resolve(notify=said.append) == "torch"
    assert "kernels cannot be written" in said[-1]
    assert said[-1].endswith("set MOLORA_CACHE to a folder of your own")


def test_the_avx512_bf16_path_is_sound_cpp() -> None:
    """Checked without code generation, which takes longer; see the slow test."""
    if cpu_build.platform.machine() != "x86_64" or not any(map(cpu_build.shutil.which, cpu_build.COMPILERS)):
        pytest.skip("another processor family, or no compiler")
    flags = ("-march=sapphirerapids", "-fsyntax-only")
    for source in ("kernels.cpp", "delta.cpp", "attend.cpp"):
        command = cpu_build.compile_command(cpu_build.find_compiler(), source, flags, "molora_cpu")
        subprocess.run(command, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3", "skylake-avx512", "cooperlake", "sapphirerapids"])
def test_the_kernels_compile_for_other_processors(target: str, tmp_path: Path) -> None:
    if cpu_build.platform.machine() != "x86_64":
        pytest.skip("another processor family")
    command = cpu_build.compile_command(
        cpu_build.find_compiler(), "kernels.cpp", (f"-march={target}",), "molora_cpu"
    )
    subprocess.run([*command, "-o", str(tmp_path / "kernels.o")], check=True)
    if target in ("cooperlake", "sapphirerapids"):
        shown = subprocess.run(
            ["objdump", "-d", str(tmp_path / "kernels.o")], capture_output=True, text=True, check=False
        )
        assert shown.returncode != 0 or "vdpbf16ps" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "needs"),
    [
        ("x86-64", ()),
        ("x86-64-v3", ("avx2", "fma", "f16c")),
        ("skylake-avx512", ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd")),
        ("native", ()),
    ],
)
def test_every_path_that_this_processor_has_is_right(
    target: str, needs: tuple[str, ...], tmp_path: Path
) -> None:
    """The same operators for smaller processors, in a process of its own, against the oracle."""
    if cpu_build.platform.machine() != "x86_64" or not set(needs) <= set(cpu_build.processor().split()):
        pytest.skip("another processor")
    code = """
import torch
from molora_kernels import cpu_ops, quantise_rows
from molora_kernels.testing import assert_close, case_plan, make_bank, oracle, random_case

library = cpu_ops.load(None, ("-march=TARGET",), "molora_other")
for dtype, limit in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
    for tokens, inputs, outputs in ((1, 577, 65), (6, 33, 17), (40, 64, 300)):
        sizes = dict(tokens=tokens, inputs=inputs, outputs=outputs)
        for top in (1, 2):
            case = random_case(1, **sizes, ranks=[3, 16, 0], top=top, dtype=dtype)
            bank, layout = make_bank(case.factors, outputs)
            args = cpu_ops.adapters(bank, case_plan(case, layout))
            y = library.linear(case.x, case.weight, None, None, *args)
            assert_close(y, oracle(case), max_error=10 * limit, rms_error=limit)
        q, scale, _ = quantise_rows(case.weight)
        exact = case.x.double() @ (q.double() * scale.double()[:, None]).T
        coarse = max(limit, 1e-4)  # inputs become 16-bit integers
        assert_close(library.gemv(case.x, q, None, scale), exact, max_error=10 * coarse, rms_error=coarse)
    for heads, shared, width, length in ((6, 3, 40, 130), (4, 1, 64, 64), (5, 5, 24, 1)):
        one = lambda n: torch.randn(1, n, 1, width).to(dtype)
        many = lambda: torch.randn(1, heads // shared, length + 3, width).to(dtype)
        query, key, value = one(heads), one(heads // shared), one(heads // shared)
        keys, values = many(), many()
        got = library.attend(query, key, value, keys, values, torch.tensor([length - 1]), 0.3)
        K, V = (t[:, :, :length].double().repeat_interleave(shared, 1) for t in (keys, values))
        weights = (0.3 * query.double() @ K.transpose(2, 3)).softmax(-1)
        assert_close(got[:, 0], (weights @ V)[:, :, 0], max_error=20 * limit, rms_error=2 * limit)
half = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
one = torch.ones(1, 1, dtype=torch.float16)
y = library.gemv(one, half[:, None], None, None)[0]
assert torch.equal(y.isnan(), half.isnan()) and torch.equal(y[~half.isnan()], half[~half.isnan()])
print("right")
"""
    assert run_python(code.replace("TARGET", target), MOLORA_CACHE=str(tmp_path)).strip() == "right"
