"""One more adapter on a base that has routed modules already, while it stays loaded and in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from molora_cli.core.routed.attach import check_fits, make_routed, put, routed_modules
from molora_cli.core.routed.modules import Replacement, RoutedModule, dense_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from molora_cli.core.adapter.factors import Factors
    from molora_cli.core.routed.context import Context


@torch.no_grad()
def grow(base: PreTrainedModel, context: Context, name: str, modules: Mapping[str, Factors]) -> int:
    """Attach `modules` (module path -> factors) in the slot after the last; returns that slot.

    Routed modules get the adapter's columns beside those they have, others become routed. Ranks and places
    are data to the operators, so nothing is compiled again. Raises InputError, before anything is changed,
    for what `attach` refuses.
    """
    for path, factors in modules.items():
        check_fits(base, name, path, factors)
        if factors.magnitude is not None:
            dense_weight(_own(base, path), path)
    context.n_adapters += 1
    slot = context.n_adapters
    for module in routed_modules(base):
        module.grow(slot, modules.get(module.path))
    for path, factors in modules.items():
        if not isinstance(base.get_submodule(path), RoutedModule):
            made = make_routed(base, _own(base, path), [(slot, factors)], context, path)
            put(base, path, made.train(base.training))
    context.layouts = []
    for module in routed_modules(base):
        module.layout = context.layout(module.owner, module.scale[module.owner])
    return slot


def _own(base: PreTrainedModel, path: str) -> torch.nn.Module:
    """The base's own module at a path, whatever stands in its place."""
    found = base.get_submodule(path)
    return found.base if isinstance(found, Replacement) else found
