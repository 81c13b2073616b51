"""The forward over a set: NLL of the counted tokens under one way of deciding, and what a router decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molora_cli.core.evaluation.observed import Observed
from molora_cli.core.evaluation.rows import NO_LABEL, Batch, EvalRow, batches, first_turns
from molora_cli.core.evaluation.tally import Tally
from molora_cli.core.routed.route import BASE, Route
from molora_cli.errors import MoloraError
from molora_cli.out import Ticker, no_ticks

TOKENS = 1500  # of one forward, padding included
# the routes of a batch; None = the model decides by itself
Decide = Callable[[Batch], Route | None]


def constant(indices: Sequence[int], gates: Sequence[float]) -> Decide:
    """The same adapters and gates for every token; -1 = base."""

    def decide(batch: Batch) -> Route:
        return Route.constant(list(indices), list(gates), *batch.ids.shape)

    return decide


def label_oracle(adapters: int) -> Decide:
    """Each token takes its label's adapter, at once; a token without one takes the base. A label that is a
    blend of adapters (a number from `adapters` on) takes the base too."""

    def decide(batch: Batch) -> Route:
        indices = torch.where(batch.labels < adapters, batch.labels, BASE).unsqueeze(-1)  # (B, T, 1)
        return Route(indices, torch.ones(indices.shape))

    return decide


def live(batch: Batch) -> None:
    """The model's own router decides."""
    return None


@torch.no_grad()
def forward(model: Any, batch: Batch, decide: Decide | None) -> tuple[Any, Tensor]:
    """The model's output for a batch, with the head on the positions alone that predict a counted token of
    some row; and these positions, (P,) int64. model, decide: as for `score`."""
    device = next(iter(model.parameters())).device
    predicts = torch.zeros(batch.ids.shape[1], dtype=torch.bool)
    for row in batch.rows:
        predicts[: len(row.ids) - 1] |= row.counted[1:]
    keep = predicts.nonzero().squeeze(1)
    options: dict[str, Any] = {}
    route = None if decide is None else decide(batch)
    if decide is not None:
        options["route"] = None if route is None else Route(route.indices.to(device), route.gates.to(device))
    output = model(
        input_ids=batch.ids.to(device),
        attention_mask=batch.mask.to(device, torch.int64),
        logits_to_keep=keep.to(device),
        use_cache=False,
        **options,
    )
    return output, keep


@torch.no_grad()
def score(
    model: Any,
    rows: Sequence[EvalRow],
    wanted: Sequence[int],
    tally: Tally,
    decide: Decide | None,
    *,
    observed: Observed | None = None,
    ticker: Ticker = no_ticks,
    done: Callable[[Sequence[int]], None] = lambda at: None,
    counter: PassCounter | None = None,
    tokens: int = TOKENS,
) -> None:
    """Add the NLL of the rows numbered `wanted` to `tally`, which has a line per answer (`first_turns`).

    model: a RoutedModel, or with decide None anything that takes input_ids, attention_mask and
    logits_to_keep. observed: filled from the output's trace. ticker: counts tokens. done: told the rows of
    each batch. counter: told how many tokens were asked for. The head runs only on positions that predict a
    counted token. Raises MoloraError where an NLL is not a number.
    """
    finished = 0
    first = first_turns(rows)
    for batch in batches(rows, wanted, tokens):
        width = batch.ids.shape[1]
        target = torch.full((len(batch.rows), width), NO_LABEL)  # label of the token that position t predicts
        line = torch.zeros(len(batch.rows), width, dtype=torch.int64)  # of the tally, for that token
        for b, row in enumerate(batch.rows):
            target[b, : len(row.ids) - 1] = torch.where(row.counted[1:], row.labels[1:], NO_LABEL)
            line[b, : len(row.ids) - 1] = row.turn[1:] + int(first[batch.at[b]])
        output, keep = forward(model, batch, decide)
        seen = target[:, keep]  # (B, P)
        here = seen >= 0
        logits: Tensor = output.logits[here.to(output.logits.device)].float()  # (counted, V)
        goal = batch.ids[:, keep + 1][here].to(logits.device)
        nll = F.cross_entropy(logits, goal, reduction="none").double().cpu()
        if not bool(nll.isfinite().all()):
            raise MoloraError("the model gave an NLL that is not a number", "try --dtype float32")
        places = line[:, keep][here].numpy()
        np.add.at(tally.sums, (places, seen[here].numpy()), nll.numpy())
        np.add.at(tally.counts, (places, seen[here].numpy()), 1.0)
        if observed is not None:
            trace = output.trace
            observed.add(batch, trace, trace.meta.get("groups") or [(0, 1)])
        if counter is not None:
            counter.asked += batch.ids.numel()
        done(batch.at)
        finished += int(batch.mask.sum())
        ticker(finished)


class PassCounter(AbstractContextManager["PassCounter"]):
    """How many times the base's layers saw each token: 1 for one pass, 2 where a first pass decides.

    Counts tokens through every decoder layer of `base` (a causal model of transformers) while it is entered.
    asked: padded tokens that were asked of the model in that time.
    """

    def __init__(self, base: nn.Module, layers: int) -> None:
        found = [m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == layers]
        self._layers = list(found[0]) if found else []
        self._count = 0
        self._handles: list[Any] = []
        self.asked = 0

    def __enter__(self) -> PassCounter:
        self._handles = [
            layer.register_forward_pre_hook(self._see, with_kwargs=True) for layer in self._layers
        ]
        return self

    def __exit__(self, *reason: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        self._count += int(hidden.shape[0] * hidden.shape[1])

    def passes(self) -> float | None:
        """Passes per token; None where the base's layers were not found."""
        if not self._layers or not self.asked:
            return None
        return round(self._count / len(self._layers) / self.asked, 3)
