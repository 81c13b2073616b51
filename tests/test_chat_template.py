"""Prompts through chat templates: exact ids, missing, failing, endless and picky templates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from molora_cli.core.chat_template import (
    encode_messages,
    need_tokenizer,
    render,
    turn_end_ids,
    use_template_file,
)
from molora_cli.errors import InputError

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]
SYSTEM = {"role": "system", "content": "be brief"}
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture
def tokenizer(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


def test_three_turns_are_exactly_the_template(tokenizer: Any) -> None:
    text = (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
        "<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(tokenizer, TALK) == text
    ids = encode_messages(tokenizer, TALK)
    assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id not in ids and tokenizer.eos_token_id not in ids


def test_a_bos_of_the_template_is_not_doubled(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    ids = encode_messages(tokenizer, TALK)
    assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1


def test_a_missing_template_names_file_and_options(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(InputError) as caught:
        render(tokenizer, TALK)
    assert "chat_template.jinja" in caught.value.message and "\n" not in caught.value.message
    assert "--chat-template FILE" in caught.value.remedy and "--plain" in caught.value.remedy
    assert turn_end_ids(tokenizer) == set()


def test_a_missing_tokenizer_names_the_file() -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        need_tokenizer(None, "some/base")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "powers"),
        ("{{ 10 ** 10 ** 10 }}", "powers"),
        (LOOP, "did not end"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "failed"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "failed"),
        ("{{ ().__class__ }}", "empty"),
        ("{{ ().__class__.__base__.__subclasses__() }}", "failed"),
        ("{{ nothing.there.at.all }}", "failed"),
        ("{% if %}", "failed"),
        ("{{ 'x", "damaged"),
    ],
)
def test_a_bad_template_ends_in_one_line_soon(tokenizer: Any, template: str, reason: str) -> None:
    tokenizer.chat_template = template
    start = time.monotonic()
    with pytest.raises(InputError, match=reason) as caught:
        encode_messages(tokenizer, TALK)
    assert time.monotonic() - start < 5
    assert "\n" not in caught.value.message
    assert turn_end_ids(tokenizer) == set()


def test_bold_text_in_a_template_is_no_power(tokenizer: Any) -> None:
    tokenizer.chat_template = "**answer**\n" + tokenizer.chat_template
    assert render(tokenizer, TALK).startswith("**answer**\n")


@pytest.mark.parametrize(
    "guard",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}",
        "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}",
    ],
)
def test_system_text_goes_before_the_first_question_where_the_role_is_rejected(
    tokenizer: Any, guard: str
) -> None:
    tokenizer.chat_template = guard + tokenizer.chat_template
    told: list[str] = []
    text = render(tokenizer, [SYSTEM, *TALK], notify=told.append)
    assert "<|im_start|>user\nbe brief\n\none<|im_end|>" in text
    assert len(told) == 1
    told.clear()
    render(tokenizer, TALK, notify=told.append)
    assert told == []


def test_the_case_base_that_rejects_system_messages(cases: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cases / "bases" / "llama_template_rejects_system")
    assert "be brief" in render(tokenizer, [SYSTEM, TALK[0]], notify=lambda message: None)
    assert turn_end_ids(tokenizer) == {4}


def test_end_of_turn_is_what_follows_an_answer(tokenizer: Any) -> None:
    assert turn_end_ids(tokenizer) == {4}
    # a template that leaves the last turn open closes it when the talk goes on
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}</s>{% endif %}{% endfor %}"
    )
    assert turn_end_ids(tokenizer) == {2}
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    assert turn_end_ids(tokenizer) == set()


def test_a_template_file(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    use_template_file(tokenizer, file)
    assert render(tokenizer, TALK) == "one"
    file.write_bytes(b"\xff\xfe\x00")
    for path in (file, tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            use_template_file(tokenizer, path)


LOOP = "{% for m in messages %}{{ m['role'] + m.content | trim }}{% if loop.first %}x{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (LOOP, True),
        (
            "{% if add_generation_prompt %}a{% else %}{{ messages[0].content[:3] ~ 'b' }}{% endif %}",
            True,
        ),
        ("{% for i in range(10 ** 9) %}{% endfor %}", False),
        ("{% for m in messages %}{% for n in messages %}x{% endfor %}{% endfor %}", False),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", False),
        ("{% set messages = messages + messages %}" + LOOP, False),
        ("{% for messages in messages %}x{% endfor %}", False),
        ("{% for m in messages[0].content %}x{% endfor %}", False),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", False),
        ("{{ 'x' * 1000000000 }}", False),
        ("{{ messages | map(attribute='content') | list }}", False),
        ("{% for m in messages %}", False),
    ],
)
def test_which_templates_need_no_watch(template: str, ends: bool) -> None:
    from molora_cli.core.chat_template import _ends

    assert _ends(template) == ends
