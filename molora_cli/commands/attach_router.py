"""`molora attach-router`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.errors import InputError
from molora_cli.out import Out
from molora_cli.recipes import load_recipe, merge

if TYPE_CHECKING:
    from rich.console import Console

# Typer resolves these annotations at run time, on Python 3.10 too, so they are spelt with Optional
Names = Optional[list[str]]  # noqa: UP045
Word = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Number = Optional[float]  # noqa: UP045
File = Optional[Path]  # noqa: UP045

EPILOG = """\b
Examples:
  molora attach-router my-bundle --kind centroid --data math=math.jsonl --data code=code.jsonl
  molora attach-router my-bundle --kind vocab --rule "code=regex:[{};]" --before
"""


DEFAULTS: dict[str, Any] = {
    "kind": None,
    "expert": [],
    "rule": [],
    "rest": None,
    "data": [],
    "top_k": None,
    "temperature": None,
    "margin": None,
    "taps": None,
    "before": False,
    "seed": 0,
    "xlora": None,
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("attach-router", epilog=EPILOG)(command)


def command(
    bundle: Annotated[File, typer.Argument(help="Folder of the bundle.")] = None,
    kind: Annotated[
        Word,
        typer.Option(
            help="vocab: rules on token ids; centroid, taps: a few examples; arrow: the adapters alone; "
            "xlora: the classifier of an X-LoRA; fixed; uniform."
        ),
    ] = None,
    expert: Annotated[
        Names, typer.Option(help="fixed: NAME, or NAME=WEIGHT several times. 'base' is no adapter.")
    ] = None,
    rule: Annotated[
        Names,
        typer.Option(
            help="vocab: NAME=RULE, say math=regex:^[0-9]+$; RULE is ids:1,2,5-9, range:1000-1999, "
            "token:TEXT, regex:PATTERN or class:special, digit, space, text, image, video, audio."
        ),
    ] = None,
    rest: Annotated[
        Word, typer.Option(help="vocab: who takes the other tokens: NAME, base, or none.")
    ] = None,
    data: options.Data = None,
    taps: Annotated[
        Word, typer.Option(help="taps: layers whose input is read, say 1,3,15.", metavar="LAYERS")
    ] = None,
    top_k: Annotated[Whole, typer.Option(help="centroid, taps, arrow: adapters per token.")] = None,
    temperature: Annotated[Number, typer.Option(help="centroid, taps, arrow: above 1 softens gates.")] = None,
    margin: Annotated[
        Number,
        typer.Option(help="centroid: keep the token before's adapter where another is less ahead (0)."),
    ] = None,
    xlora: Annotated[File, typer.Option(help="xlora: folder of the X-LoRA model, saved by PEFT.")] = None,
    before: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option("--before", help="vocab: put the rules before the present router."),
    ] = None,
    recipe: options.Recipe = None,
    base: options.Base = None,
    seed: Annotated[Whole, typer.Option(help="The same seed gives the same router (0).")] = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Give a bundle a router without training: rules, nearest examples, or constant gates."""
    from molora_cli.core.bundle.store import Bundle

    out = Out(json_mode=json, quiet=quiet)
    written = load_recipe(recipe, "attach-router") if recipe is not None else {}
    flags: dict[str, Any] = {
        "kind": kind,
        "expert": expert,
        "rule": rule,
        "rest": rest,
        "data": data,
        "top_k": top_k,
        "taps": options.parse_layers(taps),
    }
    flags |= {"temperature": temperature, "margin": margin, "before": before, "seed": seed}
    flags["xlora"] = None if xlora is None else str(xlora)
    for name in ("expert", "data"):
        if isinstance(written.get(name), dict):
            written[name] = [f"{key}={value}" for key, value in written[name].items()]
    chosen = {name: setting.value for name, setting in merge(flags, written, DEFAULTS).items()}
    place = bundle or (Path(written["bundle"]) if written.get("bundle") else None)
    if place is None or chosen["kind"] is None:
        missing = "BUNDLE" if place is None else "--kind"
        raise InputError(f"{missing} is missing", "molora attach-router BUNDLE --kind KIND, or --recipe FILE")
    opened = Bundle.open(place, base)
    from molora_cli.core.router.attach import Request, attach  # torch: after the cheap checks

    chosen["experts"], chosen["rules"] = chosen.pop("expert"), chosen.pop("rule")
    request = Request(**chosen)
    with out.progress("reading examples") as ticker:
        made = attach(opened, request, force=force, ticker=ticker)
    for warning in [*opened.warnings, *made.notes]:
        out.warn(warning)
    if not dry_run:
        opened.set_router(made.spec, made.tensors)
    size = sum(t.numel() * t.element_size() for t in made.tensors.values())
    document = {"bundle": str(place), "written": not dry_run, "bytes": size, **made.summary}
    out.result(document, lambda console: _show(console, document))


def _show(console: Console, document: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from molora_cli.text import printable

    did = "router of" if document["written"] else "dry run, nothing written: router of"
    console.print(Text(f"{did} {printable(document['bundle'])}: {document['kind']}", style="bold"))
    accuracy: dict[str, float] = document.get("held_out_accuracy") or {}
    columns = {
        "weight": document.get("weights"),
        "tokens": document.get("tokens"),
        "held out, % right": {n: round(100 * a, 1) for n, a in accuracy.items()},
    }
    columns = {title: values for title, values in columns.items() if values}
    table = Table(box=None)
    table.add_column("expert")
    for title in columns:
        table.add_column(title, justify="right")
    for name in document["experts"]:
        cells = [values.get(name) for values in columns.values() if values]
        table.add_row(name.replace("__base__", "base"), *("" if c is None else f"{c:g}" for c in cells))
    console.print(table)
    if document.get("left"):
        console.print(f"{document['left']} other tokens are left to the next router")
