"""Reading rows: what is taken, what is refused, and that every refusal names file, line and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from molora_cli.core.training.data import (
    Segment,
    conflicts,
    iter_examples,
    read_domains,
    read_examples,
)
from molora_cli.errors import InputError


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8"
    )
    return path


def chat(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def test_reads_chats_texts_labels_and_segments(tmp_path: Path) -> None:
    row = {**chat("two and two", "four"), "segments": [{"message": 1, "start": 0, "end": 4, "label": "math"}]}
    path = write(
        tmp_path / "rows.jsonl", row, "", {"text": "plain", "label": "code", "other": 1, "document": "d"}
    )
    first, second = read_examples(path)
    assert [(m.role, m.content) for m in first.messages] == [("user", "two and two"), ("assistant", "four")]
    assert first.text is None and first.line == 1 and first.label is None
    assert first.segments == (Segment(1, 0, 4, "math"),)
    assert second.text == "plain" and second.label == "code" and second.line == 3
    assert second.messages == () and second.contents == ("plain",) and second.document == "d"


def test_reads_utf8_with_mark_windows_line_ends_and_rare_separators(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + '{"text": "a\u2028b"}\r\n{"text": "👩‍💻"}'.encode())
    assert [e.text for e in read_examples(path)] == ["a\u2028b", "👩‍💻"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a", "label": "b"', "not JSON"),
        ("3", "a number where an object is needed"),
        ("null", "null where an object is needed"),
        ('{"prompt": "a", "completion": "b"}', "neither 'messages' nor 'text' (fields: prompt, completion)"),
        ('{"text": ["a"]}', "'text' is a list"),
        ('{"text": null}', "'text' is null"),
        ('{"text": "  "}', "empty"),
        ('{"text": "a", "label": 3}', "'label' is a number"),
        ('{"text": "a", "label": true}', "'label' is true or false"),
        ('{"text": "a", "label": ""}', "'label' is an empty string"),
        ('{"text": "a", "messages": [{"role": "user", "content": "b"}]}', "both"),
        ('{"text": "bad \\ud83d escape"}', "\\ud83d"),
        ('{"text": "a", "label": "\\udc00"}', "'label' holds half of a surrogate pair"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": {"role": "user"}}', "must be a list"),
        ('{"messages": ["hi"]}', "message 1: a string"),
        ('{"messages": [{"role": "user"}]}', "message 1: no 'content'"),
        ('{"messages": [{"role": "user", "content": null}]}', "'content' is null"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "'content' is a list"),
        ('{"messages": [{"role": "", "content": "a"}]}', "'role' is empty"),
        (
            '{"text": "abc", "segments": [{"message": 0, "start": 1, "end": 9, "label": "x"}]}',
            "outside the text",
        ),
        (
            '{"text": "abc", "segments": [{"message": 1, "start": 0, "end": 1, "label": "x"}]}',
            "outside the text",
        ),
        ('{"text": "abc", "segments": [{"start": 0, "end": 1, "label": "x"}]}', "lacks"),
        (
            '{"text": "abc", "segments": [{"message": 0, "start": true, "end": 1, "label": "x"}]}',
            "wrong type",
        ),
        ('{"text": "abc", "segments": {}}', "not a list"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_refuses_a_bad_row_by_line(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "rows.jsonl", {"text": "fine"}, line, {"text": "fine"})
    with pytest.raises(InputError) as caught:
        read_examples(path)
    assert said in caught.value.message
    assert f"{path}, line 2" in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no examples"),
        (b"\n  \n", "no examples"),
        ('{"text": "a"}\n'.encode("utf-16"), "is UTF-16"),
        ('{"text": "a"}\n'.encode("utf-16-le"), "is UTF-16"),
        (b'[\n {"text": "a"}\n]\n', "one JSON array"),
        (b'[{"text": "a"}]', "one JSON array"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"PAR1\x15\x04", "Parquet"),
        (b'{"text": "\xff"}\n', "line 1: not UTF-8"),
    ],
)
def test_refuses_a_file_of_another_kind(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_examples(path)
    assert said in caught.value.message and str(path) in caught.value.message and caught.value.remedy


def test_refuses_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            read_examples(path)


def test_reads_one_row_at_a_time(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"text": "first"}, "broken")
    rows = iter_examples(path)
    assert next(rows).text == "first"
    with pytest.raises(InputError, match="line 2"):
        next(rows)


def test_limits_the_length_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molora_cli.core.training.data.MAX_LINE_BYTES", 2**20)
    path = write(tmp_path / "rows.jsonl", {"text": "a" * 2**21})
    with pytest.raises(InputError, match="line 1: longer than 1 MiB"):
        read_examples(path)


def test_domains_from_named_files_and_from_labels(tmp_path: Path) -> None:
    named = write(tmp_path / "a.jsonl", {"text": "x", "label": "ignored"})
    labelled = write(tmp_path / "b.jsonl", {"text": "y", "label": "math"}, {"text": "z", "label": "code"})
    domains = read_domains([f"math={named}", str(labelled)], ["math", "code"])
    assert {k: [r.text for r in v] for k, v in domains.items()} == {"math": ["x", "y"], "code": ["z"]}


def test_domains_refuse_what_is_no_adapter(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "x", "label": "math"}, {"text": "y", "label": "chem"})
    with pytest.raises(InputError, match=r"line 2: 'chem' is no adapter here; there are: math, code"):
        read_domains([str(path)], ["math", "code"])
    with pytest.raises(InputError, match="'law' is no adapter"):
        read_domains([f"law={path}"], ["math", "code"])


@pytest.mark.parametrize("label", [{}, {"label": None}])
def test_domains_need_a_label_or_a_name(tmp_path: Path, label: dict[str, object]) -> None:
    path = write(tmp_path / "a.jsonl", {"text": "x", "label": "math"}, {"text": "y", **label})
    with pytest.raises(InputError, match="line 2: the row has no label"):
        read_domains([str(path)])


def test_conflicting_duplicates_name_both_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", *({"text": t, "label": n} for t, n in (("x", "a"), ("x", "a"), ("x", "b")))
    )
    assert conflicts(read_domains([str(path)])) == ["'x' is a (line 1) and b (line 3)"]


def test_known_files(cases: Path) -> None:
    folder = cases / "datasets"
    good = {
        "ok_three_domains",
        "one_example_per_domain",
        "multilingual_emoji",
        "very_long_text",
        "label_null",
    }
    seen = set()
    for path in sorted(folder.iterdir()):
        if path.stem in good:
            assert read_examples(path)
        else:
            with pytest.raises(InputError) as caught:
                read_examples(path)
            assert path.name in caught.value.message and caught.value.remedy
        seen.add(path.stem)
    assert good <= seen
