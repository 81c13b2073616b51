"""One token through a whole router by compiled operators: what `Deciding` says, bit for bit in the routes."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from molora_cli.core.routed.history import OneRouted
from molora_cli.core.routed.route import Route, write_route
from molora_cli.core.routed.state import RouterState
from molora_cli.core.router.context import sample_rows
from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.files import join_tensors
from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.router.taps import TapHead, tap_groups
from molora_cli.core.runtime.cache import RoomCache

pytestmark = pytest.mark.usefixtures("cpu_kernels")

NAMES = ("a", "b", "c")
EXPERTS = ["__base__", *NAMES]
LAYERS, WIDTH, VOCABULARY, TOP = 5, 24, 64, 8
EMBEDDING = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(2))


Made = tuple[StageSpec, dict[str, Tensor]]


@register_kind
class SilentStage(IdStage):
    """For these tests: of any experts, and never asked."""

    kind = "test_silent"

    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        raise AssertionError


def context(groups: list[tuple[int, int]], units: int = 6, **more: Any) -> Made:
    torch.manual_seed(5)
    net = ContextNet(WIDTH, 4, projection=8, hidden=8, decays=(0.5, 0.9), units=units)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    sampled, samples = sample_rows(EMBEDDING)
    params: dict[str, Any] = {"decays": [0.5, 0.9], "projection": 8, "hidden": 8}
    params |= {"scale": 1.0, "sampled": sampled}
    if units:
        params["ahead"] = {"units": units, "cuts": [3, 9]}
    tensors = {**net.state_dict(), "centre": torch.zeros(WIDTH), "samples": samples}
    return StageSpec(kind="context", experts=EXPERTS, groups=groups, params=params, **more), tensors


def taps(kind: str, at: tuple[int, ...], prior: bool, **more: Any) -> Made:
    torch.manual_seed(3)
    found = {}
    for i in range(len(at)):
        head = TapHead(WIDTH, 4, prior=4 * prior, hidden=16)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        found |= {f"taps.{i}.{name}": value.detach() for name, value in head.state_dict().items()}
    params: dict[str, Any] = {"head": "mlp", **({"prior": "context"} if prior else {})}
    groups = tap_groups(at, LAYERS)
    return StageSpec(kind=kind, experts=EXPERTS, groups=groups, params=params, **more), found


def stack_of(*made: Made) -> RouterStack:
    spec = RouterSpec(stages=[stage for stage, _ in made])
    around = Surroundings(n_layers=LAYERS, embedding=EMBEDDING)
    return RouterStack(spec, join_tensors([tensors for _, tensors in made]), around, NAMES)


ROUTERS = {
    "context": lambda: [context([])],
    "no look ahead": lambda: [context([(1, 5)], units=0, k=2)],
    "taps": lambda: [taps("taps", (1, 3), False)],
    "single precision": lambda: [taps("taps", (1, 3), False)],
    "layer": lambda: [taps("layer", tuple(range(LAYERS)), False, k=3, temperature=2.0)],
    "both": lambda: [context([(0, 1)]), taps("taps", (1, 2), True, k=2)],
}


def fresh() -> tuple[Tensor, Tensor]:
    return torch.zeros(LAYERS, 1, TOP, dtype=torch.int64), torch.zeros(LAYERS, 1, TOP)


@pytest.mark.parametrize("setting", ["own", "k 4", "warm", "mute", "all mute"])
@pytest.mark.parametrize("router", ROUTERS)
@torch.no_grad()
def test_it_is_the_twin(router: str, setting: str) -> None:
    stack = stack_of(*ROUTERS[router]())
    if router == "single precision":
        stack.live[0].heads.float()  # type: ignore[attr-defined]
    if setting == "k 4":
        stack.k = 4
    elif setting == "warm":
        stack.temperature = 3.5
    elif setting != "own":
        stack.muted = ["c"] if setting == "mute" else EXPERTS
    single = stack.single
    assert single is not None and single.width == stack.k
    gen = torch.Generator().manual_seed(1)
    state = wanted = stack.start(1)
    kept, plain = (RouterState(None, 1, torch.device("cpu")) for _ in range(2))
    routes = set()
    for step in range(25):
        token = 9 if step in (4, 11) else int(torch.randint(VOCABULARY, (1,), generator=gen))
        one = single.begin(token, state)
        twin = stack.begin(torch.tensor([[token]]), None, wanted)
        assert one is not None
        (slots, gates), (to_slots, to_gates) = fresh(), fresh()
        one.write(slots, gates)
        for group in twin.ready:
            write_route(twin.group(group), stack.group_ranges[group], to_slots, to_gates)
        for layer in sorted({tap for stage in stack.live for tap in stage.taps}):
            hidden = torch.randn(1, 1, WIDTH, generator=gen)
            one.tap(layer, hidden, slots, gates)
            for group in twin.tap(layer, hidden):
                write_route(twin.group(group), stack.group_ranges[group], to_slots, to_gates)
        assert torch.equal(slots, to_slots) and torch.allclose(gates, to_gates, rtol=0, atol=1e-7)
        state, wanted = one.after, twin.after
        said = [part for part in one.scores if part is not None]
        kept.push(OneRouted(token, slots, gates, single.firsts, single.width, said), state, stack)
        decision = twin.decision()
        mask = torch.ones(1, 1, dtype=torch.bool)
        plain = plain.extended(torch.tensor([[token]]), mask, decision.route, decision.scores, wanted, stack)
        routes.add(tuple(slots.flatten().tolist()))
    assert len(routes) > 1 or setting == "all mute"
    assert kept.length == plain.length == 25
    for name in ("ids", "mask", "indices"):
        assert torch.equal(getattr(kept.history, name), getattr(plain.history, name)), name
    assert torch.allclose(kept.history.gates, plain.history.gates, rtol=0, atol=1e-7)
    assert kept.history.scores is not None and plain.history.scores is not None
    assert torch.allclose(kept.history.scores, plain.history.scores, rtol=0, atol=1e-6)


def test_a_layer_of_a_wider_graph_is_passed_over() -> None:
    stack = stack_of(taps("taps", (1, 3), False))
    own = stack.single
    assert own is not None
    one = own.begin(3, [{}])
    slots, gates = fresh()
    assert one is not None
    one.tap(2, torch.zeros(1, 1, WIDTH), slots, gates)
    assert not slots.any() and one.scores == [None, None]


def test_what_is_dropped_is_freed_at_once() -> None:
    gc.disable()
    try:
        stack = stack_of(context([]))
        assert stack.single is not None
        cache = RoomCache(2)
        seen = weakref.ref(stack), weakref.ref(cache)
        del stack, cache
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_settings_are_followed() -> None:
    stack = stack_of(context([]))
    first = stack.single
    assert first is stack.single and first is not None and first.width == 1
    stack.k = 2
    assert stack.single is not first and stack.single is not None and stack.single.width == 2


def test_other_routers_are_left_to_the_twin() -> None:
    stage, tensors = context([])
    for other in (
        [(stage.model_copy(update={"margin": 0.2}), tensors)],
        [context([(0, 3)]), context([(3, 5)])],
        [taps("taps", (1, 3), False), taps("layer", tuple(range(LAYERS)), False)],
    ):
        assert stack_of(*other).single is None
    fixed = StageSpec(kind="fixed", experts=["b"], params={"gates": [1.0]})
    constant = stack_of((fixed, {}))
    made = constant.single
    assert made is None or made.begin(3, [{}]) is None


@pytest.mark.parametrize("experts", [1, 2, 4, 17])
@torch.no_grad()
def test_choices(experts: int) -> None:
    """Ties on the grid go to the first, what is out of the question to the base, NaN back to the caller."""
    names = [f"n{i}" for i in range(experts)]
    stage = StageSpec(kind="test_silent", experts=names)
    gen = torch.Generator().manual_seed(experts)
    stack = RouterStack(RouterSpec(stages=[stage]), {}, Surroundings(n_layers=3), names)
    for trial in range(40):
        logp = torch.randn(1, 1, experts, generator=gen).double().log_softmax(-1)
        if trial % 4 == 1:
            logp = logp.round()
        if trial % 4 == 2:
            logp[..., torch.rand(experts, generator=gen) < 0.5] = -torch.inf
        if trial % 4 == 3:
            logp += 1e-12 * torch.randn(1, 1, experts, generator=gen).double()
        muted = torch.rand(experts, generator=gen) < 0.2
        k, temperature = 1 + trial % min(experts, TOP), (0.5, 1.0, 3.0)[trial % 3]
        stack.k, stack.temperature = k, temperature
        stack.muted = [name for name, is_ in zip(names, muted.tolist(), strict=True) if is_]
        indices, gates = stack.choose(logp, 0)
        slots, weights = (torch.full_like(table[:3], 7) for table in fresh())
        rule = (k, temperature, stack.places[0], muted)
        assert torch.ops.molora_cpu.choose(logp, *rule, slots, weights, 1, 3)
        assert bool((slots[0] == 7).all()) and bool((weights[0] == 7).all())
        for layer in (1, 2):
            assert torch.equal(slots[layer, 0, :k], indices[0, 0] + 1)
            assert torch.allclose(weights[layer, 0, :k], gates[0, 0].float(), rtol=0, atol=1e-7)
            assert not slots[layer, 0, k:].any() and not weights[layer, 0, k:].any()
    logp[..., 0] = torch.nan
    slots, weights = (torch.full_like(table[:3], 7) for table in fresh())
    assert not torch.ops.molora_cpu.choose(logp, *rule, slots, weights, 0, 3)
    assert bool((slots == 7).all()) and bool((weights == 7).all())
    for bad in ((-1, 2), (2, 2), (1, 4)):
        with pytest.raises(IndexError, match="layers"):
            torch.ops.molora_cpu.choose(logp, *rule, slots, weights, *bad)
    with pytest.raises(RuntimeError, match="experts at temperature"):
        torch.ops.molora_cpu.choose(logp, experts + 1, *rule[1:], slots, weights, 0, 3)


def test_single_tokens_join_the_history() -> None:
    state = RouterState(object(), 1, torch.device("cpu"))

    def token(number: int, slot: int, width: int, groups: int = 1, scored: bool = True) -> OneRouted:
        slots, gates = fresh()
        slots[:, 0, 0], gates[:, 0, 0] = slot, 1.0
        said = [torch.full((1, 1, 2), -1.0, dtype=torch.float64)] * groups if scored else []
        return OneRouted(number, slots, gates, list(range(groups)), width, said)

    for number in range(300):  # more than are kept apart
        state.push(token(number, 1 + number % 3, 1), [], None)
    assert state.history.indices[0, :, 0, 0].tolist() == [n % 3 for n in range(300)]
    twin = copy.deepcopy(state)
    state.push(token(300, 0, 2), [], None)  # a wider route
    assert state.length == 301 and twin.length == 300
    assert state.history.indices[0, -1, 0].tolist() == [-1, -1] and len(state.history) == 301
    state.push(token(301, 2, 2, 2), [], None)  # and one by groups of layers
    assert state.history.indices.shape == (1, 302, 2, 2) and state.history.scores is None
    twin.push(token(7, 2, 1), [], None)
    twin.truncate(299)
    assert twin.length == len(twin.history) == 299 and twin.stages is None
    twin.push(token(8, 2, 1, scored=False), None, None)
    twin.push(token(9, 2, 1, scored=False), None, None)
    assert twin.history.scores is None and twin.history.ids[0, -2:].tolist() == [8, 9] and twin.complete
    twin.select(torch.tensor([0, 0]))
    assert twin.batch == 2 and twin.length == 301
    twin.reset()
    assert twin.length == 0 and twin.batch == 2


def test_a_trace_reads_the_tables() -> None:
    slots, gates = fresh()
    route = Route(torch.tensor([[[[2, -1]]]]), torch.tensor([[[[0.75, 0.25]]]]))
    write_route(route, (1, 3), slots, gates)
    said = torch.tensor([[[-0.5, -1.0]]], dtype=torch.float64)
    one = OneRouted(5, slots, gates, (0, 1), 2, (said, said + 1))
    indices, weights = one.route()
    assert indices.tolist() == [[-1, -1], [2, -1]] and weights.tolist() == [[0, 0], [0.75, 0.25]]
    scores = one.scores()
    assert scores is not None and scores.dtype == np.float32 and scores.tolist() == [[-0.5, -1], [0.5, 0]]
    assert replace(one, said=()).scores() is None
