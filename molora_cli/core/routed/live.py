"""Hooks on a base's decoder layers and routed modules, for routers that read hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from molora_cli.core.routed.attach import count_layers, routed_modules
from molora_cli.core.routed.modules import RoutedModule
from molora_cli.errors import InputError

Tap = Callable[[int, Tensor], None]
Ask = Callable[[RoutedModule, Tensor], None]


def decoder_layers(base: PreTrainedModel) -> nn.ModuleList:
    """The layers of the base's text decoder: its outermost list of as many modules as the config has layers.

    Raises InputError where there is none.
    """
    wanted = count_layers(base)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    for part in (decoder, base):
        for module in part.modules() if isinstance(part, nn.Module) else ():
            if isinstance(module, nn.ModuleList) and len(module) == wanted:
                return module
    raise InputError(
        f"the {wanted} decoder layers of this {type(base).__name__} cannot be found",
        "use a router on token ids (context, centroid, vocab) with this base",
    )


def _decoder(base: PreTrainedModel) -> nn.Module:
    """Raises InputError where the base has no decoder of its own, whose output could be read."""
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if not isinstance(decoder, nn.Module) or decoder is base:
        raise InputError(
            f"the decoder of this {type(base).__name__} cannot be found",
            "use a router on token ids (context, centroid, vocab) with this base",
        )
    return decoder


class Enough(Exception):
    """Raised in a layer hook by who wants no more of a forward, and caught by the same: no error."""


class LayerHooks:
    """Calls tap(layer, hidden (B, T, d)) with the input of each layer in `taps` before it runs; the number of
    layers stands for what the last layer gives, one more for what the decoder gives after its last norm."""

    def __init__(self, base: PreTrainedModel, taps: Iterable[int], tap: Tap) -> None:
        layers = decoder_layers(base)
        self._handles = []
        for number in sorted(set(taps)):
            if number < len(layers):
                hook = _before(number, tap)
                self._handles.append(layers[number].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                last = layers[-1] if number == len(layers) else _decoder(base)
                self._handles.append(last.register_forward_hook(_behind(number, tap)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class ModuleHooks:
    """Calls ask(module, x (..., in)) before each routed linear runs."""

    def __init__(self, base: PreTrainedModel, ask: Ask) -> None:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            ask(module, args[0])

        run = torch.compiler.disable(hook)
        self._handles = [module.register_forward_pre_hook(run) for module in routed_modules(base)]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _before(number: int, tap: Tap) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap(number, args[0] if args else kwargs["hidden_states"])

    return torch.compiler.disable(hook)  # type: ignore[no-any-return]


def _behind(number: int, tap: Tap) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: Any) -> None:
        tap(number, output if isinstance(output, Tensor) else output[0])

    return torch.compiler.disable(hook)  # type: ignore[no-any-return]
