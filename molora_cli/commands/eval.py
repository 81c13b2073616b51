"""`molora eval`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.errors import ThresholdError
from molora_cli.out import Out
from molora_cli.recipes import load_recipe, merge

if TYPE_CHECKING:
    from rich.console import Console

# Typer resolves these annotations at run time, on Python 3.10 too, so they are spelt with Optional
File = Optional[Path]  # noqa: UP045
Files = Optional[list[Path]]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Word = Optional[str]  # noqa: UP045
Words = Optional[list[str]]  # noqa: UP045

EPILOG = """\b
Examples:
  molora eval my-bundle --data math=math.test.jsonl --data code=code.test.jsonl --mixed 60
  molora eval my-bundle --data sql=sql.test.jsonl --data turns.jsonl --baselines all --tasks 50 --json
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("eval", epilog=EPILOG)(command)


def command(
    bundle: Annotated[File, typer.Argument(help="Folder of the bundle.")] = None,
    data: Annotated[
        Words, typer.Option(help="NAME=FILE per adapter, or a FILE whose rows carry segments.")
    ] = None,
    mixed: Annotated[
        Whole, typer.Option(help="Conversations that change domain to make, of three kinds (0).")
    ] = None,
    baselines: Annotated[
        Words, typer.Option(help="none, default, merges, all, or names with settings: ties:density=0.2.")
    ] = None,
    tune: Annotated[
        Words, typer.Option(help="Rows, as for --data, that settings of the baselines are chosen on.")
    ] = None,
    tune_limit: Annotated[Whole, typer.Option(help="Rows of each of these sets at most (16).")] = None,
    router: Annotated[Files, typer.Option(help="Another router file to measure; may be given again.")] = None,
    modes: Annotated[
        Word,
        typer.Option(help="Ways to route: adapters per token, soft; 2@3: at temperature 3 (1,2,soft)."),
    ] = None,
    train: Annotated[Words, typer.Option(help="NAME=FILE rows that X-LoRA is trained on.")] = None,
    limit: Annotated[Whole, typer.Option(help="Rows per file at most, evenly spaced.")] = None,
    single: Annotated[Whole, typer.Option(help="Rows per NAME=FILE of an adapter, if not --limit.")] = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="Also take each row's CPU time, in turns with a second base.")
    ] = False,
    max_length: Annotated[Whole, typer.Option(help="Longer rows are cut (640 tokens).")] = None,
    tasks: Annotated[Whole, typer.Option(help="Also answer this many questions per domain.")] = None,
    max_new_tokens: Annotated[Whole, typer.Option(help="Of an answer (256).")] = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run programs that were written, fenced in.")
    ] = False,
    lm_eval: Annotated[Words, typer.Option(help="A task (name or .yaml) of lm-evaluation-harness.")] = None,
    minimum: Annotated[Words, typer.Option("--min", help="SET[/ROW[/DOMAIN]]=PERCENT, else exit 3.")] = None,
    figure: Annotated[File, typer.Option(help="Draw the table as FILE.svg or FILE.png.")] = None,
    draws: Annotated[Whole, typer.Option(help="Bootstrap draws of an interval (1000).")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Measure everything anew.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, ... or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, ... or auto.")] = "auto",
    backend: Annotated[str, typer.Option(help="torch, or a faster one that may round otherwise.")] = "torch",
    weights: options.Weights = "full",
    seed: Annotated[Whole, typer.Option(help="Of mixes and draws (0).")] = None,
    recipe: options.Recipe = None,
    base: options.Base = None,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure NLL per completion token and the share of the gain that each way of routing recovers.

    recovered = (base - x) / (base - own), own being the segment's own adapter on every token of the sequence;
    every value with its 95 % interval over documents. What no router decides is measured once and kept.
    """
    from molora_cli.core.bundle.store import Bundle, default_bundle
    from molora_cli.core.evaluation.job import Job, evaluate
    from molora_cli.core.evaluation.thresholds import check, parse_minimum

    out = Out(json_mode=json, quiet=quiet)
    if figure is not None:
        from molora_cli.views.evaluation_figure import check_figure

        check_figure(figure, force=force)
    written = load_recipe(recipe, "eval") if recipe is not None else {}
    plain = Job()
    given = {
        "data": data,
        "mixed": mixed,
        "baselines": baselines,
        "train": train,
        "limit": limit,
        "single": single,
        "tune": tune,
        "tune_limit": tune_limit,
        "max_length": max_length,
        "seed": seed,
        "draws": draws,
        "tasks": tasks,
        "max_new_tokens": max_new_tokens,
        "lm_eval": lm_eval,
    }
    more = {"modes": modes, "router": router, "min": minimum}
    usual = {**{n: getattr(plain, n) for n in given}, "modes": ",".join(plain.modes), "router": (), "min": ()}
    read = {name: _specs(value) for name, value in written.items() if name != "timing"}
    values = {n: setting.value for n, setting in merge({**given, **more}, read, usual).items()}
    ways = [way.strip() for way in values.pop("modes").split(",") if way.strip()]
    routers = [Path(path) for path in values.pop("router")]
    wanted = values.pop("min")
    opened = Bundle.open(bundle or written.get("bundle") or default_bundle(), base)
    job = Job(
        **values,
        modes=ways,
        routers=routers,
        minimum=wanted,
        dtype=dtype,
        device=device,
        backend=backend,
        weights=weights,
        cache=not no_cache,
        timing=timing or bool(written.get("timing")),
        allow_code_execution=allow_code_execution,
        trust_remote_code=trust_remote_code,
    )
    with out.progress("evaluating") as ticker:
        document = evaluate(opened, job, ticker=ticker, warn=out.warn)
    failed = check(document, parse_minimum(wanted))
    document["failed"] = failed
    for text in [*opened.warnings, *document["notes"]]:
        out.note(text)
    if figure is not None:
        from molora_cli.views.evaluation_figure import write_figure

        write_figure(figure, document)
        out.note(f"written: {figure}")
    out.result(document, lambda console: _show(console, document))
    if failed:
        said = "; ".join(f"{f['key']} is {_percent(f['found'])}, not {f['wanted']:g} %" for f in failed)
        raise ThresholdError(f"not reached: {said}", "train the router longer, or lower --min")


def _specs(value: Any) -> Any:
    """A recipe's mapping as the NAME=VALUE texts that flags are."""
    return [f"{name}={item}" for name, item in value.items()] if isinstance(value, dict) else value


def _percent(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f} %"


def _show(console: Console, document: dict[str, Any]) -> None:
    from molora_cli.views.evaluation import EvaluationView

    console.print(EvaluationView(document))
