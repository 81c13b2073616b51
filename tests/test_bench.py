"""`molora bench`: what is measured, how ratios come about, and where rows go. No test here times anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from molora_cli.core.adapter.factors import Factors
from molora_cli.core.bench import ceilings, llama
from molora_cli.core.bench import job as jobs
from molora_cli.core.bench.job import Job, check, choose
from molora_cli.core.bench.material import Material, load_material
from molora_cli.core.bench.ops import op_sides
from molora_cli.core.bench.peft_runners import ARROW, SINGLE, peft_runners
from molora_cli.core.bench.runners import Engine, changes, changing_ids, random_ids
from molora_cli.core.bench.summary import PRODUCT, READ, ceiling_documents, side_documents
from molora_cli.core.bench.timing import SLOW_ROUNDS, SLOW_TURN, Side, interleave, ratios, spread
from molora_cli.core.bench.work import (
    adapter_elements,
    decode_bytes,
    forward_flops,
    resident,
    way,
    weight_bytes,
)
from molora_cli.core.routed.attach import routed_modules
from molora_cli.errors import InputError, MoloraError

FAST = {"rounds": 2, "context": 6, "tokens": 6, "new": 2, "adapters": 2, "rank": 2, "dtype": "float32"}


class Tape:
    """A clock whose sides say how long they take."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def __call__(self) -> float:
        return self.now

    def side(self, name: str, seconds: Iterator[float] | float, **more: Any) -> Side:
        def call() -> None:
            self.order.append(name)
            self.now += seconds if isinstance(seconds, float) else next(seconds)

        return Side(name, name.upper(), call, **more)


def test_sides_take_turns_after_warming_up() -> None:
    tape = Tape()
    warm: list[int] = []
    sides = [tape.side("a", 1.0), tape.side("b", iter([1.0, 1.0, 2.0, 4.0, 6.0]), units=2)]
    times = interleave(sides, 3, tape, warmup=2, warm=lambda: warm.append(len(tape.order)))
    assert tape.order == ["a", "a", "b", "b", *("a", "b") * 3] and warm == [4]
    assert times == {"a": [1.0, 1.0, 1.0], "b": [1.0, 2.0, 3.0]}  # b yields two units a turn
    assert ratios(times["b"], times["a"]) == [1.0, 2.0, 3.0]


def test_what_happens_before_a_turn_is_not_timed() -> None:
    tape = Tape()

    def before() -> None:
        tape.now += 100.0

    times = interleave([tape.side("a", 1.0, before=before)], 2, tape)
    assert times == {"a": [1.0, 1.0]}


def test_a_slow_side_sits_out_most_rounds() -> None:
    tape = Tape()
    times = interleave([tape.side("slow", SLOW_TURN), tape.side("fast", 0.5)], 9, tape)
    assert [i for i, t in enumerate(times["slow"]) if t is not None] == [1, 4, 7]
    assert times["fast"] == [0.5] * 9
    assert tape.order[:3] == ["slow", "fast", "fast"]  # warmed up once
    assert ratios(times["slow"], times["fast"]) == [SLOW_TURN / 0.5] * SLOW_ROUNDS
    few = interleave([tape.side("slow", SLOW_TURN)], 2, tape)
    assert few == {"slow": [SLOW_TURN] * 2}


def test_spread_is_median_and_quartiles() -> None:
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert found is not None and (found.low, found.median, found.high, found.count) == (2.0, 3.0, 4.0, 5)
    assert spread([]) is None
    one = spread([2.0])
    assert one is not None and (one.low, one.median, one.high) == (2.0, 2.0, 2.0)


def test_ratios_and_shares_are_taken_within_rounds() -> None:
    """A machine that slows down by ten in the second half changes no ratio and no share."""
    slowing = [1.0, 1.0, 10.0, 10.0, 10.0]
    times: dict[str, Any] = {
        READ: slowing,
        PRODUCT: slowing,
        "engine": [2.0 * s for s in slowing],
        "routed": [3.0 * s if i != 1 else None for i, s in enumerate(slowing)],
    }
    sides = [
        Side(READ, "ceiling: reading", lambda: None, moved=8e9),
        Side(PRODUCT, "ceiling: product", lambda: None, flops=40e9),
        Side("engine", "e", lambda: None, moved=4e9),
        Side("routed", "r", lambda: None, moved=6e9, flops=12e9, after=lambda: {"notes": ["n"], "paths": {}}),
    ]
    engine, routed = side_documents(sides, times, {"routed": ["engine", "absent"]})
    assert engine["ratios"] == {} and engine["of_product"] is None
    assert list(routed["ratios"]) == ["engine"]
    assert routed["ratios"]["engine"] == {"median": 1.5, "p25": 1.5, "p75": 1.5, "rounds": 4}
    assert engine["of_reading"] == pytest.approx(0.25)  # half the bytes in twice the time
    assert routed["of_reading"] == pytest.approx(0.25) and routed["of_product"] == pytest.approx(0.1)
    assert engine["gb_per_s"] == pytest.approx(4e9 / 20 / 1e9)
    assert routed["notes"] == ["n"] and routed["paths"] == {}
    ceilings = ceiling_documents(sides, times)
    assert ceilings[READ]["median"] == pytest.approx(0.8) and ceilings[READ]["unit"] == "GB/s"
    assert ceilings[PRODUCT]["median"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"bench": "speed"}, "no bench 'speed'"),
        ({"rounds": 0}, "--rounds is 0"),
        ({"threads": -1}, "--threads is -1"),
        ({"topk": (0,)}, "no ways to route"),
        ({"topk": (1, 1)}, "no ways to route"),
        ({"bench": "routing", "tokens": 1}, "--tokens is 1"),
        ({"bundle": Path("b"), "rank": 4}, "--bundle brings its own"),
        ({"busy": True, "threads": 2}, "CPU time of one thread"),
        ({"busy": True, "bench": "end-to-end"}, "CPU time of one thread"),
    ],
)
def test_settings_that_cannot_be(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        check(Job(**{"bench": "decode", **changed}))
    assert error.value.remedy


def test_sides_by_name() -> None:
    there = ["base", "engine", "engine-compiled"]
    assert choose(None, there, there[:2]) == ["base", "engine"]
    assert choose(["engine-compiled", "base"], there, []) == ["base", "engine-compiled"]
    assert choose(["all"], there, []) == there
    with pytest.raises(InputError, match="no side 'engin'"):
        choose(["engin"], there, there)


@pytest.fixture
def measured(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def measure(bench: str, **changed: Any) -> dict[str, Any]:
        monkeypatch.setattr(ceilings, "READ_BYTES", 4096)
        monkeypatch.setattr(ceilings, "EDGE", 16)
        return jobs.run(Job(bench, base=str(tiny_llama), backend="torch", **{**FAST, **changed}))

    return measure


def names(document: dict[str, Any]) -> list[str]:
    return [side["name"] for side in document["sides"]]


def side_of(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(side for side in document["sides"] if side["name"] == name)


def test_kernels(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("kernels", adapters=3)
    assert names(found) == ["base", "engine", "top1", "top2", "twin", "gather-bmm", "grouped-mm"]
    assert set(found["ceilings"]) == {READ, PRODUCT}
    for side in found["sides"]:
        assert set(side["ratios"]) == {"base", "engine"} - {side["name"]}
        assert side["seconds"]["rounds"] == 2 and side["of_reading"] > 0 and side["of_product"] > 0
    base, top2 = side_of(found, "base"), side_of(found, "top2")
    assert top2["bytes"] > base["bytes"] and top2["flops"] > base["flops"]


def test_decode_has_all_sides(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("decode", adapters=3)
    peft = ["peft-single", "peft-dense", "peft-arrow", "peft-xlora"]
    assert names(found) == ["base", "engine", "top1", "top2", "groups", *peft]
    assert set(side_of(found, "peft-xlora")["ratios"]) == {"base", "engine"}
    for name in ("top1", "top2"):
        side = side_of(found, name)
        assert side["route_changes"] == 1.0  # every token takes another route than the one before it
        assert side["paths"] == {"base module + torch twin": 28}
    assert "memory" in side_of(found, "top1") and "memory" not in side_of(found, "base")
    assert "paths" not in side_of(found, "engine") and "2 layer groups" in side_of(found, "groups")["title"]
    assert any("without a cache" in note for note in side_of(found, "peft-xlora")["notes"])
    assert any("llama.cpp" in note for note in found["notes"])
    assert found["compiled"] is None


def test_prefill_and_answers(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("prefill", sides=("base", "top2"), adapters=3)
    assert names(found) == ["base", "top2"]
    assert side_of(found, "top2")["ratios"].keys() == {"base"}
    assert 0 < side_of(found, "top2")["route_changes"] <= 1
    found = measured("end-to-end", sides=("base", "top1", "peft-arrow"))
    assert names(found) == ["base", "top1", "peft-arrow"]
    for side in found["sides"]:
        assert side["first_token_seconds"]["median"] > 0
    assert side_of(found, "top1")["notes"] == ["through stream"]


def test_routing_is_held_against_as_many_adapters(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("routing", adapters=2, sides=("token-2", "merged-2", "applied-2", "token-1"))
    assert names(found) == ["token-1", "token-2", "merged-2", "applied-2"]
    assert side_of(found, "merged-2")["ratios"].keys() == {"token-2"}
    assert side_of(found, "token-2")["ratios"] == {}
    assert side_of(found, "merged-2")["flops"] < 2 * side_of(found, "token-2")["flops"]


def test_int8_weights_are_held_against_full_ones(measured: Callable[..., dict[str, Any]]) -> None:
    found = measured("decode", sides=("base", "engine", "top1", "engine-int8", "top1-int8"), adapters=3)
    assert names(found) == ["base", "engine", "top1", "engine-int8", "top1-int8"]
    eight = side_of(found, "top1-int8")
    assert eight["ratios"].keys() == {"base", "engine", "top1", "engine-int8"}
    assert eight["bytes"] < 0.6 * side_of(found, "top1")["bytes"]
    assert side_of(found, "top1")["ratios"].keys() == {"base", "engine"}
    assert "int8 weights" in eight["title"] and eight["route_changes"] == 1.0


@pytest.mark.slow
def test_one_graph_of_torch_serves_all_tokens(
    measured: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without code generation; the count of graphs does not depend on it."""
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: original(f, backend="eager", **more))
    found = measured("decode", sides=("base-compiled",), adapters=4)
    assert found["compiled"] == {"graphs": 1, "recompiled": 0}


def test_our_compiled_side_needs_the_kernels(measured: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="the backend is torch"):
        measured("decode", sides=("top1-compiled",))


def test_sides_compute_the_same(tiny_llama: Path) -> None:
    """Alternatives are worth timing only where they give what ours gives."""
    material = load_material(str(tiny_llama), None, 3, 4, torch.float32)
    wanted = {"top2", "twin", "gather-bmm", "grouped-mm"}
    with torch.inference_mode():
        ours, *others = (side.call() for side in op_sides(material, wanted, 5, (2,), "torch"))
        assert len(others) == 3
        for found in others:
            for a, b in zip(ours, found, strict=True):  # type: ignore[call-overload]
                assert torch.allclose(a, b, atol=1e-5)


def test_routers_made_up_route_every_token_otherwise(tiny_llama: Path) -> None:
    material = load_material(str(tiny_llama), None, 4, 2, torch.float32)
    engine = Engine(material, "torch")
    runner = engine.routed(1)
    assert runner.router is not None
    before = random_ids(320, 9)
    fed = changing_ids(runner.router, before, 30)
    decision, _ = runner.router.decide(torch.cat([before, fed], 1), None, runner.router.start(1))
    assert changes(decision.route.indices[:, 8:]) == 1.0
    assert len(set(decision.route.indices.flatten().tolist())) > 2
    assert changes(torch.zeros(1, 5, 2, 1)) == 0.0
    deep = engine.groups(1).router
    assert deep is not None and deep.live and deep.group_ranges == [(1, 2), (2, 4)]


def test_copies_share_weights_and_keep_the_base_as_it_is(tiny_llama: Path) -> None:
    material = load_material(str(tiny_llama), None, 2, 2, torch.float32)
    before = {name: p.clone() for name, p in material.base.named_parameters()}
    engine = Engine(material, "torch")
    module = next(routed_modules(engine.model.base))
    assert module.weight.data_ptr() == material.base.get_submodule(module.path).weight.data_ptr()
    assert dict(material.base.named_parameters()).keys() == before.keys()
    assert all(torch.equal(p, before[n]) for n, p in material.base.named_parameters())


def test_least_work_is_counted(tiny_llama: Path) -> None:
    """By hand: 4 layers of q and o 64x64, k and v 32x64, gate, up and down 128x64; head 320x64."""
    material = load_material(str(tiny_llama), None, 2, 3, torch.float32)
    linears = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)
    adapter = 4 * 3 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 128))
    assert weight_bytes(material.base) == 4 * (linears + 320 * 64)
    assert adapter_elements(material) == adapter
    keys = 2 * 4 * 2 * 16 * 10  # layers, heads, size, positions
    assert decode_bytes(material, 10, 2) == 4 * (linears + 320 * 64 + keys + 2 * adapter)
    seen = 3 * 10 + 6
    expected = 2 * 3 * (linears + adapter) + 2 * 2 * 320 * 64 + 4 * 4 * 4 * 16 * seen
    assert forward_flops(material, 3, 10, 1, heads=2) == expected


def test_nothing_is_kept_twice(tiny_llama: Path) -> None:
    material = load_material(str(tiny_llama), None, 3, 8, torch.float32)
    for kind in (material, material.int8()):
        engine = Engine(kind, "torch")
        alone = resident(engine.model, kind.base, kind.factors)
        assert 1 <= alone < 1.1  # owners and scales of columns, many beside so few weights
        runner = engine.routed(1)
        runner.ready()
        table: Any = runner.router.stages[0].table  # type: ignore[union-attr]
        own = sum(t.nbytes for t in [*kind.base.parameters(), *kind.base.buffers()])
        assert resident(engine.model, kind.base, kind.factors) - alone > 0.3 * table.nbytes / own
    engine.model.base.register_buffer("copy", torch.cat([p.flatten() for p in kind.base.parameters()]))
    assert resident(engine.model, kind.base, kind.factors) > 1.3


def test_ways_of_modules(tiny_llama: Path) -> None:
    material = load_material(str(tiny_llama), None, 2, 2, torch.float32)
    try:
        fast = Engine(material, "cpu").model
    except InputError as error:
        pytest.skip(error.message)
    modules = list(routed_modules(fast.base))
    assert {way(m) for m in modules} == {"fused op"}
    modules[0].base.register_forward_hook(lambda *_: None)  # as offloading does
    assert way(modules[0]) == "base module + delta op"
    assert way(next(routed_modules(fast.double().base))) == "base module + torch twin"
    assert {way(m) for m in routed_modules(Engine(material, "torch").model.base)} == {
        "base module + torch twin"
    }


def test_what_cannot_be_measured_is_said(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    material = load_material(str(tiny_llama), None, 2, 2, torch.float32)
    name = "model.layers.0.mlp.up_proj"
    odd = {"a0": material.factors["a0"], "a1": {name: Factors(torch.ones(3, 64), torch.ones(128, 3), 1.0)}}
    unequal = Material(material.base, odd, "unequal ranks")
    runners, notes = peft_runners(unequal, {SINGLE, ARROW}, tmp_path)
    assert [r.name for r in runners] == [SINGLE] and notes[0].startswith(
        "peft-arrow left out: PEFT's Arrow refuses"
    )
    with pytest.raises(InputError, match="not every adapter is a plain LoRA"):
        op_sides(unequal, {"top1"}, 1, (1,), "torch")
    monkeypatch.delenv(llama.VARIABLE, raising=False)
    monkeypatch.setattr(llama.importlib.util, "find_spec", lambda _: None)
    assert "not installed" in str(llama.missing(material))
    monkeypatch.setenv(llama.VARIABLE, "/no/such/python")
    assert ".gguf" in str(llama.missing(material))


def test_llama_that_stops_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(llama.VARIABLE, "/bin/false")
    with pytest.raises(MoloraError, match=r"llama.cpp stopped \(exit code 1\)"):
        llama.Llama({"model": "none"})


def test_wrong_requests(measured: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="--topk 3 of 2 adapters"):
        measured("decode", topk=(3,))
    with pytest.raises(InputError, match="no side 'top3'"):
        measured("decode", sides=("top3",))
    with pytest.raises(InputError, match="no side 'start'"):  # that needs a bundle
        measured("end-to-end", sides=("start",))


def test_a_bundle_brings_its_adapters(tiny_llama: Path, made_pair: Path) -> None:
    material = load_material(str(tiny_llama), made_pair, 9, 9, torch.float32)
    assert material.adapters == ("one", "two")
    assert material.folders(Path("unused"))["one"] == made_pair / "adapters" / "one"
    engine = Engine(material, "torch")
    with pytest.raises(InputError, match="has no router"):
        engine.routed(1)
    one = material.part(["one"])
    assert one.router(one.routed("torch")).spec.kind == "context"  # the bundle's would need all adapters
