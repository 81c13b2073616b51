"""X-LoRA models that PEFT saved, as routers: the logits are PEFT's own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from molora_cli.core.routed.model import load
from molora_cli.errors import InputError

IDS = torch.tensor([[1, 70, 90, 101, 5, 200, 300, 64], [0, 0, 0, 7, 8, 99, 120, 33]])
MASK = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 1, 1, 1]])
NAMES = ("zero", "one", "two")


@pytest.fixture(scope="module")
def adapters(tiny_llama: Path, make_adapter: Callable[..., Path]) -> list[Path]:
    """Different ranks and target modules."""
    return [
        make_adapter(tiny_llama, "x0", seed=1, r=3),
        make_adapter(tiny_llama, "x1", seed=2, target_modules=["k_proj", "o_proj", "down_proj"]),
        make_adapter(tiny_llama, "x2", seed=3, r=2, lora_alpha=7),
    ]


@pytest.fixture(scope="module")
def bundle(tiny_llama: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters in another order than the X-LoRA's."""
    folder = tmp_path_factory.mktemp("xlora") / "b"
    named = [f"{n}={p}" for n, p in zip(NAMES, adapters, strict=True)]
    done = _run("compose", "-o", folder, "--base", tiny_llama, *reversed(named))
    assert done.exit_code == 0, done.output
    return folder


def _run(*line: object) -> Any:
    from molora_cli.app import app

    return CliRunner().invoke(app, [*map(str, line)])


def _saved(
    base: Path, adapters: list[Path], target: Path, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes an X-LoRA folder with nothing lost. PEFT's logits for IDS, and scalings (B, T, modules, E)."""
    from peft import XLoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.config.use_cache = False
    named = {str(i): str(path) for i, path in enumerate(adapters)}
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=64, adapters=named, **options)
    torch.manual_seed(4)
    made = get_peft_model(model, config)
    classifier = made.base_model.internal_xlora_classifier
    for parameter in classifier.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    with torch.no_grad():
        logits = made.eval()(input_ids=IDS, attention_mask=MASK).logits
    scalings = made.base_model.internal_xlora_scalings
    made.save_pretrained(target)
    # what PEFT's save drops: tensors whose names hold ".0.", and layers of that number in the adapters
    prefix = "base_model.internal_xlora_classifier."
    state = {prefix + name: value.contiguous() for name, value in classifier.state_dict().items()}
    save_file(state, target / "adapter_model.safetensors")
    for number, path in enumerate(adapters):
        shutil.rmtree(target / str(number))
        shutil.copytree(path, target / str(number))
    return logits, scalings


_DEEP = {"xlora_depth": 3, "xlora_size": 8, "xlora_dropout_p": 0.0}
_TOP = {"top_k_lora": 2, "enable_softmax": False, "enable_softmax_topk": True}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"layerwise_scalings": True, "xlora_depth": 2, "xlora_size": 16, "softmax_temperature": 0.7},
        {"top_k_lora": 2, "global_scaling_weight": 0.5, **_DEEP},
        pytest.param({**_TOP, "layerwise_scalings": True}, marks=pytest.mark.slow),
    ],
    ids=["shared", "layerwise", "top-k", "softmax of the top-k"],
)
def test_logits_are_those_of_peft(
    options: dict[str, Any], bundle: Path, adapters: list[Path], tiny_llama: Path, tmp_path: Path
) -> None:
    wanted, scalings = _saved(tiny_llama, adapters, tmp_path / "x", **options)
    assert float(scalings.float().std(1).mean()) > 0.01  # tokens do differ
    done = _run("attach-router", bundle, "--kind", "xlora", "--xlora", tmp_path / "x", "--force", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["experts"] == [*NAMES, "__base__"]
    model = load(bundle, backend="torch", dtype="float32")
    with torch.no_grad():
        found = model(input_ids=IDS, attention_mask=MASK)
        alone = model(input_ids=IDS[:1])
    real = MASK.bool()
    assert float((found.logits - wanted)[real].abs().max()) < 1e-4
    assert float((alone.logits - wanted[:1]).abs().max()) < 1e-4
    if not options:  # what a trace shows is what PEFT scaled by, adapters in the bundle's order
        gates = found.trace.gates[:8, 0]
        by_name = {
            found.trace.adapters[i]: g
            for i, g in zip(found.trace.indices[5, 0], gates[5], strict=True)
            if i >= 0
        }
        for number, name in enumerate(NAMES):
            assert by_name[name] == pytest.approx(float(scalings[0, 5, 0, number]), abs=1e-5)


@pytest.mark.slow
def test_generation_keeps_keys_and_values(
    bundle: Path, adapters: list[Path], tiny_llama: Path, tmp_path: Path
) -> None:
    _saved(tiny_llama, adapters, tmp_path / "x", layerwise_scalings=True)
    done = _run("attach-router", bundle, "--kind", "xlora", "--xlora", tmp_path / "x", "--force")
    assert done.exit_code == 0, done.output
    model = load(bundle, backend="torch", dtype="float32")
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    kept = model.generate(input_ids=IDS[:1], use_cache=True, **options)
    again = model.generate(input_ids=IDS[:1], use_cache=False, **options)
    assert kept.shape[1] == 14 and torch.equal(kept, again)
    done = _run("inspect", bundle, "--prompt", "abc 123", "--json", "-q")
    assert done.exit_code == 0, done.output
    seen = json.loads(done.stdout)
    assert "xlora-modules" in done.stdout and seen["schema_version"]


def test_what_is_not_whole_or_no_gate_is_refused(
    bundle: Path, adapters: list[Path], tiny_llama: Path, tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    folder = tmp_path / "x"
    _saved(tiny_llama, adapters, folder, xlora_depth=2, xlora_size=8)
    config, tensors = folder / "adapter_config.json", load_file(folder / "adapter_model.safetensors")
    written = json.loads(config.read_text())

    def refused(**changed: Any) -> InputError:
        config.write_text(json.dumps({**written, **changed}))
        done = _run("attach-router", bundle, "--kind", "xlora", "--xlora", folder, "--force")
        assert isinstance(done.exception, InputError), done.output
        return done.exception

    assert "no gates" in refused(enable_softmax=False).message
    assert "global_scaling_weight is 2" in refused(global_scaling_weight=2.0).message
    assert "scaling_pass_value" in refused(scaling_pass_value=0.4).message
    assert "softmax_temperature" in refused(softmax_temperature="hot").message
    assert "3 outputs" in refused(layerwise_scalings=True).message
    assert "2 numbered folders" not in refused(adapters={"0": "a"}).message
    error = refused(xlora_dropout_p=0.0)  # then the layers would have other numbers
    assert "its classifier lost" in error.message and "train-router" in error.remedy
    lost = {k: v for k, v in tensors.items() if ".0." not in k}  # as PEFT saves it
    save_file(lost, folder / "adapter_model.safetensors")
    assert "its classifier lost layers.0.weight" in refused().message
    save_file(tensors, folder / "adapter_model.safetensors")
    shutil.rmtree(folder / "2")
    shutil.copytree(make_adapter(tiny_llama, "other", seed=9, r=2), folder / "2")
    assert "2 is not among the adapters" in refused().message
    done = _run("attach-router", bundle, "--kind", "arrow", "--xlora", folder, "--force")
    assert isinstance(done.exception, InputError) and "--kind xlora" in done.exception.remedy
    # compose says how it goes on
    done = _run("compose", "-o", tmp_path / "b", "--base", tiny_llama, f"x={folder}")
    assert isinstance(done.exception, InputError)
    assert f"attach-router BUNDLE --kind xlora --xlora {folder}" in done.exception.remedy
