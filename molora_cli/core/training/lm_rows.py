"""What training through the language-model loss reads: rows of a step, and the loss of their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.training.router_rows import MIXED, RouterRows, TokenRow, collate
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from molora_cli.core.routed.model import RoutedModel
    from molora_cli.core.training.lm_loop import LmSettings


def counted(row: TokenRow) -> Tensor:
    """(T,) bool: completion tokens that the loss counts; words that join two parts are not among them."""
    found = row.completion & (row.labels >= 0)
    found[0] = False  # nothing predicts it
    return found


def loss_rows(rows: Sequence[TokenRow], max_length: int) -> list[TokenRow]:
    """The rows with something to predict, no longer than max_length; where all are longer, their starts."""
    found = [row for row in rows if len(row.ids) <= max_length and bool(counted(row).any())]
    if found:
        return found
    parts = (slice(0, max_length),)
    cut = [TokenRow(r.ids[parts], r.labels[parts], r.completion[parts]) for r in rows]
    return [row for row in cut if len(row.ids) > 1 and bool(counted(row).any())]


def loss_pool(rows: RouterRows, max_length: int, *, held_out: bool = False) -> dict[str, list[TokenRow]]:
    """Rows that the loss can read by domain, MIXED among them; domains without any are left out. Raises
    InputError where no training row has a completion."""
    source = rows.held_out if held_out else rows.train
    found = {name: loss_rows(group, max_length) for name, group in source.items()}
    found = {name: group for name, group in found.items() if group}
    if not held_out and not found:
        raise InputError("no row has an answer to learn from", "give chats with an assistant's message")
    return found


def draw_step(pool: dict[str, list[TokenRow]], settings: LmSettings, step: int) -> list[TokenRow]:
    """The rows of step `step`, drawn until they hold settings.tokens; depends on seed and step alone."""
    rng = random.Random(f"{settings.seed} loss {step}")
    mixes, domains = pool.get(MIXED, []), [name for name in pool if name != MIXED]
    found: list[TokenRow] = []
    while sum(len(row.ids) for row in found) < settings.tokens:
        if mixes and (not domains or rng.random() < settings.mix_share):
            found.append(rng.choice(mixes))
        else:
            found.append(rng.choice(pool[rng.choice(domains)]))
    return found


def forwards(rows: Sequence[TokenRow], tokens: int) -> list[list[TokenRow]]:
    """The rows by length, in groups of at most `tokens` padded tokens or of one row."""
    found: list[list[TokenRow]] = []
    for row in sorted(rows, key=lambda r: len(r.ids)):
        if found and len(row.ids) * (len(found[-1]) + 1) <= tokens:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def token_losses(model: RoutedModel, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """NLL (N,) float32 of the counted tokens of some rows under the model's router, and which positions
    (B, T) are no padding. The head runs on positions that predict one in some row."""
    ids, _, _ = collate(rows)
    real = torch.arange(ids.shape[1]) < torch.tensor([len(r.ids) for r in rows])[:, None]
    wanted = torch.zeros_like(real)  # position t predicts token t + 1
    for b, row in enumerate(rows):
        wanted[b, : len(row.ids) - 1] = counted(row)[1:]
    keep = wanted.any(0).nonzero().squeeze(1)  # (P,)
    device = model.device
    logits = model(
        input_ids=ids.to(device),
        attention_mask=None if bool(real.all()) else real.long().to(device),
        logits_to_keep=keep.to(device),
        use_cache=False,
    ).logits  # (B, P, V)
    here = wanted[:, keep]
    targets = ids[:, keep + 1][here].to(device)
    return F.cross_entropy(logits[here.to(device)].float(), targets, reduction="none"), real
