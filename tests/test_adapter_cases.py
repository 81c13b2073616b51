"""Inputs with known answers ($MOLORA_CASES): every one exact, or refused by name."""

from __future__ import annotations

import copy
import csv
import json
import sys
import time
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.adapter.factors import Factors, load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.structure import read_structure
from molora_cli.errors import InputError
from molora_cli.refs import Ref


def read(cases: Path, path: str, base: str, **options: bool) -> Adapter:
    return read_adapter(
        "one", Ref("local", path, path=cases / path), read_structure(cases / "bases" / base), **options
    )


@lru_cache
def base_model(base: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@torch.no_grad()
def merged_logits(base: Path, factors: dict[str, Factors], ids: torch.Tensor) -> torch.Tensor:
    model = copy.deepcopy(base_model(base))
    for path, f in factors.items():
        module = model.get_submodule(path)
        delta = f.scale * f.B.float() @ f.A.float()  # (out, in)
        if f.kind == "embedding":
            new: torch.nn.Module = torch.nn.Embedding.from_pretrained(module.weight + delta.T)
        else:
            plain = module.weight.T if type(module).__name__ == "Conv1D" else module.weight
            dense = plain + delta
            if f.magnitude is not None:
                dense = f.magnitude.float()[:, None] / dense.norm(dim=1, keepdim=True) * dense
            new = torch.nn.Linear(dense.shape[1], dense.shape[0])
            new.weight.copy_(dense)
            bias = torch.zeros(dense.shape[0]) if module.bias is None else module.bias
            new.bias.copy_(bias if f.bias is None else bias + f.scale * f.bias.float())
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
    return model(ids).logits


def rows(cases: Path) -> list[dict[str, str]]:
    with (cases / "INDEX.tsv").open(newline="", encoding="utf-8") as handle:
        return [r for r in csv.DictReader(handle, delimiter="\t") if not r["path"].startswith("routing/")]


def test_index(cases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The column `must` of every row: the logits are right, or the refusal names what it should."""
    counts = {"exact": 0, "refused": 0}
    wrong: list[str] = []
    for row in rows(cases):
        path, must = row["path"], row["must"]
        start = time.perf_counter()
        try:
            adapter = read(cases, path, row["base"], allow_noop="allow-noop" in must)
        except InputError as error:
            counts["refused"] += 1
            if must.startswith("exact") and "refused" not in must:
                wrong.append(f"{path}: refused ({error.message})")
            if not error.remedy or len(str(error).splitlines()) > 3 or Path(path).name not in error.message:
                wrong.append(f"{path}: unclear refusal ({error})")
            if time.perf_counter() - start > 2:
                wrong.append(f"{path}: {time.perf_counter() - start:.1f} s to refuse")
            continue
        if must.startswith("refused") and "noted" not in must:
            wrong.append(f"{path}: accepted")
        folder = cases / path
        if (folder / "expected.safetensors").exists():
            expected = load_file(folder / "expected.safetensors")
            write_peft(adapter, tmp_path / path)
            written = Ref("local", path, path=tmp_path / path)
            again = read_adapter(
                "one", written, read_structure(cases / "bases" / row["base"]), allow_noop="allow-noop" in must
            )
            for which in (adapter, again):
                got = merged_logits(cases / "bases" / row["base"], load_factors(which), expected["input_ids"])
                difference = float((got - expected["logits"]).abs().max())
                if not difference < 1e-4:
                    wrong.append(f"{path}: logits differ by {difference:.2e}")
            counts["exact"] += 1
    with capsys.disabled():
        sys.stdout.write(f"\nadapters: {counts}\n")
    assert not wrong, "\n".join(wrong)
    assert counts["exact"] >= 25


def test_other_bases(cases: Path) -> None:
    with pytest.raises(InputError, match="48 against 64"):
        read(cases, "adapters/on_hidden48", "llama")
    with pytest.raises(InputError, match="layers 2, 3, base has 2"):
        read(cases, "adapters/plain_qv", "llama_2layers")
    assert any("2 of 4 layers" in n for n in read(cases, "adapters/on_2layers", "llama").notes)
    fused = read(cases, "adapters/phi3_split_names", "phi3")
    assert {m.rpartition(".")[2] for m in fused.modules} == {"qkv_proj", "gate_up_proj"}


def test_xlora_folder_names_its_adapters(cases: Path) -> None:
    with pytest.raises(InputError, match=r"classifier lost layers\.0\.weight") as caught:
        read(cases, "adapters/xlora_folder", "llama")
    for inner, original, layer in (("0", "plain_qv", 1), ("1", "plain_code", 0)):
        folder = f"adapters/xlora_folder/{inner}"
        assert str(cases / folder) in caught.value.remedy
        adapter = read(cases, folder, "llama")
        assert any("saved by X-LoRA" in n for n in adapter.notes)
        assert any(
            f"lost {2 if inner == '0' else 4} of" in n and f"(layer {layer})" in n for n in adapter.notes
        )
        whole = load_factors(read(cases, f"adapters/{original}", "llama"))
        kept = load_factors(adapter)
        assert kept.keys() == {m for m in whole if f".layers.{layer}." not in m}
        for module, factors in kept.items():
            assert factors.scale == whole[module].scale
            assert torch.equal(factors.A, whole[module].A) and torch.equal(factors.B, whole[module].B)


def test_configs_table(cases: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every config as it occurs in public is sorted by `molora inspect FILE --json`, without weights."""
    lines, verdicts = [], {}
    for path in sorted((cases / "configs").glob("*.json")):
        result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
        if isinstance(result.exception, InputError):
            verdicts[path.stem], why = "unreadable", str(result.exception.message)
        else:
            assert result.exit_code == 0, (path, result.output)
            found = json.loads(result.stdout)
            assert found["weights"] is None
            verdicts[path.stem] = found["verdict"]
            why = "; ".join(f"{r['field']}: {r['why']}" for r in found["reasons"])
            assert (verdicts[path.stem] == "supported") == (not why)
        lines.append(f"{path.stem:45} {verdicts[path.stem]:10} {why.replace(str(cases), '')[:140]}")
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(lines) + "\n")
    assert [name for name, v in verdicts.items() if v == "unreadable"] == ["BAD_lfs_pointer_config_1"]
    assert "Git LFS pointer" in lines[0]
    refused = {name for name, v in verdicts.items() if v != "supported"}
    assert {n for n in verdicts if n.startswith(("refuse_", "BAD_", "not_peft"))} <= refused
    assert not {n for n in verdicts if n.startswith("mlx_")} & refused
    assert {
        "bloom_enable_lora_mergedlinear_2023", "dinov3_null_base", "distilbert_dup_modules_to_save_020",
        "gen_REFUSE_seq_cls", "gen_alora", "gen_bias_all", "gen_layer_replication", "gen_mixtral_both",
        "gen_modules_to_save_embed_head", "gen_olora", "gen_pissa",
        "gen_trainable_tokens_dict", "gen_xlora_folder",
        "gpt2_seqcls_cattn", "gpt2_two_dotted_targets_fifo_bin", "peft_dora_flux_rank64", "peft_flux_kasa",
        "regex_paligemma_colpali", "seqcls_modules_to_save_bert", "whisper_small_ro",
    } <= refused  # fmt: skip
    assert {
        "all_linear_literal_pinned_revision", "duplicated_target_modules", "falcon_query_key_value_2023",
        "gen_dora",
        "gen_embed_lora", "gen_exclude_modules", "gen_layers_to_transform_int", "gen_loftq_config_only",
        "gen_rank_alpha_pattern", "gen_rslora", "internlm_absolute_base", "mistral_fan_in_fan_out_null",
        "peft02_enable_lora_null", "peft_lora_mlp_only", "peft_lorafa", "peft_old_minimal_11fields",
        "phi3_fused_qkv_gate_up", "qwen25_7b_018", "qwen35_hybrid_seq2seq_task", "qwen3vl_pdfme",
        "smolvlm_all_linear_expanded", "unsloth_fixed_qwen3_019", "unsloth_phi3_split_names",
    }.isdisjoint(refused)  # fmt: skip
