"""The examples of the command reference are what the commands take; nothing is run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import typer

from molora_cli.app import COMMANDS, app

ROOT = Path(__file__).parents[1]


def examples() -> list[str]:
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```sh\n(.+?)^```", text, re.M | re.S)
    return [line for fence in fences for line in fence.splitlines()]


def test_examples_of_the_reference_are_what_the_commands_take() -> None:
    """Options, and the kinds of their values."""
    group = typer.main.get_command(app)
    found = examples()
    assert len(found) >= 2 * len(COMMANDS)
    for line in found:
        words = shlex.split(line.split("|")[-1])
        command = group.get_command(None, words[1])  # type: ignore[attr-defined]
        assert words[0] == "molora" and command is not None, line
        command.make_context(words[1], words[2:])  # raises for an option or a value that is none
