"""The compiled decode step: the same tokens as without it, and none of what changes in a chat compiles again.

Compiling is left out here: the exported graph runs as it is (`test_runtime_package` compiles one).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from molora_cli.core.adapter.factors import Factors
from molora_cli.core.bench.material import Material, random_factors
from molora_cli.core.generate import DecodeCache, Sampler, stream_ids
from molora_cli.core.routed.model import RoutedModel, load
from molora_cli.core.runtime import package
from molora_cli.core.runtime.cache import RoomCache, new_cache
from molora_cli.core.runtime.package import PackageError
from molora_cli.core.runtime.runtime import DOUBTS, LOOK_EVERY, Runtime, shape_of
from molora_cli.core.runtime.step import TABLES, TOP, Shape, export_step

pytestmark = pytest.mark.usefixtures("cpu_kernels")

PROMPT = list(range(70, 100))


class Traced:
    """A program that runs the exported graph of `shape` as it is."""

    def __init__(self, shape: Shape) -> None:
        self.runs = 0
        program = export_step(shape)
        self._module = program.module(check_guards=False)
        sizes = {**dict(program.state_dict), **program.constants}
        self.constants = [name for name in sizes if hasattr(sizes[name], "shape")]
        self.about: dict[str, Any] = {
            "sizes": {n: [[*sizes[n].shape], str(sizes[n].dtype)] for n in sizes if not n.endswith(TABLES)},
            "literals": {},
        }

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            path, _, own = name.rpartition(".")
            place = self._module.get_submodule(path)
            if own in place._parameters:
                place._parameters[own] = torch.nn.Parameter(tensor, requires_grad=False)
            elif own in place._buffers:
                place._buffers[own] = tensor
            else:
                setattr(place, own, tensor)

    def run(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        self.runs += 1
        count = (len(inputs) - 4) // 2
        return self._module.forward(*inputs[:4], inputs[4 : 4 + count], inputs[4 + count :])


_traced: dict[str, Traced] = {}


class Workshop:
    """Stands for the compiler: packages are files with the shape in them, `finish` makes what was ordered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.orders: list[tuple[dict[str, Any], Path]] = []
        self.ready: dict[str, Traced] = {}
        self.said: list[str] = []
        self.failure: str | None = None

    def make(self, document: dict[str, Any], path: Path) -> object:
        if self.failure is not None:
            raise PackageError(self.failure)
        self.orders.append((document, path))
        return path

    def finish(self) -> None:
        for document, path in self.orders:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document))

    def load(self, path: Path) -> Traced:
        text = path.read_text()
        if text not in _traced:
            _traced[text] = Traced(Shape.read(json.loads(text)))
        self.ready[text] = _traced[text]
        return self.ready[text]

    def runtime(self, model: RoutedModel, **options: Any) -> Runtime:
        model.runtime = Runtime(model, self.said.append, **{"load": self.load, "make": self.make, **options})
        return model.runtime


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.setattr(package, "folder", lambda: tmp_path / "steps")
    return Workshop(tmp_path)


@pytest.fixture
def chat(chat_bundle: Path) -> RoutedModel:
    return load(chat_bundle, backend="cpu")


def shallow(folder: Path, layers: int = 2) -> PreTrainedModel:
    """Two layers are traced in half the time of four."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=layers).eval()


def answer(model: RoutedModel, ids: list[int] = PROMPT, new: int = 24, **options: Any) -> list[Any]:
    return list(stream_ids(model, ids, max_new_tokens=new, **options))


def same(one: list[Any], other: list[Any], limit: float = 1e-4) -> None:
    assert [e.id for e in one] == [e.id for e in other]
    assert [(e.route.indices, e.route.names) for e in one] == [
        (e.route.indices, e.route.names) for e in other
    ]
    for a, b in zip(one, other, strict=True):
        assert abs(a.logprob - b.logprob) < limit


def test_an_answer_is_the_one_without_it(chat: RoutedModel, shop: Workshop) -> None:
    wanted = {route: answer(chat, route=route) for route in ("auto", "off", "code")}
    assert len({tuple(event.id for event in events) for events in wanted.values()}) == 3
    runtime = shop.runtime(chat)
    shop.finish()
    runtime.prepare()
    assert runtime.ready
    (program,) = shop.ready.values()
    for route, events in wanted.items():
        before = program.runs
        same(answer(chat, route=route), events)
        assert program.runs - before == len(events) - 1  # all but the prompt


def test_int8_weights_have_a_step_of_their_own(chat_bundle: Path, shop: Workshop) -> None:
    model = load(chat_bundle, backend="cpu", weights="int8")
    wanted = {route: answer(model, new=8, route=route) for route in ("auto", "off")}
    runtime = shop.runtime(model)
    shop.finish()
    runtime.prepare()
    assert runtime.ready and len(shape_of(model).int8) == 29
    for route, events in wanted.items():
        # a forward of a prompt takes no 16-bit inputs, a token does: either way, each has its own keys
        same(answer(model, new=8, route=route), events, limit=1e-3)
    assert runtime.ready  # the first logits were compared
    assert shape_of(load(chat_bundle, backend="cpu")).int8 == ()


def test_it_takes_over_in_the_middle_of_an_answer(chat: RoutedModel, shop: Workshop) -> None:
    wanted = answer(chat, new=3 * LOOK_EVERY)
    runtime = shop.runtime(chat)
    assert runtime.builds == 1 and not runtime.ready
    assert "being compiled" in shop.said[0]
    events = stream_ids(chat, PROMPT, max_new_tokens=3 * LOOK_EVERY)
    got = [next(events) for _ in range(4)]
    shop.finish()
    got += list(events)
    assert runtime.ready and len(shop.said) == 1
    same(got, wanted)


def test_nothing_that_changes_in_a_chat_compiles_again(
    chat: RoutedModel, shop: Workshop, make_adapter: Callable[..., Path], tiny_llama: Path
) -> None:
    from molora_cli.core.chat_load import load_adapter

    runtime = shop.runtime(chat)
    shop.finish()
    runtime.prepare()
    changes: list[Callable[[], object]] = [
        lambda: setattr(chat, "muted", frozenset({"math"})),
        lambda: setattr(chat, "topk", 2),
        lambda: load_adapter(chat, "third", str(make_adapter(tiny_llama, "third", seed=5, r=9))),
        # modules that nothing touched before
        lambda: load_adapter(chat, "mlp", str(make_adapter(tiny_llama, "mlp", target_modules=["up_proj"]))),
    ]
    for length in (1, 200):
        same(*_both(chat, list(range(64, 64 + length))))
    for change in changes:
        change()
        for route in ("auto", *chat.adapters[2:]):
            same(*_both(chat, PROMPT, route=route))
    assert runtime.builds == 1 and runtime.ready and len(shop.ready) == 1


def _both(model: RoutedModel, ids: list[int], **options: Any) -> tuple[list[Any], list[Any]]:
    compiled = answer(model, ids, 12, **options)
    runtime, model.runtime = model.runtime, None
    eager = answer(model, ids, 12, **options)
    model.runtime = runtime
    return compiled, eager


def test_a_conversation_goes_on_in_the_same_room(chat: RoutedModel, shop: Workshop) -> None:
    shop.runtime(chat)
    shop.finish()
    assert chat.runtime is not None
    chat.runtime.prepare()
    caches = DecodeCache(), DecodeCache()
    ids = list(PROMPT)
    for turn in range(3):
        got = answer(chat, ids, cache=caches[0])
        runtime, chat.runtime = chat.runtime, None
        same(got, answer(chat, ids, cache=caches[1]))
        chat.runtime = runtime
        ids += [*(event.id for event in got[: 20 - turn]), 70 + turn, 71, 72]
    assert isinstance(caches[0].past, RoomCache)
    held, plain = (cache.past.molora_state.history for cache in caches)
    assert torch.equal(held.ids, plain.ids) and torch.equal(held.indices, plain.indices)
    torch.testing.assert_close(caches[0].past.layers[2].keys, caches[1].past.layers[2].keys)


def test_draws_are_those_of_the_same_seed(chat: RoutedModel, shop: Workshop) -> None:
    wanted = answer(chat, sampler=Sampler(0.9, 0.9, 20, seed=3))
    runtime = shop.runtime(chat)
    shop.finish()
    runtime.prepare()
    same(answer(chat, sampler=Sampler(0.9, 0.9, 20, seed=3)), wanted)


def test_dora_biases_and_the_head(tiny_llama: Path, shop: Workshop) -> None:
    base = shallow(tiny_llama)
    gen = torch.Generator().manual_seed(0)
    factors: dict[str, dict[str, Factors]] = {"a": {}, "b": {}}
    for path in ("lm_head", "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"):
        out, inner = base.get_submodule(path).weight.shape
        for name, rank in (("a", 3), ("b", 20)):
            A, B = torch.randn(rank, inner, generator=gen), torch.randn(out, rank, generator=gen)
            special = name == "b" and path != "lm_head"
            magnitude = 1 + torch.rand(out, generator=gen) if special else None
            bias = torch.randn(out, generator=gen) if special else None
            factors[name][path] = Factors(A / inner**0.5, B * 0.1, 0.7, magnitude=magnitude, bias=bias)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    model = RoutedModel(base, factors, tokenizer=tokenizer, backend="cpu").eval()
    shape = shape_of(model)
    assert shape.extra == ("lm_head",) and len(shape.scaled) == len(shape.biased) == 2
    runtime = shop.runtime(model)
    shop.finish()
    runtime.prepare()
    for route in ("off", "a", "b"):
        same(*_both(model, PROMPT, route=route))


def _deep(folder: Path) -> tuple[Material, RoutedModel]:
    """A model whose router reads hidden states."""
    base, tokenizer = shallow(folder, 4), AutoTokenizer.from_pretrained(folder)
    material = Material(base, random_factors(base, 3, 4), "tiny", tokenizer=tokenizer)
    model = material.routed("cpu")
    model.router = material.deep_router(model)
    return material, model


@pytest.mark.parametrize("wrong", [2, 3])
def test_a_close_decision_may_fall_otherwise_at_first(
    wrong: int, tiny_llama: Path, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = _deep(tiny_llama)
    runtime = shop.runtime(model)
    shop.finish()
    runtime.prepare()
    (program,) = shop.ready.values()
    run, left = program.run, iter(range(wrong))
    monkeypatch.setattr(
        program, "run", lambda inputs: run(inputs) + torch.arange(320.0) * (next(left, None) is not None)
    )
    same(*_both(model, PROMPT))
    assert runtime.ready == (wrong < DOUBTS)


def test_a_router_that_reads_hidden_states_is_called_by_the_graph(tiny_llama: Path, shop: Workshop) -> None:
    material, model = _deep(tiny_llama)
    router = model.router
    assert router is not None
    shape = shape_of(model)
    assert len(shape.taps) == router.groups > 1
    runtime = shop.runtime(model)
    shop.finish()
    runtime.prepare()
    router.k = 2
    got, wanted = _both(model, PROMPT)
    same(got, wanted)
    assert len({event.route.indices for event in got}) > 3 and len(got[0].route.indices) == router.groups
    (program,) = shop.ready.values()
    before = program.runs
    for route in ("off", "a1"):  # the graph's taps have nothing to say then
        same(*_both(model, PROMPT, route=route))
    assert program.runs - before == 2 * 11
    model.router = material.router(model)  # another router: the same graph serves it
    same(*_both(model, PROMPT))
    assert runtime.builds == 1 and runtime.ready


def test_a_step_that_says_something_else_is_refused(
    chat: RoutedModel, shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = answer(chat)

    runtime = shop.runtime(chat)
    shop.finish()
    runtime.prepare()
    (program,) = shop.ready.values()
    run = program.run
    monkeypatch.setattr(program, "run", lambda inputs: run(inputs) + torch.arange(320.0))
    same(answer(chat), wanted)
    assert not runtime.ready and "off by" in shop.said[-1]


def test_failures_are_said_once_and_answers_go_on(chat: RoutedModel, shop: Workshop, tmp_path: Path) -> None:
    wanted = answer(chat)
    shop.failure = "no C++ compiler was found"
    shop.runtime(chat)
    same(answer(chat), wanted)
    assert len(shop.said) == 1 and "no C++ compiler" in shop.said[0]

    shop.failure = None
    runtime = shop.runtime(chat)
    path = shop.orders[0][1]
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".failed").write_text("g++ went away\n")
    for _ in range(2):
        same(answer(chat), wanted)
    assert [text for text in shop.said if "g++ went away" in text] == shop.said[-1:]
    again = shop.runtime(chat)  # the next start does not try again, and is silent
    assert again.builds == 0 and runtime.builds == 1 and "g++" in shop.said[-1] and len(shop.said) == 3


def test_a_damaged_package_is_made_again(chat: RoutedModel, shop: Workshop) -> None:
    shop.runtime(chat)
    path = shop.orders[0][1]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"nothing of use")
    model_runtime = Runtime(chat, shop.said.append, make=shop.make)
    assert not model_runtime.ready and "cannot be loaded" in shop.said[-1] and not path.exists()


def test_where_a_base_lies_makes_no_other_step(chat: RoutedModel) -> None:
    shape = shape_of(chat)
    chat.config._name_or_path, chat.config.id2label = "/elsewhere", {0: "a"}
    assert shape_of(chat) == shape
    chat.config.rms_norm_eps = 0.5
    assert shape_of(chat) != shape


def test_a_step_that_fails_is_left_within_the_answer(chat: RoutedModel, shop: Workshop) -> None:
    wanted = answer(chat)
    runtime = shop.runtime(chat)
    shop.finish()
    runtime.prepare()
    (program,) = shop.ready.values()
    whole, runs = program.run, []

    def run(inputs: list[torch.Tensor]) -> torch.Tensor:
        runs.append(1)
        if len(runs) == 5:
            raise RuntimeError("no such thing\nand more")
        return whole(inputs)

    program.run = run  # type: ignore[method-assign]
    try:
        same(answer(chat), wanted)
    finally:
        program.run = whole  # type: ignore[method-assign]
    assert len(runs) == 5 and not runtime.ready and "it failed: no such thing" in shop.said[-1]


def test_a_base_that_changes_is_bound_again(chat: RoutedModel, shop: Workshop) -> None:
    runtime = shop.runtime(chat)
    shop.finish()
    runtime.prepare()
    answer(chat, new=4)
    for weight in chat.base.parameters():
        weight.data = weight.data * 0.5
    same(*_both(chat, PROMPT))
    assert runtime.ready and runtime.builds == 1
    head = chat.base.get_output_embeddings()
    getattr(head, "base", head).weight = chat.base.get_input_embeddings().weight
    runtime.prepare()
    assert not runtime.ready  # its config says that they are two


def test_what_a_router_raises_within_the_graph_arrives(tiny_llama: Path, shop: Workshop) -> None:
    base = shallow(tiny_llama)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    material = Material(base, random_factors(base, 9, 4), "tiny", tokenizer=tokenizer)
    model = material.routed("cpu")
    model.router = material.deep_router(model)
    runtime = shop.runtime(model)
    shop.finish()
    runtime.prepare()
    same(*_both(model, PROMPT))
    model.topk = TOP + 1  # more than the graph has room for
    same(*_both(model, PROMPT))
    model.topk = 1
    stage: Any = model.router.live[0]

    def interrupted(*anything: Any) -> Any:
        raise KeyboardInterrupt

    events = stream_ids(model, PROMPT, max_new_tokens=8)
    next(events)
    next(events)
    stage.heads[0].log_probabilities = interrupted
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert runtime.ready


def test_what_has_no_compiled_step(chat: RoutedModel, shop: Workshop, chat_bundle: Path) -> None:
    plain = load(chat_bundle, backend="torch")
    assert shop.runtime(plain).builds == 0 and shop.said == []
    route = torch.zeros(1, 1, 1, TOP + 1, dtype=torch.int64)
    runtime = shop.runtime(chat)
    shop.finish()
    runtime.prepare()
    cache = new_cache(chat.config)
    assert cache is not None
    from molora_cli.core.routed.route import Route

    given = Route(route, torch.ones(route.shape))
    with torch.no_grad():
        chat(torch.tensor([PROMPT]), cache=cache, use_cache=True)
    assert runtime.token(70, cache, given, lambda: (torch.zeros(1), None)) is None
    assert cache.get_seq_length() == len(PROMPT)
