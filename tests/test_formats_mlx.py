"""MLX-LM adapters, written here by MLX's published layout and run by MLX's own formulas."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from molora_cli.core.adapter.config import classify
from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.read import base_named, read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.structure import BaseModules, read_structure
from molora_cli.errors import InputError
from molora_cli.refs import Ref

IDS = torch.tensor([[1, 70, 90, 101, 5, 200, 300, 64], [2, 8, 16, 32, 64, 128, 256, 319]])
LEAVES = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def read(path: Path, base: Path, **options: Any) -> Adapter:
    return read_adapter("one", Ref("local", str(path), path=path), read_structure(base), **options)


def refused(path: Path, base: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, base)
    assert caught.value.remedy
    return caught.value


def base_model(base: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@torch.no_grad()
def peft_logits(base: Path, folder: Path) -> torch.Tensor:
    from peft import PeftModel

    return PeftModel.from_pretrained(base_model(base), folder).eval()(IDS).logits


@torch.no_grad()
def mlx_logits(base: Path, tensors: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
    """mlx_lm/tuner/lora.py and dora.py as hooks: y + scale * (x @ a) @ b; DoRA's m over the rows' norms."""
    model = base_model(base)
    for name in {k.rpartition(".")[0] for k in tensors}:
        module = model.get_submodule(name)
        a, b = tensors[f"{name}.lora_a"].float(), tensors[f"{name}.lora_b"].float()
        m = tensors.get(f"{name}.m")

        def hook(
            module: Any, args: Any, out: torch.Tensor, a: Any = a, b: Any = b, m: Any = m
        ) -> torch.Tensor:
            if isinstance(module, torch.nn.Embedding):
                return out + scale * a[args[0]] @ b
            y = out + scale * ((args[0] @ a) @ b)
            if m is not None:
                y = y * (m / (module.weight + scale * b.T @ a.T).norm(dim=1))
            return y

        module.register_forward_hook(hook)
    return model(IDS).logits


def write_mlx(
    folder: Path,
    base: BaseModules,
    modules: list[str],
    *,
    rank: int = 4,
    scale: float = 2.0,
    dora: bool = False,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, torch.Tensor]:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(rank)
    tensors: dict[str, torch.Tensor] = {}
    for name in modules:
        shape = base[name]
        tensors[f"{name}.lora_a"] = 0.3 * torch.randn(shape.in_features, rank)
        tensors[f"{name}.lora_b"] = 0.3 * torch.randn(rank, shape.out_features)
        if dora:
            tensors[f"{name}.m"] = torch.rand(shape.out_features) + 0.5
    tensors = {k: v.to(dtype).contiguous() for k, v in tensors.items()}
    save_file(tensors, folder / "adapters.safetensors")
    keys = sorted({re.sub(r"^model\.layers\.\d+\.", "", m) for m in modules})
    document = {
        "fine_tune_type": "dora" if dora else "lora",
        "model": "mlx-community/tiny-llama-4bit",
        "num_layers": -1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(document))
    return tensors


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "adapters.safetensors")
    edit(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "adapters.safetensors")


def layers(*numbers: int, leaves: tuple[str, ...] = LEAVES) -> list[str]:
    return [f"model.layers.{n}.{leaf}" for n in numbers for leaf in leaves]


@pytest.mark.parametrize(
    ("modules", "options"),
    [
        (layers(0, 1, 2, 3), {}),
        (layers(2, 3), {"num_layers": 2, "rank": 7, "scale": 20.0}),
        (layers(0, 1, 2, 3), {"dora": True, "scale": 0.7}),
        (["model.embed_tokens", "lm_head", *layers(3)], {"num_layers": 1}),
    ],
    ids=["plain", "last-two", "dora", "embedding"],
)
def test_same_function(modules: list[str], options: dict[str, Any], tiny_llama: Path, tmp_path: Path) -> None:
    tensors = write_mlx(tmp_path / "in", read_structure(tiny_llama), modules, **options)
    want = mlx_logits(tiny_llama, tensors, options.get("scale", 2.0))
    assert float((want - base_model(tiny_llama)(IDS).logits).abs().max()) > 0.05
    adapter = read(tmp_path / "in", tiny_llama)
    assert adapter.format == "mlx" and not adapter.canonical and len(adapter.modules) == len(modules)
    assert not [n for n in adapter.notes if "decide" in n], adapter.notes
    write_peft(adapter, tmp_path / "out")
    assert float((peft_logits(tiny_llama, tmp_path / "out") - want).abs().max()) < 1e-4
    again = read(tmp_path / "out", tiny_llama)
    assert again.canonical and {m: v.scale for m, v in again.modules.items()} == pytest.approx(
        {m: v.scale for m, v in adapter.modules.items()}
    )


def test_a_tied_head_follows_the_embedding(tmp_path: Path) -> None:
    """MLX's LoRAEmbedding.as_linear adds scale * (h @ b.T) @ a.T to the logits of a tied model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=320,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    base = tmp_path / "tied"
    LlamaForCausalLM(config).save_pretrained(base)
    structure = read_structure(base)
    tensors = write_mlx(tmp_path / "in", structure, ["model.embed_tokens"], scale=0.5)
    a, b = tensors["model.embed_tokens.lora_a"], tensors["model.embed_tokens.lora_b"]
    model = base_model(base)
    model.model.embed_tokens.register_forward_hook(lambda m, x, y: y + 0.5 * a[x[0]] @ b)
    model.lm_head.register_forward_hook(lambda m, x, y: y + 0.5 * (x[0] @ b.T) @ a.T)
    with torch.no_grad():
        want = model(IDS).logits
    adapter = read(tmp_path / "in", base)
    assert set(adapter.modules) == {"model.embed_tokens", "lm_head"}
    assert any("applies to both" in n for n in adapter.notes)
    write_peft(adapter, tmp_path / "out")
    assert float((peft_logits(base, tmp_path / "out") - want).abs().max()) < 1e-4


def test_npz(tiny_llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "npz"
    tensors = write_mlx(folder, read_structure(tiny_llama), layers(1, 2))
    np.savez(folder / "adapters.npz", **{k: v.numpy() for k, v in tensors.items()})
    plain = load_factors(read(folder, tiny_llama))
    (folder / "adapters.safetensors").unlink()
    packed = load_factors(read(folder, tiny_llama))
    assert all(torch.equal(packed[m].A, plain[m].A) and torch.equal(packed[m].B, plain[m].B) for m in plain)
    # bfloat16 comes out of MLX as two raw bytes a value
    bits = {k: (v.numpy().view(np.uint32) >> 16).astype(np.uint16).view("V2") for k, v in tensors.items()}
    np.savez(folder / "adapters.npz", **bits)
    halved = load_factors(read(folder, tiny_llama))
    assert all(f.A.dtype == torch.bfloat16 for f in halved.values())
    assert all(torch.allclose(f.B.float(), plain[m].B, rtol=0.01) for m, f in halved.items())
    (folder / "adapter_config.json").unlink()
    assert "scale is unknown" in refused(folder, tiny_llama).message


class _Bomb:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("MOLORA_PICKLE_WAS_EXECUTED"),))


def test_npz_runs_no_pickle(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "npz"
    tensors = write_mlx(folder, read_structure(tiny_llama), layers(1))
    (folder / "adapters.safetensors").unlink()
    arrays = {k: v.numpy() for k, v in tensors.items()}
    arrays["model.layers.1.mlp.down_proj.lora_a"] = np.array([_Bomb()], dtype=object)
    np.savez(folder / "adapters.npz", **arrays)
    assert "pickled object" in refused(folder, tiny_llama).message
    assert not (tmp_path / "MOLORA_PICKLE_WAS_EXECUTED").exists()
    np.savez_compressed(folder / "adapters.npz", bomb=np.zeros(1 << 24, np.uint8))
    assert "would unpack" in refused(folder, tiny_llama).message


def test_scale_of_early_2024(tiny_llama: Path, tmp_path: Path) -> None:
    write_mlx(tmp_path, read_structure(tiny_llama), layers(3))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["lora_parameters"] = {"rank": 4, "alpha": 16.0, "scale": 10.0, "dropout": 0.0}
    del config["num_layers"], config["fine_tune_type"]
    config["lora_layers"] = 1
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    adapter = read(tmp_path, tiny_llama)
    assert {m.scale for m in adapter.modules.values()} == {10.0 * 16 / 4}
    assert any("scale * alpha / rank" in n for n in adapter.notes)
    config["lora_parameters"]["rank"] = 8
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert "says rank 8" in refused(tmp_path, tiny_llama).message


def test_all_offenders_in_one_error(tiny_llama: Path, tmp_path: Path) -> None:
    write_mlx(tmp_path, read_structure(tiny_llama), layers(0, 1))

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.down_proj.lora_a"] = torch.randn(4, 128)  # PEFT's orientation
        tensors["model.layers.1.self_attn.v_proj.lora_b"] = torch.randn(4, 31)

    change(tmp_path, damage)
    message = refused(tmp_path, tiny_llama).message
    assert "layers.0.mlp.down_proj.lora_a' is [4, 128] where (128, r) belongs" in message
    assert "layers.1.self_attn.v_proj.lora_b' is [4, 31] where (4, 32) belongs" in message

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.lora_c"] = tensors.pop(
            "model.layers.0.self_attn.q_proj.lora_b"
        )
        del tensors["model.layers.1.self_attn.q_proj.lora_a"]

    change(tmp_path, rename)
    message = refused(tmp_path, tiny_llama).message
    for name in ("q_proj.lora_c' is no", "lora_b of model.layers.0", "lora_a of model.layers.1"):
        assert name in message


def test_disagreements(tiny_llama: Path, tmp_path: Path) -> None:
    structure = read_structure(tiny_llama)
    write_mlx(tmp_path, structure, layers(0, 1), num_layers=2)
    assert any("last 2 layers, the tensors are of layers 0, 1" in n for n in read(tmp_path, tiny_llama).notes)
    auto = {"rank": 8, "scale": 2.0, "keys": ["auto"]}
    write_mlx(tmp_path, structure, layers(0, 1, 2, 3), lora_parameters=auto)
    notes = read(tmp_path, tiny_llama).notes
    assert any("keys in the config (auto)" in n for n in notes)
    assert any("says rank 8, the tensors have [4]" in n for n in notes)
    write_mlx(tmp_path, structure, layers(3), dora=True, fine_tune_type="lora")
    assert "is a magnitude of DoRA" in refused(tmp_path, tiny_llama).message
    write_mlx(tmp_path, structure, layers(3), fine_tune_type="dora")
    assert "magnitude m of" in refused(tmp_path, tiny_llama).message


def test_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    structure = read_structure(tiny_llama)
    write_mlx(tmp_path, structure, layers(3))

    def experts(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.switch_mlp.gate_proj.lora_a"] = torch.zeros(2, 4, 64)

    def norm(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = torch.zeros(64)

    def beyond(tensors: dict[str, torch.Tensor]) -> None:
        for half in ("lora_a", "lora_b"):
            key = f"model.layers.3.self_attn.q_proj.{half}"
            tensors[key.replace("3", "9")] = tensors[key].clone()

    for edit, words in (
        (beyond, "adapter has layer 9, base has 4"),
        (norm, "'model.norm.weight' is no lora_a"),
        (experts, "belongs to a layer of experts"),
    ):
        change(tmp_path, edit)
        assert words in refused(tmp_path, tiny_llama).message
    write_mlx(tmp_path, structure, ["model.embed_tokens"], dora=True)
    change(tmp_path, lambda t: t.update({"model.embed_tokens.m": torch.ones(320)}))
    assert "DoRA of an embedding" in refused(tmp_path, tiny_llama).message
    write_mlx(tmp_path, structure, layers(3), fine_tune_type="full")
    assert "full fine-tune" in refused(tmp_path, tiny_llama).message
    write_mlx(tmp_path, structure, layers(3))
    change(tmp_path, lambda t: t["model.layers.3.mlp.down_proj.lora_b"].fill_(float("nan")))
    assert "down_proj.lora_b' has 256 values that are NaN" in refused(tmp_path, tiny_llama).message
    write_mlx(tmp_path, structure, layers(3))
    change(tmp_path, lambda t: [v.zero_() for k, v in t.items() if k.endswith("lora_b")])
    assert "changes nothing" in refused(tmp_path, tiny_llama).message
    assert len(read(tmp_path, tiny_llama, allow_noop=True).modules) == 3


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"fine_tune_type": "lora"}, "lora_parameters"),
    ({"lora_parameters": {"rank": 8}}, "lora_parameters.scale"),
    ({"lora_parameters": {"scale": "20"}}, "lora_parameters.scale"),
    ({"lora_parameters": {"scale": float("nan")}}, "lora_parameters.scale"),
    ({"lora_parameters": {"scale": 1e400}}, "lora_parameters.scale"),
    ({"lora_parameters": {"scale": 1.0, "rank": 0}}, "lora_parameters.rank"),
    ({"lora_parameters": {"scale": 1.0, "alpha": 8}}, "lora_parameters.rank"),
    ({"lora_parameters": {"scale": 1.0, "use_rslora": True}}, "lora_parameters.use_rslora"),
    ({"lora_parameters": {"scale": 1.0}, "fine_tune_type": "vera"}, "fine_tune_type"),
    ({"lora_parameters": {"scale": 1.0, "keys": "q_proj"}}, "lora_parameters.keys"),
    ({"lora_parameters": {"scale": 1.0}, "num_layers": "all"}, "num_layers"),
]


@pytest.mark.parametrize(("config", "field"), CONFIGS)
def test_configs_refused(config: dict[str, Any], field: str) -> None:
    verdict = classify(config)
    assert verdict.kind == "mlx" and [r.field for r in verdict.reasons] == [field]


def test_fields_of_a_fork_are_ignored_aloud() -> None:
    config = {
        "lora_parameters": {"rank": 4, "scale": 2.0},
        "seed": 0,
        "agr": True,
        "agr_ema": 0.9,
        "off": False,
    }
    verdict = classify(config)
    assert verdict.supported and verdict.notes == (
        "fields that MLX-LM does not know were ignored (agr, agr_ema)",
    )
    assert not classify({"lora_parameters": {"rank": 4, "scale": 2.0}, "iters": 100}).notes


def test_the_base_it_names(tiny_llama: Path, tmp_path: Path) -> None:
    write_mlx(tmp_path, read_structure(tiny_llama), layers(3))
    assert base_named(Ref("local", "x", path=tmp_path)) == "mlx-community/tiny-llama-4bit"
    for name in ("adapters.safetensors", "0000100_adapters.safetensors"):
        if name.startswith("0"):
            (tmp_path / "adapters.safetensors").rename(tmp_path / name)
        assert len(read(tmp_path / name, tiny_llama).modules) == 3  # a file stands for itself


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(1, 70),
    scale=st.floats(1e-3, 1e3),
    chosen=st.sets(st.sampled_from([*layers(0, 1, 2, 3), "model.embed_tokens", "lm_head"]), min_size=1),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    prefix=st.sampled_from(["", "language_model.", "module."]),
)
def test_any_shape_rank_name_and_dtype(
    rank: int,
    scale: float,
    chosen: set[str],
    dtype: torch.dtype,
    prefix: str,
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    structure = read_structure(tiny_llama)
    tensors = write_mlx(tmp_path, structure, sorted(chosen), rank=rank, scale=scale, dtype=dtype)
    named = {f"{prefix if k.startswith('model.') else ''}{k}": v for k, v in tensors.items()}
    save_file(named, tmp_path / "adapters.safetensors")
    adapter = read(tmp_path, tiny_llama)
    write_peft(adapter, tmp_path / "out")
    for factors in (load_factors(adapter), load_factors(read(tmp_path / "out", tiny_llama))):
        assert set(factors) == chosen
        for module, f in factors.items():
            assert f.A.dtype == dtype and f.scale == pytest.approx(scale)
            assert torch.equal(f.A, tensors[f"{module}.lora_a"].T)
            assert torch.equal(f.B, tensors[f"{module}.lora_b"].T)


def test_cases(cases: Path) -> None:
    """Known adapters in MLX's clothes are the PEFT ones they were made from."""
    base = cases / "bases" / "llama"
    plain = load_factors(read(cases / "adapters" / "plain_code", base))
    for name, keep in (("mlx_plain", ""), ("mlx_last_two_layers", r"\.layers\.[23]\.")):
        got = load_factors(read(cases / "formats" / name, base))
        assert got.keys() == {m for m in plain if re.search(keep, m)}
        for module, f in got.items():
            assert torch.equal(f.A, plain[module].A) and torch.equal(f.B, plain[module].B)
            assert f.scale == plain[module].scale
    assert all(f.magnitude is not None for f in load_factors(read(cases / "formats/mlx_dora", base)).values())
    assert "scale is unknown" in refused(cases / "formats" / "mlx_npz_no_config", base).message
