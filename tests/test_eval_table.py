"""`molora eval`: settings chosen on other rows, one adapter per answer, paired differences, what it costs."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from molora_cli.core.evaluation import baselines, tuning
from molora_cli.core.evaluation.derived import derive
from molora_cli.core.evaluation.document import set_document
from molora_cli.core.evaluation.lines import Line, Measured
from molora_cli.core.evaluation.observed import Observed
from molora_cli.core.evaluation.rows import EvalRow, evaluation_rows, first_turns
from molora_cli.core.evaluation.score import score
from molora_cli.core.evaluation.sets import EvalSet
from molora_cli.core.evaluation.store import NllStore
from molora_cli.core.evaluation.tally import Tally, best_choice
from molora_cli.core.training.data import Example, Message, Segment
from molora_cli.core.training.mixing import labelled
from molora_cli.views import evaluation_figure
from molora_cli.views.evaluation import EvaluationView

NAMES = ("num", "low")
WORDS = {"num": "0123456789", "low": "abcdefghij"}


def _word(rng: random.Random, name: str) -> str:
    return "".join(rng.choice(WORDS[name]) for _ in range(rng.randint(10, 16)))


def _chat(rng: random.Random, *names: str) -> dict[str, Any]:
    messages, segments = [], []
    for name in names:
        for role in ("user", "assistant"):
            text = _word(rng, name)
            segments.append({"message": len(messages), "start": 0, "end": len(text), "label": name})
            messages.append({"role": role, "content": text})
    return {"messages": messages, "segments": segments}


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place, rng = tmp_path_factory.mktemp("rows"), random.Random(3)
    made = {n: _write(place / f"{n}.jsonl", [_chat(rng, n) for _ in range(4)]) for n in NAMES}
    for name in ("turns", "other"):
        made[name] = _write(place / f"{name}.jsonl", [_chat(rng, "num", "low") for _ in range(3)])
    return made


@pytest.fixture(scope="module")
def bundle(
    tiny_llama: Path,
    make_adapter: Callable[..., Path],
    files: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Two adapters of one rank and a centroid router."""
    from molora_cli.app import app

    folder = tmp_path_factory.mktemp("table") / "b"
    made = [f"{n}={make_adapter(tiny_llama, f'table-{n}', seed=i)}" for i, n in enumerate(NAMES)]
    data = [f"--data={n}={files[n]}" for n in NAMES]
    for line in (
        ["compose", "-o", str(folder), "--base", str(tiny_llama), *made],
        ["attach-router", str(folder), "--kind", "centroid", *data],
    ):
        done = CliRunner().invoke(app, line)
        assert done.exit_code == 0, done.output
    return folder


def _run(*line: str) -> Any:
    from molora_cli.app import app

    return CliRunner().invoke(app, ["eval", *line])


def test_one_command_chooses_settings_and_prints_everything(
    bundle: Path, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tuning._TRIED, "ties", {"density": (0.5,), "scale": (1, 2)})
    monkeypatch.setitem(tuning._TRIED, "peft-ties", {"density": (0.5,), "weight": (0.5, 1)})
    monkeypatch.setitem(tuning._TRIED, "arrow", {"temperature": (1, 3)})
    data = [f"--data={n}={files[n]}" for n in NAMES] + [f"--data={files['turns']}"]
    tune = [f"--tune={n}={files[n]}" for n in NAMES] + [f"--tune={files['other']}", "--tune-limit", "4"]
    wanted = ["--baselines", "default,ties,svd:weight=0.3,peft-ties,arrow:k=2", "--single", "2"]
    line = [str(bundle), *data, *tune, *wanted, "--modes", "1", "--draws", "40", "--timing"]
    done = _run(*line, "--json", "--quiet")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    tried = found["tuned"]["tried"]
    assert not any("--tune" in note for note in found["notes"])
    assert found["tuned"]["sets"]["single"]["rows"] == 4 and found["tuned"]["sets"]["other"]["rows"] == 3
    families = {}
    for one in tried:
        assert one["recovered"] == pytest.approx(np.mean(list(one["sets"].values())))
        families.setdefault(one["family"], []).append(one)
    assert {f: len(v) for f, v in families.items()} == {"ties": 2, "peft-ties": 2, "arrow top-2": 2}
    single = {row["name"]: row for row in found["sets"]["single"]["rows"]}
    assert found["sets"]["single"]["documents"] == 4  # two of each
    for of in families.values():
        (best,) = [one for one in of if one["chosen"]]
        assert best["recovered"] == max(one["recovered"] for one in of) and best["row"] in single
    assert "svd (weight=0.3)" in single
    assert sum(name.startswith("ties") for name in single) == 1

    turns = {row["name"]: row for row in found["sets"]["turns"]["rows"]}
    # an oracle that may choose for each answer is the own adapter or better where answers have one domain
    assert turns["turn-oracle"]["nll_per_token"]["value"] <= turns["own"]["nll_per_token"]["value"] + 1e-9
    assert (
        turns["turn-oracle"]["nll_per_token"]["value"] <= turns["sequence-oracle"]["nll_per_token"]["value"]
    )
    assert "turn-router (router)" in turns and 1 < turns["own"]["passes"] <= 2
    assert turns["own"]["caches"] == 2 and single["own"]["caches"] == 1 and single["own"]["passes"] == 1
    assert found["cache_bytes_per_token"] > 0 and found["cache_bytes_per_token"] % 4 == 0
    timed = [row["time"] for row in single.values() if row["name"] != "base"]
    assert all(isinstance(t, float) and t > 0 for t in timed)

    assert found["sets"]["turns"]["first_router"] == "router top-1"
    assert {d["baseline"] for d in found["sets"]["turns"]["differences"]} == set(turns) - {
        "base", "own", "router top-1"
    }  # fmt: skip
    # values kept, one for each row and method: 4 rows of single (those of --tune are the same), 3 of turns,
    # 3 of other; base and both adapters on all, uniform, label-oracle and svd on single and turns, what was
    # tried on single and other, what was chosen on turns too
    with sqlite3.connect(tmp_path / "cache" / "evaluation" / "nll.sqlite") as store:
        ((kept,),) = store.execute("SELECT count(*) FROM nll")
    assert kept == 10 + 2 * 10 + 3 * 7 + 3 * (2 * 7 + 3)
    console = Console(width=300, record=True)
    console.print(EvaluationView(found))
    text = console.export_text()
    for words in ("settings chosen on other rows", "router top-1 ahead by", "all sets", "KV bytes/token"):
        assert words in text, words


def test_the_lead_of_the_first_router_is_paired_and_by_domain() -> None:
    rng = np.random.default_rng(0)
    rows = [_row([n % 2] * 3, [0] * 3, [0, 1, 1]) for n in range(12)]
    rows = [replace(row, document=str(n)) for n, row in enumerate(rows)]
    measured = _measured(rows)
    counts = np.array([[2, 0], [0, 2]] * 6, float)
    hard = rng.uniform(0, 4, (12, 1))  # some documents are harder than others, whoever answers

    def line(title: str, group: str, num: float, low: float, **options: Any) -> None:
        tally = Tally(counts * (hard + np.array([num, low])), counts)
        measured.lines[title] = Line(title, group, tally, **options)

    line("base", "base", 2, 3)
    line("own", "own", 1, 1)
    line("bad", "baseline", 1.5, 2)
    line("before top-1", "router", 1, 1.5, default=True)
    line("after top-1", "router", 1.1, 1, default=True)
    found = set_document(measured, 60, 0)
    lead = {d["baseline"]: d for d in found["differences"] if d["router"] == "before top-1"}
    assert found["first_router"] == "before top-1"
    shares = {row["name"]: row["recovered"]["mean"] for row in found["rows"]}
    assert shares["bad"]["value"] == pytest.approx(0.5)
    assert lead["bad"]["value"] == pytest.approx((1 + 0.75) / 2 - 0.5)
    assert lead["bad"]["low"] == pytest.approx(lead["bad"]["value"])  # the hard documents cancel out
    assert lead["after top-1"]["domains"]["num"]["value"] == pytest.approx(0.1)
    assert lead["after top-1"]["domains"]["low"]["value"] == pytest.approx(-0.25)
    drawn = [(name, gap["value"]) for name, _, gap in evaluation_figure._gaps(found)]
    assert drawn == [("after top-1", lead["after top-1"]["value"]), ("bad", lead["bad"]["value"])]
    document = {"sets": {"s": found}, "cache_bytes_per_token": 8.0}
    console = Console(width=200, record=True)
    console.print(EvaluationView(document))
    text = console.export_text()
    assert "before top-1 ahead of" in text and "+37.5 [+37.5, +37.5]" in text and "-25.0" in text


def _measured(rows: list[EvalRow]) -> Measured:
    example = Example((Message("user", "ab"),), None, None, 1, (Segment(0, 0, 2, "num"),))
    return Measured(EvalSet("s", (example,), NAMES, 2), rows)


def test_nll_counts_completion_tokens_of_segments_only(tiny_llama: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    long = Example(
        (Message("user", "12"), Message("assistant", "345 then abcdef")),
        None,
        None,
        1,
        (Segment(0, 0, 2, "num"), Segment(1, 0, 3, "num"), Segment(1, 9, 15, "low")),
    )
    short = labelled(Example((Message("user", "1"), Message("assistant", "2")), None, None, 2), "num")
    rows, _ = evaluation_rows(AutoTokenizer.from_pretrained(tiny_llama), [long, short], NAMES, 640)
    tally = Tally.zeros(2, 2)
    score(base, rows, [0, 1], tally, None)
    # 3 digits; 6 letters and the end of the turn; a digit and its end of turn
    assert tally.counts.tolist() == [[3, 7], [2, 0]]
    ids = rows[0].ids
    logp = base(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    nll = -logp.gather(1, ids[1:, None])[:, 0].detach()
    for label in (0, 1):
        wanted = nll[(rows[0].counted & (rows[0].labels == label))[1:]].sum()
        assert tally.sums[0, label] == pytest.approx(float(wanted), abs=1e-3)


def _row(labels: list[int], turn: list[int], counted: list[int]) -> EvalRow:
    n = len(labels)
    return EvalRow(
        torch.arange(n),
        torch.tensor(labels),
        torch.ones(n, dtype=torch.int64),
        torch.tensor(counted, dtype=torch.bool),
        torch.tensor(turn),
        NAMES,
        str(labels),
    )


def test_answers_of_a_row_take_an_adapter_each_and_the_store_keeps_them_apart(tmp_path: Path) -> None:
    # four tokens of "num", the last two its answer; three of "low"; one more answer of "num"
    row = _row([0, 0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 1, 1, 1, 2], [0, 0, 1, 1, 0, 1, 1, 0, 1])
    short = _row([0, 0], [0, 0], [0, 1])
    rows = [short, row]
    assert row.spans == [(2, 4), (5, 7), (8, 9)] and first_turns(rows).tolist() == [0, 1, 4]
    measured = _measured(rows)
    counts = np.array([[1, 0], [2, 0], [0, 2], [1, 0]], float)
    # adapter "num" is best for its own answers, but "low" for the last one
    nll = {"base": [3, 3, 3, 3], "num": [1, 1, 2, 2], "low": [2, 2, 1, 1]}
    for name, values in nll.items():
        tally = Tally(counts * np.array(values, float)[:, None], counts)
        measured.lines[name] = Line(name, "base" if name == "base" else "adapter", tally, time=1.5)
    observed = Observed(NAMES, 2)
    observed.prompt = {0: [0], 1: [0, 1, 1]}
    measured.lines["r top-1"] = Line("r top-1", "router", measured.lines["num"].tally, observed)
    names = {*baselines.DEFAULT}
    derive(measured, names, NAMES)
    sums = {name: line.tally.sums.sum(1).tolist() for name, line in measured.lines.items()}
    assert sums["own"] == [1, 2, 2, 2]
    assert sums["turn-oracle"] == [1, 2, 2, 1] == sums["turn-router (r)"]
    assert sums["sequence-oracle"] == [1, 4, 2, 1]  # "low": 2*2 + 2*1 + 1 = 7, "num": 2 + 4 + 2 = 8
    assert sums["sequence-router (r)"] == [1, 2, 4, 2]
    line = measured.lines["turn-router (r)"]
    # two tokens; four for the first answer, all seven again for the second, two more for the third
    assert line.passes == pytest.approx((2 + 4 + 7 + 2) / 11, abs=1e-3) and line.caches == 1
    assert line.time == pytest.approx(1.5 * line.passes) and measured.lines["turn-oracle"].caches == 3
    assert best_choice([measured.lines[n].tally for n in ("num", "low")]).tolist() == [0, 0, 1, 1]

    store = NllStore(tmp_path, ["x"])
    kept = measured.lines["turn-oracle"].tally
    store.put("m", rows, kept, [0, 1])
    again = measured.empty()
    assert store.fill("m", rows, again, [0, 1]) == []
    assert np.array_equal(again.sums, kept.sums) and np.array_equal(again.counts, kept.counts)
    one_answer = _row(row.labels.tolist(), [0] * 9, row.counted.int().tolist())
    assert store.fill("m", [one_answer], Tally.zeros(1, 2), [0]) == [0]


def test_what_is_tried_of_a_family() -> None:
    def tried(text: str) -> list[str]:
        (one,) = baselines.parse_baselines([text], NAMES)
        return [b.row for b in tuning.candidates(one)]

    assert tried("uniform") == ["uniform"] and tried("ties:density=0.3") == ["ties (density=0.3)"]
    assert tried("arrow:k=1") == ["arrow top-1"]
    assert "arrow top-2" in tried("arrow:k=2") and len(tried("arrow:k=2")) == 3
    assert "ties (density=0.2, scale=2)" in tried("ties")
    for name in tuning._TRIED:  # every setting that is tried is one that there is
        (one,) = baselines.parse_baselines([name], NAMES)
        assert set(tuning._TRIED[name]) <= set(one.settings)
