"""From messages to the token ids of a prompt, through the base's own chat template.

A template is a program that came with the base. It runs in the sandbox of transformers, under a time limit,
and whatever it does wrong becomes one line for the user. Token ids are exactly those of the rendered text:
templates write their own special tokens, so none is added again.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from molora_cli.errors import InputError
from molora_cli.text import shorten

TIME_LIMIT = 2.0
_MARKER = "MoLoRAanswerMARK"
_WAY_OUT = "--chat-template FILE supplies another one, --plain continues text without one"

Message = Mapping[str, str]
Notify = Callable[[str], None]
Result = TypeVar("Result")


class _TooSlow(Exception):
    pass


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """`work()`, stopped by an exception after `seconds`; only lines of jinja templates are watched.

    A trace function of this thread needs neither signals (main thread only) nor a second process.
    """
    deadline = time.monotonic() + seconds

    def watch(frame: FrameType, event: str, arg: Any) -> Any:
        if time.monotonic() > deadline:
            raise _TooSlow
        return watch if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        return work()
    finally:
        sys.settrace(before)


def limited(tokenizer: Any, work: Callable[[], Result]) -> Result:
    """`work()`, which renders the tokenizer's template, `within` the limit. A template that can be seen to
    end is not watched: that would take as long as the work."""
    template = tokenizer.chat_template
    return work() if isinstance(template, str) and _ends(template) else within(TIME_LIMIT, work)


@functools.lru_cache(maxsize=16)
def _ends(template: str) -> bool:
    """Whether a template only reads its input, in loops that go once over the messages: it sets and calls
    nothing, so its text is as long as the messages at most times what is written in it."""
    import jinja2
    from jinja2 import nodes

    plain = (
        *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.If, nodes.Name, nodes.Const),
        *(nodes.Getitem, nodes.Getattr, nodes.Slice, nodes.Compare, nodes.Operand, nodes.And, nodes.Or),
        *(nodes.Not, nodes.Neg, nodes.Add, nodes.Concat, nodes.Filter),
    )
    try:
        tree = jinja2.Environment().parse(template)
    except jinja2.TemplateError:
        return False
    for node in [tree, *tree.find_all(nodes.Node)]:
        if type(node) not in plain or (isinstance(node, nodes.Filter) and node.name != "trim"):
            return False
        if isinstance(node, nodes.For):
            over = node.iter
            if not isinstance(over, nodes.Name) or over.name != "messages" or node.recursive:
                return False
            if any(True for _ in node.find_all(nodes.For)) or node.test is not None:
                return False
            if not isinstance(node.target, nodes.Name) or node.target.name == "messages":
                return False
    return True


@functools.lru_cache(maxsize=16)
def _refuse_powers(template: str, where: str) -> None:
    """Refuse `**`: a power of integers is computed in one step that no time limit can stop."""
    import jinja2

    try:
        uses = any(
            kind == "operator" and value == "**" for _, kind, value in jinja2.Environment().lex(template)
        )
    except jinja2.TemplateError as error:
        raise InputError(
            f"the chat template of {where} is damaged: {shorten(str(error), 160)}", _WAY_OUT
        ) from None
    if uses:
        raise InputError(f"the chat template of {where} computes powers (**), which is not allowed", _WAY_OUT)


def _place(tokenizer: Any) -> str:
    return shorten(str(getattr(tokenizer, "name_or_path", "") or "the base"), 120)


def need_tokenizer(tokenizer: Any, where: str = "the base") -> Any:
    """`tokenizer`, or InputError where the base came without one."""
    if tokenizer is None:
        raise InputError(
            f"{shorten(where, 120)} has no tokenizer (tokenizer.json is missing)",
            "put the tokenizer's files beside the weights, or give a base that has them with --base",
        )
    return tokenizer


def use_template_file(tokenizer: Any, path: Path) -> None:
    """Take the chat template from a file. Raises InputError where it cannot be read as text."""
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(
            f"cannot read the chat template {path}: {reason}", "give a Jinja text file"
        ) from None


def _render_once(tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    plain = [dict(message) for message in messages]
    return limited(
        tokenizer,
        lambda: str(
            tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
        ),
    )


def merge_system(messages: Sequence[Message]) -> list[Message]:
    """The same talk with the system text at the head of the first user message."""
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    notify: Notify | None = None,
) -> str:
    """The text of `messages` (role, content) under the tokenizer's chat template.

    A template that rejects the system role, or drops its text, gets it in front of the first user message,
    and `notify` is told. Raises InputError: no template, a template that fails, that the sandbox stops, or
    that does not end within TIME_LIMIT seconds.
    """
    where = _place(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"{where} has no chat template (no chat_template.jinja beside the tokenizer)", _WAY_OUT
        )
    if isinstance(tokenizer.chat_template, str):
        _refuse_powers(tokenizer.chat_template, where)
    mergeable = len(messages) > 1 and messages[0]["role"] == "system" and messages[1]["role"] == "user"
    try:
        text = _render_once(tokenizer, messages, add_generation_prompt)
        if not mergeable or messages[0]["content"].strip() in text:
            return text
    except _TooSlow:
        raise InputError(
            f"the chat template of {where} did not end within {TIME_LIMIT:g} s", _WAY_OUT
        ) from None
    except Exception as error:  # a foreign program: whatever it raises is its fault, not ours
        reason = shorten(str(error) or type(error).__name__, 160)
        failure = InputError(f"the chat template of {where} failed: {reason}", _WAY_OUT)
        if not mergeable:
            raise failure from None
        try:
            text = _render_once(tokenizer, merge_system(messages), add_generation_prompt)
        except Exception:
            raise failure from None
    else:
        text = _render_once(tokenizer, merge_system(messages), add_generation_prompt)
    if notify:
        notify(
            "this chat template takes no system message; its text stands before the first question instead"
        )
    return text


def encode_messages(tokenizer: Any, messages: Sequence[Message], notify: Notify | None = None) -> list[int]:
    """Prompt ids of `messages`, ending where the answer begins. Raises InputError as `render` does."""
    text = render(tokenizer, messages, notify=notify)
    if not text.strip():  # also what the sandbox makes of an attribute that it hides
        raise InputError(f"the chat template of {_place(tokenizer)} gives an empty text", _WAY_OUT)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text taken as it is: special tokens written in it count, a leading bos is there once at most.

    A tokenizer that closes every text with eos does not close this one: it is to be continued.
    """
    ids = list(tokenizer(text)["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
        ids = ids[1:]
    if ids and ids[-1] == eos and not text.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]
    return ids


def turn_end_ids(tokenizer: Any) -> set[int]:
    """Ids that end an assistant's turn: what special token the template writes after an answer.

    Many bases end turns with a token that neither config.json nor generation_config.json calls eos. Found by
    rendering a marked answer, last in the talk and followed by a question. Empty without a usable template.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        return set()
    talk: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARKER}]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    for messages in (talk, [*talk, {"role": "user", "content": "y"}]):
        try:
            text = render(tokenizer, messages, add_generation_prompt=False)
        except InputError:
            return set()
        tail = text.rpartition(_MARKER)[2].lstrip()
        ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
        if ids and ids[0] in special:
            return {int(ids[0])}
    return set()
