"""`molora compose`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from molora_cli import options
from molora_cli.out import Out
from molora_cli.recipes import Setting, load_recipe, merge
from molora_cli.text import shorten

if TYPE_CHECKING:
    from rich.console import Console

    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.compose import Plan

# Typer resolves these annotations at run time, on Python 3.10 too, so they are spelt with Optional
Texts = Optional[list[str]]  # noqa: UP045
Place = Optional[Path]  # noqa: UP045
Switch = Optional[bool]  # noqa: UP045

EPILOG = """\b
Examples:
  molora compose -o my-bundle --base smollm2 math=./adapters/math code=./adapters/code
  molora compose --recipe recipes/demo.yaml -o my-bundle --dry-run
"""
DEFAULTS: dict[str, Any] = {
    "output": None,
    "base": None,
    "adapters": [],
    "allow_noop": False,
    "same_base": False,
    "modules_to_save": None,
    "default": False,
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("compose", epilog=EPILOG)(command)


def command(
    adapters: Annotated[
        Texts, typer.Argument(metavar="NAME=ADAPTER...", help="Folder, FILE.gguf or org/name@revision.")
    ] = None,
    output: Annotated[Place, typer.Option("--output", "-o", help="Folder of the new bundle.")] = None,
    base: options.Base = None,
    recipe: options.Recipe = None,
    default: Annotated[
        Switch, typer.Option("--default", help="Make it the bundle that chat and inspect take.")
    ] = None,
    allow_noop: Annotated[
        Switch, typer.Option("--allow-noop", help="Accept adapters without effect.")
    ] = None,
    same_base: Annotated[
        Switch,
        typer.Option("--same-base", help="The adapters name their base differently but mean one model."),
    ] = None,
    modules_to_save: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--modules-to-save",
            metavar="svd:R",
            help="Approximate full copies of modules in an adapter by LoRA of rank R; the error is shown.",
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Put several LoRA adapters of one base model into a bundle, each checked and proven to have an
    effect."""
    from molora_cli.core.bundle.store import set_default_bundle
    from molora_cli.core.compose import compose, plan

    out = Out(json_mode=json, quiet=quiet)
    flags = {
        "output": output,
        "base": base,
        "adapters": adapters,
        "default": default,
        "allow_noop": allow_noop,
        "same_base": same_base,
        "modules_to_save": modules_to_save,
    }
    section = load_recipe(recipe, "compose") if recipe else {}
    settings = merge(flags, section, DEFAULTS)
    request = _request(settings, force=force, trust_remote_code=trust_remote_code)
    with out.progress("composing") as ticker:
        work = plan(request, ticker=ticker)
        bundle = None if dry_run else compose(work, ticker=ticker)
    for warning in work.warnings:
        out.warn(warning)
    if bundle is None:
        out.result(_planned(work, settings), lambda console: _show_plan(console, work, settings))
        return
    if settings["default"].value:
        set_default_bundle(bundle.path)
    out.result(_document(bundle, work), lambda console: _show(console, bundle, work))
    out.note(f"next: molora train-router {bundle.path} --data NAME=FILE ..., or molora inspect {bundle.path}")


def _request(settings: dict[str, Setting], *, force: bool, trust_remote_code: bool) -> Any:
    from molora_cli.core.adapter.saved import parse_saved
    from molora_cli.core.compose import Request, parse_adapters
    from molora_cli.errors import InputError

    if not settings["output"].value:
        raise InputError("no output was named", "molora compose -o BUNDLE ...")
    saved = settings["modules_to_save"].value
    return Request(
        output=Path(settings["output"].value).expanduser(),
        adapters=parse_adapters(settings["adapters"].value),
        base=settings["base"].value,
        force=force,
        allow_noop=settings["allow_noop"].value,
        same_base=settings["same_base"].value,
        trust_remote_code=trust_remote_code,
        saved_rank=parse_saved(saved) if saved else None,
    )


# -- what is shown ------------------------------------------------------------
def _planned(work: Plan, settings: dict[str, Setting]) -> dict[str, Any]:
    return {
        "bundle": str(work.request.output),
        "written": False,
        "settings": {name: {"value": s.value, "source": s.source} for name, s in settings.items()},
        "base": {"id": work.base.id, "revision": work.base.revision, "path": str(work.base.path)},
        "adapters": [
            {
                "name": a.name,
                "source": a.source,
                "revision": a.revision,
                "licence": a.licence,
                "ranks": a.ranks,
                "parameters": a.parameters,
                "modules": {
                    m: {"rank": v.rank, "alpha": v.alpha, "scale": v.scale} for m, v in a.modules.items()
                },
            }
            for a in work.adapters
        ],
        "files": [{"path": path, "bytes": size} for path, size in work.files],
        "bytes": sum(size for _, size in work.files),
        "warnings": list(work.warnings),
    }


def _show_plan(console: Console, work: Plan, settings: dict[str, Setting]) -> None:
    from rich.text import Text

    def line(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    line("would compose with")
    for name, setting in settings.items():
        value = setting.value
        shown = ", ".join(f"{n}={v}" for n, v in value.items()) if isinstance(value, dict) else value
        shown = ", ".join(value) if isinstance(value, list | tuple) else shown
        line(
            f"  {name:<11} {shorten(str(shown if shown not in (None, '') else '-'), 200)}  ({setting.source})"
        )
    line(f"  base is {work.base.id} in {shorten(str(work.base.path), 200)}")
    for adapter in work.adapters:
        line(
            f"  {adapter.name}: rank {_ranks(adapter.ranks)}, {len(adapter.modules)} modules, "
            f"from {shorten(adapter.source)}"
        )
    line(f"would write below {work.request.output}")
    for path, size in work.files:
        line(f"  {path}  {size:,} bytes")
    line(f"  together about {sum(size for _, size in work.files) / 1e6:.1f} MB; nothing was written")


def _document(bundle: Bundle, work: Plan) -> dict[str, Any]:
    manifest = bundle.manifest.model_dump(mode="json", exclude_none=True)
    del manifest["base"]["fingerprint"]
    return {
        "bundle": str(bundle.path),
        "written": True,
        "base": {**manifest["base"], "path": str(work.base.path)},
        "adapters": manifest["adapters"],
        "warnings": list(work.warnings),
    }


def _ranks(ranks: list[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _show(console: Console, bundle: Bundle, work: Plan) -> None:
    from rich.table import Table

    from molora_cli.core.compose import layers_covered

    table = Table(title=f"{bundle.path}: base {work.base.id}", title_justify="left", box=None, pad_edge=False)
    for heading in ("adapter", "rank", "modules", "layers", "parameters", "effect", "licence"):
        table.add_column(heading, justify="left" if heading in ("adapter", "licence") else "right")
    for adapter in work.adapters:
        entry = bundle.entry(adapter.name)
        layers, of = layers_covered(adapter, work.modules)
        effect = f"{entry.effect.rms / (entry.effect.base_rms or 1):.1%}" if entry.effect else "-"
        cells = (
            _ranks(adapter.ranks),
            str(len(entry.modules)),
            f"{layers} of {of}",
            f"{entry.parameters:,}",
            effect,
        )
        table.add_row(adapter.name, *cells, shorten(entry.licence or "not stated", 30))
    console.print(table)
