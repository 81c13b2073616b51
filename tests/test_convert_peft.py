"""molora convert to PEFT and to bundles: what is written is what was read, or nothing is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from molora_cli.app import app
from molora_cli.core.adapter.factors import Factors
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.convert import run as carry_out
from molora_cli.core.convert.deltas import best, norm, relative_errors, thin
from molora_cli.errors import InputError, MoloraError

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, make_adapter: Make) -> Path:
    return make_adapter(tiny_llama, "plain", seed=1)


@pytest.fixture(scope="module")
def bundle(
    tiny_llama: Path, plain: Path, make_adapter: Make, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    other = make_adapter(
        tiny_llama, "other", seed=2, r=6, use_rslora=True, target_modules=["up_proj", "q_proj"]
    )
    folder = tmp_path_factory.mktemp("bundles") / "two"
    result = CliRunner().invoke(
        app, ["compose", "-o", str(folder), "--base", str(tiny_llama), f"one={plain}", f"two={other}", "-q"]
    )
    assert result.exit_code == 0, result.output
    return folder


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def refused(*arguments: object) -> InputError:
    result = convert(*arguments)
    assert isinstance(result.exception, InputError), (result.output, result.exception)
    assert result.exception.remedy
    return result.exception


def logits(base: Path, adapter: Path) -> torch.Tensor:
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        return model(torch.arange(64, 96)[None]).logits


def renamed(source: Path, folder: Path) -> Path:
    """The same adapter as torch.compile and a named adapter would save it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    names = {
        k: k.replace(".model.layers", "._orig_mod.model.layers").replace(".weight", ".own.weight")
        for k in tensors
    }
    save_file({names[k]: t for k, t in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


def test_a_canonical_adapter_keeps_its_bytes(tiny_llama: Path, plain: Path, tmp_path: Path) -> None:
    result = convert(plain, tmp_path / "out", "--to", "peft", "--base", tiny_llama, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["written"] and document["verified"] == {"bytes": "identical"}
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (plain / name).read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_odd_names_become_what_peft_opens(tiny_llama: Path, plain: Path, tmp_path: Path) -> None:
    source = renamed(plain, tmp_path / "odd")
    result = convert(source, tmp_path / "out", "--to", "peft", "--base", tiny_llama, "--json")
    assert result.exit_code == 0, result.output
    verified = json.loads(result.stdout)["verified"]
    assert verified["modules"] == 8 and verified["largest_error"] < 1e-12
    assert verified["logits"]["max_abs"] == 0 and verified["logits"]["effect_rms"] > 0
    assert torch.equal(logits(tiny_llama, tmp_path / "out"), logits(tiny_llama, plain))


def test_what_cannot_be_verified_is_removed(
    tiny_llama: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = renamed(plain, tmp_path / "odd")
    honest = carry_out.write_peft

    def wrong(adapter: object, folder: Path) -> None:
        honest(adapter, folder)  # type: ignore[arg-type]
        tensors = load_file(folder / "adapter_model.safetensors")
        first = next(k for k in tensors if "lora_B" in k)
        save_file({**tensors, first: tensors[first] * 1.001}, folder / "adapter_model.safetensors")

    monkeypatch.setattr(carry_out, "write_peft", wrong)
    result = convert(source, tmp_path / "out", "--to", "peft", "--base", tiny_llama)
    assert isinstance(result.exception, MoloraError) and result.exception.exit_code == 1
    assert "q_proj" in result.exception.message or "v_proj" in result.exception.message
    assert [p.name for p in tmp_path.iterdir()] == ["odd"]


def test_a_bundle_to_its_adapters_and_back(tiny_llama: Path, bundle: Path, tmp_path: Path) -> None:
    assert convert(bundle, tmp_path / "all", "--to", "peft").exit_code == 0
    listed = json.loads((tmp_path / "all" / "adapters.json").read_text())
    assert listed["adapters"] == ["one", "two"]
    for name in listed["adapters"]:
        copy, own = tmp_path / "all" / name, bundle / "adapters" / name
        assert {p.name: p.read_bytes() for p in copy.iterdir()} == {
            p.name: p.read_bytes() for p in own.iterdir()
        }
    assert (
        convert(tmp_path / "all", tmp_path / "again", "--to", "bundle", "--base", tiny_llama, "-q").exit_code
        == 0
    )
    before, after = Bundle.open(bundle), Bundle.open(tmp_path / "again")
    assert after.adapters == before.adapters
    assert [e.sha256 for e in after.manifest.adapters] == [e.sha256 for e in before.manifest.adapters]
    assert after.digest == before.digest

    assert convert(bundle, tmp_path / "two", "--to", "peft", "--adapter", "two").exit_code == 0
    assert (tmp_path / "two" / "adapter_model.safetensors").read_bytes() == (
        bundle / "adapters" / "two" / "adapter_model.safetensors"
    ).read_bytes()


def test_force_replaces_only_its_own_kind(
    tiny_llama: Path, plain: Path, bundle: Path, tmp_path: Path
) -> None:
    common = ("--to", "peft", "--base", tiny_llama)
    assert convert(plain, tmp_path / "out", *common).exit_code == 0
    assert "--force" in refused(plain, tmp_path / "out", *common).remedy
    assert convert(plain, tmp_path / "out", *common, "--force").exit_code == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    refused(plain, tmp_path / "other", *common, "--force")
    assert (tmp_path / "other" / "thesis.txt").exists()
    # a folder of adapters is no adapter
    refused(bundle, tmp_path / "out", "--to", "peft", "--force")


@pytest.mark.parametrize("place", ["", "sub", ".."])
def test_outputs_that_overlap_the_source(tiny_llama: Path, plain: Path, tmp_path: Path, place: str) -> None:
    source = renamed(plain, tmp_path / "in")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    error = refused(source, source / place, "--to", "peft", "--base", tiny_llama, "--force")
    assert "overlap" in error.message
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert "overlap" in refused(source, tiny_llama / "x", "--to", "peft", "--base", tiny_llama).message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--to", "onnx"], "merged-model"),
        (["--to", "peft", "--method", "svd"], "merged-peft"),
        (["--to", "peft", "--dtype", "float16"], "mlx"),
        (["--to", "mlx", "--dtype", "int8"], "float32"),
        (["--to", "merged-peft", "--method", "average"], "ties"),
        (["--to", "merged-peft", "--rank", "4"], "svd"),
        (["--to", "merged-peft", "--method", "svd", "--rank", "0"], "rank"),
        (["--to", "merged-peft", "--method", "ties", "--density", "1.5"], "density"),
        (["--to", "merged-peft", "--method", "cat", "--density", "0.5"], "ties"),
        (["--to", "merged-peft", "--weights", "three=1"], "one, two"),
        (["--to", "merged-peft", "--weights", "one=x", "--weights", "two=1"], "number"),
        (["--to", "merged-peft", "--weights", "one=nan", "--weights", "two=1"], "range"),
        (["--to", "merged-peft", "--weights", "one=1"], "two"),
        (["--to", "merged-peft", "--weights", "one=0", "--weights", "two=0"], "nothing"),
        (["--to", "peft", "--adapter", "three"], "one, two"),
        (["--to", "mlx"], "--adapter one"),
        (["--to", "bundle"], "molora add"),
    ],
)
def test_options_that_make_no_sense(bundle: Path, tmp_path: Path, options: list[str], said: str) -> None:
    error = refused(bundle, tmp_path / "out", *options)
    assert said in f"{error.message} {error.remedy}"
    assert not list(tmp_path.iterdir())


def test_a_base_that_nobody_names(plain: Path, tmp_path: Path) -> None:
    # the adapter's config names a folder; a path in a stranger's file is not looked up
    assert "--base" in refused(plain, tmp_path / "out", "--to", "peft").remedy


def test_a_dry_run_writes_nothing(tiny_llama: Path, plain: Path, tmp_path: Path) -> None:
    result = convert(plain, tmp_path / "out", "--to", "peft", "--base", tiny_llama, "--dry-run", "--json")
    document = json.loads(result.stdout)
    assert document["written"] is False and document["adapters"][0]["modules"] == 8
    assert not list(tmp_path.iterdir())
    assert (
        "would write"
        in convert(plain, tmp_path / "out", "--to", "peft", "--base", tiny_llama, "--dry-run").stdout
    )


# -- thin products -------------------------------------------------------------
def test_norms_and_differences_without_the_matrix() -> None:
    torch.manual_seed(0)
    one = Factors(torch.randn(3, 20), torch.randn(30, 3), 0.7)
    other = Factors(
        torch.cat([one.A, torch.zeros(2, 20)]), torch.cat([one.B * 0.7, torch.zeros(30, 2)], 1), 1.0
    )
    dense = 0.7 * one.B.double() @ one.A.double()
    assert norm(thin(one)) == pytest.approx(float(dense.norm()), rel=1e-12)
    assert relative_errors({"m": one}, {"m": other})["m"] < 1e-7
    moved = Factors(one.A, one.B * (1 + 1e-5), 0.7)
    assert relative_errors({"m": one}, {"m": moved})["m"] == pytest.approx(1e-5, rel=1e-2)
    assert relative_errors({"m": one}, {})["m"] == 1.0
    assert relative_errors({}, {"m": one})["m"] == float("inf")
    biased = Factors(one.A, one.B, 0.7, bias=torch.ones(30))
    assert relative_errors({"m": biased}, {"m": one})["m"] == 1.0


def test_the_nearest_product_of_a_rank() -> None:
    torch.manual_seed(1)
    part = (torch.randn(40, 9, dtype=torch.float64), torch.randn(9, 25, dtype=torch.float64))
    u, s, vh = torch.linalg.svd(part[0] @ part[1])
    for rank in (1, 4, 9, 12):
        b, a = best(part, rank)
        assert b.shape == (40, rank) and a.shape == (rank, 25)
        truncated = (u[:, :rank] * s[:rank]) @ vh[:rank] if rank < 9 else part[0] @ part[1]
        torch.testing.assert_close(b @ a, truncated)
