"""Training a router: mixing, splits, reproducibility, resuming, warnings, refusals and the command."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from molora_cli.core.router.context import ContextStage
from molora_cli.core.router.files import stage_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.training import mixing
from molora_cli.core.training.data import Example, Message
from molora_cli.core.training.leakage import leaks
from molora_cli.core.training.metrics import Measured, data_warnings, measure, result_warnings
from molora_cli.core.training.router_loop import CHECKPOINT, Interrupted, train_context
from molora_cli.core.training.router_rows import MIXED, RouterSettings, prepare, split_documents
from molora_cli.errors import InputError

FAST = RouterSettings(
    steps=30, every=10, batch=6, mixes=20, max_length=96, val_share=0.2, projection=16, hidden=16
)
WORDS = {"num": "0123456789", "low": "abcdefghij", "up": "ABCDEFGHIJ"}


def _chat(question: str, answer: str, label: str | None = None, line: int = 1) -> Example:
    return Example((Message("user", question), Message("assistant", answer)), None, label, line)


def _rows(name: str, count: int = 12) -> list[Example]:
    rng = random.Random(name)

    def word() -> str:
        return "".join(rng.choice(WORDS[name]) for _ in range(rng.randint(6, 16)))

    return [_chat(word(), word(), line=i + 1) for i in range(count)]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture(scope="module")
def embedding() -> torch.Tensor:
    return torch.randn(320, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def rows(tokenizer: Any) -> Any:
    return prepare({name: _rows(name) for name in ("num", "low", "up")}, tokenizer, FAST)


# -- mixing -----------------------------------------------------------------
def test_segments_of_a_mix_hold_the_words_of_their_domain() -> None:
    source = {name: [mixing.labelled(e, name) for e in _rows(name)] for name in ("num", "low", "up")}
    first, again = (mixing.Mixer(source, limit=400, seed=3) for _ in range(2))
    drawn = [first.draw() for _ in range(200)]
    assert drawn == [again.draw() for _ in range(200)]
    for row in drawn:
        labels = [s.label for s in row.segments]
        assert len(set(labels)) >= 2
        for s in row.segments:
            words = row.contents[s.message][s.start : s.end]
            assert words and set(words) <= set(WORDS[s.label])
    kinds = {len(row.messages) for row in drawn}
    assert kinds >= {2, 4}, "both several questions in one prompt and several turns"


def test_texts_mix_with_chats_as_text_and_a_system_prompt_has_no_label() -> None:
    system = Example((Message("system", "be kind"), *_rows("num")[0].messages), None, "num", 1)
    ours = mixing.labelled(system, "num")
    assert all(s.message != 0 for s in ours.segments)
    text = mixing.labelled(Example((), "abc", None, 1), "low")
    row = mixing.as_text([ours, text], random.Random(0))
    assert row.text is not None and [s.label for s in row.segments] == ["num", "low"]
    assert "be kind" not in row.text
    asked = mixing.as_questions([ours, mixing.labelled(_rows("low")[0], "low")], random.Random(0))
    assert asked.messages[0].content == "be kind" and all(s.message != 0 for s in asked.segments)


# -- rows -------------------------------------------------------------------
def test_a_document_stays_on_one_side_whatever_the_order() -> None:
    rows = [Example((), f"text {i}", None, i, (), f"doc {i % 10}") for i in range(40)]
    train, held = split_documents(rows, 0.2, 0)
    assert {r.document for r in train}.isdisjoint(r.document for r in held)
    assert len({r.document for r in held}) == 2
    again, _ = split_documents(rows[::-1], 0.2, 0)
    assert {r.document for r in again} == {r.document for r in train}
    same = [Example((), "twice", None, i) for i in range(2)] + [Example((), "once", None, 3)]
    train, held = split_documents(same, 0.5, 0)
    assert {r.text for r in train}.isdisjoint(r.text for r in held) and train and held


def test_template_tokens_and_joining_words_are_masked(rows: Any) -> None:
    row = rows.train["num"][0]
    assert int((row.labels < 0).sum()) > 0 and set(row.labels[row.labels >= 0].tolist()) == {0}
    assert len(rows.train[MIXED]) == 20
    assert any(len(set(r.labels[r.labels >= 0].tolist())) > 1 for r in rows.train[MIXED])


# -- training ---------------------------------------------------------------
def test_training_learns_reproduces_and_reports(rows: Any, embedding: torch.Tensor) -> None:
    lines: list[dict[str, Any]] = []
    one = train_context(rows, embedding, FAST, record=lines.append)
    two = train_context(rows, embedding, FAST)
    other = train_context(rows, embedding, RouterSettings(**{**vars(FAST), "seed": 1}))
    assert all(torch.equal(one.tensors[k], two.tensors[k]) for k in one.tensors)
    assert not torch.equal(one.tensors["stages.0.outer.weight"], other.tensors["stages.0.outer.weight"])
    assert [line["step"] for line in lines] == [10, 20, 30]
    json.dumps(lines)
    stage = ContextStage(
        one.spec.stages[0], stage_tensors(one.tensors, 0), Surroundings(n_layers=1, embedding=embedding)
    )
    found = measure(stage, rows)
    assert all((found.accuracy(i) or 0) > 0.75 for i in range(3)), found.document()
    assert found.tokens > found.masked > 0
    assert sum(found.utilisation().values()) == pytest.approx(1)
    assert one.tensors["stages.0.statistics.count"].sum() > 0


def test_the_number_of_threads_changes_no_bit(rows: Any, embedding: torch.Tensor) -> None:
    settings = RouterSettings(**{**vars(FAST), "steps": 12, "every": 6})
    lines: list[list[dict[str, Any]]] = [[], []]
    one, two = (
        train_context(rows, embedding, settings, workers=n, record=lines[n - 1].append) for n in (1, 2)
    )
    assert "stages.0.ahead.inner.weight" in one.tensors and one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(one.tensors[k], two.tensors[k]) for k in one.tensors)
    for line in (*lines[0], *lines[1]):
        del line["seconds"]
    assert lines[0] == lines[1]


def test_a_stopped_run_goes_on_to_the_same_router(rows: Any, embedding: torch.Tensor, tmp_path: Path) -> None:
    whole = train_context(rows, embedding, FAST)

    def stop(done: float, total: float | None = None, note: str = "") -> None:
        if done == 13:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="13 of 30") as caught:
        train_context(rows, embedding, FAST, work=tmp_path, ticker=stop, again="molora ... --resume")
    assert caught.value.exit_code == 130 and "--resume" in caught.value.remedy
    other = RouterSettings(**{**vars(FAST), "steps": 40})
    with pytest.raises(InputError, match="other data or settings"):
        train_context(rows, embedding, other, work=tmp_path, resume=True)
    old = torch.load(tmp_path / CHECKPOINT, weights_only=True)
    torch.save({**old, "key": f"{rows.digest} {FAST.digest()}"}, tmp_path / CHECKPOINT)
    with pytest.raises(InputError, match="another version"):  # which took its steps in another way
        train_context(rows, embedding, FAST, work=tmp_path, resume=True)
    torch.save(old, tmp_path / CHECKPOINT)
    torch.manual_seed(99)  # the state around must not matter
    resumed = train_context(rows, embedding, FAST, work=tmp_path, resume=True)
    assert all(torch.equal(whole.tensors[k], resumed.tensors[k]) for k in whole.tensors)
    assert not (tmp_path / CHECKPOINT).exists()
    with pytest.raises(InputError, match="nothing to resume"):
        train_context(rows, embedding, FAST, work=tmp_path, resume=True)


# -- warnings ---------------------------------------------------------------
def test_bad_data_and_bad_routers_are_said() -> None:
    said = " | ".join(data_warnings({"a": 3, "b": 100}, ["a", "b", "c"], {"a": {"text"}, "b": {"messages"}}))
    for part in ("only 3 documents", "one-sided", "no rows for c", "differ in format"):
        assert part in said
    assert data_warnings({"a": 30, "b": 40}, ["a", "b"], {"a": {"text"}, "b": {"text"}}) == []

    def made(prompt: list[list[int]], entropy: float) -> Measured:
        counts = torch.tensor(prompt)
        none = torch.zeros_like(counts)
        return Measured(
            ("a", "b"), {"prompt": counts, "completion": none}, none, counts.sum(0), 5, entropy, True
        )

    good = made([[99, 1], [2, 98]], 0.1)
    assert result_warnings(good) == [] and good.accuracy(0) == 0.99 and good.accuracy(0, "completion") is None
    said = " | ".join(result_warnings(made([[100, 0], [99, 1]], 0.69)))
    assert "collapse: a" in said and "does not choose" in said and "b: only 1%" in said
    assert "dead adapter: b" in " | ".join(result_warnings(made([[1000, 0], [999, 1]], 0.1)))


def test_a_wrapper_that_one_domain_alone_has_is_said() -> None:
    def rows(system: str | None = None, before: str = "", after: str = "", count: int = 12) -> list[Example]:
        made = []
        for n in range(count):
            messages = [Message("user", f"{before}{n} {n * n} what{n}{after}"), Message("assistant", "x")]
            if system is not None:
                messages.insert(0, Message("system", system))
            made.append(Example(tuple(messages), None, None, n))
        return made

    plain = rows()
    (said,) = leaks({"a": rows(system="You write SQL queries."), "b": plain})
    assert said.startswith("a: a system prompt says 'You write SQL queries.'")
    (said,) = leaks({"a": rows(before="### Input:\n"), "b": plain, "c": plain})
    assert "a: prompts begin with '### Input:'" in said
    (said,) = leaks({"a": plain, "b": rows(after="\nAnswer with code only.")})
    assert "b: prompts end with 'Answer with code only.'" in said
    (said,) = leaks(
        {"a": plain, "b": rows(system="Be brief, please."), "c": rows(system="Be brief, please.")}
    )
    assert said.startswith("a: hardly a row has a system prompt")
    # shared by all, too few rows, or too short a beginning: nothing to say
    assert leaks({n: rows(system="Be brief, please.", before="Question one: ") for n in "ab"}) == []
    assert leaks({"a": rows(system="You write SQL queries.", count=9), "b": plain}) == []
    assert leaks({"a": rows(before="Is "), "b": plain}) == []
    # a few rows without it change nothing, many do
    most = rows(before="### Input:\n", count=30)
    assert len(leaks({"a": [*most, *plain[:3]], "b": plain})) == 1
    assert leaks({"a": [*most, *plain], "b": plain}) == []
    text = [Example((), f"### Code: {n} {n * n}", None, n) for n in range(12)]
    assert len(leaks({"a": text, "b": plain})) == 1


# -- the command ------------------------------------------------------------
@pytest.fixture(scope="module")
def bundle_source(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from molora_cli.app import app

    folder = tmp_path_factory.mktemp("bundles") / "b"
    adapters = [f"{n}={make_adapter(tiny_llama, n, seed=i)}" for i, n in enumerate(("num", "low", "up"))]
    done = CliRunner().invoke(app, ["compose", "-o", str(folder), "--base", str(tiny_llama), *adapters])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def bundle(bundle_source: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(bundle_source, tmp_path / "bundle"))


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def _labelled(names: tuple[str, ...], count: int = 10) -> list[dict[str, Any]]:
    return [{"text": " ".join(r.contents), "label": n} for n in names for r in _rows(n, count)]


def test_the_command_writes_a_router_and_says_what_it_does(bundle: Path, tmp_path: Path) -> None:
    from molora_cli.app import app

    data = _write(tmp_path / "rows.jsonl", _labelled(("num", "low")))
    metrics = tmp_path / "m.jsonl"
    line = ["train-router", str(bundle), "--data", str(data), "--steps", "20", "--mixes", "10"]
    done = CliRunner().invoke(app, [*line, "--metrics", str(metrics), "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["experts"] == ["num", "low"] and document["steps"] == 20
    assert any("no rows for up" in w for w in document["warnings"])
    assert json.loads(metrics.read_text().splitlines()[-1])["final"]["tokens"] == document["tokens"]
    assert (bundle / "router.safetensors").is_file()
    assert not (bundle.parent / ".bundle.train-router").exists()
    with pytest.raises(InputError, match="has a router already"):
        CliRunner().invoke(app, line, catch_exceptions=False)
    human = CliRunner().invoke(app, [*line, "--force"])
    assert human.exit_code == 0 and "→low" in human.stdout and "router written" in human.stdout


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (_labelled(("num",)), "only 'num' has rows"),
        ([*_labelled(("num", "low")), {"text": "x", "label": "chem"}], "line 21.*chem.*num, low, up"),
        ([], "no examples"),
        ([{"text": "x", "label": 3}], "line 1.*label"),
        ([{"text": "x"}], "line 1.*no label"),
    ],
)
def test_rows_that_cannot_train_are_refused(
    bundle: Path, tmp_path: Path, rows: list[dict[str, Any]], said: str
) -> None:
    from molora_cli.app import app

    data = _write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(InputError, match=said):
        CliRunner().invoke(app, ["train-router", str(bundle), "--data", str(data)], catch_exceptions=False)
    assert not (bundle / "router.safetensors").exists()
