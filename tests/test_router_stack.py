"""The router file and the stack: what is read back decides as before, and bad files are refused by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from molora_cli.core.routed.route import Route
from molora_cli.core.router import kinds
from molora_cli.core.router.constant import fixed_spec, uniform_spec
from molora_cli.core.router.files import join_tensors, load_tensors, save
from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind, stage_tensor
from molora_cli.core.router.spec import HEADER_KEY, RouterSpec, StageSpec, check_experts, dump_spec, read_spec
from molora_cli.core.router.stack import RouterStack
from molora_cli.errors import InputError, MoloraError

ADAPTERS = ("math", "code", "sql")
GROUPS = [(0, 1), (1, 3), (3, 4)]
AROUND = Surroundings(n_layers=4)


@pytest.fixture(autouse=True)
def by_table() -> Iterator[None]:
    """A kind of this test's own, with scores per token id and layer group, that counts the tokens it saw."""

    @register_kind
    class ByTable(IdStage):
        kind = "by-table"

        def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
            super().__init__(spec, tensors, around)
            self.table = stage_tensor(tensors, "table", (None, self.groups, len(spec.experts)), self.kind)

        @property
        def abstains(self) -> bool:
            return "from" in self.spec.params

        def start(self, batch: int) -> State:
            return {"seen": torch.zeros(batch, dtype=torch.int64)}

        def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
            logp = self.table[ids].log_softmax(-1)
            decided = ids >= self.spec.params["from"] if self.abstains else None
            return Scores(logp, decided), {"seen": state["seen"] + mask.sum(1)}

    yield
    del kinds._KINDS["by-table"]


def table(values: list[list[list[float]]]) -> dict[str, Tensor]:
    return {"table": torch.tensor(values, dtype=torch.float64)}


def stack(*stages: tuple[StageSpec, dict[str, Tensor]], adapters: tuple[str, ...] = ADAPTERS) -> RouterStack:
    spec = RouterSpec(stages=[s for s, _ in stages])
    return RouterStack(spec, join_tensors([t for _, t in stages]), AROUND, adapters)


def decide(router: RouterStack, ids: list[int]) -> tuple[list[Any], list[Any], list[Any]]:
    """Indices and gates of group 0, and scores, of one row."""
    decision, _ = router.decide(torch.tensor([ids]), None, router.start(1))
    assert decision.route.indices.shape == (1, len(ids), router.groups, router.k)
    return (
        decision.route.indices[0, :, 0].tolist(),
        decision.route.gates[0, :, 0].tolist(),
        decision.scores[0, :, 0].tolist(),
    )


THREE_GROUPS = StageSpec(kind="by-table", experts=["sql", "__base__", "math"], groups=GROUPS, params={"x": 1})


def test_unknown_kind_with_three_groups_through_a_file(tmp_path: Path) -> None:
    values = table([[[3, 0, 0], [0, 3, 0], [0, 0, 3]], [[0, 0, 9], [9, 0, 0], [0, 9, 0]]])
    spec = RouterSpec(stages=[THREE_GROUPS], tokenizer="abc", training={"seed": 1})
    save(tmp_path / "router.safetensors", spec, join_tensors([values]))
    again = read_spec(tmp_path / "router.safetensors")
    assert again == spec
    router = RouterStack(again, load_tensors(tmp_path / "router.safetensors"), AROUND, ADAPTERS)
    assert router.group_ranges == GROUPS and router.groups == 3
    mask = torch.tensor([[False, True, True]])
    decision, state = router.decide(torch.tensor([[1, 0, 1]]), mask, router.start(1))
    assert decision.route.indices[0, :, :, 0].tolist() == [[-1, -1, -1], [2, -1, 0], [0, 2, -1]]
    assert decision.route.gates[0, 1:].eq(1.0).all() and decision.route.gates[0, 0].eq(0.0).all()
    assert decision.experts == ("sql", "__base__", "math")
    assert state[0]["seen"].tolist() == [2]


def test_same_bytes_and_nothing_left_behind(tmp_path: Path) -> None:
    spec = RouterSpec(stages=[fixed_spec({"math": 1.0})])
    for name in ("a", "b"):
        save(tmp_path / name, spec, {"stages.0.x": torch.ones(2), "stages.0.a": np.zeros(3, np.float32)})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with pytest.raises(MoloraError, match="NaN"):
        save(tmp_path / "a", spec, {"stages.0.x": torch.tensor([torch.nan])})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
    save_file({"x": np.array([np.inf])}, tmp_path / "inf")
    with pytest.raises(InputError, match="NaN or infinity"):
        load_tensors(tmp_path / "inf")


def test_unknown_minor_fields_survive(tmp_path: Path) -> None:
    raw = json.loads(dump_spec(RouterSpec(stages=[uniform_spec(ADAPTERS)])))
    raw["format_version"], raw["later"], raw["stages"][0]["also"] = "1.7", [1], {"a": None}
    write_header(tmp_path / "r", raw)
    save(tmp_path / "r2", read_spec(tmp_path / "r"), {})
    again = json.loads(dump_spec(read_spec(tmp_path / "r2")))
    assert again == raw


def write_header(path: Path, raw: object) -> None:
    text = raw if isinstance(raw, str) else json.dumps(raw)
    save_file({"x": np.zeros(1)}, path, metadata={HEADER_KEY: text})


def stage(**fields: object) -> dict[str, object]:
    return {
        "format": "molora-router",
        "format_version": "1.0",
        "stages": [{"kind": "a", "experts": ["m"], **fields}],
    }


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (stage() | {"format_version": "2.0"}, "newer molora"),
        (stage() | {"format_version": 1}, "format_version"),
        (stage() | {"format_version": "x"}, "format_version"),
        (stage() | {"format": "other"}, "molora-router"),
        (stage() | {"stages": []}, "0 stages"),
        (stage(experts=["m", "m"]), "each once"),
        (stage(experts=[]), "each once"),
        (stage(k=0), "k = 0"),
        (stage(temperature=0), "temperature"),
        (stage(temperature=-1), "temperature"),
        (stage(margin=-0.1), "margin"),
        (stage(groups=[[0, 2], [3, 4]]), "gap"),
        (stage(groups=[[-1, 2]]), "gap"),
        (stage(groups=[[0, 0]]), "gap"),
        (stage(k="many"), "stages.0.k"),
        ('{"format": NaN}', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "molora-router"),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, raw: object, says: str) -> None:
    write_header(tmp_path / "r", raw)
    with pytest.raises(InputError, match=says) as caught:
        read_spec(tmp_path / "r")
    assert caught.value.remedy


def test_files_that_are_no_router(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("<html>not found</html>")
    save_file({"x": np.zeros(1)}, tmp_path / "bare")
    save(tmp_path / "whole", RouterSpec(stages=[uniform_spec(ADAPTERS)]), {"stages.0.x": np.zeros(9)})
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-8])
    for name in ("empty", "text", "bare", "cut", "missing", "."):
        with pytest.raises(InputError):
            read_spec(tmp_path / name)


def test_reading_a_header_imports_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    save(tmp_path / "r", RouterSpec(stages=[uniform_spec(ADAPTERS)]), {})
    code = (
        "import sys, pathlib; from molora_cli.core.router.spec import read_spec;"
        "print(read_spec(pathlib.Path(sys.argv[1])).kind, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["uniform", "False"]


def test_unknown_kind_is_refused_only_when_built(tmp_path: Path) -> None:
    save(tmp_path / "r", RouterSpec(stages=[StageSpec(kind="telepathy", experts=["math"])]), {})
    spec = read_spec(tmp_path / "r")
    assert spec.kind == "telepathy"
    with pytest.raises(InputError, match=r"telepathy.*context.*vocab"):
        RouterStack(spec, {}, AROUND, ADAPTERS)


def test_missing_experts_are_named_with_those_found() -> None:
    spec = RouterSpec(stages=[fixed_spec({"math": 1, "poetry": 1, "__base__": 1})])
    with pytest.raises(InputError, match=r"'poetry'.*'math', 'code', 'sql'"):
        check_experts(spec, ADAPTERS)


def test_groups_must_fit_the_base_and_each_other() -> None:
    with pytest.raises(InputError, match="end at layer 3"):
        stack((StageSpec(kind="uniform", experts=["math"], groups=[(0, 1), (1, 3)]), {}))
    cut = stack(
        (StageSpec(kind="uniform", experts=["math"], groups=[(0, 1), (1, 4)]), {}),
        (StageSpec(kind="uniform", experts=["math"], groups=[(0, 2), (2, 4)]), {}),
    )
    assert cut.group_ranges == [(0, 1), (1, 2), (2, 4)]


def test_stages_share_the_layers() -> None:
    """Each stage decides its own layers, the first one where two of them know a layer."""
    router = stack(
        (StageSpec(kind="uniform", experts=["math"], groups=[(1, 2)]), {}),
        (StageSpec(kind="uniform", experts=["code"], groups=[(1, 2), (2, 4)]), {}),
    )
    assert router.group_ranges == [(1, 2), (2, 4)]
    decision, _ = router.decide(torch.tensor([[5, 6]]), None, router.start(1))
    assert decision.route.indices[0, :, :, 0].tolist() == [[0, 1], [0, 1]]


def test_a_margin_is_refused_where_it_cannot_be_kept() -> None:
    rules = StageSpec(kind="by-table", experts=["math"], margin=0.5, params={"from": 1})
    with pytest.raises(InputError, match="margin"):
        stack((rules, table([[[0.0]]] * 4)))


@pytest.mark.parametrize("k", [1, 2])
def test_no_switch_below_the_margin(k: int) -> None:
    """Against a loop over tokens, in one block, in blocks with the state carried over, and with padding."""
    rng = torch.Generator().manual_seed(k)
    scores = (torch.randn(50, 1, 3, generator=rng) * 2).log_softmax(-1)
    spec = StageSpec(kind="by-table", experts=["math", "code", "sql"], k=k, margin=0.4)
    router = stack((spec, table(scores.tolist())))
    ids = torch.randint(0, 50, (1, 60), generator=rng)
    held, wanted, gates = -1, [], []
    for token in ids[0].tolist():
        p = scores[token, 0].exp()
        best = int(p.argmax())
        held = best if held < 0 or float(p[best] - p[held]) >= 0.4 else held
        others = sorted((e for e in range(3) if e != held), key=lambda e: -float(p[best if e == best else e]))
        # the held expert and the best have traded places
        places = {
            held: float(p[best]),
            **{e: float(p[held] if e == best else p[e]) for e in range(3) if e != held},
        }
        order = [held, *sorted(others, key=lambda e: -places[e])][:k]
        wanted.append(order)
        total = sum(places[e] for e in order)
        gates.append([places[e] / total for e in order])
    assert len({e for e, *_ in wanted}) == 3  # it does switch
    route = router.decide(ids, None, router.start(1))[0].route
    assert route.indices[0, :, 0].tolist() == wanted
    torch.testing.assert_close(route.gates[0, :, 0], torch.tensor(gates), rtol=1e-5, atol=1e-6)
    state, blocks = router.start(1), []
    for first, end in ((0, 1), (1, 2), (2, 33), (33, 60)):
        decision, state = router.decide(ids[:, first:end], None, state)
        blocks.append(decision.route.indices)
    assert torch.equal(torch.cat(blocks, 1), route.indices)
    mask = torch.tensor([[False] * 5 + [True] * 55])
    padded = router.decide(ids, mask, router.start(1))[0].route.indices[:, 5:]
    assert torch.equal(padded, router.decide(ids[:, 5:], None, router.start(1))[0].route.indices)


def test_first_deciding_stage_wins_and_the_base_takes_the_rest() -> None:
    high = StageSpec(kind="by-table", experts=["sql"], params={"from": 3})
    middle = StageSpec(kind="by-table", experts=["math", "code"], groups=GROUPS, params={"from": 1})
    router = stack(
        (high, table([[[0.0]]] * 4)),
        (middle, table([[[0, 1], [1, 0], [0, 1]]] * 4)),
    )
    decision, _ = router.decide(torch.tensor([[0, 1, 3]]), None, router.start(1))
    assert decision.route.indices[0, :, :, 0].tolist() == [[-1, -1, -1], [1, 0, 1], [2, 2, 2]]
    assert decision.experts == ("sql", "math", "code", "__base__")
    by_name = dict(zip(decision.experts, decision.scores[0, :, 0].T.tolist(), strict=True))
    assert by_name["__base__"] == [0.0, -torch.inf, -torch.inf]
    assert by_name["sql"] == [-torch.inf, -torch.inf, 0.0]
    assert by_name["code"][1] == pytest.approx(-0.3132616875)


def test_a_stage_that_always_decides_needs_no_base_column() -> None:
    router = stack((StageSpec(kind="by-table", experts=["math", "code"]), table([[[0, 1]]])))
    assert router.experts == ("math", "code")


def test_top_k_ties_gates_and_clipping() -> None:
    spec = StageSpec(kind="by-table", experts=list(ADAPTERS), k=2)
    router = stack((spec, table([[[1, 1, 1]], [[0, 2, 1]], [[0, 1, 1 + 1e-13]]])))
    indices, gates, _ = decide(router, [0, 1, 2])
    assert indices == [[0, 1], [1, 2], [1, 2]], "ties go to the first expert, also ties up to rounding"
    assert gates[0] == [0.5, 0.5]
    assert gates[1] == pytest.approx([0.7310585786, 0.2689414214])
    router.k = 1
    indices, gates, _ = decide(router, [0, 1])
    assert indices == [[0], [1]] and gates == [[1.0], [1.0]]
    router.k = 99
    assert router.k == 3
    router.temperature = 0.5
    indices, gates, _ = decide(router, [1])
    assert gates[0] == pytest.approx(torch.tensor([4.0, 2.0, 0.0]).softmax(0).tolist())
    for bad in (0, -1, 1.5, True):
        with pytest.raises(InputError):
            router.k = bad  # type: ignore[assignment]
    for bad in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError):
            router.temperature = bad


@pytest.mark.parametrize("k", [1, 2, 5])
def test_one_token_is_chosen_for_as_many_are(k: int) -> None:
    """The way without torch against the other one: ties, muted experts, nothing left, no order."""
    gen = torch.Generator().manual_seed(k)
    experts = ["math", "code", "sql", "__base__"]
    router = stack((StageSpec(kind="by-table", experts=experts, k=k), table([[[0, 0, 0, 0]]])))
    rows = torch.randn(40, 4, generator=gen, dtype=torch.float64).round()  # many ties
    rows[:10] += 1e-12 * torch.randn(10, 4, generator=gen, dtype=torch.float64)
    rows[10:20, 1] = -torch.inf
    rows[19] = -torch.inf
    rows[20:22, 2], rows[22] = torch.nan, torch.nan
    for muted in ((), ("math",), ("math", "sql", "__base__"), tuple(experts)):
        router.muted = frozenset(muted)
        for temperature in (None, 0.3):
            router.temperature = temperature
            indices, gates = router.choose(rows.view(1, -1, 4), 0)
            for number, row in enumerate(rows):
                one, weight = router.choose(row.view(1, 1, 4), 0)
                assert one.dtype == indices.dtype and weight.dtype == gates.dtype
                assert torch.equal(one[0, 0], indices[0, number])
                assert torch.allclose(weight[0, 0], gates[0, number], rtol=1e-14, atol=0, equal_nan=True)


def test_muted_adapters_get_nothing() -> None:
    spec = StageSpec(kind="by-table", experts=["math", "code", "__base__"], k=2)
    router = stack((spec, table([[[3, 2, 1]]])))
    router.muted = frozenset({"math"})
    assert decide(router, [0])[0] == [[1, -1]]
    router.muted = frozenset({"math", "__base__"})
    assert decide(router, [0])[:2] == ([[1, -1]], [[1.0, 0.0]])
    router.muted = frozenset({"math", "code", "__base__"})
    indices, gates, scores = decide(router, [0])
    assert indices == [[-1, -1]] and sum(gates[0]) == 1.0
    assert scores[0] == pytest.approx(torch.tensor([3.0, 2.0, 1.0]).log_softmax(0).tolist())
    router.muted = frozenset()
    assert decide(router, [0])[0] == [[0, 1]]
    with pytest.raises(InputError, match="poetry"):
        router.muted = frozenset({"poetry"})


def test_fixed_and_uniform_state_their_gates() -> None:
    assert decide(stack((fixed_spec({"code": 0.2}), {})), [5])[:2] == ([[1]], [[1.0]])
    router = stack((fixed_spec({"sql": 1, "__base__": 2, "math": 5}), {}))
    indices, gates, _ = decide(router, [5])
    assert dict(zip(indices[0], gates[0], strict=True)) == pytest.approx({2: 0.125, -1: 0.25, 0: 0.625})
    router.k, router.temperature = 1, 9.0
    assert decide(router, [5])[1] == [gates[0]], "stated gates do not follow k and temperature"
    router = stack((uniform_spec(ADAPTERS), {}))
    assert decide(router, [5, 6])[:2] == ([[0, 1, 2]] * 2, [pytest.approx([1 / 3] * 3)] * 2)
    router.muted = frozenset({"code"})
    indices, gates, _ = decide(router, [5])
    assert indices == [[0, 2, -1]] and gates == [[0.5, 0.5, 0.0]]
    for bad in ({}, {"math": 0.0}, {"math": float("nan")}, {"math": True}):
        with pytest.raises(InputError):
            fixed_spec(bad)


def test_a_stage_that_misbehaves_is_named() -> None:
    spec = StageSpec(kind="by-table", experts=["math"])
    with pytest.raises(MoloraError, match=r"'table'.*\(2, 1, 3\)"):
        stack((spec, table([[[1, 2, 3]], [[1, 2, 3]]])))
    with pytest.raises(MoloraError, match="lacks the tensor 'table'"):
        stack((spec, {}))


def test_unknown_kind_with_three_groups_through_the_model(tiny_llama: Path) -> None:
    """Routed by the stack, the model gives what the same routes give when they are handed to it."""
    from transformers import AutoModelForCausalLM

    from molora_cli.core.adapter.factors import Factors
    from molora_cli.core.routed.model import RoutedModel

    generator = torch.Generator().manual_seed(0)

    def factors() -> Factors:
        return Factors(
            torch.randn(2, 64, generator=generator), torch.randn(64, 2, generator=generator) * 0.1, 1.0
        )

    targets = [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]
    adapters = {name: {t: factors() for t in targets} for name in ADAPTERS}
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    values = torch.randn(320, 3, 3, generator=generator).tolist()
    router = stack((THREE_GROUPS, table(values)))
    model = RoutedModel.from_parts(base, adapters, router=router)
    ids = torch.randint(64, 320, (2, 12), generator=generator)
    with torch.no_grad():
        decided = model(ids)
        route = router.decide(ids, None, router.start(2))[0].route
        given = model(ids, route=route)
        flat = model(ids, route=Route(route.indices[:, :, 0], route.gates[:, :, 0]))
        model.off()
        bare = model(ids)
    assert route.indices.shape == (2, 12, 3, 1)
    assert torch.equal(decided.logits, given.logits)
    assert np.array_equal(decided.trace.indices.reshape(2, 12, 3, 1), route.indices.numpy())
    assert not torch.allclose(decided.logits, flat.logits, atol=1e-4), "layer groups must matter"
    assert not torch.allclose(decided.logits, bare.logits, atol=1e-4)
