"""Traces on disk: one safetensors file, its header holding the names. Numpy only.

Tensors: token_ids (N,) int32, starts (D,) int64, indices (N, G, k) int16, gates (N, G, k) float32,
domain (D,) int16 into the header's `domains` (-1 = none), scores (N, G, E) float32 where there are any,
content (N,) bool where there are chats: with one group and one choice 10 bytes a token plus 4 per expert. The
metadata entry `molora-trace` is the JSON header.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from molora_cli.core.bundle.writing import new_file
from molora_cli.core.trace import Trace
from molora_cli.errors import InputError
from molora_cli.text import shorten

FORMAT = "molora-trace"
VERSION = 1
_DTYPES = {"token_ids": "int32", "starts": "int64", "indices": "int16", "gates": "float32", "domain": "int16"}
_OPTIONAL = {"scores": "float32", "content": "bool"}
_AGAIN = "make the trace again: molora inspect BUNDLE --data NAME=FILE --save-trace FILE"


def is_trace_file(path: Path) -> bool:
    """True where a file is a safetensors file that says it holds a trace; its tensors are not read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(path.stat().st_size - 8, 100 * 2**20):
                return False
            start = file.read(min(length, 4096))
    except OSError:
        return False
    return start.startswith(b"{") and f'"{FORMAT}"'.encode() in start


def check_trace_target(path: Path, *, force: bool) -> None:
    """Refuse a place where no trace can or may be written, before any work. Raises InputError."""
    if path.is_dir():
        raise InputError(f"{shorten(str(path))} is a folder", "name a file: --save-trace routes.trace")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {shorten(str(path.parent))}", "make it first")
    if path.exists() and not force:
        raise InputError(f"{shorten(str(path))} exists", "give --force to replace it, or another name")


def save_trace(path: Path, trace: Trace, *, force: bool = False) -> None:
    """Write a trace, atomically. Raises InputError as `check_trace_target` does."""
    from safetensors.numpy import save_file

    check_trace_target(path, force=force)
    names = list(dict.fromkeys(name for name in trace.domains if name is not None))
    domain = [
        -1 if name is None else names.index(name) for name in trace.domains or (None,) * len(trace.starts)
    ]
    arrays: dict[str, Any] = {
        "token_ids": trace.token_ids,
        "starts": trace.starts,
        "indices": trace.indices,
        "gates": trace.gates,
        "domain": np.asarray(domain, dtype=np.int64),
    }
    tensors = {name: np.ascontiguousarray(arrays[name].astype(dtype)) for name, dtype in _DTYPES.items()}
    if trace.scores is not None:
        tensors["scores"] = np.ascontiguousarray(trace.scores.astype(np.float32))
    if trace.content is not None:
        tensors["content"] = np.ascontiguousarray(trace.content.astype(bool))
    header = {
        "version": VERSION,
        "adapters": trace.adapters,
        "experts": trace.experts,
        "domains": names,
        "pieces": {str(i): text for i, text in sorted(trace.pieces.items())},
        "meta": trace.meta,
    }
    # ASCII, so that lone surrogates of half characters stay valid UTF-8 in the file
    metadata = {FORMAT: json.dumps(header, ensure_ascii=True, allow_nan=False)}
    with new_file(path) as work:
        save_file(tensors, work, metadata=metadata)


def load_trace(path: Path) -> Trace:
    """Read and check a trace. Raises InputError for a file that is none, is damaged, or of a newer format."""
    from safetensors import SafetensorError, safe_open

    where = shorten(str(path))
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if FORMAT not in metadata:
                raise InputError(f"{where} is a safetensors file but no trace", _AGAIN)
            header = json.loads(metadata[FORMAT])
            _check_header(header, where)
            present = set(file.keys())
            tensors = {name: file.get_tensor(name) for name in (*_DTYPES, *_OPTIONAL) if name in present}
    except FileNotFoundError as error:
        raise InputError(f"{where} does not exist", "check the path of the trace") from error
    except (SafetensorError, OSError) as error:
        raise InputError(f"{where} cannot be read as a trace: {shorten(str(error))}", _AGAIN) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} has a damaged header", _AGAIN) from error
    expected = _DTYPES | {name: dtype for name, dtype in _OPTIONAL.items() if name in tensors}
    for name, dtype in expected.items():
        if name not in tensors or str(tensors[name].dtype) != dtype:
            found = "no such tensor" if name not in tensors else str(tensors[name].dtype)
            raise InputError(f"{where} is damaged: {name} must be {dtype}, there is {found}", _AGAIN)
    names, domain = header["domains"], tensors["domain"]
    if domain.size and not -1 <= int(domain.min()) <= int(domain.max()) < len(names):
        raise InputError(f"{where} is damaged: a document's domain is not in the list of domains", _AGAIN)
    trace = Trace(
        token_ids=tensors["token_ids"].astype(np.int64),
        starts=tensors["starts"],
        indices=tensors["indices"],
        gates=tensors["gates"],
        adapters=tuple(header["adapters"]),
        scores=tensors.get("scores"),
        experts=tuple(header["experts"]),
        domains=tuple(None if i < 0 else names[i] for i in domain.tolist()),
        pieces={int(i): text for i, text in header["pieces"].items()},
        meta=header["meta"],
        content=tensors.get("content"),
    )
    trace.check(where)
    return trace


def _check_header(header: Any, where: str) -> None:
    """Types of the header's fields, before anything trusts them. Raises InputError."""
    if not isinstance(header, dict) or type(header.get("version")) is not int:
        raise InputError(f"{where} has a damaged header: no version", _AGAIN)
    if header["version"] > VERSION:
        raise InputError(
            f"{where} is a trace of version {header['version']}; this molora reads up to {VERSION}",
            "use a newer molora",
        )
    for name in ("adapters", "experts", "domains"):
        value = header.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise InputError(f"{where} has a damaged header: {name} is no list of names", _AGAIN)
    pieces = header.get("pieces")
    if not isinstance(pieces, dict) or not all(
        k.isdecimal() and isinstance(v, str) for k, v in pieces.items()
    ):
        raise InputError(f"{where} has a damaged header: pieces is no map of token texts", _AGAIN)
    if not isinstance(header.get("meta"), dict):
        raise InputError(f"{where} has a damaged header: meta is no object", _AGAIN)
