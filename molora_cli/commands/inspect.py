"""`molora inspect`: what a path holds, and where the tokens of a text go."""

from __future__ import annotations

import sys
import time
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
class Source:
    """Where routes come from: a bundle or a saved trace, the texts to route, and where to keep the routes."""

    place: Path
    base: str | None
    data: list[str]
    texts: list[str]
    chat: bool
    save: Path | None


@dataclass(frozen=True)
class Shown:
    """Routes, where they come from, and the bundle behind them where that is at hand. The trace may hold only
    the first of the `tokens` and `documents` that `stats` counts."""

    place: Path
    trace: Trace
    stats: Stats
    tokens: int
    documents: int
    bundle: Bundle | None

    @classmethod
    def whole(cls, place: Path, trace: Trace, bundle: Bundle | None, top: int, template: bool) -> Shown:
        """All of a trace."""
        from molora_cli.core.counting import summarise

        stats = summarise(trace, top=top, template=template)
        return cls(place, trace, stats, len(trace), len(trace.starts), bundle)

    def side(self) -> Side:
        """As one side of a report."""
        from molora_cli.core.inspection import bundle_facts
        from molora_cli.views.report import Side

        facts = bundle_facts(self.bundle) if self.bundle else None
        return Side(self.place.name or str(self.place), self.trace, self.stats, facts)


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
    show = Show(view, kind, tokens, limit, top, template, figure, report, force)
    source = Source(place, base, data or [], texts, chat, save_trace)
    first = _first(out, what, source, show, keep_all=compare is not None)
    second = _second(out, compare, first.trace, base, show) if compare else None
    _show_trace(out, show, first, second)


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


def _first(out: Out, what: str, source: Source, show: Show, *, keep_all: bool) -> Shown:
    """The routes of a saved trace, or of texts through a bundle's router; saved where that is asked for."""
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.trace_files import check_trace_target, load_trace, save_trace

    save, place = source.save, source.place
    if save:
        check_trace_target(save, force=show.force)
    if what == "trace":
        trace = load_trace(place)
        first = Shown.whole(place, trace, _recorded(trace), show.top, show.template)
    else:
        from molora_cli.core.survey import KEEP, survey
        from molora_cli.core.texts import read_documents

        bundle = Bundle.open(place, source.base)
        with out.progress("routing") as ticker:
            documents = read_documents(source.data, source.texts, chat=source.chat, ticker=ticker)
            keep = None if save or keep_all else KEEP
            began = time.monotonic()
            found = survey(bundle, documents, keep=keep, top=show.top, template=show.template)
        seconds = time.monotonic() - began
        if found.tokens >= 10_000:  # fewer take as long as loading does, and a rate would mean nothing
            rate = found.tokens / seconds
            out.note(f"routed {found.tokens:,} tokens in {seconds:.1f} s ({rate:,.0f} a second)")
        first = Shown(place, found.trace, found.stats, found.tokens, found.documents, bundle)
        for warning in bundle.warnings:
            out.warn(warning)
    if save:
        save_trace(save, first.trace, force=show.force)
        out.note(f"saved {len(first.trace):,} routes to {save}")
    return first


def _recorded(trace: Trace) -> Bundle | None:
    """The bundle that a trace says it was made with, if it still lies there unchanged."""
    from molora_cli.core.bundle.store import Bundle

    try:
        bundle = Bundle.open(Path(str(trace.meta.get("bundle"))))
    except (InputError, OSError, ValueError):
        return None
    return bundle if bundle.digest == trace.meta.get("digest") else None


def _second(out: Out, place: Path, trace: Trace, base: str | None, show: Show) -> Shown:
    """What a trace is compared with: a trace, or the same tokens through another bundle."""
    from molora_cli.core.agreement import trace_again
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.inspection import recognise
    from molora_cli.core.trace_files import load_trace

    place = place.expanduser()
    what = recognise(place)
    if what == "trace":
        other = load_trace(place)
        return Shown.whole(place, other, _recorded(other), show.top, show.template)
    if what != "bundle":
        raise InputError(f"{place} is neither a bundle nor a trace", "give one of the two to --compare")
    bundle = Bundle.open(place, base)
    with out.progress("routing") as ticker:
        other = trace_again(bundle, trace, ticker=ticker)
    for warning in bundle.warnings:
        out.warn(warning)
    return Shown.whole(place, other, bundle, show.top, show.template)


def _show_trace(out: Out, show: Show, first: Shown, second: Shown | None) -> None:
    from molora_cli.core.agreement import agreement
    from molora_cli.core.trace import listing
    from molora_cli.views.trace import TraceView

    trace, stats = first.trace, first.stats
    if first.tokens > len(trace):
        out.note(f"all {first.tokens:,} tokens are counted; text and pages show the first {len(trace):,}")
    document = {
        "what": "trace",
        "tokens": first.tokens,
        "tokens_counted": stats.tokens,
        "tokens_of_template": stats.template_tokens,
        "documents": first.documents,
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

        beside = second.side() if second else None
        size = write_report(show.report, first.side(), beside, force=show.force)
        out.note(f"wrote {show.report} ({size / 1e6:.1f} MB)")
