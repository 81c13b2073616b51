"""molora convert --to mlx, read by hand as MLX-LM's published layout says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.errors import InputError

Make = Callable[..., Path]
LAYERS = 4


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = convert(*arguments)
    assert isinstance(result.exception, InputError), (result.output, result.exception)
    return f"{result.exception.message} {result.exception.remedy}"


def peft_deltas(base: Path, folder: Path) -> dict[str, NDArray[Any]]:
    """Module path -> scale * B A as PEFT computes it; embeddings as (d, V)."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default").detach().double().numpy()
            found[name.removeprefix("base_model.model.")] = delta.T if "embed" in name else delta
    return found


def mlx_deltas(folder: Path) -> dict[str, NDArray[Any]]:
    """As MLX-LM adapts: the names in `keys` below each of the last `num_layers` layers, and full paths."""
    config = json.loads((folder / "adapter_config.json").read_text())
    assert set(config) == {"fine_tune_type", "model", "num_layers", "lora_parameters"}
    lora = config["lora_parameters"]
    tensors = {k: t.double().numpy() for k, t in load_file(folder / "adapters.safetensors").items()}
    layers = range(LAYERS - config["num_layers"], LAYERS)
    adapted = [
        f"model.layers.{i}.{key}"
        for i in layers
        for key in lora["keys"]
        if "." in key and "model." not in key
    ]
    adapted += [key for key in lora["keys"] if key in ("model.embed_tokens", "lm_head")]
    names = {k.rpartition(".")[0] for k in tensors}
    assert names == set(adapted)  # what MLX adapts it finds in the file, and nothing else is there
    found = {}
    for module in adapted:
        a, b = tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"]
        assert a.shape[1] == b.shape[0] == lora["rank"]
        found[module] = lora["scale"] * (a @ b).T
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 6},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.2.self_attn.v_proj": 3, "layers.3.self_attn.q_proj": 16},
    },
    "last_two": {"layers_to_transform": [2, 3]},
    "with_gaps": {"layers_to_transform": [1, 3], "target_modules": ["q_proj", "down_proj"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["o_proj", "lm_head"]},
    "only_embedding": {"target_modules": ["embed_tokens"]},
}


@pytest.mark.parametrize("case", CASES)
def test_mlx_computes_what_peft_does(tiny_llama: Path, make_adapter: Make, tmp_path: Path, case: str) -> None:
    source = make_adapter(tiny_llama, f"mlx-{case}", seed=3, **CASES[case])
    result = convert(source, tmp_path / "mlx", "--to", "mlx", "--base", tiny_llama, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["verified"]["logits"]["max_abs"] < 1e-4
    theirs, ours = peft_deltas(tiny_llama, source), mlx_deltas(tmp_path / "mlx")
    assert set(theirs) <= set(ours)
    for module, delta in ours.items():
        expected = theirs.get(module, np.zeros_like(delta))
        np.testing.assert_allclose(delta, expected, rtol=0, atol=1e-6)
        assert module not in theirs or np.abs(expected).max() > 1e-3


def test_dora_keeps_its_magnitude(tiny_llama: Path, make_adapter: Make, tmp_path: Path) -> None:
    source = make_adapter(tiny_llama, "mlx-dora", seed=4, use_dora=True, lora_alpha=6)
    assert convert(source, tmp_path / "mlx", "--to", "mlx", "--base", tiny_llama).exit_code == 0
    assert json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())["fine_tune_type"] == "dora"
    own, theirs = (
        load_file(tmp_path / "mlx" / "adapters.safetensors"),
        load_file(source / "adapter_model.safetensors"),
    )
    for key, magnitude in theirs.items():
        if key.endswith("lora_magnitude_vector"):
            module = key.removeprefix("base_model.model.").removesuffix(".lora_magnitude_vector")
            assert torch.equal(own[f"{module}.m"], magnitude)
            assert own[f"{module}.m"].dim() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back(tiny_llama: Path, make_adapter: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_adapter(
        tiny_llama, f"mlx-back-{dtype}", seed=5, r=8, lora_alpha=16, target_modules="all-linear"
    )
    from safetensors.torch import save_file

    tensors = {k: t.to(dtype) for k, t in load_file(source / "adapter_model.safetensors").items()}
    save_file(tensors, source / "adapter_model.safetensors", metadata={"format": "pt"})
    assert convert(source, tmp_path / "mlx", "--to", "mlx", "--base", tiny_llama).exit_code == 0
    assert convert(tmp_path / "mlx", tmp_path / "back", "--to", "peft", "--base", tiny_llama).exit_code == 0
    again = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[k], t) and again[k].dtype == dtype for k, t in tensors.items())


def test_what_mlx_cannot_say(tiny_llama: Path, make_adapter: Make, tmp_path: Path) -> None:
    def to_mlx(name: str, base: Path = tiny_llama, **options: Any) -> str:
        source = make_adapter(base, f"no-mlx-{name}", **options)
        said = refused(source, tmp_path / "out", "--to", "mlx", "--base", base)
        assert name in said and not (tmp_path / "out").exists()
        return said

    assert "lora_bias" in to_mlx("bias", lora_bias=True)
    said = to_mlx("gaps", use_dora=True, layers_to_transform=[1, 3])
    assert "layers.2" in said and "merged-model" in said
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    config = LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    assert "embedding" in to_mlx("tied", tmp_path / "tied", target_modules=["embed_tokens"])


def test_a_tied_head_that_follows_its_embedding(make_adapter: Make, tmp_path: Path) -> None:
    """PEFT's ensure_weight_tying: one LoRA on the matrix that is both, as MLX has it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "vocab_size": 320}
    base = tmp_path / "tied"
    config = LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(base)
    options = {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}
    source = make_adapter(base, "mlx-tied", seed=9, **options)
    assert any("lm_head.lora_A" in k for k in load_file(source / "adapter_model.safetensors"))
    result = convert(source, tmp_path / "mlx", "--to", "mlx", "--base", base, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["verified"]["logits"]["max_abs"] < 1e-4
    theirs, ours = peft_deltas(base, source), mlx_deltas(tmp_path / "mlx")
    assert set(theirs) - set(ours) == {"lm_head"}
    for module, delta in ours.items():
        np.testing.assert_allclose(delta, theirs[module], rtol=0, atol=1e-6)
    assert convert(tmp_path / "mlx", tmp_path / "back", "--to", "peft", "--base", base).exit_code == 0
    back = peft_deltas(base, tmp_path / "back")
    assert back.keys() == theirs.keys()
    for module, delta in back.items():
        np.testing.assert_allclose(delta, theirs[module], rtol=0, atol=1e-6)


def test_half_precision_is_asked_for(tiny_llama: Path, make_adapter: Make, tmp_path: Path) -> None:
    source = make_adapter(tiny_llama, "mlx-half", seed=6)
    result = convert(
        source, tmp_path / "h", "--to", "mlx", "--base", tiny_llama, "--dtype", "bfloat16", "--json"
    )
    assert result.exit_code == 0, result.output
    assert 1e-6 < json.loads(result.stdout)["verified"]["largest_error"] < 1.2e-2
    assert {t.dtype for t in load_file(tmp_path / "h" / "adapters.safetensors").values()} == {torch.bfloat16}
