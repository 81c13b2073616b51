"""Full disks, read-only folders, signals, two writers and hostile links: real ones, in other processes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
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

Make = Callable[..., Path]
# the measurement of effects and the comparison of logits take most of the time and write nothing
QUICK = """
import os, signal, sys, time
import molora_cli.core.compose as compose
import molora_cli.core.bundle.writing as writing
from molora_cli.core.bundle.manifest import Effect
effect = Effect(max_abs=1, rms=1, base_rms=1)
compose.measure_effect = lambda work, ticker: ({a.name: effect for a in work.adapters}, {})
if 'convert' in sys.argv:
    import molora_cli.core.convert.verify as verify
    verify.Probe.of = classmethod(lambda cls, work, ticker=None: None)
def hold():
    print('holding', flush=True)
    time.sleep(60)
"""
GO = "\nfrom molora_cli.app import main\nmain()\n"


@pytest.fixture(scope="module")
def sources(tiny_llama: Path, make_adapter: Make) -> dict[str, Path]:
    wide = {"r": 64, "target_modules": "all-linear"}
    return {
        "one": make_adapter(tiny_llama, "r-one", seed=1),
        "two": make_adapter(tiny_llama, "r-two", seed=2),
        "big": make_adapter(tiny_llama, "r-big", seed=3, **wide),  # 1.4 MB
    }


@pytest.fixture(scope="module")
def made(tiny_llama: Path, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "pair"
    pairs = [f"{name}={sources[name]}" for name in ("one", "two")]
    result = cli("compose", "-o", folder, "--base", tiny_llama, *pairs, "-q")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def pair(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "pair"))


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def start(arguments: list[object], code: str = "", **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", QUICK + code + GO, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def run(arguments: list[object], code: str = "", **options: object) -> tuple[int, str]:
    process = start(arguments, code, **options)
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr


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
    tiny_llama: Path, sources: dict[str, Path], made: Path, tmp_path: Path, job: str
) -> None:
    with tmpfs(tmp_path / "small", "size=700k") as disk:
        pair = Path(shutil.copytree(made, disk / "pair"))
        before = tree(disk)
        code, stderr = run(jobs(tiny_llama, sources, pair, disk)[job])
        assert code == 1 and "Traceback" not in stderr, (code, stderr)
        assert "space" in stderr or "free" in stderr, stderr
        assert tree(disk) == before
        assert [p.name for p in disk.iterdir()] == ["pair"]


@pytest.mark.parametrize("job", JOBS)
def test_a_limit_on_file_sizes(
    tiny_llama: Path, sources: dict[str, Path], pair: Path, tmp_path: Path, job: str
) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    before = tree(tmp_path)
    code, stderr = run(jobs(tiny_llama, sources, pair, tmp_path)[job], preexec_fn=limit)
    assert code == 1 and "Traceback" not in stderr, (code, stderr)
    assert tree(tmp_path) == before


# -- read-only ------------------------------------------------------------------------
@pytest.mark.parametrize("job", JOBS)
def test_a_read_only_disk(
    tiny_llama: Path, sources: dict[str, Path], made: Path, tmp_path: Path, job: str
) -> None:
    with tmpfs(tmp_path / "disk", "size=4m") as disk:
        pair = Path(shutil.copytree(made, disk / "pair"))
        before = tree(disk)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, stderr = run(jobs(tiny_llama, sources, pair, disk)[job])
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


def interrupted(arguments: list[object], job: str, number: signal.Signals, place: Path) -> tuple[int, str]:
    process = start(arguments, HELD[job])
    assert process.stdout is not None
    first = process.stdout.readline()
    if first != "holding\n":
        raise AssertionError(process.communicate(timeout=60)[1])
    assert any(".tmp-" in p.name for p in place.iterdir())
    time.sleep(0.05)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    return process.returncode, stderr


@pytest.mark.parametrize("job", JOBS)
def test_ctrl_c_leaves_nothing(
    tiny_llama: Path, sources: dict[str, Path], pair: Path, tmp_path: Path, job: str
) -> None:
    before = tree(tmp_path)
    arguments = jobs(tiny_llama, sources, pair, tmp_path)[job]
    code, stderr = interrupted(arguments, job, signal.SIGINT, tmp_path)
    assert code == 130 and "Traceback" not in stderr, stderr
    assert tree(tmp_path) == before and [p.name for p in tmp_path.iterdir()] == ["pair"]


@pytest.mark.parametrize("job", JOBS)
def test_a_kill_leaves_nothing_that_opens_and_the_next_run_clears_it(
    tiny_llama: Path, sources: dict[str, Path], pair: Path, tmp_path: Path, job: str
) -> None:
    before = tree(pair)
    arguments = jobs(tiny_llama, sources, pair, tmp_path)[job]
    code, _ = interrupted(arguments, job, signal.SIGKILL, tmp_path)
    assert code == -signal.SIGKILL
    assert tree(pair) == before
    left = [p for p in tmp_path.iterdir() if p.name != "pair"]
    assert len(left) == 1 and left[0].name.startswith(".")  # hidden, and named for what it is
    if job in ("compose", "add"):
        assert isinstance(cli("inspect", left[0]).exception, InputError)
    code, stderr = run(arguments)
    assert code == 0, stderr
    assert not any(p.name.startswith(".") for p in tmp_path.iterdir())


def test_a_kill_between_the_two_renames(sources: dict[str, Path], pair: Path, tmp_path: Path) -> None:
    """The moment when the old bundle is aside and the new one not yet there."""
    before = tree(pair)
    between = (
        "from pathlib import Path\n"
        "rename = Path.rename\n"
        "def once(self, target):\n"
        "    if '.tmp-' in self.name: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return rename(self, target)\n"
        "Path.rename = once\n"
    )
    code, _ = run(["add", pair, f"big={sources['big']}", "-q"], between)
    assert code == -signal.SIGKILL and not pair.exists()
    assert cli("remove", pair, "one", "-q").exit_code == 0  # the old one is back, and is changed
    assert Bundle.open(pair).adapters == ("two",)
    kept = {p: data for p, data in before.items() if p.startswith("adapters/two/")}
    assert {p: data for p, data in tree(pair).items() if p.startswith("adapters/")} == kept
    assert [p.name for p in tmp_path.iterdir()] == ["pair"]


# -- two writers -------------------------------------------------------------------------
def test_two_writers_of_one_place(tiny_llama: Path, sources: dict[str, Path], tmp_path: Path) -> None:
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
    gate = (
        "import molora_cli.core.convert.run as m\n"
        "check = m.compare_written\n"
        "def wait(*a, **k):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.readline()\n"
        "    return check(*a, **k)\n"
        "m.compare_written = wait\n"
    )
    both = [start(arguments, gate, stdin=subprocess.PIPE) for _ in range(2)]
    for process in both:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    ends = []
    for process in both:  # both were sure that the place is free
        _, stderr = process.communicate("go\n", timeout=60)
        ends.append((process.returncode, stderr))
    assert [code for code, _ in ends] == [0, 2] and "meanwhile" in ends[1][1]
    assert [p.name for p in tmp_path.iterdir()] == ["new"]
    assert (
        cli("convert", tmp_path / "new", tmp_path / "back", "--to", "peft", "--base", tiny_llama).exit_code
        == 0
    )


def test_two_changes_of_one_bundle(sources: dict[str, Path], pair: Path) -> None:
    holding = start(["add", pair, f"big={sources['big']}", "-q"], HELD["add"])
    assert holding.stdout is not None and holding.stdout.readline() == "holding\n"
    result = cli("remove", pair, "one")
    assert isinstance(result.exception, InputError) and "being changed" in result.exception.message
    holding.send_signal(signal.SIGINT)
    holding.communicate(timeout=60)
    assert cli("remove", pair, "one").exit_code == 0
    assert Bundle.open(pair).adapters == ("two",)


# -- links and paths ------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["../outside", "adapters/../../outside", "/etc", "adapters/one/../../.."])
def test_paths_out_of_a_bundle(sources: dict[str, Path], pair: Path, tmp_path: Path, place: str) -> None:
    shutil.copytree(sources["one"], tmp_path / "outside")
    manifest = json.loads((pair / "molora.json").read_text())
    manifest["adapters"][0]["folder"] = place
    (pair / "molora.json").write_text(json.dumps(manifest))
    before = tree(tmp_path)
    for arguments in (
        ("add", pair, f"big={sources['big']}"),
        ("remove", pair, "one"),
        ("convert", pair, tmp_path / "new", "--to", "peft"),
    ):
        result = cli(*arguments)
        assert isinstance(result.exception, InputError), (arguments, result.output)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("name", ["../outside", "/etc", "one/..", "", "."])
def test_names_out_of_a_collection(
    tiny_llama: Path, sources: dict[str, Path], tmp_path: Path, name: str
) -> None:
    shutil.copytree(sources["one"], tmp_path / "all" / "one")
    shutil.copytree(sources["one"], tmp_path / "outside")
    (tmp_path / "all" / "adapters.json").write_text(json.dumps({"adapters": [name]}))
    result = cli("convert", tmp_path / "all", tmp_path / "new", "--to", "bundle", "--base", tiny_llama)
    assert isinstance(result.exception, InputError), result.output
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "what", ["adapters/one", "adapters/one/adapter_model.safetensors", "router.safetensors"]
)
def test_links_out_of_a_bundle(sources: dict[str, Path], pair: Path, tmp_path: Path, what: str) -> None:
    assert cli("attach-router", pair, "--kind", "uniform").exit_code == 0
    target = pair / what
    shutil.move(target, tmp_path / "outside")
    target.symlink_to(tmp_path / "outside")
    before = tree(tmp_path / "pair")
    for arguments in (("remove", pair, "two"), ("add", pair, f"big={sources['big']}", "--dry-run")):
        result = cli(*arguments)
        if what != "router.safetensors" or arguments[0] == "remove":
            assert isinstance(result.exception, InputError), (arguments, result.output)
    assert tree(tmp_path / "pair") == before


def test_strange_files_of_a_bundle_stay_inside(pair: Path, tmp_path: Path) -> None:
    """A link that a user put beside the adapters is kept as a link: what it points at is not copied in."""
    (tmp_path / "secret").write_text("secret")
    (pair / "extra").symlink_to(tmp_path / "secret")
    (pair / "loop").symlink_to(pair / "loop")
    assert cli("remove", pair, "one").exit_code == 0
    assert (pair / "extra").is_symlink() and (pair / "loop").is_symlink()
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_source_that_shrinks_is_no_traceback(
    tiny_llama: Path, sources: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(sources["one"], tmp_path / "one"))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[:3]), folder / "adapter_model.safetensors")
    code, stderr = run(["convert", folder, tmp_path / "new", "--to", "mlx", "--base", tiny_llama])
    assert code == 2 and "Traceback" not in stderr and not (tmp_path / "new").exists()
