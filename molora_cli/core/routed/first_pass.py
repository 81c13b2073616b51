"""A forward of the base alone before the routed one, for routers that read its hidden states.

It has its own keys and values, which hold no adapter, and they follow the routed cache (`RouterState.first`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from molora_cli.core.routed.call import Call
from molora_cli.core.routed.context import Context
from molora_cli.core.routed.live import LayerHooks
from molora_cli.core.routed.state import RouterState, cached_length
from molora_cli.errors import InputError

# of the routed call alone: what it should return, and the tokens it should predict
_LEFT_OUT = ("labels", "output_hidden_states", "output_attentions", "return_dict", "num_items_in_batch")


class FirstPass:
    """Runs `base` without adapters and keeps the inputs of the layers `taps`."""

    def __init__(
        self, base: PreTrainedModel, context: Context, names: tuple[str, ...], taps: Iterable[int]
    ) -> None:
        self._base, self._context, self._names = base, context, names
        self._seen: dict[int, Tensor] | None = None
        self._hooks = LayerHooks(base, taps, self._keep)
        takes = inspect.signature(base.forward).parameters
        self._cache_name = "cache" if "cache" in takes else "past_key_values"
        self._keeps_logits = "logits_to_keep" in takes

    def remove(self) -> None:
        self._hooks.remove()

    def _keep(self, layer: int, hidden: Tensor) -> None:
        if self._seen is not None:
            self._seen[layer] = hidden

    def run(
        self, call: Call, past: RouterState | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[int, Tensor], Cache | None]:
        """Hidden states (B, T, d) of the call's tokens by layer, and the pass's own cache after them.

        Where that cache does not match `past` any more it is computed again from the ids. Raises InputError
        where those are not known.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        for name in ("cache", "past_key_values", "attention_mask", *_LEFT_OUT):
            given.pop(name, None)
        first, mask = None, call.mask
        if past is not None and past.length:
            first = past.first if cached_length(past.first) == past.length else self._again(past)
            mask = torch.cat([past.history.mask.to(mask.device), mask], dim=1)
        keeps = given.get("use_cache", True) is not False
        given.update({"attention_mask": mask.long(), self._cache_name: first, "use_cache": keeps})
        seen, output = self._forward(given)
        return seen, getattr(output, self._cache_name, None) if keeps else None

    def _again(self, past: RouterState) -> Cache:
        if not past.complete:
            raise InputError(
                "the cache holds tokens whose ids the router never saw (inputs_embeds, or another model's)",
                "start with an empty cache, or keep giving route=",
            )
        history = past.history
        mask = history.mask.long()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        named = {
            "input_ids": history.ids,
            "attention_mask": mask,
            "position_ids": positions,
            "use_cache": True,
        }
        _, output = self._forward(named)
        return getattr(output, self._cache_name)  # type: ignore[no-any-return]

    def _forward(self, named: dict[str, Any]) -> tuple[dict[int, Tensor], Any]:
        if self._keeps_logits:
            named["logits_to_keep"] = 1
        self._context.set(None, [])
        self._context.active, self._seen = True, {}
        try:
            with torch.no_grad():
                # not the call: its hooks would route this forward too
                output = self._base.forward(**named)
            return self._seen, output
        finally:
            self._context.active, self._seen = False, None
