"""The Typer app, `main()`, and the one place where errors become exit codes."""

from __future__ import annotations

import importlib
import io
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from molora_cli._version import __version__
from molora_cli.errors import MoloraError
from molora_cli.out import Out

# each is a module of molora_cli.commands, imported when it runs: all of them would double the time of --help
COMMANDS = {
    "compose": "Put several LoRA adapters of one base into a bundle.",
    "attach-router": "Give a bundle a router without training.",
    "train-router": "Train a bundle's router on rows of each domain.",
    "inspect": "Show what a file holds, or where the tokens of a text go.",
    "chat": "Talk to a bundle, tokens coloured by adapter.",
    "eval": "Measure what a router recovers, against baselines.",
    "bench": "Time the operators, decode, prefill, answers and routing against others.",
    "convert": "Write an adapter or a bundle in another format.",
    "add": "Add adapters to a bundle.",
    "remove": "Take an adapter out of a bundle.",
    "train-adapter": "Train LoRA adapters with PEFT.",
    "run": "Run every step of a recipe.",
}


class Commands(TyperGroup):
    """The commands by name; one is imported when it is asked for, not when they are listed."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names that a typing error is near to

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"molora_cli.commands.{cmd_name.replace('-', '_')}")
        alone = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
        module.register(alone)
        command = typer.main.get_command(alone)
        command.short_help = COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    cls=Commands,
    name="molora",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich's takes 0.3 s to start, the whole of what --help may take
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Several LoRA adapters of one base model in one bundle: every token takes the adapter it needs.",
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"molora {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Global options."""


def _leave(code: int) -> NoReturn:
    """Exit without the interpreter complaining about a closed pipe while it flushes."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or 1
    sys.exit(code)


def main() -> NoReturn:
    """Run the command line: 0 done, 1 failure, 2 bad usage or input, 3 threshold not met, 130 Ctrl-C."""
    debug = os.environ.get("MOLORA_DEBUG") == "1"
    # idle OpenMP threads that spin on cores that others need cost several times the work itself
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    for handle in (sys.stdout, sys.stderr):  # texts may hold letters that the terminal's encoding lacks
        if isinstance(handle, io.TextIOWrapper):
            handle.reconfigure(errors="replace")
    try:
        app()
    except MoloraError as error:
        if debug:
            raise
        Out().error(error)
        _leave(error.exit_code)
    except KeyboardInterrupt:
        if debug:
            raise
        sys.stderr.write("stopped\n")
        _leave(130)
    except BrokenPipeError:
        _leave(1)
    except OSError as error:
        if debug:
            raise
        where = f" ({error.filename})" if error.filename else ""
        Out().error(MoloraError(f"{error.strerror or error}{where}", "MOLORA_DEBUG=1 shows where"))
        _leave(1)
    except MemoryError:
        if debug:
            raise
        Out().error(MoloraError("out of memory", "use a smaller batch, or a machine with more memory"))
        _leave(1)
    except SystemExit:
        raise
    except Exception as error:
        if debug:
            raise
        Out().error(
            MoloraError(f"unexpected {type(error).__name__}: {error}", "MOLORA_DEBUG=1 shows the traceback")
        )
        _leave(1)
    _leave(0)
