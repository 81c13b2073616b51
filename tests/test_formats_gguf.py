"""llama.cpp's GGUF LoRA, written here with the gguf library and its converter's published order of rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.gguf_header import place_tensors, read_gguf
from molora_cli.core.adapter.gguf_layout import gguf_layout, interleave_rows, separate_rows
from molora_cli.core.adapter.read import base_named, read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.structure import BaseModules, read_structure
from molora_cli.errors import InputError
from molora_cli.refs import Ref

gguf = pytest.importorskip("gguf")

IDS = torch.tensor([[1, 70, 90, 101, 5, 200, 300, 64], [2, 8, 16, 32, 64, 128, 256, 319]])
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
HEADS = {"q_proj": 4, "k_proj": 2}
Pair = tuple[NDArray[np.float32], NDArray[np.float32]]


def read(path: Path, base: Path, **options: Any) -> Adapter:
    return read_adapter("one", Ref("local", str(path), path=path), read_structure(base), **options)


def refused(path: Path, base: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, base)
    assert caught.value.remedy and path.name in caught.value.message
    return caught.value


def gguf_name(module: str) -> str:
    if not module.startswith("model.layers."):
        return {"model.embed_tokens": "token_embd", "lm_head": "output"}[module]
    _, _, layer, leaf = module.split(".", 3)
    return f"blk.{layer}.{NAMES[leaf]}"


def converters_order(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """convert_hf_to_gguf.py, LlamaModel.permute: row i of a head's first half beside row i of its second."""
    size = rows.shape[0] // heads
    half = size // 2
    return rows[
        [head * size + side * half + i for head in range(heads) for i in range(half) for side in (0, 1)]
    ]


def factors(base: BaseModules, modules: list[str], rank: int = 4, seed: int = 0) -> dict[str, Pair]:
    """A (r, in) and B (out, r) as PEFT has them; an embedding's A is (r, V)."""
    random = np.random.default_rng(seed)
    return {
        m: (
            (0.3 * random.standard_normal((rank, base[m].in_features))).astype(np.float32),
            (0.3 * random.standard_normal((base[m].out_features, rank))).astype(np.float32),
        )
        for m in modules
    }


def write_gguf(
    path: Path,
    pairs: Mapping[str, Pair],
    *,
    arch: str = "llama",
    alpha: float | None = 8.0,
    kind: Any = None,
    drop: str = "",
    extra: Mapping[str, Any] | None = None,
    permute: bool = True,
) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    fields = {"general.type": "adapter", "adapter.type": "lora", **(extra or {})}
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for module, (a, b) in pairs.items():
        heads = HEADS.get(module.rpartition(".")[2]) if permute else None
        rows = converters_order(b, heads) if heads else b
        for half, array in (("lora_a", a.T if module.endswith("embed_tokens") else a), ("lora_b", rows)):
            name = f"{gguf_name(module)}.weight.{half}"
            if name == drop:
                continue
            array = np.ascontiguousarray(array)
            if kind is None:
                writer.add_tensor(name, array)
            elif kind == gguf.GGMLQuantizationType.F16:
                writer.add_tensor(name, array.astype(np.float16))
            else:
                writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def all_modules(*layers: int) -> list[str]:
    return [f"model.layers.{n}.{leaf}" for n in layers for leaf in NAMES]


@torch.no_grad()
def dense_logits(base: Path, pairs: Mapping[str, Pair], scale: float) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    for module, (a, b) in pairs.items():
        weight = model.get_submodule(module).weight
        delta = torch.from_numpy(scale * (b @ a))
        weight += delta.T if module.endswith("embed_tokens") else delta
    return model(IDS).logits


@torch.no_grad()
def peft_logits(base: Path, folder: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    return PeftModel.from_pretrained(model, folder).eval()(IDS).logits


@pytest.mark.parametrize("alpha", [8.0, 0.0, None])
def test_same_function(alpha: float | None, tiny_llama: Path, tmp_path: Path) -> None:
    base = read_structure(tiny_llama)
    pairs = factors(base, [*all_modules(0, 3), "model.embed_tokens", "lm_head"])
    path = write_gguf(tmp_path / "one.gguf", pairs, alpha=alpha)
    want = dense_logits(tiny_llama, pairs, alpha / 4 if alpha else 1.0)
    adapter = read(path, tiny_llama)
    assert adapter.format == "gguf" and set(adapter.modules) == set(pairs)
    assert bool(alpha) != any("alpha is 0 or missing" in n for n in adapter.notes)
    write_peft(adapter, tmp_path / "out")
    assert float((peft_logits(tiny_llama, tmp_path / "out") - want).abs().max()) < 1e-4
    unpermuted = write_gguf(tmp_path / "wrong.gguf", pairs, alpha=alpha, permute=False)
    got = load_factors(read(unpermuted, tiny_llama))["model.layers.0.self_attn.q_proj"]
    assert not torch.equal(got.B, torch.from_numpy(pairs["model.layers.0.self_attn.q_proj"][1]))


def test_types(tiny_llama: Path, tmp_path: Path) -> None:
    base = read_structure(tiny_llama)
    pairs = factors(base, ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"], rank=32)
    kinds = gguf.GGMLQuantizationType
    for kind, dtype, error in (
        (kinds.F16, torch.float16, 1e-3),
        (kinds.BF16, torch.bfloat16, 1e-2),
        (kinds.Q8_0, torch.float32, 1e-2),
        (kinds.Q4_0, torch.float32, 0.2),
    ):
        adapter = read(write_gguf(tmp_path / f"{kind.name}.gguf", pairs, kind=kind), tiny_llama)
        assert any("quantised" in n for n in adapter.notes) == kind.name.startswith("Q")
        for module, f in load_factors(adapter).items():
            assert f.A.dtype == f.B.dtype == dtype
            for have, need in ((f.A, pairs[module][0]), (f.B, pairs[module][1])):
                assert 0 < float((have.float() - torch.from_numpy(need)).abs().max()) < error


def test_order_of_rows() -> None:
    rows = np.arange(48, dtype=np.float32).reshape(24, 2)
    for heads in (1, 2, 3, 4, 6, 12):
        there = interleave_rows(rows, heads)
        assert np.array_equal(there, converters_order(rows, heads))
        assert np.array_equal(separate_rows(there, heads), rows)
    with pytest.raises(ValueError, match="cannot be split"):
        interleave_rows(rows, 5)


def test_other_families(cases: Path) -> None:
    """Names and orders by family; GGUF files made elsewhere are the PEFT adapters they came from."""
    for name, base, original in (
        ("llama_plain_code_f32", "llama", "plain_code"),
        ("llama_rslora_alpha_corrected", "llama", "rslora"),
        ("qwen2_attn_f32", "qwen2", "qwen2_attn"),
    ):
        got = load_factors(read(cases / "formats" / "gguf" / f"{name}.gguf", cases / "bases" / base))
        want = load_factors(read(cases / "adapters" / original, cases / "bases" / base))
        assert got.keys() == want.keys()
        for module, f in got.items():
            assert torch.equal(f.A, want[module].A) and torch.equal(f.B, want[module].B)
            assert f.scale == pytest.approx(want[module].scale)
    for family in ("qwen2", "phi3", "gpt2", "mixtral"):
        base = read_structure(cases / "bases" / family)
        layout = gguf_layout(base)
        assert bool(layout.heads) == (family == "mixtral")
        left_out = {m.rpartition(".")[2] for m in base if m not in layout.names}
        assert left_out <= {"wpe"}, left_out


def test_refused_by_name(tiny_llama: Path, tmp_path: Path) -> None:
    base = read_structure(tiny_llama)
    pairs = factors(base, all_modules(0))
    path = tmp_path / "one.gguf"

    def said(**options: Any) -> str:
        return refused(write_gguf(path, pairs, **options), tiny_llama).message

    assert "made for the architecture 'qwen2', the base is 'llama'" in said(arch="qwen2")
    assert "'blk.0.attn_q.weight.lora_b' is missing" in said(drop="blk.0.attn_q.weight.lora_b")
    assert "general.type is 'mmproj'" in said(extra={"general.type": "mmproj"})
    assert "adapter.type: is 'control_vector'" in said(extra={"adapter.type": "control_vector"})
    assert "adapter.alora.invocation_tokens" in said(extra={"adapter.alora.invocation_tokens": [5, 6]})
    assert "adapter.lora.alpha: must be a finite number" in said(alpha=float("nan"))
    pairs = {"model.layers.7.self_attn.q_proj": pairs["model.layers.0.self_attn.q_proj"]}
    assert "the base has 4 layers" in said()
    other = factors(base, ["model.layers.0.mlp.down_proj"])
    pairs = {"model.layers.0.self_attn.q_proj": other["model.layers.0.mlp.down_proj"]}
    assert "model.layers.0.self_attn.q_proj: lora_a is [4, 128]" in said()
    pairs = factors(base, ["lm_head"])
    pairs["lm_head"][0][0, 0] = np.inf
    assert "'output.weight.lora_a' has 1 values that are NaN" in said()
    pairs["lm_head"][0][:] = 0
    assert "changes nothing" in said()


def test_whole_models_and_folders(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(4)
    writer.add_token_list([f"t{i}" for i in range(5000)])
    writer.add_tensor("output.weight", np.zeros((320, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "whole model" in refused(path, tiny_llama).message
    pairs = factors(read_structure(tiny_llama), all_modules(0))
    folder = tmp_path / "folder"
    folder.mkdir()
    named = {"general.base_model.0.repo_url": "https://hub.example/org/base"}
    write_gguf(folder / "a.gguf", pairs, extra=named)
    assert len(read(folder, tiny_llama).modules) == 7
    assert base_named(Ref("local", "x", path=folder)) == "org/base"
    write_gguf(folder / "b.gguf", pairs)
    assert "holds 2 GGUF files" in refused(folder, tiny_llama).message


def test_damage(tiny_llama: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "one.gguf", factors(read_structure(tiny_llama), all_modules(0)))
    raw = path.read_bytes()
    for count in (3, 20, 100, 300, len(raw) - 40):
        path.write_bytes(raw[:count])
        assert "incomplete" in refused(path, tiny_llama).message or count == 3
    for at, patch, words in (
        (4, (1).to_bytes(4, "little"), "GGUF version 1"),
        (4, (3).to_bytes(4, "big"), "big-endian"),
        (8, (2**63).to_bytes(8, "little"), "damaged header"),
        (16, (2**40).to_bytes(8, "little"), "damaged header"),
        (24, (2**62).to_bytes(8, "little"), "claims a text of"),
    ):
        path.write_bytes(raw[:at] + patch + raw[at + len(patch) :])
        assert words in refused(path, tiny_llama).message
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n")
    assert "Git LFS pointer" in refused(path, tiny_llama).message


def test_without_the_package(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "one.gguf", factors(read_structure(tiny_llama), all_modules(0)))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name))
    assert refused(path, tiny_llama).remedy == "pip install 'molora[gguf]'"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(1, 70),
    alpha=st.floats(0.0078125, 1000, width=32),
    chosen=st.sets(st.sampled_from([*all_modules(0, 1, 2, 3), "model.embed_tokens", "lm_head"]), min_size=1),
    kind=st.sampled_from([None, "F16"]),
    seed=st.integers(0, 1000),
)
def test_any_shape_rank_name_and_dtype(
    rank: int, alpha: float, chosen: set[str], kind: str | None, seed: int, tiny_llama: Path, tmp_path: Path
) -> None:
    pairs = factors(read_structure(tiny_llama), sorted(chosen), rank, seed)
    path = write_gguf(
        tmp_path / "one.gguf", pairs, alpha=alpha, kind=gguf.GGMLQuantizationType[kind] if kind else None
    )
    adapter = read(path, tiny_llama)
    write_peft(adapter, tmp_path / "out")
    dtype = np.float16 if kind else np.float32
    for found in (load_factors(adapter), load_factors(read(tmp_path / "out", tiny_llama))):
        assert set(found) == chosen
        for module, f in found.items():
            assert f.scale == pytest.approx(alpha / rank)
            assert np.array_equal(f.A.numpy(), pairs[module][0].astype(dtype))
            assert np.array_equal(f.B.numpy(), pairs[module][1].astype(dtype))
    # the header agrees with the gguf library's own reader
    header, theirs = read_gguf(path), gguf.GGUFReader(path)
    sizes = {int(t): s for t, s in gguf.GGML_QUANT_SIZES.items()}
    placed = place_tensors(header, sizes)
    assert {(t.name, t.data_offset, tuple(map(int, t.shape))) for t in theirs.tensors} == {
        (t.name, t.start, t.dims) for t in placed.values()
    }
    assert header.fields["adapter.lora.alpha"] == theirs.fields["adapter.lora.alpha"].contents()
