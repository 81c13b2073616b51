"""The command around a measurement that was made up: rows, tables, JSON, where results go."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.bench import machine
from molora_cli.core.bench.rows import COLUMNS, append, rows
from molora_cli.errors import InputError
from molora_cli.views.bench import BenchView


def spread(median: float, rounds: int = 5) -> dict[str, Any]:
    return {"median": median, "p25": median * 0.9, "p75": median * 1.1, "rounds": rounds}


def side(name: str, seconds: float, ratios: dict[str, float], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "title": f"title of {name}",
        "seconds": spread(seconds),
        "ratios": {reference: spread(ratio) for reference, ratio in ratios.items()},
        "gb_per_s": 5.0,
        "of_reading": 0.5,
        "gflop_per_s": None,
        "of_product": None,
        "bytes": 1.0,
        "flops": None,
        "notes": [],
        **more,
    }


@pytest.fixture
def document() -> dict[str, Any]:
    return {
        "bench": "decode",
        "case": "context 64, K=4 r=16, a, base",
        "unit": "a token",
        "base": "base",
        "backend": "cpu",
        "clock": "wall clock",
        "command": "molora bench decode",
        "settings": {"dtype": "bfloat16", "threads": 1, "rounds": 5},
        "machine": {
            "machine": "A Processor",
            "features": ["avx2", "fma"],
            "cores": 2,
            "versions": {"molora": "0", "torch": "2"},
            "commit": "abc1234+",
            "date": "2026-01-01T00:00:00Z",
            "load": 0.5,
        },
        "ceilings": {"reading": {"title": "ceiling: a sum", "unit": "GB/s", **spread(10.0)}},
        "sides": [
            side("base", 0.02, {}),
            side("top1", 0.01, {"base": 0.5}, paths={"fused op": 210}, route_changes=1.0, notes=["x", "y"]),
        ],
        "compiled": {"graphs": 1, "recompiled": 0},
        "notes": ["something left out"],
    }


def read(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def test_rows_are_appended_below_one_header(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.csv"
    append(file, rows(document))
    before = file.read_text(encoding="utf-8")
    append(file, rows(document))
    text = file.read_text(encoding="utf-8")
    assert text.startswith(before) and text.count("date,commit") == 1
    found = read(file)
    assert len(found) == 4 and list(found[0]) == list(COLUMNS)
    base, top1 = found[:2]
    assert base["side"] == "base" and base["reference"] == "" and base["ratio"] == ""
    assert (top1["side"], top1["reference"], top1["ratio"]) == ("top1", "base", "0.5")
    assert top1["case"] == "context 64, K=4 r=16, a, base" and top1["features"] == "avx2 fma"
    assert top1["median_s"] == "0.01" and top1["notes"] == "x; y" and top1["gflop_per_s"] == ""
    assert top1["machine"] == "A Processor, 2 cores" and top1["versions"] == "molora=0 torch=2"


def test_a_file_of_another_kind_is_left_alone(document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("name,value\na,1\n", encoding="utf-8")
    with pytest.raises(InputError, match="other columns"):
        append(file, rows(document))
    assert file.read_text(encoding="utf-8") == "name,value\na,1\n"
    file.write_text("", encoding="utf-8")
    append(file, rows(document))
    assert len(read(file)) == 2


def table(document: dict[str, Any], width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(BenchView(document))
    return console.export_text()


def test_the_table(document: dict[str, Any]) -> None:
    text = table(document)
    line = next(row.split() for row in text.splitlines() if row.startswith("top1 "))
    assert line == ["top1", "10.00", "0.50", "[0.45,", "0.55]", "50", "%"]
    assert "reading ceiling 10.0 [9.0, 11.0] GB/s (a sum)" in text
    assert "210 modules: fused op; route changes at 100 % of the tokens; x; y" in text
    assert "graphs compiled: 1, again while timing: 0" in text
    assert "load 0.5" in text and "to base" in text
    document["sides"][1]["title"] = "\x1b[31mred"
    document["sides"][1]["seconds"]["rounds"] = 3
    text = table(document)
    assert "\x1b" not in text and "\\x1b[31mred" in text and "3 rounds only" in text


def test_sides_with_a_reference_each_share_a_column(document: dict[str, Any]) -> None:
    document["sides"] = [
        side("token-1", 0.1, {}),
        side("merged-1", 0.2, {"token-1": 2.0}),
        side("token-2", 0.1, {}),
        side("merged-2", 0.4, {"token-2": 4.0}),
    ]
    text = table(document)
    assert "4.00 [3.60, 4.40] token-2" in text and "to token-1" not in text


@pytest.fixture
def made_up(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`run` gives the document; the jobs it was asked for."""
    jobs: list[Any] = []

    def run(job: Any, **_: Any) -> dict[str, Any]:
        jobs.append(job)
        return dict(document)

    monkeypatch.setattr("molora_cli.core.bench.job.run", run)
    return jobs


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


def test_json_is_one_document(made_up: list[Any], document: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "r.csv"
    done = invoke("decode", "--topk", "1,3", "--sides", "base, top1", "--append", str(file), "--json", "-q")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found.pop("schema_version") == 1 and found.pop("appended") == str(file)
    assert found == document
    assert made_up[0].topk == (1, 3) and made_up[0].sides == ("base", "top1")
    assert len(read(file)) == 2


def test_where_rows_go(made_up: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a checkout's own file where the work is done in it, and nowhere else unasked."""
    monkeypatch.chdir(tmp_path)
    done = invoke("decode")
    assert done.exit_code == 0 and "rows added" not in done.output and "something left out" in done.output
    target = tmp_path / machine.RESULTS
    monkeypatch.setattr(machine, "checkout", lambda: tmp_path)
    done = invoke("decode", "--append", "none")
    assert done.exit_code == 0 and not target.exists()
    done = invoke("decode")
    assert "2 rows added to" in done.output and len(read(target)) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--topk", "1,x"), "--topk 1,x"),
        (("--append", "results.txt"), "not a .csv file"),
    ],
)
def test_wrong_usage(made_up: list[Any], arguments: tuple[str, ...], said: str) -> None:
    done = invoke("decode", *arguments)
    assert isinstance(done.exception, InputError) and said in done.exception.message
    assert made_up == []


def test_a_bench_that_is_not_there() -> None:
    done = invoke("speed", "--append", "none")
    assert isinstance(done.exception, InputError) and "end-to-end" in done.exception.remedy


def test_the_command_is_described_without_torch() -> None:
    code = "import sys, molora_cli.commands.bench; print([m for m in ('torch', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_machine_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = machine.about()
    assert found["machine"] and found["cores"] >= 1 and found["versions"]["torch"]
    assert found["date"].endswith("Z") and isinstance(found["features"], list)
    monkeypatch.chdir(tmp_path)
    assert machine.checkout() is None
    root = Path(machine.__file__).resolve().parents[3]
    if (root / ".git").exists():
        monkeypatch.chdir(root / "docs")
        assert machine.checkout() == root
        head = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert machine.commit().rstrip("+") == head.stdout.strip()
