"""`molora eval` on a tiny model: numbers, sets, baselines, the store, thresholds and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from molora_cli.core.evaluation import tally, thresholds
from molora_cli.core.evaluation.lab import Lab, merged_factors
from molora_cli.core.evaluation.rows import PARTS, batches, evaluation_rows
from molora_cli.core.evaluation.score import PassCounter, constant, label_oracle, score
from molora_cli.core.evaluation.store import NllStore
from molora_cli.core.evaluation.ways import parse_mode
from molora_cli.core.training.data import Example, Message
from molora_cli.core.training.mixing import labelled
from molora_cli.errors import InputError, ThresholdError

NAMES = ("num", "low", "up")
WORDS = {"num": "0123456789", "low": "abcdefghij", "up": "ABCDEFGHIJ"}


def _rows(name: str, count: int, seed: str = "") -> list[dict[str, Any]]:
    rng = random.Random(name + seed)

    def word() -> str:
        return "".join(rng.choice(WORDS[name]) for _ in range(rng.randint(10, 18)))

    return [
        {"messages": [{"role": "user", "content": word()}, {"role": "assistant", "content": word()}]}
        for _ in range(count)
    ]


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def _example(name: str, question: str, answer: str, line: int = 1) -> Example:
    return Example((Message("user", question), Message("assistant", answer)), None, name, line)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NLLs of other tests are not looked up here."""
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bundle(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Three adapters with different ranks, and a context router trained for a moment."""
    from molora_cli.app import app

    place = tmp_path_factory.mktemp("eval")
    folder = place / "b"
    made = [f"{n}={make_adapter(tiny_llama, n, seed=i, r=2 + i)}" for i, n in enumerate(NAMES)]
    done = CliRunner().invoke(app, ["compose", "-o", str(folder), "--base", str(tiny_llama), *made])
    assert done.exit_code == 0, done.output
    data = [f"--data={n}={_write(place / f'{n}.train.jsonl', _rows(n, 12, 'train'))}" for n in NAMES]
    line = ["train-router", str(folder), *data, "--steps", "30", "--mixes", "20", "--max-length", "96"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    place = tmp_path_factory.mktemp("rows")
    return [f"--data={n}={_write(place / f'{n}.jsonl', _rows(n, 6))}" for n in NAMES]


@pytest.fixture(scope="module")
def lab(bundle: Path) -> Lab:
    from molora_cli.core.bundle.store import Bundle

    return Lab(Bundle.open(bundle))


def _run(*line: str) -> Any:
    from molora_cli.app import app

    return CliRunner().invoke(app, ["eval", *line])


def _json(*line: str) -> dict[str, Any]:
    done = _run(*line, "--json", "--quiet")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


# -- numbers ------------------------------------------------------------------
def test_nll_is_that_of_the_model_alone_and_batches_change_nothing(lab: Lab) -> None:
    examples = [labelled(_example("num", "12345678901", "4" * n), "num") for n in (3, 9, 30)]
    rows, cut = evaluation_rows(lab.tokenizer, examples, NAMES, 60)
    assert cut == 1 and len(rows) == 3
    model = lab.routed()
    found, alone = (tally.Tally.zeros(3, 3) for _ in range(2))
    score(model, rows, [0, 1, 2], found, constant([0], [1.0]))
    for i in range(3):
        score(model, rows, [i], alone, constant([0], [1.0]))
    assert np.allclose(found.sums, alone.sums, rtol=1e-4)
    row = rows[1]
    model.only("num")
    with torch.no_grad():
        logits = model(input_ids=row.ids[None]).logits[0].float()
    model.auto()
    logp = logits.log_softmax(-1)[torch.arange(len(row.ids) - 1), row.ids[1:]]
    wanted = -logp[row.counted[1:]].sum().item()
    assert found.sums[1, 0] == pytest.approx(wanted, rel=1e-4)
    assert found.counts[1, 0] == int(row.counted.sum()) == 10  # nine letters and the end of the turn


def test_labels_and_parts_of_tokens(lab: Lab) -> None:
    example = labelled(_example("low", "abc", "def"), "low")
    (row,), _ = evaluation_rows(lab.tokenizer, [example], NAMES, 60)
    assert row.labels[:1].tolist() == [-1] and set(row.labels[row.part == 1].tolist()) == {1}
    assert [PARTS[i] for i in row.part[row.counted].tolist()] == ["completion"] * 4
    (batch,) = batches([row, row], [0, 1], 1000)
    route = label_oracle(3)(batch)
    assert torch.equal(route.indices[..., 0] == 1, batch.labels == 1)


# -- baselines ----------------------------------------------------------------
def test_a_merge_is_what_convert_writes(bundle: Path, lab: Lab, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from molora_cli.app import app

    target = tmp_path / "merged"
    line = ["convert", str(bundle), str(target), "--to", "merged-peft", "--method", "ties"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    written = load_file(target / "adapter_model.safetensors")
    config = json.loads((target / "adapter_config.json").read_text())
    made = merged_factors(lab.factors, "ties", {"density": 0.5})
    for path, factors in made.items():
        a, b = (written[f"base_model.model.{path}.lora_{x}.weight"] for x in "AB")
        pattern = next((v for k, v in config.get("alpha_pattern", {}).items() if path.endswith(k)), None)
        rank = a.shape[0]
        scale = (config["lora_alpha"] if pattern is None else pattern) / rank
        assert torch.allclose(scale * b @ a, factors.scale * factors.B @ factors.A, atol=1e-5)


# -- the store ----------------------------------------------------------------
def test_the_store_knows_a_row_again_and_another_method_or_label_not(lab: Lab, tmp_path: Path) -> None:
    examples = [labelled(_example("num", f"{i}" * 12, "456"), "num") for i in (1, 2, 2)]
    rows, _ = evaluation_rows(lab.tokenizer, examples, NAMES, 60)
    store = NllStore(tmp_path, ["base"])
    first = tally.Tally(np.arange(9.0).reshape(3, 3) * 0 + 7.0, np.ones((3, 3)))
    store.put("uniform", rows, first, [0, 1])
    found = tally.Tally.zeros(3, 3)
    assert store.fill("uniform", rows, found, [0, 1, 2]) == []
    assert np.array_equal(found.sums, first.sums)
    assert store.fill("base", rows, found, [0]) == [0]
    other, _ = evaluation_rows(lab.tokenizer, [labelled(_example("low", "1" * 12, "456"), "low")], NAMES, 60)
    assert store.fill("uniform", other, found, [0]) == [0]
    assert NllStore(tmp_path, ["another base"]).fill("uniform", rows, found, [0]) == [0]
    store.close()
    (tmp_path / "nll.sqlite").write_bytes(b"no database at all, and longer than a header" * 40)
    broken = NllStore(tmp_path, ["base"])
    assert broken.fill("uniform", rows, found, [1]) == [1]


# -- the command --------------------------------------------------------------
def test_the_table_holds_what_was_asked_for(bundle: Path, data: list[str], tmp_path: Path) -> None:
    blend = {"message": 1, "start": 0, "end": 8, "label": "num+low"}
    file = _write(tmp_path / "blend.jsonl", [{**r, "segments": [blend]} for r in _rows("num", 4)])
    wanted = ["--mixed", "3", "--baselines", "default,pairs,cat,ties", "--data", str(file), "--draws", "50"]
    found = _json(str(bundle), *data, *wanted)
    assert list(found["sets"]) == ["single", "two-turn", "one-turn", "new-template", "blend"]
    single = found["sets"]["single"]
    rows = {row["name"]: row for row in single["rows"]}
    assert list(rows)[:5] == ["base", *NAMES, "own"]
    assert {"cat", "ties", "uniform", "label-oracle", "sequence-oracle"} <= set(rows)
    assert {"router top-1", "router top-2", "router soft", "sequence-router (router)"} <= set(rows)
    assert rows["base"]["recovered"]["mean"]["value"] in (0.0, None)
    for name in NAMES:  # random adapters gain nothing or something by chance
        assert rows["own"]["nll"][name]["value"] == rows[name]["nll"][name]["value"]
    # merging by concatenation with 1/n each is the uniform blend
    for name in NAMES:
        assert rows["cat"]["nll"][name]["value"] == pytest.approx(
            rows["uniform"]["nll"][name]["value"], abs=1e-4
        )
    router = rows["router top-1"]
    assert router["default"] and router["passes"] == 1
    assert set(router["routing"]["accuracy"]) == set(PARTS)
    shares = router["routing"]["usage"]["num"]
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-4) and set(shares) == {*NAMES, "base"}
    by_chance = found["sets"]["blend"]
    assert by_chance["blended"] and all(row["recovered"] is None for row in by_chance["rows"])
    assert "0.5 num + 0.5 low" in {row["name"] for row in by_chance["rows"]}
    assert {d["of"] for d in by_chance["differences"]} == {"nll"}
    assert found["overlap"]["rows"] == 0


def test_a_second_run_looks_up_what_no_router_decides(
    bundle: Path, data: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from molora_cli.core.evaluation import measure

    ran: list[str] = []
    real = measure.score

    def counted(model: Any, rows: Any, wanted: Any, tally: Any, decide: Any, **options: Any) -> None:
        ran.append("router" if options.get("observed") is not None else "other")
        real(model, rows, wanted, tally, decide, **options)

    monkeypatch.setattr(measure, "score", counted)
    first = _json(str(bundle), *data, "--modes", "1", "--seed", "5", "--baselines", "uniform,adapters")
    assert ran.count("other") == 5
    ran.clear()
    again = _json(str(bundle), *data, "--modes", "1", "--seed", "5", "--baselines", "uniform,adapters")
    assert ran == ["router"] and again["sets"] == first["sets"]
    ran.clear()
    fewer = _json(str(bundle), *data, "--modes", "1", "--limit", "2", "--no-cache", "--baselines", "none")
    assert ran.count("other") == 4 and fewer["sets"]["single"]["documents"] == 6


def test_rows_that_were_trained_on_are_said(bundle: Path, tmp_path: Path) -> None:
    old = _write(tmp_path / "old.jsonl", _rows("num", 12, "train"))
    done = _run(str(bundle), "--data", f"num={old}", "--baselines", "none", "--modes", "1", "--json")
    assert done.exit_code == 0 and "12 of 12 rows" in done.stderr
    assert json.loads(done.stdout)["overlap"]["by_name"] == {"num": 12}


def test_thresholds_exit_3_and_a_wrong_one_2(bundle: Path, data: list[str]) -> None:
    line = [str(bundle), *data, "--baselines", "none", "--modes", "1"]
    assert isinstance(_run(*line, "--min", "single=1000").exception, ThresholdError)
    for wrong in ("other=3", "single", "single=much"):
        assert isinstance(_run(*line, "--min", wrong).exception, InputError)
    found = {"sets": {}, "tasks": {"sql": {"router": {"rows": 2, "exact": {"value": 0.5}, "answers": []}}}}
    assert thresholds.measures(found)["tasks/sql/exact"] == 50
    failed = thresholds.check(found, {"tasks/sql/exact": 60})
    assert failed == [{"key": "tasks/sql/exact", "wanted": 60, "found": 50}]


def test_tables_and_figure(bundle: Path, data: list[str], tmp_path: Path) -> None:
    figure = tmp_path / "f.svg"
    line = [str(bundle), *data, "--limit", "2", "--baselines", "uniform", "--modes", "1", "--draws", "50"]
    done = _run(*line, "--figure", str(figure))
    assert done.exit_code == 0, done.output
    assert all(word in done.stdout for word in ("recovered", "router top-1", "uniform", "switches", "takes"))
    text = figure.read_text(encoding="utf-8")
    assert "<svg" in text and "single" in text
    assert isinstance(_run(*line, "--figure", str(figure)).exception, InputError)


def test_ways_may_have_a_temperature(bundle: Path, data: list[str]) -> None:
    line = [str(bundle), *data, "--limit", "2", "--baselines", "none", "--draws", "50"]
    found = _json(*line, "--modes", "1,2@0.001,2,2,2@1000,soft@1000")
    rows = {
        r["name"]: r["nll"]["num"]["value"] for r in found["sets"]["single"]["rows"] if r["group"] == "router"
    }
    ways = ["top-1", "top-2 at 0.001", "top-2", "top-2 at 1000", "soft at 1000"]
    assert list(rows) == [f"router {way}" for way in ways]
    cold, even = rows["router top-2 at 0.001"], rows["router top-2 at 1000"]
    assert cold == pytest.approx(rows["router top-1"], abs=1e-4) and abs(even - cold) > 1e-4
    assert isinstance(_run(*line, "--modes", "2@0").exception, InputError)
    for wrong in ("0", "two", "2@", "2@x", "soft@-1", "@2", ""):
        with pytest.raises(InputError, match="no way to route"):
            parse_mode(wrong)


def test_two_passes_are_counted(lab: Lab) -> None:
    model = lab.routed()
    (row,), _ = evaluation_rows(lab.tokenizer, [labelled(_example("low", "abc", "def"), "low")], NAMES, 60)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model.base

        def forward(self, **kwargs: Any) -> Any:
            model.off()
            self.inner(**kwargs)
            return self.inner(**kwargs)

    with PassCounter(model.base, 4) as counter:
        score(Twice(), [row], [0], tally.Tally.zeros(1, 3), None, counter=counter)
    model.auto()
    assert counter.passes() == 2


@pytest.mark.slow
def test_arrow_and_xlora_run_in_peft_and_mixed_ranks_are_said(
    bundle: Path,
    tiny_llama: Path,
    make_adapter: Callable[..., Path],
    data: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from molora_cli.app import app
    from molora_cli.core.evaluation import peft_models

    found = _json(str(bundle), *data, "--baselines", "arrow", "--modes", "1")
    assert any("Arrow refuses" in note and "rank" in note for note in found["notes"])
    assert not any("arrow" in row["name"] for row in found["sets"]["single"]["rows"])
    equal = tmp_path / "equal"
    made = [f"{n}={make_adapter(tiny_llama, f'e{n}', seed=i)}" for i, n in enumerate(NAMES)]
    done = CliRunner().invoke(app, ["compose", "-o", str(equal), "--base", str(tiny_llama), *made])
    assert done.exit_code == 0, done.output
    train = [text.replace("--data=", "--train=") for text in data]
    found = _json(str(equal), *data, *train, "--baselines", "arrow,xlora:tokens=900,uniform")
    rows = {row["name"]: row for row in found["sets"]["single"]["rows"]}
    assert {"arrow top-1", "arrow top-2", "xlora (tokens=900)", "uniform"} <= set(rows)
    values = {name: row["nll_per_token"]["value"] for name, row in rows.items()}
    assert values["arrow top-1"] != values["arrow top-2"] != values["base"] != values["xlora (tokens=900)"]
    assert found["trained"]["xlora (tokens=900)"]["tokens"] >= 900
    # on other rows the classifier that was kept runs
    monkeypatch.setattr(peft_models, "_draw", None)
    wanted = ["--baselines", "xlora:tokens=900", "--mixed", "2"]
    again = _json(str(equal), *data, *train, *wanted)
    assert again["trained"] == found["trained"]
    (row,) = [r for r in again["sets"]["single"]["rows"] if r["name"].startswith("xlora")]
    assert row["nll_per_token"] == rows["xlora (tokens=900)"]["nll_per_token"]


def test_answers_are_generated_and_checked_for_every_model(bundle: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "12"}, {"role": "assistant", "content": f"#### {n}"}]}
        for n in range(3)
    ]
    code = "```python\ndef f():\n    return 1\n```"
    program = {"messages": [{"role": "user", "content": "f"}, {"role": "assistant", "content": code}]}
    program["tests"] = ["assert f() == 1"]  # type: ignore[assignment]
    line = [
        f"--data=num={_write(tmp_path / 'n.jsonl', rows)}",
        f"--data=low={_write(tmp_path / 'l.jsonl', [program])}",
    ]
    options = ["--tasks", "2", "--max-new-tokens", "3", "--baselines", "none", "--modes", "1"]
    found = _json(str(bundle), *line, *options, "--allow-code-execution")
    assert set(found["tasks"]["num"]) == {"base", "own", "router"}
    assert found["tasks"]["num"]["router"]["answer"]["counted"] == 2
    assert set(found["tasks"]["low"]["own"]) == {"rows", "parses", "passes", "answers"}
    assert len(found["tasks"]["num"]["base"]["answers"]) == 2
    assert any("programs that were written were run" in note for note in found["notes"])


def test_a_recipe_says_the_same_as_flags_and_flags_win(
    bundle: Path, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from molora_cli.core.evaluation import job

    seen: list[Any] = []

    def remembered(opened: Any, asked: Any, **options: Any) -> Any:
        seen.append(asked)
        raise InputError("enough")

    monkeypatch.setattr(job, "evaluate", remembered)
    files = dict(text.removeprefix("--data=").split("=") for text in data)
    recipe = tmp_path / "r.yaml"
    listed = "".join(f"    {name}: {path}\n" for name, path in files.items())
    recipe.write_text(
        f"eval:\n  bundle: {bundle}\n  mixed: 6\n  modes: 1,soft\n  baselines: [uniform]\n"
        f"  min: {{single: 40}}\n  data:\n{listed}"
    )
    _run("--recipe", str(recipe))
    _run("--recipe", str(recipe), "--mixed", "3", "--min", "single=50")
    first, second = seen
    assert list(first.data) == [text.removeprefix("--data=") for text in data]
    assert (first.mixed, list(first.modes), list(first.baselines)) == (6, ["1", "soft"], ["uniform"])
    assert list(first.minimum) == ["single=40.0"] and list(second.minimum) == ["single=50"]
    assert second.mixed == 3 and not second.allow_code_execution


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "passes"), [("taps", 1), ("hidden", 2), ("arrow", 1)])
def test_routers_that_read_hidden_states_are_measured_too(
    bundle: Path, data: list[str], tmp_path: Path, kind: str, passes: int
) -> None:
    import shutil

    from molora_cli.app import app

    other = Path(shutil.copytree(bundle, tmp_path / "other"))
    line = ["attach-router", str(other), "--kind", "arrow", "--force"]
    if kind != "arrow":
        line = ["train-router", str(other), *data, "--kind", kind, "--steps", "3", "--mixes", "4", "--force"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, (done.output, done.exception)
    router = ["--router", str(other / "router.safetensors"), "--modes", "1", "--limit", "2"]
    found = _json(str(bundle), *data, *router, "--baselines", "sequence-router")
    rows = {row["name"]: row for row in found["sets"]["single"]["rows"]}
    assert rows["other top-1"]["passes"] == pytest.approx(passes, abs=0.3 if passes > 1 else 0)
    assert found["routers"]["other"]["kind"] == kind and "sequence-router (other)" in rows
    assert rows["other top-1"]["routing"]["accuracy"]["prompt"] is not None
