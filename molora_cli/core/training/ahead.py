"""Trains the network of a context router that looks ahead (`router.spans`), after the rest of it is trained.

It learns from `TokenRow.led`: tokens that lead to a part of an answer take that part's adapter. They are
few, so all of them are kept and some of the others. Tokens without a label (a system prompt) are to be left
as they are. What it reads is computed once; no base forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.context import ContextNet
from molora_cli.core.router.spans import AheadNet, remember, start_spans
from molora_cli.core.training.router_rows import (
    MIXED,
    AheadSettings,
    RouterRows,
    TokenRow,
    collate,
    collate_ahead,
)
from molora_cli.out import Ticker, no_ticks

ROWS, MIXES = 300, 1200  # rows per domain and rows that change domain that are read at most
_KEPT = 0.3  # of the tokens that lead to nothing
_AT_ONCE = 16


# (context network, ids (B, T)) -> context features (B, T, F)
Features = Callable[[ContextNet, Tensor], Tensor]


@torch.no_grad()
def _read(
    net: ContextNet, ahead: AheadNet, features: Features, cuts: Tensor, rows: Sequence[TokenRow]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the network reads of the tokens that it learns from (N, ...) float16, their logits (N, E), targets
    (N, E) and which of them lead to a part (N,)."""
    found: list[tuple[Tensor, ...]] = []
    ordered = sorted(rows, key=lambda r: len(r.ids))
    for first in range(0, len(ordered), _AT_ONCE):
        part = ordered[first : first + _AT_ONCE]
        ids, _, _ = collate(part)
        labels, lead = collate_ahead(part)
        f = features(net, ids)
        hidden = net.hidden(f)
        logits: Tensor = net.outer(hidden)
        state = start_spans(len(ids), len(logits[0, 0]), net.projection, dtype=f.dtype, device=f.device)
        spans, _ = remember(logits.softmax(-1), f[..., : net.projection], cuts[ids], None, state)
        real = torch.arange(ids.shape[1]) < torch.tensor([len(r.ids) for r in part])[:, None]
        wanted = real & (lead | (torch.rand(labels.shape) < _KEPT))
        read = ahead.read(f[wanted], hidden[wanted], logits[wanted], spans[wanted])
        known = (labels[wanted] >= 0).unsqueeze(-1)
        own = F.one_hot(labels[wanted].clamp(min=0), logits.shape[-1]).float()
        target = torch.where(known, own, logits[wanted].softmax(-1))
        found.append((read.half(), logits[wanted], target, lead[wanted]))
    read, logits, target, lead = (torch.cat(column) for column in zip(*found, strict=True))
    return read, logits, target, lead


def fit_ahead(
    net: ContextNet,
    features: Features,
    cuts: Tensor,
    rows: RouterRows,
    settings: AheadSettings,
    *,
    ticker: Ticker = no_ticks,
) -> AheadNet | None:
    """The network for a trained context network; None where no token leads to anything.

    cuts (V,) bool: ids that cut spans. Random numbers come from torch's generator.
    """
    chosen = [row for name in rows.experts for row in rows.train[name][:ROWS]]
    chosen += rows.train.get(MIXED, [])[:MIXES]
    net.eval()
    experts = net.outer.out_features
    width = net.inner.out_features
    ahead = AheadNet(net.projection, width, experts, settings.units)
    read, logits, target, lead = _read(net, ahead, features, cuts, chosen)
    leading, others = lead.nonzero()[:, 0], (~lead).nonzero()[:, 0]
    if not len(leading) or not len(others):
        return None
    some = round(settings.batch * settings.lead_share)
    optimizer = torch.optim.AdamW(ahead.parameters(), settings.lr, weight_decay=settings.weight_decay)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1 - step / settings.steps)
        few = leading[torch.randint(len(leading), (some,))]
        here = torch.cat([few, others[torch.randint(len(others), (settings.batch - some,))]])
        corrected = ahead.correct(F.dropout(read[here].float(), settings.dropout), logits[here])
        loss = F.cross_entropy(corrected, target[here], label_smoothing=settings.smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ticker(step + 1, settings.steps, f"ahead, loss {float(loss.detach()):.3f}")
    return ahead.eval()
