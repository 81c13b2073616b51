"""Context features of a token: causal exponential averages of per-token vectors, from token ids alone.

For vectors e_1, e_2, ... and a decay a the average at token t is

    m_t = s_t / w_t,   s_t = a s_{t-1} + e_t,   w_t = a w_{t-1} + 1,

so it forgets at rate a and is unbiased from the first token on. All tokens of a block are computed at once
with a lower triangular matrix per chunk and sums carried between chunks: O(T), no loop over tokens. Knows
nothing of tokenizers, embeddings or routers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.kinds import State

DECAYS = (0.5, 0.8, 0.93, 0.98)
STATE = ("sums", "weights")
CHUNK = 32


def start_averages(
    batch: int,
    width: int,
    decays: Sequence[float] = DECAYS,
    *,
    dtype: torch.dtype = torch.float64,
    device: Any = None,
) -> State:
    """State before the first token: sums (B, D, p) and weights (B, D), all zero."""
    return {
        "sums": torch.zeros(batch, len(decays), width, dtype=dtype, device=device),
        "weights": torch.zeros(batch, len(decays), dtype=dtype, device=device),
    }


def causal_averages(
    e: Tensor, mask: Tensor | None, state: State, decays: Sequence[float] = DECAYS, *, chunk: int = CHUNK
) -> tuple[Tensor, State]:
    """Averages of the next block of tokens, and the state after it.

    e (B, T, p) float64 for routing (blocks of any size then agree to about 1e-14), float32 in training; mask
    (B, T) bool, False = padding, None = no padding; state as `start_averages` makes it, left unchanged.
    Returns (B, T, D, p) in e's dtype and the new state. A masked token neither enters nor decays an average;
    its own output is finite and means nothing. Differentiable in e.
    """
    batch, length, width = e.shape
    if length == 0:
        return e.new_zeros(batch, 0, len(decays), width), state
    if mask is None or bool(mask.all()):
        sums, weights = _running_sums(e, state, decays, chunk)
        return sums / weights.unsqueeze(-1), {"sums": sums[:, -1], "weights": weights[:, -1]}

    # Padding anywhere: move each row's real tokens to the front, run without gaps, and move the results back.
    order = torch.argsort(mask.logical_not().to(torch.int8), dim=1, stable=True)  # (B, T)
    packed = e.masked_fill(~mask.unsqueeze(-1), 0).gather(1, order.unsqueeze(-1).expand(-1, -1, width))
    sums, weights = _running_sums(packed, state, decays, chunk)
    last = mask.sum(1) - 1  # (B,) index of the row's last real token, -1 where it has none
    rows = torch.arange(batch, device=e.device)
    none = (last < 0)[:, None]  # (B, 1)
    after = {
        "sums": torch.where(none.unsqueeze(-1), state["sums"], sums[rows, last.clamp(min=0)]),
        "weights": torch.where(none, state["weights"], weights[rows, last.clamp(min=0)]),
    }
    back = torch.argsort(order, dim=1)[:, :, None, None].expand(-1, -1, len(decays), width)
    return (sums / weights.unsqueeze(-1)).gather(1, back), after


def _running_sums(e: Tensor, state: State, decays: Sequence[float], chunk: int) -> tuple[Tensor, Tensor]:
    """s (B, T, D, p) and w (B, T, D) of every token of a block without padding."""
    batch, length, width = e.shape
    size = min(chunk, length)
    chunks = -(-length // size)
    decay = torch.tensor(decays, dtype=e.dtype, device=e.device)  # (D,)
    if length == 1:  # decoding: the recurrence itself
        sums = e.unsqueeze(2) + decay.unsqueeze(-1) * state["sums"].to(e.dtype).unsqueeze(1)
        return sums, 1 + decay * state["weights"].to(e.dtype).unsqueeze(1)
    steps = torch.arange(length + 1, device=e.device)
    powers = decay.unsqueeze(0) ** steps.to(e.dtype).unsqueeze(1)  # (T + 1, D): a^n

    # within[i, d, j] = a_d^(i-j) for j <= i: token i's sum over the tokens of its own chunk
    lag = steps[:size, None] - steps[None, :size]  # (C, C)
    within = powers[lag.clamp(min=0)] * (lag >= 0).unsqueeze(-1)  # (C, C, D)
    within = within.transpose(1, 2).reshape(size * len(decays), size)
    blocks = F.pad(e, (0, 0, 0, chunks * size - length)).view(batch, chunks, size, width)
    local = torch.matmul(within, blocks).view(batch, chunks, size, len(decays), width)

    carried = state["sums"].to(e.dtype)
    carries = []  # sums before each chunk
    for end in local[:, :, -1].unbind(1):  # unbind: indexing would cost a full gradient tensor per chunk
        carries.append(carried)
        carried = torch.addcmul(end, powers[size].unsqueeze(-1), carried)
    before = torch.stack(carries, dim=1).unsqueeze(2)  # (B, N, 1, D, p)
    sums = torch.addcmul(local, powers[1 : size + 1].unsqueeze(-1), before)
    sums = sums.reshape(batch, chunks * size, len(decays), width)[:, :length]

    gained = (1 - powers[1:]) / (1 - decay)  # (T, D): 1 + a + ... + a^(t)
    weights = powers[1:] * state["weights"].to(e.dtype).unsqueeze(1) + gained
    return sums, weights


def context_features(e: Tensor, averages: Tensor) -> Tensor:
    """The token's own vector and its averages, each layer-normed by itself.

    e (..., p), averages (..., D, p) -> (..., (1 + D) p). A vector of zeros stays zero.
    """
    parts = torch.cat([e.unsqueeze(-2), averages], dim=-2)  # (..., 1 + D, p)
    return F.layer_norm(parts, (parts.shape[-1],)).flatten(-2)


def centre_and_scale(embedding: Tensor) -> tuple[Tensor, float]:
    """Mean vector (d,) and overall standard deviation of an embedding (V, d), in float64.

    (E - mean) / scale is the per-token vector of the context features. Computed by blocks of rows, so that a
    large vocabulary needs no float64 copy of the table.
    """
    mean = torch.zeros(embedding.shape[1], dtype=torch.float64, device=embedding.device)
    square = torch.zeros((), dtype=torch.float64, device=embedding.device)
    for rows in embedding.detach().split(8192):
        exact = rows.to(torch.float64)
        mean += exact.sum(0)
        square += exact.square().sum()
    mean /= embedding.shape[0]
    variance = square / embedding.numel() - mean.square().mean()
    scale = float(variance.clamp(min=0).sqrt())
    return mean, scale if scale > 0 else 1.0
