"""`molora train-router`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.out import Out
from molora_cli.recipes import load_recipe, merge

if TYPE_CHECKING:
    from rich.console import Console

    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.training.router_job import Job, Report

# Typer resolves these annotations at run time, on Python 3.10 too, so they are spelt with Optional
Word = Optional[str]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Number = Optional[float]  # noqa: UP045
File = Optional[Path]  # noqa: UP045

EPILOG = """\b
Examples:
  molora train-router my-bundle --data math=math.jsonl --data code=code.jsonl
  molora train-router my-bundle --data labelled.jsonl --steps 300 --metrics metrics.jsonl --force
  molora train-router my-bundle --data labelled.jsonl --kind context+taps --loss lm --force
  molora train-router my-bundle --only law --data law=law.jsonl
  molora train-router my-bundle --data unlabelled.jsonl --labels from-adapters
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("train-router", epilog=EPILOG)(command)


def command(
    bundle: Annotated[File, typer.Argument(help="Folder of the bundle.")] = None,
    data: options.Data = None,
    kind: Annotated[
        Word,
        typer.Option(
            help="context (the default) and sequence read token ids only; taps, layer, hidden and "
            "context+taps the base's hidden states."
        ),
    ] = None,
    taps: Annotated[
        Word, typer.Option(help="taps, hidden: layers whose input is read, say 1,3,15.", metavar="LAYERS")
    ] = None,
    head: Annotated[
        Word, typer.Option(help="taps, layer, hidden: mlp (the default), or lda: closed form, few rows.")
    ] = None,
    loss: Annotated[
        Word,
        typer.Option(
            help="taps, layer, context+taps: labels (the default), or lm: then tuned through the base's loss."
        ),
    ] = None,
    only: Annotated[
        Word,
        typer.Option(
            help="Add this adapter to the bundle's context router; the others' columns keep every bit. "
            "--head lda: in closed form.",
            metavar="NAME",
        ),
    ] = None,
    labels: Annotated[
        Word,
        typer.Option(
            help="given (the default): by NAME= or the rows' labels; from-adapters: each token of an answer "
            "takes the adapter under which it is likeliest, which costs a forward per adapter and row."
        ),
    ] = None,
    lm_steps: Annotated[Whole, typer.Option(help="--loss lm: steps of tuning at most (70).")] = None,
    balance: Annotated[Number, typer.Option(help="--loss lm: weight of the balance loss (0).")] = None,
    z_loss: Annotated[Number, typer.Option(help="--loss lm: weight of the z-loss (0).")] = None,
    steps: Annotated[Whole, typer.Option(help="Training steps at most (500).")] = None,
    seed: Annotated[Whole, typer.Option(help="Seed (0); the same one gives the same router.")] = None,
    top_k: Annotated[Whole, typer.Option("--top-k", help="Adapters per token (1).")] = None,
    margin: Annotated[
        Number,
        typer.Option(
            help="context: keep the token before's adapter where another is less than this ahead (0)."
        ),
    ] = None,
    val_share: Annotated[Number, typer.Option(help="Share of documents held out (0.1).")] = None,
    rows: Annotated[Whole, typer.Option(help="Rows per domain at most (1000).")] = None,
    mixes: Annotated[Whole, typer.Option(help="Rows that change domain to make (1600).")] = None,
    max_length: Annotated[Whole, typer.Option(help="Longer rows are cut (512 tokens).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    work_dir: Annotated[
        File, typer.Option(help="Folder of the checkpoint; default beside the bundle.")
    ] = None,
    metrics: Annotated[File, typer.Option(help="Write metrics here as JSON Lines.")] = None,
    recipe: options.Recipe = None,
    base: options.Base = None,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train the bundle's router on rows of each adapter's domain: chats ("messages") or plain text ("text").

    A context router takes seconds and no forward of the base; kinds that read hidden states run the base
    over some of the rows first. --loss lm goes on from there, or from the bundle's router of that kind: it
    tunes the heads so that the routed model predicts the answers well. Rows are also mixed with one another,
    so that the router learns where a text changes its subject. Ctrl-C keeps a checkpoint; --resume goes on
    from it. accelerate launch shares the work of --loss lm among processes.
    """
    from molora_cli.core.bundle.store import Bundle, default_bundle
    from molora_cli.core.training.live_job import LiveSettings
    from molora_cli.core.training.lm_loop import LmSettings
    from molora_cli.core.training.router_job import Job, train_router
    from molora_cli.core.training.router_rows import RouterSettings

    # of several processes under `accelerate launch` the first one speaks
    first = os.environ.get("RANK", "0") == "0"
    out = Out(json_mode=json, quiet=quiet or not first)
    written = load_recipe(recipe, "train-router") if recipe is not None else {}
    plain, tuning = RouterSettings(), LmSettings()
    names = ("steps", "seed", "top_k", "margin", "val_share", "rows", "mixes", "max_length")
    given = dict(zip(names, (steps, seed, top_k, margin, val_share, rows, mixes, max_length), strict=True))
    chosen = merge(
        {
            **{**given, "kind": kind, "taps": options.parse_layers(taps), "head": head, "loss": loss},
            **{"labels": labels, "lm_steps": lm_steps, "balance": balance, "z_loss": z_loss},
        },
        written,
        {
            **{**{n: getattr(plain, n) for n in names}, "kind": "context", "taps": None, "head": "mlp"},
            **{
                "loss": "labels",
                "labels": "given",
                "lm_steps": tuning.steps,
                "balance": tuning.balance,
                "z_loss": tuning.z,
            },
        },
    )
    values = {name: setting.value for name, setting in chosen.items()}
    tuning = LmSettings(
        steps=values.pop("lm_steps"),
        balance=values.pop("balance"),
        z=values.pop("z_loss"),
        seed=values["seed"],
    )
    live = LiveSettings(taps=values.pop("taps"), head=values.pop("head"))
    listed = written.get("data") or []
    specs = data or ([f"{n}={p}" for n, p in listed.items()] if isinstance(listed, dict) else listed)
    path = bundle or (Path(written["bundle"]) if written.get("bundle") else default_bundle())
    job = Job(
        data=specs,
        kind=values.pop("kind"),
        loss=values.pop("loss"),
        labels=values.pop("labels"),
        lm=tuning,
        settings=RouterSettings(**values),
        live=live,
        work=work_dir,
        resume=resume,
        force=force,
        metrics=metrics,
        again=shlex.join(["molora", *(a for a in sys.argv[1:] if a != "--resume"), "--resume"]),
        only=only,
    )
    opened = Bundle.open(path, base)
    if only is not None:
        _train_only(out, opened, job)
        return
    with out.progress("training the router") as ticker:
        report = train_router(opened, job, ticker=ticker, warn=out.warn)
    if not first:
        return
    for text in [*opened.warnings, *report.notes]:
        out.note(text)
    out.result(report.document, lambda console: _show(console, report))
    out.note(f"next: molora chat {path}, or molora inspect {path} --data NAME=FILE ...")


def _train_only(out: Out, bundle: Bundle, job: Job) -> None:
    from molora_cli.core.training.added_job import train_only

    with out.progress("training one column") as ticker:
        document = train_only(bundle, job, ticker=ticker, warn=out.warn)
    for text in [*bundle.warnings, *document["notes"]]:
        out.note(text)
    out.result(document, lambda console: _show_only(console, document))
    out.note(f"next: molora chat {bundle.path}, or molora inspect {bundle.path} --data NAME=FILE ...")


def _show_only(console: Console, document: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, title="% of held-out tokens of each domain", title_justify="left")
    for title in ("domain", "tokens", "right before", "right now", f"→{document['only']}"):
        table.add_column(title, justify="left" if title == "domain" else "right")
    for domain, found in document["changed"].items():
        shares = (_percent(found[key]) for key in ("before", "after", "new"))
        table.add_row(domain.replace("__base__", "base"), f"{found['tokens']:,}", *shares)
    console.print(table)
    console.print(f"{document['only']} added in {document['seconds']:.0f} s; the other columns are unchanged")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.1f}"


def _show(console: Console, report: Report) -> None:
    from rich.table import Table

    document: dict[str, Any] = report.document
    names = [name.replace("__base__", "base") for name in document["experts"]]
    table = Table(
        box=None, title="% of held-out tokens; takes: of all tokens, template included", title_justify="left"
    )
    for title in ("domain", "docs", "right", "prompt", "answer", *(f"→{n}" for n in names), "takes"):
        table.add_column(title, justify="left" if title == "domain" else "right")
    for name, shown in zip(document["experts"], names, strict=True):
        domain = document["domains"][name]
        total = max(1, sum(domain["took"].values()))
        table.add_row(
            shown,
            str(document["documents"][name]),
            *(_percent(domain[key]) for key in ("accuracy", "prompt", "completion")),
            *(_percent(domain["took"][other] / total) for other in document["experts"]),
            _percent(document["utilisation"][name]),
        )
    console.print(table)
    mixed = document["mixed_accuracy"]
    parts = [f"entropy {document['entropy']:.3f} nats"]
    if mixed is not None:
        parts.insert(0, f"rows that change domain: {mixed:.1%} right")
    parts.append(f"{document['masked_tokens']} tokens (system text, joining words) carry no label")
    console.print("; ".join(parts))
    early = f" (stopped early, best at {document['best_step']})" if document["stopped_early"] else ""
    console.print(f"{document['steps']} steps{early} in {document['seconds']:.0f} s; router written")
