"""Other architectures of transformers: what their exported step says is what their forward says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from molora_cli.core.bench.material import random_factors
from molora_cli.core.routed.model import RoutedModel
from molora_cli.core.routed.route import Route
from molora_cli.core.runtime.cache import new_cache
from molora_cli.core.runtime.runtime import shape_of, unsupported
from molora_cli.core.runtime.step import TOP, make_step

pytestmark = pytest.mark.usefixtures("cpu_kernels")

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
}
SOME = ["Qwen3", "Gemma", "Qwen3Moe"]
MORE = ["Qwen2", "Phi3", "Olmo2", "Cohere", "Granite", "SmolLM3", "Glm4"]
WITHOUT = {
    "Gemma2": "does not keep all keys",
    "Gemma3Text": "does not keep all keys",
    "StableLm": "attention is its own",
}


def model_of(kind: str) -> RoutedModel:
    torch.manual_seed(0)
    extra = (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        if kind.endswith("Moe")
        else {}
    )
    config = getattr(transformers, f"{kind}Config")(**SIZES, **extra)
    base = transformers.AutoModelForCausalLM.from_config(config).eval()
    return RoutedModel(base, random_factors(base, 2, 4), backend="cpu").eval()


@torch.no_grad()
@pytest.mark.parametrize("kind", [*SOME, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_a_step_is_a_forward_of_one_token(kind: str) -> None:
    """The modules that are traced, run as they are on the model's own tensors."""
    model = model_of(kind)
    assert unsupported(model) is None
    step = make_step(shape_of(model))
    own: dict[str, torch.Tensor] = dict(model.base.named_parameters(remove_duplicate=False))
    own.update(model.base.named_buffers(remove_duplicate=False))
    for name, tensor in [*step.named_parameters(remove_duplicate=False), *step.named_buffers()]:
        place, _, last = name.rpartition(".")
        found = own.get(name.removeprefix("base."))
        if found is None:
            continue  # the tables of a linear without adapters
        where = step.get_submodule(place)._parameters if isinstance(tensor, torch.nn.Parameter) else None
        (step.get_submodule(place)._buffers if where is None else where)[last] = found
    ids = torch.randint(64, 320, (1, 12), generator=torch.Generator().manual_seed(1))
    indices = torch.tensor([[[0], [1], [-1]] * 4])
    wanted = model(ids, route=Route(indices, torch.full(indices.shape, 0.7))).logits[0]
    model.off()
    cache = new_cache(model.config)
    assert cache is not None
    model(ids[:, :1], cache=cache, use_cache=True)
    cache.crop(-1)
    rooms = cache.rooms()
    assert rooms is not None
    for i in range(ids.shape[1]):
        slots = torch.zeros(2, 1, TOP, dtype=torch.int64)
        slots[:, 0, 0] = indices[0, i, 0] + 1
        got = step(ids[:, i : i + 1], torch.tensor([i]), slots, torch.full((2, 1, TOP), 0.7), *rooms)
        torch.testing.assert_close(got, wanted[i], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", WITHOUT)
def test_bases_without_a_compiled_step_say_why(kind: str) -> None:
    assert WITHOUT[kind] in str(unsupported(model_of(kind)))
