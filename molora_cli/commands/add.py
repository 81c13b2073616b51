"""`molora add`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.out import Out
from molora_cli.text import shorten

if TYPE_CHECKING:
    from rich.console import Console

# Typer resolves this annotation at run time, on Python 3.10 too, so it is spelt with Optional
Word = Optional[str]  # noqa: UP045

EPILOG = """\b
Examples:
  molora add my-bundle legal=./adapters/legal
  molora add my-bundle legal=./adapters/legal --data legal=legal.jsonl
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("add", epilog=EPILOG)(command)


def command(
    bundle: Annotated[Path, typer.Argument(help="Folder of the bundle.")],
    adapters: Annotated[list[str], typer.Argument(metavar="NAME=ADAPTER...", help="As for molora compose.")],
    data: options.Data = None,
    base: options.Base = None,
    allow_noop: Annotated[bool, typer.Option("--allow-noop", help="Accept adapters without effect.")] = False,
    modules_to_save: Annotated[
        Word,
        typer.Option("--modules-to-save", metavar="svd:R", help="Full copies of modules as LoRA of rank R."),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    seed: options.Seed = 0,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Add adapters to a bundle; the others and their router columns keep every bit."""
    from molora_cli.core.adapter.saved import parse_saved
    from molora_cli.core.bundle.edit import AddRequest, add
    from molora_cli.core.compose import parse_adapters

    out = Out(json_mode=json, quiet=quiet)
    request = AddRequest(
        bundle=bundle,
        adapters=parse_adapters(adapters),
        data=tuple(data or ()),
        base=base,
        allow_noop=allow_noop,
        saved_rank=parse_saved(modules_to_save) if modules_to_save else None,
        trust_remote_code=trust_remote_code,
        seed=seed,
        dry_run=dry_run,
    )
    with out.progress("adding") as ticker:
        done = add(request, ticker=ticker)
    for note in done.notes:
        out.warn(note)
    document = done.report
    if document["written"]:
        names = [a["name"] for a in document["added"]]
        entries = [done.bundle.entry(name).model_dump(mode="json", exclude_none=True) for name in names]
        document = {**document, "added": entries}
    out.result(document, lambda console: _show(console, document))


def _show(console: Console, document: dict[str, Any]) -> None:
    from rich.text import Text

    did = "added to" if document["written"] else "dry run, nothing written: would add to"
    lines = [f"{did} {shorten(document['bundle'], 200)} (kept {shorten(', '.join(document['kept']), 200)})"]
    for entry in document["added"]:
        effect = entry.get("effect")
        moved = f", moves the logits by {effect['rms'] / (effect['base_rms'] or 1):.1%}" if effect else ""
        lines.append(f"  {entry['name']}: {len_of(entry['modules'])} modules{moved}")
    for name, share in document.get("router", {}).get("held_out_accuracy", {}).items():
        found = "no held-out rows" if share is None else f"{share:.0%} of held-out tokens find it"
        lines.append(f"  {name}: new column of the {document['router']['kind']} router, {found}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def len_of(modules: Any) -> int:
    """How many modules: a number in a plan, a table in a manifest's entry."""
    return modules if isinstance(modules, int) else len(modules)
