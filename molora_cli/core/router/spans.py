"""What the parts of a conversation so far were about: from it a router knows which adapter comes next.

The token before a part of an answer predicts that part's first token, so it should take that part's
adapter already. Nothing about the token itself says which that is ("2." does not name a subject); the
question that is still open does. Special tokens of the template cut a conversation into spans (a user's
message, an answer). With p_t the probabilities of a token over the E experts, n_t its place in its span,
counted from 0:

    mean_t   = mean of p over the span up to t
    early_t  = sum_s a^{n_s} p_s / sum_s a^{n_s} over the span up to t, a = 0.97: what it began with
    last     = mean, early and p at the end of the span before, or of the latest with `LEAST` tokens
    opening  = the vector of the first token in the span ("user", "assistant")

A small network reads them with the token's own features and corrects the logits of the `context` network:

    z'_t = z_t + V gelu(U [f_t[:2P], h_t, opening_t, p_t, mean_t, early_t, last_t] + u) + v

f_t its context features (the first 2 P: the token and what stands right before it), h_t its hidden units.
Causal, in one pass, O(T).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molora_cli.core.router.kinds import State
from molora_cli.core.router.products import affine

DECAY = 0.97
LEAST = 6  # tokens of a span that is worth remembering: shorter ones are role names and line ends
# what is kept from token to token
STATE = (
    "span.count",
    "span.sum",
    "span.early",
    "span.weight",
    "span.p",
    "span.last",
    "span.opening",
    "span.fresh",
)
PARTS = 6  # blocks of E numbers that the network reads: p, mean, early, and three of the span before


class AheadNet(nn.Module):
    """The correcting network. projection P, hidden units of the context network, E experts, units its own."""

    def __init__(self, projection: int, hidden: int, experts: int, units: int) -> None:
        super().__init__()
        self.projection, self.units = projection, units
        self.inner = nn.Linear(3 * projection + hidden + PARTS * experts, units)
        self.outer = nn.Linear(units, experts)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def read(self, features: Tensor, hidden: Tensor, logits: Tensor, spans: Tensor) -> Tensor:
        """What it reads of features (..., F), hidden units, logits (..., E) and what `remember` gives,
        (..., P + 5 E)."""
        opening, parts = spans.split([self.projection, spans.shape[-1] - self.projection], dim=-1)
        near = features[..., : 2 * self.projection]
        return torch.cat([near, hidden, opening, logits.softmax(-1), parts], dim=-1)

    def correct(self, read: Tensor, logits: Tensor) -> Tensor:
        """Corrected logits (..., E)."""
        out: Tensor = logits + self.outer(F.gelu(affine(self.inner, read)))
        return out


def start_spans(
    batch: int,
    experts: int,
    projection: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sums: torch.dtype | None = None,
) -> State:
    """State before the first token. dtype: of the tokens' vectors; sums: of the sums of probabilities, which
    are differences of long sums; None = the same."""
    exact = dtype if sums is None else sums

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(batch, *shape, dtype=exact, device=device)

    return {
        "span.count": zeros(1),
        "span.sum": zeros(experts),
        "span.early": zeros(experts),
        "span.weight": zeros(1),
        "span.p": zeros(experts),
        "span.last": zeros(3 * experts),
        "span.opening": torch.zeros(batch, projection, dtype=dtype, device=device),
        "span.fresh": torch.ones(batch, 1, dtype=dtype, device=device),
    }


def remember(p: Tensor, own: Tensor, cuts: Tensor, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
    """What the spans up to each token hold, (B, T, P + 5 E): opening, mean, early, last; and the state after.

    p (B, T, E) probabilities, own (B, T, P) the tokens' vectors, cuts (B, T) bool: special tokens, each of
    which begins a span; mask (B, T) bool, False = padding, which changes nothing; `state` is left unchanged.
    """
    if mask is None or bool(mask.all()):
        return _remember(p, own, cuts, None, state)
    # Padding anywhere: real tokens to the front, and the results back.
    order = torch.argsort(mask.logical_not().to(torch.int8), dim=1, stable=True)  # (B, T)
    p, own = (x.gather(1, order.unsqueeze(-1).expand(-1, -1, x.shape[-1])) for x in (p, own))
    found, after = _remember(p, own, (cuts & mask).gather(1, order), mask.sum(1), state)
    back = torch.argsort(order, dim=1).unsqueeze(-1).expand(-1, -1, found.shape[-1])
    return found.gather(1, back), after


def _remember(
    p: Tensor, own: Tensor, cuts: Tensor, real: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """As `remember`, for rows whose first `real` (B,) tokens are no padding; None = all."""
    p = p.to(state["span.sum"].dtype)
    batch, length, experts = p.shape
    if length == 0:
        return own.new_zeros(batch, 0, own.shape[-1] + 5 * experts), state
    if length == 1 and real is None:
        return _remember_one(p[:, 0], own[:, 0], cuts, state)
    place = torch.arange(length, device=p.device).expand(batch, length)
    start = (
        torch.where(cuts, place, -1).cummax(1).values
    )  # (B, T) first token of the span, -1 = before the block
    carried = (start < 0).unsqueeze(-1)
    at = place - start.clamp(min=0)
    count = torch.where(carried[..., 0], state["span.count"] + place, at.to(p.dtype))  # place in the span
    weight = DECAY**count

    def since(values: Tensor, before: Tensor) -> Tensor:
        """Sums of values (B, T, n) over the span up to each token; before (B, n): at the block's start."""
        total = values.cumsum(1)
        ahead = F.pad(total, (0, 0, 1, 0))[:, :-1]  # sums before each token
        cut = ahead.gather(1, start.clamp(min=0).unsqueeze(-1).expand_as(total))
        return torch.where(carried, total + before.unsqueeze(1), total - cut)

    sums = since(p, state["span.sum"])
    early = since(p * weight.unsqueeze(-1), state["span.early"])
    weights = since(weight.unsqueeze(-1), state["span.weight"])
    mean, first = sums / (count + 1).unsqueeze(-1), early / weights
    last = _last(torch.cat([mean, first, p], -1), cuts, count, state)
    opening, fresh = _opening(own, cuts, state)
    found = torch.cat([opening, torch.cat([mean, first, last], -1).to(own.dtype)], -1)
    kept = ((count + 1).unsqueeze(-1), sums, early, weights, p, last, opening, fresh)
    parts = dict(zip(STATE, kept, strict=True))
    if real is None:
        return found, {name: value[:, -1] for name, value in parts.items()}
    end = (real - 1).clamp(min=0)
    rows = torch.arange(batch, device=p.device)
    none = (real == 0).unsqueeze(-1)
    return found, {n: torch.where(none, state[n], value[rows, end]) for n, value in parts.items()}


def _remember_one(p: Tensor, own: Tensor, cut: Tensor, state: State) -> tuple[Tensor, State]:
    """As `remember` for one token of each row, in a third of the operators: an answer makes one at a time.

    p (B, E), own (B, P), cut (B, 1) bool.
    """
    before = [state[name].masked_fill(cut, 0) for name in STATE[:4]]
    count = before[0]
    weight = DECAY**count
    sums, early, weights = before[1] + p, torch.addcmul(before[2], p, weight), before[3] + weight
    closes = cut & (state["span.count"] >= LEAST)
    last = torch.where(closes, _held(state), state["span.last"])
    fresh = cut.to(own.dtype)
    opening = torch.where(state["span.fresh"] > 0, own, state["span.opening"]).masked_fill(cut, 0)
    after = dict(zip(STATE, (count + 1, sums, early, weights, p, last, opening, fresh), strict=True))
    parts = torch.cat([sums / after["span.count"], early / weights, last], -1).to(own.dtype)
    return torch.cat([opening, parts], -1).unsqueeze(1), after


def _held(state: State) -> Tensor:
    """(B, 3 E): what the span before the block would leave behind, were it to end there."""
    tiny = torch.finfo(state["span.weight"].dtype).tiny
    return torch.cat(
        [
            state["span.sum"] / state["span.count"].clamp(min=1),
            state["span.early"] / state["span.weight"].clamp(min=tiny),
            state["span.p"],
        ],
        -1,
    )


def _last(ends: Tensor, cuts: Tensor, count: Tensor, state: State) -> Tensor:
    """(B, T, 3 E): ends (B, T, 3 E) at the last token of the latest span that was long enough."""
    before = torch.cat([_held(state).unsqueeze(1), ends[:, :-1]], 1)  # at the token before each
    sizes = torch.cat([state["span.count"], count[:, :-1] + 1], 1)  # tokens of the span before each
    closes = cuts & (sizes >= LEAST)
    place = torch.arange(cuts.shape[1], device=cuts.device).expand(cuts.shape)
    latest = torch.where(closes, place, -1).cummax(1).values.unsqueeze(-1)
    found = before.gather(1, latest.clamp(min=0).expand_as(before))
    return torch.where(latest < 0, state["span.last"].unsqueeze(1), found)


def _opening(own: Tensor, cuts: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """(B, T, P) the vector of the first token after the latest cut, zero at a cut; and (B, T, 1): 1 where no
    such token has come yet."""
    fresh = torch.cat(
        [state["span.fresh"] > 0, cuts[:, :-1]], 1
    )  # the token before was a cut, or there is none
    first = fresh & ~cuts
    place = torch.arange(cuts.shape[1], device=cuts.device).expand(cuts.shape)
    latest = torch.where(first, place, -1).cummax(1).values.unsqueeze(-1)
    found = own.gather(1, latest.clamp(min=0).expand_as(own))
    found = torch.where(latest < 0, state["span.opening"].unsqueeze(1), found)
    return found.masked_fill(cuts.unsqueeze(-1), 0), cuts.unsqueeze(-1).to(own.dtype)
