"""Put routed modules in the place of a base model's own, and take them away again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from molora_cli.core.routed.context import Context
from molora_cli.core.routed.modules import (
    PlainLinear,
    Replacement,
    RoutedEmbedding,
    RoutedLinear,
    RoutedModule,
    features,
    is_plain,
)
from molora_cli.errors import InputError
from molora_cli.text import printable

if TYPE_CHECKING:
    from molora_cli.core.adapter.factors import Factors


def attach(
    base: PreTrainedModel, adapters: Mapping[str, Mapping[str, Factors]], backend: str = "torch"
) -> Context:
    """Replace every module that an adapter touches. adapters: name -> module path -> factors.

    backend: what runs the operators; another than "torch" also takes the linears that no adapter touches.

    The base's own modules and parameters are kept inside and stay as they are. Raises InputError, before
    anything is replaced, for a path that the base lacks, a module that cannot be routed, or factors of other
    sizes.
    """
    if any(isinstance(module, Replacement) for module in base.modules()):
        raise InputError(
            "this base has routed modules already", "detach() it first, or load the base once more"
        )
    context = Context(count_layers(base), len(adapters), backend)
    present: dict[str, list[tuple[int, Factors]]] = {}
    for slot, (name, modules) in enumerate(adapters.items(), start=1):
        for path, factors in modules.items():
            check_fits(base, name, path, factors)
            present.setdefault(path, []).append((slot, factors))
    made: dict[str, Replacement] = {}
    for path, entries in present.items():
        made[path] = make_routed(base, base.get_submodule(path), entries, context, path)
    if backend != "torch":
        for path, inner in base.named_modules():
            if path and path not in made and is_plain(inner):
                made[path] = PlainLinear(inner, backend)
    for path, module in made.items():
        put(base, path, module)
    return context


def make_routed(
    base: PreTrainedModel,
    inner: nn.Module,
    present: Sequence[tuple[int, Factors]],
    context: Context,
    path: str,
) -> RoutedModule:
    """What takes the place of `inner`, the base's own module at `path`; present: (slot, factors) of the
    adapters that touch it. Nothing is replaced yet."""
    is_embedding = isinstance(inner, nn.Embedding)
    number = layer_number(path)
    is_head = number is None and not is_embedding
    layer = number if number is not None else 0 if is_embedding else context.n_layers - 1
    kind = RoutedEmbedding if is_embedding else RoutedLinear
    device, dtype = _place(inner, base)
    return kind(inner, present, context, path=path, layer=layer, is_head=is_head, dtype=dtype, device=device)


def detach(base: nn.Module) -> None:
    """Put the base's own modules back where they were: the object graph before `attach`."""
    for path, module in list(base.named_modules()):
        if isinstance(module, Replacement):
            put(base, path, module.base)


def routed_modules(base: nn.Module) -> Iterator[RoutedModule]:
    """The routed modules of a base, in the base's own order."""
    for module in base.modules():
        if isinstance(module, RoutedModule):
            yield module


def count_layers(base: PreTrainedModel) -> int:
    """Number of layers of the (text part of the) base."""
    return int(base.config.get_text_config(decoder=True).num_hidden_layers)


def layer_number(path: str) -> int | None:
    """The layer a module path names: its first whole number; None for embeddings, heads and the like."""
    return next((int(part) for part in path.split(".") if part.isdigit()), None)


def put(base: nn.Module, path: str, module: nn.Module) -> None:
    """`module` in the place of whatever stands at `path`."""
    parent, _, child = path.rpartition(".")
    # Not setattr: the entry keeps its place in the parent's order, and no property gets in the way.
    base.get_submodule(parent)._modules[child] = module


def _place(inner: nn.Module, base: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
    """Device of the module, and its compute dtype: its own, or the model's where its weight is quantised."""
    tensors = [*inner.parameters(), *inner.buffers()]
    device = tensors[0].device if tensors else base.device
    floating = [t.dtype for t in inner.parameters() if t.is_floating_point() and t.dtype.itemsize > 1]
    return device, floating[0] if floating else base.dtype


def check_fits(base: nn.Module, name: str, path: str, factors: Factors) -> None:
    """Raises InputError where the factors are not for the base's own module at `path`, or it cannot be
    routed."""
    where = f"adapter '{printable(name)}', module '{printable(path)}'"
    try:
        inner = base.get_submodule(path)
    except AttributeError as error:
        raise InputError(
            f"{where}: the base has no such module", "compose the adapters again for this base"
        ) from error
    if isinstance(inner, Replacement):
        inner = inner.base
    if "experts" in path.split("."):
        raise InputError(
            f"{where}: the experts of a mixture see their tokens regrouped, which cannot be routed yet",
            "leave the expert modules out of the adapter",
        )
    sizes = features(inner)
    if sizes is None:
        raise InputError(
            f"{where}: a {type(inner).__name__} cannot be routed (linear, Conv1D and embedding can)",
            "leave the module out of the adapter",
        )
    given = (factors.A.shape[1], factors.B.shape[0])
    if given != sizes or factors.A.shape[0] != factors.B.shape[1]:
        raise InputError(
            f"{where}: the factors are for {given[0]} inputs and {given[1]} outputs, the base's module has "
            f"{sizes[0]} and {sizes[1]} (ranks {factors.A.shape[0]} and {factors.B.shape[1]})",
            "give the base that the adapter was trained on",
        )
    if isinstance(inner, nn.Embedding) and (inner.max_norm is not None or factors.bias is not None):
        raise InputError(
            f"{where}: an embedding with max_norm, or an adapter bias on an embedding, cannot be routed",
            "leave the embedding out of the adapter",
        )
