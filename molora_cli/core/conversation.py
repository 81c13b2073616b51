"""What was said: the system text and the turns, kept within the context, saved and loaded as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molora_cli.core.bundle.writing import write_text
from molora_cli.errors import InputError
from molora_cli.text import shorten

FORMAT = "molora-chat"
FORMAT_VERSION = 1
_SIZE_LIMIT = 64 << 20
_WAY_OUT = "give a file that /save wrote"


def clean(text: str) -> str:
    """`text` without lone surrogates, which no tokenizer takes: each becomes a replacement character."""
    return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)


@dataclass
class Conversation:
    """Turns in order, each {"role": "user" | "assistant", "content": text}; system: text or None."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def add(self, role: str, content: str) -> None:
        self.turns.append({"role": role, "content": clean(content)})

    def messages(self) -> list[Mapping[str, str]]:
        """Everything as the chat template takes it."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns]

    def take_back_answer(self) -> bool:
        """Drop the last answer, so that its question stands open again. False where there is none."""
        if self.turns and self.turns[-1]["role"] == "assistant":
            self.turns.pop()
        return bool(self.turns)

    def _drop_oldest(self) -> bool:
        """Drop the oldest question with its answer; False where only the open question is left."""
        later = next((i for i, turn in enumerate(self.turns) if i and turn["role"] == "user"), None)
        if later is None:
            return False
        del self.turns[:later]
        return True

    def fit(
        self, encode: Callable[[list[Mapping[str, str]]], list[int]], context: int | None, reserve: int
    ) -> tuple[list[int], int]:
        """Prompt ids that leave room for an answer, and how many old questions were dropped for it.

        encode: messages -> ids. context: tokens the base holds, None = no limit. reserve: tokens to keep free
        while there is something old to drop, at most a quarter of the context. The system text stays. A
        question that is too long by itself is returned alone and nothing is dropped; the generator says so
        with both numbers.
        """
        dropped = 0
        ids = encode(self.messages())
        if context is not None:
            goal = context - min(reserve, context // 4)
            if len(ids) >= context and len(self.turns) > 1:
                # looked at first: a huge question would be encoded once more for every old turn
                alone = encode(Conversation(self.system, self.turns[-1:]).messages())
                if len(alone) >= context:
                    return alone, 0
            while len(ids) > goal and self._drop_oldest():
                dropped += 1
                ids = encode(self.messages())
        return ids, dropped

    def save(self, path: Path, about: Mapping[str, Any], *, force: bool = False) -> None:
        """Write as JSON, whole or not at all. about: bundle, settings and routing, see `Saved`.

        Raises InputError where the file exists and `force` is not given.
        """
        if path.exists() and not force:
            raise InputError(f"{path} exists", "choose another name")
        body = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            **about,
            "system": self.system,
            "turns": self.turns,
        }
        write_text(path, json.dumps(body, ensure_ascii=False, indent=1) + "\n")


@dataclass(frozen=True)
class Saved:
    """A saved conversation with the settings and the routing it was held under; names -> values as JSON has
    them, unchecked, and empty where the file is older than they are."""

    conversation: Conversation
    settings: dict[str, Any]
    routing: dict[str, Any]


def load(path: Path) -> Saved:
    """Read and check what `Conversation.save` wrote. Raises InputError: missing, damaged, another format."""
    body = _read(path)
    system, turns = body.get("system"), body.get("turns")
    if not (system is None or isinstance(system, str)) or not isinstance(turns, list):
        raise InputError(f"{path}: 'system' must be a text and 'turns' a list", _WAY_OUT)
    conversation = Conversation(clean(system) if system else None)
    for number, turn in enumerate(turns, start=1):
        if (
            not isinstance(turn, dict)
            or turn.get("role") not in ("user", "assistant")
            or not isinstance(turn.get("content"), str)
        ):
            raise InputError(f"{path}: turn {number} needs a role (user, assistant) and a content", _WAY_OUT)
        conversation.add(turn["role"], turn["content"])
    settings, routing = body.get("settings", {}), body.get("routing", {})
    if not isinstance(settings, dict) or not isinstance(routing, dict):
        raise InputError(f"{path}: 'settings' and 'routing' must be tables", _WAY_OUT)
    return Saved(conversation, settings, routing)


def _read(path: Path) -> dict[str, Any]:
    """The JSON of a conversation's file, of a version that is read here."""
    try:
        if path.stat().st_size > _SIZE_LIMIT:
            raise InputError(f"{path} is too large for a conversation", _WAY_OUT)
        body = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", _WAY_OUT) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {shorten(str(error))}", _WAY_OUT) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise InputError(f"{path} is not a saved conversation", _WAY_OUT)
    if body.get("format_version") != FORMAT_VERSION:
        version = shorten(str(body.get("format_version")), 20)
        raise InputError(
            f"{path} has conversation format {version}, this molora reads {FORMAT_VERSION}",
            "install the molora that wrote it",
        )
    return body
