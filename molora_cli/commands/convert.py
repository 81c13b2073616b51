"""`molora convert`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.out import Out
from molora_cli.text import shorten

if TYPE_CHECKING:
    from rich.console import Console

# Typer resolves these annotations at run time, on Python 3.10 too, so they are spelt with Optional
Names = Optional[list[str]]  # noqa: UP045
Word = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Number = Optional[float]  # noqa: UP045

EPILOG = """\b
Examples:
  molora convert ./adapters/math math.gguf --to gguf --base smollm2
  molora convert my-bundle merged --to merged-peft --method svd --rank 16
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("convert", epilog=EPILOG)(command)


def command(
    source: Annotated[str, typer.Argument(help="An adapter (folder, file, org/name[@rev]) or a bundle.")],
    target: Annotated[Path, typer.Argument(help="What is written; must not exist without --force.")],
    to: Annotated[str, typer.Option(help="peft, mlx, gguf, bundle, merged-peft or merged-model.")],
    base: options.Base = None,
    adapter: Annotated[
        Names, typer.Option(help="Of a bundle: which adapter (several times for a merge).")
    ] = None,
    method: Annotated[
        Word, typer.Option(help="merged: cat (exact, default), svd, linear, ties or dare.")
    ] = None,
    rank: Annotated[
        Whole,
        typer.Option(help="merged-peft: rank of svd, linear, ties, dare; default the largest."),
    ] = None,
    weights: Annotated[
        Names, typer.Option(help="merged: NAME=W for every adapter; default 1/n each.")
    ] = None,
    density: Annotated[Number, typer.Option(help="ties, dare: share of entries kept; default 0.5.")] = None,
    dtype: Annotated[
        Word, typer.Option(help="float32, bfloat16 or float16; default keeps what there is.")
    ] = None,
    seed: options.Seed = 0,
    allow_noop: Annotated[
        bool, typer.Option("--allow-noop", help="Accept an adapter without effect.")
    ] = False,
    modules_to_save: Annotated[
        Word,
        typer.Option("--modules-to-save", metavar="svd:R", help="Full copies of modules as LoRA of rank R."),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write an adapter or a bundle in another format, and prove that it is the same function."""
    from molora_cli.core.adapter.saved import parse_saved
    from molora_cli.core.convert.plan import Request, describe, plan

    out = Out(json_mode=json, quiet=quiet)
    request = Request(
        source=source,
        target=target.expanduser(),
        to=to,
        base=base,
        adapters=tuple(dict.fromkeys(adapter or ())),
        method=method,
        rank=rank,
        weights=tuple(weights or ()),
        density=density,
        dtype=dtype,
        seed=seed,
        force=force,
        allow_noop=allow_noop,
        saved_rank=parse_saved(modules_to_save) if modules_to_save else None,
        trust_remote_code=trust_remote_code,
    )
    with out.progress("converting") as ticker:
        work = plan(request, ticker=ticker)
        if dry_run:
            report = {**describe(work), "notes": list(work.notes)}
        else:
            from molora_cli.core.convert.run import convert  # torch: after the checks that need none

            report = convert(work, ticker=ticker)
    for note in report.pop("notes"):
        out.warn(note)
    document = {**report, "written": not dry_run}
    out.result(document, lambda console: _show(console, document))


def _show(console: Console, document: dict[str, Any]) -> None:
    from rich.text import Text

    def line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    names = ", ".join(a["name"] for a in document["adapters"])
    did = "wrote" if document["written"] else "would write"
    line(f"{did} {shorten(document['target'], 200)} ({document['to']}) from {shorten(names, 200)}")
    line(f"  base {document['base']['id']}")
    if "method" in document:
        weights = ", ".join(f"{name} {weight:g}" for name, weight in document["weights"].items())
        line(f"  {document['method']} with weights {weights}")
    found = document.get("verified") or document.get("merged") or {}
    if found.get("bytes"):
        line("  the adapter's bytes are unchanged")
    if "largest_error" in found:
        what = "weight change against the weighted sum" if "mean_error" in found else "weight change"
        line(f"  {what}: largest relative error of a module {found['largest_error']:.2g}")
    if "mean_error" in found:
        line(f"  mean error {found['mean_error']:.2g}; the rank alone costs up to {found['largest_cut']:.2g}")
    logits = found.get("logits")
    if logits:
        reference = "routed model" if "merged" in document else "source"
        line(
            f"  logits against the {reference}: largest difference {logits['max_abs']:.2g}, "
            f"RMS {logits['rms']:.2g} of an effect of {logits['effect_rms']:.2g} ({logits['probe']})"
        )
