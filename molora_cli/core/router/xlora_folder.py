"""`attach-router --kind xlora`: an X-LoRA folder's adapters are found among the bundle's by their factors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from molora_cli.core.adapter.factors import Factors, load_bundle_factors, load_factors
from molora_cli.core.adapter.files import shown
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.xlora import open_xlora
from molora_cli.core.base.structure import read_structure
from molora_cli.core.router.spec import StageSpec
from molora_cli.core.router.xlora import fit_xlora
from molora_cli.errors import InputError
from molora_cli.refs import parse_ref

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle

Modules = Mapping[str, Factors]


def attach_xlora(
    bundle: Bundle, path: str | None, notes: list[str]
) -> tuple[StageSpec, dict[str, Tensor], dict[str, Any]]:
    """The stage, its tensors and what to say of it. notes: what the X-LoRA's own save had lost is added.

    Loads the base, whose order of modules is that of the classifier's outputs. Raises InputError where the
    folder is not whole, or an adapter of it is not in the bundle.
    """
    from molora_cli.core.routed.attach import routed_modules
    from molora_cli.core.training.live_job import attached_model

    if path is None:
        raise InputError("--kind xlora reads an X-LoRA model", "name its folder: --xlora FOLDER")
    folder = open_xlora(Path(path))
    base = read_structure(bundle.base_path)
    own = {e.name: load_bundle_factors(bundle.folder(e.name), e) for e in bundle.manifest.adapters}
    experts = []
    for place in folder.adapters:
        adapter = read_adapter(place.name, parse_ref(str(place.absolute())), base)
        notes += [f"{shown(place)}: {note}" for note in adapter.notes if " save lost " in note]
        factors = load_factors(adapter)
        name = next((n for n, found in own.items() if n not in experts and _same(factors, found)), None)
        if name is None:
            raise InputError(
                f"{shown(place)} is not among the adapters of {bundle.path}, or stands there changed",
                f"compose a bundle with NAME={shown(place)}",
            )
        experts.append(name)
    used = {path for name in experts for path in own[name]}
    model = attached_model(bundle)
    modules = [module.path for module in routed_modules(model.base) if module.path in used]
    stage, tensors = fit_xlora(folder, experts, modules, base.n_layers)
    return stage, tensors, {"modules": len(modules), "layerwise": bool(stage.params["modules"])}


def _same(saved: Modules, found: Modules) -> bool:
    """Whether a bundle's adapter has all modules of a saved one, equal but for rounding."""
    return saved.keys() <= found.keys() and all(_equal(saved[path], found[path]) for path in saved)


def _equal(one: Factors, other: Factors) -> bool:
    if one.A.shape != other.A.shape or one.B.shape != other.B.shape:
        return False
    parts = ((one.A, other.A), (one.scale * one.B, other.scale * other.B))
    return all(torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-7) for a, b in parts)
