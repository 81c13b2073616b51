"""Tasks of lm-evaluation-harness on a routed model, with a local task file; where the extra is installed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from molora_cli.errors import InputError

pytestmark = pytest.mark.slow
NAMES = ("num", "low")
WORDS = {"num": "0123456789", "low": "abcdefghij"}
TASK = """
task: tiny_letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""
CHOICE = """
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
GENERATE = """
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
metric_list:
  - metric: exact_match
"""


def _words(name: str, count: int) -> list[str]:
    rng = random.Random(name)
    return ["".join(rng.choice(WORDS[name]) for _ in range(rng.randint(6, 12))) for _ in range(count)]


@pytest.fixture(scope="module")
def bundle(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    from molora_cli.app import app

    place = tmp_path_factory.mktemp("harness")
    folder = place / "b"
    made = [f"{n}={make_adapter(tiny_llama, n, seed=i)}" for i, n in enumerate(NAMES)]
    line = ["compose", "-o", str(folder), "--base", str(tiny_llama), *made]
    assert CliRunner().invoke(app, line).exit_code == 0
    rows = place / "rows.jsonl"
    texts = [{"text": w, "label": n} for n in NAMES for w in _words(n, 10)]
    rows.write_text("".join(json.dumps(r) + "\n" for r in texts))
    line = ["train-router", str(folder), "--data", str(rows), "--steps", "20", "--mixes", "10"]
    assert CliRunner().invoke(app, line).exit_code == 0
    return folder


def _task(place: Path, kind: str, rest: str) -> Path:
    data = place / "docs.jsonl"
    docs = [
        {"question": one + two, "choices": [two[:3], one[:3]], "answer": i % 2}
        for i, (one, two) in enumerate(zip(_words("num", 6), _words("low", 6), strict=True))
    ]
    data.write_text("".join(json.dumps(d) + "\n" for d in docs))
    file = place / "tiny.yaml"
    file.write_text(TASK.format(file=data, kind=kind, rest=rest))
    return file


def test_without_the_harness_the_extra_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from molora_cli.app import app

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    done = CliRunner().invoke(app, ["eval", str(bundle), "--lm-eval", "arc_easy"])
    assert isinstance(done.exception, InputError) and "molora[eval]" in done.exception.remedy


@pytest.mark.parametrize(("kind", "rest"), [("multiple_choice", CHOICE), ("generate_until", GENERATE)])
def test_a_local_task_runs_routed_and_without_a_network(
    bundle: Path, tmp_path: Path, kind: str, rest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from molora_cli.app import app

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    file = _task(tmp_path, kind, rest)
    done = CliRunner().invoke(app, ["eval", str(bundle), "--lm-eval", str(file), "--json", "--quiet"])
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout)["lm_eval"]
    assert set(found) == {"base", "router"}
    assert all(any("acc" in k or "exact_match" in k for k in f["tiny_letters"]) for f in found.values())


def test_likelihoods_are_those_of_the_routed_model(bundle: Path) -> None:
    pytest.importorskip("lm_eval")
    import torch
    from lm_eval.api.instance import Instance

    import molora_cli
    from molora_cli.core.evaluation.harness import wrap

    model: Any = molora_cli.load(bundle, backend="torch")
    texts = [("0123456789", "4567"), ("abc", "defghij")]
    wanted = []
    for context, rest in texts:
        ids = torch.tensor([model.tokenizer(context + rest)["input_ids"]])
        n = len(model.tokenizer(context)["input_ids"])
        with torch.no_grad():
            logp = model(input_ids=ids).logits[0].log_softmax(-1)
        wanted.append(float(logp[torch.arange(n - 1, ids.shape[1] - 1), ids[0, n:]].sum()))
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]
    found = [value for value, _ in wrap(model).loglikelihood(requests)]
    assert found == pytest.approx(wanted, rel=1e-4)
    model.off()
    assert [v for v, _ in wrap(model).loglikelihood(requests)] != pytest.approx(wanted, rel=1e-4)
