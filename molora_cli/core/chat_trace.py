"""The routes of a conversation as the model holds them: what `/trace` saves and `/report` draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from molora_cli.core.pieces import token_pieces
from molora_cli.core.trace import Trace
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from molora_cli.core.routed.state import RouterState

Messages = Sequence[Mapping[str, str]]


def held_trace(model: Any, past: Any, messages: Messages | None) -> Trace:
    """One document: the tokens whose keys and values `past` holds, each with the route it was read under.

    messages: the conversation that ends with the last answer, None = a text without template. The last token
    of an answer that was cut has not been read by the model yet, so it has no route and is missing. Raises
    InputError where nothing is held.
    """
    from molora_cli.core.routed.state import state_of

    state: RouterState | None = None if past is None else state_of(past)
    if state is None or state.length == 0:
        raise InputError("there are no routes: the last answer was broken off", "/regen answers it again")
    history = state.history
    ids = history.ids[0].cpu().numpy().astype(np.int64)
    router = model.router
    scores = None
    if history.scores is not None and router is not None and history.scores.shape[1] == len(ids):
        scores = history.scores[0].cpu().numpy()
    meta = dict(model.engine.meta)
    if scores is not None and router is not None:
        meta |= {"router": router.spec.kind, "groups": [list(layers) for layers in router.group_ranges]}
    pieces = _pieces(model.tokenizer, ids.tolist())
    trace = Trace(
        token_ids=ids,
        starts=np.zeros(1, dtype=np.int64),
        indices=history.indices[0].cpu().numpy().astype(np.int16),
        gates=history.gates[0].float().cpu().numpy(),
        adapters=tuple(model.adapters),
        scores=scores,
        experts=() if scores is None or router is None else tuple(router.experts),
        domains=(None,),
        pieces=pieces,
        meta=meta,
        content=None if messages is None else _content(model.tokenizer, messages, ids.tolist(), pieces),
    )
    trace.check("the trace of this chat")
    return trace


def _pieces(tokenizer: Any, ids: Sequence[int]) -> dict[int, str]:
    distinct = sorted(set(ids))
    if getattr(tokenizer, "is_fast", False):
        return token_pieces(tokenizer.backend_tokenizer, distinct)
    return {i: str(tokenizer.decode([i])) for i in distinct}


def _content(
    tokenizer: Any, messages: Messages, ids: Sequence[int], pieces: Mapping[int, str]
) -> NDArray[np.bool_] | None:
    """(N,) which tokens are of a message; None where the template does not let that be found out."""
    from molora_cli.core.chat_template import limited, merge_system, render
    from molora_cli.core.training.data import Message
    from molora_cli.core.training.encode import TEMPLATE, message_index

    parts = [pieces.get(i, "").encode("utf-8", "surrogateescape") for i in ids]
    data = b"".join(parts)
    merged: list[str] = []
    try:
        rendered = render(tokenizer, messages, add_generation_prompt=False, notify=merged.append)
        if not rendered.startswith(data.decode("utf-8", "replace").rstrip("\ufffd")):
            return None
        # bytes to characters: a character is counted where it begins
        begins = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
        characters = np.concatenate([[0], np.cumsum(begins)])
        ends = np.cumsum([len(part) for part in parts])
        starts = np.concatenate([[0], ends[:-1]])
        offsets = np.stack([characters[starts], characters[ends]], axis=1).astype(np.int64)
        turns = [Message(m["role"], m["content"]) for m in (merge_system(messages) if merged else messages)]
        found = limited(tokenizer, lambda: message_index(tokenizer, rendered, turns, offsets))
    except InputError:
        return None
    return found != TEMPLATE
