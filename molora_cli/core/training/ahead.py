"""Trains the network of a context router that looks ahead (`router.spans`), after the rest of it is trained.

It learns from `TokenRow.led`: tokens that lead to a part of an answer take that part's adapter. They are
few, so all of them are kept and some of the others. Tokens without a label (a system prompt) are to be left
as they are. What it reads is computed once; no base forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.spans import AheadNet, remember, start_spans
from molora_cli.core.training.context_batches import ContextBatches
from molora_cli.core.training.halves import (
    HALVES,
    Part,
    dropped,
    generator,
    in_order_of_length,
    mean_gradients,
)
from molora_cli.core.training.router_rows import MIXED, AheadSettings, RouterRows, TokenRow
from molora_cli.out import Ticker, no_ticks

ROWS, MIXES = 300, 1200  # rows per domain and rows that change domain that are read at most
_KEPT = 0.3  # of the tokens that lead to nothing


@torch.no_grad()
def _read(
    net: ContextNet,
    ahead: AheadNet,
    batches: ContextBatches,
    rows: Sequence[TokenRow],
    draws: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the network reads of the tokens that it learns from (N, ...) float16, their logits (N, E), targets
    (N, E) and which of them lead to a part (N,)."""
    ids = torch.nn.utils.rnn.pad_sequence([row.ids for row in rows], batch_first=True)  # (B, T)
    real = torch.arange(ids.shape[1]) < torch.tensor([len(row.ids) for row in rows])[:, None]
    features = batches.features(net, [row.ids for row in rows])  # (n, F), n = all tokens of the rows
    hidden = net.hidden(features)
    logits: Tensor = net.outer(hidden)
    experts = logits.shape[-1]
    p = logits.new_zeros(*ids.shape, experts)
    own = logits.new_zeros(*ids.shape, net.projection)
    p[real], own[real] = logits.softmax(-1), features[:, : net.projection]
    state = start_spans(len(ids), experts, net.projection, dtype=p.dtype, device=p.device)
    spans, _ = remember(p, own, batches.cuts[ids], None, state)

    labels = torch.cat([row.led for row in rows])
    lead = torch.cat([torch.zeros_like(row.completion) if row.lead is None else row.lead for row in rows])
    wanted = lead | (torch.rand(len(lead), generator=draws) < _KEPT)
    logits, labels = logits[wanted], labels[wanted]
    read = ahead.read(features[wanted], hidden[wanted], logits, spans[real][wanted])
    known = (labels >= 0).unsqueeze(-1)
    target = torch.where(known, F.one_hot(labels.clamp(min=0), experts).float(), logits.softmax(-1))
    return read.half(), logits, target, lead[wanted]


def _part(
    ahead: AheadNet,
    read: Tensor,
    logits: Tensor,
    target: Tensor,
    settings: AheadSettings,
    draws: torch.Generator,
) -> Part:
    """Cross-entropy of some tokens; the tensors as `_read` gives them."""
    corrected = ahead.correct(dropped(read.float(), settings.dropout, draws), logits)
    loss = F.cross_entropy(corrected, target, label_smoothing=settings.smoothing, reduction="sum")
    return Part(loss, len(target))


def fit_ahead(
    net: ContextNet,
    batches: ContextBatches,
    rows: RouterRows,
    settings: AheadSettings,
    pool: Executor,
    *,
    seed: int = 0,
    ticker: Ticker = no_ticks,
) -> AheadNet | None:
    """The network for a trained context network; None where no token leads to anything.

    pool: see `halves.threads`. Its first weights come from torch's generator, all else from the seed.
    """
    chosen = [row for name in rows.experts for row in rows.train[name][:ROWS]]
    chosen += rows.train.get(MIXED, [])[:MIXES]
    ahead = AheadNet(net.projection, net.inner.out_features, net.outer.out_features, settings.units)
    parts = in_order_of_length(chosen)
    draws = [generator(seed, "read", number) for number in range(len(parts))]
    found = pool.map(partial(_read, net, ahead, batches), parts, draws)
    read, logits, target, lead = (torch.cat(column) for column in zip(*found, strict=True))
    leading, others = lead.nonzero()[:, 0], (~lead).nonzero()[:, 0]
    if not len(leading) or not len(others):
        return None

    def half(here: Tensor, draws: torch.Generator) -> Part:
        return _part(ahead, read[here], logits[here], target[here], settings, draws)

    some = round(settings.batch * settings.lead_share)
    optimizer = torch.optim.AdamW(ahead.parameters(), settings.lr, weight_decay=settings.weight_decay)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1 - step / settings.steps)
        own = generator(seed, "ahead", step)
        few = leading[torch.randint(len(leading), (some,), generator=own)]
        rest = others[torch.randint(len(others), (settings.batch - some,), generator=own)]
        halves = [
            partial(half, here, generator(seed, "ahead", step, number))
            for number, here in enumerate(torch.cat([few, rest]).chunk(HALVES))
        ]
        loss, _ = mean_gradients(pool, ahead.parameters(), halves)
        optimizer.step()
        ticker(step + 1, settings.steps, f"ahead, loss {loss:.3f}")
    return ahead.eval()
