"""molora chat under a pseudo-terminal, seen through a terminal emulator."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from molora_cli.views.repl_commands import COMMANDS

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")

START = "from molora_cli.app import main; main()"
ENDLESS = ("--max-new-tokens", "200", "--ignore-eos")
READY = "Ctrl-D leaves"


@pytest.fixture
def bundle(chat_bundle: Path) -> Path:
    return chat_bundle


# the line editor takes pastes in one piece while its prompt is there
OPEN, SHUT = "\x1b[?2004h", "\x1b[?2004l"


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
            timeout=120,
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
        """Type a line once the prompt is there: what comes before it may be read by nobody."""
        if self.raw.count(OPEN) and self.raw.count(OPEN) <= self.raw.count(SHUT):
            self.child.expect(re.escape(OPEN))
        self.child.send(line + "\r")

    def paste(self, text: str) -> None:
        """More than the pseudo-terminal holds at once: written beside the reading."""

        def write() -> None:
            data = text.encode()
            while data:
                data = data[os.write(self.child.fileno(), data[:4096]) :]

        threading.Thread(target=write, daemon=True).start()

    def wait(self, pattern: str) -> None:
        self.child.expect(pattern)

    def shows(self, text: str) -> None:
        """Wait until the screen has it: an editor may write a word in several pieces."""
        while text not in "\n".join(self.screen.display):
            self.child.expect(r"[\s\S]+")

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


# what is typed and what the screen then shows; {tmp} is a folder, {new} an adapter
TOUR = [
    ("hello", "8 tokens"),
    ("/why", "/why N explains"),
    ("/why 2", "token 2"),
    ("/regen", "8 tokens"),
    ("/compare", "nothing of this enters"),
    ("/compare code what?", "code  +8 tokens"),
    ("/routing bars", "bars under each answer"),
    ("again", r"\d+ %.*8 tokens"),
    ("/routing off", "plain text"),
    ("/routing colour", "by colour"),
    ("/only code", "every token takes code"),
    ("again", "code 100 %"),
    ("/mute math", "/auto first"),
    ("/auto", "among all"),
    ("/mute math", "muted: math"),
    ("/auto", "among all"),
    ("/topk 1", "gives a token 1 adapter"),
    ("/temperature 0.5", "temperature is 0.5: tokens are drawn"),
    ("/set router-temperature 2", "router-temperature is 2"),
    ("/system be brief", "system: be brief"),
    ("/show", "be brief"),
    ("/stats", "in 4 answers"),
    ("/trace {tmp}/r.trace", "routes saved"),
    ("/report {tmp}/r.html", "open it in a browser"),
    ("/save {tmp}/talk.json", "saved as"),
    ("/clear", "empty"),
    ("/load {tmp}/talk.json", "6 turns"),
    ("/load legal={new}", r"in \d\.\d\d s"),
    ("/only legal", "every token takes legal"),
    ("and?", "legal 100 %"),
    ("/hepl", r"did you mean"),
    ("/help", "take up a saved"),
    ('"""one\rtwo"""', "8 tokens"),
    ("one\x1b\rtwo", "8 tokens"),
]


def test_the_tour_passes_every_command() -> None:
    typed = {line.split()[0][1:] for line, _ in TOUR if line.startswith("/")}
    assert set(COMMANDS) - typed == {"exit"}, "a slash command that the tour does not try"


def test_a_tour_of_the_slash_commands(spawn: Spawn, tmp_path: Path, trio: dict[str, Path]) -> None:
    terminal = spawn("--max-new-tokens", "8", "--ignore-eos")
    terminal.wait("loading")
    terminal.wait(READY)
    for line, answer in TOUR:
        terminal.type(line.replace("{tmp}", str(tmp_path)).replace("{new}", str(trio["new"])))
        terminal.wait(answer)
    terminal.child.send("/sav\t")
    terminal.shows("> /save")
    terminal.type(f" {tmp_path / 'other.json'}")
    terminal.wait("saved as")
    terminal.type("/exit")
    assert terminal.exit_code() == 0
    assert (tmp_path / "other.json").read_text().count('"one\\ntwo"') == 2
    history = Path(os.environ["MOLORA_HOME"]) / "chat_history"
    assert "+hello" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_ctrl_c_stops_the_answer_then_the_program(spawn: Spawn) -> None:
    terminal = spawn(*ENDLESS)
    terminal.wait(READY)
    terminal.type("hello")
    terminal.wait(r"x0f")
    terminal.child.kill(signal.SIGINT)
    terminal.wait("interrupted")
    terminal.wait("stays in the conversation")
    terminal.type("/compare")
    terminal.wait("router.*│.*base.*│")
    terminal.child.kill(signal.SIGINT)
    terminal.wait("nothing of this enters")
    # another size of the screen in the middle of an answer
    terminal.type("/regen")
    terminal.wait(r"x0f")
    terminal.screen.resize(lines=40, columns=50)
    terminal.child.setwinsize(40, 50)
    terminal.wait("200 tokens")
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
    # a shell may have exported the width that the window had
    terminal = spawn("--max-new-tokens", "60", "--ignore-eos", columns=40, NO_COLOR="1", COLUMNS="80")
    terminal.wait(READY)
    terminal.type("hello")
    terminal.wait("60 tokens")
    terminal.type("/set max-new-tokens 9")
    terminal.wait("is 9")
    terminal.type("/compare")
    terminal.wait(r"\[router\]")
    terminal.wait(r"\[base\]")
    terminal.wait("nothing of this enters")
    terminal.type("/routing bars")
    terminal.wait("bars")
    terminal.type("more")
    terminal.wait(r"(mmm|ccc|---) +\d+ %")
    terminal.type("/help")
    terminal.wait("add an adapter")
    terminal.child.send("\x04")
    assert terminal.exit_code() == 0
    seen = "\n".join(terminal.lines)
    assert "m math" in seen and "c·" in seen
    assert not re.search(r"\x1b\[[0-9;]*[34]8;", terminal.raw)


@pytest.mark.slow
def test_a_dumb_terminal(spawn: Spawn) -> None:
    terminal = spawn("--max-new-tokens", "8", "--ignore-eos", TERM="dumb", COLUMNS="0")
    terminal.wait(READY)
    terminal.type("hello")
    terminal.wait("8 tokens")
    terminal.type("/compare")
    terminal.wait(r"\[base\]")
    terminal.wait("nothing of this enters")
    # one line of a megabyte: the terminal keeps 4095 bytes of it
    terminal.paste("x" * 1_000_000 + "\r")
    terminal.wait("4095 bytes")
    # many lines at once are one question
    terminal.paste("a line of no great length\r" * 150)
    terminal.wait(r"the prompt has \d+ tokens and this base holds 256")
    terminal.type("/stats")
    terminal.wait("8 tokens in 1 answer")
    terminal.type("/exit")
    assert terminal.exit_code() == 0
    assert "\x1b" not in terminal.raw


def paste_a_megabyte(terminal: Terminal) -> None:
    megabyte = "a line of eighty letters, say, as they are in a text of no great beauty at all\r" * 12_500
    terminal.paste(f"\x1b[200~{megabyte}\x1b[201~")
    terminal.wait(r"\[paste 1: 987,500 characters\]")
    terminal.child.send("\r")
    terminal.wait(r"the prompt has \d+ tokens and this base holds 256")
    terminal.wait("shorten the prompt")
    # a terminal that does not say where a paste begins: its lines are no questions either
    terminal.paste(megabyte)
    terminal.wait(r"\[paste 2: 987,500 characters\]")
    terminal.child.send("\x03")
    terminal.paste("\x1b[200~a short one\rof two lines\x1b[201~")
    terminal.wait("of two lines")
    terminal.child.send("\r")
    terminal.wait("8 tokens")


@pytest.mark.slow
def test_a_terminal_of_plain_ascii_takes_a_megabyte(spawn: Spawn) -> None:
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    terminal = spawn("--max-new-tokens", "8", "--ignore-eos", NO_COLOR="1", **plain)
    terminal.wait(READY)
    terminal.type("hällo")
    terminal.wait("8 tokens")
    terminal.type("/why 1")
    terminal.wait("decided at the token before")
    terminal.type("/compare")
    terminal.wait(r" \| base")
    terminal.wait("nothing of this enters")
    terminal.type("/routing bars")
    terminal.wait("bars")
    terminal.type("more")
    terminal.wait(r"(mmm|ccc|---) +\d+ %")
    paste_a_megabyte(terminal)
    terminal.child.send("\x04")
    assert terminal.exit_code() == 0
    assert re.search(r"[mc]:\S", terminal.raw) and terminal.raw.isascii()


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


@pytest.mark.slow
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


def test_a_closed_pipe_ends_a_conversation_quietly(bundle: Path) -> None:
    import pty

    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", START, "chat", str(bundle), *ENDLESS],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
    )
    os.close(theirs)
    assert child.stdout is not None
    os.write(ours, b"hello\r")
    child.stdout.read(1)
    child.stdout.close()
    seen = b""
    with contextlib.suppress(OSError):  # nobody holds the other end any more
        while data := os.read(ours, 4096):
            seen += data
    os.close(ours)
    assert child.wait(timeout=120) == 1
    assert b"Traceback" not in seen and b"Exception" not in seen
