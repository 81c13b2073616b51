"""X-LoRA folders as PEFT saves them, and full copies of modules (modules_to_save)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.read import base_named, read_adapter
from molora_cli.core.adapter.saved import parse_saved
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.structure import read_structure
from molora_cli.errors import InputError
from molora_cli.refs import Ref

IDS = torch.tensor([[1, 70, 90, 101, 5, 200, 300, 64]])


def read(path: Path, base: Path, **options: Any) -> Adapter:
    return read_adapter("one", Ref("local", str(path), path=path), read_structure(base), **options)


def refused(path: Path, base: Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as caught:
        read(path, base, **options)
    assert caught.value.remedy
    return caught.value


@torch.no_grad()
def peft_logits(base: Path, folder: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, folder).eval()(IDS).logits


@pytest.fixture(scope="module")
def originals(tiny_llama: Path, make_adapter: Callable[..., Path]) -> list[Path]:
    return [
        make_adapter(tiny_llama, "first", seed=1),
        make_adapter(tiny_llama, "second", seed=2, target_modules=["k_proj", "o_proj"]),
    ]


@pytest.fixture(scope="module")
def xlora(tiny_llama: Path, originals: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What PEFT itself saves of an X-LoRA model of two adapters."""
    from peft import XLoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    model.config.use_cache = False
    config = XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=64, xlora_depth=2, xlora_size=16,
        adapters={str(i): str(path) for i, path in enumerate(originals)},
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("xlora") / "saved"
    get_peft_model(model, config).save_pretrained(folder)
    return folder


def test_the_folder_is_refused_with_its_cause(xlora: Path, tiny_llama: Path) -> None:
    error = refused(xlora, tiny_llama)
    assert "its classifier lost layers.0.weight" in error.message and "adapter_config.json" in error.message
    assert f"={xlora}/0 " in error.remedy and f"={xlora}/1" in error.remedy
    with pytest.raises(InputError, match="X-LoRA"):
        base_named(Ref("local", "x", path=xlora))


def test_a_whole_classifier_is_not_said_to_have_lost_anything(
    xlora: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    prefix = "base_model.internal_xlora_classifier.layers."
    config = json.loads((xlora / "adapter_config.json").read_text())
    for dropout, second in ((0.2, 3), (0.0, 2)):
        tensors = {f"{prefix}{i}.weight": torch.ones(4, 4) for i in (0, second)}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "xlora_dropout_p": dropout}))
        assert "lost" not in refused(tmp_path, tiny_llama).message
        save_file({f"{prefix}0.weight": torch.ones(4, 4)}, tmp_path / "adapter_model.safetensors")
        assert f"lost layers.{second}.weight" in refused(tmp_path, tiny_llama).message


def test_its_adapters_are_read_as_far_as_they_were_saved(
    xlora: Path, originals: list[Path], tiny_llama: Path, tmp_path: Path
) -> None:
    for number, lost in ((0, 1), (1, 0)):  # each adapter loses the layer that has the other's name
        adapter = read(xlora / str(number), tiny_llama)
        whole, kept = load_factors(read(originals[number], tiny_llama)), load_factors(adapter)
        assert kept.keys() == {m for m in whole if f".layers.{lost}." not in m}
        for module, f in kept.items():
            assert torch.equal(f.A, whole[module].A) and torch.equal(f.B, whole[module].B)
        assert any(f"lost 2 of 8 modules of this adapter (layer {lost})" in n for n in adapter.notes)
        # the same adapter without that layer, by PEFT
        tensors = load_file(originals[number] / "adapter_model.safetensors")
        trimmed = tmp_path / f"trimmed{number}"
        trimmed.mkdir()
        config = json.loads((originals[number] / "adapter_config.json").read_text())
        config["layers_to_transform"] = [n for n in range(4) if n != lost]
        (trimmed / "adapter_config.json").write_text(json.dumps(config))
        save_file(
            {k: v for k, v in tensors.items() if f".layers.{lost}." not in k},
            trimmed / "adapter_model.safetensors",
        )
        write_peft(adapter, tmp_path / f"out{number}")
        written = peft_logits(tiny_llama, tmp_path / f"out{number}")
        assert float((written - peft_logits(tiny_llama, trimmed)).abs().max()) < 1e-5


# -- full copies of modules ---------------------------------------------------
@pytest.fixture(scope="module")
def with_head(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LoRA on q_proj, and lm_head trained in full: a change of rank 3 and a little noise."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    settings = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    peft_model = get_peft_model(model, settings)
    with torch.no_grad():
        for key, parameter in peft_model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.1)
            if "modules_to_save" in key:
                parameter += 0.1 * torch.randn(320, 3) @ torch.randn(3, 64) + 0.001 * torch.randn(320, 64)
    folder = tmp_path_factory.mktemp("head") / "saved"
    peft_model.save_pretrained(folder)
    return folder


def test_saved_modules_are_refused_unless_asked_for(with_head: Path, tiny_llama: Path) -> None:
    error = refused(with_head, tiny_llama)
    assert "modules_to_save" in error.message and "--modules-to-save svd:16" in error.remedy
    config = json.loads((with_head / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize(("rank", "error"), [(64, 1e-6), (3, 0.01), (1, 0.9)])
def test_saved_modules_by_svd(
    rank: int, error: float, with_head: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    adapter = read(with_head, tiny_llama, saved_rank=rank)
    assert adapter.modules["lm_head"].rank == rank and adapter.modules["lm_head"].scale == 1.0
    note = next(n for n in adapter.notes if "approximated" in n)
    said = float(note.split("relative error ")[1].split()[0])
    key = next(k for k in load_file(with_head / "adapter_model.safetensors") if k.endswith("lm_head.weight"))
    saved = load_file(with_head / "adapter_model.safetensors")[key]
    base = load_file(tiny_llama / "model.safetensors")["lm_head.weight"]
    change = (saved - base).double()
    f = load_factors(adapter)["lm_head"]
    measured = float((change - f.B.double() @ f.A.double()).norm() / change.norm())
    values = torch.linalg.svdvals(change)
    best = float((values[rank:] ** 2).sum().sqrt() / values.norm())
    assert measured == pytest.approx(best, abs=1e-6) and said == pytest.approx(measured, rel=0.01, abs=1e-7)
    assert measured < error
    write_peft(adapter, tmp_path / "out")
    difference = peft_logits(tiny_llama, tmp_path / "out") - peft_logits(tiny_llama, with_head)
    assert (float(difference.abs().max()) < 1e-4) == (rank == 64)


def test_saved_modules_that_cannot_be_reduced(with_head: Path, tiny_llama: Path, tmp_path: Path) -> None:
    tensors = load_file(with_head / "adapter_model.safetensors")
    config = json.loads((with_head / "adapter_config.json").read_text())
    head = next(k for k in tensors if k.endswith("lm_head.weight"))
    bad = {
        "no weight matrix": {**tensors, head.replace("lm_head", "model.norm"): torch.ones(64)},
        "the base has [320, 64]": {**tensors, head: torch.ones(321, 64)},
        "NaN": {**tensors, head: torch.full((320, 64), float("nan"))},
        "holds no copy of it": {k: v for k, v in tensors.items() if k != head},
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    for words, changed in bad.items():
        save_file(changed, tmp_path / "adapter_model.safetensors")
        assert words in refused(tmp_path, tiny_llama, saved_rank=4).message
    for text in ("svd", "svd:0", "svd:x", "pca:4", "svd:99999", ""):
        with pytest.raises(InputError, match="no way to keep"):
            parse_saved(text)
    assert parse_saved("svd:16") == 16


def test_compose_takes_all_formats(xlora: Path, with_head: Path, tiny_llama: Path, tmp_path: Path) -> None:
    from molora_cli.app import app

    def run(*arguments: object) -> Any:
        return CliRunner().invoke(app, ["compose", *map(str, arguments)])

    out = tmp_path / "bundle"
    base = ("-o", out, "--base", tiny_llama, "-q")
    assert isinstance(run(*base, f"x={xlora}").exception, InputError)
    assert isinstance(run(*base, f"x={with_head}").exception, InputError)
    assert not out.exists()
    result = run(*base, f"a={xlora}/0", f"head={with_head}", "--modules-to-save", "svd:8", "--json")
    assert result.exit_code == 0, result.output
    entries = {e["name"]: e for e in json.loads(result.stdout)["adapters"]}
    assert any("relative error" in n for n in entries["head"]["notes"])
    assert any("X-LoRA's save lost" in n for n in entries["a"]["notes"])
    assert entries["head"]["modules"]["lm_head"]["rank"] == 8
