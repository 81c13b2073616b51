"""The modules of a base model, from config.json and tensor headers: no torch, and no tensor is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from molora_cli.core.adapter.files import parse_json, read_json
from molora_cli.core.adapter.header import TensorInfo, read_header
from molora_cli.errors import InputError
from molora_cli.text import shorten

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# model families whose projections are Conv1D, stored (in, out)
_CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt"})
_CONV1D_NAMES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_EMBEDDINGS = frozenset(
    {
        "embed_tokens",
        "wte",
        "wpe",
        "word_embeddings",
        "embed_in",
        "embed_positions",
        "tok_embeddings",
        "tokens_embed",
    }
)
_HEADS = ("lm_head", "embed_out", "score")
# where the decoder sits below the causal LM; every other family says "model"
_PREFIXES = {
    "gpt2": "transformer",
    "gptj": "transformer",
    "gpt_neo": "transformer",
    "gpt_bigcode": "transformer",
    "codegen": "transformer",
    "falcon": "transformer",
    "bloom": "transformer",
    "mpt": "transformer",
    "openai-gpt": "transformer",
    "gpt_neox": "gpt_neox",
}
# experts are three-dimensional parameters in transformers 5, not modules, whatever their files look like
_NOT_MODULES = re.compile(r"(\.experts\.|\.block_sparse_moe\.|rotary_emb\.)")
_POSITIONS = ("wpe", "embed_positions")
# bitsandbytes stores a 4-bit weight flat, and beside it the text of its state
_PACKED = ".quant_state.bitsandbytes__"
# files of models of text and images name the decoder before its backbone; in memory it is the other way round
_WRAPPED = re.compile(r"\A(language_model|text_model)\.(model|lm_head)(?=\.|\Z)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|\Z)")


@dataclass(frozen=True)
class ModuleShape:
    """kind: "linear" (weight stored (out, in)), "conv1d" (weight stored (in, out)) or "embedding" (weight
    stored
    (V, d): in_features is V, out_features d)."""

    kind: str
    in_features: int
    out_features: int


@dataclass(frozen=True)
class BaseModules(Mapping[str, ModuleShape]):
    """Module path ("model.layers.0.self_attn.q_proj") -> ModuleShape, plus what config.json says.

    tied: the head has no tensor of its own. head, embedding: module paths, None where the files show none.
    """

    modules: dict[str, ModuleShape]
    n_layers: int
    model_type: str
    config: dict[str, Any]
    path: Path
    tied: bool = False
    head: str | None = None
    embedding: str | None = None
    tensors: dict[str, str] = field(default_factory=dict)  # module path -> tensor name in the files

    def __getitem__(self, module: str) -> ModuleShape:
        return self.modules[module]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modules)

    def __len__(self) -> int:
        return len(self.modules)

    def layer_of(self, module: str) -> int | None:
        """The layer index in a module path; None for the embedding and the head."""
        match = _LAYER.search(module)
        return int(match.group(1)) if match else None


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language part of a config: multimodal configs nest it."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, dict) else config


def config_number(config: dict[str, Any], *names: str) -> int | None:
    """The first of `names` that the config holds as a whole number."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def read_config(base_path: Path) -> dict[str, Any]:
    """config.json as a dict. Raises InputError where it is missing or damaged."""
    file = base_path / "config.json"
    if not file.is_file():
        have = ", ".join(sorted(p.name for p in base_path.iterdir())[:6]) if base_path.is_dir() else "nothing"
        raise InputError(
            f"{base_path} is not a base model: config.json is missing (there: {shorten(have or 'nothing')})",
            "--base takes the folder of a transformers model",
        )
    return read_json(file, "config.json")


def weight_files(base_path: Path) -> list[Path]:
    """The safetensors files of a base, in order. Raises InputError where there are none or one is missing."""
    index = base_path / INDEX
    if (base_path / WEIGHTS).is_file():
        return [base_path / WEIGHTS]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InputError(f"{index} is damaged: no weight_map", "download the base again") from error
        files = [base_path / Path(str(name)).name for name in names]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise InputError(
                f"{base_path} is incomplete: {missing[0]} is missing ({len(missing)} of {len(files)} files)",
                "download the base again",
            )
        return files
    other = next(
        (n for n in ("pytorch_model.bin", "pytorch_model.bin.index.json") if (base_path / n).exists()), None
    )
    if other:
        raise InputError(
            f"{base_path} holds its weights as {other} (pickle); molora reads safetensors bases",
            "save it again with save_pretrained, which writes model.safetensors",
        )
    raise InputError(f"{base_path} has no {WEIGHTS}", "--base takes the folder of a transformers model")


def read_tensor_infos(base_path: Path) -> dict[str, tuple[TensorInfo, Path]]:
    """Tensor name -> what its header says, and the file. Raises InputError for damaged or missing files."""
    found: dict[str, tuple[TensorInfo, Path]] = {}
    for file in weight_files(base_path):
        for name, info in read_header(file).tensors.items():
            found[name] = (info, file)
    return found


def read_tensor_shapes(base_path: Path) -> dict[str, tuple[tuple[int, ...], str, Path]]:
    """Tensor name -> (shape, dtype, file), from the headers alone."""
    return {n: (info.shape, info.dtype, file) for n, (info, file) in read_tensor_infos(base_path).items()}


def _kind(module: str, model_type: str) -> str:
    last = module.rpartition(".")[2]
    if last in _EMBEDDINGS:
        return "embedding"
    return "conv1d" if model_type in _CONV1D_TYPES and last in _CONV1D_NAMES else "linear"


def _unwrapped(match: re.Match[str]) -> str:
    return match[2] if match[2] == "lm_head" else f"model.{match[1]}"


def _packed_shape(info: TensorInfo, file: Path) -> tuple[int, ...]:
    """The shape that a weight packed by bitsandbytes had, out of the JSON text stored beside it."""
    with file.open("rb") as handle:
        handle.seek(info.start)
        state = parse_json(handle.read(min(info.stop - info.start, 1 << 16)), file, info.name)
    shape = state.get("shape")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise InputError(f"{file}: {shorten(info.name)} states no shape", "download the base again")
    return tuple(shape)


def _matrices(base_path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Module as the files name it -> (tensor name, shape) of every two-dimensional weight."""
    infos = read_tensor_infos(base_path)
    packed = {
        name.partition(_PACKED)[0]: _packed_shape(info, file)
        for name, (info, file) in infos.items()
        if _PACKED in name
    }
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (info, _) in infos.items():
        shape = packed.get(name, info.shape)
        if name.endswith(".weight") and len(shape) == 2 and not _NOT_MODULES.search("." + name):
            found[name.removesuffix(".weight")] = (name, shape)
    return found


def read_structure(base_path: Path) -> BaseModules:
    """The modules of the base in `base_path` (a folder with config.json and safetensors).

    Names are those of transformers' causal LM, also where the file was saved from the bare decoder. A tied
    head, which has no tensor, appears as a linear module of the embedding's shape; weights packed to 4 bits
    by bitsandbytes have the shape they unpack to.
    Raises InputError where config.json or the weights are missing or damaged.
    """
    config = read_config(base_path)
    text = text_config(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    prefix = _PREFIXES.get(model_type, "model") + "."
    stored = _matrices(base_path)
    bare = not any(prefix in f"{module}." for module in stored)
    modules: dict[str, ModuleShape] = {}
    tensors: dict[str, str] = {}
    for written, (name, shape) in stored.items():
        module = prefix + written if bare and not written.startswith(_HEADS) else written
        module = _WRAPPED.sub(_unwrapped, module)
        kind = _kind(module, model_type)
        inputs, outputs = shape if kind in ("conv1d", "embedding") else shape[::-1]
        modules[module] = ModuleShape(kind, inputs, outputs)
        tensors[module] = name
    tables = [m for m, s in modules.items() if s.kind == "embedding" and not m.endswith(_POSITIONS)]
    embedding = tables[0] if tables else None
    head = next((m for m in modules if m.rpartition(".")[2] in ("lm_head", "embed_out")), None)
    tied = head is None or text.get("tie_word_embeddings") is True
    if head is None and embedding is not None:
        head = "lm_head"
        modules[head] = ModuleShape("linear", modules[embedding].out_features, modules[embedding].in_features)
    deepest = max((int(match.group(1)) for m in modules if (match := _LAYER.search(m))), default=-1)
    n_layers = config_number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers") or deepest + 1
    return BaseModules(modules, n_layers, model_type, config, base_path, tied, head, embedding, tensors)
