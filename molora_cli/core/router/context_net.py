"""The network of a `context` router, see `context` for its formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from molora_cli.core.router.features import DECAYS, causal_averages, context_features, start_averages
from molora_cli.core.router.kinds import State
from molora_cli.core.router.products import affine
from molora_cli.core.router.spans import AheadNet, remember, start_spans

PROJECTION = 96
HIDDEN = 128


class ContextNet(nn.Module):
    """The trainable part. width d of the embedding, E experts, projection p, hidden units, decays (D,); units
    of the network that looks ahead, 0 = there is none."""

    def __init__(
        self,
        width: int,
        experts: int,
        *,
        projection: int = PROJECTION,
        hidden: int = HIDDEN,
        decays: Sequence[float] = DECAYS,
        units: int = 0,
    ) -> None:
        super().__init__()
        self.decays = tuple(decays)
        self.project = nn.Linear(width, projection)
        self.inner = nn.Linear(projection * (1 + len(self.decays)), hidden)
        self.outer = nn.Linear(hidden, experts)
        self.ahead: AheadNet | None = AheadNet(projection, hidden, experts, units) if units else None

    @property
    def projection(self) -> int:
        return self.project.out_features

    def features(self, e: Tensor, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Features (B, T, (1 + D) p) of projected vectors e (B, T, p), and the state after them."""
        averages, after = causal_averages(e, mask, state, self.decays)
        return context_features(e, averages), after

    def hidden(self, features: Tensor) -> Tensor:
        """Hidden units (..., h) of features (..., (1 + D) p)."""
        return nn.functional.gelu(affine(self.inner, features))

    def forward(self, features: Tensor) -> Tensor:
        """Logits (..., E) of features (..., (1 + D) p), without a look ahead."""
        out: Tensor = self.outer(self.hidden(features))
        return out

    def corrected(
        self, features: Tensor, cuts: Tensor, mask: Tensor | None, state: State
    ) -> tuple[Tensor, State]:
        """Logits (B, T, E) of features (B, T, (1 + D) p) with the look ahead, and the state of `spans` after
        them; cuts (B, T) bool."""
        hidden = self.hidden(features)
        logits: Tensor = self.outer(hidden)
        if self.ahead is None:
            return logits, {}
        own = features[..., : self.projection]
        spans, after = remember(logits.softmax(-1), own, cuts, mask, state)
        return self.ahead.correct(self.ahead.read(features, hidden, logits, spans), logits), after

    def start(self, batch: int, dtype: torch.dtype, device: Any = None) -> State:
        """State before the first token."""
        state = start_averages(batch, self.projection, self.decays, dtype=dtype, device=device)
        if self.ahead is None:
            return state
        experts = self.outer.out_features
        spans = start_spans(batch, experts, self.projection, dtype=dtype, device=device, sums=torch.float64)
        return state | spans
