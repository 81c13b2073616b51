"""Damaged and unsupported adapters: each refused by name, fast, with a remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from molora_cli.core.adapter.header import read_header
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.tensors import TensorFile, scan
from molora_cli.core.base.structure import read_structure
from molora_cli.errors import InputError
from molora_cli.refs import Ref

Q0 = "base_model.model.model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def source(tiny_llama: Path, make_adapter: Callable[..., Path]) -> Path:
    return make_adapter(tiny_llama, "good")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    """A good adapter to damage."""
    return Path(shutil.copytree(source, tmp_path / "adapter"))


def refused(folder: Path, base: Path, seconds: float = 1.0) -> InputError:
    structure = read_structure(base)
    start = time.perf_counter()
    with pytest.raises(InputError) as caught:
        read_adapter("one", Ref("local", str(folder), path=folder), structure)
    assert time.perf_counter() - start < seconds
    error = caught.value
    assert error.exit_code == 2
    assert error.remedy
    assert len(str(error).splitlines()) <= 3
    assert str(error).replace("\n", "").isprintable()
    return error


def load(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / "adapter_model.safetensors").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def store(folder: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def rebuild(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Load every float32 tensor, let `change` edit the dict, and write it again."""
    header, data = load(folder)
    header.pop("__metadata__", None)
    tensors = {
        k: np.frombuffer(data[slice(*v["data_offsets"])], "<f4").reshape(v["shape"]).copy()
        for k, v in header.items()
    }
    change(tensors)
    spelled = {"float32": "F32", "int8": "I8", "uint16": "BF16", "float16": "F16"}
    out, blob = {}, b""
    for name, array in tensors.items():
        end = len(blob) + array.nbytes
        out[name] = {
            "dtype": spelled[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(blob), end],
        }
        blob += array.tobytes()
    store(folder, out, blob)


def put(name: str, array: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[Q0 + name] = array(tensors[Q0 + name])

    return change


def all_of(array: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({k: array(v) for k, v in tensors.items()})


def with_nan(array: np.ndarray) -> np.ndarray:
    array[1, 2] = np.nan
    array[0, 0] = -np.inf
    return array


def add(name: str, shape: tuple[int, ...]) -> Callable[[dict[str, np.ndarray]], None]:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


def pair(module: str, inputs: int = 64, outputs: int = 64) -> Callable[[dict[str, np.ndarray]], None]:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors[module + ".lora_A.weight"] = np.ones((4, inputs), np.float32)
        tensors[module + ".lora_B.weight"] = np.ones((outputs, 4), np.float32)

    return change


LAYERS = "base_model.model.model.layers."
TENSORS = {
    "nan": (put("lora_A.weight", with_nan), r"q_proj\.lora_A\.weight' has 2 values that are NaN"),
    "bf16_nan": (
        all_of(lambda a: np.full(a.shape, 0x7FC0, np.uint16)),
        r"values that are NaN or infinite, and 15 more tensors",
    ),
    "integers": (all_of(lambda a: a.astype(np.int8)), "dtype I8"),
    "empty_tensors": (all_of(lambda a: np.zeros((0,), np.float32)), "saved without its weights"),
    "no_tensors": (lambda t: t.clear(), "contains no tensors"),
    "no_lora": (lambda t: (t.clear(), t.update(foo=np.ones(3, np.float32)))[0], "holds no LoRA tensors"),
    "missing_half": (lambda t: t.pop(Q0 + "lora_B.weight") is None, "lora_B of .* is missing"),
    "rank_mismatch": (put("lora_A.weight", lambda a: a[:3]), r"on the rank: \[3, 64\] and \[64, 4\]"),
    "transposed": (all_of(lambda a: np.ascontiguousarray(a.T)), "transposed"),
    "other_rank": (all_of(lambda a: a[:2] if a.shape[0] == 4 else a[:, :2]), "says rank 4 .* have rank 2"),
    "three_dims": (put("lora_B.weight", lambda a: a[:, :, None]), "not matrices"),
    "layer_99": (pair(LAYERS + "99.self_attn.q_proj"), "adapter has layer 99, base has 4"),
    "unknown_module": (pair(LAYERS + "0.self_attn.z_proj"), "1 of 9 adapted modules do not exist"),
    "norm": (pair(LAYERS + "0.input_layernorm"), "do not exist in the base"),
    "experts": (pair(LAYERS + "0.mlp.experts.3.up_proj"), "list of experts"),
    "parameters": (pair(LAYERS + "0.mlp.experts.base_layer"), "list of experts"),
    "path_in_name": (pair("../../../etc/passwd"), "do not exist in the base"),
    "escape_in_name": (pair("base_model.model.\x1b[31mred\n"), r"\\x1b\[31mred\\x0a"),
    "hidden_size": (pair(LAYERS + "0.self_attn.o_proj", inputs=48), "input size 48 against 64"),
    "twice": (pair("module." + LAYERS + "0.self_attn.q_proj"), "name the same tensor"),
    "full_copy": (add("base_model.model.lm_head.weight", (320, 64)), r"full copies \('base_model.+lm_head"),
    "token_rows": (
        add("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", (2, 64)),
        "trainable_tokens_delta",
    ),
    "ia3": (add(LAYERS + "0.self_attn.q_proj.ia3_l", (64, 1)), "a tensor of IA3"),
    "lora_a": (add("model.layers.0.self_attn.q_proj.lora_a", (64, 4)), "MLX-LM .lora_a"),
    "torchtune": (add("layers.0.attn.q_proj.lora_a.weight", (4, 64)), "torchtune .lora_a.weight"),
    "kohya": (add("lora_unet_x.lora_down.weight", (64, 4)), "kohya"),
    "magnitude": (add(Q0 + "lora_magnitude_vector", (64,)), "use_dora is off"),
    "two_adapters": (
        lambda t: t.update(
            {Q0 + "lora_A.a.weight": np.ones((4, 64), "f4"), Q0 + "lora_B.b.weight": np.ones((64, 4), "f4")}
        ),
        "several adapters: a, b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, folder: Path, tiny_llama: Path) -> None:
    change, message = TENSORS[case]
    rebuild(folder, change)
    error = refused(folder, tiny_llama)
    assert error.message.startswith(str(folder))
    assert re.search(message, error.message), error.message


def bytes_of(folder: Path, raw: bytes) -> None:
    (folder / "adapter_model.safetensors").write_bytes(raw)


def entry(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        header, data = load(folder)
        header[Q0 + "lora_A.weight"][key] = value
        store(folder, header, data)

    return change


def cut(amount: int) -> Callable[[Path], None]:
    return lambda folder: bytes_of(folder, (folder / "adapter_model.safetensors").read_bytes()[:-amount])


def overlap(folder: Path) -> None:
    header, data = load(folder)
    names = [k for k in header if k.endswith("q_proj.lora_A.weight")]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    store(folder, header, data)


FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated_data": (cut(100), r"is incomplete: it needs \d+ bytes, has \d+"),
    "truncated_header": (
        lambda f: bytes_of(f, (f / "adapter_model.safetensors").read_bytes()[:500]),
        "header alone needs",
    ),
    "trailing": (
        lambda f: bytes_of(f, (f / "adapter_model.safetensors").read_bytes() + b"xx"),
        "2 bytes of no tensor",
    ),
    "empty": (lambda f: bytes_of(f, b""), r"is empty \(0 bytes\)"),
    "short": (lambda f: bytes_of(f, b"\2\0\0"), "too short"),
    "bomb": (
        lambda f: bytes_of(f, struct.pack("<Q", (1 << 63) - 1) + b"{}"),
        "header claims 9223372036854775807",
    ),
    "not_json": (lambda f: store(f, b"hello there", b""), "damaged header"),
    "list": (lambda f: store(f, b"[1]", b""), "damaged header"),
    "deep": (lambda f: store(f, b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""), "nested too deeply"),
    "brackets": (lambda f: store(f, b'{"a":[' + b"[]," * 5_000_000 + b"[]]}", b""), "no list of tensors"),
    "huge_number": (lambda f: store(f, b'{"a":' + b"9" * 10_000 + b"}", b""), "damaged header"),
    "bad_utf8": (lambda f: store(f, b'{"\xff":1}', b""), "not valid UTF-8 at byte 2"),
    "past_end": (entry("data_offsets", [0, 10**12]), "its offsets 0 to 1000000000000"),
    "backwards": (entry("data_offsets", [1024, 0]), "offsets"),
    "negative": (entry("data_offsets", [-8, 1016]), "no pair of positions"),
    "overlap": (overlap, "shares bytes|leaves a gap"),
    "shape_overflow": (entry("shape", [1 << 40, 1 << 40]), "needs 4835703278458516698824704 bytes"),
    "shape_negative": (entry("shape", [-4, -64]), "no list of sizes"),
    "shape_text": (entry("shape", "4x64"), "no list of sizes"),
    "dtype": (entry("dtype", "F4"), "dtype F4, which is not known"),
    "html": (lambda f: bytes_of(f, b"<!DOCTYPE html><html>"), "is a web page"),
    "json": (lambda f: bytes_of(f, b'{"error": "not found"}'), "is JSON text"),
    "lfs": (
        lambda f: bytes_of(f, b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"),
        "Git LFS pointer.*12345 bytes",
    ),
    "zip": (lambda f: bytes_of(f, b"PK\x03\x04" + b"0" * 100), "zip archive"),
    "gguf": (lambda f: bytes_of(f, b"GGUF" + b"\0" * 100), "is a GGUF file"),
}


@pytest.mark.parametrize("case", FILES)
def test_files(case: str, folder: Path, tiny_llama: Path) -> None:
    change, message = FILES[case]
    change(folder)
    error = refused(folder, tiny_llama)
    assert re.search(message, error.message), error.message
    assert "adapter_model.safetensors" in error.message


def test_links_and_folders(folder: Path, tiny_llama: Path) -> None:
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    good = weights.read_bytes()
    weights.unlink()
    assert "weights: adapter_model.safetensors" in refused(folder, tiny_llama).message
    weights.symlink_to("adapter_model.safetensors")
    assert "leads back to itself" in refused(folder, tiny_llama).message
    weights.unlink()
    weights.symlink_to("nowhere")
    assert "broken link" in refused(folder, tiny_llama).message
    weights.unlink()
    weights.mkdir()
    assert "is a directory" in refused(folder, tiny_llama).message
    weights.rmdir()
    os.mkfifo(weights)
    assert "not a regular file" in refused(folder, tiny_llama).message
    weights.unlink()
    weights.write_bytes(good)
    config.unlink()
    error = refused(folder, tiny_llama)
    assert "adapter_config.json is missing (there: README.md, adapter_model.safetensors)" in error.message
    assert (
        "below" in refused(folder.parent, tiny_llama).remedy
        or "folder" in refused(folder.parent, tiny_llama).remedy
    )
    loop = folder / "loop"
    loop.symlink_to("loop")
    assert "symbolic links" in refused(loop, tiny_llama).message
    assert "No such file" in refused(folder / "absent", tiny_llama).message


def test_other_formats_by_name(folder: Path, tiny_llama: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapters.safetensors")
    assert "adapter of MLX" in refused(folder, tiny_llama).message
    (folder / "adapter_config.json").rename(folder / "other.json")
    assert "MLX adapter without" in refused(folder / "adapters.safetensors", tiny_llama).message
    (folder / "x.gguf").write_bytes(b"GGUF")
    assert "x.gguf is incomplete" in refused(folder / "x.gguf", tiny_llama).message
    (folder / "adapters.safetensors").unlink()
    assert "x.gguf is incomplete" in refused(folder, tiny_llama).message
    (folder / "adapter_model.pt").write_bytes(b"PK")
    (folder / "x.gguf").unlink()
    assert "torchtune" in refused(folder, tiny_llama).message
    (folder / "xlora_config.json").write_text("{}")
    assert "X-LoRA" in refused(folder, tiny_llama).message
    assert "whole model" in refused(tiny_llama, tiny_llama).message


@pytest.mark.parametrize("method", ["gptq", "awq", "MLX"])
def test_a_base_whose_weights_are_packed(method: str, source: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """Packed weights have other names or shapes: the base is at fault then, not the adapter."""
    base = Path(shutil.copytree(tiny_llama, tmp_path / "packed"))
    tensors = load_file(base / "model.safetensors")
    for name in [n for n in tensors if "_proj" in n]:
        packed = np.zeros((tensors[name].shape[0], tensors.pop(name).shape[1] // 8), np.uint32)
        tensors[name if method == "MLX" else name.replace(".weight", ".qweight")] = packed
    save_file(tensors, base / "model.safetensors")
    said = (
        {"quantization": {"bits": 4}}
        if method == "MLX"
        else {"quantization_config": {"quant_method": method}}
    )
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, **said}))
    error = refused(source, base)
    assert f"packed by {method}" in error.message and "full precision" in error.remedy


def test_scan_is_chunked_and_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molora_cli.core.adapter.tensors._CHUNK", 7)
    values = np.linspace(-3, 2, 50, dtype=np.float32)
    values[[6, 7, 49]] = [np.nan, np.inf, -np.inf]
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    for dtype, array in (("F32", values), ("BF16", bits)):
        from molora_cli.core.adapter.header import TensorInfo

        result = scan(TensorFile(tmp_path, {"t": TensorInfo("t", dtype, (50,))}, {"t": array}), "t")
        assert result.bad == 3
        assert result.largest == pytest.approx(3, rel=0.01)


@settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.integers(0, 4000), flips=st.binary(min_size=1, max_size=8), cut=st.integers(0, 4000))
def test_header_fuzz(where: int, flips: bytes, cut: int, source: Path, tmp_path: Path) -> None:
    """Damaged bytes are refused or give tensors that lie within the file; nothing else ever happens."""
    raw = bytearray((source / "adapter_model.safetensors").read_bytes())
    where %= len(raw)
    raw[where : where + len(flips)] = flips
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(raw[: len(raw) - cut] if cut < 100 else raw)
    try:
        header = read_header(path)
    except InputError:
        return
    assert all(8 < t.start <= t.stop <= path.stat().st_size for t in header.tensors.values())
