"""Routes of more text than memory holds: every token is counted, the first ones are kept to be looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from molora_cli.core.counting import Counting
from molora_cli.core.stats import Stats
from molora_cli.core.texts import Document
from molora_cli.core.trace import Trace, join
from molora_cli.core.tracing import Tracer

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle

KEEP = 500_000  # tokens, some 30 bytes each


@dataclass(frozen=True)
class Survey:
    """trace: the first documents. stats: of all `documents` with their `tokens`, those of templates too."""

    trace: Trace
    stats: Stats
    tokens: int
    documents: int


def survey(
    bundle: Bundle,
    documents: Iterable[Document],
    *,
    keep: int | None = KEEP,
    top: int = 10,
    template: bool = False,
) -> Survey:
    """Route documents with the bundle's router and count where the tokens go.

    keep: no further document is kept once that many tokens are; None keeps all. top, template: as for
    `counting.summarise`. Raises InputError as `tracing.trace_texts` does.
    """
    tracer = Tracer(bundle)
    counting = Counting(template=template)
    parts: list[Trace] = []
    kept = 0
    for part in tracer.windows(documents):
        counting.add(part)
        if keep is None or kept < keep:
            parts.append(part)
            kept += len(part)
    trace = join(parts)
    trace.pieces = tracer.pieces(np.unique(trace.token_ids).tolist())

    def text(token: int) -> str:
        return trace.pieces.get(token) or tracer.pieces([token])[token]

    return Survey(trace, counting.stats(text, top=top), counting.tokens, counting.documents)
