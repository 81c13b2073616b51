"""`molora inspect`."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("inspect")(command)


def command() -> None:
    """Placeholder while the house is being built."""
    raise NotImplementedError
