"""Options that several commands share, so that one flag means one thing everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

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
Seed = Annotated[int, typer.Option("--seed", help="The same seed gives the same result on one machine.")]
Data = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--data", help="NAME=FILE (JSON Lines) per adapter, or one FILE whose rows carry a label."),
]
Recipe = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--recipe", help="YAML recipe with these options; flags win over it."),
]
