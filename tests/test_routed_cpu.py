"""A routed model on the CPU operators against the same model in plain torch."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from molora_cli.core.adapter.factors import Factors
from molora_cli.core.routed.model import RoutedModel
from molora_cli.core.routed.modules import PlainLinear, Replacement, RoutedLinear
from molora_cli.core.routed.route import Route

pytestmark = pytest.mark.usefixtures("cpu_kernels")


@pytest.fixture
def base(tiny_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()


def some_factors(base: PreTrainedModel, names: tuple[str, ...] = ("q_proj", "down_proj")) -> dict:
    gen = torch.Generator().manual_seed(0)

    def one(module: torch.nn.Linear, rank: int, special: bool) -> Factors:
        out, inner = module.weight.shape
        A, B = torch.randn(rank, inner, generator=gen), torch.randn(out, rank, generator=gen)
        magnitude = 1 + torch.rand(out, generator=gen) if special else None
        bias = torch.randn(out, generator=gen) if special else None
        return Factors(A=A / inner**0.5, B=B * 0.1, scale=0.7, magnitude=magnitude, bias=bias)

    places = [(n, m) for n, m in base.named_modules() if n.rpartition(".")[2] in names]
    return {name: {n: one(m, 2 + k, k == 1) for n, m in places} for k, name in enumerate(("a", "b", "c"))}


def both(base: PreTrainedModel, dtype: torch.dtype = torch.float32) -> list[RoutedModel]:
    factors = some_factors(base)
    models = [copy.deepcopy(base).to(dtype) for _ in range(2)]
    return [RoutedModel(m, factors, backend=b).eval() for m, b in zip(models, ("torch", "cpu"), strict=True)]


def a_route(batch: int, length: int, top: int = 2) -> Route:
    gen = torch.Generator().manual_seed(length)
    indices = torch.randint(-1, 3, (batch, length, top), generator=gen)
    return Route(indices, torch.rand(batch, length, top, generator=gen))


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 5), (3, 21)])
def test_logits_are_those_of_the_twin(
    base: PreTrainedModel, batch: int, length: int, dtype: torch.dtype, limit: float
) -> None:
    twin, own = both(base, dtype)
    ids, route = torch.randint(3, 300, (batch, length)), a_route(batch, length)
    wanted, got = (model(ids, route=route).logits.float() for model in (twin, own))
    assert float((wanted - got).abs().max()) <= limit * float(wanted.abs().max())
    twin.off()
    assert float((wanted - twin(ids).logits.float()).abs().max()) > 2 * limit


@torch.no_grad()
def test_a_token_of_the_base_keeps_the_bits_of_the_engine_without_adapters(base: PreTrainedModel) -> None:
    alone = RoutedModel(copy.deepcopy(base), {}, backend="cpu").eval()
    own = both(base)[1]
    ids = torch.randint(3, 300, (1, 4))
    alone.off()
    wanted = alone(ids).logits
    for adapter in (-1, 1):  # the last token alone takes an adapter: those before it cannot see it
        indices = torch.tensor([[[-1], [-1], [-1], [adapter]]])
        got = own(ids, route=Route(indices, torch.ones(1, 4, 1))).logits
        assert torch.equal(got[:, :3], wanted[:, :3])
        assert torch.equal(got, wanted) == (adapter == -1)


@torch.no_grad()
def test_greedy_text_is_that_of_the_twin(base: PreTrainedModel) -> None:
    twin, own = both(base)
    for model in (twin, own):
        model.only("b")
    ids = torch.randint(3, 300, (1, 20))
    options = {"max_new_tokens": 12, "do_sample": False, "min_new_tokens": 12}
    assert torch.equal(twin.generate(ids, **options), own.generate(ids, **options))


def test_every_linear_is_replaced_and_comes_back(base: PreTrainedModel) -> None:
    before = dict(base.named_modules())
    own = RoutedModel(base, some_factors(base), backend="cpu")
    kinds = {n: type(m) for n, m in base.named_modules() if isinstance(m, Replacement)}
    assert kinds["lm_head"] is PlainLinear and kinds["model.layers.0.self_attn.q_proj"] is RoutedLinear
    assert len(kinds) == 4 * 7 + 1
    own.detach()
    assert {n: id(m) for n, m in base.named_modules()} == {n: id(m) for n, m in before.items()}


def test_gradients_are_the_twins(base: PreTrainedModel) -> None:
    ids, route = torch.randint(3, 300, (1, 6)), a_route(1, 6)
    found = []
    for model in both(base):
        module = model.base.get_submodule("model.layers.1.mlp.down_proj")
        module.A.requires_grad_(True)
        model(ids, route=route).logits.square().mean().backward()
        found.append(module.A.grad)
    assert float(found[0].abs().max()) > 0
    assert torch.allclose(*found, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_a_hook_on_the_bases_module_still_runs(base: PreTrainedModel) -> None:
    own = both(base)[1]
    ids, route, seen = torch.randint(3, 300, (1, 3)), a_route(1, 3), []
    before = own(ids, route=route).logits
    inner = own.base.get_submodule("model.layers.0.self_attn.q_proj").base
    handle = inner.register_forward_hook(lambda *_: seen.append(1))
    after = own(ids, route=route).logits
    handle.remove()
    assert seen == [1]
    assert torch.allclose(before, after, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_it_follows_the_model_to_another_dtype(base: PreTrainedModel) -> None:
    ids, route = torch.randint(3, 300, (1, 3)), a_route(1, 3)
    own = both(base)[1]
    own(ids, route=route)
    halved, made = own.to(torch.bfloat16)(ids, route=route).logits, both(base, torch.bfloat16)[1]
    assert halved.dtype == torch.bfloat16
    wanted = made(ids, route=route).logits
    assert float((halved - wanted).abs().max()) <= 6e-2 * float(wanted.abs().max())
