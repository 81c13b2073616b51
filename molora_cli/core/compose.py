"""Adapters to bundle: refs -> checked adapters -> measured effect -> one folder that appears whole or not
at all."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molora_cli._version import __version__
from molora_cli.core.adapter.mlx_config import WEIGHTS as MLX_WEIGHTS
from molora_cli.core.adapter.read import base_named, read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.embedded import SMOLLM2_ID
from molora_cli.core.base.fingerprint import fingerprint
from molora_cli.core.base.resolve import ResolvedBase, looks_like_hub_id, resolve_ref
from molora_cli.core.base.structure import BaseModules, read_structure
from molora_cli.core.bundle.card import CARD_FILE, write_card
from molora_cli.core.bundle.manifest import (
    MANIFEST_FILE,
    AdapterEntry,
    BaseEntry,
    Coverage,
    Effect,
    Manifest,
    ModuleEntry,
)
from molora_cli.core.bundle.store import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Bundle, dump_manifest, sha256_file
from molora_cli.core.bundle.writing import check_target, new_folder, write_text
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import Ref, check_adapter_name, parse_named, parse_ref
from molora_cli.text import shorten

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_QUANTISED = re.compile(
    r"[-_.](unsloth|bnb|gptq|awq|int[48]|[48]bit|fp8|gguf|mlx)(?=[-_.]|\Z)", re.IGNORECASE
)


@dataclass(frozen=True)
class Request:
    """What is asked for. adapters: (name, path or hub id) in order. base: None takes what the adapters name.

    same_base: the adapters' configs may name their base differently. allow_noop: an adapter may be without
    effect. saved_rank: full copies of modules are approximated by LoRA of this rank; None refuses them.
    """

    output: Path
    adapters: tuple[tuple[str, str], ...]
    base: str | None = None
    force: bool = False
    allow_noop: bool = False
    same_base: bool = False
    trust_remote_code: bool = False
    saved_rank: int | None = None


@dataclass(frozen=True)
class Plan:
    """What would be written. files: path in the bundle and bytes (those of text files are close
    estimates)."""

    request: Request
    base: ResolvedBase
    modules: BaseModules
    adapters: tuple[Adapter, ...]
    files: tuple[tuple[str, int], ...]
    warnings: tuple[str, ...]


# -- names --------------------------------------------------------------------
def parse_adapters(texts: Sequence[str] | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """`NAME=REF` texts (or a mapping) as pairs; without a name it is the folder's.

    Raises InputError for a bad name, or one that is used twice (also if only the case differs: the names
    become folders, and some disks cannot tell them apart).
    """
    if isinstance(texts, Mapping):
        pairs = [(check_adapter_name(name), ref) for name, ref in texts.items()]
    else:
        pairs = [parse_named(_folder_for_file(text)) for text in texts]
    if not pairs:
        raise InputError("no adapter was given", "molora compose -o BUNDLE --base BASE NAME=ADAPTER ...")
    by_name: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs:
        by_name.setdefault(pair[0].lower(), []).append(pair)
    for same in by_name.values():
        if len(same) > 1:
            refs = ", ".join(shorten(ref) for _, ref in same)
            names = list(dict.fromkeys(name for name, _ in same))
            also = f" (as {', '.join(names)}: only the case differs)" if len(names) > 1 else ""
            raise InputError(f"name {names[0]} is used twice{also}: {refs}", "use name=path, each name once")
    return tuple(pairs)


def _folder_for_file(text: str) -> str:
    """A bare path to one of an adapter's files is named after the folder; a .gguf after itself."""
    path = Path(text)
    if path.suffix == ".gguf" and path.is_file():
        return f"{path.stem}={text}"
    if path.name in (ADAPTER_WEIGHTS, ADAPTER_CONFIG, *MLX_WEIGHTS) and path.is_file():
        return str(path.absolute().parent)
    return text


# -- which base ---------------------------------------------------------------
def _plain_name(base: str) -> str:
    """The last part of a base's name without what only says how it was packed."""
    return _QUANTISED.sub("", base.rstrip("/").rpartition("/")[2]).lower()


def choose_base(request: Request) -> Ref:
    """The base, from the request or from the adapters' configs.

    A config's own base is used only where it is a hub id: a path in a stranger's file is never looked up.
    Raises InputError: adapters of different bases, or none that names a usable one.
    """
    hints: dict[str, tuple[str, str]] = {}
    for name, text in request.adapters:
        hint = base_named(parse_ref(text), saved_rank=request.saved_rank)
        if hint:
            hints.setdefault(_plain_name(hint), (name, hint))
    if len(hints) > 1 and not request.same_base:
        (first, its), (second, other) = list(hints.values())[:2]
        raise InputError(
            f"the adapters' bases differ: '{first}' was trained on {shorten(its)}, "
            f"'{second}' on {shorten(other)}",
            "compose adapters of one base; --same-base where both names mean the same model",
        )
    if request.base is not None:
        return parse_ref(request.base)
    # MLX's own copies of bases are packed in ways of MLX's
    named = [
        hint
        for _, hint in hints.values()
        if looks_like_hub_id(hint) and not hint.lower().startswith("mlx-community/")
    ]
    if named:
        return Ref("hub", named[0], repo=named[0])
    said = (
        f" (their configs say {shorten(next(iter(hints.values()))[1])}, which is no hub id)" if hints else ""
    )
    raise InputError(
        f"the base is not known: --base was not given{said}", "--base FOLDER, FILE.gguf, org/name or smollm2"
    )


def _base_warnings(base: ResolvedBase, adapters: Sequence[Adapter]) -> list[str]:
    warnings = list(base.notes)
    for adapter in adapters:
        if adapter.base_hint and _plain_name(adapter.base_hint) not in (
            _plain_name(base.id),
            _plain_name(base.path.name),
        ):
            warnings.append(
                f"adapter '{adapter.name}' says it was trained on {shorten(adapter.base_hint)}; "
                f"the base is {base.id}"
            )
    return warnings


# -- planning -----------------------------------------------------------------
def plan(request: Request, *, ticker: Ticker = no_ticks) -> Plan:
    """Check everything that headers can tell, and say what would be written. Writes nothing but the base's
    cache.

    Raises InputError with the reason and the way out; MoloraError where the disk has no room.
    """
    check_target(request.output, force=request.force, own_file=MANIFEST_FILE)
    _check_apart(request)
    base = resolve_ref(choose_base(request), ticker=ticker)
    modules = read_structure(base.path)
    adapters = tuple(
        read_adapter(
            name, parse_ref(text), modules, allow_noop=request.allow_noop, saved_rank=request.saved_rank
        )
        for name, text in request.adapters
    )
    files = tuple(_files(adapters))
    _check_room(request.output, sum(size for _, size in files))
    warnings = _base_warnings(base, adapters)
    warnings += [f"{adapter.name}: {note}" for adapter in adapters for note in adapter.notes]
    return Plan(request, base, modules, adapters, files, tuple(warnings))


def _check_apart(request: Request) -> None:
    """The output is neither an input, nor in one, nor around one."""
    output = request.output.resolve()
    inputs = [(f"adapter '{name}'", text) for name, text in request.adapters]
    if request.base is not None:
        inputs.append(("the base", request.base))
    for what, text in inputs:
        path = Path(text).expanduser()
        if not os.path.lexists(path):
            continue
        place = path.resolve() if path.is_dir() else path.resolve().parent
        if output == place or (path.is_dir() and place in output.parents) or output in place.parents:
            raise InputError(
                f"the output {request.output} and {what} ({shorten(text)}) overlap",
                "name an output outside the inputs",
            )


def _files(adapters: Sequence[Adapter]) -> Iterator[tuple[str, int]]:
    manifest = 25_000  # base and fingerprint
    for adapter in adapters:
        folder = f"adapters/{adapter.name}"
        if adapter.canonical:
            config, weights = (adapter.path / ADAPTER_CONFIG).stat().st_size, adapter.weights.stat().st_size
        else:
            numbers = sum(m.parameters * _BYTES.get(m.dtype, 4) for m in adapter.modules.values())
            config, weights = 1500, numbers + 200 * len(adapter.modules)
        yield f"{folder}/{ADAPTER_CONFIG}", config
        yield f"{folder}/{ADAPTER_WEIGHTS}", weights
        manifest += 100 * len(adapter.modules) + 1000
    yield MANIFEST_FILE, manifest
    yield CARD_FILE, 2000


def _check_room(output: Path, size: int) -> None:
    parent = next(p for p in output.absolute().parents if p.is_dir())
    free = shutil.disk_usage(parent).free
    if size > free:
        raise MoloraError(
            f"{output} needs {size / 1e6:.1f} MB, {parent} has {free / 1e6:.1f} MB free", "free some space"
        )


# -- composing ----------------------------------------------------------------
def compose(work: Plan, *, ticker: Ticker = no_ticks) -> Bundle:
    """Measure every adapter's effect, write the bundle, and open it.

    Raises InputError where an adapter has no effect; MoloraError where the disk is full. Nothing is left
    behind then, and an older bundle in that place stays as it was.
    """
    effects, notes = measure_effect(work, ticker)
    request = work.request
    with new_folder(request.output, force=request.force, own_file=MANIFEST_FILE) as folder:
        entries = []
        for done, adapter in enumerate(work.adapters):
            ticker(done, len(work.adapters), f"writing {adapter.name}")
            place = folder / "adapters" / adapter.name
            place.mkdir(parents=True)
            write_peft(adapter, place)
            entries.append(
                adapter_entry(adapter, place, work.modules, effects[adapter.name], notes.get(adapter.name))
            )
        manifest = Manifest(
            created_by=f"molora {__version__}",
            base=_base_entry(work),
            adapters=entries,
        )
        write_text(folder / MANIFEST_FILE, dump_manifest(manifest))
        write_card(folder, manifest, request.output.absolute().name)
    return Bundle.open(request.output, base=str(work.base.path))


def measure_effect(work: Plan, ticker: Ticker) -> tuple[dict[str, Effect], dict[str, str]]:
    """Each adapter's effect on the probe by name, and notes by name. Raises InputError where one has none."""
    from molora_cli.core.adapter.factors import load_factors
    from molora_cli.core.base.model import load_base_model
    from molora_cli.core.effect import check_effect, measure_effects

    ticker(0, None, "loading the base")
    model, tokenizer = load_base_model(work.base.path, trust_remote_code=work.request.trust_remote_code)
    factors = ((adapter.name, load_factors(adapter)) for adapter in work.adapters)
    effects = measure_effects(model, tokenizer, factors, ticker=ticker)
    notes: dict[str, str] = {}
    for name, effect in effects.items():
        note = check_effect(name, effect, allow_noop=work.request.allow_noop)
        if note:
            notes[name] = note
    return effects, notes


def _base_entry(work: Plan) -> BaseEntry:
    targeted = list(dict.fromkeys(module for adapter in work.adapters for module in adapter.modules))
    local = None if work.base.revision or work.base.id == SMOLLM2_ID else str(work.base.path.resolve())
    return BaseEntry(
        id=work.base.id,
        revision=work.base.revision,
        path_hint=local,
        fingerprint=fingerprint(work.base.path, targeted, base=work.modules),
    )


def adapter_entry(
    adapter: Adapter, place: Path, base: BaseModules, effect: Effect, note: str | None
) -> AdapterEntry:
    """What the manifest says of an adapter that was written to `place`."""
    written = sha256_file(place / ADAPTER_WEIGHTS)
    extra: dict[str, Any] = {} if written == adapter.sha256 else {"source_sha256": adapter.sha256}
    linear = sum(shape.kind != "embedding" for shape in base.values())
    return AdapterEntry(
        name=adapter.name,
        folder=f"adapters/{adapter.name}",
        source=adapter.source,
        revision=adapter.revision,
        sha256=written,
        licence=adapter.licence,
        dtype=", ".join(sorted({m.dtype for m in adapter.modules.values()})),
        parameters=adapter.parameters,
        modules={
            name: ModuleEntry(rank=m.rank, alpha=m.alpha, scale=m.scale)
            for name, m in adapter.modules.items()
        },
        coverage=Coverage(matched=len(adapter.modules), in_file=adapter.in_file, in_base=linear),
        effect=effect,
        notes=[*adapter.notes, *([note] if note else [])],
        **extra,
    )


def layers_covered(adapter: AdapterEntry | Adapter, base: BaseModules) -> tuple[int, int]:
    """How many of the base's layers an adapter touches, and how many there are."""
    touched = {base.layer_of(module) for module in adapter.modules}
    return len(touched - {None}), base.n_layers
