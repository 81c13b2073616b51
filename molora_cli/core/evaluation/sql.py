"""SQL answers: the same text, and the same result on a small database made for the question.

Tables come from the question's CREATE TABLE lines. They are filled so that the reference query finds
something: rows that hold its literals, the same rows with one literal changed, and other rows. A query is
only counted where the reference's result is not empty. Queries run in SQLite, in memory, with reading
allowed and nothing else, a limit on steps and one on sizes.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Sequence, Set
from typing import Any

_TABLE = re.compile(r"CREATE\s+TABLE\s+([\"`\[]?\w+[\"`\]]?)\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", re.I)
_LITERAL = r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|-?\d+(?:\.\d+)?|\w+"
_TEXT = re.compile(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")")
_AGGREGATE = re.compile(r"\b(MAX|MIN|COUNT|SUM|AVG)\s+(\"[^\"]+\"|(?!FROM\b)[A-Za-z_]\w*)(?=\s+FROM\b)", re.I)
_PLAIN = re.compile(r"[A-Za-z_]\w*")
_WORDS = """
add all and as asc between by case check column default desc else end exists for foreign from group having in
index into is join key left like limit not null of on or order primary references right select set table then
to transaction union unique update using values when where with
"""
_KEYWORDS = frozenset(_WORDS.split())
_STEPS = 200_000
_ROWS = 1000
_LIMIT_LENGTH, _LIMIT_SQL_LENGTH = 0, 1  # sqlite3.h: SQLITE_LIMIT_LENGTH, SQLITE_LIMIT_SQL_LENGTH
_HARMLESS = """
abs avg coalesce count ifnull instr length like lower ltrim max min nullif round rtrim substr sum total trim
upper
"""
_FUNCTIONS = frozenset(_HARMLESS.split())
_ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
Table = tuple[str, tuple[str, ...]]


def normalised(query: str) -> str:
    """The text that exact match compares: blanks made one, no semicolon or code fence around it."""
    text = query.strip()
    fenced = re.fullmatch(r"```\w*\n(.*?)\n?```", text, re.S)
    text = " ".join((fenced[1] if fenced else text).split())
    return text.rstrip("; ")


def looks_like_sql(prompt: str, reference: str) -> bool:
    """Whether a row asks for a query on tables that its question names."""
    return bool(_TABLE.search(prompt)) and normalised(reference).upper().startswith("SELECT")


def same_result(prompt: str, reference: str, answer: str) -> bool | None:
    """Whether both queries give the same rows, in any order; None where the reference does not count: it
    fails on the tables of the prompt, or finds nothing in them."""
    tables = read_tables(prompt)
    gold = normalised(reference)
    wanted = run(tables, gold, gold)
    if not wanted or all(all(v is None or v == 0 for v in row) for row in wanted):
        return None
    found = run(tables, gold, normalised(answer))
    return found is not None and sorted(map(repr, found)) == sorted(map(repr, wanted))


def read_tables(prompt: str) -> list[Table]:
    """(name, columns) of every CREATE TABLE in the prompt, types and constraints left out."""
    found = []
    for match in _TABLE.finditer(prompt):
        columns = []
        for part in re.split(r",(?![^(]*\))", match[2]):
            words = part.split()
            if words and words[0].upper() not in ("PRIMARY", "FOREIGN", "UNIQUE", "CHECK", "CONSTRAINT"):
                columns.append(_plain(words[0]))
        if columns:
            found.append((_plain(match[1]), tuple(dict.fromkeys(columns))))
    return found


def run(tables: Sequence[Table], gold: str, query: str) -> list[tuple[Any, ...]] | None:
    """The rows of `query` on the tables filled for `gold`; None where it fails or takes too long."""
    connection = sqlite3.connect(":memory:")
    try:
        _fill(connection, tables, gold)
        if hasattr(connection, "setlimit"):  # Python 3.11
            connection.setlimit(_LIMIT_LENGTH, 1_000_000)
            connection.setlimit(_LIMIT_SQL_LENGTH, 100_000)
        steps = itertools.count()
        connection.set_progress_handler(lambda: int(next(steps) > _STEPS // 1000), 1000)
        connection.set_authorizer(_authorise)
        rows = connection.execute(_runnable(query, tables)).fetchmany(_ROWS)
        return [tuple(row) for row in rows]
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError):
        return None
    finally:
        connection.close()


def _authorise(action: int, first: str | None, second: str | None, *_: object) -> int:
    """Reading, and functions that cannot grow a value without end."""
    if action in _ALLOWED:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second is not None and second.lower() in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _fill(connection: sqlite3.Connection, tables: Sequence[Table], gold: str) -> None:
    for name, columns in tables:
        listed = ", ".join(_quoted(c) for c in columns)
        connection.execute(f"CREATE TABLE {_quoted(name)} ({listed})")
        marks = ", ".join("?" * len(columns))
        rows = _rows(columns, conditions(gold, columns), aggregated(gold, columns))
        connection.executemany(f"INSERT INTO {_quoted(name)} VALUES ({marks})", rows)


def conditions(query: str, columns: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """Column -> (operator, literal) of the comparisons in a query; the last where a column has several."""
    found: dict[str, tuple[str, Any]] = {}
    for column in columns:
        word = re.escape(column)
        for match in re.finditer(
            rf"(?<![\w.]){word}[\"`\]]?\s*(<>|[<>=!]=?|LIKE\b)\s*({_LITERAL})", query, re.I
        ):
            found[column] = (match[1].upper(), _literal(match[2]))
    return found


def _literal(word: str) -> Any:
    if word[0] in "'\"":
        return word[1:-1].replace(word[0] * 2, word[0])
    try:
        return float(word) if "." in word else int(word)
    except ValueError:
        return word


def aggregated(query: str, columns: Sequence[str]) -> set[str]:
    """Columns that a query takes the sum, mean, largest or smallest of."""
    return {
        c
        for c in columns
        if re.search(rf"\b(?:MAX|MIN|SUM|AVG|TOTAL)[\s(]+[\"`\[]?{re.escape(c)}(?!\w)", query, re.I)
    }


def _rows(columns: Sequence[str], wanted: dict[str, tuple[str, Any]], numeric: Set[str]) -> list[list[Any]]:
    """Three rows that meet all conditions, two per condition that miss that one alone, and four others.

    Numbers of rows that miss lie above and below those of rows that meet, so that a sum, a mean or an extreme
    over too many rows is another one.
    """
    rows: list[list[Any]] = []

    def add(missed: str | None, *, others: bool = False) -> None:
        number = len(rows)
        values = []
        for place, column in enumerate(columns):
            if column in wanted and not others:
                values.append(_value(*wanted[column], number, miss=column == missed))
            elif column in numeric or isinstance(wanted.get(column, ("", ""))[1], int | float):
                away = 0 if missed is None and not others else (-1) ** number * (100 + 13 * number)
                values.append(1000 + 7 * number + place + away)
            else:
                values.append(f"{column} {number}")
        rows.append(values)

    for _ in range(3):
        add(None)
    for column in wanted:
        add(column)
        add(column)
    for _ in range(4):
        add(None, others=True)
    return rows


def _value(operator: str, literal: Any, number: int, *, miss: bool) -> Any:
    """A value that meets `column operator literal`, or misses it."""
    if isinstance(literal, str):
        meets = f"{literal} z{number}" if operator in (">", "!=", "<>") else literal
        if operator == "<":
            meets = literal[:-1]
        if operator == "LIKE":
            meets = literal.replace("%", f"x{number}").replace("_", "y")
        other = literal if operator in (">", "!=", "<>", "<") else f"other {number}"
        return other if miss else meets
    above = operator in (">", ">=") or (operator in ("!=", "<>"))
    meets = literal + 1 + number if above else literal - 1 - number if operator in ("<", "<=") else literal
    other = literal - 1 - number if above else literal + 1 + number
    if miss and operator in ("!=", "<>"):
        return literal
    return other if miss else meets


def _plain(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] in "\"`['" else word


def _quoted(name: str) -> str:
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def _runnable(query: str, tables: Sequence[Table]) -> str:
    """The query as SQLite reads it everywhere.

    Words in double quotes that name nothing are texts; column names that are no plain words (1998_total,
    from, res.) are quoted where they stand before a comparison or are what is selected; `SELECT MAX col`, as
    some data sets write it, is `SELECT MAX(col)`.
    """
    names = {n.lower() for name, columns in tables for n in (name, *columns)}
    odd = sorted(
        {c for _, columns in tables for c in columns if not _PLAIN.fullmatch(c) or c.lower() in _KEYWORDS},
        key=len,
        reverse=True,
    )
    parts = _TEXT.split(query)  # every second one is a quoted text
    for place, part in enumerate(parts):
        if place % 2 == 0:
            for name in odd:
                word = re.escape(name)
                part = re.sub(
                    rf"(?<![\w\"]){word}(?=\s*(?:[<>=!]|LIKE\b))|(?<=SELECT ){word}(?![\w\"(])"
                    rf"|(?<=\b(?:MAX|MIN|SUM|AVG) ){word}(?![\w\"(])|(?<=\bCOUNT ){word}(?![\w\"(])",
                    lambda match: _quoted(match[0]),
                    part,
                    flags=re.I,
                )
            parts[place] = _AGGREGATE.sub(r"\1(\2)", part)
        elif part[0] == '"' and _plain(part).lower() not in names:
            inner = part[1:-1].replace('""', '"').replace("'", "''")
            parts[place] = f"'{inner}'"
    return "".join(parts)
