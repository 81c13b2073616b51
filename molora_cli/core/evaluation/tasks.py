"""Answers and whether they are right: numbers, SQL, programs; generated greedily, one prompt at a time."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from molora_cli.core.evaluation import sandbox, sql
from molora_cli.core.evaluation.lab import Lab
from molora_cli.core.evaluation.lines import RouterFile
from molora_cli.core.evaluation.sets import blend_parts, spaced
from molora_cli.core.generate import stream
from molora_cli.core.training.data import Example
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```[\w+-]*\n(.*?)(?:\n```|\Z)", re.S)
_LONGEST = 20_000  # characters of a program that is parsed: more than that can crash the parser
# (reference row, answer) -> right, wrong, or None = this row does not count
Metric = Callable[[Example, str], bool | None]


@dataclass(frozen=True)
class TaskOptions:
    """rows: per domain; max_new_tokens: of an answer; allow_code_execution: run what was written."""

    rows: int
    max_new_tokens: int
    allow_code_execution: bool


@dataclass(frozen=True)
class Task:
    """The rows of one domain that have an answer to check. own: the adapter of "own", None = no such row."""

    name: str
    rows: tuple[Example, ...]
    metrics: dict[str, Metric]
    own: str | None


@dataclass
class Answers:
    """What one model said. right: metric -> one entry a row, NaN = did not count."""

    texts: list[str] = field(default_factory=list)
    right: dict[str, list[float]] = field(default_factory=dict)


# -- which tasks there are ----------------------------------------------------
def check_tasks(
    domains: dict[str, list[Example]],
    given: Sequence[tuple[str, list[Example]]],
    adapters: Sequence[str],
    options: TaskOptions,
) -> list[Task]:
    """The domains, and sets of one question, whose rows can be checked. Raises InputError where none can, or
    where programs are to be run and cannot be fenced in."""
    if options.allow_code_execution:
        sandbox.fence()
    tasks = []
    for name, rows in [*domains.items(), *given]:
        usable = [
            r for r in rows if [m.role for m in r.messages if m.role != "system"] == ["user", "assistant"]
        ]
        metrics = _metrics(usable, options) if usable else {}
        if name not in domains and any(
            not blend_parts(s.label, adapters) for r in usable for s in r.segments
        ):
            continue  # two questions in one prompt have no one answer
        if metrics:
            own = name if name in adapters else None
            tasks.append(Task(name, tuple(spaced(usable, options.rows)), metrics, own))
    if not tasks:
        raise InputError(
            "--tasks found no row whose answer can be checked",
            'rows with "#### number", SQL on tables of the prompt, or Python code are',
        )
    return tasks


def _metrics(rows: Sequence[Example], options: TaskOptions) -> dict[str, Metric]:
    """What the answers of these rows can be checked for, read off the references."""

    def most(holds: Callable[[Example], bool]) -> bool:
        return 2 * sum(map(holds, rows)) > len(rows)

    if most(lambda r: sql.looks_like_sql(_question(r), _reference(r))):
        return {"exact": _sql_exact, "execution": _sql_execution}
    if most(lambda r: final_number(_reference(r)) is not None):
        return {"answer": _number_right}
    if most(lambda r: bool(r.tests) or r.answer is not None or "```python" in _reference(r)):
        found: dict[str, Metric] = {"parses": lambda row, text: parses(text)}
        if options.allow_code_execution and any(r.tests for r in rows):
            found["passes"] = lambda row, text: (
                sandbox.passes(program(text), row.tests) if row.tests else None
            )
        if options.allow_code_execution and any(r.answer is not None for r in rows):
            found["answer"] = _printed
        return found
    return {}


def _one_question(row: Example) -> bool:
    return [m.role for m in row.messages if m.role != "system"] == ["user", "assistant"]


def _question(row: Example) -> str:
    return next(m.content for m in row.messages if m.role == "user")


def _reference(row: Example) -> str:
    return row.messages[-1].content


# -- metrics ------------------------------------------------------------------
def final_number(text: str) -> float | None:
    """The number after the last "####"; without one, none: a number elsewhere may be any number."""
    _, found, after = text.rpartition("####")
    match = _NUMBER.search(after) if found else None
    return None if match is None else float(match[0].replace(",", ""))


def _number_right(row: Example, text: str) -> bool | None:
    wanted = final_number(_reference(row))
    return None if wanted is None else _equal(final_number(text), wanted)


def _equal(found: float | None, wanted: float) -> bool:
    return found is not None and abs(found - wanted) <= 1e-6 * max(1.0, abs(wanted))


def _sql_exact(row: Example, text: str) -> bool:
    return sql.normalised(text) == sql.normalised(_reference(row))


def _sql_execution(row: Example, text: str) -> bool | None:
    return sql.same_result(_question(row), _reference(row), text)


def program(text: str) -> str:
    """The first fenced block of an answer; the whole of it where there is none."""
    match = _FENCE.search(text)
    return match[1] if match else text


def parses(text: str) -> bool:
    """Whether the program in an answer is Python with a statement that is more than a name or a text."""
    code = program(text)
    if len(code) > _LONGEST:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes and the like
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    plain = (ast.Name, ast.Constant, ast.Attribute)
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, plain)) for node in tree.body)


def _passes(row: Example, text: str) -> bool | None:
    return sandbox.passes(program(text), row.tests) if row.tests else None


def _printed(row: Example, text: str) -> bool | None:
    if row.answer is None:
        return None
    output = sandbox.output_of(program(text))
    numbers = _NUMBER.findall(output or "")
    wanted = _NUMBER.search(row.answer)
    if wanted is None:
        return output is not None and output.strip() == row.answer.strip()
    found = float(numbers[-1].replace(",", "")) if numbers else None
    return _equal(found, float(wanted[0].replace(",", "")))


# -- running ------------------------------------------------------------------
def run_tasks(
    lab: Lab,
    tasks: Sequence[Task],
    routers: Sequence[RouterFile],
    options: TaskOptions,
    *,
    ticker: Ticker = no_ticks,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Task -> model -> metric -> {value, low, high, right, counted}: base, own adapter, and every router with
    the k of its file. Intervals: bootstrap over rows."""
    model = lab.routed()
    stacks = {r.title: lab.router(r.path) for r in routers}
    models = ["base", "own", *stacks]
    total = sum(len(t.rows) for t in tasks) * len(models)
    done = 0
    document: dict[str, Any] = {}
    for task in tasks:
        document[task.name] = {}
        for name in models:
            if name == "own" and task.own is None:
                done += len(task.rows)
                continue
            model.router = stacks.get(name)
            route = {"base": "off", "own": task.own or ""}.get(name, "auto")
            answers = Answers(right={metric: [] for metric in task.metrics})
            for row in task.rows:
                ticker(done, total, f"{task.name}: {name}")
                text = answer(model, row, route, options.max_new_tokens)
                answers.texts.append(text)
                for metric, check in task.metrics.items():
                    right = check(row, text)
                    answers.right[metric].append(np.nan if right is None else float(right))
                done += 1
            document[task.name][name] = {
                "rows": len(task.rows),
                **{metric: _interval(found) for metric, found in answers.right.items()},
                "answers": answers.texts,
            }
    if options.allow_code_execution:
        note(f"programs that were written were run: {sandbox.fence().described}")
    return document


def answer(model: Any, row: Example, route: str, max_new_tokens: int) -> str:
    """The greedy answer to a row's question. route: "auto", "off" or an adapter's name."""
    messages = [{"role": m.role, "content": m.content} for m in row.messages[:-1]]
    events = stream(model, messages, route=route, max_new_tokens=max_new_tokens, temperature=0.0)
    return "".join(event.text for event in events)


def _interval(right: Sequence[float]) -> dict[str, Any]:
    values = np.array(right, dtype=float)
    values = values[~np.isnan(values)]
    if not len(values):
        return {"value": None, "low": None, "high": None, "right": 0, "counted": 0}
    rng = np.random.default_rng(0)
    draws = values[rng.integers(0, len(values), size=(1000, len(values)))].mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return {
        "value": round(float(values.mean()), 6),
        "low": round(float(low), 6),
        "high": round(float(high), 6),
        "right": int(values.sum()),
        "counted": len(values),
    }
