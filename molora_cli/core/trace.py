"""A trace: the routes of some text with its token ids. Numpy only, so that reading one needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.pieces import show_piece
from molora_cli.errors import InputError

BASE_EXPERT = "__base__"


@dataclass
class Trace:
    """Routes of N tokens in D documents, G layer groups, k choices, E experts scored.

    token_ids (N,) int64; starts (D,) int64, first token of each document; indices (N, G, k) int16, -1 = base;
    gates (N, G, k) float32; scores (N, G, E) float32 log-probabilities over `experts`, or None for routers
    that score nothing; adapters: names that `indices` point into; experts: names of the score columns,
    "__base__" among them where the router knows the base; domains: one name or None per document; pieces:
    token id -> text for display (may be empty until filled from a tokenizer; a byte that is no whole
    character is a lone surrogate, as `surrogateescape` makes it); meta: bundle path and digest, router
    kind, groups; content: (N,) bool, False for tokens that a chat template added around the messages (None:
    no chat, all tokens are content).
    """

    token_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    indices: NDArray[np.int16]
    gates: NDArray[np.float32]
    adapters: tuple[str, ...]
    scores: NDArray[np.float32] | None = None
    experts: tuple[str, ...] = ()
    domains: tuple[str | None, ...] = ()
    pieces: dict[int, str] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    content: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def groups(self) -> int:
        return int(self.indices.shape[1])

    @property
    def k(self) -> int:
        return int(self.indices.shape[2])

    def documents(self) -> Iterator[slice]:
        """The token range of each document."""
        ends = [*self.starts[1:].tolist(), len(self)] if len(self.starts) else []
        for start, end in zip(self.starts.tolist(), ends, strict=True):
            yield slice(int(start), int(end))

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, (D,) int64."""
        return np.diff(self.starts, append=len(self)).astype(np.int64)

    def domain(self, document: int) -> str | None:
        """The name under which a document was given."""
        return self.domains[document] if self.domains else None

    def first(self, group: int = 0) -> tuple[NDArray[np.int16], NDArray[np.float32]]:
        """Each token's choice with the largest gate (the first of equals) and that gate: (N,) int16, (N,)."""
        indices, gates = self.indices[:, group], self.gates[:, group]
        if self.k == 1:
            return indices[:, 0], gates[:, 0]
        best = gates.argmax(axis=1)[:, None]
        return np.take_along_axis(indices, best, 1)[:, 0], np.take_along_axis(gates, best, 1)[:, 0]

    def of_template(self) -> int:
        """How many tokens a chat template added."""
        return 0 if self.content is None else len(self) - int(np.count_nonzero(self.content))

    def without_template(self) -> Trace:
        """The same documents with their content alone, as if the template's tokens had not been there."""
        if self.content is None or self.of_template() == 0:
            return self
        kept = self.content
        before = np.concatenate([[0], np.cumsum(kept)])
        return replace(
            self,
            token_ids=self.token_ids[kept],
            starts=before[self.starts].astype(np.int64),
            indices=self.indices[kept],
            gates=self.gates[kept],
            scores=None if self.scores is None else self.scores[kept],
            content=None,
        )

    def text(self, token_id: int) -> str:
        """A token's text, or its number where no tokenizer has been asked."""
        return self.pieces.get(token_id, f"<{token_id}>")

    def check(self, where: str = "the trace") -> None:
        """Raises InputError where shapes, bounds or values contradict each other. where: names the source."""
        for problem in _problems(self):
            raise InputError(
                f"{where} is damaged: {problem}", "make the trace again: molora inspect --save-trace"
            )


def _problems(trace: Trace) -> Iterator[str]:
    n, documents = len(trace), len(trace.starts)
    if trace.token_ids.ndim != 1 or trace.starts.ndim != 1:
        yield "token ids and document starts must be one-dimensional"
    if trace.indices.ndim != 3 or trace.indices.shape[0] != n or 0 in trace.indices.shape[1:]:
        yield f"route indices have shape {trace.indices.shape}, not ({n}, groups, k)"
    if trace.gates.shape != trace.indices.shape:
        yield f"gates have shape {trace.gates.shape}, route indices {trace.indices.shape}"
    if n and not documents:
        yield "there are tokens but no document"
    if documents and (
        trace.starts[0] != 0 or trace.starts[-1] > n or bool((np.diff(trace.starts) < 0).any())
    ):
        yield "document starts do not rise from 0 within the tokens"
    if trace.domains and len(trace.domains) != documents:
        yield f"{len(trace.domains)} domain names for {documents} documents"
    if n and int(trace.token_ids.min()) < 0:
        yield "a token id is negative"
    if n and not -1 <= int(trace.indices.min()) <= int(trace.indices.max()) < len(trace.adapters):
        yield f"a route points outside the {len(trace.adapters)} adapters"
    if not bool(np.isfinite(trace.gates).all()):
        yield "a gate is not finite"
    if trace.content is not None and trace.content.shape != (n,):
        yield f"content has shape {trace.content.shape}, not ({n},)"
    if trace.scores is not None:
        if trace.scores.shape != (n, trace.groups, len(trace.experts)) or not trace.experts:
            yield f"scores have shape {trace.scores.shape}, not ({n}, {trace.groups}, {len(trace.experts)})"
        # -inf is the log-probability of an expert that is muted
        if n and (bool(np.isnan(trace.scores).any()) or float(trace.scores.max()) > 1e-3):
            yield "a score is no log-probability"


def join(traces: Sequence[Trace]) -> Trace:
    """One trace of the documents of several, in turn. All must come from one router.

    Raises InputError where adapters, experts or shapes differ, or for no trace at all.
    """
    if not traces:
        raise InputError("there is no text to trace", "give --prompt, --data or standard input")
    head = traces[0]
    for other in traces[1:]:
        same = (other.adapters, other.experts, other.indices.shape[1:], other.scores is None)
        if same != (head.adapters, head.experts, head.indices.shape[1:], head.scores is None):
            raise InputError("the traces come from different routers", "trace all texts with one router")
    offsets = np.cumsum([0, *(len(t) for t in traces[:-1])])
    pieces: dict[int, str] = {}
    for trace in traces:
        pieces.update(trace.pieces)
    scores = [t.scores for t in traces if t.scores is not None]
    content = None
    if any(t.content is not None for t in traces):
        content = np.concatenate(
            [np.ones(len(t), dtype=bool) if t.content is None else t.content for t in traces]
        )
    return Trace(
        token_ids=np.concatenate([t.token_ids for t in traces]),
        starts=np.concatenate([t.starts + o for t, o in zip(traces, offsets, strict=True)]),
        indices=np.concatenate([t.indices for t in traces]),
        gates=np.concatenate([t.gates for t in traces]),
        adapters=head.adapters,
        scores=np.concatenate(scores) if scores else None,
        experts=head.experts,
        domains=tuple(name for t in traces for name in (t.domains or (None,) * len(t.starts))),
        pieces=pieces,
        meta=dict(head.meta),
        content=content,
    )


def listing(trace: Trace, limit: int) -> list[dict[str, Any]]:
    """The first `limit` tokens as JSON-ready records; indices and gates are lists per group."""
    records = []
    for document, tokens in enumerate(trace.documents()):
        for i in range(tokens.start, min(tokens.stop, limit)):
            token = int(trace.token_ids[i])
            records.append(
                {
                    "document": document,
                    "domain": trace.domain(document),
                    "id": token,
                    "text": show_piece(trace.text(token)),
                    "indices": trace.indices[i].tolist(),
                    "template": trace.content is not None and not trace.content[i],
                    "gates": [[round(float(g), 6) for g in group] for group in trace.gates[i]],
                }
            )
    return records
