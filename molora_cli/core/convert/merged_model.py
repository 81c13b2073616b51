"""Fold adapters into the base: a transformers folder of its own, computed in float32, file by file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molora_cli._version import __version__
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.base.structure import INDEX, BaseModules, weight_files
from molora_cli.core.convert.merge import fold, module_seed
from molora_cli.core.convert.plan import MERGE_RECORD, Plan
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

# text files of a model folder that go along; never weights of other formats
_ALONG = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*")
_LEFT = frozenset({INDEX, "config.json", "molora-base.json", "adapter_config.json", MERGE_RECORD})
_OWN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def write_merged_model(
    work: Plan, adapters: Mapping[str, Mapping[str, Factors]], folder: Path, *, ticker: Ticker = no_ticks
) -> list[str]:
    """The base's files with the adapters folded in, config, tokenizer and a record, into `folder`; returns
    notes.

    A head that shares its tensor with the embedding gets its own where an adapter touches one of the two.
    Raises InputError for a base without dense weights, MoloraError where float16 overflows.
    """
    base = work.modules
    touched = dict.fromkeys(path for modules in adapters.values() for path in modules)
    shared = _shares_head(base)
    untie = shared and any(path in (base.head, base.embedding) for path in touched)
    stored = {base.tensors[p]: p for p in touched if p in base.tensors and not (untie and p == base.head)}
    own_head = f"{base.head}.weight"
    _check_reachable(base, touched, untie)
    files = weight_files(base.path)
    weight_map: dict[str, str] = {}
    size = 0
    found: set[str] = set()
    for done, file in enumerate(files):
        ticker(done, len(files), file.name)
        tensors: dict[str, Tensor] = {}
        for name, tensor in _tensors(file):
            head = untie and name == base.tensors.get(base.embedding or "")
            if head:
                folded = _folded(work, adapters, str(base.head), name, tensor)
                tensors[own_head] = _cast(work, folded, tensor.dtype, own_head)
            if untie and name == own_head:
                continue  # a copy that transformers does not read while the config ties it
            if name in stored:
                found.add(name)
                folded = _folded(work, adapters, stored[name], name, tensor)
                tensors[name] = _cast(work, folded, tensor.dtype, name)
            elif name.endswith(".bias"):
                folded = _with_bias(work, adapters, base, name, tensor)
                tensors[name] = _cast(work, folded, tensor.dtype, name)
            else:
                tensors[name] = _cast(work, tensor, tensor.dtype, name)
        _save(tensors, folder / file.name)
        weight_map |= dict.fromkeys(tensors, file.name)
        size += sum(t.numel() * t.element_size() for t in tensors.values())
    if found != set(stored):
        lost = sorted(set(stored) - found)[0]
        raise MoloraError(f"{base.path} does not hold {shorten(lost)}", "download the base again")
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    _write_config(work, folder, untie)
    _copy_along(base.path, folder)
    _write_record(work, folder)
    notes = ["the head shared its tensor with the embedding and has its own now"] if untie else []
    if work.request.dtype is None and any(t in _halves(base) for t in ("BF16", "F16")):
        notes.append("the base's half precision rounds what was folded in; --dtype float32 keeps all of it")
    return notes


def _shares_head(base: BaseModules) -> bool:
    said = base.config.get("tie_word_embeddings")
    nested = base.config.get("text_config")
    if isinstance(nested, dict):
        said = nested.get("tie_word_embeddings", said)
    # where the file has a head and the config ties it, transformers takes the embedding
    return base.tied or bool(said)


def _check_reachable(base: BaseModules, touched: Mapping[str, None], untie: bool) -> None:
    lost = [p for p in touched if p not in base.tensors and not (untie and p == base.head)]
    if lost:
        raise InputError(
            f"{shorten(lost[0])} has no tensor of its own in {base.path}",
            "keep the adapter as PEFT: --to peft",
        )
    stored = base.tensors.get(base.embedding or "", "")
    if untie and stored != f"{base.embedding}.weight":
        raise InputError(
            f"{base.path} holds the bare decoder ({shorten(stored)}); the head needs its own tensor",
            "save the base with save_pretrained of its causal LM first",
        )


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        for name in handle.keys():  # noqa: SIM118 - not a mapping
            yield name, handle.get_tensor(name)


def _folded(
    work: Plan, adapters: Mapping[str, Mapping[str, Factors]], path: str, name: str, tensor: Tensor
) -> Tensor:
    """The stored tensor of module `path`, in its stored orientation, float32."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise InputError(
            f"{shorten(name)} of the base is stored as {tensor.dtype}, not as plain floats",
            "fold into the base's full-precision version: --base ...",
        )
    parts = [(work.weights[adapter], modules.get(path)) for adapter, modules in adapters.items()]
    if all(f is None for _, f in parts):
        return tensor
    turned = work.modules[path].kind != "linear"  # embeddings are stored (V, d), Conv1D (in, out)
    weight = tensor.float().T if turned else tensor.float()
    request = work.request
    out = fold(
        weight.contiguous(), parts, work.method or "cat", request.density, module_seed(request.seed, path)
    )
    return out.T if turned else out


def _with_bias(
    work: Plan, adapters: Mapping[str, Mapping[str, Factors]], base: BaseModules, name: str, tensor: Tensor
) -> Tensor:
    """A stored bias plus the adapters' lora_bias."""
    weight = name.removesuffix(".bias") + ".weight"
    path = next((p for p, stored in base.tensors.items() if stored == weight), None)
    out = tensor
    for adapter, modules in adapters.items():
        f = modules.get(path or "")
        if f is not None and f.bias is not None:
            out = out.float() + work.weights[adapter] * f.scale * f.bias.float()
    return out


def _cast(work: Plan, tensor: Tensor, stored: torch.dtype, name: str) -> Tensor:
    """To the asked dtype, else the stored one. Tensors that are no plain floats stay as they are."""
    if stored not in _OWN_DTYPES:
        return tensor
    dtype = getattr(torch, work.request.dtype) if work.request.dtype else stored
    out = tensor.to(dtype).contiguous()
    if dtype is torch.float16 and not bool(torch.isfinite(out).all()):
        raise MoloraError(
            f"{shorten(name)} with the adapter folded in does not fit into float16",
            "use --dtype bfloat16 or float32",
        )
    return out


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _halves(base: BaseModules) -> set[str]:
    from molora_cli.core.base.structure import read_tensor_shapes

    return {dtype for _, dtype, _ in read_tensor_shapes(base.path).values()}


def _write_config(work: Plan, folder: Path, untie: bool) -> None:
    config: dict[str, Any] = json.loads(json.dumps(work.modules.config))
    nested = [config, *([config["text_config"]] if isinstance(config.get("text_config"), dict) else [])]
    for part in nested:
        if untie:
            part["tie_word_embeddings"] = False
        for name in ("dtype", "torch_dtype"):
            if work.request.dtype and name in part:
                part[name] = work.request.dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_along(source: Path, folder: Path) -> None:
    for pattern in _ALONG:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and file.name not in _LEFT and not (folder / file.name).exists():
                shutil.copyfile(file, folder / file.name)


def _write_record(work: Plan, folder: Path) -> None:
    record = {
        "format": "molora-merge",
        "created_by": f"molora {__version__}",
        "base": {"id": work.base.id, "revision": work.base.revision},
        "method": work.method,
        "adapters": [
            {
                "name": a.name,
                "source": a.source if work.kind == "adapter" else a.name,
                "sha256": a.sha256,
                "licence": a.licence,
                "weight": work.weights[a.name],
            }
            for a in work.adapters
        ],
    }
    (folder / MERGE_RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
