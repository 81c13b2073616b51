"""Context features of many labelled rows at once, for training: rows of any lengths, hardly any padding.

What `router.features` computes for (B, T) tokens, for rows laid out one after another in chunks of C tokens.
With a chunk's vectors e_0 ... e_{C-1} and a decay a, the sum of its i-th token is

    s_i = sum_{j <= i} a^{i-j} e_j + a^{i+1} c,   c = sum_n a^{C n} l_n

where l_n is the first sum of the last token of the row's chunk before (n = 0), of the one before that
(n = 1), and so on. Both are matrix products. The token's own vector, the first part of its features, is the
average that forgets at once (a = 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.context import normalised, sample_rows
from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.features import centre_and_scale

CHUNK = 16
# chunks of rows that are worked on together: what they carry to one another takes the square of their number
_TOGETHER = 512
_LEAST = 1e-12


class ContextBatches:
    """The base's input embedding (V, d) and what training reads of it. cuts: ids of special tokens."""

    def __init__(self, embedding: Tensor, cuts: Sequence[int], decays: Sequence[float]) -> None:
        self.cuts = torch.zeros(len(embedding), dtype=torch.bool)
        self.cuts[[i for i in cuts if 0 <= i < len(embedding)]] = True
        self.sampled, self.samples = sample_rows(embedding)
        self.centre, self.scale = centre_and_scale(embedding)
        self.table = normalised(embedding, self.centre, self.scale)  # (V, d) float32
        self.decay = torch.tensor([0.0, *decays])  # (D,), D one more than there are averages
        lag = torch.arange(CHUNK)[:, None] - torch.arange(CHUNK)  # (C, C)
        own = self._powers(lag.clamp(min=0)) * (lag >= 0).unsqueeze(-1)  # (C, C, D): [i, j]
        carried = self._powers(torch.arange(1, CHUNK + 1)).diag_embed()  # (C, D, D)
        self.last = own[-1].T.contiguous()  # (D, C)
        self.within = torch.cat([own.transpose(1, 2), carried], dim=-1).flatten(0, 1)  # (C D, C + D)

    def _powers(self, exponents: Tensor) -> Tensor:
        """a^n (..., D) of exponents (...,); 0 where no float32 sum would show it: denormals are slow."""
        powers = self.decay ** exponents.unsqueeze(-1)
        return powers.masked_fill(powers < _LEAST, 0)

    def features(self, net: ContextNet, rows: Sequence[Tensor], wanted: Tensor | None = None) -> Tensor:
        """Context features (N, (1 + D) p) of the tokens of rows, ids (T,) each, one row after another;
        wanted (sum of T,) bool: which tokens, None = all. Differentiable in the projection."""
        found, first = [], 0
        for group in _groups(rows):
            end = first + sum(len(ids) for ids in group)
            found.append(self._together(net, group, None if wanted is None else wanted[first:end]))
            first = end
        return found[0] if len(found) == 1 else torch.cat(found)

    def _together(self, net: ContextNet, rows: Sequence[Tensor], wanted: Tensor | None) -> Tensor:
        lengths = torch.tensor([len(ids) for ids in rows])
        chunks = -(-lengths // CHUNK)  # of each row
        total = int(chunks.sum())
        place = torch.cat([torch.arange(len(ids)) for ids in rows])
        chunk = (chunks.cumsum(0) - chunks).repeat_interleave(lengths) + place // CHUNK
        cell = place % CHUNK * total + chunk  # of each token, in (C, total)
        grid = torch.zeros(CHUNK * total, dtype=torch.int64)
        grid[cell] = torch.cat(list(rows))
        distinct, where = torch.unique(grid, return_inverse=True)  # most tokens of a text repeat
        e = F.embedding(where, net.project(self.table[distinct])).view(CHUNK, -1)  # (C, total p)

        row = torch.arange(len(rows)).repeat_interleave(chunks)
        gap = torch.arange(total)[:, None] - torch.arange(total) - 1
        before = (row[:, None] == row) & (gap >= 0)  # (total, total): which chunks come before in their row
        powers = self._powers(CHUNK * torch.arange(total))
        reach = powers[gap.clamp(min=0)] * before.unsqueeze(-1)  # (total, total, D)
        ends = (self.last @ e).view(-1, total, net.projection)
        carried = reach.permute(2, 0, 1) @ ends  # (D, total, p)
        sums = self.within @ torch.cat([e, carried.flatten(1)])  # (C D, total p)

        if wanted is not None:
            cell, place = cell[wanted], place[wanted]
        count = len(self.decay)
        step, chunk = cell // total, cell % total
        at = (step.unsqueeze(1) * count + torch.arange(count)) * total + chunk.unsqueeze(1)  # (N, D)
        gain = (1 - self.decay) / (1 - self._powers(place + 1))  # (N, D): 1 / w
        averages = F.embedding(at, sums.view(-1, net.projection)) * gain.unsqueeze(-1)
        return F.layer_norm(averages, (net.projection,)).flatten(1)


def _groups(rows: Sequence[Tensor]) -> list[list[Tensor]]:
    """Rows in groups of `_TOGETHER` chunks at most, in their order; a longer row is a group of its own."""
    found: list[list[Tensor]] = []
    used = _TOGETHER
    for ids in rows:
        chunks = -(-len(ids) // CHUNK)
        if not found or used + chunks > _TOGETHER:
            found.append([])
            used = 0
        found[-1].append(ids)
        used += chunks
    return found
