"""The Typer app, `main()`, and the one place where errors become exit codes."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from molora_cli._version import __version__
from molora_cli.commands import (
    add,
    attach_router,
    chat,
    compose,
    convert,
    eval,
    inspect,
    remove,
    run,
    train_adapter,
    train_router,
)
from molora_cli.errors import MoloraError
from molora_cli.out import Out

app = typer.Typer(
    name="molora",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich's takes 0.3 s to start, the whole of what --help may take
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Several LoRA adapters of one base model in one bundle: every token takes the adapter it needs.",
)
compose.register(app)
attach_router.register(app)
train_router.register(app)
inspect.register(app)
chat.register(app)
convert.register(app)
add.register(app)
remove.register(app)
train_adapter.register(app)
eval.register(app)
run.register(app)


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
