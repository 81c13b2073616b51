"""`molora inspect`: what a path holds, and where the tokens of a text go."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.errors import InputError
from molora_cli.out import Out
from molora_cli.text import argument_text

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.stats import Stats
    from molora_cli.core.trace import Trace
    from molora_cli.views.report import Side

EPILOG = """\b
Examples:
  molora inspect my-bundle
  molora inspect my-bundle --prompt "Integrate x^2, then write the SQL for it"
  molora inspect my-bundle --data math=math.jsonl --data code=code.jsonl --figure shares.png
  molora inspect my-bundle --data math=math.jsonl --report routes.html --compare other-bundle
  molora inspect ./my-lora
"""


VIEWS = ("histogram", "tokens", "heatmap", "position")


@dataclass(frozen=True)
class Show:
    """What is shown of a trace, and how. view: the only one, or None; kind: the one a figure draws."""

    view: Any
    kind: Any
    tokens: bool | None
    limit: int
    top: int
    template: bool
    figure: Path | None
    report: Path | None
    force: bool


@dataclass(frozen=True)
class Shown:
    """A trace, where it comes from, and the bundle behind it where that is at hand."""

    place: Path
    trace: Trace
    bundle: Bundle | None

    def side(self, stats: Stats) -> Side:
        """As one side of a report."""
        from molora_cli.core.inspection import bundle_facts
        from molora_cli.views.report import Side

        facts = bundle_facts(self.bundle) if self.bundle else None
        return Side(self.place.name or str(self.place), self.trace, stats, facts)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("inspect", epilog=EPILOG)(command)


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
        Optional[str],  # noqa: UP045
        typer.Option(
            "--view",
            help="Show this view alone, and draw it with --figure: histogram, tokens, heatmap (layers "
            "against adapters) or position (along the text).",
        ),
    ] = None,
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--report", help="Write every view as one page, FILE.html, that needs no network."),
    ] = None,
    compare: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--compare",
            help="A second bundle, which routes the same tokens, or a second trace, shown beside the first.",
        ),
    ] = None,
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
    kind: Any = view or "histogram"
    if kind not in VIEWS:
        raise InputError(f"--view is '{view}'; it can be {', '.join(VIEWS)}", "give one of them")
    texts = _texts(prompt or [], stdin or path == "-")
    place = default_bundle() if path in (None, "-") else Path(str(path)).expanduser()
    what = recognise(place)
    wants_trace = bool(texts or data)
    if what != "bundle" and wants_trace:
        raise InputError(f"{place} has no router that could route a text", "give a bundle")
    if not wants_trace and what != "trace":
        if figure or save_trace or report or compare:
            raise InputError("there is no text to draw, save or compare", "give --prompt, --data or --stdin")
        _show_facts(out, what, place, base)
        return
    if figure:
        from molora_cli.views.figure import check_figure

        check_figure(figure, kind, force=force)
    if report:
        from molora_cli.views.report import check_report

        check_report(report, force=force)
    trace, bundle = _trace(out, what, place, base, data or [], texts, chat, save_trace, force)
    second = _second(out, compare, trace, base) if compare else None
    show = Show(view, kind, tokens, limit, top, template, figure, report, force)
    _show_trace(out, show, Shown(place, trace, bundle), second)


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
) -> tuple[Trace, Bundle | None]:
    """The trace of a file, or of texts through a bundle's router; saved where that is asked for.

    With it the bundle it is of, where that is at hand.
    """
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.trace_files import check_trace_target, load_trace, save_trace

    if save:
        check_trace_target(save, force=force)
    bundle: Bundle | None
    if what == "trace":
        trace = load_trace(place)
        bundle = _recorded(trace)
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
    return trace, bundle


def _recorded(trace: Trace) -> Bundle | None:
    """The bundle that a trace says it was made with, if it still lies there unchanged."""
    from molora_cli.core.bundle.store import Bundle

    try:
        bundle = Bundle.open(Path(str(trace.meta.get("bundle"))))
    except (InputError, OSError, ValueError):
        return None
    return bundle if bundle.digest == trace.meta.get("digest") else None


def _second(out: Out, place: Path, trace: Trace, base: str | None) -> Shown:
    """What a trace is compared with: a trace, or the same tokens through another bundle."""
    from molora_cli.core.agreement import trace_again
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.inspection import recognise
    from molora_cli.core.trace_files import load_trace

    place = place.expanduser()
    what = recognise(place)
    if what == "trace":
        other = load_trace(place)
        return Shown(place, other, _recorded(other))
    if what != "bundle":
        raise InputError(f"{place} is neither a bundle nor a trace", "give one of the two to --compare")
    bundle = Bundle.open(place, base)
    with out.progress("routing") as ticker:
        other = trace_again(bundle, trace, ticker=ticker)
    for warning in bundle.warnings:
        out.warn(warning)
    return Shown(place, other, bundle)


def _show_trace(out: Out, show: Show, first: Shown, second: Shown | None) -> None:
    from molora_cli.core.agreement import agreement
    from molora_cli.core.stats import summarise
    from molora_cli.core.trace import listing
    from molora_cli.views.trace import TraceView

    trace = first.trace
    stats = summarise(trace, top=show.top, template=show.template)
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
    if show.tokens:
        document["listing"] = listing(trace, show.limit)
    found = agreement(trace, second.trace, template=show.template) if second else None
    if second:
        document["compared_with"] = str(second.place)
        document["agreement"] = asdict(found) if found else None
    view = TraceView(trace, stats, view=show.view, tokens=show.tokens, limit=show.limit)
    if second:
        view.compare(found, (str(first.place), str(second.place)))
    out.result(document, lambda console: console.print(view))
    for warning in stats.warnings():
        out.warn(warning)
    if show.figure:
        from molora_cli.views.figure import write_figure

        write_figure(show.figure, trace, stats, view=show.kind, limit=show.limit)
        out.note(f"drew {show.figure}")
    if show.report:
        from molora_cli.views.report import write_report

        beside = None
        if second:
            beside = second.side(summarise(second.trace, top=show.top, template=show.template))
        size = write_report(show.report, first.side(stats), beside, force=show.force)
        out.note(f"wrote {show.report} ({size / 1e6:.1f} MB)")
