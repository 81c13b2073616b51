"""Adapters made by PEFT on a tiny base: what is read, mapped and written, and that the function stays."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from molora_cli.core.adapter.factors import Factors, load_bundle_factors, load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.structure import read_structure
from molora_cli.core.bundle.manifest import AdapterEntry, ModuleEntry
from molora_cli.errors import InputError
from molora_cli.refs import Ref

IDS = torch.tensor([[1, 70, 90, 100, 120, 65, 300, 2]])


def local(path: Path) -> Ref:
    return Ref("local", str(path), path=path)


def read(path: Path, base: Path, **options: bool) -> Adapter:
    return read_adapter("one", local(path), read_structure(base), **options)


def base_model(base: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()


@torch.no_grad()
def peft_logits(base: Path, folder: Path) -> torch.Tensor:
    from peft import PeftModel

    return PeftModel.from_pretrained(base_model(base), folder).eval()(IDS).logits


@torch.no_grad()
def merged_logits(base: Path, factors: dict[str, Factors]) -> torch.Tensor:
    """Each module replaced by one with dense weights, from the formulas in `Factors` alone."""
    model = base_model(base)
    for path, f in factors.items():
        parent, _, leaf = path.rpartition(".")
        module = model.get_submodule(path)
        delta = f.scale * f.B.float() @ f.A.float()  # (out, in)
        weight = module.weight.detach().clone()
        plain = (
            weight.T if f.kind == "embedding" or type(module).__name__ == "Conv1D" else weight
        )  # (out, in)
        dense = plain + delta
        if f.magnitude is not None:
            dense = f.magnitude.float()[:, None] / dense.norm(dim=1, keepdim=True) * dense
        if f.kind == "embedding":
            new: torch.nn.Module = torch.nn.Embedding.from_pretrained(dense.T)
        else:
            new = torch.nn.Linear(dense.shape[1], dense.shape[0])
            new.weight.copy_(dense)
            bias = torch.zeros(dense.shape[0]) if module.bias is None else module.bias
            new.bias.copy_(bias if f.bias is None else bias + f.scale * f.bias.float())
        setattr(model.get_submodule(parent), leaf, new)
    return model(IDS).logits


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def entry_of(adapter: Adapter) -> AdapterEntry:
    modules = {p: ModuleEntry(rank=m.rank, alpha=m.alpha, scale=m.scale) for p, m in adapter.modules.items()}
    return AdapterEntry(name="one", folder="adapters/one", source="x", sha256=adapter.sha256, modules=modules)


def check_round_trip(base: Path, source: Path, out: Path) -> Adapter:
    """Source in PEFT = our factors = the folder we write in PEFT = its factors out of a bundle."""
    adapter = read(source, base)
    want = peft_logits(base, source)
    assert not close(want, base_model(base)(IDS).logits, 1e-3), "the adapter has no effect: nothing is tested"
    assert close(merged_logits(base, load_factors(adapter)), want)
    write_peft(adapter, out)
    assert close(peft_logits(base, out), want)
    assert close(merged_logits(base, load_bundle_factors(out, entry_of(adapter))), want)
    return adapter


CASES = {
    "plain": {},
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"down_proj": 2, r"layers\.0\.self_attn\.q_proj": 6},
        "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 3, "v_proj": 32},
    },
    "regex_key": {"rank_pattern": {r"layers\.[12]\..*q_proj": 3}},
    "dora": {"use_dora": True},
    "lora_bias": {"lora_bias": True},
    "regex": {"target_modules": r".*\.layers\.(1|3)\..*\.(q_proj|o_proj)"},
    "layers": {"layers_to_transform": [1, 3]},
    "exclude": {"exclude_modules": ["layers.0.self_attn.q_proj"]},
    "all_linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "square": {"r": 64, "lora_alpha": 64, "target_modules": ["q_proj", "o_proj"]},
}


@pytest.mark.parametrize("case", CASES)
def test_same_function(
    case: str, tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_adapter(tiny_llama, f"rt-{case}", **CASES[case])
    adapter = check_round_trip(tiny_llama, source, tmp_path / "out")
    if adapter.canonical:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert adapter.canonical == (case not in ("embedding", "head"))  # PEFT saved the base's matrix with these


@pytest.mark.parametrize("case", ["patterns", "rslora", "dora", "lora_bias", "regex"])
def test_same_function_rewritten(
    case: str, tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    """The same when names and config have to be written anew."""
    source = make_adapter(tiny_llama, f"rw-{case}", **CASES[case])
    renamed = rename(
        source,
        tmp_path / "in",
        lambda k: k.replace("base_model.model.", "module.base_model.model._orig_mod."),
    )
    adapter = read(renamed, tiny_llama)
    assert not adapter.canonical
    write_peft(adapter, tmp_path / "out")
    assert close(peft_logits(tiny_llama, tmp_path / "out"), peft_logits(tiny_llama, source))
    again = read(tmp_path / "out", tiny_llama)
    assert again.canonical
    assert {p: (m.rank, m.scale) for p, m in again.modules.items()} == {
        p: (m.rank, m.scale) for p, m in adapter.modules.items()
    }


def rename(source: Path, target: Path, change: Callable[[str], str]) -> Path:
    shutil.copytree(source, target)
    tensors = load_file(source / "adapter_model.safetensors")
    save_file({change(k): v for k, v in tensors.items()}, target / "adapter_model.safetensors")
    return target


def edit_config(source: Path, target: Path, **fields: object) -> Path:
    shutil.copytree(source, target)
    config = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return target


PREFIX = "base_model.model."
RENAMES = {
    "none": lambda k: k.removeprefix(PREFIX),
    "backbone": lambda k: k.removeprefix(PREFIX + "model."),
    "peft_backbone": lambda k: PREFIX + k.removeprefix(PREFIX + "model."),
    "doubled": lambda k: PREFIX + k,
    "ddp": lambda k: "module." + k,
    "ddp_inside": lambda k: PREFIX + "module." + k.removeprefix(PREFIX),
    "compiled": lambda k: PREFIX + "_orig_mod." + k.removeprefix(PREFIX),
    "compiled_deep": lambda k: k.replace(".layers.0.", ".layers.0._orig_mod."),
    "default": lambda k: k.replace(".weight", ".default.weight"),
    "other_name": lambda k: k.replace(".weight", ".lora.weight"),
    "named_weight": lambda k: k.replace(".weight", ".weight.weight"),
    "language_model": lambda k: k.replace("model.layers", "model.language_model.layers"),
    "language_model_outside": lambda k: PREFIX + "language_model." + k.removeprefix(PREFIX),
}


@pytest.mark.parametrize("variant", RENAMES)
def test_key_variants(
    variant: str, tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_adapter(tiny_llama, "keys")
    adapter = read(rename(source, tmp_path / "in", RENAMES[variant]), tiny_llama)
    assert set(adapter.modules) == set(read(source, tiny_llama).modules)
    assert not adapter.canonical
    write_peft(adapter, tmp_path / "out")
    assert (
        load_file(tmp_path / "out/adapter_model.safetensors").keys()
        == load_file(source / "adapter_model.safetensors").keys()
    )


def test_wrapped_base_takes_a_plain_adapter(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    """The other way round: the base is the language model inside a multimodal one."""
    structure = read_structure(tiny_llama)
    wrapped = {
        (f"model.language_model.{p.removeprefix('model.')}" if p.startswith("model.") else p): s
        for p, s in structure.modules.items()
    }
    base = type(structure)(wrapped, 4, "llama", {}, tiny_llama)
    adapter = read_adapter("one", local(make_adapter(tiny_llama, "plain")), base)
    assert all(p.startswith("model.language_model.layers.") for p in adapter.modules)


def test_module_whose_name_contains_weight(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    structure = read_structure(tiny_llama)
    renamed = {p.replace("q_proj", "pair_weighted_proj"): s for p, s in structure.modules.items()}
    base = type(structure)(renamed, 4, "llama", {}, tiny_llama)
    source = rename(
        make_adapter(tiny_llama, "w"), tmp_path / "in", lambda k: k.replace("q_proj", "pair_weighted_proj")
    )
    config = json.loads((source / "adapter_config.json").read_text())
    config["target_modules"] = ["pair_weighted_proj", "v_proj"]
    (source / "adapter_config.json").write_text(json.dumps(config))
    adapter = read_adapter("one", local(source), base)
    assert adapter.canonical
    assert "model.layers.0.self_attn.pair_weighted_proj" in adapter.modules


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(
    dtype: torch.dtype, tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_adapter(tiny_llama, "dt")
    tensors = {k: v.to(dtype) for k, v in load_file(source / "adapter_model.safetensors").items()}
    target = tmp_path / "in"
    shutil.copytree(source, target)
    save_file(tensors, target / "adapter_model.safetensors")
    factors = load_factors(read(target, tiny_llama))
    one = factors["model.layers.0.self_attn.q_proj"]
    kept = torch.float32 if dtype == torch.float64 else dtype
    assert one.A.dtype == kept
    assert torch.equal(one.A, tensors[PREFIX + "model.layers.0.self_attn.q_proj.lora_A.weight"].to(kept))
    assert close(merged_logits(tiny_llama, factors), peft_logits(tiny_llama, target))


@pytest.mark.parametrize("zipped", [True, False])
def test_bin(zipped: bool, tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    source = make_adapter(tiny_llama, "bin")
    tensors = load_file(source / "adapter_model.safetensors")
    target = tmp_path / "in"
    target.mkdir()
    shutil.copy(source / "adapter_config.json", target)
    half = {k: v.bfloat16() if "lora_A" in k else v for k, v in tensors.items()}
    torch.save(half, target / "adapter_model.bin", _use_new_zipfile_serialization=zipped)
    adapter = read(target, tiny_llama)
    write_peft(adapter, tmp_path / "out")
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert all(torch.equal(written[k], v) for k, v in half.items())
    # both present and different: safetensors wins
    save_file({k: v * 2 for k, v in tensors.items()}, target / "adapter_model.safetensors")
    assert read(target, tiny_llama).weights.suffix == ".safetensors"
    assert read(target / "adapter_model.safetensors", tiny_llama).path == target
    with pytest.raises(InputError, match="would not be used"):
        read(target / "adapter_model.bin", tiny_llama)


def test_pickle_is_not_executed(tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    import pickle

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.mkdir, (tmp_path / "executed",)

    source = make_adapter(tiny_llama, "pickle")
    (source / "adapter_model.safetensors").unlink()
    (source / "adapter_model.bin").write_bytes(pickle.dumps({"a": Trap()}))
    with pytest.raises(InputError, match="more than tensors"):
        read(source, tiny_llama)
    torch.save({"a": Trap()}, source / "adapter_model.bin")
    with pytest.raises(InputError, match="more than tensors"):
        read(source, tiny_llama)
    assert not (tmp_path / "executed").exists()


def test_scales(tiny_llama: Path, make_adapter: Callable[..., Path]) -> None:
    modules = read(make_adapter(tiny_llama, "s", **CASES["patterns"]), tiny_llama).modules
    one = modules["model.layers.0.self_attn.q_proj"]
    assert (one.rank, one.alpha, one.scale) == (6, 3, 0.5)
    assert modules["model.layers.1.self_attn.v_proj"].scale == 8
    assert modules["model.layers.1.mlp.down_proj"].scale == 4
    rs = read(make_adapter(tiny_llama, "rs", **CASES["rslora"]), tiny_llama).modules
    assert next(iter(rs.values())).scale == 16 / math.sqrt(16)


def test_notes(tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    def notes(path: Path) -> str:
        return "; ".join(read(path, tiny_llama).notes)

    source = make_adapter(tiny_llama, "n")
    assert notes(source) == ""
    assert "adapts 2 of 4 layers (1, 3)" in notes(make_adapter(tiny_llama, "n2", layers_to_transform=[1, 3]))
    assert "not in target_modules" in notes(edit_config(source, tmp_path / "a", target_modules=["q_proj"]))
    assert "matches no adapted module" in notes(
        edit_config(source, tmp_path / "b", rank_pattern={"q_porj": 4})
    )
    assert "unknown field use_new is off" in notes(edit_config(source, tmp_path / "c", use_new=False))
    assert "quantised base" in notes(
        edit_config(source, tmp_path / "d", base_model_name_or_path="unsloth/llama-3-8b-bnb-4bit")
    )
    assert "was not evaluated" in notes(edit_config(source, tmp_path / "e", target_modules="(.*.*)*(x+x+)+y"))


def test_no_effect(tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path) -> None:
    source = make_adapter(tiny_llama, "noop")
    tensors = load_file(source / "adapter_model.safetensors")
    save_file(
        {k: v * 0 if "lora_B" in k else v for k, v in tensors.items()}, source / "adapter_model.safetensors"
    )
    with pytest.raises(InputError, match="changes nothing") as caught:
        read(source, tiny_llama)
    assert "--allow-noop" in caught.value.remedy
    assert len(read(source, tiny_llama, allow_noop=True).modules) == 8


def test_licence(tiny_llama: Path, make_adapter: Callable[..., Path]) -> None:
    source = make_adapter(tiny_llama, "licence")
    for text, want in [
        ("---\nlicense: apache-2.0\n---\n# x", "apache-2.0"),
        ("---\nlicense: [mit, cc0-1.0]\n---\n", "mit, cc0-1.0"),
        ('---\nlicense: "a\\x1b[31m"\n---\n', "a\\x1b[31m"),
        ("---\nlicense: !!python/object/apply:os.getcwd []\n---\n", None),
        ("---\nlicense: {a: [\n---\n", None),
        ("# no front matter", None),
        ("---\nnever closed", None),
    ]:
        (source / "README.md").write_text(text)
        assert read(source, tiny_llama).licence == want


def test_no_torch_for_safetensors(
    tiny_llama: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    source = make_adapter(tiny_llama, "lazy", **CASES["regex"])
    code = (
        "import sys; from pathlib import Path\n"
        "from molora_cli.core.adapter.read import read_adapter\n"
        "from molora_cli.core.adapter.write import write_peft\n"
        "from molora_cli.core.base.structure import read_structure\n"
        "from molora_cli.refs import Ref\n"
        "ref = Ref('local', 'x', path=Path(sys.argv[1]))\n"
        "a = read_adapter('x', ref, read_structure(Path(sys.argv[2])))\n"
        "write_peft(a, Path(sys.argv[3]))\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, source, tiny_llama, tmp_path / "out"], check=True)


def test_hub_without_network(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    ref = Ref("hub", "someone/adapter@main", repo="someone/adapter", revision="main")
    with pytest.raises(InputError, match=r"not in the local cache.*offline mode"):
        read_adapter("x", ref, read_structure(tiny_llama))
