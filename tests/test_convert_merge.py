"""Merging a bundle into one adapter or into the base, against PEFT's own deltas and merges."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils.merge_utils import ties as peft_ties
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.core.convert.merge import combine
from molora_cli.errors import InputError, MoloraError

Make = Callable[..., Path]
IDS = torch.arange(64, 110)[None]


@pytest.fixture(scope="module")
def sources(tiny_llama: Path, make_adapter: Make) -> dict[str, Path]:
    """Three that differ in rank, alpha, scale rule and targets."""
    return {
        "one": make_adapter(tiny_llama, "m-one", seed=1),
        "two": make_adapter(
            tiny_llama, "m-two", seed=2, r=6, use_rslora=True, target_modules=["up_proj", "q_proj"]
        ),
        "six": make_adapter(
            tiny_llama, "m-six", seed=6, r=2, lora_alpha=3, target_modules=["q_proj", "embed_tokens"]
        ),
    }


@pytest.fixture(scope="module")
def bundle(tiny_llama: Path, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundles") / "three"
    pairs = [f"{name}={path}" for name, path in sources.items()]
    result = CliRunner().invoke(app, ["compose", "-o", str(folder), "--base", str(tiny_llama), *pairs, "-q"])
    assert result.exit_code == 0, result.output
    return folder


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def merged(*arguments: object) -> dict[str, Any]:
    result = convert(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)["merged"]


def refused(*arguments: object) -> str:
    result = convert(*arguments)
    assert isinstance(result.exception, InputError), (result.output, result.exception)
    return f"{result.exception.message} {result.exception.remedy}"


def deltas(base: Path, folder: Path) -> dict[str, Tensor]:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    return {
        name.removeprefix("base_model.model."): module.get_delta_weight("default").detach().double()
        for name, module in model.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def weighted(base: Path, sources: dict[str, Path], weights: dict[str, float]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for name, folder in sources.items():
        for module, delta in deltas(base, folder).items():
            total[module] = total.get(module, torch.zeros_like(delta)) + weights[name] * delta
    return total


def error(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


WEIGHTS = {"one": 0.5, "two": -0.25, "six": 1.5}
FLAGS = [f"--weights={name}={weight}" for name, weight in WEIGHTS.items()]


def test_cat_is_the_exact_sum(
    tiny_llama: Path, sources: dict[str, Path], bundle: Path, tmp_path: Path
) -> None:
    found = merged(bundle, tmp_path / "cat", "--to", "merged-peft", *FLAGS)
    assert found["largest_error"] < 1e-6 and found["logits"]["max_abs"] < 1e-4
    assert found["logits"]["effect_rms"] > 0.01
    expected, ours = weighted(tiny_llama, sources, WEIGHTS), deltas(tiny_llama, tmp_path / "cat")
    assert ours.keys() == expected.keys()
    assert all(error(ours[m], expected[m]) < 1e-6 for m in expected)
    assert found["modules"]["model.layers.0.self_attn.q_proj"]["rank"] == 4 + 6 + 2


def test_equal_weights_are_the_default(
    tiny_llama: Path, sources: dict[str, Path], bundle: Path, tmp_path: Path
) -> None:
    merged(bundle, tmp_path / "cat", "--to", "merged-peft", "--adapter", "one", "--adapter", "two")
    two = {n: sources[n] for n in ("one", "two")}
    expected = weighted(tiny_llama, two, {"one": 0.5, "two": 0.5})
    ours = deltas(tiny_llama, tmp_path / "cat")
    assert ours.keys() == expected.keys() and all(error(ours[m], expected[m]) < 1e-6 for m in ours)


@pytest.mark.parametrize("method", ["svd", "linear"])
def test_svd_is_the_best_of_its_rank(
    tiny_llama: Path, sources: dict[str, Path], bundle: Path, tmp_path: Path, method: str
) -> None:
    found = merged(bundle, tmp_path / "svd", "--to", "merged-peft", "--method", method, "--rank", 3, *FLAGS)
    ours = deltas(tiny_llama, tmp_path / "svd")
    for module, expected in weighted(tiny_llama, sources, WEIGHTS).items():
        values = torch.linalg.svdvals(expected)
        least = float(values[3:].norm() / values.norm())
        assert error(ours[module], expected) == pytest.approx(least, abs=1e-6)
        assert found["modules"][module]["error"] == pytest.approx(least, abs=1e-6)
        assert found["modules"][module]["rank"] == 3
    assert 0.05 < found["largest_error"] < 1 and found["logits"]["rms"] > 0


def test_a_rank_above_the_sum_is_exact(bundle: Path, tmp_path: Path) -> None:
    found = merged(bundle, tmp_path / "svd", "--to", "merged-peft", "--method", "svd", "--rank", 14, *FLAGS)
    assert found["largest_error"] < 1e-6


@pytest.mark.parametrize("method", ["ties", "dare"])
def test_ties_and_dare_say_how_far_they_are(
    tiny_llama: Path, sources: dict[str, Path], bundle: Path, tmp_path: Path, method: str
) -> None:
    common = ("--to", "merged-peft", "--method", method, "--density", 0.6, "--rank", 64)
    found = merged(bundle, tmp_path / "a", *common, *FLAGS)
    expected, ours = weighted(tiny_llama, sources, WEIGHTS), deltas(tiny_llama, tmp_path / "a")
    for module, said in found["modules"].items():
        assert error(ours[module], expected[module]) == pytest.approx(said["error"], rel=1e-3)
    assert found["largest_cut"] < 1e-6  # rank 64 is full here
    assert found["logits"]["rms"] > 1e-3
    merged(bundle, tmp_path / "b", *common, *FLAGS)
    files = [(tmp_path / n / "adapter_model.safetensors").read_bytes() for n in "ab"]
    assert files[0] == files[1]


def test_ties_of_equal_weights_is_that_of_peft() -> None:
    torch.manual_seed(0)
    changes = [torch.randn(30, 20) for _ in range(3)]
    theirs = peft_ties(changes, torch.ones(3), density=0.4)
    for weights in ([1.0, 1.0, 1.0], [0.2, 0.2, 0.2]):
        torch.testing.assert_close(combine(changes, weights, "ties", 0.4, 0), theirs)
    # an adapter that leaves a module alone does not dilute the others
    alone = combine([changes[0], None], [0.5, 0.5], "ties", 1.0, 0)
    torch.testing.assert_close(alone, changes[0])


def test_dare_is_right_on_average() -> None:
    torch.manual_seed(0)
    changes = [torch.randn(8, 8), torch.randn(8, 8)]
    draws = torch.stack([combine(changes, [0.5, 2.0], "dare", 0.7, seed) for seed in range(4000)])
    expected = 0.5 * changes[0] + 2 * changes[1]
    assert (draws.mean(0) - expected).abs().max() < 0.15
    assert not torch.equal(draws[0], draws[1])
    torch.testing.assert_close(combine(changes, [0.5, 2.0], "dare", 1.0, 0), expected)


def test_biases_add_up(make_adapter: Make, tmp_path: Path) -> None:
    base = with_biases(tmp_path / "base")
    one = make_adapter(base, "b-one", seed=1, lora_bias=True, use_rslora=True)
    for key in list(tensors := load_file(one / "adapter_model.safetensors")):
        if key.endswith(".bias"):
            tensors[key] = torch.randn_like(tensors[key])
    save_file(tensors, one / "adapter_model.safetensors", metadata={"format": "pt"})
    two = make_adapter(base, "b-two", seed=2, target_modules=["o_proj", "q_proj"])
    pairs = [f"one={one}", f"two={two}"]
    CliRunner().invoke(app, ["compose", "-o", str(tmp_path / "b"), "--base", str(base), *pairs, "-q"])
    found = merged(tmp_path / "b", tmp_path / "cat", "--to", "merged-peft")
    assert found["logits"]["max_abs"] < 1e-4 and found["logits"]["effect_rms"] > 1e-3
    found = merged(tmp_path / "b", tmp_path / "whole", "--to", "merged-model")
    assert found["logits"]["max_abs"] < 1e-4
    assert "lora_bias" in refused(tmp_path / "b", tmp_path / "x", "--to", "merged-peft", "--method", "ties")


def with_biases(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    config = LlamaConfig(num_attention_heads=4, attention_bias=True, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# -- into the base ---------------------------------------------------------------
def peft_merge(base: Path, folder: Path) -> Any:
    return (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
        .merge_and_unload()
        .eval()
    )


@pytest.mark.parametrize("kind", ["plain", "dora", "everything"])
def test_one_adapter_folded_in_is_peft_merge(
    tiny_llama: Path, make_adapter: Make, tmp_path: Path, kind: str
) -> None:
    options: dict[str, Any] = {
        "plain": {},
        "dora": {"use_dora": True, "target_modules": ["q_proj", "down_proj"]},
        "everything": {
            "target_modules": ["embed_tokens", "lm_head", "k_proj", "up_proj"],
            "use_rslora": True,
        },
    }[kind]
    source = make_adapter(tiny_llama, f"fold-{kind}", seed=7, **options)
    found = merged(source, tmp_path / "whole", "--to", "merged-model", "--base", tiny_llama)
    assert found["logits"]["max_abs"] < 1e-4 and found["logits"]["effect_rms"] > 1e-3
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    with torch.no_grad():
        torch.testing.assert_close(
            model(IDS).logits, peft_merge(tiny_llama, source)(IDS).logits, atol=1e-4, rtol=0
        )
    text = "def f(x): return x"
    tokenizers = [AutoTokenizer.from_pretrained(p) for p in (tmp_path / "whole", tiny_llama)]
    assert tokenizers[0](text) == tokenizers[1](text)
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    record = json.loads((tmp_path / "whole" / "molora-merge.json").read_text())
    assert record["adapters"][0]["weight"] == 1 and record["base"]["id"] == "tiny-llama"


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens", "q_proj"]])
def test_a_tied_head_gets_a_tensor_of_its_own(make_adapter: Make, tmp_path: Path, targets: list[str]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 320}
    config = LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, initializer_range=0.1, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    source = make_adapter(tmp_path / "base", "tied-" + "-".join(targets), target_modules=targets)
    found = merged(source, tmp_path / "whole", "--to", "merged-model", "--base", tmp_path / "base")
    assert found["logits"]["max_abs"] < 1e-4
    reference = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), source
    ).eval()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert model.config.tie_word_embeddings is False
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, reference(IDS).logits, atol=1e-4, rtol=0)
    written = load_file(tmp_path / "whole" / "model.safetensors")
    embedding = load_file(tmp_path / "base" / "model.safetensors")["model.embed_tokens.weight"]
    if targets == ["lm_head"]:
        assert torch.equal(written["model.embed_tokens.weight"], embedding)
    if targets == ["embed_tokens"]:
        assert torch.equal(written["lm_head.weight"], embedding)


def test_several_folded_in(tiny_llama: Path, sources: dict[str, Path], bundle: Path, tmp_path: Path) -> None:
    found = merged(bundle, tmp_path / "whole", "--to", "merged-model", *FLAGS)
    assert found["logits"]["max_abs"] < 1e-4
    ours = load_file(tmp_path / "whole" / "model.safetensors")
    base = load_file(tiny_llama / "model.safetensors")
    expected = weighted(tiny_llama, sources, WEIGHTS)
    for key, tensor in base.items():
        module = key.removesuffix(".weight")
        wanted = tensor.double() + expected.get(module, torch.zeros(()))
        torch.testing.assert_close(ours[key].double(), wanted, atol=1e-6, rtol=0)


def test_a_base_in_several_files(tiny_llama: Path, sources: dict[str, Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(
        tmp_path / "base", max_shard_size="200KB"
    )
    assert len(list((tmp_path / "base").glob("*.safetensors"))) > 2
    found = merged(sources["six"], tmp_path / "whole", "--to", "merged-model", "--base", tmp_path / "base")
    assert found["logits"]["max_abs"] < 1e-4
    names = {p.name for p in (tmp_path / "base").iterdir()}
    assert names | {"molora-merge.json"} == {p.name for p in (tmp_path / "whole").iterdir()}


def test_half_precision_rounds_or_refuses(tiny_llama: Path, make_adapter: Make, tmp_path: Path) -> None:
    source = make_adapter(tiny_llama, "fold-half", seed=8)
    common = ("--to", "merged-model", "--base", tiny_llama)
    found = merged(source, tmp_path / "b", *common, "--dtype", "bfloat16")
    assert 1e-5 < found["logits"]["rms"] < 0.1 * found["logits"]["effect_rms"]
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "b" / "model.safetensors").values()} == {torch.bfloat16}
    tensors = load_file(source / "adapter_model.safetensors")
    huge = {k: t * 3000 for k, t in tensors.items()}
    save_file(huge, source / "adapter_model.safetensors", metadata={"format": "pt"})
    result = convert(source, tmp_path / "h", *common, "--dtype", "float16")
    assert isinstance(result.exception, MoloraError) and result.exception.exit_code == 1
    assert "float16" in result.exception.message and "bfloat16" in result.exception.remedy
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_what_cannot_be_merged(tiny_llama: Path, make_adapter: Make, tmp_path: Path) -> None:
    dora = make_adapter(tiny_llama, "merge-dora", use_dora=True)
    bias = make_adapter(tiny_llama, "merge-bias", lora_bias=True)
    said = refused(dora, tmp_path / "x", "--to", "merged-peft", "--base", tiny_llama)
    assert "DoRA" in said and "merged-model" in said
    said = refused(bias, tmp_path / "x", "--to", "merged-model", "--base", tiny_llama)
    assert "no bias" in said and "q_proj" in said
    # --force never replaces a model that molora did not merge
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    plain = make_adapter(tiny_llama, "merge-plain")
    refused(plain, tmp_path / "model", "--to", "merged-model", "--base", tiny_llama, "--force")
    assert {p.name for p in tmp_path.iterdir()} == {"model"}
