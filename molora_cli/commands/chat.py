"""`molora chat`."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from molora_cli import options
from molora_cli.errors import InputError
from molora_cli.out import SCHEMA_VERSION, Out
from molora_cli.text import argument_text

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.chat_session import ChatSession
    from molora_cli.core.conversation import Saved
    from molora_cli.views.palette import Palette

# Typer resolves these annotations at run time, on Python 3.10 too, so they are spelt with Optional
Text = Optional[str]  # noqa: UP045
Names = Optional[list[str]]  # noqa: UP045
File = Optional[Path]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045

EPILOG = """\b
Examples:
  molora chat my-bundle --prompt "Count users by country in SQL, then explain the query."
  echo "What is 17 * 24?" | molora chat my-bundle --route off --json
"""
_SAMPLING = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("chat", epilog=EPILOG)(command)


def command(
    context: typer.Context,
    bundle: Annotated[File, typer.Argument(help="Folder of a bundle; without it the default one.")] = None,
    prompt: Annotated[
        Names,
        typer.Option(
            "--prompt",
            "-p",
            help="Answer this and exit; given again, the next turn. A piped standard input does the same.",
        ),
    ] = None,
    resume: Annotated[
        File,
        typer.Option(
            help="Take up a conversation that /save wrote, with its settings; options given here go first."
        ),
    ] = None,
    system: Annotated[Text, typer.Option(help="System text.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token, above 0 draws.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0 = all.")] = 0,
    seed: Annotated[Whole, typer.Option(help="Seed of the drawing.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Do not stop at the turn's end.")] = False,
    route: Annotated[str, typer.Option(help="auto: the router; off: the base; NAME: one adapter.")] = "auto",
    mute: Annotated[Names, typer.Option(help="Adapter that no token may take; may be given again.")] = None,
    base: options.Base = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    backend: Annotated[str, typer.Option(help="What runs the linears: auto, torch, cpu or triton.")] = "auto",
    weights: options.Weights = "full",
    compile: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            envvar="MOLORA_COMPILE",
            help="Compile the decode step, once per base, beside the chat.",
        ),
    ] = True,
    chat_template: Annotated[File, typer.Option(help="Jinja file used as the chat template.")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Continue text; no chat template.")] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON Lines: every token, then a summary.")] = False,
    quiet: options.Quiet = False,
    no_colour: Annotated[
        bool, typer.Option("--no-colour", "--no-color", help="Letters instead of colours.")
    ] = False,
) -> None:
    """Talk to a bundle: the answer streams in, every token in the colour of the adapter that made it."""
    from molora_cli.core.bundle.store import Bundle, default_bundle
    from molora_cli.core.chat_session import ChatSession
    from molora_cli.core.chat_settings import Settings
    from molora_cli.core.conversation import load as load_conversation
    from molora_cli.core.starting import collector_paused
    from molora_cli.views.palette import Palette

    if sys.stdout.isatty():  # its window may be resized while chat runs, what a shell exported stays
        os.environ.pop("COLUMNS", None)
    out = Out(json_mode=json, quiet=quiet)
    out.stdout.no_color = out.stdout.no_color or no_colour
    out.stderr.no_color = out.stderr.no_color or no_colour
    given = {name for name in context.params if _is_given(context, name)}
    settings = Settings(max_new_tokens, temperature, top_p, top_k, seed, ignore_eos)
    settings.check()
    questions = _questions(prompt, json)
    saved = load_conversation(resume.expanduser()) if resume else None
    opened = Bundle.open(bundle or default_bundle(), base)
    route = route if "route" in given else _saved_route(saved, opened, route)
    _check_routing(opened, route, mute or [])
    out.note(f"loading {opened.path} ...")

    with collector_paused():
        from molora_cli.core.chat_template import need_tokenizer, use_template_file
        from molora_cli.core.routed.model import load

        model = load(
            opened.path,
            base=base,
            device=device,
            dtype=dtype,
            backend=backend,
            weights=weights,
            trust_remote_code=trust_remote_code,
            notify=out.note,
        )
    for warning in (model.bundle or opened).warnings:
        out.warn(warning)
    if chat_template:
        use_template_file(need_tokenizer(model.tokenizer), chat_template)
    if compile:
        model.compile_step(out.note)
    session = ChatSession(model, plain=plain, notify=out.warn)
    session.settings = settings
    if saved and resume:
        for left in session.resume(saved, resume.expanduser()):
            out.warn(left)
        for name in given.intersection(_SAMPLING):
            setattr(session.settings, name, getattr(settings, name))
    session.route = route
    if system is not None:
        session.conversation.system = argument_text(system)
    if mute:
        model.muted = frozenset(mute)
    palette = Palette(model.adapters, out.stdout)
    if questions:
        for question in questions:
            if len(questions) > 1:
                out.note(f"\n> {question}")
            _answer_once(session, question, out, palette)
    else:
        from molora_cli.views.repl import Repl

        Repl(session, out, palette).run()


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option was written on the command line, and is not its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _saved_route(saved: Saved | None, bundle: Bundle, default: str) -> str:
    """The route of a saved conversation where this bundle has it, else `default`."""
    route = saved.routing.get("route") if saved else None
    known = route == "off" or route in bundle.adapters or (route == "auto" and bundle.router_spec is not None)
    return str(route) if known else default


def _questions(prompts: list[str] | None, json: bool) -> list[str]:
    """The turns of `--prompt`, or the one of a piped standard input; none means a conversation."""
    if not prompts and not sys.stdin.isatty():
        try:
            prompts = [sys.stdin.buffer.read().decode("utf-8-sig")]
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not UTF-8 at byte {error.start}", "convert it") from None
    if not prompts and json:
        raise InputError("--json needs a question", "give --prompt TEXT, or pipe it in")
    if not all(prompt.strip() for prompt in prompts or []):
        raise InputError("the prompt is empty", "give a text with --prompt, or pipe one in")
    return [argument_text(prompt) for prompt in prompts or []]


def _check_routing(bundle: Bundle, route: str, mute: list[str]) -> None:
    """Names and router are looked at before the model is loaded."""
    known = ", ".join(bundle.adapters)
    for name in (*mute, *([] if route in ("auto", "off") else [route])):
        if name not in bundle.adapters:
            raise InputError(f"there is no adapter '{name}' in {bundle.path}", f"use one of: {known}")
    if route == "auto" and bundle.router_spec is None:
        raise InputError(
            f"{bundle.path} has no router yet",
            f"molora train-router {bundle.path} --data NAME=FILE ..., or --route off, or --route NAME",
        )


def _answer_once(session: ChatSession, question: str, out: Out, palette: Palette) -> None:
    """One answer to stdout; legend and figures to stderr, or everything as JSON Lines."""
    from molora_cli.views.chat import AnswerPrinter, event_record, statistics, summary_record

    with closing(session.ask(question)) as events:
        if out.json_mode:
            for number, event in enumerate(events, start=1):
                out.line(event_record(event, number))
            out.line(summary_record(session.last, palette, SCHEMA_VERSION))
            return
        printer = AnswerPrinter(out.stdout, palette)
        try:
            for event in events:
                printer.token(event)
        finally:
            printer.end()
    if out.stdout.is_terminal and not out.quiet:
        out.stderr.print(palette.legend(width=out.stderr.width))
    out.note(statistics(session.last, palette))
