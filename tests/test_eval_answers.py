"""Answers and whether they are right: numbers, SQL on made tables, programs and the fence around them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from molora_cli.core.evaluation import sandbox, sql, tasks
from molora_cli.core.training.data import Example, Message, Segment
from molora_cli.errors import InputError

TABLE = "CREATE TABLE data (player, 2010, from, total)\nWhich one?"
OPTIONS = tasks.TaskOptions(rows=5, max_new_tokens=8, allow_code_execution=False)


def _row(question: str, answer: str, **options: object) -> Example:
    return Example((Message("user", question), Message("assistant", answer)), None, None, 1, **options)  # type: ignore[arg-type]


# -- numbers ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so\n#### 12", 12),
        ("#### 1,234.50 dollars", 1234.5),
        ("#### 3\n#### -4", -4),
        ("it is 12", None),
        ("####", None),
    ],
)
def test_the_final_answer_is_the_number_after_the_last_mark(text: str, number: float | None) -> None:
    assert tasks.final_number(text) == number


# -- SQL ----------------------------------------------------------------------
GOLD = 'SELECT player FROM data WHERE 2010 > 5 AND from = "new york"'


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        (GOLD, True),
        ("select player from data where from = 'new york' and 2010 > 5;", True),
        ("```sql\n" + GOLD + "\n```", True),
        ("SELECT player FROM data WHERE 2010 > 5", False),
        ('SELECT player FROM data WHERE 2010 < 5 AND from = "new york"', False),
        ('SELECT total FROM data WHERE 2010 > 5 AND from = "new york"', False),
        ("SELECT nothing FROM data", False),
        ("I do not know.", False),
        ("", False),
    ],
)
def test_a_query_is_right_where_its_result_is(answer: str, same: bool) -> None:
    assert sql.same_result(TABLE, GOLD, answer) is same


def test_aggregates_tell_too_many_rows_apart_and_unanswerable_references_do_not_count() -> None:
    gold = 'SELECT MIN total FROM data WHERE player = "a b"'
    assert sql.same_result(TABLE, gold, 'SELECT min(total) FROM data WHERE player = "a b"') is True
    for function in ("MIN", "MAX", "SUM", "AVG"):
        gold = f'SELECT {function} total FROM data WHERE player = "a b"'
        assert sql.same_result(TABLE, gold, f"SELECT {function}(total) FROM data") is False
    assert sql.same_result(TABLE, "SELECT absent FROM data", GOLD) is None
    assert sql.same_result("no table", GOLD, GOLD) is None


def test_queries_can_only_read_and_cannot_run_for_ever(tmp_path: Path) -> None:
    tables = sql.read_tables(TABLE)
    file = tmp_path / "x.db"
    began = time.monotonic()
    for query in (
        f"ATTACH DATABASE '{file}' AS other",
        "DROP TABLE data",
        "INSERT INTO data (player) VALUES ('x')",
        "SELECT randomblob(1000000000)",
        "SELECT load_extension('x')",
        "PRAGMA database_list",
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
        "SELECT count(*) FROM data a, data b, data c, data d, data e, data f, data g, data h, data i",
    ):
        assert sql.run(tables, GOLD, query) is None, query
    assert not file.exists() and time.monotonic() - began < 20


@pytest.mark.slow
def test_every_reference_that_runs_is_right_and_without_its_conditions_wrong(data: Path) -> None:
    from molora_cli.core.training.data import read_examples

    counted = 0
    for row in read_examples(data / "sql.val.jsonl"):
        prompt, gold = row.contents
        found = sql.same_result(prompt, gold, gold)
        assert found is not False
        counted += found is True
        if found and " WHERE " in gold:
            assert sql.same_result(prompt, gold, gold.partition(" WHERE ")[0]) is False, gold
    assert counted > 80


# -- programs -----------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("```python\ndef f():\n    return 1\n```\nDone.", True),
        ("def f(): return 1", True),
        ("```python\ndef f(:\n```", False),
        ("Sorry", False),
        ("", False),
        ("x = " + "(" * 9000, False),
        ("x = '" + "a" * 30_000 + "'", False),
        ("x = '\0'", False),
    ],
)
def test_code_parses(text: str, fine: bool) -> None:
    assert tasks.parses(text) is fine


def test_tasks_are_read_off_the_references(tmp_path: Path) -> None:
    def names(row: Example) -> list[str]:
        return list(tasks.check_tasks({"x": [row]}, [], ("x",), OPTIONS)[0].metrics)

    assert names(_row("How many?", "two\n#### 2")) == ["answer"]
    assert names(_row(TABLE, GOLD)) == ["exact", "execution"]
    assert names(_row("Write f.", "```python\ndef f(): pass\n```", tests=("assert f() is None",))) == [
        "parses"
    ]
    with pytest.raises(InputError, match="no row"):
        tasks.check_tasks({"x": [_row("Hello?", "Hi.")]}, [], ("x",), OPTIONS)
    two = _row("How many?", "two\n#### 2", segments=(Segment(0, 0, 3, "x"),))
    with pytest.raises(InputError):  # parts of a mix have no one answer
        tasks.check_tasks({}, [("mix", [two])], ("x",), OPTIONS)


posix = pytest.mark.skipif(os.name != "posix", reason="programs are only run on POSIX systems")


@posix
def test_programs_pass_or_fail_their_tests() -> None:
    tests = ["assert f(2) == 3"]
    assert sandbox.passes("def f(x):\n    return x + 1", tests)
    assert not sandbox.passes("def f(x):\n    return x", tests)
    assert not sandbox.passes("raise SystemExit(0)", tests), "leaving early is not passing"
    assert not sandbox.passes("import sys\nsys.modules.clear()\nimport os\nos._exit(0)", tests)
    assert sandbox.output_of("print(6 * 7)") == "42\n"


@posix
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are Linux's")
@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.fork()",
        "x = 'a' * (3 << 30)",
        "open('big', 'wb').write(b'0' * (8 << 20))",
        "files = [open('f%d' % i, 'w') for i in range(500)]",
    ],
)
def test_limits_hold(program: str) -> None:
    assert not sandbox.run(program, sandbox.fence()).finished


@posix
def test_a_program_is_alone_and_killed_with_all_it_started() -> None:
    made = sandbox.fence()
    seen = sandbox.run("import os\nprint(sorted(os.environ), os.listdir('.'), os.getuid())", made)
    assert seen.finished and "MOLORA" not in seen.output and "HOME" not in seen.output and "[]" in seen.output
    if made.user is not None:
        assert str(made.user) in seen.output
    if made.namespaces:
        net = "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)"
        assert not sandbox.run(net, made).finished
        assert sandbox.run("import os\nprint(len(os.listdir('/sys/class/net')) if 0 else 1)", made).finished
    began = time.monotonic()
    assert not sandbox.run("import time\ntime.sleep(60)", made, seconds=1.5).finished
    assert time.monotonic() - began < 20
