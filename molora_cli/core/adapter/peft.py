"""A PEFT folder's tensors: which are factors, which may be left out, and whether all is as PEFT writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from molora_cli.core.adapter.config import settings
from molora_cli.core.adapter.files import shown
from molora_cli.core.adapter.locate import WEIGHTS, Located
from molora_cli.core.adapter.match import Matched
from molora_cli.core.adapter.names import Named, canonical_key, foreign, parse_key
from molora_cli.core.adapter.saved import reduce_saved
from molora_cli.core.adapter.source import Source
from molora_cli.core.adapter.targets import Targets
from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.core.adapter.xlora import is_leftover
from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

_AGAIN = "save the adapter again"


def read_peft(
    file: TensorFile, config: dict[str, Any], base: BaseModules, saved_rank: int | None = None
) -> Source:
    """The LoRA tensors of a PEFT adapter whose config is supported.

    saved_rank: full copies of modules become LoRA of this rank, their error in a note; None refuses them.
    Raises InputError naming the tensor that is no part of a LoRA.
    """
    where = shown(file.path)
    named, copies, notes = _sort_tensors(file, where)
    lora = settings(config)
    if copies and saved_rank is None:
        raise InputError(
            f"{where}: {len(copies)} tensors are no low-rank factors but full copies ({_some(copies)})",
            "--modules-to-save svd:16 approximates each by LoRA of rank 16 and says how closely; "
            "or train without modules_to_save",
        )
    if saved_rank is not None:
        _check_listed(config, copies, where)
        reduced = reduce_saved(file, copies, base, saved_rank, lora, {n.module for n in named})
        file, lora = reduced.file, reduced.settings
        named, notes = [*named, *reduced.named], [*notes, *reduced.notes]
    return Source("peft", file, named, lora, config, tuple(notes))


def _sort_tensors(file: TensorFile, where: str) -> tuple[list[Named], list[str], list[str]]:
    """The LoRA tensors, full copies, and notes on what may be left out; anything else is refused by name."""
    if not file.infos:
        raise InputError(
            f"{where} contains no tensors", f"{_AGAIN}; the training process saved an empty state"
        )
    named: list[Named] = []
    base_copies: list[str] = []
    others: list[str] = []
    for key in file.infos:
        parsed = parse_key(key)
        if parsed is not None:
            named.append(parsed)
        elif is_leftover(key):
            continue
        elif key.rpartition(".")[0].endswith(".base_layer"):
            base_copies.append(key)
        else:
            others.append(key)
    for key in others:
        method = foreign(key)
        if method is not None:
            raise InputError(
                f"{where}: '{shorten(key, 120)}' is a tensor of {method[0]}, not of a PEFT LoRA", method[1]
            )
    if not named:
        raise InputError(
            f"{where} holds no LoRA tensors (there: {_some(list(file.infos))})",
            "give the weights that belong to this adapter_config.json",
        )
    notes = []
    if base_copies:
        notes.append(
            f"{len(base_copies)} copies of base weights were ignored ('{shorten(base_copies[0], 90)}')"
        )
    return named, others, notes


def _check_listed(config: dict[str, Any], copies: list[str], where: str) -> None:
    """Every module of modules_to_save has its copy in the file."""
    listed = config.get("modules_to_save") or []
    for name in listed if isinstance(listed, list) else []:
        if not any(f".{name}." in f".{key}" for key in copies):
            raise InputError(
                f"{where}: modules_to_save names '{shorten(str(name), 60)}', the file holds no copy of it",
                "save the adapter again; this file is incomplete",
            )


def _some(keys: list[str]) -> str:
    return ", ".join(f"'{shorten(k, 80)}'" for k in keys[:3]) + (", ..." if len(keys) > 3 else "")


def is_canonical(place: Located, source: Source, matched: Matched, targets: Targets) -> bool:
    """Whether PEFT opens these very files on this base and gets the same modules, and nothing besides."""
    named = source.named
    if place.weights.name != WEIGHTS[0] or len(named) != len(source.file.infos) or matched.renamed:
        return False
    if any(module.parts for module in matched.modules.values()):
        return False
    return (
        targets.known
        and targets.modules == set(matched.modules)
        and all(n.key == canonical_key(n.module, n.role, n.embedding) for n in named)
    )
