"""`molora run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.errors import InputError
from molora_cli.out import Out
from molora_cli.recipes import sections

EPILOG = """\b
Examples:
  molora run recipes/smollm2-four-domains.yaml
  molora run my-recipe.yaml --only compose --only attach-router --force
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("run", epilog=EPILOG)(command)


def command(
    ctx: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="YAML recipe; its keys are commands.")],
    only: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--only", help="Run this step alone; may be given again."),
    ] = None,
    force: options.Force = False,
    quiet: options.Quiet = False,
) -> None:
    """Run every step of a recipe, in the order in which they stand there.

    Each step is the command of that name with --recipe; a step that fails ends the run.
    """
    out = Out(quiet=quiet)
    root: Any = ctx.find_root().command
    steps = sections(recipe)
    unknown = [name for name in only or [] if name not in steps]
    if unknown:
        raise InputError(f"{recipe} has no step '{unknown[0]}'", f"it has: {', '.join(steps)}")
    chosen = [name for name in steps if not only or name in only]
    flags = [*(["--force"] if force else []), *(["--quiet"] if quiet else [])]
    for number, name in enumerate(chosen, start=1):
        out.note(f"\n[{number}/{len(chosen)}] molora {name} --recipe {recipe}")
        step = root.get_command(ctx, name)
        known = {option for parameter in step.params for option in parameter.opts}
        root.main(
            args=[name, "--recipe", str(recipe), *(f for f in flags if f in known)], standalone_mode=False
        )
