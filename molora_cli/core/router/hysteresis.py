"""Holding on to an expert: no switch from one token to the next below a margin.

    b_t = argmax_e p_t(e)                                         p the stage's probabilities, temperature 1
    h_t = b_t                    where p_t(b_t) - p_t(h_{t-1}) >= margin, or t is the first token
    h_t = h_{t-1}                otherwise

The held expert h_t and the best trade their scores before the k best are chosen, so that h_t comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from molora_cli.core.router.kinds import State

HELD = "held"  # its name in a stage's state: (B, G) int64, -1 before the first token


def start_held(state: State, batch: int, groups: int, device: torch.device) -> State:
    """A stage's state before the first token with nothing held."""
    return {**state, HELD: torch.full((batch, groups), -1, dtype=torch.int64, device=device)}


def hold(logp: Tensor, real: Tensor, before: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """The experts held at each token, (B, T, G), and after the last one, (B, G).

    logp (B, T, G, E) log-probabilities, real (B, T) False = padding, which changes nothing; before (B, G).
    """
    p = logp.exp()
    best, chosen = p.max(-1)  # (B, T, G)
    held, found = before, []
    for t in range(logp.shape[1]):
        kept = p[:, t].gather(-1, held.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        switch = (held < 0) | (best[:, t] - kept >= margin)
        now = torch.where(switch, chosen[:, t], held)
        held = torch.where(real[:, t, None], now, held)
        found.append(now)
    steps = torch.stack(found, 1) if found else chosen
    return steps, held


def traded(logp: Tensor, held: Tensor) -> Tensor:
    """Scores (..., E) in which the expert held (...) and the best have changed places."""
    here = held.unsqueeze(-1)
    top, best = logp.max(-1, keepdim=True)
    own = logp.gather(-1, here)
    return logp.scatter(-1, best, own).scatter(-1, here, top)
