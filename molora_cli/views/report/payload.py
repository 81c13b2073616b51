"""What the page knows of a trace, as JSON: names, statistics, and a few bytes per token.

Arrays are `{"t": type, "d": base64}` of little-endian numbers. Token texts are made safe to show here, and
stand once each in a table; tokens are places in it. Experts are columns: the A adapters, then the base (A).
Gates, probabilities and margins are bytes, 255 = 1. With one group of layers every token has its choices
and best scores; with more, `DETAIL` tokens have the choices and margins of every group, and the others the
expert with the largest sum of gates over all groups.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from molora_cli.core.agreement import overall
from molora_cli.core.pieces import split_tail
from molora_cli.core.stats import Stats
from molora_cli.core.trace import BASE_EXPERT, Trace
from molora_cli.text import printable
from molora_cli.views.coloured import NEWLINE, layer_range
from molora_cli.views.palette import BASE, Palette

DETAIL = 5000  # tokens with the choices of every group, where there are several
BUDGET = 1_700_000  # bytes of those choices, before base64: very many groups leave fewer tokens
CHOICES = 3  # largest gates of a token that are kept
SCORES = 3  # best scores of a token that are kept


@dataclass(frozen=True)
class Side:
    """One trace of a page. name: how it is called; facts: `core.inspection.bundle_facts`, where known."""

    name: str
    trace: Trace
    stats: Stats
    facts: dict[str, Any] | None = None


def side_payload(side: Side) -> dict[str, Any]:
    """One trace as a JSON-ready document, its texts still with every character they have."""
    trace, palette = side.trace, Palette(side.trace.adapters)
    table, ids, place = _texts(trace)
    ranges = [(0, len(trace))] if trace.groups == 1 else _detailed(trace)
    template = ~trace.content if trace.content is not None and trace.of_template() else None
    domains = list(dict.fromkeys(name for name in trace.domains if name is not None))
    places = {name: i for i, name in enumerate(domains)}
    of_document = [places.get(name, -1) if name is not None else -1 for name in trace.domains]
    return {
        "name": side.name,
        "facts": _facts(side),
        "adapters": (side.facts or {}).get("adapters"),
        "warnings": side.stats.warnings(),
        "names": side.stats.names,
        "letters": [palette.glyph(i) for i in (*range(len(trace.adapters)), BASE)],
        "groups": [layer_range(trace, g) for g in range(trace.groups)],
        "k": trace.k,
        "kept": _kept(trace),
        "stats": side.stats.document(),
        "domains": domains,
        "starts": _array(trace.starts, "u4"),
        "domain": _array(np.array(of_document or [-1] * len(trace.starts)), "i4"),
        "texts": table,
        "ids": _array(ids, "u4"),
        "tokens": len(trace),
        "text": _array(place, "u2" if len(table) <= 1 << 16 else "u4"),
        "template": None if template is None else _array(np.packbits(template, bitorder="little"), "u1"),
        "overall": None if trace.groups == 1 else _overall(trace),
        "ranges": ranges,
        "detail": _detail(trace, ranges),
    }


def _array(values: NDArray[Any], kind: str) -> dict[str, str]:
    data = np.ascontiguousarray(values).astype(f"<{kind}").tobytes()
    return {"t": kind, "d": base64.b64encode(data).decode("ascii")}


def _column_type(trace: Trace) -> str:
    return "u1" if max(len(trace.adapters) + 1, len(trace.experts)) <= 256 else "u2"


def _kept(trace: Trace) -> int:
    """Choices kept of each token: fewer where columns take two bytes."""
    return min(trace.k, CHOICES if _column_type(trace) == "u1" else CHOICES - 1)


def _byte(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _texts(trace: Trace) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """(texts, the token id of each, place of every token among them).

    A character cut over several tokens stands with the one that completes it; the others are empty.
    """
    unique, place = np.unique(trace.token_ids, return_inverse=True)
    raw = [trace.text(int(i)) for i in unique]
    partial = np.array([any("\udc80" <= c <= "\udcff" for c in text) for text in raw], dtype=bool)
    table = [_shown(split_tail(text)[0]) for text in raw]
    ids = unique.tolist()
    known: dict[tuple[int, str], int] = {}
    loose = np.flatnonzero(partial[place]) if len(raw) else np.array([], dtype=np.int64)
    ends = np.append(trace.starts[1:], len(trace))
    done = -1
    for start in loose.tolist():
        if start <= done:
            continue
        end = int(ends[np.searchsorted(trace.starts, start, side="right") - 1])
        rest, i = "", start
        while i < end and (rest or i == start or partial[place[i]]):
            token = int(trace.token_ids[i])
            whole, rest = split_tail(rest + trace.text(token))
            if i + 1 == end and rest:
                whole, rest = whole + "\ufffd", ""
            key = (token, _shown(whole))
            if key not in known:
                known[key] = len(table)
                table.append(key[1])
                ids.append(token)
            place[i] = known[key]
            done = i
            i += 1
    return table, np.array(ids, dtype=np.int64), place.astype(np.int64)


def _shown(text: str) -> str:
    return printable(text.replace("\r\n", "\n"), keep="\n\t").replace("\n", f"{NEWLINE}\n")


def _overall(trace: Trace) -> dict[str, Any]:
    column, strength = overall(trace)
    return {"columns": _array(column, _column_type(trace)), "gates": _array(_byte(strength), "u1")}


def _detailed(trace: Trace) -> list[tuple[int, int]]:
    """Token ranges whose every group is kept: whole texts, from every domain in turn, up to `DETAIL`."""
    left = min(DETAIL, BUDGET // (trace.groups * (2 * _kept(trace) + 1)))
    seen: dict[str | None, int] = {}
    turns = []
    for number, tokens in enumerate(trace.documents()):
        name = trace.domain(number)
        seen[name] = seen.get(name, 0) + 1
        turns.append((seen[name], number, tokens))
    chosen = []
    for _, _, tokens in sorted(turns, key=lambda turn: turn[:2]):
        size = min(left, tokens.stop - tokens.start)
        if size > 0:
            chosen.append((tokens.start, tokens.start + size))
            left -= size
    return sorted(chosen)


def _detail(trace: Trace, ranges: list[tuple[int, int]]) -> dict[str, Any]:
    """Choices and gates (n, G, kept) by falling gate; margins (n, G), or with one group the best scores."""
    rows = np.concatenate([np.arange(a, b) for a, b in ranges]) if ranges else np.zeros(0, dtype=np.int64)
    kept, kind = _kept(trace), _column_type(trace)
    indices, gates = trace.indices[rows].astype(np.int64), trace.gates[rows]
    order = np.argsort(-gates, axis=2, kind="stable")[..., :kept]
    indices = np.take_along_axis(indices, order, 2)
    found: dict[str, Any] = {
        "columns": _array(np.where(indices < 0, len(trace.adapters), indices), kind),
        "gates": _array(_byte(np.take_along_axis(gates, order, 2)), "u1"),
        "margins": None,
        "scores": None,
    }
    if trace.scores is None or len(trace.experts) < 2:
        return found
    p = np.exp(trace.scores[rows])
    if trace.groups > 1:
        best = np.partition(p, -2, axis=2)[..., -2:]
        found["margins"] = _array(_byte(best[..., 1] - best[..., 0]), "u1")
    else:
        p = p[:, 0]
        top = np.argsort(-p, axis=1, kind="stable")[:, : SCORES if kind == "u1" else SCORES - 1]
        columns = np.array([_column(trace, name) for name in trace.experts])
        found["scores"] = {
            "kept": top.shape[1],
            "columns": _array(columns[top], kind),
            "p": _array(_byte(np.take_along_axis(p, top, 1)), "u1"),
        }
    return found


def _column(trace: Trace, expert: str) -> int:
    return len(trace.adapters) if expert == BASE_EXPERT else trace.adapters.index(expert)


def _facts(side: Side) -> list[list[str]]:
    """Name and value of what is known about where the routes come from."""
    meta, facts = side.trace.meta, side.facts or {}
    base = facts.get("base") or {}
    router = facts.get("router") or {}
    rows = [
        ("bundle", facts.get("path") or meta.get("bundle")),
        ("digest", facts.get("digest") or meta.get("digest")),
        ("base", base.get("id") or meta.get("base")),
        ("base revision", base.get("revision")),
        ("router", router.get("kind") or meta.get("router")),
    ]
    for stage in router.get("stages", []):
        experts = ", ".join("base" if e == BASE_EXPERT else e for e in stage["experts"])
        rows.append(
            (f"stage {stage['kind']}", f"top-{stage['k']}, temperature {stage['temperature']:g}; {experts}")
        )
    training = {k: v for k, v in (router.get("training") or {}).items() if isinstance(v, str | int | float)}
    rows.append(("training", ", ".join(f"{k} {v}" for k, v in training.items())))
    return [[name, str(value)] for name, value in rows if value]
