"""Texts through a bundle's router: from documents to a trace.

A router on token ids needs the tokenizer, and at most the base's input embedding; one that reads hidden
states has the base run up to the deepest layer it reads. Documents are tokenised and
routed in batches of similar length; a long one goes through in blocks, the router's state carried along.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.texts import Content, Document, Texts
from molora_cli.core.trace import Trace, join
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.routed.engine import Engine
    from molora_cli.core.router.kinds import Surroundings
    from molora_cli.core.router.quick import Quick

WINDOW = 512  # documents that are sorted by length together
MANY = 64  # of them make a second router, in float32, worth its start
WINDOW_CHARACTERS = 1 << 22  # fewer where they are long
BATCH_TOKENS = 1024  # of one call of the router, padding included: larger ones leave the processor's cache
BLOCK = 1024  # tokens of one document per call


def trace_texts(bundle: Bundle, documents: Iterable[Document], *, ticker: Ticker = no_ticks) -> Trace:
    """Route documents with the bundle's router, without its base's forward where that is not read.

    documents: (domain or None, content), read as they are needed. The ticker counts documents.
    Raises InputError where the bundle has no router, the router cannot be used, or there is no document.
    """
    tracer = Tracer(bundle)
    parts = []
    done = 0
    for part in tracer.windows(documents):
        parts.append(part)
        done += len(part.starts)
        ticker(done)
    trace = join(parts)
    trace.pieces = tracer.pieces(np.unique(trace.token_ids).tolist())
    return trace


class Tracer:
    """A bundle's router with what it reads of the base. Raises InputError where there is no usable router."""

    def __init__(self, bundle: Bundle) -> None:
        from molora_cli.core.router.stack import load_router

        spec = bundle.router_spec
        if spec is None:
            raise InputError(
                f"{shorten(str(bundle.path))} has no router yet, so no token has a route",
                f"train one: molora train-router {shorten(str(bundle.path))} --data NAME=FILE ...",
            )
        self._texts = Texts(bundle.base_path)
        self._engine = _engine(bundle)
        self._around: Surroundings | None = None
        if self._engine is not None:
            router = self._engine.router
        else:
            self._around = _surroundings(bundle)
            router = load_router(bundle, self._around)
        if router is None:  # the spec is there, so this cannot be: said for the type checker
            raise InputError("the bundle lost its router while it was read", "run it again")
        self._bundle, self._router = bundle, router
        self._quick: Quick | None = None
        self._meta: dict[str, Any] = {
            "bundle": str(bundle.path),
            "digest": bundle.digest,
            "base": bundle.manifest.base.id,
            "router": spec.kind,
            "groups": [list(r) for r in router.group_ranges],
        }

    def windows(self, documents: Iterable[Document]) -> Iterator[Trace]:
        """Routes of some documents after the others, whole documents each, without the tokens' text."""
        size = WINDOW if self._engine is None else WINDOW // 32
        windows = _windows(documents, size)
        # the next documents are read and tokenised while the last ones are routed
        with _workers(self._engine) as run, ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as router:
            coming = reader.submit(_read_window, windows, self._texts)
            before: Future[Trace] | None = None
            while (read := coming.result()) is not None:
                coming = reader.submit(_read_window, windows, self._texts)
                if self._engine is not None:  # it takes long: Ctrl-C is to be heard within it
                    yield self._trace(read, run)
                    continue
                # and these while the caller is at the last ones
                now = router.submit(self._trace, read, run)
                if before is not None:
                    yield before.result()
                before = now
            if before is not None:
                yield before.result()

    def _make_quick(self) -> Quick | None:
        """The router once more in float32; None where it would not be sooner."""
        import torch

        from molora_cli.core.router.quick import Quick, is_quick
        from molora_cli.core.router.stack import load_router

        if self._around is None or not is_quick(self._router.spec):
            return None
        single = load_router(self._bundle, replace(self._around, dtype=torch.float32))
        return None if single is None else Quick(self._router, single)

    def _trace(self, window: _Window, run: Run) -> Trace:
        ids, of_message, router = window.ids, window.of_message, self._router
        if self._quick is None and len(ids) >= MANY:
            self._quick = self._make_quick()
        lengths = np.array([len(row) for row in ids], dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        shape = (total, router.groups)
        trace = Trace(
            token_ids=np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int64, count=total),
            starts=starts,
            indices=np.full((*shape, router.k), -1, dtype=np.int16),
            gates=np.zeros((*shape, router.k), dtype=np.float32),
            adapters=router.adapters,
            scores=np.zeros((*shape, len(router.experts)), dtype=np.float32),
            experts=router.experts,
            domains=window.domains,
            meta=dict(self._meta),
            content=np.ones(total, dtype=bool) if of_message else None,
        )
        if trace.content is not None:
            for row, found in of_message.items():
                trace.content[starts[row] : starts[row] + lengths[row]] = found
        order = np.argsort(lengths, kind="stable")
        batches: list[list[int]] = []
        for row in [r for r in order.tolist() if lengths[r]]:
            if not batches or (len(batches[-1]) + 1) * min(BLOCK, int(lengths[row])) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(row)
        # the batches write different rows of the trace
        run(lambda batch: self._route(trace, ids, batch), batches)
        return trace

    def _route(self, trace: Trace, ids: list[list[int]], rows: list[int]) -> None:
        """Decide the documents `rows` (shortest first) and write their routes into `trace`.

        Raises InputError for a document that the base cannot hold where it has to run.
        """
        import torch

        engine, longest = self._engine, len(ids[rows[-1]])
        limit = None if engine is None else _context_length(engine)
        if limit is not None and longest > limit:
            raise InputError(
                f"a document has {longest} tokens and this base holds {limit}: its router reads hidden "
                "states",
                "split the document, or use a router on token ids",
            )
        state = self._router.start(len(rows))
        step = BLOCK if engine is None else max(1, longest)
        for begin in range(0, longest, step):
            width = min(step, longest - begin)
            block = torch.zeros(len(rows), width, dtype=torch.int64)
            real = np.zeros((len(rows), width), dtype=bool)
            for i, row in enumerate(rows):
                part = ids[row][begin : begin + width]
                block[i, : len(part)] = torch.tensor(part, dtype=torch.int64)
                real[i, : len(part)] = True
            with torch.no_grad():
                # no mask: routers on ids are causal and padding stands on the right, so it changes no route
                # that is kept and no state that is read again; with a mask they would first pack every row
                if engine is not None:
                    decision = engine.decide(block.to(engine.device))
                elif self._quick is not None and longest <= step:
                    decision = self._quick.decide(block, torch.from_numpy(real))
                else:
                    decision, state = self._router.decide(block, None, state)
            target = np.concatenate(
                [
                    np.arange(n) + trace.starts[row] + begin
                    for row, n in zip(rows, real.sum(1).tolist(), strict=True)
                ]
            )
            trace.indices[target] = decision.route.indices.cpu().numpy()[real]
            trace.gates[target] = decision.route.gates.cpu().numpy()[real]
            if trace.scores is not None:
                trace.scores[target] = decision.scores.cpu().numpy()[real]

    def pieces(self, ids: Iterable[int]) -> dict[int, str]:
        """Token id -> text for display."""
        return self._texts.pieces(ids)


def _engine(bundle: Bundle) -> Engine | None:
    """What runs the base, where the bundle's router reads hidden states; else None."""
    from molora_cli.core.router.kinds import LiveStage, kind_class

    stages = bundle.router_spec.stages if bundle.router_spec else []
    if not any(issubclass(kind_class(stage.kind), LiveStage) for stage in stages):
        return None
    from molora_cli.core.routed.model import load

    return load(bundle.path, base=str(bundle.base_path), backend="torch").engine


def _surroundings(bundle: Bundle) -> Surroundings:
    """What the router's stages may read of the base: its embedding only where a stage needs it."""
    from molora_cli.core.base.embedding import read_embedding
    from molora_cli.core.base.structure import read_structure
    from molora_cli.core.router.kinds import Surroundings, kind_class

    stages = bundle.router_spec.stages if bundle.router_spec else []
    needed = any(kind_class(stage.kind).needs_embedding for stage in stages)
    return Surroundings(
        n_layers=read_structure(bundle.base_path).n_layers,
        embedding=read_embedding(bundle.base_path) if needed else None,
    )


Run = Callable[[Callable[[list[int]], None], list[list[int]]], None]


@contextmanager
def _workers(engine: Engine | None) -> Iterator[Run]:
    """Calls a function with every batch: one batch per core where the base does not run. A router's matrices
    are too small to be shared among cores."""
    import torch

    threads = torch.get_num_threads()
    if engine is not None or threads == 1:

        def one(function: Callable[[list[int]], None], batches: list[list[int]]) -> None:
            for batch in batches:
                function(batch)

        yield one
        return
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:

            def several(function: Callable[[list[int]], None], batches: list[list[int]]) -> None:
                for _ in pool.map(function, batches):  # raises what a worker raised
                    pass

            yield several
    finally:
        torch.set_num_threads(threads)


def _windows(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    window: list[Document] = []
    characters = 0
    for document in documents:
        window.append(document)
        characters += _characters(document[1])
        if len(window) == size or characters >= WINDOW_CHARACTERS:
            yield window
            window, characters = [], 0
    if window:
        yield window


def _characters(content: Content) -> int:
    if isinstance(content, str):
        return len(content)
    return sum(len(m["content"]) if isinstance(m, dict) else 1 for m in content)


@dataclass(frozen=True)
class _Window:
    """Some documents' domains and token ids; of_message: see `Texts.encode`."""

    domains: tuple[str | None, ...]
    ids: list[list[int]]
    of_message: dict[int, NDArray[np.bool_]]


def _read_window(windows: Iterator[list[Document]], texts: Texts) -> _Window | None:
    """The next documents; None where there are no more."""
    window = next(windows, None)
    if window is None:
        return None
    ids, of_message = texts.encode([content for _, content in window])
    return _Window(tuple(domain for domain, _ in window), ids, of_message)


def _context_length(engine: Engine) -> int | None:
    from molora_cli.core.generate import context_length

    return context_length(engine.config)
