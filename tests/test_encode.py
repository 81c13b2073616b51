"""Tokens, messages, completion and character ranges: on templates of many kinds, against decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molora_cli.core.training.data import Example, Message, Segment
from molora_cli.core.training.encode import TEMPLATE, encode, encode_all, message_index, segment_labels
from molora_cli.errors import InputError

TEMPLATES = {
    "default_system": (
        "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind"
        "<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    ),
    "trims": (
        "{{ '<s>' }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    ),
    "no_special": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    "user_ends_turn": (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}</s>"
        "{% else %}<s>[INST] {{ m['content'] }} [/INST]{% endif %}{% endfor %}"
    ),
    "upper": "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | upper }}<|im_end|>{% endfor %}",
    "last_only": (
        "{% for m in messages %}<|im_start|>{% if m['role'] == 'assistant' and not loop.last %}"
        "{{ m['content'].split('</think>')[-1] }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
        "{% endfor %}"
    ),
}
CONTENTS = [
    ("hello", "world"),
    ("user", "assistant"),
    ("  padded \n", "\n```python\nx = 1\n```\n"),
    ("Tëst 👩‍💻 你好", "naïve <|im_end|> text"),
    ("same", "same", "same", "same"),
    ("q", "<think>a</think>b", "r", "<think>c</think>d"),
]


def chat(*contents: str, line: int = 1) -> Example:
    roles = ("user", "assistant")
    return Example(tuple(Message(roles[i % 2], c) for i, c in enumerate(contents)), None, None, line)


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(params=[*TEMPLATES])
def templated(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    before = tokenizer.chat_template
    tokenizer.chat_template = TEMPLATES[request.param]
    yield tokenizer
    tokenizer.chat_template = before


@pytest.mark.parametrize("contents", CONTENTS)
def test_every_template_gives_back_the_messages(templated: Any, contents: tuple[str, ...]) -> None:
    example = chat(*contents)
    encoded = encode(templated, example, 4096)
    plain = [{"role": m.role, "content": m.content} for m in example.messages]
    whole = templated.apply_chat_template(plain, tokenize=False)
    assert encoded.ids == templated(whole, add_special_tokens=False)["input_ids"]
    for index, content in enumerate(contents):
        ids = [i for i, m in zip(encoded.ids, encoded.message, strict=True) if m == index]
        text = templated.decode(ids)
        if templated.chat_template == TEMPLATES["upper"]:
            content = content.upper()
        elif templated.chat_template == TEMPLATES["trims"]:
            content = content.strip()
        elif templated.chat_template == TEMPLATES["last_only"] and index == 1 and len(contents) > 2:
            content = content.split("</think>")[-1]
        assert text == content
    length = len(encoded.ids)
    assert len(encoded.message) == len(encoded.completion) == len(encoded.start) == len(encoded.end) == length


def test_ranges_are_characters_of_the_message(tokenizer: Any) -> None:
    example = chat("Tëst 你 x", "ok")
    encoded = encode(tokenizer, example, 512)
    for index, message in enumerate(example.messages):
        rows = [i for i, m in enumerate(encoded.message) if m == index]
        covered = set()
        for i in rows:
            assert 0 <= encoded.start[i] < encoded.end[i] <= len(message.content)
            covered |= set(range(encoded.start[i], encoded.end[i]))
        assert covered == set(range(len(message.content)))
    template = [i for i, m in enumerate(encoded.message) if m == TEMPLATE]
    assert template and all((encoded.start[i], encoded.end[i]) == (-1, -1) for i in template)


def test_ranges_of_a_trimming_template_keep_the_offset(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["trims"])
    encoded = encode(tokenizer, chat("   abc ", "x"), 512)
    assert [s for s, m in zip(encoded.start, encoded.message, strict=True) if m == 0] == [3, 4, 5]


def test_messages_of_a_template_that_leaves_one_out(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{% if not loop.first %}[{{ m['content'] }}]{% endif %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert encode(tokenizer, chat("ab", "cd", "e"), 512).message == [-1, 1, 1, -1, -1, 2, -1]


def test_message_index_says_what_encode_says(templated: Any) -> None:
    for contents in CONTENTS:
        example = chat(*contents)
        rendered = templated.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in example.messages], tokenize=False
        )
        tokens = templated(rendered, add_special_tokens=False, return_offsets_mapping=True)
        found = message_index(templated, rendered, example.messages, np.array(tokens["offset_mapping"]))
        assert found.tolist() == encode(templated, example, 512).message


def test_completion_is_the_assistant_and_its_end_of_turn(tokenizer: Any) -> None:
    encoded = encode(tokenizer, chat("one", "two", "three", "four"), 512)
    said = [i for i, c in zip(encoded.ids, encoded.completion, strict=True) if c]
    assert tokenizer.decode(said) == "two<|im_end|>four<|im_end|>"
    ends = [i for i, c in enumerate(encoded.completion) if c and encoded.message[i] == TEMPLATE]
    assert len(ends) == 2


def test_completion_without_special_tokens_is_the_content_alone(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATES["no_special"])
    encoded = encode(tokenizer, chat("one", "two"), 512)
    assert tokenizer.decode([i for i, c in zip(encoded.ids, encoded.completion, strict=True) if c]) == "two"


def test_plain_text_is_all_completion(tokenizer: Any) -> None:
    encoded = encode(tokenizer, Example((), "plain text", None, 1), 512)
    assert tokenizer.decode(encoded.ids) == "plain text"
    assert all(encoded.completion) and set(encoded.message) == {0}
    assert encoded.start == list(range(10)) and encoded.end == list(range(1, 11))


def test_rows_of_both_kinds_keep_their_order(tokenizer: Any) -> None:
    rows = [chat(f"q{i}", f"a{i}") if i % 3 else Example((), f"text {i}", None, i) for i in range(600)]
    encoded = encode_all(tokenizer, rows, 512)
    assert encoded == [encode(tokenizer, row, 512) for row in rows]


def test_long_rows_are_cut_and_say_so(tokenizer: Any) -> None:
    encoded = encode(tokenizer, Example((), "x" * 3000, None, 1), 100)
    assert len(encoded.ids) == 100 and encoded.full_length == 3000 and encoded.cut
    assert not encode(tokenizer, chat("a", "b"), 512).cut


def test_segments_label_tokens(tokenizer: Any) -> None:
    example = chat("1. add 2. sort", "four sorted")
    encoded = encode(tokenizer, example, 512)
    labels = segment_labels(
        encoded, [Segment(0, 3, 6, "math"), Segment(0, 10, 14, "code"), Segment(1, 0, 4, "math")]
    )
    by_label = {
        name: tokenizer.decode([i for i, found in zip(encoded.ids, labels, strict=True) if found == name])
        for name in ("math", "code")
    }
    assert by_label == {"math": "addfour", "code": "sort"}


def test_a_tokenizer_without_template_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="no chat template"):
        encode(tokenizer, chat("a", "b"), 512)
    assert encode(tokenizer, Example((), "text needs none", None, 1), 512).ids


def test_a_template_that_refuses_the_roles_names_the_line(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"line 7: the chat template refuses .*roles must alternate"):
        encode(tokenizer, chat("a", "b", line=7), 512)


def test_mixed_rows_of_real_data(data: Path, tokenizer: Any) -> None:
    """Each segment's tokens decode to the text that its character range names."""
    path = data / "mixed" / "one_turn.val.jsonl"
    from molora_cli.core.training.data import read_examples

    for example in read_examples(path)[:10]:
        encoded = encode(tokenizer, example, 8192)
        labels = segment_labels(encoded, example.segments)
        for segment in example.segments:
            ids = [
                token
                for token, message, start, label in zip(
                    encoded.ids, encoded.message, encoded.start, labels, strict=True
                )
                if message == segment.message
                and segment.start <= start < segment.end
                and label == segment.label
            ]
            assert (
                tokenizer.decode(ids)
                == example.messages[segment.message].content[segment.start : segment.end]
            )
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["segments"]
