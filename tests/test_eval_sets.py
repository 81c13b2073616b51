"""What `molora eval` computes from numbers and rows alone: shares, intervals, sets, overlaps, baselines."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from molora_cli.core.evaluation import baselines, sets, tally
from molora_cli.core.training.data import Example, Message
from molora_cli.core.training.mixing import labelled
from molora_cli.core.training.overlap import Seen, pack
from molora_cli.errors import InputError

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


def test_recovered_is_the_share_of_the_gain_and_the_own_adapter_is_all_of_it() -> None:
    base = tally.Tally(np.array([[20.0, 0], [0, 30]]), np.array([[10.0, 0], [0, 10]]))
    own = tally.Tally(np.array([[10.0, 0], [0, 10]]), base.counts)
    half = tally.Tally(np.array([[15.0, 0], [0, 25]]), base.counts)
    draws = tally.Bootstrap(["a", "b"], draws=200)
    b, o, h = (draws.means(t) for t in (base, own, half))
    assert tally.recovered(b, o, o).mean.value == pytest.approx(1.0)
    share = tally.recovered(b, h, o)
    assert share.value == pytest.approx([0.5, 0.25]) and share.mean.value == pytest.approx(0.375)
    assert share.minus(tally.recovered(b, b, o)).value == pytest.approx(0.375)
    # an adapter without a gain has no share and is left out of the mean
    level = tally.Tally(np.array([[10.0, 0], [0, 30]]), base.counts)
    none = tally.recovered(b, h, draws.means(level))
    assert np.isnan(none.value[1]) and none.mean.value == pytest.approx(0.5)


def test_a_paired_interval_is_narrow_where_methods_differ_by_a_constant() -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(2.0, 1.0, size=(60, 1)) * 10
    counts = np.full((60, 1), 10.0)
    draws = tally.Bootstrap([str(i) for i in range(60)], draws=500)
    first, second = (draws.overall(tally.Tally(x, counts)) for x in (one, one + 1.0))
    assert first.interval(0).high - first.interval(0).low > 0.2
    found = tally.difference(first, second)
    assert found.low == pytest.approx(-0.1) == found.high


def test_rows_of_one_document_are_drawn_together() -> None:
    sums = np.array([[1.0], [2.0], [3.0]])
    draws = tally.Bootstrap(["a", "a", "b"], draws=50)
    assert draws.weights.shape == (50, 2)
    means = draws.means(tally.Tally(sums, np.ones((3, 1))))
    assert set(np.round(means.draws[:, 0], 6)) <= {1.5, 3.0, 2.0}


def test_mixes_hold_every_ordered_pair_alike_and_their_segments_are_their_rows() -> None:
    rows = {
        n: [labelled(_example(n, f"{n} question {i}", f"{n} answer {i}", i), n) for i in range(5)]
        for n in NAMES
    }
    made = dict(sets.make_mixes(rows, 12, max_length=200, seed=1))
    assert list(made) == [sets.TWO_TURN, sets.ONE_TURN, sets.NEW_TEMPLATE]
    assert made == dict(sets.make_mixes(rows, 12, max_length=200, seed=1))
    assert made != dict(sets.make_mixes(rows, 12, max_length=200, seed=2))
    for found in made.values():
        pairs = [tuple(dict.fromkeys(s.label for s in row.segments)) for row in found]
        assert len(set(pairs)) == 6 and all(pairs.count(p) == 2 for p in pairs)
        for row in found:
            for s in row.segments:
                assert row.contents[s.message][s.start : s.end].startswith(s.label)


def test_specs_are_domains_or_sets_and_others_are_refused(tmp_path: Path) -> None:
    plain = _write(tmp_path / "plain.jsonl", _rows("num", 3))
    segment = {"message": 1, "start": 0, "end": 4, "label": "num+low"}
    mixed = _write(tmp_path / "mixed.jsonl", [{**r, "segments": [segment]} for r in _rows("num", 3)])
    domains, given = sets.read_sets([f"num={plain}", str(mixed)], NAMES, 2, 2)
    assert len(domains["num"]) == 2 and [(n, len(r)) for n, r in given] == [("mixed", 2)]
    (_, blend) = sets.build_sets(domains, given, NAMES, mixed=0, max_length=100, seed=0)
    assert blend.blended and blend.names == (*NAMES, "num+low")
    for wrong in (f"other={plain}", str(plain)):
        with pytest.raises(InputError, match="segments"):
            sets.read_sets([wrong], NAMES, None, None)
    segment["label"] = "num+other"
    bad = _write(tmp_path / "bad.jsonl", [{**r, "segments": [segment]} for r in _rows("num", 1)])
    with pytest.raises(InputError, match=r"num\+other"):
        sets.build_sets(
            {}, sets.read_sets([str(bad)], NAMES, None, None)[1], NAMES, mixed=0, max_length=9, seed=0
        )
    with pytest.raises(InputError, match="two domains"):
        sets.build_sets(domains, [], NAMES, mixed=3, max_length=100, seed=0)


def test_documents_that_were_trained_on_are_found_again() -> None:
    rows = [_example("num", f"a question that is long enough, number {i}", f"answer {i}") for i in range(20)]
    seen = Seen({"seen": pack(rows[:10])})
    assert [r in seen for r in rows] == [True] * 10 + [False] * 10
    assert _example("low", rows[3].contents[0].upper(), "another answer") in seen
    assert _example("low", "short", "answer 3") not in seen
    assert not Seen({}).known and Seen({"seen": {"texts": "no base64!"}}).known
    assert rows[0] not in Seen({"seen": {"texts": "no base64!"}})


def test_baselines_are_parsed_and_wrong_ones_refused() -> None:
    found = baselines.parse_baselines(["ties:density=0.2,uniform", "blend:num=0.7:up=0.3"], NAMES)
    assert [b.title for b in found] == ["ties (density=0.2)", "uniform", "0.7 num + 0.3 up"]
    names = {b.name for b in baselines.parse_baselines(["all"], NAMES)}
    assert {"cat", "svd", "ties", "dare", "peft-ties", "arrow"} <= names and "xlora" not in names
    assert baselines.parse_baselines(["none"], NAMES) == []
    for wrong in (
        "magic",
        "ties:rate=2",
        "ties:density=2",
        "uniform:x=1",
        "blend",
        "blend:other=1",
        "svd:rank=x",
    ):
        with pytest.raises(InputError):
            baselines.parse_baselines([wrong], NAMES)
