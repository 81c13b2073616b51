"""Proof that an adapter does something: how far it moves the logits of a short probe text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.adapter.factors import Factors
from molora_cli.core.bundle.manifest import Effect
from molora_cli.core.routed.model import RoutedModel
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

PROBE = (
    "A train leaves at 9:40 and travels 120 km in 1.5 hours.\n"
    "def add(a, b):\n    return a + b\n"
    "SELECT name FROM patients WHERE age > 65;\n"
    "The usual treatment is rest, water and paracetamol."
)
_LONGEST = 96  # tokens: enough for every module to be used, a fraction of a second on a small base


def probe_ids(tokenizer: Any | None, vocabulary: int, context: int | None = None) -> tuple[Tensor, str]:
    """(1, T) int64 ids of the probe, and its name. Without a tokenizer: ids spread over the vocabulary."""
    longest = min(_LONGEST, context or _LONGEST)
    ids = tokenizer(PROBE, add_special_tokens=True)["input_ids"][:longest] if tokenizer is not None else []
    ids = [i for i in ids if 0 <= i < vocabulary]
    if ids:
        return torch.tensor([ids]), f"built-in text, {len(ids)} tokens"
    count = min(longest, vocabulary)
    spread = torch.arange(count) * vocabulary // count
    return spread[None], f"{count} ids spread over the vocabulary"


def measure_effects(
    base_model: Any,
    tokenizer: Any | None,
    factors: Iterable[tuple[str, Mapping[str, Factors]]],
    *,
    ticker: Ticker = no_ticks,
) -> dict[str, Effect]:
    """Adapter name -> how it changes the probe's logits, each adapter alone and on every token.

    factors: pairs of name and factors by module path; one adapter at a time is attached, so that only one
    needs to be in memory. The base is left as it was. Raises InputError where an adapter makes the logits
    NaN or infinite, or does not fit the base.
    """
    config = base_model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    ids, probe = probe_ids(tokenizer, config.vocab_size, context)
    ids = ids.to(base_model.device)
    effects: dict[str, Effect] = {}
    with torch.no_grad():
        plain = base_model(input_ids=ids, use_cache=False).logits.double()  # (1, T, V)
        scale = plain.square().mean().sqrt().item()
        for done, (name, parts) in enumerate(factors):
            ticker(done, None, f"effect of {name}")
            routed = RoutedModel.from_parts(base_model, {name: parts})
            try:
                routed.only(name)
                moved = routed(ids, use_cache=False).logits.double() - plain
            finally:
                routed.detach()
            if not bool(torch.isfinite(moved).all()):
                raise InputError(
                    f"adapter '{name}' makes the logits NaN or infinite on the probe text",
                    "its factors overflow or the training diverged: use an earlier checkpoint",
                )
            effects[name] = Effect(
                max_abs=moved.abs().max().item(),
                rms=moved.square().mean().sqrt().item(),
                base_rms=scale,
                probe=probe,
            )
    return effects


def check_effect(name: str, effect: Effect, *, allow_noop: bool) -> str | None:
    """A note where the effect is zero or tiny. Raises InputError for zero unless `allow_noop`."""
    if effect.max_abs == 0:
        if allow_noop:
            return f"adapter '{name}' changes nothing (kept because of --allow-noop)"
        raise InputError(
            f"adapter '{name}' was applied and changes no logit of the probe text",
            "give the trained adapter for this base, or --allow-noop to keep it",
        )
    if effect.rms < 1e-4 * effect.base_rms:
        return f"adapter '{name}' hardly changes the logits (RMS {effect.rms:.2g} of {effect.base_rms:.2g})"
    return None
