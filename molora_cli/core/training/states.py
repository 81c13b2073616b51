"""Hidden states of labelled tokens: what the heads of `taps`, `layer` and `hidden` routers learn from.

One forward per batch of rows, up to the deepest layer that is read. The layers below a state are routed as
the rows' labels say, because in use a router sees states that its own, mostly right, routes have made; for a
first pass they are the base's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molora_cli.core.routed.route import BASE, Route
from molora_cli.core.router.kinds import BASE_EXPERT, IdStage
from molora_cli.core.router.taps import normed
from molora_cli.core.training.router_rows import NO_LABEL, TokenRow, collate
from molora_cli.out import Ticker, no_ticks

if TYPE_CHECKING:
    from molora_cli.core.routed.model import RoutedModel

BATCH_TOKENS = 1024  # of one forward, padding included


@dataclass
class States:
    """Labelled tokens of some rows. hidden: per tap (N, d) float16, layer-normed; labels (N,); prior (N, E)
    float32 log-probabilities of a stage on ids, or None; row (N,): which row the token is of."""

    hidden: dict[int, Tensor]
    labels: Tensor
    prior: Tensor | None
    row: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def label_route(
    labels: Tensor, experts: Sequence[str], adapters: Sequence[str], first: int, n_layers: int
) -> Route:
    """The route (B, T, n_layers, 1) of labels (B, T): layers from `first` on take each token's own expert,
    those below the base. A token without a label takes the one before it, at the start the first one after.
    """
    known = labels >= 0
    places = torch.arange(labels.shape[1]).expand_as(labels)
    before = torch.where(known, places, -1).cummax(1).values
    after = torch.where(known, places, labels.shape[1]).flip(1).cummin(1).values.flip(1)
    source = torch.where(before >= 0, before, after.clamp(max=labels.shape[1] - 1))
    filled = labels.gather(1, source)  # (B, T), NO_LABEL in a row without any
    place = torch.tensor([*(BASE if e == BASE_EXPERT else list(adapters).index(e) for e in experts), BASE])
    chosen = place[filled]  # NO_LABEL is the last entry
    layers = torch.arange(n_layers) >= first
    indices = torch.where(layers, chosen.unsqueeze(-1), BASE).unsqueeze(-1)  # (B, T, n_layers, 1)
    return Route(indices, (indices != BASE).float())


@torch.no_grad()
def collect_states(
    model: RoutedModel,
    rows: Sequence[TokenRow],
    experts: Sequence[str],
    taps: Sequence[int],
    *,
    prior: IdStage | None = None,
    base_only: bool = False,
    ticker: Ticker = no_ticks,
) -> States:
    """States of the labelled tokens of `rows` at the inputs of the layers `taps`.

    prior: a stage over `experts` whose scores are kept too; with it, layers below the first tap are routed by
    the labels as well. base_only: no adapter takes part.
    """
    # here, because it takes seconds to import, and most routers are trained without a forward
    from molora_cli.core.routed.live import Enough, LayerHooks

    n_layers = model.engine.context.n_layers
    seen: dict[int, Tensor] = {}
    last = max(taps)

    def keep(layer: int, hidden: Tensor) -> None:
        seen[layer] = hidden
        if layer == last:
            raise Enough

    found: dict[int, list[Tensor]] = {tap: [] for tap in taps}
    labels, priors, numbers = [], [], []
    first = 0 if prior is not None else min(taps)
    router, model.router = model.router, None
    hooks = LayerHooks(model.base, taps, keep)
    try:
        done = 0
        for batch in _batches(rows):
            ids, label, _ = collate([rows[i] for i in batch])
            lengths = torch.tensor([len(rows[i].ids) for i in batch])
            real = torch.arange(ids.shape[1]) < lengths[:, None]
            route = label_route(label, experts, model.adapters, n_layers if base_only else first, n_layers)
            with contextlib.suppress(Enough):
                # right padding needs no mask: no state of a real token depends on it
                model(ids.to(model.device), route=route, use_cache=False)
            known = label != NO_LABEL
            for tap in taps:
                state = normed(seen[tap].cpu(), torch.float32)[known]
                found[tap].append(state.half())
            labels.append(label[known])
            numbers.append(torch.tensor(batch)[:, None].expand_as(label)[known])
            if prior is not None:
                said, _ = prior.score(ids, real, prior.start(len(batch)))
                priors.append(said.logp[:, :, 0][known].float())
            done += len(batch)
            ticker(done, len(rows))
    finally:
        hooks.remove()
        model.router = router
    hidden = {tap: torch.cat(parts) for tap, parts in found.items()}
    return States(hidden, torch.cat(labels), torch.cat(priors) if priors else None, torch.cat(numbers))


def _batches(rows: Sequence[TokenRow]) -> list[list[int]]:
    """Row numbers by length, at most BATCH_TOKENS padded tokens together."""
    found: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: len(rows[i].ids)):
        if found and len(rows[i].ids) * (len(found[-1]) + 1) <= BATCH_TOKENS:
            found[-1].append(i)
        else:
            found.append([i])
    return found
