"""Routes that depend on earlier tokens: cached, chunked, padded, reordered, cropped runs equal full ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

from molora_cli import Route, RoutedModel, Trace
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.stack import RouterStack
from molora_cli.errors import InputError

NAMES = ("a", "b", "c")
GROUPS = [(0, 1), (2, 3), (3, 4)]  # layer 1 is in none and takes the base


@register_kind
class RunningStage(IdStage):
    """For these tests: scores from a running average of token values, so that every earlier token counts."""

    kind = "test_running"

    def start(self, batch: int) -> State:
        return {"sum": torch.zeros(batch, dtype=torch.float64), "seen": torch.zeros(batch, dtype=torch.int64)}

    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        total, seen, columns = state["sum"], state["seen"], []
        for step in range(ids.shape[1]):
            real = mask[:, step]
            total = torch.where(real, 0.7 * total + (ids[:, step] % 7 + 1).double(), total)
            seen = seen + real
            angle = (total[:, None] + torch.arange(self.groups))[..., None] + 2.1 * torch.arange(
                len(self.experts)
            )
            columns.append(
                (3 * angle.sin() + 0.01 * seen[:, None, None] * torch.arange(len(self.experts))).log_softmax(
                    -1
                )
            )
        return Scores(torch.stack(columns, dim=1)), {"sum": total, "seen": seen}


def make_model(
    groups: list[tuple[int, int]] | None = None, *, k: int = 1, family: str = "llama"
) -> RoutedModel:
    torch.manual_seed(0)
    base: Any
    if family == "llama":
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
            max_position_embeddings=64,
            initializer_range=0.2,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=95,
        )
        base = LlamaForCausalLM(config).eval()
        modules = {
            f"model.layers.{i}.{m}": 32 for i in range(4) for m in ("self_attn.q_proj", "mlp.gate_proj")
        }
    else:
        gpt2 = GPT2Config(
            n_embd=32,
            n_layer=4,
            n_head=4,
            vocab_size=96,
            n_positions=64,
            initializer_range=0.2,
            eos_token_id=95,
        )
        base = GPT2LMHeadModel(gpt2).eval()
        modules = {f"transformer.h.{i}.mlp.c_fc": 32 for i in range(4)}
    base.generation_config.pad_token_id = 0
    factors: dict[str, Mapping[str, Factors]] = {}
    for number, name in enumerate(NAMES):
        parts = {}
        for path, size in modules.items():
            module = base.get_submodule(path)
            out = module.nf if hasattr(module, "nf") else module.out_features
            parts[path] = Factors(torch.randn(2 + number, size) / 6, torch.randn(out, 2 + number) / 2, 1.5)
        factors[name] = parts
    stage = StageSpec(kind="test_running", experts=["__base__", *NAMES], groups=groups or [], k=k)
    router = RouterStack(RouterSpec(stages=[stage]), {}, Surroundings(n_layers=4), NAMES)
    return RoutedModel.from_parts(base, factors, router=router)


def ids_of(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 95, (batch, length), generator=torch.Generator().manual_seed(seed))


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-4


SETUPS = [
    pytest.param({}, id="one route"),
    pytest.param({"groups": GROUPS, "k": 2}, id="three groups, top-2"),
    pytest.param({"family": "gpt2"}, id="gpt2"),
]


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 6], [11, 1]])
@torch.no_grad()
def test_chunked_and_cached_runs_agree(setup: dict[str, Any], cuts: list[int]) -> None:
    model, ids = make_model(**setup), ids_of(2, 12)
    full = model(ids)
    assert isinstance(full.trace, Trace)
    assert len(torch.tensor(full.trace.indices).flatten(1).unique(dim=0)) > 2
    cache, logits, indices = None, [], []
    for block in ids.split(cuts, dim=1):
        out = model(block, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
        indices.append(torch.tensor(out.trace.indices).unflatten(0, block.shape))
    same(torch.cat(logits, 1), full.logits)
    assert torch.equal(torch.cat(indices, 1).flatten(0, 1), torch.tensor(full.trace.indices))
    history = cache.molora_state.history
    assert torch.equal(history.ids, ids) and torch.equal(history.indices, torch.cat(indices, 1))
    assert isinstance(cache, DynamicCache)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("setup", SETUPS[:2])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(setup: dict[str, Any], side: str) -> None:
    model, rows = make_model(**setup), [ids_of(1, 9, 1), ids_of(1, 5, 2), ids_of(1, 1, 3)]
    ids, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    places = []
    for row, one in enumerate(rows):
        n = one.shape[1]
        places.append(slice(9 - n, 9) if side == "left" else slice(0, n))
        ids[row, places[-1]], mask[row, places[-1]] = one[0], 1
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    out = model(ids, attention_mask=mask, position_ids=position, use_cache=True)
    trace = out.trace
    assert trace.starts.tolist() == [0, 9, 14] and len(trace) == 15
    nexts = ids_of(3, 2, 9)
    longer = torch.cat([mask, torch.ones(3, 2, dtype=torch.int64)], 1)
    after = model(
        nexts,
        attention_mask=longer,
        position_ids=(longer.cumsum(-1) - 1)[:, -2:],
        past_key_values=out.past_key_values,
    )
    for row, (one, document) in enumerate(zip(rows, trace.documents(), strict=True)):
        alone = model(torch.cat([one, nexts[row : row + 1]], 1))
        n = one.shape[1]
        assert trace.token_ids[document].tolist() == one[0].tolist()
        assert trace.indices[document].tolist() == alone.trace.indices[:n].tolist()
        assert after.trace.indices[2 * row : 2 * row + 2].tolist() == alone.trace.indices[n:].tolist()
        same(out.logits[row, places[row]], alone.logits[0, :n])
        same(after.logits[row], alone.logits[0, n:])


@torch.no_grad()
def test_cache_operations_take_the_router_along() -> None:
    model, ids, nexts = make_model(GROUPS), ids_of(3, 8), ids_of(3, 2, 5)
    reference = model(torch.cat([ids, nexts], 1))

    def fresh() -> Any:
        return model(ids, use_cache=True).past_key_values

    def check(cache: Any, history: Tensor, block: Tensor) -> None:
        got = model(block, past_key_values=cache)
        wanted = model(torch.cat([history, block], 1))
        n = block.shape[1]
        same(got.logits, wanted.logits[:, -n:])
        want = torch.tensor(wanted.trace.indices).unflatten(0, (len(block), -1))[:, -n:]
        assert torch.equal(torch.tensor(got.trace.indices).unflatten(0, block.shape), want)

    cache = fresh()
    twin = copy.deepcopy(cache)
    check(cache, ids, nexts)
    check(twin, ids, nexts)
    order = torch.tensor([2, 0, 0])
    cache = fresh()
    cache.reorder_cache(order)
    check(cache, ids[order], nexts)
    cache = fresh()
    cache.batch_select_indices(torch.tensor([1]))
    check(cache, ids[1:2], nexts[1:2])
    cache = fresh()
    cache.batch_repeat_interleave(2)
    check(cache, ids.repeat_interleave(2, 0), nexts.repeat_interleave(2, 0))
    cache = fresh()
    cache.crop(-3)
    assert cache.molora_state.length == 5
    check(cache, ids[:, :5], nexts)
    cache = fresh()
    cache.crop(-8)
    same(model(torch.cat([ids, nexts], 1), past_key_values=cache).logits, reference.logits)
    cache = fresh()
    cache.reset()
    if cache.get_seq_length() == 0:  # older transformers zero the keys and keep their positions: refused
        check(cache, ids[:, :0], nexts)
    else:
        with pytest.raises(InputError, match="without matching router state"):
            model(nexts, past_key_values=cache)
    # a copy is a copy
    cache = fresh()
    twin = copy.deepcopy(cache)
    twin.crop(-4)
    assert cache.molora_state.length == 8 and twin.molora_state.length == 4
    assert twin.molora_state.owner is cache.molora_state.owner


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.8, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda o: " ".join(map(str, o)) or "greedy",
)
@pytest.mark.parametrize("groups", [None, GROUPS], ids=["one group", "three groups"])
@torch.no_grad()
def test_generate_equals_generate_without_a_cache(options: dict[str, Any], groups: Any) -> None:
    model = make_model(groups)
    batch = 1 if "prompt_lookup_num_tokens" in options else 2
    ids, mask = ids_of(batch, 7), torch.ones(batch, 7, dtype=torch.int64)
    if batch == 2:
        mask[0, :3] = 0
        ids[0, :3] = 0
    fixed = {"attention_mask": mask, "max_new_tokens": 9}
    plain = {
        k: v for k, v in options.items() if k not in ("cache_implementation", "prompt_lookup_num_tokens")
    }
    plain.pop("prefill_chunk_size", None)
    torch.manual_seed(1)
    got = model.generate(ids, **fixed, **options)
    torch.manual_seed(1)
    wanted = model.generate(ids, **fixed, **plain, use_cache=False)
    assert torch.equal(got, wanted)
    model.off()
    torch.manual_seed(1)
    assert not torch.equal(model.generate(ids, **fixed, **plain), wanted)


@torch.no_grad()
def test_static_cache_and_reset() -> None:
    model, ids = make_model(), ids_of(2, 9)
    full = model(ids)
    cache = StaticCache(model.config, max_cache_len=16)
    for _ in range(2):
        first = model(ids[:, :6], past_key_values=cache)
        second = model(ids[:, 6:], past_key_values=cache)
        same(torch.cat([first.logits, second.logits], 1), full.logits)
        cache.reset()


@torch.no_grad()
def test_back_to_the_router_in_mid_chat() -> None:
    """Keys and values stay those of the routes they were made under; the router's own view is of all ids."""
    model, ids = make_model(), ids_of(2, 12)
    wanted = torch.tensor(model(ids).trace.indices).unflatten(0, (2, 12))
    model.only("b")
    first = model(ids[:, :4], use_cache=True)
    assert set(first.trace.indices.flatten().tolist()) == {1}
    cache = first.past_key_values
    model.auto()
    second = model(ids[:, 4:7], past_key_values=cache)
    third = model(ids[:, 7:9], past_key_values=cache, route=Route.constant([0, 2], [0.5, 0.5], 2, 2))
    last = model(ids[:, 9:], past_key_values=cache)
    for out, part in ((second, slice(4, 7)), (last, slice(9, 12))):
        assert torch.equal(torch.tensor(out.trace.indices).unflatten(0, (2, -1)), wanted[:, part])
    assert third.trace.indices.shape == (4, 1, 2)
    state = cache.molora_state.history
    assert state.indices.shape == (2, 12, 1, 2) and state.scores is None
    assert state.indices[:, 7:9].tolist() == [[[[0, 2]]] * 2] * 2
    assert state.indices[:, :4].tolist() == [[[[1, -1]]] * 4] * 2


@torch.no_grad()
def test_a_cache_without_matching_state_is_refused() -> None:
    model, other, ids = make_model(), make_model(), ids_of(2, 6)
    block = ids_of(2, 1, 3)
    with pytest.raises(InputError, match="another routed model"):
        model(block, past_key_values=other(ids, use_cache=True).past_key_values)
    bare = other.detach()
    with pytest.raises(InputError, match="without this routed model"):
        model(block, past_key_values=bare(ids, use_cache=True).past_key_values)
    cache = model(ids, use_cache=True).past_key_values
    for layer in cache.layers:
        layer.crop(-2)
    with pytest.raises(InputError, match="seen 6 positions"):
        model(block, past_key_values=cache)
    model.off()
    model(block, past_key_values=cache)
    model.auto()
    with pytest.raises(InputError, match="never saw"):
        model(block, past_key_values=cache)


@torch.no_grad()
def test_embeddings_without_ids_need_a_route() -> None:
    model, ids = make_model(), ids_of(2, 5)
    embeds = model.base.get_input_embeddings()(ids)
    with pytest.raises(InputError, match="only inputs_embeds"):
        model(inputs_embeds=embeds)
    route = Route.constant([1], [1.0], 2, 5)
    out = model(inputs_embeds=embeds, route=route, use_cache=True)
    same(out.logits, model(ids, route=route).logits)
    with pytest.raises(InputError, match="never saw"):
        model(ids[:, :1], past_key_values=out.past_key_values)


@torch.no_grad()
def test_a_failed_forward_leaves_nothing_behind() -> None:
    model, ids = make_model(), ids_of(2, 5)
    wanted = model(ids)
    with pytest.raises(IndexError):
        model(ids + 1000)
    with pytest.raises(Exception, match="outside a forward"):
        model.base.model(ids)
    same(model(ids).logits, wanted.logits)


@torch.no_grad()
def test_settings_reach_the_router() -> None:
    model, ids = make_model(), ids_of(2, 10)
    before = model.routing
    model.muted = frozenset({"a"})
    assert model.muted == {"a"} and model.routing != before
    assert 0 not in model(ids).trace.indices
    model.muted = frozenset()
    model.topk = 3
    out = model(ids)
    assert out.trace.indices.shape[-1] == 3
    assert out.trace.gates.sum(-1).flatten().tolist() == pytest.approx([1.0] * 20)
    soft = out.trace.gates.max()
    model.temperature = 0.01
    assert model(ids).trace.gates.max() > soft
    assert model(ids).trace.experts == ("__base__", *NAMES)
    assert model(ids).trace.scores.shape == (20, 1, 4)
    with pytest.raises(InputError):
        model.muted = frozenset({"z"})


@torch.no_grad()
def test_streamer_and_pipeline(tiny_llama: Any) -> None:
    from threading import Thread

    from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    torch.manual_seed(0)
    parts = {
        f"model.layers.{i}.mlp.up_proj": Factors(torch.randn(3, 64), torch.randn(128, 3), 0.3)
        for i in range(4)
    }
    stage = StageSpec(kind="test_running", experts=["__base__", "a"])
    router = RouterStack(RouterSpec(stages=[stage]), {}, Surroundings(n_layers=4), ("a",))
    model = RoutedModel.from_parts(base, {"a": parts}, router=router, tokenizer=tokenizer)
    inputs = tokenizer("hello there", return_tensors="pt")
    wanted = model.generate(**inputs, max_new_tokens=8, use_cache=False)
    text = tokenizer.decode(wanted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = Thread(target=model.generate, kwargs={**inputs, "max_new_tokens": 8, "streamer": streamer})
    thread.start()
    assert "".join(streamer) == text
    thread.join()
    pipe = pipeline("text-generation", model=base, tokenizer=tokenizer)
    made = pipe("hello there", max_new_tokens=8, do_sample=False, return_full_text=False)
    assert made[0]["generated_text"] == text


@torch.no_grad()
def test_compiled_base_gives_the_same_routes() -> None:
    model, ids = make_model(), ids_of(2, 6)
    wanted = model(ids)
    compiled = torch.compile(model.base, backend="eager")
    out = compiled(input_ids=ids)
    same(out.logits, wanted.logits)
    assert out.trace.indices.tolist() == wanted.trace.indices.tolist()


@torch.no_grad()
def test_output_survives_copying_and_pickling() -> None:
    import pickle

    from transformers.modeling_outputs import CausalLMOutputWithPast

    model, ids = make_model(), ids_of(1, 4)
    out = model(ids, use_cache=False)
    assert isinstance(out, CausalLMOutputWithPast) and "trace" not in out
    back = pickle.loads(pickle.dumps(out))  # noqa: S301 - made in the line itself
    assert type(back) is CausalLMOutputWithPast and torch.equal(back.logits, out.logits)
    logits = model(ids, return_dict=False, use_cache=False)[0]
    assert torch.equal(logits, out.logits)
