"""The real commands on adapters that must be refused: exit code, message, time, memory, and nothing left."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.base.structure import read_structure
from molora_cli.errors import InputError
from molora_cli.refs import parse_ref

# A process counts the memory of the one it was forked from, so a small one starts the commands.
LAUNCHER = """
import json, os, subprocess, sys, time
for line in sys.stdin:
    start = time.perf_counter()
    done = subprocess.Popen(json.loads(line), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    text = done.stderr.read().decode()
    _, status, usage = os.wait4(done.pid, 0)
    took = [time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024]
    print(json.dumps([os.waitstatus_to_exitcode(status), *took, text]), flush=True)
"""
COMMAND = (sys.executable, "-c", "import molora_cli.app as a; a.main()")
SECONDS = 2.0  # of the CPU, for a whole command that needs no torch; with torch 5
PATIENCE = 10.0  # how many times longer it may take by the clock, on a busy machine
MEGABYTES = 500.0  # above what the imports take


@dataclass(frozen=True)
class Ended:
    code: int
    seconds: float
    cpu_seconds: float
    megabytes: float
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """run(*argv) -> how it ended, its peak memory included."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None

    def start(*argv: object) -> Ended:
        process.stdin.write(json.dumps([str(a) for a in argv]) + "\n")
        process.stdin.flush()
        return Ended(*json.loads(process.stdout.readline()))

    yield start
    process.stdin.close()
    process.wait(60)


def commands(source: Path, base: Path, out: Path) -> dict[str, list[object]]:
    return {
        "compose": ["compose", "-o", out / "new", "--base", base, f"x={source}"],
        "convert": ["convert", source, out / "new", "--to", "mlx", "--base", base],
    }


def check(ended: Ended, named: str, out: Path, imports: float, seconds: float = SECONDS) -> None:
    assert ended.code == 2, (ended.code, ended.stderr)
    assert "Traceback" not in ended.stderr and "remedy: " in ended.stderr
    assert len(ended.stderr.splitlines()) <= 4 and named in ended.stderr, ended.stderr
    assert not any(out.iterdir())
    assert ended.cpu_seconds < seconds and ended.seconds < seconds * PATIENCE, ended
    assert ended.megabytes < imports + MEGABYTES, ended.megabytes


def cut(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def other_method(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"LORA"', '"IA3"'))


def hostile_pickle(folder: Path) -> None:
    import torch

    class Bad:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (folder / "EXECUTED",)

    torch.save({"a.lora_A.weight": Bad()}, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (cut, "adapter_model.safetensors is incomplete"),
        (other_method, "peft_type: IA3"),
        pytest.param(hostile_pickle, "adapter_model.bin", marks=pytest.mark.slow),  # imports torch twice
    ],
)
def test_a_refusal_is_quick(
    run: Run,
    tiny_llama: Path,
    make_adapter: Callable[..., Path],
    tmp_path: Path,
    change: Callable[[Path], None],
    named: str,
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(make_adapter(tiny_llama, "refused"), source)
    out.mkdir()
    change(source)
    torch = change is hostile_pickle
    imports = run(sys.executable, "-c", "import torch, numpy").megabytes if torch else 0.0
    which = "convert" if torch else "compose"
    ended = run(*COMMAND, *commands(source, tiny_llama, out)[which])
    check(ended, named, out, imports, 5.0 if torch else SECONDS)
    assert torch or ended.megabytes < 150, "torch was imported"
    assert not (source / "EXECUTED").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_refused_case(
    run: Run, cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row of the known cases that is refused, by the command itself; the table is in the output."""
    lines: list[str] = []
    slowest: list[tuple[float, float]] = []
    for line in (cases / "INDEX.tsv").read_text().splitlines()[1:]:
        place, base_name, must = line.split("\t")[:3]
        source, base = cases / place, cases / "bases" / base_name
        if not base.is_dir() or place.startswith("routing/") or place.endswith("_names"):
            continue
        try:
            read_adapter("x", parse_ref(str(source)), read_structure(base), allow_noop="noop" in must)
            assert not must.startswith("refused") or "noted" in must, place
            continue
        except InputError:
            assert "refused" in must or "never" in must, place
        for name, arguments in commands(source, base, tmp_path).items():
            ended = run(*COMMAND, *arguments)
            check(ended, source.name, tmp_path, 0.0)
            slowest.append((ended.cpu_seconds, ended.seconds))
            said = ended.stderr.replace(str(cases) + "/", "").partition("\n")[0]
            lines.append(f"{name:8} {ended.cpu_seconds:4.2f} s CPU {ended.megabytes:4.0f} MB  {said[:150]}")
    same = [cases / "bad" / "duplicate_names" / n / "expert" for n in "ab"]
    if all(folder.is_dir() for folder in same):
        out = ["compose", "-o", tmp_path / "new", "--base", cases / "bases" / "llama"]
        check(run(*COMMAND, *out, *same), "expert", tmp_path, 0.0)
    with capsys.disabled():
        cpu, clock = (max(each) for each in zip(*slowest, strict=True))
        print("\n" + "\n".join(lines) + f"\nslowest {cpu:.2f} s CPU, {clock:.2f} s by the clock")  # noqa: T201
    assert len(lines) >= 60
