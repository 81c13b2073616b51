"""Training and evaluation rows: JSON Lines of chats (`messages`) or plain text (`text`), one object a line.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"text": "...", "label": "code"}

Optional: `label` (the adapter the row belongs to), `document` (rows of one document stay on one side of a
held-out split), `segments` (which characters of which message belong to which label), `tests` and `answer`
(what an evaluation checks a program by). Others are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from molora_cli.errors import InputError
from molora_cli.refs import check_adapter_name
from molora_cli.text import shorten

# A row is held whole; a longer line is a file of another format rather than a row.
MAX_LINE_BYTES = 32 * 2**20
_SEGMENT = 'a segment is {"message": 0, "start": 0, "end": 10, "label": "math"}, in characters of the message'
_FORMAT = 'one object a line: {"messages": [{"role": ..., "content": ...}]} or {"text": ...}'


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Segment:
    """Characters [start, end) of message number `message` belong to `label`; a `text` row is message 0."""

    message: int
    start: int
    end: int
    label: str


@dataclass(frozen=True)
class Example:
    """One row: either `messages` or `text` is set. line: its number in the file, from 1. tests: statements
    that a program must pass; answer: what it must print."""

    messages: tuple[Message, ...]
    text: str | None
    label: str | None
    line: int
    segments: tuple[Segment, ...] = ()
    document: str | None = None
    tests: tuple[str, ...] = ()
    answer: str | None = None

    @cached_property
    def contents(self) -> tuple[str, ...]:
        """The text of every message, or the one plain text."""
        return (self.text,) if self.text is not None else tuple(m.content for m in self.messages)


def iter_examples(path: Path, read: Callable[[int], None] = lambda position: None) -> Iterator[Example]:
    """The rows of a JSON Lines file one at a time, blank lines skipped; memory is bounded by one line.

    read: called with the bytes read so far before each row. Raises InputError with path, line number and
    remedy for whatever is not a row, and for a file without any.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror}", "check the path of the data file"
        ) from error
    with file:
        found = False
        for number, raw in _lines(file, path):
            if raw.strip():
                found = True
                read(file.tell())
                yield _example(_object(raw, path, number), path, number)
    if not found:
        raise InputError(f"{path} has no examples: the file is empty", f"give a file with {_FORMAT}")


def read_examples(path: Path) -> list[Example]:
    """All rows of a JSON Lines file. Raises InputError as `iter_examples` does."""
    return list(iter_examples(path))


def read_domains(specs: Sequence[str], known: Sequence[str] | None = None) -> dict[str, list[Example]]:
    """`--data` values to rows per adapter: NAME=FILE, or a FILE whose rows carry a `label`.

    known: the names that are allowed (the bundle's adapters and `__base__`); None allows any.
    Raises InputError for an unknown name or label (with line and the list), and for a row without a label.
    """
    domains: dict[str, list[Example]] = {}
    for spec in specs:
        name, sep, value = spec.partition("=")
        if sep and not Path(spec).exists():
            if name != "__base__":
                check_adapter_name(name)
            _check_known(name, known, f"--data {shorten(spec)}")
            rows = read_examples(Path(value).expanduser())
            domains.setdefault(name, []).extend(rows)
            continue
        path = Path(spec).expanduser()
        for row in iter_examples(path):
            if row.label is None:
                raise InputError(
                    f"{path}, line {row.line}: the row has no label, so its adapter is not known",
                    'give NAME=FILE for a file of one adapter, or add "label" to every row',
                )
            _check_known(row.label, known, f"{path}, line {row.line}")
            domains.setdefault(row.label, []).append(row)
    return domains


def conflicts(domains: dict[str, list[Example]]) -> list[str]:
    """Rows that stand under two names with the same text: one sentence each, with both lines."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    found = []
    for name, rows in domains.items():
        for row in rows:
            other, line = seen.setdefault(row.contents, (name, row.line))
            if other != name:
                shown = shorten(" ".join(row.contents), 40)
                found.append(f"'{shown}' is {other} (line {line}) and {name} (line {row.line})")
    return found


def _check_known(name: str, known: Sequence[str] | None, where: str) -> None:
    if known is not None and name not in known:
        raise InputError(
            f"{where}: '{shorten(name, 40)}' is no adapter here; there are: {', '.join(known)}",
            "use one of these names, or compose the bundle with that adapter",
        )


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1:
            _check_start(raw, path)
            raw = raw.removeprefix(b"\xef\xbb\xbf")
        if len(raw) > MAX_LINE_BYTES:
            raise InputError(
                f"{path}, line {number}: longer than {MAX_LINE_BYTES // 2**20} MiB",
                f"the file must hold {_FORMAT}",
            )
        yield number, raw


def _check_start(raw: bytes, path: Path) -> None:
    """Names another encoding or container by its first bytes, where a parser would only say 'line 1'."""
    containers = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"PAR1": "Parquet", b"\x28\xb5\x2f\xfd": "zstd"}
    for magic, name in containers.items():
        if raw.startswith(magic):
            raise InputError(f"{path} is a {name} file, not JSON Lines", f"unpack it to {_FORMAT}")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in raw[:4]:
        raise InputError(
            f"{path} is UTF-16 or UTF-32, not UTF-8",
            "save it as UTF-8, say with: iconv -f UTF-16 -t UTF-8 IN > OUT",
        )


def _object(raw: bytes, path: Path, number: int) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        value = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{where}: not UTF-8 (byte {error.start + 1} of the line)", "save the file as UTF-8"
        ) from error
    except RecursionError as error:
        raise InputError(f"{where}: nested too deeply", f"a row is {_FORMAT}") from error
    except ValueError as error:
        if number == 1 and raw.lstrip().startswith(b"["):
            raise _array(path) from error
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise InputError(f"{where}{column}: not JSON ({reason})", f"the file must hold {_FORMAT}") from error
    if isinstance(value, list) and number == 1:
        raise _array(path)
    if not isinstance(value, dict):
        raise InputError(
            f"{where}: {_kind(value)} where an object is needed", f"the file must hold {_FORMAT}"
        )
    return value


def _array(path: Path) -> InputError:
    return InputError(
        f"{path} is one JSON array, not JSON Lines",
        f"write {_FORMAT}; say with: jq -c '.[]' IN.json > OUT.jsonl",
    )


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _example(row: dict[str, Any], path: Path, number: int) -> Example:
    where = f"{path}, line {number}"
    if row.get("messages") is not None and row.get("text") is not None:
        raise InputError(f"{where}: both 'messages' and 'text' are given", "keep one of the two")
    text: str | None = None
    messages: tuple[Message, ...] = ()
    if row.get("messages") is not None:
        messages = _messages(row["messages"], where)
    elif "text" in row:
        text = _string(row["text"], "text", where)
    else:
        fields = ", ".join(shorten(k, 30) for k in list(row)[:8]) or "none"
        raise InputError(f"{where}: neither 'messages' nor 'text' (fields: {fields})", f"a row is {_FORMAT}")
    contents = (text,) if text is not None else tuple(m.content for m in messages)
    if not any(c.strip() for c in contents):
        raise InputError(f"{where}: the text is empty", "remove the row")
    label = row.get("label")
    if label is not None and (not isinstance(label, str) or not label):
        shown = "an empty string" if label == "" else _kind(label)
        raise InputError(
            f"{where}: 'label' is {shown}, not the name of an adapter", 'write the name: "label": "math"'
        )
    document = row.get("document")
    return Example(
        messages=messages,
        text=text,
        label=None if label is None else _string(label, "label", where),
        line=number,
        segments=_segments(row.get("segments"), contents, where),
        document=None if document is None else str(document),
        tests=_tests(row.get("tests")),
        answer=row["answer"] if isinstance(row.get("answer"), str) else None,
    )


def _tests(value: Any) -> tuple[str, ...]:
    """Another field of that name is nothing to complain about: it is not needed to train."""
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    return ()


def _string(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where}: '{field}' is {_kind(value)}, not a string", f"a row is {_FORMAT}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = f"\\u{ord(value[error.start]):04x}"
        raise InputError(
            f"{where}: '{field}' holds half of a surrogate pair ({bad}), which is no character",
            "write the character itself, or both halves of the escape",
        ) from error
    return value


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: 'messages' must be a list of at least one message", f"a row is {_FORMAT}")
    messages = []
    for index, item in enumerate(value):
        at = f"{where}, message {index + 1}"
        if not isinstance(item, dict):
            raise InputError(f"{at}: {_kind(item)} where an object is needed", f"a row is {_FORMAT}")
        for field in ("role", "content"):
            if field not in item:
                raise InputError(f"{at}: no '{field}'", f"a row is {_FORMAT}")
        role = _string(item["role"], "role", at)
        if not role:
            raise InputError(f"{at}: 'role' is empty", "use user, assistant or system")
        messages.append(Message(role, _string(item["content"], "content", at)))
    return tuple(messages)


def _segments(value: Any, contents: tuple[str, ...], where: str) -> tuple[Segment, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise InputError(f"{where}: 'segments' is {_kind(value)}, not a list", _SEGMENT)
    segments = []
    for item in value:
        if not isinstance(item, dict):
            raise InputError(f"{where}: a segment is {_kind(item)}, not an object", _SEGMENT)
        message, start, end, label = (item.get(k) for k in ("message", "start", "end", "label"))
        if (
            type(message) is not int
            or type(start) is not int
            or type(end) is not int
            or not isinstance(label, str)
        ):
            raise InputError(
                f"{where}: a segment lacks message, start, end or label, or has a wrong type", _SEGMENT
            )
        if not 0 <= message < len(contents) or not 0 <= start <= end <= len(contents[message]):
            raise InputError(
                f"{where}: segment {start} to {end} of message {message} is outside the text", _SEGMENT
            )
        segments.append(Segment(message, start, end, _string(label, "label", where)))
    return tuple(segments)
