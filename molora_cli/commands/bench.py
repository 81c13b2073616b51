"""`molora bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.errors import InputError
from molora_cli.out import Out
from molora_cli.text import printable, shorten

if TYPE_CHECKING:
    from rich.console import Console

# Typer resolves these annotations at run time, on Python 3.10 too, so they are spelt with Optional
File = Optional[Path]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Word = Optional[str]  # noqa: UP045

EPILOG = """\b
Examples:
  molora bench decode --threads 2 --context 2000
  molora bench routing --dtype float32 --sides token-4,merged-4 --append none --json
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("bench", epilog=EPILOG)(command)


def command(
    bench: Annotated[str, typer.Argument(help="kernels, decode, prefill, end-to-end or routing.")],
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    rounds: Annotated[Whole, typer.Option(help="Timed rounds (15 of kernels and decode, else 5).")] = None,
    context: Annotated[int, typer.Option(help="Cached tokens of decode; prompt of end-to-end.")] = 64,
    tokens: Annotated[Whole, typer.Option(help="Of a call: prefill and routing (512), kernels (1).")] = None,
    new: Annotated[int, typer.Option(help="Tokens of an answer, end-to-end.")] = 32,
    adapters: Annotated[Whole, typer.Option(help="Random adapters, on all linears (4; routing 8).")] = None,
    rank: Annotated[Whole, typer.Option(help="Of the random adapters (16).")] = None,
    topk: Annotated[str, typer.Option(help="Adapters per token; a side for each number.")] = "1,2",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    sides: Annotated[Word, typer.Option(help="Names with commas, or all (all but compiled ones).")] = None,
    base: options.Base = None,
    bundle: Annotated[File, typer.Option(help="Measure its adapters and its router.")] = None,
    backend: Annotated[str, typer.Option(help="Of our engine: auto, cpu or torch.")] = "auto",
    busy: Annotated[bool, typer.Option("--busy", help="Count own CPU time: cores are shared.")] = False,
    append: Annotated[
        Word, typer.Option(help="Add rows to FILE.csv, or none (in a checkout: its results.csv).")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time our operators, a decode step, a prefill, answers or routing against what else there is.

    All sides run in turn within every round of one process; shown are medians with quartiles, ratios within
    rounds, and what is reached of this machine's fastest reading and product, which are measured beside them.
    The base is --base ("random": random weights of SmolLM2-135M's shape), else the built-in one, else random.
    """
    from molora_cli.core.bench.job import Job, run
    from molora_cli.core.bench.rows import append as append_rows
    from molora_cli.core.bench.rows import rows

    out = Out(json_mode=json, quiet=quiet)
    job = Job(
        bench,
        threads=threads,
        rounds=rounds,
        context=context,
        tokens=tokens,
        new=new,
        adapters=adapters,
        rank=rank,
        topk=_numbers(topk),
        dtype=dtype,
        sides=None if sides is None else tuple(s.strip() for s in sides.split(",") if s.strip()),
        base=base,
        bundle=bundle,
        backend=backend,
        busy=busy,
    )
    target = _target(append)
    with out.progress("measuring") as ticker:
        document = run(job, command=" ".join(["molora", *sys.argv[1:]]), ticker=ticker)
    for text in document["notes"]:
        out.note(text)
    if target is not None:
        lines = rows(document)
        append_rows(target, lines)
        out.note(f"{len(lines)} rows added to {target}")
    document["appended"] = None if target is None else str(target)
    out.result(document, lambda console: _show(console, document))


def _numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        raise InputError(f"--topk {shorten(text, 40)}: no numbers", "write them with commas: --topk 1,2")
    return tuple(int(part) for part in parts)


def _target(append: str | None) -> Path | None:
    """The file that rows go to. Raises InputError for what is no .csv file."""
    from molora_cli.core.bench import machine

    if append is None:
        root = machine.checkout()
        return None if root is None else root / machine.RESULTS
    if append == "none":
        return None
    if not append.lower().endswith(".csv"):
        raise InputError(
            f"--append {printable(append)}: not a .csv file", "--append FILE.csv, or --append none"
        )
    return Path(append)


def _show(console: Console, document: dict[str, Any]) -> None:
    from molora_cli.views.bench import BenchView

    console.print(BenchView(document))
