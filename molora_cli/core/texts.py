"""Texts as documents of token ids: what `inspect` reads, one document at a time, and the base's tokenizer."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.pieces import token_pieces
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

# A text as it is, token ids, or the messages of a chat (role, content), which the chat template renders.
Content = str | Sequence[int] | Sequence[dict[str, str]]
Document = tuple[str | None, Content]

LONGEST = 1 << 20  # characters of a .txt file in one document


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
        from molora_cli.core.chat_template import limited
        from molora_cli.core.training.data import Message
        from molora_cli.core.training.encode import TEMPLATE, message_index

        turns = [Message(m["role"], m["content"]) for m in messages]
        try:
            tokenizer = self._load_full()
            found = limited(tokenizer, lambda: message_index(tokenizer, text, turns, offsets))
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
    data: Sequence[str], texts: Sequence[str] = (), *, chat: bool = False, ticker: Ticker = no_ticks
) -> Iterator[Document]:
    """Documents of `--data` values (NAME=FILE, or FILE) and of loose texts, one at a time.

    A .txt file is one document, one of more than `LONGEST` characters is cut at line ends into several; any
    other is JSON Lines with `messages` or `text`, whose `label` names the domain where NAME is not given.
    chat: loose texts are a user's turn each. The ticker counts kB read. Raises InputError, for missing files
    before the first document.
    """
    files = [_named_file(value) for value in data]
    for _, path in files:
        if not path.is_file():
            raise InputError(
                f"{shorten(str(path))} is no file", "give --data NAME=FILE with a .jsonl or .txt file"
            )
    return _documents(files, texts, chat, ticker)


def _documents(
    files: Sequence[tuple[str | None, Path]], texts: Sequence[str], chat: bool, ticker: Ticker
) -> Iterator[Document]:
    from molora_cli.core.training.data import iter_examples

    for text in texts:
        yield None, [{"role": "user", "content": text}] if chat else text
    total = sum(path.stat().st_size for _, path in files)
    before, documents = 0, 0

    def read(position: int) -> None:
        nonlocal documents
        documents += 1
        ticker((before + position) // 1000, max(1, total // 1000), f"kB, {documents:,} documents")

    for name, path in files:
        if path.suffix.lower() == ".txt":
            for part, position in _read_text(path):
                read(position)
                yield name or path.stem, part
        else:
            for row in iter_examples(path, read):
                domain = name or row.label or path.stem
                messages = [{"role": m.role, "content": m.content} for m in row.messages]
                yield domain, row.text if row.text is not None else messages
        before += path.stat().st_size


def _named_file(value: str) -> tuple[str | None, Path]:
    name, sep, file = value.partition("=")
    if not sep or os.path.lexists(value):
        return None, Path(value).expanduser()
    return name, Path(file).expanduser()


def _read_text(path: Path) -> Iterator[tuple[str, int]]:
    """A text file's parts, and how many bytes were read with each."""
    try:
        with path.open("rb") as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
            while lines := file.readlines(LONGEST):
                yield "".join(lines), raw.tell()
    except UnicodeDecodeError as error:
        raise InputError(f"{shorten(str(path))} is not UTF-8 text", "save it as UTF-8") from error
