"""The house itself: imports, the `kernels` trap, start-up, help texts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# pydantic is not listed: Typer itself loads it to describe a command's parameters
HEAVY = ("torch", "rich", "transformers", "peft", "triton", "numpy", "matplotlib")


def run_python(code: str, *, cwd: Path = ROOT) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code]
        if sys.version_info >= (3, 11)
        else [sys.executable, "-I", "-c", code],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands() -> list[str]:
    from typer.main import get_command

    from molora_cli.app import app

    return sorted(get_command(app).commands)  # type: ignore[attr-defined]


def test_kernels_never_resolves_inside_the_repository() -> None:
    code = "import importlib.util as u; s = u.find_spec('kernels'); print('' if s is None else s.origin)"
    assert str(ROOT) not in run_python(code)
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["compose", "--help"], ["chat", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys, json\n"
        f"sys.argv = ['molora', *{arguments!r}]\n"
        "from molora_cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leave: code = leave.code\n"
        f"print('\\n@' + json.dumps([code, [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    code_and_modules = json.loads(run_python(code).rsplit("@", 1)[1])
    assert code_and_modules == [0, []]


def test_library_exports_are_lazy() -> None:
    code = (
        "import sys, molora_cli; assert 'torch' not in sys.modules; "
        "from molora_cli import Trace; assert 'torch' not in sys.modules; "
        "from molora_cli import Route, RoutedModel, load; print(load.__module__)"
    )
    assert run_python(code).strip() == "molora_cli.core.routed.model"


@pytest.mark.parametrize("name", commands())
def test_every_command_ends_with_two_examples(name: str) -> None:
    from typer.testing import CliRunner

    from molora_cli.app import app

    text = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert text.count(f"molora {name} ") >= 3, "usage line and two runnable examples"


def test_command_reference_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_python_files_stay_small() -> None:
    folders = ("molora_cli", "kernels", "recipes", "tests", "docs")
    sizes = {p: len(p.read_text().splitlines()) for f in folders for p in (ROOT / f).rglob("*.py")}
    assert {str(p.relative_to(ROOT)): n for p, n in sizes.items() if n > 430} == {}
