"""Rows that follow from what was run: *own*, and one adapter for a whole document or for each answer.

One adapter per answer is what a server does that routes turn by turn: where the adapter changes, the keys and
values of the conversation so far are another adapter's, and it is prefilled again. Since attention is causal,
an answer's NLL is then that under its adapter on every token of the document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from molora_cli.core.evaluation import baselines as bl
from molora_cli.core.evaluation.lines import BASE_ROW, OWN_ROW, Line, Measured
from molora_cli.core.evaluation.rows import EvalRow
from molora_cli.core.evaluation.tally import best_choice, chosen_tally, own_tally

_ORDER = ("base", "adapter", "own", "oracle", "baseline", "router")


def derive(measured: Measured, names: set[str], adapters: Sequence[str]) -> None:
    """Add those that `names` asks for, take out the adapters' where they were not asked for, and sort."""
    lines, owner = measured.lines, measured.owner
    base = lines[BASE_ROW]
    tallies = [lines[name].tally for name in adapters]
    choices = [*tallies, base.tally]  # the base's column comes last, as in `Observed`
    blended = measured.set.blended
    derived: list[Line] = []
    if not blended:
        domains = [len(set(r.labels[r.counted].tolist())) for r in measured.rows]
        needs = _passes([n * len(r.ids) for n, r in zip(domains, measured.rows, strict=True)], measured.rows)
        own = own_tally(tallies, base.tally)
        derived.append(Line(OWN_ROW, "own", own, passes=needs, caches=max(domains)))
    for name, groups in ((bl.SEQUENCE_ORACLE, owner), (bl.TURN_ORACLE, None)):
        if name in names:
            best = chosen_tally(choices, best_choice(choices, groups))
            # it has to run all of them to choose
            derived.append(Line(name, "oracle", best, passes=float(len(choices)), caches=len(choices)))
    for router, columns in _prompts(measured).items():
        if bl.SEQUENCE_ROUTER in names:
            choice = np.array([columns[i][0] for i in owner.tolist()])
            derived.append(
                Line(f"{bl.SEQUENCE_ROUTER} ({router})", "baseline", chosen_tally(choices, choice))
            )
        if bl.TURN_ROUTER in names:
            turns = [column for i in range(len(measured.rows)) for column in columns[i]]
            again = _passes([_prefilled(r, columns[i]) for i, r in enumerate(measured.rows)], measured.rows)
            tally = chosen_tally(choices, np.array(turns))
            derived.append(Line(f"{bl.TURN_ROUTER} ({router})", "baseline", tally, passes=again))
    one = next((lines[name].time for name in adapters), None)
    for line in derived:
        line.time = None if one is None or line.passes is None else one * line.passes
    if bl.ADAPTERS not in names and not blended:
        for name in adapters:
            lines.pop(name)
    every = [*lines.values(), *derived]
    measured.lines = {x.title: x for x in sorted(every, key=lambda x: _ORDER.index(x.group))}


def _prompts(measured: Measured) -> dict[str, dict[int, list[int]]]:
    """Router -> row -> for each answer the column its scores over the prompt add up to; one mode of a router
    is as good as another."""
    found: dict[str, dict[int, list[int]]] = {}
    for line in measured.lines.values():
        if line.group == "router" and line.observed is not None:
            found.setdefault(line.title.rpartition(" ")[0], line.observed.prompt)
    return found


def _prefilled(row: EvalRow, columns: Sequence[int]) -> int:
    """Tokens that run in a conversation whose answers take these adapters: all so far where it changes."""
    run, done, before = 0, 0, None
    for (_, end), column in zip(row.spans, columns, strict=True):
        run += end if column != before else end - done
        done, before = end, column
    return run + len(row.ids) - done


def _passes(run: Sequence[float], rows: Sequence[EvalRow]) -> float:
    """Tokens that ran over tokens there are. run: (N,) of each row."""
    return round(float(sum(run)) / sum(len(r.ids) for r in rows), 3)
