"""Routers that read hidden states: routes made while the base runs equal in every way of running it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, StaticCache

from molora_cli import RoutedModel
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.router.arrow import fit_arrow
from molora_cli.core.router.columns import drop_expert
from molora_cli.core.router.files import join_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.router.taps import TapHead, TapsStage, tap_groups
from molora_cli.errors import InputError

NAMES = ("a", "b", "c")
LAYERS, WIDTH, VOCABULARY = 4, 32, 96


def base_model(family: str = "llama") -> Any:
    torch.manual_seed(0)
    shared = {"vocab_size": VOCABULARY, "initializer_range": 0.2, "eos_token_id": 95}
    if family == "gpt2":
        config: Any = GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64, **shared)
        base: Any = GPT2LMHeadModel(config).eval()
    else:
        sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS}
        heads_ = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        config = LlamaConfig(**sizes, **heads_, **shared, pad_token_id=0, bos_token_id=1)
        base = LlamaForCausalLM(config).eval()
    base.generation_config.pad_token_id = 0
    return base


def factors_of(base: Any, family: str = "llama") -> dict[str, dict[str, Factors]]:
    """Three adapters of ranks 2, 3, 4; the last one leaves the projections of q alone."""
    generator = torch.Generator().manual_seed(1)
    if family == "gpt2":
        paths = [f"transformer.h.{i}.mlp.c_fc" for i in range(LAYERS)]
    else:
        paths = [
            f"model.layers.{i}.{m}" for i in range(LAYERS) for m in ("self_attn.q_proj", "mlp.down_proj")
        ]
    out: dict[str, dict[str, Factors]] = {}
    for number, name in enumerate(NAMES):
        parts = {}
        for path in paths:
            if name == "c" and "q_proj" in path:
                continue
            module = base.get_submodule(path)
            width, size = (module.nx, module.nf) if hasattr(module, "nf") else reversed(module.weight.shape)
            r = 2 + number
            A = torch.randn(r, width, generator=generator) / 6
            parts[path] = Factors(A, torch.randn(size, r, generator=generator) / 2, 1.5)
        out[name] = parts
    return out


def heads(count: int, experts: int, *, prior: int = 0, seed: int = 3) -> dict[str, Tensor]:
    """Random heads sharp enough for top-1 to differ between tokens."""
    torch.manual_seed(seed)
    found = {}
    for i in range(count):
        head = TapHead(WIDTH, experts, prior=prior, hidden=16)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        found |= {f"taps.{i}.{name}": value.detach() for name, value in head.state_dict().items()}
    return found


def context_stage(embedding: Tensor, groups: list[tuple[int, int]]) -> tuple[StageSpec, dict[str, Tensor]]:
    """A `centroid`-like stage on ids, made without data."""
    from molora_cli.core.router.context import sample_rows
    from molora_cli.core.router.context_net import ContextNet

    torch.manual_seed(5)
    net = ContextNet(WIDTH, 3, projection=8, hidden=8, decays=(0.5, 0.9))
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    sampled, samples = sample_rows(embedding)
    params = {"decays": [0.5, 0.9], "projection": 8, "hidden": 8, "scale": 1.0, "sampled": sampled}
    tensors = {**net.state_dict(), "centre": torch.zeros(WIDTH), "samples": samples}
    return StageSpec(kind="context", experts=list(NAMES), groups=groups, params=params), tensors


def stages_of(kind: str, base: Any, factors: Mapping[str, Mapping[str, Factors]]) -> list[Any]:
    experts = ["__base__", *NAMES]
    mlp = {"head": "mlp"}
    if kind == "taps":
        groups = tap_groups((1, 3), LAYERS)
        return [(StageSpec(kind="taps", experts=experts, groups=groups, params=mlp), heads(2, 4))]
    if kind == "layer":
        groups = tap_groups(range(LAYERS), LAYERS)
        return [(StageSpec(kind="layer", experts=experts, groups=groups, params=mlp, k=2), heads(LAYERS, 4))]
    if kind in ("hidden", "hidden end"):
        params = {**mlp, "tap": 2 if kind == "hidden" else LAYERS}
        return [(StageSpec(kind="hidden", experts=experts, params=params), heads(1, 4))]
    if kind == "arrow":
        return [fit_arrow(factors, LAYERS, k=2)]
    assert kind == "context+taps"
    embedding = base.get_input_embeddings().weight
    params = {**mlp, "prior": "context"}
    groups = tap_groups((1, 2), LAYERS)
    taps = StageSpec(kind="taps", experts=[*NAMES, "__base__"], groups=groups, params=params)
    return [context_stage(embedding, [(0, 1)]), (taps, heads(2, 4, prior=4))]


def make_model(kind: str, family: str = "llama") -> RoutedModel:
    base = base_model(family)
    factors = factors_of(base, family)
    made = stages_of(kind, base, factors)
    spec = RouterSpec(stages=[stage for stage, _ in made])
    around = Surroundings(n_layers=LAYERS, embedding=base.get_input_embeddings().weight.detach())
    router = RouterStack(spec, join_tensors([tensors for _, tensors in made]), around, NAMES)
    return RoutedModel.from_parts(base, factors, router=router)


def ids_of(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 95, (batch, length), generator=torch.Generator().manual_seed(seed))


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-4


def routes(output: Any, batch: int) -> Tensor:
    return torch.tensor(output.trace.indices).unflatten(0, (batch, -1))


KINDS = ["taps", "layer", "hidden", "hidden end", "arrow", "context+taps"]
SETUPS = [*((kind, "llama") for kind in KINDS), ("taps", "gpt2"), ("hidden", "gpt2"), ("arrow", "gpt2")]


@pytest.mark.parametrize(("kind", "family"), SETUPS)
@torch.no_grad()
def test_full_chunked_and_cached_runs_agree(kind: str, family: str) -> None:
    model, ids = make_model(kind, family), ids_of(2, 12)
    full = model(ids)
    assert len(torch.tensor(full.trace.indices).flatten(1).unique(dim=0)) > 2, "routes must differ"
    for cuts in ([1] * 12, [5, 1, 6]):
        cache, logits, found = None, [], []
        for block in ids.split(cuts, dim=1):
            out = model(block, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
            found.append(routes(out, 2))
        same(torch.cat(logits, 1), full.logits)
        assert torch.equal(torch.cat(found, 1), routes(full, 2))
        assert torch.equal(cache.molora_state.history.indices, torch.cat(found, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padding_on_either_side_changes_nothing(kind: str, side: str) -> None:
    model, rows = make_model(kind), [ids_of(1, 9, 1), ids_of(1, 5, 2)]
    ids, mask = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.int64)
    places = []
    for row, one in enumerate(rows):
        n = one.shape[1]
        places.append(slice(9 - n, 9) if side == "left" else slice(0, n))
        ids[row, places[-1]], mask[row, places[-1]] = one[0], 1
    out = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp_min(0), use_cache=True)
    nexts = ids_of(2, 2, 9)
    longer = torch.cat([mask, torch.ones(2, 2, dtype=torch.int64)], 1)
    after = model(
        nexts,
        attention_mask=longer,
        position_ids=(longer.cumsum(-1) - 1)[:, -2:],
        past_key_values=out.past_key_values,
    )
    for row, (one, document) in enumerate(zip(rows, out.trace.documents(), strict=True)):
        alone = model(torch.cat([one, nexts[row : row + 1]], 1))
        n = one.shape[1]
        assert out.trace.indices[document].tolist() == alone.trace.indices[:n].tolist()
        assert after.trace.indices[2 * row : 2 * row + 2].tolist() == alone.trace.indices[n:].tolist()
        same(out.logits[row, places[row]], alone.logits[0, :n])
        same(after.logits[row], alone.logits[0, n:])


@pytest.mark.parametrize("kind", ["taps", "hidden", "context+taps"])
@torch.no_grad()
def test_cache_operations_take_the_router_along(kind: str) -> None:
    model, ids, nexts = make_model(kind), ids_of(3, 8), ids_of(3, 2, 5)

    def fresh() -> Any:
        return model(ids, use_cache=True).past_key_values

    def check(cache: Any, history: Tensor, block: Tensor) -> None:
        got = model(block, past_key_values=cache)
        wanted = model(torch.cat([history, block], 1))
        same(got.logits, wanted.logits[:, -block.shape[1] :])
        assert torch.equal(routes(got, len(block)), routes(wanted, len(block))[:, -block.shape[1] :])

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
    check(cache, ids[:, :5], nexts)
    cache = fresh()
    cache.reset()
    if cache.get_seq_length() == 0:
        check(cache, ids[:, :0], nexts)
    # a prefix that a given adapter has made: the router has seen nothing of it yet
    model.only("a")
    cache = model(ids, use_cache=True).past_key_values
    model.auto()
    got = model(nexts, past_key_values=cache)
    if kind == "hidden":
        assert torch.equal(routes(got, 3), routes(model(torch.cat([ids, nexts], 1)), 3)[:, -2:])


@pytest.mark.parametrize("kind", ["taps", "hidden", "context+taps", "arrow"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
    ],
    ids=lambda o: " ".join(map(str, o)) or "greedy",
)
@torch.no_grad()
def test_generate_equals_generate_without_a_cache(kind: str, options: dict[str, Any]) -> None:
    model, ids = make_model(kind), ids_of(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :3] = ids[0, :3] = 0
    fixed = {"attention_mask": mask, "max_new_tokens": 6}
    beams = {k: v for k, v in options.items() if k.startswith("num")}
    got = model.generate(ids, **fixed, **options)
    assert torch.equal(got, model.generate(ids, **fixed, **beams, use_cache=False))
    if not options:
        model.off()
        assert not torch.equal(model.generate(ids, **fixed), got)


@torch.no_grad()
def test_static_cache_for_two_passes() -> None:
    model, ids = make_model("hidden"), ids_of(2, 9)
    full = model(ids)
    cache = StaticCache(model.config, max_cache_len=16)
    first = model(ids[:, :6], past_key_values=cache)
    second = model(ids[:, 6:], past_key_values=cache)
    same(torch.cat([first.logits, second.logits], 1), full.logits)


@pytest.mark.parametrize("kind", ["taps", "context+taps"])
@torch.no_grad()
def test_layers_take_the_route_of_their_own_group(kind: str) -> None:
    """The routes that a forward decided, given to it, make the same logits; layers below the first tap are
    the base's, or the stage's on ids."""
    model, ids = make_model(kind), ids_of(2, 10)
    out = model(ids)
    from molora_cli import Route

    indices = routes(out, 2).long()
    gates = torch.tensor(out.trace.gates).unflatten(0, (2, -1))
    if kind == "taps":
        assert model.router is not None and model.router.group_ranges == [(1, 3), (3, 4)]
        indices = torch.cat([torch.full_like(indices[:, :, :1], -1), indices], 2)
        gates = torch.cat([torch.zeros_like(gates[:, :, :1]), gates], 2)
    # one group a layer
    spread = [0, 1, 1, 2] if kind == "taps" else [0, 1, 2, 2]
    model.router = None
    given = model(ids, route=Route(indices[:, :, spread], gates[:, :, spread]))
    assert torch.equal(given.logits, out.logits)


@torch.no_grad()
def test_settings_hold_for_live_stages() -> None:
    model, ids = make_model("taps"), ids_of(2, 10)
    model.muted = ["b"]
    assert 1 not in model(ids).trace.indices
    model.muted = []
    model.topk = 3
    model.temperature = 2.0
    out = model(ids)
    assert out.trace.indices.shape[-1] == 3
    soft = out.trace.gates
    model.temperature = 0.5
    assert float(model(ids).trace.gates[..., 0].mean()) > float(soft[..., 0].mean())
    model.only("c")
    assert set(model(ids).trace.indices.flatten().tolist()) == {2}
    model.off()
    bare = base_model()(ids).logits
    assert torch.equal(model(ids).logits, bare)


def test_the_pass_before_holds_no_adapter() -> None:
    """`hidden` routes by the base's own state, whatever adapters its routes take."""
    model, ids = make_model("hidden"), ids_of(2, 8)
    assert model.router is not None
    stage = model.router.live[0]
    with torch.no_grad():
        state = base_model()(ids, output_hidden_states=True).hidden_states[2]
        logp = stage.score(2, state, torch.ones_like(ids, dtype=torch.bool), None).logp
        found = torch.tensor(model(ids).trace.scores).unflatten(0, (2, -1))
    assert torch.allclose(found.double(), logp.double(), atol=1e-4)


@pytest.mark.parametrize("kind", ["taps", "hidden"])
def test_embeddings_without_ids_suffice(kind: str) -> None:
    model, ids = make_model(kind), ids_of(2, 6)
    with torch.no_grad():
        embeds = model.base.get_input_embeddings()(ids)
        assert torch.equal(model(inputs_embeds=embeds).logits, model(ids).logits)
        with pytest.raises(InputError, match="only inputs_embeds"):
            make_model("context+taps")(inputs_embeds=embeds)


def test_ids_alone_give_no_route() -> None:
    model = make_model("context+taps")
    assert model.router is not None
    with pytest.raises(InputError, match="reads hidden states"):
        model.router.decide(ids_of(1, 3), None, model.router.start(1))


def test_detach_takes_the_hooks_along() -> None:
    model, ids = make_model("layer"), ids_of(1, 5)
    base = model.detach()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in base.modules())
    with torch.no_grad():
        assert torch.equal(base(ids).logits, base_model()(ids).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gates_carry_gradients_to_the_heads(checkpointing: bool) -> None:
    """Soft gates of live stages: the loss's gradient equals the difference quotient, checkpointed or not."""
    model, ids = make_model("context+taps"), ids_of(2, 8)
    router = model.router
    assert router is not None
    stage = router.live[0]
    assert isinstance(stage, TapsStage)
    router.k, router.differentiable = 4, True
    for parameter in stage.parameters():
        parameter.requires_grad_(True)
    if checkpointing:
        model.base.gradient_checkpointing_enable()
        model.train()

    def loss() -> Tensor:
        return model(ids, labels=ids).loss

    value = loss()
    value.backward()
    head = stage.heads[0].inner.bias
    assert head.grad is not None
    direction = head.grad / head.grad.norm()
    step = 1e-3
    with torch.no_grad():
        head += step * direction
        above = loss()
        head -= 2 * step * direction
        below = loss()
    assert float((above - below) / (2 * step)) == pytest.approx(float(head.grad.norm()), rel=2e-2)
    for other in stage.parameters():
        assert other.grad is not None and bool(other.grad.isfinite().all())


def test_a_near_tie_may_fall_either_way_and_nothing_else_does() -> None:
    """Hidden states of a cached run differ in the last bits: routes agree where the margin is above that."""
    model, ids = make_model("taps"), ids_of(4, 24)
    with torch.no_grad():
        full = model(ids)
        cache, scores = None, []
        for block in ids.split(1, dim=1):
            out = model(block, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            scores.append(torch.tensor(out.trace.scores).unflatten(0, (4, 1)))
    wanted = torch.tensor(full.trace.scores).unflatten(0, (4, -1))
    found = torch.cat(scores, 1)
    assert float((found - wanted).abs().max()) < 1e-4
    top = wanted.sort(-1, descending=True).values
    clear = top[..., 0] - top[..., 1] > 2e-4
    assert float(clear.float().mean()) > 0.99
    assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])


@pytest.mark.parametrize("kind", ["context+taps", "layer", "arrow"])
def test_an_expert_leaves_and_the_others_keep_their_scores(kind: str) -> None:
    """Of two routers, one over all adapters and one without b, the same head scores the others."""
    base = base_model()
    factors = factors_of(base)
    made = stages_of(kind, base, factors)
    spec = RouterSpec(stages=[stage for stage, _ in made])
    tensors = join_tensors([own for _, own in made])
    less, kept, notes = drop_expert(spec, tensors, "b", force=False)
    assert len(notes) == len(made) and all("b" not in stage.experts for stage in less.stages)
    around = Surroundings(n_layers=LAYERS, embedding=base.get_input_embeddings().weight.detach())
    whole, rest = (RouterStack(header, own, around, NAMES) for header, own in ((spec, tensors), (less, kept)))
    hidden = torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(1, 3, dtype=torch.bool)
    first, second = whole.live[0], rest.live[0]
    columns = [first.experts.index(e) for e in second.experts]
    if kind == "arrow":
        path = "model.layers.1.self_attn.q_proj"
        scores = [stage.score_module(path, hidden).logp for stage in (first, second)]
        assert torch.allclose(scores[0][..., columns].log_softmax(-1), scores[1], atol=1e-9)
        # a trace holds log-probabilities
        assert torch.allclose(scores[0].exp().sum(-1), torch.ones(1, 3, 1, dtype=torch.float64))
        return
    prior = torch.zeros(1, 3, 4) if kind == "context+taps" else None
    for tap in first.taps:
        one = first.score(tap, hidden, mask, prior).logp[..., columns].log_softmax(-1)
        two = second.score(tap, hidden, mask, None if prior is None else prior[..., columns]).logp
        assert torch.allclose(one, two, atol=1e-9)
