"""Modules and fingerprints of bases, from their headers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from molora_cli.core.base.fingerprint import (
    check_base,
    fingerprint,
    structure_differences,
    tokenizer_digest,
)
from molora_cli.core.base.structure import ModuleShape, read_structure
from molora_cli.core.bundle.manifest import BaseEntry
from molora_cli.errors import InputError


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    config = GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def copy_with(base: Path, folder: Path, change: object) -> Path:
    """A copy of a Llama base whose weights went through change(name, tensor)."""
    model = LlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(change(name, parameter))  # type: ignore[operator]
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / file, folder / file)
    return folder


def test_modules_are_those_of_the_model(tiny_llama: Path) -> None:
    base = read_structure(tiny_llama)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    linear = {
        name: ModuleShape("linear", m.in_features, m.out_features)
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    assert {name: shape for name, shape in base.items() if shape.kind == "linear"} == linear
    assert base["model.embed_tokens"] == ModuleShape("embedding", 320, 64)
    assert (base.n_layers, base.model_type, base.tied) == (4, "llama", False)
    assert base.layer_of("model.layers.3.mlp.up_proj") == 3
    assert base.layer_of("lm_head") is None


def test_conv1d_is_stored_the_other_way_round(gpt2: Path) -> None:
    base = read_structure(gpt2)
    assert base["transformer.h.0.attn.c_attn"] == ModuleShape("conv1d", 16, 48)
    assert base["transformer.h.1.mlp.c_proj"] == ModuleShape("conv1d", 64, 16)
    assert base["lm_head"] == ModuleShape("linear", 16, 32)
    assert base.tied
    assert base.embedding == "transformer.wte"


def test_a_bare_decoder_gets_the_names_of_the_causal_model(gpt2: Path, tmp_path: Path) -> None:
    GPT2LMHeadModel.from_pretrained(gpt2).transformer.save_pretrained(tmp_path)
    bare, whole = read_structure(tmp_path), read_structure(gpt2)
    assert dict(bare) == dict(whole)
    assert bare.tensors["transformer.wte"] == "wte.weight"
    assert not check_base(tmp_path, BaseEntry(id="x", fingerprint=fingerprint(gpt2, list(whole))))


def test_weights_packed_to_four_bits_keep_their_shape(tiny_llama: Path, tmp_path: Path) -> None:
    whole = load_file(tiny_llama / "model.safetensors")
    packed = dict(whole)
    for name, tensor in whole.items():
        if "proj" in name:
            state = json.dumps({"quant_type": "nf4", "shape": list(tensor.shape)}).encode()
            packed[name] = torch.zeros(tensor.numel() // 2, 1, dtype=torch.uint8)
            packed[f"{name}.absmax"] = torch.zeros(tensor.numel() // 64)
            packed[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for file in ("config.json", "tokenizer.json"):
        shutil.copyfile(tiny_llama / file, tmp_path / file)
    assert dict(read_structure(tmp_path)) == dict(read_structure(tiny_llama))
    assert check_base(tmp_path, entry_of(tiny_llama)) == []  # by the embedding, which is not packed


def test_sharded_weights(tiny_llama: Path, tmp_path: Path) -> None:
    LlamaForCausalLM.from_pretrained(tiny_llama).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert dict(read_structure(tmp_path)) == dict(read_structure(tiny_llama))
    sorted(tmp_path.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(InputError, match=r"model-00002.*is missing"):
        read_structure(tmp_path)


def test_no_torch_is_imported(tiny_llama: Path) -> None:
    code = (
        "import sys; from pathlib import Path;"
        "from molora_cli.core.base import fingerprint, structure, lookup;"
        f"p = Path({str(tiny_llama)!r}); fingerprint.fingerprint(p, list(structure.read_structure(p)));"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_and_damaged_bases(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json is missing"):
        read_structure(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json"):
        read_structure(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"no model\.safetensors"):
        read_structure(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("")
    with pytest.raises(InputError, match="pickle"):
        read_structure(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 8)
    with pytest.raises(InputError, match=r"model\.safetensors"):
        read_structure(tmp_path)


def entry_of(base: Path) -> BaseEntry:
    modules = [m for m in read_structure(base) if m.endswith(("q_proj", "v_proj"))]
    return BaseEntry(id="org/tiny", fingerprint=fingerprint(base, modules))


def test_the_same_base_passes_in_silence(tiny_llama: Path) -> None:
    entry = entry_of(tiny_llama)
    again = BaseEntry.model_validate(json.loads(json.dumps(entry.model_dump(mode="json"))))
    assert check_base(tiny_llama, again) == []
    assert "model.embed_tokens" in entry.fingerprint.samples


def test_bf16_is_the_same_base(tiny_llama: Path, tmp_path: Path) -> None:
    copy = copy_with(tiny_llama, tmp_path, lambda _, p: p)
    LlamaForCausalLM.from_pretrained(copy).to(torch.bfloat16).save_pretrained(copy)
    assert check_base(copy, entry_of(tiny_llama)) == []


def test_four_bits_are_the_same_base_with_a_warning(tiny_llama: Path, tmp_path: Path) -> None:
    def rounded(_: str, p: torch.Tensor) -> torch.Tensor:
        if p.dim() != 2:
            return p
        blocks = p.reshape(-1, 32)
        low = blocks.amin(1, keepdim=True)
        step = (blocks.amax(1, keepdim=True) - low) / 15
        return (torch.round((blocks - low) / step) * step + low).reshape(p.shape)

    warnings = check_base(copy_with(tiny_llama, tmp_path, rounded), entry_of(tiny_llama))
    assert len(warnings) == 1 and "another precision" in warnings[0]


def test_other_weights_are_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    copy = copy_with(tiny_llama, tmp_path, lambda _, p: p + 0.3 * p.std() * torch.randn_like(p))
    with pytest.raises(InputError, match=r"org/tiny.*other weights") as caught:
        check_base(copy, entry_of(tiny_llama))
    assert str(tmp_path) in caught.value.message


def test_another_structure_or_tokenizer_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    entry = entry_of(tiny_llama)
    small = tmp_path / "small"
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=320
    )
    LlamaForCausalLM(config).save_pretrained(small)
    with pytest.raises(InputError, match=r"hidden_size 64 against 32"):
        check_base(small, entry)
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama, copy)
    raw = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = raw["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (copy / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match="another tokenizer"):
        check_base(copy, entry)
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").unlink()
    assert "no tokenizer" in check_base(copy, entry)[0]


def test_the_tokenizer_digest_ignores_layout(tiny_llama: Path, tmp_path: Path) -> None:
    raw = json.loads((tiny_llama / "tokenizer.json").read_text())
    raw["model"]["vocab"] = dict(reversed(raw["model"]["vocab"].items()))
    raw["truncation"] = {"max_length": 5}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    assert tokenizer_digest(tmp_path) == tokenizer_digest(tiny_llama)


def test_old_and_new_spelling_of_rope_agree(tiny_llama: Path, tmp_path: Path) -> None:
    copy = tmp_path / "old"
    shutil.copytree(tiny_llama, copy)
    config = json.loads((copy / "config.json").read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["rope_scaling"] = None
    config.pop("head_dim", None)
    (copy / "config.json").write_text(json.dumps(config))
    assert check_base(copy, entry_of(tiny_llama)) == []
    config["rope_theta"] *= 2
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="rope_theta"):
        check_base(copy, entry_of(tiny_llama))


def test_a_key_of_one_side_only_does_not_count() -> None:
    assert structure_differences({"a": 1, "b": 2}, {"a": 1, "c": 3}) == []
    assert structure_differences({"a": 1}, {"a": 2}) == ["a 1 against 2"]
