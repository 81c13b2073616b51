"""One forward of the base as routing sees it: which tokens are new, which are padding, what is cached."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from molora_cli.core.routed.route import BASE, Route
from molora_cli.core.routed.state import UNKNOWN, cached_length
from molora_cli.errors import InputError


@dataclass(frozen=True)
class Call:
    """ids: (B, T) int64, -1 where only embeddings were given (has_ids is False). mask: (B, T) bool, False =
    padding. cache: what was passed in, or None. past: positions it holds. keep: `logits_to_keep`."""

    ids: Tensor
    mask: Tensor
    cache: Cache | None
    past: int
    keep: int | Tensor
    has_ids: bool

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of a model's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters
    return tuple(name for name, p in parameters.items() if p.kind in kinds)


def read_call(names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
    """The call with these arguments. Raises InputError where there are no tokens in it."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # "cache" since transformers 5.24, "past_key_values" before
    cache = given.get("cache") if given.get("cache") is not None else given.get("past_key_values")
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    if ids is None:
        if embeds is None:
            raise InputError(
                "the routed model was called without input_ids", "give input_ids, (batch, tokens)"
            )
        ids = torch.full(embeds.shape[:2], UNKNOWN, device=embeds.device)
    if ids.dim() != 2:
        raise InputError(
            f"input_ids are {tuple(ids.shape)}, not (batch, tokens)", "add the missing dimension"
        )
    past = cached_length(cache)
    mask = new_tokens(given.get("attention_mask"), past, ids)
    keep = given.get("logits_to_keep", 0)
    return Call(
        ids.detach(), mask, cache, past, 0 if keep is None else keep, given.get("input_ids") is not None
    )


def new_tokens(attention_mask: Any, past: int, ids: Tensor) -> Tensor:
    """(B, T) bool: which of the new tokens are real.

    attention_mask: None; (B, past + T) or (B, T), zero = padding; a prepared (B, 1, T, positions) mask,
    boolean or additive, or a dict of those by kind of layer: there a token is padding where it may not see
    itself.
    """
    batch, length = ids.shape
    everything = torch.ones(batch, length, dtype=torch.bool, device=ids.device)
    mask = attention_mask
    if isinstance(mask, Mapping):
        mask = mask.get("full_attention")
    if not isinstance(mask, Tensor) or mask.shape[0] != batch or mask.shape[-1] < length:
        return everything
    # a mask longer than what is cached and new (a static cache's) starts at the first position
    first = past if mask.shape[-1] >= past + length else mask.shape[-1] - length
    if mask.dim() == 2:
        return mask[:, first : first + length].to(ids.device) != 0
    if mask.dim() == 4 and mask.shape[2] == length:
        own = mask[:, 0, :, first : first + length].diagonal(dim1=1, dim2=2).to(ids.device)  # (B, T)
        return own if own.dtype == torch.bool else own == 0
    return everything


def one_token(token: int, cache: Cache, device: torch.device) -> Call:
    """The call that gives one more token of one text."""
    ids = torch.tensor([[token]], device=device)
    return Call(ids, torch.ones_like(ids, dtype=torch.bool), cache, cached_length(cache), 1, True)


def checkpoints(base: Any) -> bool:
    """Whether the base runs layers again in the backward pass (renamed during transformers 5)."""
    renamed = getattr(base, "is_activation_checkpointing", None)
    return bool(base.is_gradient_checkpointing if renamed is None else renamed)


def check_route(route: Route, call: Call, adapters: tuple[str, ...]) -> None:
    """Raises InputError where a given route is not one of these tokens to these adapters."""
    shape = tuple(route.indices.shape[:2])
    if shape != (call.batch, call.length):
        raise InputError(
            f"the route is for {shape} tokens, input_ids are {(call.batch, call.length)}",
            "give one route per new token, (B, T, k) or (B, T, G, k)",
        )
    if route.indices.numel() == 0:
        return
    low, high = int(route.indices.min()), int(route.indices.max())
    if low < BASE or high >= len(adapters):
        raise InputError(
            f"the route names adapter {low if low < BASE else high}; there are {len(adapters)}",
            f"use -1 for the base and 0 to {len(adapters) - 1} for {', '.join(adapters)}",
        )
