"""Full disks, read-only folders, signals, two writers and hostile links: real ones, in other processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.core.bundle.store import Bundle
from molora_cli.errors import InputError

# real signals and full disks: minutes on two busy cores
pytestmark = pytest.mark.slow

Make = Callable[..., Path]
# Imports take most of a command's time: one process imports, computes nothing, and forks for every command.
SERVER = """
import json, os, resource, signal, sys
import peft, torch, transformers
import molora_cli.app, molora_cli.core.bundle.edit, molora_cli.core.compose, molora_cli.core.convert.run
import molora_cli.core.effect
print('ready', flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if 'wait' in job:
        print(os.waitstatus_to_exitcode(os.waitpid(job['wait'], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid:
        print(pid, flush=True)
        continue
    for number, name in ((1, 'out'), (2, 'err')):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), number)
    sys.argv = ['molora', *job['arguments']]
    exec(job['code'])
    if job['limit']:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (job['limit'], job['limit']))
    molora_cli.app.main()
"""
# the measurement of effects and the comparison of logits take time and write nothing
QUICK = """
import os, signal, sys, time
import molora_cli.core.compose as compose
from molora_cli.core.bundle.manifest import Effect
effect = Effect(max_abs=1, rms=1, base_rms=1)
compose.measure_effect = lambda work, ticker: ({a.name: effect for a in work.adapters}, {})
import molora_cli.core.convert.verify as verify

verify.Probe.of = classmethod(lambda cls, work, ticker=None: None)
def hold():
    print('holding', flush=True)
    time.sleep(60)
"""


class Job:
    """A command in a process of its own."""

    def __init__(self, server: Server, arguments: list[object], code: str = "", limit: int = 0) -> None:
        self.server = server
        self.out, self.err = (server.folder / f"{server.count}.{name}" for name in ("out", "err"))
        server.count += 1
        self.out.touch()
        self.err.touch()
        self.pid = server.ask(
            {
                "arguments": [*map(str, arguments)],
                "code": QUICK + code,
                "limit": limit,
                "out": str(self.out),
                "err": str(self.err),
            }
        )

    def until(self, word: str) -> None:
        """Wait until it prints `word`."""
        deadline = time.monotonic() + 60
        while word not in self.out.read_text():
            assert time.monotonic() < deadline, self.err.read_text()
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> tuple[int, str]:
        """Its exit code (minus the signal that killed it) and what it wrote to stderr."""
        code = self.server.ask({"wait": self.pid})
        return code, self.err.read_text()


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, request: dict[str, object]) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return int(self._line())

    def start(self, arguments: list[object], code: str = "", limit: int = 0) -> Job:
        return Job(self, arguments, code, limit)

    def run(self, arguments: list[object], code: str = "", limit: int = 0) -> tuple[int, str]:
        return self.start(arguments, code, limit).end()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(60)


@pytest.fixture(scope="module")
def sources(tiny_llama: Path, trio: dict[str, Path], make_adapter: Make) -> dict[str, Path]:
    wide = {"r": 64, "target_modules": "all-linear"}
    return {**trio, "big": make_adapter(tiny_llama, "r-big", seed=3, **wide)}  # 1.4 MB


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def jobs(base: Path, sources: dict[str, Path], pair: Path, out: Path) -> dict[str, list[object]]:
    """One command of each writer; `big` goes into each."""
    common = ["--base", base, "-q"]
    return {
        "compose": ["compose", "-o", out / "new", f"big={sources['big']}", *common],
        "add": ["add", pair, f"big={sources['big']}", "-q"],
        "mlx": ["convert", sources["big"], out / "new", "--to", "mlx", *common],
        "gguf": ["convert", sources["big"], out / "new.gguf", "--to", "gguf", *common],
        "merged-model": ["convert", sources["big"], out / "new", "--to", "merged-model", *common],
    }


JOBS = ("compose", "add", "mlx", "gguf", "merged-model")


# -- full disk ---------------------------------------------------------------------
@contextlib.contextmanager
def tmpfs(place: Path, options: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a tmpfs")
    place.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("job", JOBS)
def test_a_full_disk(
    server: Server, tiny_llama: Path, sources: dict[str, Path], made_pair: Path, tmp_path: Path, job: str
) -> None:
    with tmpfs(tmp_path / "small", "size=700k") as disk:
        pair = Path(shutil.copytree(made_pair, disk / "pair"))
        before = tree(disk)
        code, stderr = server.run(jobs(tiny_llama, sources, pair, disk)[job])
        assert code == 1 and "Traceback" not in stderr, (code, stderr)
        assert "space" in stderr or "free" in stderr, stderr
        assert tree(disk) == before
        assert [p.name for p in disk.iterdir()] == ["pair"]


@pytest.mark.parametrize("job", JOBS)
def test_a_limit_on_file_sizes(
    server: Server, tiny_llama: Path, sources: dict[str, Path], pair: Path, tmp_path: Path, job: str
) -> None:
    before = tree(tmp_path)
    code, stderr = server.run(jobs(tiny_llama, sources, pair, tmp_path)[job], limit=100_000)
    assert code == 1 and "Traceback" not in stderr, (code, stderr)
    assert tree(tmp_path) == before


# -- read-only ------------------------------------------------------------------------
@pytest.mark.parametrize("job", JOBS)
def test_a_read_only_disk(
    server: Server, tiny_llama: Path, sources: dict[str, Path], made_pair: Path, tmp_path: Path, job: str
) -> None:
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        pair = Path(shutil.copytree(made_pair, disk / "pair"))
        before = tree(disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, stderr = server.run(jobs(tiny_llama, sources, pair, disk)[job])
        assert code == 2 and "Traceback" not in stderr, (code, stderr)
        assert "writ" in stderr or "changed" in stderr, stderr
        assert tree(disk) == before
        bundle = Bundle.open(pair)  # reading needs no writing
        bundle.verify()


# -- signals ---------------------------------------------------------------------------
# where each writer stands when the signal comes: its folder is there and half filled
HELD = {
    "compose": "import molora_cli.core.compose as m\nm.write_peft = lambda *a: hold()\n",
    "add": "import molora_cli.core.bundle.edit as m\nm.write_peft = lambda *a: hold()\n",
    "mlx": "import molora_cli.core.convert.run as m\nm.compare_written = lambda *a, **k: hold()\n",
    "gguf": "import molora_cli.core.convert.run as m\nm.compare_written = lambda *a, **k: hold()\n",
    "merged-model": "import molora_cli.core.convert.merged_model as m\nm._write_record = lambda *a: hold()\n",
}


def interrupted(
    server: Server, arguments: list[object], job: str, number: signal.Signals, place: Path
) -> tuple[int, str]:
    running = server.start(arguments, HELD[job])
    running.until("holding")
    assert any(".tmp-" in p.name for p in place.iterdir())
    running.send(number)
    return running.end()


@pytest.mark.parametrize("job", JOBS)
def test_ctrl_c_leaves_nothing(
    server: Server, tiny_llama: Path, sources: dict[str, Path], pair: Path, tmp_path: Path, job: str
) -> None:
    before = tree(tmp_path)
    arguments = jobs(tiny_llama, sources, pair, tmp_path)[job]
    code, stderr = interrupted(server, arguments, job, signal.SIGINT, tmp_path)
    assert code == 130 and "Traceback" not in stderr, stderr
    assert tree(tmp_path) == before and [p.name for p in tmp_path.iterdir()] == ["pair"]


@pytest.mark.parametrize("job", JOBS)
def test_a_kill_leaves_nothing_that_opens_and_the_next_run_clears_it(
    server: Server, tiny_llama: Path, sources: dict[str, Path], pair: Path, tmp_path: Path, job: str
) -> None:
    before = tree(pair)
    arguments = jobs(tiny_llama, sources, pair, tmp_path)[job]
    code, _ = interrupted(server, arguments, job, signal.SIGKILL, tmp_path)
    assert code == -signal.SIGKILL
    assert tree(pair) == before
    left = [p for p in tmp_path.iterdir() if p.name != "pair"]
    assert len(left) == 1 and left[0].name.startswith(".")  # hidden, and named for what it is
    if job in ("compose", "add"):
        assert isinstance(cli("inspect", left[0]).exception, InputError)
    code, stderr = server.run(arguments)
    assert code == 0, stderr
    assert not any(p.name.startswith(".") for p in tmp_path.iterdir())


def test_a_kill_after_the_exchange(
    server: Server, sources: dict[str, Path], pair: Path, tmp_path: Path
) -> None:
    """Old and new change places in one step: a reader finds one of them at any time."""
    after = (
        "import molora_cli.core.bundle.writing as m\n"
        "swap = m._exchange\n"
        "m._exchange = lambda *a: swap(*a) and os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, _ = server.run(["add", pair, f"big={sources['big']}", "-q"], after)
    if code == 0:
        pytest.skip("this disk cannot exchange two folders")
    assert code == -signal.SIGKILL
    assert Bundle.open(pair).adapters == ("one", "two", "big")
    Bundle.open(pair).verify()
    assert cli("remove", pair, "one", "-q").exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["pair"]


def test_a_kill_between_two_renames(
    server: Server, sources: dict[str, Path], pair: Path, tmp_path: Path
) -> None:
    """A disk that cannot exchange: the moment when the old bundle is aside and the new one not yet there."""
    before = tree(pair)
    between = (
        "import molora_cli.core.bundle.writing as m\n"
        "m._exchange = lambda *a: False\n"
        "from pathlib import Path\n"
        "rename = Path.rename\n"
        "def once(self, target):\n"
        "    if '.tmp-' in self.name: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rename(self, target)\n"
        "Path.rename = once\n"
    )
    code, _ = server.run(["add", pair, f"big={sources['big']}", "-q"], between)
    assert code == -signal.SIGKILL and not pair.exists()
    assert cli("remove", pair, "one", "-q").exit_code == 0  # the old one is back, and is changed
    assert Bundle.open(pair).adapters == ("two",)
    kept = {p: data for p, data in before.items() if p.startswith("adapters/two/")}
    assert {p: data for p, data in tree(pair).items() if p.startswith("adapters/")} == kept
    assert [p.name for p in tmp_path.iterdir()] == ["pair"]


# -- two writers -------------------------------------------------------------------------
def test_two_writers_of_one_place(
    server: Server, tiny_llama: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    arguments: list[object] = [
        "convert",
        sources["one"],
        tmp_path / "new",
        "--to",
        "mlx",
        "--base",
        tiny_llama,
        "-q",
    ]
    go = server.folder / "go"
    gate = (
        "import molora_cli.core.convert.run as m\n"
        "check = m.compare_written\n"
        "def wait(*a, **k):\n"
        "    print('ready', flush=True)\n"
        f"    while not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
        "    return check(*a, **k)\n"
        "m.compare_written = wait\n"
    )
    both = [server.start(arguments, gate) for _ in range(2)]
    for running in both:  # both are sure that the place is free
        running.until("ready")
    go.touch()
    ends = sorted(running.end() for running in both)
    assert [code for code, _ in ends] == [0, 2] and "meanwhile" in ends[1][1]
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    assert (
        cli("convert", tmp_path / "new", tmp_path / "back", "--to", "peft", "--base", tiny_llama).exit_code
        == 0
    )


def test_two_changes_of_one_bundle(server: Server, sources: dict[str, Path], pair: Path) -> None:
    holding = server.start(["add", pair, f"big={sources['big']}", "-q"], HELD["add"])
    holding.until("holding")
    result = cli("remove", pair, "one")
    assert isinstance(result.exception, InputError) and "being changed" in result.exception.message
    holding.send(signal.SIGINT)
    assert holding.end()[0] == 130
    assert cli("remove", pair, "one").exit_code == 0
    assert Bundle.open(pair).adapters == ("two",)


def test_a_source_that_shrinks_is_no_traceback(
    server: Server, tiny_llama: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources["one"], tmp_path / "one"))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[:3]), folder / "adapter_model.safetensors")
    code, stderr = server.run(["convert", folder, tmp_path / "new", "--to", "mlx", "--base", tiny_llama])
    assert code == 2 and "Traceback" not in stderr and not (tmp_path / "new").exists()
