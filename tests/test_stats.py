"""Statistics of traces against counts made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from molora_cli.core.counting import Counting, summarise
from molora_cli.core.stats import BINS, PSEUDO, Part, Stats
from molora_cli.core.trace import Trace


def _trace(first: list[int], starts: list[int] = [0], **other: object) -> Trace:  # noqa: B006
    n = len(first)
    settings: dict[str, object] = {
        "token_ids": np.arange(n),
        "starts": np.array(starts),
        "indices": np.array(first, np.int16).reshape(n, 1, 1),
        "gates": np.ones((n, 1, 1), np.float32),
        "adapters": ("a", "b"),
        **other,
    }
    trace = Trace(**settings)  # type: ignore[arg-type]
    trace.check()
    return trace


def test_shares_switches_and_transitions() -> None:
    trace = _trace([0, 0, 1, -1, 1, 1], [0, 4], domains=("x", "y"))
    stats = summarise(trace)
    group = stats.groups[0]
    assert stats.names == ["a", "b", "base"] and stats.knows_base and stats.uniform == pytest.approx(1 / 3)
    assert group.total.share == pytest.approx([2 / 6, 3 / 6, 1 / 6])
    assert group.total.mass == group.total.share
    # the pair across the documents (base to b) is no neighbour
    assert group.total.neighbours == 4 and group.total.switch_rate == pytest.approx(50.0)
    assert group.transitions == [[1, 1, 0], [0, 1, 1], [0, 0, 0]]
    x, y = group.domains
    assert (x.name, x.tokens, x.documents, x.neighbours) == ("x", 4, 1, 3)
    assert x.share == pytest.approx([0.5, 0.25, 0.25]) and x.switch_rate == pytest.approx(200 / 3)
    assert y.share == pytest.approx([0, 1, 0]) and y.switch_rate == 0
    assert group.dead == [] and stats.warnings() == []


def test_ties_are_split_and_mass_is_the_mean_gate() -> None:
    indices = np.array([[[0, 1]], [[0, 1]]], np.int16)
    gates = np.array([[[0.5, 0.5]], [[0.25, 0.75]]], np.float32)
    total = summarise(_trace([0, 0], indices=indices, gates=gates)).groups[0].total
    assert total.share == pytest.approx([0.25, 0.75, 0])
    assert total.mass == pytest.approx([0.375, 0.625, 0])


def test_entropy_and_margin() -> None:
    p = np.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    with np.errstate(divide="ignore"):
        scores = np.log(p).astype(np.float32).reshape(2, 1, 3)
    trace = _trace([0, 0], scores=scores, experts=("a", "b", "__base__"))
    total = summarise(trace).groups[0].total
    assert total.entropy is not None and total.margin is not None
    assert total.entropy.mean == pytest.approx(0.75, abs=1e-6)
    assert total.margin.mean == pytest.approx((0.25 + 1) / 2, abs=1e-6)
    assert total.margin.p50 == pytest.approx(0.625, abs=1e-6)
    # one token has 1.5 bits of log2 3 and margin 0.25, the other 0 bits and margin 1
    assert total.entropy.limit == pytest.approx(math.log2(3)) and sum(total.entropy.bins) == 2
    assert total.entropy.bins[0] == 1 and total.entropy.bins[int(1.5 / math.log2(3) * BINS)] == 1
    assert total.margin.bins[BINS // 4] == 1 and total.margin.bins[-1] == 1 and len(total.margin.bins) == BINS
    uniform = _trace([0], scores=np.log(np.full((1, 1, 2), 0.5, np.float32)), experts=("a", "b"))
    entropy = summarise(uniform).groups[0].total.entropy
    assert entropy is not None and entropy.mean == pytest.approx(1.0)
    assert summarise(_trace([0])).groups[0].total.entropy is None


def test_the_template_is_left_out_unless_asked_for() -> None:
    # two chats: template on b around a's content, the second with a message after the template between
    first, content = [1, 0, 0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1, 0, 1, 1]
    ids = np.array([9, 5, 5, 9, 9, 5, 9, 7, 5])
    trace = _trace(first, [0, 4], token_ids=ids, content=np.array(content, bool), domains=("x", "y"))
    stats = summarise(trace)
    assert (stats.tokens, stats.template_tokens, stats.template_counted) == (5, 4, False)
    total = stats.groups[0].total
    assert total.tokens == 5 and total.share == pytest.approx([4 / 5, 1 / 5, 0])
    # neighbours are those of the content alone: 5 5 | 5 7 5
    assert total.neighbours == 3 and total.switch_rate == pytest.approx(200 / 3)
    assert stats.groups[0].transitions == [[1, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert stats.groups[0].position_tokens == [2, 3]
    assert [[t.token for t in listed] for listed in stats.groups[0].top_tokens] == [[5], [], []]
    assert [(d.name, d.tokens, d.documents) for d in stats.groups[0].domains] == [("x", 2, 1), ("y", 3, 1)]
    whole = summarise(trace, template=True)
    assert (whole.tokens, whole.template_tokens, whole.template_counted) == (9, 4, True)
    trace.content = None
    same = summarise(trace)
    assert whole.groups == same.groups and same.template_tokens == 0


def test_chats_without_content_have_empty_statistics() -> None:
    stats = summarise(_trace([1, 0], content=np.zeros(2, bool), domains=("x",)))
    assert stats.tokens == 0 and stats.groups[0].total.share == [0, 0, 0] and stats.warnings() == []


def test_lift() -> None:
    # token 5: 6 of 8 on a; token 6: never on a, 8 times; share of a is 6 / 16
    ids = np.array([5] * 8 + [6] * 8)
    trace = _trace([0] * 6 + [1] * 10, token_ids=ids, pieces={5: "five"})
    top_a, top_b, top_base = summarise(trace).groups[0].top_tokens
    share = 6 / 16
    assert [(t.token, t.text, t.taken, t.count) for t in top_a] == [(5, "five", 6.0, 8)]
    assert top_a[0].lift == pytest.approx((6 + PSEUDO * share) / (8 + PSEUDO) / share)
    assert [t.token for t in top_b] == [6] and top_base == []
    assert summarise(trace, top=0).groups[0].top_tokens == [[], [], []]


def test_rare_tokens_are_not_listed() -> None:
    trace = _trace([0, 0, 1, 1], token_ids=np.array([1, 1, 2, 2]))
    assert summarise(trace).groups[0].top_tokens == [[], [], []]


def test_positions_are_counted_from_each_document() -> None:
    trace = _trace([0, 1, 1, 0, 1, 1], [0, 3])
    group = summarise(trace).groups[0]
    assert group.position_tokens == [2, 4]  # first tokens, then the second and third
    assert group.positions[0] == pytest.approx([1, 0, 0]) and group.positions[1] == pytest.approx([0, 1, 0])


def test_groups_are_apart_and_dead_adapters_named() -> None:
    n = 100
    indices = np.stack([np.zeros((n, 1)), np.ones((n, 1))], axis=1).astype(np.int16)
    trace = _trace(
        [0] * n,
        [0, 2],
        indices=indices,
        gates=np.ones((n, 2, 1), np.float32),
        domains=("x", "y"),
        meta={"groups": [[0, 2], [2, 4]]},
    )
    stats = summarise(trace)
    assert [g.layers for g in stats.groups] == [(0, 2), (2, 4)]
    assert [g.dead for g in stats.groups] == [["b"], ["a"]]
    warnings = stats.warnings()
    assert len(warnings) == 4
    assert "no token in layer group 0 goes to b (of 100 tokens)" in warnings[0]
    assert "collapsed" in warnings[1]


def test_a_short_text_without_an_adapter_is_no_finding() -> None:
    stats = summarise(_trace([0] * 8))
    assert stats.groups[0].dead == ["b"] and stats.warnings() == []


def test_empty_and_single() -> None:
    empty = Trace(
        np.zeros(0, np.int64),
        np.zeros(0, np.int64),
        np.zeros((0, 1, 1), np.int16),
        np.zeros((0, 1, 1), np.float32),
        ("a",),
    )
    total = summarise(empty).groups[0].total
    assert total.tokens == 0 and total.switch_rate is None and total.share == [0, 0]
    one = summarise(_trace([1]))
    assert one.groups[0].total.neighbours == 0 and one.groups[0].total.switch_rate is None
    assert one.groups[0].dead == ["a"]


def test_document_is_plain_json() -> None:
    import json

    rng = np.random.default_rng(0)
    trace = _trace(rng.integers(-1, 2, 50).tolist(), token_ids=rng.integers(0, 5, 50), pieces={1: "\udcf0"})
    document = json.loads(json.dumps(summarise(trace).document(), allow_nan=False))
    assert math.isclose(sum(document["groups"][0]["total"]["share"]), 1.0)


def _parts(stats: Stats) -> list[Part]:
    group = stats.groups[0]
    return [group.total, *sorted(group.domains, key=lambda part: part.label)]


def test_counting_in_parts_gives_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 60)
    n = int(lengths.sum())
    starts = (np.cumsum(lengths) - lengths).tolist()
    logits = rng.normal(size=(n, 1, 3)) * 3
    scores = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    whole = _trace(
        rng.integers(-1, 2, n).tolist(),
        starts,
        token_ids=rng.integers(0, 50, n),
        scores=scores,
        experts=("a", "b", "__base__"),
        domains=tuple(rng.choice(["x", "y"], 60).tolist()),
        content=rng.random(n) > 0.2,
    )
    counting = Counting()
    for first in range(0, 60, 7):
        documents = slice(first, min(first + 7, 60))
        begin = starts[first]
        end = starts[documents.stop] if documents.stop < 60 else n
        part = {
            name: getattr(whole, name)[begin:end]
            for name in ("token_ids", "indices", "gates", "scores", "content")
        }
        counting.add(
            replace(
                whole,
                **part,
                starts=np.array(starts[documents]) - begin,
                domains=whole.domains[documents],
            )
        )
    exact, parts = summarise(whole), counting.stats(whole.text)
    for name in ("share", "mass"):
        for one, other in zip(_parts(parts), _parts(exact), strict=True):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-12)
    for one, other in zip(_parts(parts), _parts(exact), strict=True):
        assert one.entropy is not None and other.entropy is not None
        assert (one.tokens, one.documents, one.switch_rate) == (
            other.tokens,
            other.documents,
            other.switch_rate,
        )
        assert one.entropy.bins == other.entropy.bins and one.entropy.p50 == other.entropy.p50
    assert parts.groups[0].transitions == exact.groups[0].transitions
    assert parts.groups[0].position_tokens == exact.groups[0].position_tokens
    assert [[t.token for t in listed] for listed in parts.groups[0].top_tokens] == [
        [t.token for t in listed] for listed in exact.groups[0].top_tokens
    ]
    assert (counting.tokens, counting.documents) == (n, 60)
    # beyond EXACT values quantiles are read from fine steps; nothing else changes
    monkeypatch.setattr("molora_cli.core.counting.EXACT", 100)
    coarse = summarise(whole).groups[0].total.margin
    fine = exact.groups[0].total.margin
    assert coarse is not None and fine is not None and (coarse.mean, coarse.bins) == (fine.mean, fine.bins)
    for name in ("p10", "p50", "p90"):
        assert getattr(coarse, name) == pytest.approx(getattr(fine, name), abs=0.02)
