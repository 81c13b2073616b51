"""Any PEFT adapter: random shapes, ranks, names, types and marks in the keys are read and written bit by bit,
and go through MLX and GGUF and back as the same function."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from molora_cli.core.adapter.factors import load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.adapter.write import write_peft
from molora_cli.core.base.structure import BaseModules, ModuleShape, read_structure
from molora_cli.core.convert.deltas import relative_errors
from molora_cli.core.convert.gguf_file import write_gguf
from molora_cli.core.convert.mlx import write_mlx
from molora_cli.core.convert.refusals import check_mlx_adapter
from molora_cli.errors import InputError
from molora_cli.refs import Ref

ANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float64: 1e-6}
# names that tell of something else elsewhere in a key
TRAPS = ["pair_weighted_proj", "weight", "lora", "default", "module", "model", "lora_a", "m", "0"]
LEAVES = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True) | st.sampled_from(TRAPS)
PEFT = "base_model.model."
WRAPPERS = ["", PEFT, PEFT * 2, "module." + PEFT, PEFT + "module.", PEFT + "_orig_mod.", "_orig_mod." + PEFT]
BACKBONES = ["model.", "", "model.language_model.", "language_model.model."]


@dataclass(frozen=True)
class Made:
    """A PEFT adapter in memory. factors: module -> (A (r, in), B (out, r), magnitude or bias or None)."""

    base: BaseModules
    factors: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    alphas: dict[str, float]
    extra: str
    rslora: bool

    def scale(self, module: str) -> float:
        rank = self.factors[module][0].shape[0]
        return self.alphas[module] / (math.sqrt(rank) if self.rslora else rank)


def factors_of(
    draw: st.DrawFn, base: BaseModules, modules: list[str], extra: str, kinds: list[torch.dtype]
) -> Made:
    torch.manual_seed(draw(st.integers(0, 1 << 30)))
    dtype, rslora = draw(st.sampled_from(kinds)), draw(st.booleans())
    found, alphas = {}, {}
    for module in modules:
        shape, rank = base[module], draw(st.integers(1, 9))
        a = torch.randn(rank, shape.in_features, dtype=torch.float32).to(dtype)
        b = torch.randn(shape.out_features, rank, dtype=torch.float32).to(dtype)
        vector = torch.rand(shape.out_features).to(dtype) + 0.5 if extra else None
        found[module] = a, b, vector
        alphas[module] = draw(st.sampled_from([1, 2, 8, 0.5, 7, 1 / 3]))
    return Made(base, found, alphas, extra, rslora)


@st.composite
def adapters(draw: st.DrawFn) -> Made:
    """On a base of any names and shapes."""
    n_layers = draw(st.integers(1, 3))
    modules = {}
    for leaf in draw(st.lists(LEAVES, min_size=1, max_size=4, unique=True)):
        sizes = draw(st.integers(1, 24)), draw(st.integers(1, 24))
        for layer in range(n_layers):
            modules[f"model.layers.{layer}.self_attn.{leaf}"] = ModuleShape("linear", *sizes)
    base = BaseModules(modules, n_layers, "llama", {}, Path("nowhere"))
    chosen = sorted(draw(st.sets(st.sampled_from(sorted(modules)), min_size=1)))
    extra = draw(st.sampled_from(["", "", "magnitude", "bias"]))
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    return factors_of(draw, base, chosen, extra, kinds)


@st.composite
def marks(draw: st.DrawFn) -> tuple[str, str, bool, str]:
    """What trainers leave in keys: wrapper, backbone, compiled layers, the adapter's name."""
    name = draw(st.sampled_from(["", ".default", ".lora", ".weight", ".my-adapter", ".0"]))
    return draw(st.sampled_from(WRAPPERS)), draw(st.sampled_from(BACKBONES)), draw(st.booleans()), name


def save(made: Made, folder: Path, how: tuple[str, str, bool, str] = (PEFT, "model.", False, "")) -> None:
    wrapper, backbone, compiled, name = how
    tensors = {}
    for module, (a, b, vector) in made.factors.items():
        path = wrapper + backbone + module.removeprefix("model.")
        path = path.replace(".self_attn.", "._orig_mod.self_attn.") if compiled else path
        tensors[f"{path}.lora_A{name}.weight"] = a
        tensors[f"{path}.lora_B{name}.weight"] = b
        if vector is not None:
            key = f"lora_B{name}.bias" if made.extra == "bias" else f"lora_magnitude_vector{name}"
            tensors[f"{path}.{key}"] = vector
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 3,
        "lora_alpha": 5,
        "use_rslora": made.rslora,
        "use_dora": made.extra == "magnitude",
        "lora_bias": made.extra == "bias",
        "target_modules": sorted({m.rpartition(".")[2] for m in made.factors}),
        "rank_pattern": {pattern(m): f[0].shape[0] for m, f in made.factors.items()},
        "alpha_pattern": {pattern(m): made.alphas[m] for m in made.factors},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def pattern(module: str) -> str:
    """A key of rank_pattern: a module's path from its layer on, whatever the backbone is called."""
    return re.escape(module.removeprefix("model."))


def read(path: Path, base: BaseModules) -> Adapter:
    return read_adapter("any", Ref("local", str(path), path=path), base)


@ANY
@given(made=adapters(), how=marks())
def test_it_is_read_and_written_bit_by_bit(
    made: Made, how: tuple[str, str, bool, str], tmp_path: Path
) -> None:
    save(made, tmp_path / "in", how)
    first = read(tmp_path / "in", made.base)
    write_peft(first, tmp_path / "out")
    second = read(tmp_path / "out", made.base)
    assert second.canonical
    for adapter in (first, second):
        found = load_factors(adapter)
        assert found.keys() == made.factors.keys()
        for module, f in found.items():
            a, b, vector = made.factors[module]
            kept = torch.float32 if a.dtype == torch.float64 else a.dtype
            assert f.scale == pytest.approx(made.scale(module), rel=1e-12)
            assert torch.equal(f.A, a.to(kept)) and torch.equal(f.B, b.to(kept))
            kind = f.bias if made.extra == "bias" else f.magnitude
            assert kind is None if vector is None else torch.equal(kind, vector.to(kept))  # type: ignore[arg-type]


@ANY
@given(made=adapters())
def test_through_mlx_and_back(made: Made, tmp_path: Path) -> None:
    save(made, tmp_path / "in")
    adapter = read(tmp_path / "in", made.base)
    before = load_factors(adapter)
    try:
        check_mlx_adapter(adapter, made.base)
    except InputError:
        assert made.extra  # nothing else is refused
        return
    (tmp_path / "mlx").mkdir(exist_ok=True)
    write_mlx(adapter, before, made.base, "org/base", tmp_path / "mlx", None)
    same(before, read(tmp_path / "mlx", made.base), tmp_path, made)


@st.composite
def llama_adapters(draw: st.DrawFn, base: BaseModules) -> Made:
    names = sorted(m for m in base if base[m].kind == "linear")
    chosen = sorted(draw(st.sets(st.sampled_from(names), min_size=1, max_size=6)))
    return factors_of(draw, base, chosen, "", [torch.float32, torch.bfloat16, torch.float16])


@settings(ANY, max_examples=15)
@given(data=st.data())
def test_through_gguf_and_back(data: st.DataObject, tiny_llama: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    base = read_structure(tiny_llama)
    made = data.draw(llama_adapters(base))
    save(made, tmp_path / "in")
    before = load_factors(read(tmp_path / "in", base))
    write_gguf(before, base, tmp_path / "a.gguf", name="any", base_id="org/base")
    same(before, read(tmp_path / "a.gguf", base), tmp_path, made)


def same(before: dict, there: Adapter, tmp_path: Path, made: Made) -> None:  # type: ignore[type-arg]
    """The function of `before` in another format, and in PEFT again."""
    write_peft(there, tmp_path / "back")
    dtype = next(iter(made.factors.values()))[0].dtype
    for adapter in (there, read(tmp_path / "back", made.base)):
        after = {m: f for m, f in load_factors(adapter).items() if m in before or f.B.any()}
        assert max(relative_errors(before, after).values()) <= ROUNDING[dtype]
