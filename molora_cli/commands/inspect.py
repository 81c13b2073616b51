"""`molora inspect`: what a path holds, and where the tokens of a text go."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from molora_cli import options
from molora_cli.errors import InputError
from molora_cli.out import Out
from molora_cli.text import argument_text

EPILOG = """\b
Examples:
  molora inspect my-bundle
  molora inspect my-bundle --prompt "Integrate x^2, then write the SQL for it"
  molora inspect my-bundle --data math=math.jsonl --data code=code.jsonl --figure shares.png
  molora inspect ./my-lora
"""


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command(
        "inspect", short_help="Show what a file holds, or where the tokens of a text go.", epilog=EPILOG
    )(command)


def command(
    path: Annotated[
        Optional[str],  # noqa: UP045 - Typer resolves this annotation at run time on Python 3.10
        typer.Argument(
            help="A bundle, an adapter folder, an adapter_config.json or a saved trace, told apart by "
            "content; without it the default bundle. '-' is the default bundle with standard input."
        ),
    ] = None,
    prompt: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--prompt", help="Route this text; '-' reads standard input. May be repeated."),
    ] = None,
    data: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--data", help="Route NAME=FILE: JSON Lines with messages or text, or a .txt file."),
    ] = None,
    stdin: Annotated[bool, typer.Option("--stdin", help="Route standard input.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Render --prompt and standard input as a user's turn of a chat.")
    ] = False,
    figure: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--figure", help="Draw into FILE.png or FILE.svg."),
    ] = None,
    view: Annotated[
        str, typer.Option("--view", help="What --figure draws: histogram, or tokens (.svg).")
    ] = "histogram",
    save_trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--save-trace", help="Keep the routes in FILE; molora inspect FILE shows them again."),
    ] = None,
    tokens: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--tokens/--no-tokens", help="Show the text coloured by adapter (with --json: list it)."
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Tokens of text to show.")] = 600,
    top: Annotated[int, typer.Option("--top", min=0, help="Tokens to list per adapter.")] = 8,
    template: Annotated[
        bool,
        typer.Option(
            "--template", help="Count the tokens that a chat template adds; else they are left out."
        ),
    ] = False,
    base: options.Base = None,
    force: options.Force = False,
    json_: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Show what a bundle or an adapter holds, or where the tokens of a text go.

    Without a text only headers are read. With one, the bundle's router decides each token's route; that needs
    no forward of the base.
    """
    from molora_cli.core.bundle.store import default_bundle
    from molora_cli.core.inspection import recognise

    out = Out(json_mode=json_, quiet=quiet)
    if view not in ("histogram", "tokens"):
        raise InputError(f"--view is '{view}'; it can be histogram or tokens", "give one of the two")
    texts = _texts(prompt or [], stdin or path == "-")
    place = default_bundle() if path in (None, "-") else Path(str(path)).expanduser()
    what = recognise(place)
    wants_trace = bool(texts or data)
    if what != "bundle" and wants_trace:
        raise InputError(f"{place} has no router that could route a text", "give a bundle")
    if not wants_trace and what != "trace":
        if figure or save_trace:
            raise InputError("there is no text to draw or save", "give --prompt, --data or --stdin")
        _show_facts(out, what, place, base)
        return
    kind: Literal["histogram", "tokens"] = "tokens" if view == "tokens" else "histogram"
    if figure:
        from molora_cli.views.figure import check_figure

        check_figure(figure, kind, force=force)
    trace = _trace(out, what, place, base, data or [], texts, chat, save_trace, force)
    _show_trace(out, trace, figure, kind, tokens, limit, top, template)


def _texts(prompts: list[str], stdin: bool) -> list[str]:
    """The loose texts; standard input is read once, as UTF-8."""
    texts = [argument_text(p) for p in prompts if p != "-"]
    if stdin or "-" in prompts:
        texts.append(sys.stdin.buffer.read().decode("utf-8", "replace"))
    for text in texts:
        if not text.strip():
            raise InputError("the text to route is empty", "give --prompt TEXT, or pipe a text in")
    return texts


def _show_facts(out: Out, what: str, place: Path, base: str | None) -> None:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.inspection import adapter_facts, bundle_facts
    from molora_cli.views.tables import AdapterView, BundleView

    if what == "bundle":
        document = bundle_facts(Bundle.open(place, base), base)
        for warning in document["warnings"]:
            out.warn(warning)
        out.result(document, lambda console: console.print(BundleView(document)))
        return
    document = adapter_facts(place)
    out.result(document, lambda console: console.print(AdapterView(document)))


def _trace(
    out: Out,
    what: str,
    place: Path,
    base: str | None,
    data: list[str],
    texts: list[str],
    chat: bool,
    save: Path | None,
    force: bool,
) -> Any:
    """The trace of a file, or of texts through a bundle's router; saved where that is asked for."""
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.trace_files import check_trace_target, load_trace, save_trace

    if save:
        check_trace_target(save, force=force)
    if what == "trace":
        trace = load_trace(place)
    else:
        from molora_cli.core.tracing import read_documents, trace_texts

        documents = read_documents(data, texts, chat=chat)
        bundle = Bundle.open(place, base)
        with out.progress("routing") as ticker:
            trace = trace_texts(bundle, documents, ticker=ticker)
        for warning in bundle.warnings:
            out.warn(warning)
    if save:
        save_trace(save, trace, force=force)
        out.note(f"saved {len(trace):,} routes to {save}")
    return trace


def _show_trace(
    out: Out,
    trace: Any,
    figure: Path | None,
    view: Literal["histogram", "tokens"],
    tokens: bool | None,
    limit: int,
    top: int,
    template: bool,
) -> None:
    from rich.console import Console

    from molora_cli.core.stats import summarise
    from molora_cli.core.trace import listing
    from molora_cli.views.coloured import ColouredDocuments
    from molora_cli.views.histogram import Histogram
    from molora_cli.views.tables import StatsView

    stats = summarise(trace, top=top, template=template)

    def human(console: Console) -> None:
        if tokens is not False:
            console.print(ColouredDocuments(trace, limit=limit, template=template))
        console.print(Histogram(trace, stats))
        console.print()
        console.print(StatsView(trace, stats))

    document = {
        "what": "trace",
        "tokens": len(trace),
        "tokens_counted": stats.tokens,
        "tokens_of_template": stats.template_tokens,
        "documents": len(trace.starts),
        "adapters": list(trace.adapters),
        "experts": list(trace.experts),
        "meta": trace.meta,
        "stats": stats.document(),
        "warnings": stats.warnings(),
    }
    if tokens:
        document["listing"] = listing(trace, limit)
    out.result(document, human)
    for warning in stats.warnings():
        out.warn(warning)
    if figure:
        from molora_cli.views.figure import write_figure

        write_figure(figure, trace, stats, view=view, limit=limit)
        out.note(f"drew {figure}")
