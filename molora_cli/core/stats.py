"""What routes say in numbers: shares, switches, entropy, margins, tokens each adapter takes. `core.counting`
counts them.

Everything is counted per group of layers. Columns of a (A + 1) vector are the A adapters, then the base. A
token's *first choice* is the expert with its largest gate; among several equal ones it is split evenly.

    share     tokens whose first choice is the expert / tokens
    mass      mean over the tokens of the gate the expert gets
    switches  neighbours within a document with different first choices, per 100 neighbours
    entropy   -sum_e p_e log2 p_e of the router's scores p, in bits; mean and quantiles over the tokens
    margin    p of the best expert minus p of the second, likewise
    bins      tokens in each of 20 equal steps of entropy, 0 to log2 of the experts, and of margin, 0 to 1
    lift      ((n_te + c s_e) / (n_t + c)) / s_e with n_te tokens of id t on expert e, n_t tokens of id t, s_e
              the expert's share and c = 5: how much more often than its share an expert takes that token,
              drawn towards 1 where the token is rare
    uniform   1 / number of experts: the share if routing said nothing

Tokens that a chat template adds (system prompt, role markers, ends of turns) are the same in every text and
would drown short ones. They are left out, as if the messages' content stood alone, unless they are asked for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

PSEUDO = 5.0
MIN_COUNT = 3
COLLAPSED = 0.95
FEW = 100  # tokens; fewer say nothing of an adapter that gets none
BINS = 20


@dataclass(frozen=True)
class Spread:
    """Mean and quantiles over tokens, and how many lie in each of `BINS` equal steps from 0 to `limit`."""

    mean: float
    p10: float
    p50: float
    p90: float
    limit: float
    bins: list[int]


@dataclass(frozen=True)
class Part:
    """One domain (name None: the texts without one), or all text together (whole, name None).

    Lists have A + 1 entries, the base last.
    neighbours: pairs of adjacent tokens within documents, the sample behind `switch_rate`.
    """

    name: str | None
    documents: int
    tokens: int
    share: list[float]
    mass: list[float]
    neighbours: int
    switch_rate: float | None
    entropy: Spread | None
    margin: Spread | None
    whole: bool = False

    @property
    def label(self) -> str:
        """Its name in a view, not made safe to show."""
        return "all text" if self.whole else "other text" if self.name is None else self.name


@dataclass(frozen=True)
class TopToken:
    """A token id that an expert takes more than its share: `taken` of its `count` occurrences."""

    token: int
    text: str
    taken: float
    count: int
    lift: float


@dataclass(frozen=True)
class Group:
    """One group of layers. layers: [first, end), None = all.

    transitions: (A + 1, A + 1) pairs of neighbours, from row to column, by first choice. positions: shares by
    position in the document, in bins [1, 2), [2, 4), [4, 8), ... of `position_tokens` tokens each.
    """

    layers: tuple[int, int] | None
    total: Part
    domains: list[Part]
    top_tokens: list[list[TopToken]]
    dead: list[str]
    transitions: list[list[int]]
    positions: list[list[float]]
    position_tokens: list[int]


@dataclass(frozen=True)
class Stats:
    """All groups. names: the A adapters and "base". experts: how many experts the uniform line divides by.

    knows_base: the router may send a token to the base, or did. template_tokens: tokens that a chat template
    added; template_counted: they are in the numbers.
    """

    names: list[str]
    experts: int
    knows_base: bool
    uniform: float
    groups: list[Group]
    template_tokens: int = 0
    template_counted: bool = False

    @property
    def tokens(self) -> int:
        """The tokens that are counted."""
        return self.groups[0].total.tokens

    def document(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return asdict(self)

    def warnings(self) -> list[str]:
        """Dead adapters and collapse, one sentence each."""
        found = []
        for number, group in enumerate(self.groups):
            where = f" in layer group {number}" if len(self.groups) > 1 else ""
            # a short text may well have nothing for an adapter: that is no finding
            if group.dead and group.total.tokens >= FEW:
                found.append(
                    f"no token{where} goes to {', '.join(group.dead)} (of {group.total.tokens:,} tokens)"
                )
            top = int(np.argmax(group.total.share))
            if len(group.domains) > 1 and group.total.share[top] >= COLLAPSED:
                found.append(
                    f"{100 * group.total.share[top]:.1f} % of all tokens{where} go to {self.names[top]}, "
                    f"over {len(group.domains)} domains: the router may have collapsed"
                )
        return found
