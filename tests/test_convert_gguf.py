"""molora convert --to gguf, read by the gguf library and laid out again by hand."""

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
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.errors import InputError

gguf = pytest.importorskip("gguf")
Make = Callable[..., Path]
LEAVES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def refused(*arguments: object) -> str:
    result = convert(*arguments)
    assert isinstance(result.exception, InputError), (result.output, result.exception)
    return f"{result.exception.message} {result.exception.remedy}"


def peft_deltas(base: Path, folder: Path) -> dict[str, NDArray[Any]]:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default").detach().double().numpy()
            found[name.removeprefix("base_model.model.")] = delta.T if "embed" in name else delta
    return found


def floats(tensor: Any) -> NDArray[Any]:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)


def gguf_deltas(path: Path, heads: dict[str, int]) -> dict[str, NDArray[Any]]:
    """What llama.cpp adds to each weight, rows in transformers' order. heads: leaf -> heads to undo."""
    reader = gguf.GGUFReader(path)
    alpha = float(reader.fields["adapter.lora.alpha"].contents())
    tensors = {t.name: floats(t) for t in reader.tensors}
    found = {}
    for name in sorted({n.rpartition(".lora_")[0] for n in tensors}):
        a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
        own = name.removesuffix(".weight")
        if own == "token_embd":
            a, module = a.T, "model.embed_tokens"
        elif own == "output":
            module = "lm_head"
        else:
            _, layer, leaf = own.split(".")
            module = f"model.layers.{layer}.{LEAVES[leaf]}"
        rank = b.shape[1]
        delta = (alpha / rank if alpha else 1.0) * b @ a
        count = heads.get(module.rpartition(".")[2])
        if count:  # row 2 i + half of a head is transformers' row half * size/2 + i
            size = delta.shape[0] // count
            order = [
                h * size + 2 * i + half for h in range(count) for half in (0, 1) for i in range(size // 2)
            ]
            delta = delta[order]
        found[module] = delta
    return found


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all_linear": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True, "r": 6},
    "patterns": {
        "rank_pattern": {"layers.1.self_attn.q_proj": 2},
        "alpha_pattern": {"layers.2.self_attn.v_proj": 3},
    },
    "embedding_and_head": {"target_modules": ["k_proj", "embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_what_peft_does(
    tiny_llama: Path, make_adapter: Make, tmp_path: Path, case: str
) -> None:
    source = make_adapter(tiny_llama, f"gguf-{case}", seed=3, **CASES[case])
    result = convert(source, tmp_path / "a.gguf", "--to", "gguf", "--base", tiny_llama, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert json.loads(result.stdout)["verified"]["logits"]["max_abs"] < 1e-4
    fields = {k: v.contents() for k, v in gguf.GGUFReader(tmp_path / "a.gguf").fields.items()}
    assert fields["general.type"] == "adapter" and fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == "llama"
    theirs = peft_deltas(tiny_llama, source)
    ours = gguf_deltas(tmp_path / "a.gguf", {"q_proj": 4, "k_proj": 2})
    assert ours.keys() == theirs.keys()
    for module, delta in ours.items():
        np.testing.assert_allclose(delta, theirs[module], rtol=0, atol=1e-6)
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_qwen_rows_stay_in_order(make_adapter: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    config = Qwen2Config(num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "qwen")
    source = make_adapter(tmp_path / "qwen", "gguf-qwen", target_modules=["q_proj", "k_proj"])
    assert convert(source, tmp_path / "a.gguf", "--to", "gguf", "--base", tmp_path / "qwen").exit_code == 0
    theirs = peft_deltas(tmp_path / "qwen", source)
    for module, delta in gguf_deltas(tmp_path / "a.gguf", {}).items():
        np.testing.assert_allclose(delta, theirs[module], rtol=0, atol=1e-6)
    assert gguf.GGUFReader(tmp_path / "a.gguf").fields["general.architecture"].contents() == "qwen2"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back(tiny_llama: Path, make_adapter: Make, tmp_path: Path, dtype: torch.dtype) -> None:
    source = make_adapter(
        tiny_llama, f"gguf-back-{dtype}", seed=5, r=8, lora_alpha=16, target_modules="all-linear"
    )
    tensors = {k: t.to(dtype) for k, t in load_file(source / "adapter_model.safetensors").items()}
    save_file(tensors, source / "adapter_model.safetensors", metadata={"format": "pt"})
    assert convert(source, tmp_path / "a.gguf", "--to", "gguf", "--base", tiny_llama).exit_code == 0
    assert (
        convert(tmp_path / "a.gguf", tmp_path / "back", "--to", "peft", "--base", tiny_llama).exit_code == 0
    )
    again = load_file(tmp_path / "back" / "adapter_model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[k].float(), t.float()) for k, t in tensors.items())


@pytest.mark.parametrize(("dtype", "kind", "least"), [("float16", "F16", 1e-7), ("bfloat16", "BF16", 1e-6)])
def test_half_precision_is_asked_for(
    tiny_llama: Path, make_adapter: Make, tmp_path: Path, dtype: str, kind: str, least: float
) -> None:
    source = make_adapter(tiny_llama, f"gguf-{dtype}", seed=6)
    result = convert(
        source, tmp_path / "a.gguf", "--to", "gguf", "--base", tiny_llama, "--dtype", dtype, "--json"
    )
    assert result.exit_code == 0, (result.output, result.exception)
    assert least < json.loads(result.stdout)["verified"]["largest_error"] < 1.2e-2
    assert {t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors} == {kind}
    theirs = peft_deltas(tiny_llama, source)
    for module, delta in gguf_deltas(tmp_path / "a.gguf", {"q_proj": 4, "k_proj": 2}).items():
        assert np.linalg.norm(delta - theirs[module]) < 1.2e-2 * np.linalg.norm(theirs[module])


def test_what_gguf_cannot_say(tiny_llama: Path, make_adapter: Make, tmp_path: Path) -> None:
    def to_gguf(base: Path, name: str, **options: Any) -> str:
        source = make_adapter(base, name, **options)
        said = refused(source, tmp_path / "a.gguf", "--to", "gguf", "--base", base)
        assert name in said and not (tmp_path / "a.gguf").exists()
        return said

    assert "DoRA" in to_gguf(tiny_llama, "gguf-dora", use_dora=True)
    assert "lora_bias" in to_gguf(tiny_llama, "gguf-bias", lora_bias=True)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    config = LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    assert "lm_head" in to_gguf(tmp_path / "tied", "gguf-tied", target_modules=["lm_head"])


def test_places_that_are_not_written(tiny_llama: Path, make_adapter: Make, tmp_path: Path) -> None:
    source = make_adapter(tiny_llama, "gguf-places")
    common = ("--to", "gguf", "--base", tiny_llama)
    assert "a.gguf" in refused(source, tmp_path / "a", *common)
    (tmp_path / "notes.gguf").write_text("my notes")
    assert "--force" in refused(source, tmp_path / "notes.gguf", *common)
    assert "no GGUF" in refused(source, tmp_path / "notes.gguf", *common, "--force")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "notes.gguf")
    refused(source, tmp_path / "link.gguf", *common, "--force")
    assert (tmp_path / "notes.gguf").read_text() == "my notes"
    assert convert(source, tmp_path / "new" / "a.gguf", *common).exit_code == 0
    assert convert(source, tmp_path / "new" / "a.gguf", *common, "--force").exit_code == 0
    assert "folder" in refused(source, tmp_path / "b.gguf", "--to", "peft", "--base", tiny_llama)
