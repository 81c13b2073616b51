"""molora chat under a pseudo-terminal, seen through a terminal emulator."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")

START = "from molora_cli.app import main; main()"
ENDLESS = ("--max-new-tokens", "200", "--ignore-eos")


@pytest.fixture
def bundle(chat_bundle: Path) -> Path:
    return chat_bundle


class Terminal:
    """A child on a pseudo-terminal and the screen that a user would see."""

    def __init__(self, arguments: list[str], columns: int, environment: dict[str, str]) -> None:
        self.screen = pyte.HistoryScreen(columns, 40, history=2000)
        self._stream = pyte.Stream(self.screen)
        self.raw = ""
        self.child = pexpect.spawn(
            sys.executable,
            ["-c", START, *arguments],
            dimensions=(40, columns),
            env={**os.environ, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment},
            encoding="utf-8",
            codec_errors="replace",
            timeout=60,
        )
        self.child.logfile_read = self

    def write(self, text: str) -> None:
        self.raw += text
        self._stream.feed(text)
        if "\x1b[6n" in text:  # the line editor asks where the cursor is
            self.child.send(f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R")

    def flush(self) -> None:
        pass

    def type(self, line: str) -> None:
        self.child.send(line + "\r")

    def wait(self, pattern: str) -> None:
        self.child.expect(pattern)

    def exit_code(self) -> int:
        self.child.expect(pexpect.EOF)
        self.child.close()
        assert "Traceback" not in self.raw
        return int(self.child.exitstatus)

    @property
    def lines(self) -> list[str]:
        past = [
            "".join(row[x].data for x in range(self.screen.columns)).rstrip()
            for row in self.screen.history.top
        ]
        return [*past, *(line.rstrip() for line in self.screen.display)]


Spawn = Callable[..., Terminal]


@pytest.fixture
def spawn(bundle: Path) -> Iterator[Spawn]:
    made: list[Terminal] = []

    def start(*arguments: str, columns: int = 80, **environment: str) -> Terminal:
        made.append(Terminal(["chat", str(bundle), *arguments], columns, environment))
        return made[-1]

    yield start
    for terminal in made:
        terminal.child.close(force=True)


def test_a_tour_of_the_slash_commands(spawn: Spawn, tmp_path: Path) -> None:
    terminal = spawn("--max-new-tokens", "8", "--ignore-eos")
    terminal.wait("loading")
    terminal.wait("Ctrl-D leaves")
    file = tmp_path / "talk.json"
    for line, answer in [
        ("hello", "8 tokens"),
        ("/why 2", "token 2"),
        ("/regen", "8 tokens"),
        ("/only code", "every token takes code"),
        ("again", "code 100 %"),
        ("/mute math", "/auto first"),
        ("/auto", "among all"),
        ("/mute math", "muted: math"),
        ("/set temperature 0.5", "temperature is 0.5"),
        ("/system be brief", "system: be brief"),
        ("/show", "be brief"),
        ("/stats", "in 3 answers"),
        (f"/save {file}", "saved as"),
        ("/clear", "empty"),
        (f"/load {file}", "4 turns"),
        ("/hepl", r"did you mean"),
        ("/help", "take up a saved"),
        ('"""one\rtwo"""', "8 tokens"),
        ("one\x1b\rtwo", "8 tokens"),
    ]:
        terminal.type(line)
        terminal.wait(answer)
    terminal.child.send("/sav\t")
    terminal.wait("/save")
    terminal.type(f" {tmp_path / 'other.json'}")
    terminal.wait("saved as")
    terminal.type("/exit")
    assert terminal.exit_code() == 0
    assert '"one\\ntwo"' in (tmp_path / "other.json").read_text()
    assert (tmp_path / "other.json").read_text().count('"one\\ntwo"') == 2
    history = Path(os.environ["MOLORA_HOME"]) / "chat_history"
    assert "+hello" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_answer_then_the_program(spawn: Spawn) -> None:
    terminal = spawn(*ENDLESS)
    terminal.wait("Ctrl-D leaves")
    terminal.type("hello")
    terminal.wait(r"x0f")
    terminal.child.kill(signal.SIGINT)
    terminal.wait("interrupted")
    terminal.wait("stays in the conversation")
    terminal.type("/set max_new_tokens 4")
    terminal.wait("is 4")
    terminal.type("and?")
    terminal.wait("4 tokens")
    terminal.child.send("half a line\x03")
    terminal.child.send("\x03")
    terminal.wait("Ctrl-C again leaves")
    terminal.child.send("\x03")
    assert terminal.exit_code() == 130


def test_forty_columns_without_colour(spawn: Spawn) -> None:
    terminal = spawn("--max-new-tokens", "60", "--ignore-eos", columns=40, NO_COLOR="1")
    terminal.wait("Ctrl-D leaves")
    terminal.type("hello")
    terminal.wait("60 tokens")
    terminal.child.send("\x04")
    assert terminal.exit_code() == 0
    seen = "\n".join(terminal.lines)
    assert "m math" in seen and "c·" in seen
    assert not re.search(r"\x1b\[[0-9;]*[34]8;", terminal.raw)


def test_a_dumb_terminal(spawn: Spawn) -> None:
    terminal = spawn("--max-new-tokens", "8", "--ignore-eos", TERM="dumb", COLUMNS="0")
    terminal.wait("Ctrl-D leaves")
    terminal.type("hello")
    terminal.wait("8 tokens")
    terminal.type("/exit")
    assert terminal.exit_code() == 0
    assert "\x1b" not in terminal.raw


@pytest.mark.parametrize("columns", [10, 11, 80])
def test_double_width_letters_at_the_edge(columns: int) -> None:
    import io

    from rich.console import Console

    from molora_cli.core.generate import TokenEvent, TokenRoute
    from molora_cli.views.chat import AnswerPrinter
    from molora_cli.views.palette import Palette

    answer = "日本語のa文章です。\n```\nかな漢字b交じりの長い行\n```\n終わり"
    console = Console(file=io.StringIO(), force_terminal=True, width=columns, _environ={"TERM": "xterm"})
    printer = AnswerPrinter(console, Palette(("math",), console))
    for letter in answer:
        printer.token(TokenEvent(0, letter, TokenRoute(((0,),), ((1.0,),), (("math",),)), -1.0))
    printer.end()
    screen = pyte.Screen(columns, 60)
    pyte.Stream(screen).feed(console.file.getvalue().replace("\n", "\r\n"))  # type: ignore[attr-defined]
    assert re.sub(r"\s", "", "".join(screen.display)) == re.sub(r"\s", "", answer)


def test_a_closed_pipe_ends_quietly(bundle: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", START, "chat", str(bundle), "-q", "-p", "x", *ENDLESS],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(1)
    child.stdout.close()
    errors = child.stderr.read().decode()
    assert child.wait(timeout=120) == 1
    assert "Traceback" not in errors and "Exception" not in errors
