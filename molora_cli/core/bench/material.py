"""What a run is measured on: a base, adapters and a router, given or made up."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from molora_cli.core.adapter.factors import Factors, load_bundle_factors
from molora_cli.core.base.embedded import embedded_base, embedded_file, read_record
from molora_cli.core.base.model import load_base_model
from molora_cli.core.base.resolve import resolve_base
from molora_cli.core.bundle.store import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Bundle
from molora_cli.core.routed.int8 import Int8Linear
from molora_cli.core.routed.model import RoutedModel
from molora_cli.core.routed.quantise import quantise_base
from molora_cli.core.router.context import sample_rows
from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.files import join_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.stack import RouterStack, load_router
from molora_cli.core.router.taps import TapHead, default_taps, tap_groups
from molora_cli.errors import InputError

RANDOM = "random"
LINEARS = (nn.Linear, Int8Linear)
# of SmolLM2-135M
SIZES: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


@dataclass
class Material:
    """base: a transformers model, never changed: sides work on copies that share its weights. factors:
    adapter -> module -> factors. title: what it is, for people. path, gguf: where the base lies, None
    where it was made up. bundle: None = the adapters are random.
    """

    base: Any
    factors: Mapping[str, Mapping[str, Factors]]
    title: str
    path: Path | None = None
    gguf: Path | None = None
    bundle: Bundle | None = None
    seed: int = 0
    tokenizer: Any = None
    _folders: dict[str, Path] = field(default_factory=dict)

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.factors)

    @property
    def config(self) -> Any:
        return self.base.config.get_text_config()

    @property
    def linears(self) -> dict[str, nn.Linear | Int8Linear]:
        """The linears of the layers by path, head excluded."""
        return {n: m for n, m in self.base.named_modules() if isinstance(m, LINEARS) and _in_layer(n)}

    def copy(self) -> Any:
        """The base once more, on the same weights."""
        tensors = [*self.base.parameters(), *self.base.buffers()]
        return copy.deepcopy(self.base, {id(t): t for t in tensors})

    def routed(self, backend: str) -> RoutedModel:
        """The base with the adapters on a backend; no router yet."""
        return RoutedModel(
            self.copy(), self.factors, tokenizer=self.tokenizer, bundle=self.bundle, backend=backend
        ).eval()

    def int8(self) -> Material:
        """The same adapters on a copy of the base with int8 weights."""
        base = self.copy()
        quantise_base(base)
        return replace(self, base=base)

    def part(self, adapters: Sequence[str]) -> Material:
        """The same base with some of the adapters."""
        chosen = {name: self.factors[name] for name in adapters}
        return replace(self, factors=chosen, _folders={})

    def folders(self, root: Path) -> dict[str, Path]:
        """A PEFT folder per adapter: the bundle's own, or written below `root`."""
        if self.bundle is not None:
            return {name: self.bundle.folder(name) for name in self.adapters}
        if not self._folders:
            self._folders.update({n: _write(root / n, own) for n, own in self.factors.items()})
        return self._folders

    def around(self, model: Any) -> Surroundings:
        weight = self.base.get_input_embeddings().weight
        return Surroundings(model.engine.context.n_layers, weight.detach(), weight.device)

    def router(self, model: RoutedModel) -> RouterStack:
        """The bundle's router where all its adapters are there; else a `context` router with random weights,
        as large as a trained one."""
        if self.bundle is not None and model.adapters == self.bundle.adapters:
            found = load_router(self.bundle, self.around(model))
            if found is None:
                raise InputError(
                    f"{self.bundle.path} has no router", "molora attach-router, or leave --bundle out"
                )
            return found
        return _context_router(self.around(model), model.adapters, self.seed)

    def deep_router(self, model: RoutedModel) -> RouterStack:
        """A `taps` router with random heads: three groups of layers (fewer in a shallow base), each decided
        from the hidden state below it."""
        return _taps_router(self.around(model), model.adapters, self.config.hidden_size, self.seed)


def load_material(
    base: str | None, bundle: Path | None, adapters: int, rank: int, dtype: torch.dtype, seed: int = 0
) -> Material:
    """base: what --base takes, "random" (SmolLM2-135M's sizes), None = the bundle's, else the embedded one
    where it is installed, else random. adapters, rank: of random adapters on all linears of the layers; the
    bundle's own are taken where one is given. Raises InputError.
    """
    opened = None if bundle is None else Bundle.open(bundle, None if base == RANDOM else base)
    path, gguf, title = _place(base, opened)
    if path is None:
        model, tokenizer = _random_base(dtype, seed), None
    else:
        model, tokenizer = load_base_model(path, dtype=dtype, device="cpu")
    if opened is not None:
        opened.verify()
        factors: Mapping[str, Mapping[str, Factors]] = {
            e.name: load_bundle_factors(opened.folder(e.name), e) for e in opened.manifest.adapters
        }
        title += f", {len(factors)} adapters of {opened.path.name}"
    else:
        factors = random_factors(model, adapters, rank, seed)
        title += ", random adapters"
    return Material(model, factors, title, path, gguf, opened, seed, tokenizer)


def random_factors(model: Any, adapters: int, rank: int, seed: int = 0) -> dict[str, dict[str, Factors]]:
    """Adapters of one rank on every linear of the layers, scale 1. Raises InputError where there is none."""
    generator = torch.Generator().manual_seed(seed)
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and _in_layer(n)]
    if not linears:
        raise InputError("this base has no plain linear modules in its layers", "bench it with --bundle")
    dtype = model.dtype

    def one(module: nn.Linear) -> Factors:
        A = torch.randn(rank, module.in_features, generator=generator) / module.in_features**0.5
        B = torch.randn(module.out_features, rank, generator=generator) * 0.01
        return Factors(A.to(dtype), B.to(dtype), 1.0)

    return {f"a{k}": {name: one(module) for name, module in linears} for k in range(adapters)}


def _in_layer(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def _place(base: str | None, bundle: Bundle | None) -> tuple[Path | None, Path | None, str]:
    """Folder, .gguf file and title of the base."""
    if base == RANDOM and bundle is None:
        return None, None, "random weights of SmolLM2-135M's shape"
    if bundle is not None:
        found = bundle.base_path
        return found, _gguf_of(found), bundle.manifest.base.id
    if base is not None:
        resolved = resolve_base(base)
        own = Path(base) if base.lower().endswith(".gguf") else _gguf_of(resolved.path)
        return resolved.path, own, resolved.id
    if embedded_file() is None:
        return None, None, "random weights of SmolLM2-135M's shape"
    return embedded_base(), embedded_file(), "SmolLM2-135M-Instruct"


def _gguf_of(folder: Path) -> Path | None:
    """The built-in .gguf file where `folder` was converted from it."""
    file = embedded_file()
    return file if file is not None and read_record(folder).get("source") == file.name else None


def _random_base(dtype: torch.dtype, seed: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.requires_grad_(False)
    return model.to(dtype).eval()


def _write(folder: Path, factors: Mapping[str, Factors]) -> Path:
    """A PEFT folder of plain factors of one rank and scale 1."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    rank = next(iter(factors.values())).rank
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({path.rpartition(".")[2] for path in factors}),
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config) + "\n", encoding="utf-8")
    tensors = {}
    for path, one in factors.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = one.A.contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = one.B.contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS)
    return folder


def _context_router(around: Surroundings, adapters: Sequence[str], seed: int) -> RouterStack:
    embedding = around.embedding
    assert embedding is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = _spread_out(ContextNet(embedding.shape[1], len(adapters)))
        # the token itself weighs most, so that routes can change with every token of a long text too
        with torch.no_grad():
            net.inner.weight[:, net.projection :] *= 0.2
    sampled, samples = sample_rows(embedding)
    params = {
        "decays": list(net.decays),
        "projection": net.projection,
        "hidden": net.inner.out_features,
        "scale": float(embedding.float().std()),
        "sampled": sampled,
    }
    tensors = {**net.state_dict(), "centre": torch.zeros(embedding.shape[1]), "samples": samples}
    stage = StageSpec(kind="context", experts=list(adapters), params=params)
    return _stack(stage, tensors, around, adapters)


def _taps_router(around: Surroundings, adapters: Sequence[str], width: int, seed: int) -> RouterStack:
    groups = tap_groups(default_taps(around.n_layers), around.n_layers)
    tensors: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number in range(len(groups)):
            head = _spread_out(TapHead(width, len(adapters)))
            tensors |= {f"taps.{number}.{name}": value for name, value in head.state_dict().items()}
    stage = StageSpec(
        kind="taps", input="hidden", experts=list(adapters), groups=groups, params={"head": "mlp"}
    )
    return _stack(stage, tensors, around, adapters)


def _stack(
    stage: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings, adapters: Sequence[str]
) -> RouterStack:
    plain = {name: value.detach() for name, value in tensors.items()}
    return RouterStack(RouterSpec(stages=[stage]), join_tensors([plain]), around, adapters)


def _spread_out(net: Any) -> Any:
    """Weights so large that the best expert differs between tokens."""
    for name, parameter in net.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.normal_(parameter, std=2.0 / parameter.shape[1] ** 0.5)
    return net
