"""The HTML page of a trace, without a browser: structure, what it holds, and that nothing in it is markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molora_cli.core.agreement import agreement, overall
from molora_cli.core.counting import summarise
from molora_cli.core.trace import Trace
from molora_cli.errors import InputError
from molora_cli.text import is_unsafe
from molora_cli.views.palette import HUES, LEVELS
from molora_cli.views.report import Side, check_report, page, write_report
from molora_cli.views.report.payload import DETAIL

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "a\u202eb\u2066c",
    "a\x00b\x1b[2J",
    "<!--",
    "\u2028",
    "{{script}}",
    "&lt;",
    "\udcff",
]


def _trace(n: int = 60, groups: int = 1, adapters: tuple[str, ...] = ("math", "code"), k: int = 1) -> Trace:
    rng = np.random.default_rng(0)
    experts = (*adapters, "__base__")
    return Trace(
        token_ids=np.arange(n) % 7,
        starts=np.array([0, n // 3, n // 2]) if n else np.zeros(0, np.int64),
        indices=rng.integers(-1, len(adapters), (n, groups, k)).astype(np.int16),
        gates=rng.dirichlet(np.ones(k), (n, groups)).astype(np.float32),
        adapters=adapters,
        scores=np.log(rng.dirichlet(np.ones(len(experts)), (n, groups))).astype(np.float32),
        experts=experts,
        domains=("x", "y", "x") if n else (),
        pieces={0: "In", 1: " the", 2: "\n", 3: " \udce6", 4: "\udc97\udca5", 5: "!", 6: "\t"},
        meta={"bundle": "b", "base": "org/base", "groups": [[g, g + 1] for g in range(groups)]},
    )


def _side(trace: Trace, name: str = "demo", facts: dict[str, Any] | None = None) -> Side:
    return Side(name, trace, summarise(trace), facts)


class _Elements(HTMLParser):
    """Every element with its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def _parse(text: str) -> _Elements:
    parser = _Elements()
    parser.feed(text)
    parser.close()
    return parser


def _data(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    found: dict[str, Any] = json.loads(match[1])
    return found


def _array(found: dict[str, str]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(found["d"]), f"<{found['t']}")


def test_only_the_two_hashed_elements_may_act() -> None:
    text = page(_side(_trace()))
    elements = _parse(text)
    assert [tag for tag, _ in elements.found] == [
        *("html", "head", "meta", "meta", "meta", "meta", "meta", "link", "title", "style", "body"),
        *("header", "main", "noscript", "p", "footer", "script", "script"),
    ]
    policy = next(a["content"] for t, a in elements.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    for kind in ("script", "style"):
        body = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)[0]
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert "unsafe" not in policy and "http" not in policy
    # nothing loads anything: no address but the empty icon, no handler
    attributes = [(name, value) for _, a in elements.found for name, value in a.items()]
    assert [v for n, v in attributes if n in ("src", "href")] == ["data:,"]
    assert not [n for n, _ in attributes if n.startswith("on")]
    assert "url(" not in text and "@import" not in text and "innerHTML" not in text and "eval(" not in text


def test_texts_names_and_paths_are_data() -> None:
    names = ("</script><b>", "<img src=x onerror=alert(1)>")
    trace = _trace(adapters=names)
    trace.pieces = dict(enumerate([*HOSTILE[:6], HOSTILE[8]]))
    trace.domains = (HOSTILE[0], HOSTILE[2], HOSTILE[3])
    trace.meta["bundle"] = "</script>" + HOSTILE[1]
    trace.meta["groups"] = []
    facts = {"path": HOSTILE[6], "base": {"id": HOSTILE[4]}, "adapters": [{"name": HOSTILE[1], "k\u202e": 1}]}
    text = page(_side(trace, name=HOSTILE[0], facts=facts), _side(trace, name="<style>"))
    assert [t for t, _ in _parse(text).found].count("script") == 2
    assert [t for t, _ in _parse(text).found].count("img") == 0
    for char in set(text) - {"\n"}:
        assert char == "⏎" or not is_unsafe(char), repr(char)
    body = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert body and not re.search("[<>&]", body[1])
    side = _data(text)["sides"][0]
    # what was given is what is shown, with its control characters visible
    assert side["names"][:2] == list(names) and side["name"] == HOSTILE[0]
    assert side["domains"] == [HOSTILE[0], "a\\u202eb\\u2066c", "a\\x00b\\x1b[2J"]
    assert {*HOSTILE[:2], "a\\u202eb\\u2066c", "\\u2028"} <= set(side["texts"])
    assert side["facts"][0] == ["bundle", "{{script}}"]


def test_tokens_stand_as_they_were_given() -> None:
    trace = _trace(k=2)
    side = _data(page(_side(trace)))["sides"][0]
    words = [side["texts"][i] for i in _array(side["text"])]
    assert words[:7] == ["In", " the", "⏎\n", " ", "日", "!", "\t"]
    # a text that ends within a character says so, and the next starts anew
    assert words[17:21] == [" ", "日", "!", "In"] or words[17] == " "
    assert [int(_array(side["ids"])[i]) for i in _array(side["text"])] == trace.token_ids.tolist()
    assert _array(side["starts"]).tolist() == [0, 20, 30] and side["domains"] == ["x", "y"]
    assert _array(side["domain"]).tolist() == [0, 1, 0]
    first, gate = trace.first(0)
    columns = _array(side["detail"]["columns"]).reshape(60, 2)
    gates = _array(side["detail"]["gates"]).reshape(60, 2)
    assert (gates[:, 0] >= gates[:, 1]).all() and np.array_equal(gates[:, 0], np.rint(gate * 255))
    assert np.array_equal(columns[:, 0], np.where(first < 0, 2, first))
    p = np.sort(np.exp(trace.scores[:, 0]), axis=1)[:, ::-1] if trace.scores is not None else None
    assert p is not None
    assert side["detail"]["margins"] is None and side["overall"] is None
    assert np.allclose(_array(side["detail"]["scores"]["p"]).reshape(60, 3) / 255, p, atol=0.003)


def test_a_template_is_one_bit_a_token() -> None:
    trace = _trace()
    trace.content = np.arange(60) % 5 != 0
    side = _data(page(_side(trace)))["sides"][0]
    assert np.array_equal(np.unpackbits(_array(side["template"]), bitorder="little")[:60], ~trace.content)
    assert (
        side["stats"]["template_tokens"] == 12
        and _data(page(_side(_trace())))["sides"][0]["template"] is None
    )


def test_a_character_cut_at_the_end_of_a_text_is_marked() -> None:
    trace = _trace(n=9)
    trace.token_ids, trace.starts = np.array([0, 3, 4, 3, 4, 4, 0, 3, 0]), np.array([0, 4, 8])
    side = _data(page(_side(trace)))["sides"][0]
    words = [side["texts"][i] for i in _array(side["text"])]
    assert words == ["In", " ", "日", " \ufffd", "\ufffd\ufffd", "\ufffd\ufffd", "In", " \ufffd", "In"]


def test_of_many_layers_some_tokens_keep_all_and_the_page_says_how_many() -> None:
    n = 3 * DETAIL
    trace = _trace(n=n, groups=3)
    trace.starts = np.arange(0, n, 1000)
    trace.domains = tuple("xxy"[i % 3] for i in range(len(trace.starts)))
    side = _data(page(_side(trace)))["sides"][0]
    kept = sum(end - start for start, end in side["ranges"])
    assert kept == DETAIL
    picked = {
        trace.domains[int(np.searchsorted(trace.starts, a, side="right")) - 1] for a, _ in side["ranges"]
    }
    assert picked == {"x", "y"}
    rows = np.concatenate([np.arange(a, b) for a, b in side["ranges"]])
    indices = trace.indices[rows, :, 0]
    p = np.sort(np.exp(trace.scores[rows]), axis=2) if trace.scores is not None else np.zeros((1, 1, 2))
    margins = _array(side["detail"]["margins"]).reshape(kept, 3) / 255
    assert np.allclose(margins, p[..., -1] - p[..., -2], atol=0.003)
    assert np.array_equal(
        _array(side["detail"]["columns"]).reshape(kept, 3), np.where(indices < 0, 2, indices)
    )
    assert len(_array(side["overall"]["columns"])) == n and side["groups"] == ["0", "1", "2"]
    # very many layers keep fewer tokens, so that the page stays small
    wide = _data(page(_side(_trace(n=DETAIL, groups=200))))["sides"][0]
    assert 1000 < sum(b - a for a, b in wide["ranges"]) < DETAIL


def test_the_largest_sum_of_gates_over_the_layers() -> None:
    trace = _trace(n=2, groups=3, k=1)
    trace.starts, trace.domains = np.array([0]), ()
    trace.indices = np.array([[[0], [1], [1]], [[-1], [-1], [0]]], np.int16)
    trace.gates = np.array([[[1.0], [0.25], [0.5]], [[1.0], [0.5], [1.0]]], np.float32)
    column, strength = overall(trace)
    assert column.tolist() == [0, 2] and strength.tolist() == pytest.approx([1 / 3, 0.5])


def test_agreement_is_by_name() -> None:
    a, b = _trace(), _trace(adapters=("code", "math"))
    b.indices = np.where(a.indices < 0, -1, 1 - a.indices).astype(np.int16)
    found = agreement(a, b)
    assert found is not None and found.tokens == found.agreed == 60
    assert [row[i] for row, i in zip(found.matrix, (1, 0, 2), strict=True)] == [sum(r) for r in found.matrix]
    a.content = np.arange(60) >= 20
    found = agreement(a, b)
    assert found is not None and found.tokens == 40
    b.token_ids = b.token_ids + 1
    assert agreement(a, b) is None
    data = _data(page(_side(a), _side(b)))
    assert data["compare"] == {"same_text": False} and len(data["sides"]) == 2
    assert [s["name"] for s in data["sides"]] == ["demo (first)", "demo (second)"]


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("adapters", [("one",), ("math", "code")])
def test_nothing_one_token_one_adapter(n: int, adapters: tuple[str, ...]) -> None:
    trace = _trace(n=n, adapters=adapters, groups=2)
    if n:
        trace.starts, trace.domains = np.array([0]), (None,)
    side = _data(page(_side(trace), _side(trace)))["sides"][0]
    assert side["tokens"] == n and side["names"] == [*adapters, "base"]
    bare = _trace(n=n, adapters=adapters)
    bare.scores, bare.experts, bare.domains = None, (), ()
    bare.starts = np.array([0]) if n else np.zeros(0, np.int64)
    assert _data(page(_side(bare)))["sides"][0]["detail"]["scores"] is None


def test_the_page_stays_small_with_200_000_tokens() -> None:
    rng = np.random.default_rng(1)
    n, vocabulary = 200_000, 40_000
    trace = _trace(n=n, adapters=("math", "code", "sql", "medical"), k=4)
    trace.token_ids = rng.integers(0, vocabulary, n)
    trace.pieces = {i: f" word{i}" for i in range(vocabulary)}
    trace.content = rng.random(n) > 0.1
    size = len(page(_side(trace)).encode())
    assert size < 5e6, size


def test_tints_are_legible_on_both_papers() -> None:
    text = page(_side(_trace()))
    rules = re.findall(
        r"background-color:light-dark\((#\w+),(#\w+)\);color:light-dark\((#\w+),(#\w+)\)", text
    )
    assert len(rules) == len(HUES) * (LEVELS + 1)

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for light, dark, light_ink, dark_ink in rules:
        for paper, ink in ((light, light_ink), (dark, dark_ink)):
            high, low = sorted((luminance(paper), luminance(ink)), reverse=True)
            assert (high + 0.05) / (low + 0.05) >= 4.5, (paper, ink)


def test_places_are_checked_first_and_pages_do_not_change(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is an HTML page"):
        check_report(tmp_path / "a.pdf", force=False)
    with pytest.raises(InputError, match="cannot be written there"):
        check_report(tmp_path / "none" / "a.html", force=False)
    size = write_report(tmp_path / "a.html", _side(_trace()))
    assert size == (tmp_path / "a.html").stat().st_size
    with pytest.raises(InputError, match="exists"):
        write_report(tmp_path / "a.html", _side(_trace()))
    assert page(_side(_trace())) == (tmp_path / "a.html").read_text(encoding="utf-8")
    write_report(tmp_path / "a.html", _side(_trace(n=3)), force=True)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to parse the script")
def test_the_script_is_valid(tmp_path: Path) -> None:
    script = re.findall(r"<script>(.*?)</script>", page(_side(_trace())), re.DOTALL)[0]
    (tmp_path / "page.js").write_text(script, encoding="utf-8")
    done = subprocess.run(["node", "--check", tmp_path / "page.js"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
