"""Carry out a planned conversion: write beside the target, prove it, and only then let it appear."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from molora_cli.core.adapter.factors import Factors, load_factors
from molora_cli.core.adapter.names import canonical_key
from molora_cli.core.adapter.types import Adapter, ModuleLora
from molora_cli.core.adapter.write import peft_config, write_peft
from molora_cli.core.base.model import load_base_model
from molora_cli.core.bundle.store import ADAPTER_CONFIG, ADAPTER_WEIGHTS, sha256_file
from molora_cli.core.bundle.writing import new_file_apart, new_folder
from molora_cli.core.convert.gguf_file import write_gguf
from molora_cli.core.convert.merge import merge
from molora_cli.core.convert.merged_model import write_merged_model
from molora_cli.core.convert.mlx import write_mlx
from molora_cli.core.convert.plan import COLLECTION, Plan, describe
from molora_cli.core.convert.verify import (
    TOLERANCE,
    LogitDifference,
    Probe,
    check_logits,
    compare_written,
    read_back,
    tolerance_of,
)
from molora_cli.errors import MoloraError
from molora_cli.out import Ticker, no_ticks

EXACT = ("cat", "svd", "linear")  # folded into a model these are the exact sum
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def convert(work: Plan, *, ticker: Ticker = no_ticks) -> dict[str, Any]:
    """Write what was planned and verify it; returns the report as JSON (also under "notes" what to tell).

    Raises InputError or MoloraError; nothing is left behind then, and an older output stays as it was.
    """
    report = describe(work)
    report["notes"] = list(work.notes)
    to = work.request.to
    if to == "bundle":
        return report | _to_bundle(work, ticker)
    if to == "merged-peft":
        return report | _to_merged_peft(work, report["notes"], ticker)
    if to == "merged-model":
        return report | _to_merged_model(work, report["notes"], ticker)
    if work.several:
        return report | _to_collection(work)
    return report | _to_adapter(work, report["notes"], ticker)


@contextlib.contextmanager
def _output(work: Plan) -> Iterator[Path]:
    request = work.request
    if request.to == "gguf":
        with new_file_apart(request.target, force=request.force) as path:
            yield path
    else:
        with new_folder(request.target, force=request.force, own_file=work.own_file) as folder:
            yield folder


# -- one adapter --------------------------------------------------------------
def _to_adapter(work: Plan, notes: list[str], ticker: Ticker) -> dict[str, Any]:
    adapter, request = work.adapters[0], work.request
    factors = load_factors(adapter)
    dtype = getattr(torch, request.dtype) if request.dtype else None
    with _output(work) as path:
        ticker(0, 2, "writing")
        if request.to == "peft":
            write_peft(adapter, path)
        elif request.to == "mlx":
            notes += write_mlx(adapter, factors, work.modules, work.base.id, path, dtype)
        else:
            kind = dtype or torch.float32
            notes += write_gguf(
                factors, work.modules, path, name=adapter.name, base_id=work.base.id, dtype=kind
            )
        ticker(1, 2, "verifying")
        if request.to == "peft" and adapter.canonical:
            same = sha256_file(path / ADAPTER_WEIGHTS) == adapter.sha256
            if not same:
                raise MoloraError(f"{request.target} was not copied whole; it was removed", "run it again")
            return {"verified": {"bytes": "identical"}}
        written = read_back(path, work)
        tolerance = max(1e-6, TOLERANCE[_NAMES[dtype]] if dtype else tolerance_of(written))
        errors = compare_written(factors, written, what=str(request.target), tolerance=tolerance)
        verified: dict[str, Any] = {"modules": len(errors), "largest_error": max(errors.values())}
        difference = _logits(work, factors, load_factors(written), ticker)
        if difference is None:
            notes.append("logits were not compared: the base is large; every module's weight change was")
        else:
            check_logits(difference, exact=tolerance <= 1e-6, what=str(request.target))
            verified["logits"] = difference.as_dict()
    return {"verified": verified}


def _logits(
    work: Plan, before: Mapping[str, Factors], after: Mapping[str, Factors], ticker: Ticker
) -> LogitDifference | None:
    probe = Probe.of(work, ticker)
    if probe is None:
        return None
    one = {"adapter": 1.0}
    return probe.difference(
        probe.logits({"adapter": before}, one), probe.logits({"adapter": _present(after)}, one)
    )


def _present(factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Without the modules that were filled up with zeros."""
    return {p: f for p, f in factors.items() if f.magnitude is not None or bool(f.B.any())}


# -- several adapters ---------------------------------------------------------
def _to_collection(work: Plan) -> dict[str, Any]:
    with _output(work) as folder:
        for adapter in work.adapters:
            place = folder / adapter.name
            write_peft(adapter, place)
            if adapter.canonical and sha256_file(place / ADAPTER_WEIGHTS) != adapter.sha256:
                raise MoloraError(f"adapter '{adapter.name}' was not copied whole", "run it again")
            if not adapter.canonical:
                written = read_back(place, work)
                compare_written(
                    load_factors(adapter), written, what=str(place), tolerance=tolerance_of(written)
                )
        listed = {
            "format": "molora-adapters",
            "base": work.base.id,
            "adapters": [adapter.name for adapter in work.adapters],
        }
        (folder / COLLECTION).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    return {"verified": {"adapters": len(work.adapters)}}


def _to_bundle(work: Plan, ticker: Ticker) -> dict[str, Any]:
    """As `molora compose` would, from adapters that are read already."""
    from molora_cli.core import compose

    request = compose.Request(
        output=work.request.target,
        adapters=tuple((a.name, a.source) for a in work.adapters),
        base=work.request.base,
        force=work.request.force,
        allow_noop=work.request.allow_noop,
        trust_remote_code=work.request.trust_remote_code,
    )
    planned = compose.Plan(request, work.base, work.modules, work.adapters, (), ())
    bundle = compose.compose(planned, ticker=ticker)
    for name in bundle.adapters:
        adapter = next(a for a in work.adapters if a.name == name)
        written = read_back(bundle.folder(name), work)
        compare_written(
            load_factors(adapter), written, what=str(bundle.path), tolerance=tolerance_of(written)
        )
    effects = {e.name: e.effect.model_dump() for e in bundle.manifest.adapters if e.effect}
    return {"verified": {"effects": effects}}


# -- merged -------------------------------------------------------------------
def _used(work: Plan) -> dict[str, dict[str, Factors]]:
    return {a.name: load_factors(a) for a in work.adapters if work.weights[a.name] != 0}


def _to_merged_peft(work: Plan, notes: list[str], ticker: Ticker) -> dict[str, Any]:
    request = work.request
    adapters = _used(work)
    method = work.method or "cat"
    ticker(0, 3, "merging")
    merged = merge(
        adapters, work.weights, method, rank=request.rank, density=request.density, seed=request.seed
    )
    dtype = getattr(torch, request.dtype or "float32")
    factors = {
        path: replace(
            m.factors,
            A=m.factors.A.to(dtype),
            B=m.factors.B.to(dtype),
            bias=None if m.factors.bias is None else m.factors.bias.to(dtype),
        )
        for path, m in merged.items()
    }
    with _output(work) as folder:
        ticker(1, 3, "writing")
        _write_factors(work, factors, folder)
        ticker(2, 3, "verifying")
        written = read_back(folder, work)
        compare_written(
            {path: m.factors for path, m in merged.items()},
            written,
            what=str(request.target),
            tolerance=TOLERANCE[_NAMES[dtype]],
        )
        errors = {path: m.error for path, m in merged.items()}
        cuts = {path: m.cut for path, m in merged.items()}
        if method == "cat" and max(errors.values()) > 1e-6:
            raise MoloraError(
                f"the merge is off by {max(errors.values()):.2g}; it was removed", "report this"
            )
        found: dict[str, Any] = {
            "modules": {p: {"rank": m.factors.rank, "error": m.error} for p, m in merged.items()},
            "largest_error": max(errors.values()),
            "mean_error": sum(errors.values()) / len(errors),
            "largest_cut": max(cuts.values()),
        }
        probe = Probe.of(work, ticker)
        if probe is None:
            notes.append("logits were not compared: the base is large")
        else:
            weights = {name: work.weights[name] for name in adapters}
            routed = probe.logits(adapters, weights)
            alone = probe.logits({"merged": load_factors(written)}, {"merged": 1.0})
            difference = probe.difference(routed, alone)
            exact = method == "cat" and dtype is torch.float32
            check_logits(difference, exact=exact, what=str(request.target))
            found["logits"] = difference.as_dict()
    return {"merged": found}


def _write_factors(work: Plan, factors: Mapping[str, Factors], folder: Path) -> None:
    """A PEFT folder of factors with scale 1 (alpha = rank)."""
    from safetensors.torch import save_file

    first = work.adapters[0]
    modules = {}
    tensors = {}
    for path, f in factors.items():
        embedding = f.kind == "embedding"
        keys = {}
        for role, tensor in (("A", f.A), ("B", f.B), ("bias", f.bias)):
            if tensor is not None:
                keys[role] = canonical_key(path, role, embedding)
                tensors[keys[role]] = tensor.contiguous()
        shape = work.modules[path]
        sizes = (shape.in_features, shape.out_features)
        modules[path] = ModuleLora(path, f.rank, float(f.rank), 1.0, *sizes, "F32", keys, shape.kind)
    made = Adapter(
        name="merged",
        path=folder,
        weights=folder / ADAPTER_WEIGHTS,
        source=work.request.source,
        config={},
        modules=modules,
        base_hint=first.base_hint or work.base.id,
    )
    text = json.dumps(peft_config(made), indent=2, sort_keys=True, allow_nan=False)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


def _to_merged_model(work: Plan, notes: list[str], ticker: Ticker) -> dict[str, Any]:
    adapters = _used(work)
    with _output(work) as folder:
        notes += write_merged_model(work, adapters, folder, ticker=ticker)
        probe = Probe.of(work, ticker)
        if probe is None:
            notes.append("logits were not compared: the base is large")
            return {"merged": {}}
        routed = probe.logits(adapters, {name: work.weights[name] for name in adapters})
        ticker(0, None, "loading what was written")
        model, _ = load_base_model(
            folder, dtype="float32", device="cpu", trust_remote_code=work.request.trust_remote_code
        )
        difference = probe.difference(routed, probe.logits({}, {}, model))
        asked = work.request.dtype
        plain = asked == "float32" if asked else all(t.dtype == "F32" for t in _stored(work))
        exact = plain and work.method in EXACT
        check_logits(difference, exact=exact, what=str(work.request.target))
        if not exact and work.method in EXACT and difference.rms > 0.1 * difference.effect_rms:
            share = difference.rms / (difference.effect_rms or 1)
            notes.append(f"rounding changes the logits by {share:.0%} of what the adapter does")
    return {"merged": {"logits": difference.as_dict()}}


def _stored(work: Plan) -> list[Any]:
    from molora_cli.core.base.structure import read_tensor_infos

    infos = read_tensor_infos(work.base.path)
    return [infos[name][0] for name in work.modules.tensors.values()]
