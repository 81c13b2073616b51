"""Adapters on other kinds of bases: Conv1D, fused projections, separate ones on a fused base, tied heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.structure import read_structure
from molora_cli.errors import InputError
from molora_cli.refs import Ref

IDS = torch.tensor([[1, 7, 9, 30, 12, 2]])


def read(path: Path, base: Path) -> Adapter:
    return read_adapter("one", Ref("local", str(path), path=path), read_structure(base))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two-layer models of 32 units and 64 words, saved."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, Phi3Config

    shared = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    configs = {
        "gpt2": GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, initializer_range=0.2
        ),
        "phi3": Phi3Config(**shared, tie_word_embeddings=False),
        "tied": LlamaConfig(**shared, tie_word_embeddings=True),
        "mixtral": MixtralConfig(**shared, num_local_experts=4),
    }
    folder = tmp_path_factory.mktemp("bases")
    for name, config in configs.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    return {name: folder / name for name in configs}


@torch.no_grad()
def peft_logits(base: Path, folder: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder).eval()(IDS).logits


@pytest.mark.parametrize(
    ("base", "options", "kind"),
    [
        ("gpt2", {"target_modules": ["c_attn", "attn.c_proj"], "fan_in_fan_out": True}, "conv1d"),
        ("gpt2", {"target_modules": ["c_fc"], "fan_in_fan_out": True, "use_dora": True}, "conv1d"),
        ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}, "linear"),
        ("tied", {"target_modules": ["lm_head", "q_proj"]}, "linear"),
        ("tied", {"target_modules": ["embed_tokens"]}, "embedding"),
        ("mixtral", {"target_modules": ["q_proj", "v_proj"]}, "linear"),
    ],
)
def test_kinds(
    base: str,
    options: dict[str, object],
    kind: str,
    bases: dict[str, Path],
    make_adapter: Callable[..., Path],
    tmp_path: Path,
) -> None:
    source = make_adapter(bases[base], f"k-{base}", **options)
    adapter = read(source, bases[base])
    assert kind in {m.kind for m in adapter.modules.values()}
    write_peft(adapter, tmp_path / "out")
    want = peft_logits(bases[base], source)
    assert float((peft_logits(bases[base], tmp_path / "out") - want).abs().max()) < 1e-5 * float(
        want.abs().max()
    )


def split_adapter(folder: Path, ranks: dict[str, int], alphas: dict[str, float]) -> dict[str, torch.Tensor]:
    """An adapter with separate projections for the phi3 base above, written to `folder`."""
    torch.manual_seed(1)
    sizes = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "gate_proj": 48, "up_proj": 48}
    tensors = {}
    for layer in range(2):
        for name, rank in ranks.items():
            block = "self_attn" if name[0] in "qkv" else "mlp"
            key = f"base_model.model.model.layers.{layer}.{block}.{name}."
            tensors[key + "lora_A.weight"] = torch.randn(rank, 32)
            tensors[key + "lora_B.weight"] = torch.randn(sizes[name], rank)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": list(ranks),
        "rank_pattern": {k: r for k, r in ranks.items() if r != 2}, "alpha_pattern": alphas,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize(
    ("ranks", "alphas"),
    [
        ({"q_proj": 2, "k_proj": 2, "v_proj": 2, "gate_proj": 2, "up_proj": 2}, {}),
        ({"q_proj": 3, "v_proj": 2, "up_proj": 4}, {"q_proj": 1.0, "up_proj": 7.0}),
    ],
)
def test_separate_projections_on_a_fused_base(
    ranks: dict[str, int], alphas: dict[str, float], bases: dict[str, Path], tmp_path: Path
) -> None:
    tensors = split_adapter(tmp_path / "in", ranks, alphas)
    adapter = read(tmp_path / "in", bases["phi3"])
    assert any("fused exactly" in note for note in adapter.notes)
    factors = load_factors(adapter)
    starts = {"q_proj": 0, "k_proj": 32, "v_proj": 48, "gate_proj": 0, "up_proj": 48}
    for layer in range(2):
        for block, fused, size in (("self_attn", "qkv_proj", 64), ("mlp", "gate_up_proj", 96)):
            want = torch.zeros(size, 32)
            for name, rank in ranks.items():
                key = f"base_model.model.model.layers.{layer}.{block}.{name}."
                if key + "lora_A.weight" in tensors:
                    a, b = tensors[key + "lora_A.weight"], tensors[key + "lora_B.weight"]
                    want[starts[name] : starts[name] + len(b)] = alphas.get(name, 4) / rank * b @ a
            f = factors[f"model.layers.{layer}.{block}.{fused}"]
            assert torch.allclose(f.scale * f.B @ f.A, want, atol=1e-4)
    write_peft(adapter, tmp_path / "out")
    again = load_factors(read(tmp_path / "out", bases["phi3"]))
    for path, f in factors.items():
        assert torch.allclose(
            again[path].scale * again[path].B @ again[path].A, f.scale * f.B @ f.A, atol=1e-5
        )
    assert peft_logits(bases["phi3"], tmp_path / "out").isfinite().all()


def test_expert_lists_are_refused(
    bases: dict[str, Path], make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    source = make_adapter(bases["mixtral"], "experts")
    tensors = load_file(source / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.block_sparse_moe.experts.0.w1."
    tensors |= {key + "lora_A.weight": torch.randn(4, 32), key + "lora_B.weight": torch.randn(48, 4)}
    save_file(tensors, source / "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"experts\.0\.w1 lies in a list of experts"):
        read(source, bases["mixtral"])


def test_separate_projections_in_an_unknown_layout(bases: dict[str, Path], tmp_path: Path) -> None:
    split_adapter(tmp_path / "in", {"q_proj": 2}, {})
    with pytest.raises(InputError, match="separate projections"):
        read(tmp_path / "in", bases["gpt2"])
