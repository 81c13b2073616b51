"""Options that several commands share, so that one flag means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from molora_cli.errors import InputError
from molora_cli.text import shorten

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is already there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress bar.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done and write nothing.")]
Base = Annotated[
    Optional[str],  # noqa: UP045 - Typer resolves this annotation at run time on Python 3.10
    typer.Option("--base", help="Base model: a folder, a .gguf file, org/name@revision, or smollm2."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code that comes with the base model to run.")
]
Weights = Annotated[
    str,
    typer.Option("--weights", help="Of the base's linears: full, or int8, a byte a weight (CPU)."),
]
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same result on one machine.")]
Data = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--data", help="NAME=FILE (JSON Lines) per adapter, or one FILE whose rows carry a label."),
]
Recipe = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--recipe", help="YAML recipe with these options; flags win over it."),
]


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Layers from "1,3,15"; None = none were given. Raises InputError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        raise InputError(f"--taps {shorten(text, 40)}: no layers", "write numbers with commas: --taps 1,3,15")
    return tuple(int(part) for part in parts)
