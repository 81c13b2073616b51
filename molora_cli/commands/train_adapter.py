"""`molora train-adapter`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from molora_cli import options
from molora_cli.errors import InputError
from molora_cli.out import Out
from molora_cli.recipes import load_recipe, merge
from molora_cli.refs import parse_named

if TYPE_CHECKING:
    from rich.console import Console

EPILOG = """\b
Examples:
  molora train-adapter math=math.jsonl -o adapters --base smollm2
  molora train-adapter sql=sql.jsonl med=med.jsonl -o adapters --recipe recipes/smollm2-adapters.yaml
"""


SETTINGS: dict[str, Any] = {
    "rank": 4,
    "alpha": 0.0,  # 0: twice the rank
    "target": "all-linear",
    "tokens": 150_000,
    "epochs": 0.0,  # 0: as long as tokens says
    "lr": 0.001,
    "warmup": 20,
    "batch_tokens": 1200,
    "max_length": 512,
    "grad_clip": 1.0,
    "save_dtype": "bfloat16",
    "seed": 0,
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("train-adapter", epilog=EPILOG)(command)


def command(
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME=FILE...", help="Adapters to train, each with its rows."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder the adapters are written into.")
    ] = None,
    base: options.Base = None,
    rank: Annotated[int | None, typer.Option(help="LoRA rank (4).")] = None,
    alpha: Annotated[float | None, typer.Option(help="LoRA alpha (twice the rank).")] = None,
    target: Annotated[
        str | None, typer.Option(help="all-linear (the default), or names: q_proj,v_proj.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to train on, prompts included (150000).")] = None,
    epochs: Annotated[float | None, typer.Option(help="Passes over the data, instead of --tokens.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate (0.001).")] = None,
    warmup: Annotated[int | None, typer.Option(help="Warm-up steps (20).")] = None,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens per step (1200).")] = None,
    max_length: Annotated[int | None, typer.Option(help="Longer rows are cut (512).")] = None,
    save_dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (the default), float16 or float32.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed (0); the same one gives the same adapter.")] = None,
    val: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE of held-out rows; else a twentieth is kept back.")
    ] = None,
    val_every: Annotated[
        int | None, typer.Option(help="Steps between measures on held-out rows, for the curve (0: none).")
    ] = None,
    init: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER of a LoRA to start from, cut to the rank by SVD.")
    ] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="NAME=TEXT: data sets and their licences, for the card.")
    ] = None,
    licence: Annotated[
        list[str] | None, typer.Option(help="NAME=ID: the adapter's licence, say apache-2.0.")
    ] = None,
    recipe: options.Recipe = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    force: options.Force = False,
) -> None:
    """Train LoRA adapters with PEFT on chat rows (JSON Lines); the loss is on the assistant's tokens.

    Writes plain PEFT folders OUT/NAME, each with a provenance card and the loss of every step. A run that was
    interrupted goes on when the same command is given again.
    """
    from molora_cli.core.base.resolve import resolve_base
    from molora_cli.core.training.adapter_job import plan_jobs, settings_from, train_job

    out = Out(json_mode=json, quiet=quiet)
    section = load_recipe(recipe, "train-adapter") if recipe else {}
    named: dict[str, dict[str, str]] = {}
    for key, texts in (
        ("data", data),
        ("val", val),
        ("init", init),
        ("source", source),
        ("licence", licence),
    ):
        named[key] = {**section.get(key, {}), **dict(parse_named(text) for text in texts or ())}
    flags = {
        "output": output,
        "base": base,
        "rank": rank,
        "alpha": alpha,
        "target": target,
        "tokens": tokens,
        "epochs": epochs,
        "lr": lr,
        "warmup": warmup,
        "batch_tokens": batch_tokens,
        "max_length": max_length,
        "save_dtype": save_dtype,
        "seed": seed,
        "val_every": val_every,
    }
    usual = {"output": None, "base": None, "val_every": 0, **SETTINGS}
    chosen = {k: s.value for k, s in merge(flags, section, usual).items()}
    place, base_name, every = chosen.pop("output"), chosen.pop("base"), chosen.pop("val_every")
    if not place:
        raise InputError("no folder to write into is given", "say where the adapters go: -o adapters")
    if every < 0:
        raise InputError(f"--val-every is {every}", "give a number of steps, or 0 for none")
    if not base_name:
        raise InputError("no base is given", "name the model the adapters are for: --base smollm2")
    settings = settings_from(chosen)
    paths = {k: {n: Path(p).expanduser() for n, p in named[k].items()} for k in ("data", "val", "init")}
    jobs = plan_jobs(
        paths["data"],
        held_out=paths["val"],
        init=paths["init"],
        source=named["source"],
        licence=named["licence"],
    )
    with out.progress("preparing the base") as ticker:
        resolved = resolve_base(base_name, ticker=ticker)
    results = []
    for job in jobs:
        with out.progress(f"training {job.name}") as ticker:
            result = train_job(
                job,
                resolved,
                settings,
                Path(place).expanduser(),
                force=force,
                val_every=every,
                ticker=ticker,
            )
        out.note(f"{job.name}: written to {result['path']}")
        results.append(result)
    out.result({"adapters": results}, lambda console: _table(console, results))
    out.note(
        f"next: molora compose -o my-bundle --base {base_name} {results[0]['name']}={results[0]['path']} ..."
    )


def _table(console: Console, results: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("adapter", "steps", "tokens", "seconds", "NLL base", "NLL after", "held-out rows")
    for r in results:
        nll = ["-" if r[k] is None else f"{r[k]:.3f}" for k in ("nll_base", "nll")]
        rest = [str(r["steps"]), str(r["tokens"]), f"{r['seconds']:.0f}"]
        table.add_row(r["name"], *rest, *nll, str(r["held_out_rows"]))
    console.print(table)
