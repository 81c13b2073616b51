"""`molora remove`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from molora_cli import options
from molora_cli.out import Out
from molora_cli.text import shorten

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\b
Examples:
  molora remove my-bundle legal
  molora remove my-bundle legal --force --dry-run
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("remove", epilog=EPILOG)(command)


def command(
    bundle: Annotated[Path, typer.Argument(help="Folder of the bundle.")],
    name: Annotated[str, typer.Argument(help="Name of the adapter to take out.")],
    force: Annotated[
        bool, typer.Option("--force", help="Tokens that a rule gives to it take the base.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Take an adapter out of a bundle; the others and their router columns keep every bit."""
    from molora_cli.core.bundle.edit import remove

    out = Out(json_mode=json, quiet=quiet)
    done = remove(bundle, name, force=force, dry_run=dry_run)
    for note in done.notes:
        out.note(note)
    out.result(done.report, lambda console: _show(console, done.report))


def _show(console: Console, document: dict[str, Any]) -> None:
    from rich.text import Text

    did = "removed" if document["written"] else "dry run, nothing written: would remove"
    kept = shorten(", ".join(document["kept"]), 200)
    line = f"{did} {document['removed']} from {shorten(document['bundle'], 200)}; left: {kept}"
    console.print(Text(line), soft_wrap=True)
