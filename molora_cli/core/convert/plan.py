"""What a conversion reads and writes, checked before any tensor is touched. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molora_cli.core.adapter.locate import CONFIG
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.base.resolve import ResolvedBase, resolve_base, resolve_ref
from molora_cli.core.base.structure import BaseModules, read_structure
from molora_cli.core.bundle.manifest import MANIFEST_FILE
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.bundle.writing import check_target
from molora_cli.core.convert.refusals import check_gguf_adapter, check_merge, check_mlx_adapter
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import check_adapter_name, parse_ref
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.refs import Ref

TARGETS = ("peft", "mlx", "gguf", "bundle", "merged-peft", "merged-model")
METHODS = ("cat", "svd", "linear", "ties", "dare")
COLLECTION = "adapters.json"  # in a folder of several PEFT folders: their names in order, and their base
MERGE_RECORD = "molora-merge.json"  # in a merged model: what was folded into which base
DTYPES = ("float32", "bfloat16", "float16")
# what a folder must hold for --force to replace it
_OWN_FILE = {
    "peft": CONFIG,
    "mlx": CONFIG,
    "merged-peft": CONFIG,
    "bundle": MANIFEST_FILE,
    "merged-model": MERGE_RECORD,
}
# which options mean something for which target
_OPTIONS = {
    "method": ("merged-peft", "merged-model"),
    "weights": ("merged-peft", "merged-model"),
    "rank": ("merged-peft",),
    "density": ("merged-peft", "merged-model"),
    "dtype": ("mlx", "gguf", "merged-peft", "merged-model"),
}


@dataclass(frozen=True)
class Request:
    """What is asked for; see `molora convert --help`. adapters: those of the source to take, () = all.

    saved_rank: full copies of modules are approximated by LoRA of this rank; None refuses them.
    """

    source: str
    target: Path
    to: str
    base: str | None = None
    adapters: tuple[str, ...] = ()
    method: str | None = None
    rank: int | None = None
    weights: tuple[str, ...] = ()
    density: float | None = None
    dtype: str | None = None
    seed: int = 0
    force: bool = False
    allow_noop: bool = False
    saved_rank: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Plan:
    """A checked request. adapters: in the source's order. weights: adapter -> weight in a merge.

    several: the output is a folder of PEFT folders. own_file: what a folder must hold to be replaced.
    """

    request: Request
    kind: str
    base: ResolvedBase
    modules: BaseModules
    adapters: tuple[Adapter, ...]
    weights: Mapping[str, float]
    method: str | None
    several: bool
    own_file: str
    notes: tuple[str, ...]


def plan(request: Request, *, ticker: Ticker = no_ticks) -> Plan:
    """Open the source, check it against its base and against what the target can say. Writes nothing.

    Raises InputError with the reason and the way out.
    """
    _check_options(request)
    base, pairs, kind, notes = _open(request, ticker)
    pairs = _chosen(pairs, request, kind)
    several = request.to == "peft" and kind != "adapter" and not request.adapters
    own = COLLECTION if several else _OWN_FILE.get(request.to, "")
    _check_place(request, base, own)
    modules = read_structure(base.path)
    known = kind == "bundle" or request.allow_noop  # what is in a bundle has proven itself
    adapters = tuple(
        read_adapter(name, ref, modules, allow_noop=known, saved_rank=request.saved_rank)
        for name, ref in pairs
    )
    for adapter in adapters:
        notes += [f"{adapter.name}: {note}" for note in adapter.notes]
    method, weights = _merge_of(request, adapters)
    if request.to == "mlx":
        notes += check_mlx_adapter(adapters[0], modules)
    elif request.to == "gguf":
        notes += check_gguf_adapter(adapters[0], modules)
    elif method is not None:
        notes += check_merge(adapters, modules, request.to, method, weights)
    return Plan(request, kind, base, modules, adapters, weights, method, several, own, tuple(notes))


# -- options ------------------------------------------------------------------
def _check_options(request: Request) -> None:
    if request.to not in TARGETS:
        raise InputError(
            f"--to {shorten(request.to, 40)} is no format that is written", f"use {', '.join(TARGETS)}"
        )
    given = {
        "method": request.method is not None,
        "weights": bool(request.weights),
        "rank": request.rank is not None,
        "density": request.density is not None,
        "dtype": request.dtype is not None,
    }
    for option, targets in _OPTIONS.items():
        if given[option] and request.to not in targets:
            raise InputError(
                f"--{option} means nothing for --to {request.to}", f"it is for --to {' or '.join(targets)}"
            )
    if request.method is not None and request.method not in METHODS:
        raise InputError(f"--method {shorten(request.method, 40)} is not known", f"use {', '.join(METHODS)}")
    if request.dtype is not None and request.dtype not in DTYPES:
        raise InputError(f"--dtype {shorten(request.dtype, 40)} is not known", f"use {', '.join(DTYPES)}")
    if request.rank is not None and not 1 <= request.rank <= 65536:
        raise InputError(f"--rank {request.rank} must be from 1 to 65536", "leave it out, or say --rank 16")
    if request.density is not None and not 0 < request.density <= 1:
        raise InputError(f"--density {request.density} must be above 0 and at most 1", "say --density 0.5")
    if request.density is not None and request.method not in ("ties", "dare"):
        raise InputError("--density means nothing without --method ties or dare", "leave it out")
    if request.rank is not None and request.method in (None, "cat"):
        raise InputError(
            "--rank means nothing for --method cat, whose rank is the sum of the ranks", "use --method svd"
        )


def _merge_of(request: Request, adapters: Sequence[Adapter]) -> tuple[str | None, dict[str, float]]:
    """The method, and a weight per adapter: as given, else 1 for one adapter and 1/n for n."""
    if request.to not in ("merged-peft", "merged-model"):
        return None, {}
    weights = {a.name: 1.0 / len(adapters) for a in adapters}
    for text in request.weights:
        name, _, value = text.partition("=")
        if name not in weights:
            raise InputError(
                f"--weights {shorten(text, 60)}: there is no adapter '{shorten(name, 40)}'",
                f"write NAME=0.5 with a name of {', '.join(weights)}",
            )
        try:
            weights[name] = float(value)
        except ValueError:
            raise InputError(
                f"--weights {shorten(text, 60)}: '{shorten(value, 20)}' is no number", "write NAME=0.5"
            ) from None
        if not abs(weights[name]) <= 1e6:
            raise InputError(f"--weights {shorten(text, 60)} is out of range", "write NAME=0.5")
    if request.weights and len(request.weights) < len(adapters):
        missing = [n for n in weights if not any(t.partition("=")[0] == n for t in request.weights)]
        if missing:
            raise InputError(
                f"--weights says nothing about {', '.join(missing)}",
                f"give every adapter a weight: --weights {missing[0]}=0.5, or 0 to leave it out",
            )
    if not any(weights.values()):
        raise InputError("all --weights are 0: nothing would be merged", "give one a weight")
    return request.method or "cat", weights


# -- source -------------------------------------------------------------------
Pairs = list[tuple[str, "Ref"]]


def _open(request: Request, ticker: Ticker) -> tuple[ResolvedBase, Pairs, str, list[str]]:
    """The base, (name, ref) pairs, kind "bundle", "folder" (of several adapters) or "adapter", and notes."""
    place = Path(request.source).expanduser()
    if (place / MANIFEST_FILE).exists():
        bundle = Bundle.open(place, request.base)
        bundle.verify()
        path = bundle.find_base(ticker=ticker)
        base = ResolvedBase(path, bundle.manifest.base.id, bundle.manifest.base.revision)
        pairs = [(n, parse_ref(str(bundle.folder(n).absolute()))) for n in bundle.adapters]
        return base, pairs, "bundle", list(bundle.warnings)
    names = _collected(place)
    if names:
        pairs = [(check_adapter_name(n), parse_ref(str((place / n).absolute()))) for n in names]
    else:
        ref = parse_ref(request.source)
        pairs = [(_name_of(request, ref), ref)]
    if request.base is not None:
        base = resolve_base(request.base, ticker=ticker)
    else:
        from molora_cli.core.compose import Request as Compose
        from molora_cli.core.compose import choose_base

        texts = tuple((name, str(ref)) for name, ref in pairs)
        base = resolve_ref(
            choose_base(Compose(request.target, texts, saved_rank=request.saved_rank)), ticker=ticker
        )
    return base, pairs, "folder" if names else "adapter", list(base.notes)


def _collected(place: Path) -> list[str]:
    """Names of the adapters in a folder of several PEFT folders; empty for anything else."""
    from molora_cli.core.adapter.files import read_json

    if not place.is_dir() or (place / CONFIG).exists() or any(place.glob("*.gguf")):
        return []
    if (place / COLLECTION).is_file():
        listed = read_json(place / COLLECTION, COLLECTION).get("adapters")
        if isinstance(listed, list) and listed and all(isinstance(n, str) for n in listed):
            return list(listed)
        raise InputError(f"{place / COLLECTION} lists no adapters", "give one of the adapters' folders")
    return sorted(p.parent.name for p in place.glob(f"*/{CONFIG}"))


def _name_of(request: Request, ref: Ref) -> str:
    """What a single adapter is called: --adapter, else its folder or file; only a bundle keeps the name."""
    if request.to == "bundle" and request.adapters:
        return check_adapter_name(request.adapters[0])
    text = (ref.repo or ref.text).rstrip("/")
    path = Path(text)
    stem = path.stem if path.suffix in (".gguf", ".npz") else path.name
    if path.name in (CONFIG, "adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors"):
        stem = path.absolute().parent.name
    if request.to != "bundle":
        return shorten(stem, 60) or "adapter"
    try:
        return check_adapter_name(stem)
    except InputError as error:
        raise InputError(error.message, "name it yourself: --adapter NAME") from error


def _chosen(pairs: Pairs, request: Request, kind: str) -> Pairs:
    if kind == "adapter":
        if request.adapters and request.to != "bundle":
            raise InputError(
                f"{shorten(request.source)} is one adapter; --adapter chooses among several", "leave it out"
            )
        if len(request.adapters) > 1:
            raise InputError("one adapter takes one name", "give --adapter NAME once")
        return pairs
    unknown = [n for n in request.adapters if n not in dict(pairs)]
    if unknown:
        raise InputError(
            f"{shorten(request.source)} has no adapter '{shorten(unknown[0], 40)}'",
            f"it has {', '.join(name for name, _ in pairs)}",
        )
    chosen = [(n, r) for n, r in pairs if not request.adapters or n in request.adapters]
    if len(chosen) > 1 and (request.to in ("mlx", "gguf") or (request.to == "peft" and request.adapters)):
        raise InputError(
            f"{shorten(request.source)} has {len(chosen)} adapters, --to {request.to} writes one",
            f"say which: --adapter {chosen[0][0]}",
        )
    if request.to == "bundle" and kind == "bundle":
        raise InputError(
            f"{shorten(request.source)} is a bundle already",
            f"copy the folder, or change it: molora add {shorten(request.source)} NAME=ADAPTER",
        )
    return chosen


# -- target -------------------------------------------------------------------
def _check_place(request: Request, base: ResolvedBase, own_file: str) -> None:
    target = request.target
    _check_apart(request, base)
    if request.to == "gguf":
        _check_file(target, request.force)
    elif target.suffix == ".gguf":
        raise InputError(
            f"{target} is named as a GGUF file, and --to {request.to} writes a folder", "name a folder"
        )
    else:
        check_target(target, force=request.force, own_file=own_file)


def _check_file(target: Path, force: bool) -> None:
    if target.suffix != ".gguf":
        raise InputError(f"{target} does not end in .gguf", f"name a file: {target}.gguf")
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise InputError(f"{target} is not an ordinary file", "name a file that does not exist yet")
    if target.exists():
        if not force:
            raise InputError(f"{target} exists", "--force replaces it")
        with target.open("rb") as handle:
            if handle.read(4) not in (b"GGUF", b""):
                raise InputError(f"{target} exists and is no GGUF file", "name another file")
    parent = next(p for p in target.absolute().parents if os.path.lexists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InputError(
            f"{target} cannot be made: {parent} is not a writable folder", "choose another place"
        )


def _check_apart(request: Request, base: ResolvedBase) -> None:
    """The output is neither the source or the base, nor in one, nor around one."""
    output = request.target.resolve()
    for what, path in (("the source", Path(request.source).expanduser()), ("the base", base.path)):
        if not os.path.lexists(path):
            continue
        place = path.resolve()
        # a file's neighbours may be written, the file itself not
        inside = place.is_dir() and place in output.parents
        if output == place or inside or output in place.parents:
            raise InputError(
                f"the output {request.target} and {what} ({shorten(str(path))}) overlap",
                "name an output outside them",
            )


def describe(work: Plan) -> dict[str, Any]:
    """The plan as JSON: source, target, base, adapters, method and weights."""
    request = work.request
    document: dict[str, Any] = {
        "source": request.source,
        "target": str(request.target),
        "to": request.to,
        "base": {"id": work.base.id, "revision": work.base.revision, "path": str(work.base.path)},
        "adapters": [
            {"name": a.name, "ranks": a.ranks, "modules": len(a.modules), "parameters": a.parameters}
            for a in work.adapters
        ],
    }
    if work.method is not None:
        document["method"] = work.method
        document["weights"] = dict(work.weights)
    return document
