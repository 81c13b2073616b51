"""The routed model against the base and against PEFT, in float32 on tiny models of several families."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from molora_cli import Route, RoutedModel
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.routed.modules import RoutedModule
from molora_cli.errors import InputError, MoloraError

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FAMILIES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "llama": ("Llama", SIZES, [*ATTENTION, "gate_proj", "up_proj", "down_proj"]),
    "qwen2": ("Qwen2", SIZES, ATTENTION),
    "phi3": ("Phi3", SIZES, ["qkv_proj", "gate_up_proj", "o_proj"]),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}, ATTENTION),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": 96,
            "n_positions": 64,
            "initializer_range": 0.2,
        },
        ["c_attn", "c_proj", "c_fc"],
    ),
}


def tiny(family: str, **changes: Any) -> Any:
    prefix, sizes, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}Config")(**{**sizes, **changes})
    names = {"GPT2": "GPT2LMHeadModel"}
    return getattr(transformers, names.get(prefix, f"{prefix}ForCausalLM"))(config).eval()


def peft_of(base: Any, seed: int, targets: list[str] | str, **options: Any) -> PeftModel:
    """A PEFT model on a copy of the base, every factor random."""
    settings = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **options}
    torch.manual_seed(seed)
    model = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=targets, **settings)).eval()
    for name, parameter in model.named_parameters():
        if "lora_embedding" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * torch.randn_like(parameter)
    return model


def factors_of(model: PeftModel) -> dict[str, Factors]:
    """Read out of PEFT's own layers, so that nothing of molora's reader is tested here."""
    found = {}
    for path, layer in model.base_model.model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        scale, magnitude = layer.scaling["default"], None
        if layer.lora_magnitude_vector:
            magnitude = layer.lora_magnitude_vector["default"].weight.detach()
        if "default" in layer.lora_embedding_A:
            A, B = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
            found[path] = Factors(A.detach(), B.detach(), scale, None, magnitude, "embedding")
            continue
        A, B = layer.lora_A["default"], layer.lora_B["default"]
        bias = None if B.bias is None else B.bias.detach()
        found[path] = Factors(A.weight.detach(), B.weight.detach(), scale, bias, magnitude)
    assert found
    return found


def ids_of(batch: int = 2, length: int = 9, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def near(actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    assert actual.shape == expected.shape
    error, scale = float((actual - expected).abs().max()), float(expected.abs().max())
    assert error <= limit * scale, f"error {error:.3g} on logits up to {scale:.3g}"


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_base_bit_for_bit_and_one_adapter_like_peft(family: str) -> None:
    base, ids = tiny(family), ids_of()
    plain = base(ids).logits
    peft = peft_of(base, 1, FAMILIES[family][2])
    other = peft_of(base, 2, FAMILIES[family][2][:1], r=3, lora_alpha=9)
    model = RoutedModel.from_parts(base, {"a": factors_of(peft), "b": factors_of(other)})
    model.off()
    assert torch.equal(model(ids).logits, plain)
    model.auto()
    nothing = Route(torch.full((2, 9, 2), -1), torch.ones(2, 9, 2))
    assert torch.equal(model(ids, route=nothing).logits, plain)
    for name, reference in (("a", peft), ("b", other)):
        model.only(name)
        wanted = reference(ids).logits
        assert float((wanted - plain).abs().max()) > 1e-2 * float(plain.abs().max())
        near(model(ids).logits, wanted, 1e-5)
    model.off()
    assert torch.equal(model(ids).logits, plain)


CASES: dict[str, tuple[str, dict[str, Any], list[str], dict[str, Any]]] = {
    "dora": ("llama", {}, ["q_proj", "down_proj"], {"use_dora": True}),
    "dora with base bias": ("qwen2", {}, ATTENTION, {"use_dora": True}),
    "dora conv1d": ("gpt2", {}, ["c_attn", "c_proj"], {"use_dora": True}),
    "lora_bias": ("qwen2", {}, ["q_proj", "v_proj"], {"lora_bias": True}),
    "rslora": ("llama", {}, ["v_proj"], {"use_rslora": True}),
    "patterns": ("llama", {}, ATTENTION, {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"v_proj": 1}}),
    "embedding": ("llama", {}, ["embed_tokens", "q_proj"], {}),
    "embedding dora": ("llama", {}, ["embed_tokens"], {"use_dora": True}),
    "head": ("llama", {}, ["lm_head"], {}),
    "tied head": ("llama", {"tie_word_embeddings": True}, ["lm_head", "v_proj"], {}),
    "tied embedding": ("llama", {"tie_word_embeddings": True}, ["embed_tokens"], {}),
    "gpt2 wte": ("gpt2", {}, ["wte", "c_fc"], {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_special_adapters_equal_peft(case: str) -> None:
    family, changes, targets, options = CASES[case]
    base, ids = tiny(family, **changes), ids_of()
    if "bias" in case:
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter)
    peft = peft_of(base, 3, targets, **options)
    plain_one = peft_of(base, 4, FAMILIES[family][2][:2])
    plain = base(ids).logits
    model = RoutedModel.from_parts(base, {"plain": factors_of(plain_one), "special": factors_of(peft)})
    model.only("special")
    near(model(ids).logits, peft(ids).logits, 1e-5)
    model.only("plain")
    near(model(ids).logits, plain_one(ids).logits, 1e-5)
    model.off()
    assert torch.equal(model(ids).logits, plain)


@torch.no_grad()
def test_a_move_to_half_precision_keeps_what_dora_needs() -> None:
    base, ids = tiny("llama"), ids_of()
    peft = peft_of(base, 15, ["q_proj", "down_proj"], use_dora=True)
    model = RoutedModel.from_parts(base, {"a": factors_of(peft)})
    model.only("a")
    exact = model(ids).logits
    model.to(torch.bfloat16)
    assert model(ids).logits.dtype == torch.bfloat16
    scales = [m.out_scale for m in model.modules() if isinstance(m, RoutedModule)]
    assert all(scale is not None and scale.dtype == torch.float32 for scale in scales)
    near(model(ids).logits.float(), exact, 0.1)


class PerModule(torch.nn.Module):
    """The mixture of one linear by its definition, from PEFT's own layers: y + sum_k g_k (f_k(x) - y)."""

    def __init__(
        self, inner: torch.nn.Module, adapted: Mapping[int, torch.nn.Module], gates: torch.Tensor
    ) -> None:
        super().__init__()
        self.inner, self.adapted, self.gates = inner, adapted, gates

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        total = y.double()
        for index, layer in self.adapted.items():
            total = total + self.gates[..., index, None].double() * (layer(x).double() - y.double())
        return total.to(y.dtype)


@pytest.mark.parametrize("kind", ["one-hot", "soft", "top-2 with base"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
@torch.no_grad()
def test_mixed_routes_equal_the_definition(family: str, kind: str) -> None:
    base, ids = tiny(family), ids_of()
    targets = FAMILIES[family][2]
    adapters = [
        peft_of(base, 5, targets, use_dora=True),
        peft_of(base, 6, targets[:2], r=3),
        peft_of(base, 7, targets[1:], r=6),
    ]
    generator = torch.Generator().manual_seed(2)
    if kind == "one-hot":
        indices = torch.randint(-1, 3, (2, 9, 1), generator=generator)
        route = Route(indices, torch.ones(2, 9, 1))
    elif kind == "soft":
        gates = torch.rand(2, 9, 3, generator=generator).softmax(-1)
        route = Route(torch.arange(3).expand(2, 9, 3), gates)
    else:
        indices = torch.rand(2, 9, 4, generator=generator).topk(2, -1).indices - 1
        route = Route(indices, torch.rand(2, 9, 2, generator=generator))
    dense = torch.zeros(2, 9, 4).scatter_add(-1, route.indices + 1, route.gates)[..., 1:]
    reference = copy.deepcopy(base)
    for path, inner in list(reference.named_modules()):
        layers = {k: a.base_model.model.get_submodule(path) for k, a in enumerate(adapters)}
        adapted = {k: layer for k, layer in layers.items() if hasattr(layer, "lora_A")}
        if adapted:
            parent, _, child = path.rpartition(".")
            setattr(reference.get_submodule(parent), child, PerModule(inner, adapted, dense))
    model = RoutedModel.from_parts(base, {str(k): factors_of(a) for k, a in enumerate(adapters)})
    near(model(ids, route=route).logits, reference(ids).logits, 1e-5)


@torch.no_grad()
def test_layer_groups_take_their_own_layers() -> None:
    base, ids = tiny("llama"), ids_of()
    peft = peft_of(base, 8, ATTENTION)
    factors = factors_of(peft)
    lower = {path: f for path, f in factors.items() if ".layers.0." in path}
    model = RoutedModel.from_parts(base, {"all": factors, "lower": lower})
    indices = torch.tensor([[0], [-1], [-1]]).expand(2, 9, 3, 1)
    grouped = model(ids, route=Route(indices, torch.ones(2, 9, 3, 1)))
    model.only("lower")
    assert torch.equal(grouped.logits, model(ids).logits)
    assert grouped.trace.indices.shape == (18, 3, 1)
    with pytest.raises(InputError, match="4 layer groups"):
        model(ids, route=Route(torch.zeros(2, 9, 4, 1, dtype=torch.int64), torch.ones(2, 9, 4, 1)))


@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens", "lm_head"]])
@torch.no_grad()
def test_logits_to_keep(targets: list[str]) -> None:
    base, ids = tiny("llama"), ids_of()
    two = torch.tensor([[0, 1], [4, 3]])
    row_by_row = base(ids, logits_to_keep=two).logits.dim() == 3  # older transformers take one choice for all
    model = RoutedModel.from_parts(base, {"a": factors_of(peft_of(base, 9, targets))})
    route = Route(torch.tensor([0, -1] * 9).view(2, 9, 1), torch.ones(2, 9, 1))
    full = model(ids, route=route).logits
    near(model(ids, route=route, logits_to_keep=3).logits, full[:, -3:], 1e-6)
    near(model(ids, route=route, logits_to_keep=99).logits, full, 1e-6)
    shuffled = torch.tensor([8, 2, 3, 0, 1, 4, 5, 7, 6])
    near(model(ids, route=route, logits_to_keep=shuffled).logits, full[:, shuffled], 1e-6)
    if not row_by_row:
        return
    near(
        model(ids, route=route, logits_to_keep=two).logits, torch.stack([full[0, :2], full[1, [4, 3]]]), 1e-6
    )
    real = torch.rand(2, 9) < 0.5
    near(model(ids, route=route, logits_to_keep=real).logits, full[real], 1e-6)


def test_gradients_reach_factors_and_gates_and_checkpointing_agrees() -> None:
    base, ids = tiny("llama"), ids_of()
    model = RoutedModel.from_parts(
        base, {"a": factors_of(peft_of(base, 10, ["embed_tokens", "q_proj", "down_proj"]))}
    )
    modules = [m for m in model.modules() if isinstance(m, RoutedModule)]
    assert not any(p.requires_grad for p in model.parameters())
    model(ids, route=Route.constant([0], [1.0], 2, 9))
    for module in modules:
        module.A.requires_grad_()
        module.B.requires_grad_()
    gates = torch.full((2, 9, 1), 0.5, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        for leaf in [gates, *model.parameters()]:
            leaf.grad = None
        route = Route(torch.zeros(2, 9, 1, dtype=torch.int64), gates)
        model(ids, route=route, labels=ids, use_cache=False).loss.backward()
        leaves = [gates, *[m.A for m in modules], *[m.B for m in modules]]
        return [leaf.grad.clone() for leaf in leaves]

    first = gradients()
    assert all(float(g.abs().max()) > 0 for g in first)
    base.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    for one, two in zip(first, gradients(), strict=True):
        near(two, one, 1e-5)
    model(ids, route=Route.constant([0], [1.0], 2, 9), use_cache=False)
    with pytest.raises(MoloraError, match="two routed forwards"):
        gradients()
    # against finite differences
    base.gradient_checkpointing_disable()
    model.eval()
    with torch.no_grad():
        losses = []
        for step in (1e-2, -1e-2):
            moved = gates.clone()
            moved[1, 4, 0] += step
            route = Route(torch.zeros(2, 9, 1, dtype=torch.int64), moved)
            losses.append(float(model(ids, route=route, labels=ids).loss))
    assert (losses[0] - losses[1]) / 2e-2 == pytest.approx(float(first[0][1, 4, 0]), rel=2e-2, abs=1e-5)


@torch.no_grad()
def test_detach_restores_the_very_same_objects() -> None:
    base, ids = tiny("llama", tie_word_embeddings=True), ids_of()
    before = [(name, id(module)) for name, module in base.named_modules()]
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    plain = base(ids).logits
    model = RoutedModel.from_parts(
        base, {"a": factors_of(peft_of(base, 11, ["lm_head", "v_proj", "embed_tokens"]))}
    )
    model.only("a")
    assert not torch.equal(base(ids).logits, plain)
    with pytest.raises(InputError, match="routed modules already"):
        RoutedModel.from_parts(base, {})
    assert model.detach() is base
    assert [(name, id(module)) for name, module in base.named_modules()] == before
    assert torch.equal(base(ids).logits, plain)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in base.state_dict().items())


@pytest.mark.parametrize(
    ("path", "shape", "message"),
    [
        ("model.layers.9.self_attn.q_proj", (32, 32), "no such module"),
        ("model.layers.0.self_attn.q_proj", (48, 32), "48 inputs"),
        ("model.layers.0.input_layernorm", (32, 32), "cannot be routed"),
        ("model.layers.0.mlp.experts", (32, 32), "experts"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_changes(
    path: str, shape: tuple[int, int], message: str
) -> None:
    base = tiny("mixtral")
    before = [id(module) for module in base.modules()]
    good = Factors(torch.ones(2, 32), torch.ones(32, 2), 1.0)
    bad = Factors(torch.ones(2, shape[0]), torch.ones(shape[1], 2), 1.0)
    with pytest.raises(InputError, match=message):
        RoutedModel.from_parts(base, {"a": {"model.layers.0.self_attn.o_proj": good, path: bad}})
    assert [id(module) for module in base.modules()] == before


def test_dora_needs_a_dense_weight() -> None:
    base = tiny("llama")

    class Packed(torch.nn.Linear):
        """A linear whose weight is held in integers, as quantised ones do."""

        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__(inner.in_features, inner.out_features, bias=False)
            self.inner = inner
            self.weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    ids = ids_of()
    plain_peft, dora = peft_of(base, 12, ["q_proj"]), peft_of(base, 13, ["q_proj"], use_dora=True)
    for layer in base.model.layers:
        layer.self_attn.q_proj = Packed(layer.self_attn.q_proj)
    with pytest.raises(InputError, match="DoRA"):
        RoutedModel.from_parts(base, {"dora": factors_of(dora)})
    model = RoutedModel.from_parts(base, {"plain": factors_of(plain_peft)})
    model.only("plain")
    with torch.no_grad():
        near(model(ids).logits, plain_peft(ids).logits, 1e-5)


@torch.no_grad()
def test_bad_calls_say_what_is_wrong() -> None:
    base, ids = tiny("llama"), ids_of()
    model = RoutedModel.from_parts(base, {"a": factors_of(peft_of(base, 14, ["q_proj"]))})
    with pytest.raises(InputError, match="no router"):
        model(ids)
    with pytest.raises(InputError, match="no adapter 'b'"):
        model.only("b")
    with pytest.raises(InputError, match="names adapter 1"):
        model(ids, route=Route.constant([1], [1.0], 2, 9))
    with pytest.raises(InputError, match=r"\(2, 8\) tokens"):
        model(ids, route=Route.constant([0], [1.0], 2, 8))
    with pytest.raises(InputError, match="without input_ids"):
        model(None)
    with pytest.raises(MoloraError, match="outside a forward"):
        base.model(ids)
    with pytest.raises(InputError, match="--backend triton"):
        RoutedModel.from_parts(tiny("llama"), {}, backend="triton")
    # after all that it still works
    model.only("a")
    assert model(ids).trace.indices.tolist() == [[[0]]] * 18


@torch.no_grad()
def test_reference_of_the_cases(cases: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(cases / "bases/llama").eval()
    names = ("plain_qv", "plain_code", "plain_math")
    pefts = [PeftModel.from_pretrained(copy.deepcopy(base), cases / "adapters" / name) for name in names]
    model = RoutedModel.from_parts(base, {n: factors_of(p) for n, p in zip(names, pefts, strict=True)})
    reference = load_file(cases / "routing/per_token_reference.safetensors")
    ids = reference["input_ids"]
    rows = [key.removeprefix("gate.") for key in reference if key.startswith("gate.")]
    assert len(rows) == 9
    for row in rows:
        gates = reference[f"gate.{row}"]
        route = Route(torch.arange(3).expand(gates.shape), gates)
        wanted = reference[f"logits.{row}"]
        assert float((model(ids, route=route).logits - wanted).abs().max()) < 1e-4, row
    off = Route(torch.full((*ids.shape, 1), -1), torch.zeros(*ids.shape, 1))
    model.off()
    assert torch.equal(model(ids, route=off).logits, model(ids).logits)


@torch.no_grad()
def test_files_end_to_end(tiny_llama: Path, make_adapter: Callable[..., Path]) -> None:
    """PEFT's own saved files, read by PEFT, give the routed model's logits."""
    folder = make_adapter(tiny_llama, "one", target_modules="all-linear", r=5)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    peft = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    model = RoutedModel.from_parts(base, {"one": factors_of(peft)})
    model.only("one")
    ids = ids_of()
    near(model(ids).logits, peft(ids).logits, 1e-5)
