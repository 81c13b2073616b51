"""MLX-LM adapters as PEFT's factors.

`PATH.lora_a` (in, r) and `PATH.lora_b` (r, out) are PEFT's A and B transposed; `PATH.m` (out,) is the
magnitude of DoRA. An embedding has lora_a (V, r) and lora_b (r, d). On a base whose head is tied, MLX's
embedding applies its LoRA as the head too: y = W h + scale * lora_a (lora_b h).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from molora_cli.core.adapter.config import LoraSettings
from molora_cli.core.adapter.files import shown
from molora_cli.core.adapter.fuse import fused_home
from molora_cli.core.adapter.header import TensorInfo
from molora_cli.core.adapter.mlx_config import MlxSettings, mlx_settings
from molora_cli.core.adapter.names import ModuleIndex, Named, strip_wrappers
from molora_cli.core.adapter.npz import Lazy
from molora_cli.core.adapter.source import Offenders, Source, natural
from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.base.structure import BaseModules

_TENSOR = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)\Z", re.DOTALL)
_ROLES = {"lora_a": "A", "lora_b": "B", "m": "magnitude"}
_EXPERTS = re.compile(r"\.(switch_mlp|switch_glu|experts)\.")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.*)")
_AGAIN = "save the adapter again, or give the base that it was trained on: --base ..."


def read_mlx(file: TensorFile, config: dict[str, Any], base: BaseModules) -> Source:
    """The tensors of an MLX-LM adapter, turned to PEFT's orientation, with notes where its config disagrees.

    Raises InputError that names every tensor at fault: unknown names, missing halves, wrong shapes, experts,
    magnitudes that the config does not announce.
    """
    where = shown(file.path)
    settings = mlx_settings(config)
    modules = _grouped(file, where)
    index = ModuleIndex(base)
    _check_dora(modules, settings, where)
    _check_shapes(modules, file, base, index, where)
    infos: dict[str, TensorInfo] = {}
    makers: dict[str, Callable[[], NDArray[Any]]] = {}
    named: list[Named] = []
    fixed: dict[str, tuple[int, float]] = {}
    tied: list[str] = []
    for module, parts in modules.items():
        rank = file.infos[parts["lora_a"]].shape[1]
        fixed[module] = (rank, settings.scale * rank)
        home = index.find(module)
        embedding = home is not None and base[home].kind == "embedding"
        for part, key in parts.items():
            infos[key], makers[key] = _turned(file, key, turn=part != "m")
            named.append(Named(key, module, _ROLES[part], "", embedding))
        if embedding and base.tied and base.head and home == base.embedding:
            tied.append(module)
            fixed[base.head] = fixed[module]
            for part, role in (("lora_a", "B"), ("lora_b", "A")):
                key = f"{parts[part]} (as the head)"
                infos[key], makers[key] = _turned(file, parts[part], turn=False)
                named.append(Named(key, base.head, role, "", False))
    doubled = [base.head for _ in tied if base.head in modules]
    if doubled:
        raise InputError(
            f"{where} adapts the embedding and {doubled[0]}, which are one in MLX where the head is tied",
            "train one of the two",
        )
    lora = LoraSettings(r=1, alpha=1.0, rslora=False, dora=settings.dora, bias=False, fixed=fixed)
    notes = ["read as an MLX adapter", *_disagreements(modules, fixed, settings, base)]
    if tied:
        notes.append(f"the base's head is tied: the LoRA of {tied[0]} applies to both, as in MLX")
    held = TensorFile(file.path, infos, Lazy(makers))
    return Source("mlx", held, named, lora, config, tuple(notes))


def mlx_factors(file: TensorFile) -> list[tuple[str, int, TensorInfo]]:
    """(module, rank, tensor) of every lora_a and lora_b, by names and shapes alone."""
    found = []
    for key, info in file.infos.items():
        match = _TENSOR.match(key)
        if match is not None and match["part"] != "m" and len(info.shape) >= 2:
            found.append((strip_wrappers(match["module"]), info.shape[match["part"] == "lora_a"], info))
    return found


def _turned(file: TensorFile, key: str, turn: bool) -> tuple[TensorInfo, Callable[[], NDArray[Any]]]:
    info = file.infos[key]
    shape = info.shape[::-1] if turn else info.shape

    def make() -> NDArray[Any]:
        array = file.array(key)
        return array.T if turn else array

    return TensorInfo(key, info.dtype, shape), make


def _grouped(file: TensorFile, where: str) -> dict[str, dict[str, str]]:
    """module -> part ("lora_a", "lora_b", "m") -> tensor name, in natural order; everything else refused."""
    if not file.infos:
        raise InputError(f"{where} contains no tensors", "save the adapter again")
    experts = [key for key in file.infos if _EXPERTS.search(key)]
    if experts:
        raise InputError(
            f"{where}: '{shorten(experts[0], 120)}' belongs to a layer of experts "
            f"({len(experts)} tensors); adapters of experts are not supported",
            "give an adapter of the attention and the shared layers only",
        )
    faults = Offenders(where)
    modules: dict[str, dict[str, str]] = {}
    for key in sorted(file.infos, key=natural):
        match = _TENSOR.match(key)
        if match is None:
            faults.add(f"'{shorten(key, 120)}' is no lora_a, lora_b or m")
            continue
        parts = modules.setdefault(strip_wrappers(match["module"]), {})
        if match["part"] in parts:
            faults.add(f"'{shorten(key, 120)}' and '{shorten(parts[match['part']], 120)}' are the same")
        parts[match["part"]] = key
    for module, parts in modules.items():
        for part in ("lora_a", "lora_b"):
            if part not in parts:
                faults.add(f"{part} of {shorten(module, 120)} is missing")
    faults.refuse(len(file.infos), _AGAIN)
    return modules


def _check_dora(modules: Mapping[str, Mapping[str, str]], settings: MlxSettings, where: str) -> None:
    with_m = [module for module, parts in modules.items() if "m" in parts]
    if with_m and not settings.dora:
        raise InputError(
            f"{where}: '{shorten(modules[with_m[0]]['m'], 120)}' is a magnitude of DoRA, "
            "but fine_tune_type is not dora",
            "set fine_tune_type in adapter_config.json to what the adapter was trained with",
        )
    if settings.dora and len(with_m) < len(modules):
        lacking = next(module for module, parts in modules.items() if "m" not in parts)
        raise InputError(
            f"{where}: fine_tune_type is dora, but the magnitude m of {shorten(lacking, 120)} is missing "
            f"({len(modules) - len(with_m)} of {len(modules)} modules)",
            "save the adapter again; this file is incomplete",
        )


def _check_shapes(
    modules: Mapping[str, Mapping[str, str]],
    file: TensorFile,
    base: BaseModules,
    index: ModuleIndex,
    where: str,
) -> None:
    """Every shape against the base's; modules the base lacks are told here only beside other faults."""
    faults, lost = Offenders(where), []
    for module, parts in modules.items():
        home = index.find(module)
        if home is None:
            place = fused_home(module, base, index.find)
            if place is None:
                lost.append(module)
                continue
            inputs, outputs = base[place[0]].in_features, place[1][1] - place[1][0]
        else:
            inputs, outputs = base[home].in_features, base[home].out_features
            if "m" in parts and base[home].kind == "embedding":
                raise InputError(
                    f"{where}: '{shorten(parts['m'], 120)}': MLX's DoRA of an embedding scales its rows, "
                    "which no adapter of PEFT does",
                    "train the embedding with LoRA, or without",
                )
        a, b = file.infos[parts["lora_a"]].shape, file.infos[parts["lora_b"]].shape
        if len(a) != 2 or a[0] != inputs or a[1] == 0:
            faults.add(f"'{shorten(parts['lora_a'], 120)}' is {list(a)} where ({inputs}, r) belongs")
        rank = a[1] if len(a) == 2 else "r"
        if len(b) != 2 or b[1] != outputs or (len(a) == 2 and b[0] != a[1]):
            faults.add(f"'{shorten(parts['lora_b'], 120)}' is {list(b)} where ({rank}, {outputs}) belongs")
        if "m" in parts and file.infos[parts["m"]].count != outputs:
            shape = list(file.infos[parts["m"]].shape)
            faults.add(f"'{shorten(parts['m'], 120)}' is {shape} where ({outputs},) belongs")
    if faults.lines:
        for module in lost:
            faults.add(f"{shorten(module, 120)} does not exist in the base")
    faults.refuse(len(file.infos), _AGAIN)


def _disagreements(
    modules: Mapping[str, Mapping[str, str]],
    fixed: Mapping[str, tuple[int, float]],
    settings: MlxSettings,
    base: BaseModules,
) -> Sequence[str]:
    """Where config and tensors differ without changing what the tensors mean."""
    notes: list[str] = []
    ranks = sorted({rank for rank, _ in fixed.values()})
    if settings.rank is not None and ranks != [settings.rank]:
        if settings.alpha_style:
            raise InputError(
                f"adapter_config.json says rank {settings.rank}, the tensors have rank {ranks[0]}: "
                "the strength scale * alpha / rank would be wrong",
                "correct rank in lora_parameters to what the adapter was trained with",
            )
        notes.append(f"the config says rank {settings.rank}, the tensors have {ranks}; the tensors decide")
    found = {m: _LAYER.search(m) for m in modules}
    if settings.keys is not None:
        leaves = {match.group(2) if match else module for module, match in found.items()}
        odd = sorted(leaves ^ set(settings.keys))
        if odd:
            notes.append(
                f"keys in the config ({shorten(', '.join(settings.keys), 80) or 'none'}) are not the adapted "
                f"modules ({shorten(', '.join(sorted(leaves)), 80)}); the tensors decide"
            )
    if settings.layers is not None:
        have = {int(match.group(1)) for match in found.values() if match}
        count = settings.layers if settings.layers > 0 else base.n_layers  # MLX: model.layers[-max(n, 0):]
        said = set(range(max(0, base.n_layers - count), base.n_layers))
        if have and have != said and max(have) < base.n_layers:
            notes.append(
                f"num_layers {settings.layers} means the last {len(said)} layers, "
                f"the tensors are of layers {_listed(have)}; the tensors decide"
            )
    return notes


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)[:12])) + (", ..." if len(numbers) > 12 else "")
