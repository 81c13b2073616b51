"""Texts through a bundle's router: from documents to a trace.

A router on token ids needs the tokenizer, and at most the base's input embedding; one that reads hidden
states has the base run up to the deepest layer it reads. Documents are tokenised and
routed in batches of similar length; a long one goes through in blocks, the router's state carried along.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.pieces import token_pieces
from molora_cli.core.trace import Trace, join
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.routed.engine import Engine
    from molora_cli.core.router.stack import RouterStack

# A text as it is, token ids, or the messages of a chat (role, content), which the chat template renders.
Content = str | Sequence[int] | Sequence[dict[str, str]]
Document = tuple[str | None, Content]

WINDOW = 512  # documents that are sorted by length together
BATCH_TOKENS = 1024  # of one call of the router, padding included: larger ones leave the processor's cache
BLOCK = 1024  # tokens of one document per call


class Texts:
    """The tokenizer of a base: ids of documents, and the text of tokens.

    Plain text needs `tokenizers` alone; the first chat loads the transformers tokenizer for its template.
    Raises InputError where the base has no usable tokenizer.
    """

    def __init__(self, base_path: Path) -> None:
        self._path = base_path
        self._full: Any = None
        file = base_path / "tokenizer.json"
        self._fast = _read_tokenizer(file) if file.is_file() else self._load_full().backend_tokenizer

    def _load_full(self) -> Any:
        if self._full is None:
            from transformers import AutoTokenizer

            try:
                self._full = AutoTokenizer.from_pretrained(self._path, local_files_only=True)
            except (OSError, ValueError, ImportError) as error:
                raise InputError(
                    f"the tokenizer of {self._path} cannot be loaded: {shorten(str(error), 160)}",
                    "put the tokenizer's files beside the base's weights",
                ) from error
            if not self._full.is_fast:
                raise InputError(
                    f"the tokenizer of {self._path} has no tokenizer.json",
                    "save it once with save_pretrained",
                )
        return self._full

    def encode(self, contents: Sequence[Content]) -> tuple[list[list[int]], dict[int, NDArray[np.bool_]]]:
        """Token ids per document. Texts get the tokenizer's own special tokens, chats their template's.

        The second is for the chats among them: place in `contents` -> which tokens are of a message, (N,).
        """
        ids: list[list[int]] = [[] for _ in contents]
        texts: dict[int, str] = {}
        chats: dict[int, Any] = {}
        for i, content in enumerate(contents):
            if isinstance(content, str):
                texts[i] = content
            elif _is_ids(content):
                ids[i] = [int(t) for t in content]  # type: ignore[arg-type]
            else:
                chats[i] = content
        for i, encoding in zip(texts, self._fast.encode_batch_fast(list(texts.values())), strict=True):
            ids[i] = encoding.ids
        if not chats:
            return ids, {}
        rendered = {i: self._render(messages) for i, messages in chats.items()}
        # only these need to know where in the text each token stands, which costs a little
        encoded = self._fast.encode_batch([text for text, _ in rendered.values()], add_special_tokens=False)
        of_message = {}
        for (i, (text, messages)), encoding in zip(rendered.items(), encoded, strict=True):
            ids[i] = encoding.ids
            offsets = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            of_message[i] = self._of_message(text, messages, offsets)
        return ids, of_message

    def pieces(self, ids: Iterable[int]) -> dict[int, str]:
        """Token id -> text for display."""
        return token_pieces(self._fast, ids)

    def _render(self, messages: Sequence[dict[str, str]]) -> tuple[str, Any]:
        """The text of a chat, and the messages as they stand in it."""
        from molora_cli.core.chat_template import merge_system, render

        merged: list[str] = []
        text = render(self._load_full(), messages, add_generation_prompt=False, notify=merged.append)
        return text, merge_system(messages) if merged else messages

    def _of_message(self, text: str, messages: Any, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which tokens belong to a message; all of them where the template does not let that be found out."""
        from molora_cli.core.chat_template import TIME_LIMIT, within
        from molora_cli.core.training.data import Message
        from molora_cli.core.training.encode import TEMPLATE, message_index

        turns = [Message(m["role"], m["content"]) for m in messages]
        try:
            found = within(TIME_LIMIT, lambda: message_index(self._load_full(), text, turns, offsets))
        except InputError:
            return np.ones(len(offsets), dtype=bool)
        return found != TEMPLATE


def _is_ids(content: Content) -> bool:
    return not isinstance(content, str) and (not content or isinstance(content[0], (int, np.integer)))


def _read_tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises plain Exception for whatever it cannot read
        raise InputError(
            f"{file} cannot be read: {shorten(str(error), 160)}", "copy the base's tokenizer again"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_documents(
    data: Sequence[str], texts: Sequence[str] = (), *, chat: bool = False
) -> Iterator[Document]:
    """Documents of `--data` values (NAME=FILE, or FILE) and of loose texts, one at a time.

    A .txt file is one document; any other is JSON Lines with `messages` or `text`, whose `label` names the
    domain where NAME is not given. chat: loose texts are a user's turn each. Raises InputError, for missing
    files before the first document.
    """
    files = [_named_file(value) for value in data]
    for _, path in files:
        if not path.is_file():
            raise InputError(
                f"{shorten(str(path))} is no file", "give --data NAME=FILE with a .jsonl or .txt file"
            )
    return _documents(files, texts, chat)


def _documents(
    files: Sequence[tuple[str | None, Path]], texts: Sequence[str], chat: bool
) -> Iterator[Document]:
    from molora_cli.core.training.data import iter_examples

    for text in texts:
        yield None, [{"role": "user", "content": text}] if chat else text
    for name, path in files:
        if path.suffix.lower() == ".txt":
            yield name or path.stem, _read_text(path)
            continue
        for row in iter_examples(path):
            domain = name or row.label or path.stem
            messages = [{"role": m.role, "content": m.content} for m in row.messages]
            yield domain, row.text if row.text is not None else messages


def _named_file(value: str) -> tuple[str | None, Path]:
    name, sep, file = value.partition("=")
    if not sep or os.path.lexists(value):
        return None, Path(value).expanduser()
    return name, Path(file).expanduser()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{shorten(str(path))} is not UTF-8 text", "save it as UTF-8") from error


def trace_texts(bundle: Bundle, documents: Iterable[Document], *, ticker: Ticker = no_ticks) -> Trace:
    """Route documents with the bundle's router, without its base's forward where that is not read.

    documents: (domain or None, content), read as they are needed. The ticker counts documents.
    Raises InputError where the bundle has no router, the router cannot be used, or there is no document.
    """
    from molora_cli.core.router.stack import load_router

    if bundle.router_spec is None:
        raise InputError(
            f"{shorten(str(bundle.path))} has no router yet, so no token has a route",
            f"train one: molora train-router {shorten(str(bundle.path))} --data NAME=FILE ...",
        )
    texts = Texts(bundle.base_path)
    engine = _engine(bundle)
    router = engine.router if engine is not None else load_router(bundle, _surroundings(bundle))
    if router is None:  # the spec is there, so this cannot be: said for the type checker
        raise InputError("the bundle lost its router while it was read", "run it again")
    parts = []
    done = 0
    for window in _windows(documents, WINDOW if engine is None else WINDOW // 32):
        parts.append(_trace_window(router, texts, window, engine))
        done += len(window)
        ticker(done)
    trace = join(parts)
    trace.pieces = texts.pieces(np.unique(trace.token_ids).tolist())
    trace.meta = {
        "bundle": str(bundle.path),
        "digest": bundle.digest,
        "base": bundle.manifest.base.id,
        "router": bundle.router_spec.kind,
        "groups": [list(r) for r in router.group_ranges],
    }
    return trace


def _engine(bundle: Bundle) -> Engine | None:
    """What runs the base, where the bundle's router reads hidden states; else None."""
    from molora_cli.core.router.kinds import LiveStage, kind_class

    stages = bundle.router_spec.stages if bundle.router_spec else []
    if not any(issubclass(kind_class(stage.kind), LiveStage) for stage in stages):
        return None
    from molora_cli.core.routed.model import load

    return load(bundle.path, base=str(bundle.base_path), backend="torch").engine


def _surroundings(bundle: Bundle) -> Any:
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


def _windows(documents: Iterable[Document], size: int) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while window := list(itertools.islice(iterator, size)):
        yield window


def _trace_window(
    router: RouterStack, texts: Texts, window: Sequence[Document], engine: Engine | None = None
) -> Trace:
    ids, of_message = texts.encode([content for _, content in window])
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
        domains=tuple(domain for domain, _ in window),
        content=np.ones(total, dtype=bool) if of_message else None,
    )
    if trace.content is not None:
        for row, found in of_message.items():
            trace.content[starts[row] : starts[row] + lengths[row]] = found
    order = np.argsort(lengths, kind="stable")
    batch: list[int] = []
    for row in [r for r in order.tolist() if lengths[r]]:
        if batch and (len(batch) + 1) * min(BLOCK, int(lengths[row])) > BATCH_TOKENS:
            _route(router, trace, ids, batch, engine)
            batch = []
        batch.append(row)
    if batch:
        _route(router, trace, ids, batch, engine)
    return trace


def _route(
    router: RouterStack, trace: Trace, ids: list[list[int]], rows: list[int], engine: Engine | None
) -> None:
    """Decide the documents `rows` (shortest first) and write their routes into `trace`.

    Raises InputError for a document that the base cannot hold where it has to run.
    """
    import torch

    longest = len(ids[rows[-1]])
    limit = None if engine is None else _context_length(engine)
    if limit is not None and longest > limit:
        raise InputError(
            f"a document has {longest} tokens and this base holds {limit}: its router reads hidden states",
            "split the document, or use a router on token ids",
        )
    state = router.start(len(rows))
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
            # no mask: routers on ids are causal and padding stands on the right, so it changes no route that
            # is kept and no state that is read again; with a mask they would first pack every row
            if engine is None:
                decision, state = router.decide(block, None, state)
            else:
                decision = engine.decide(block.to(engine.device))
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


def _context_length(engine: Engine) -> int | None:
    from molora_cli.core.generate import context_length

    return context_length(engine.config)
