"""An adapter's factors as torch tensors, ready for the routed modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molora_cli.core.adapter.fuse import factor_arrays
from molora_cli.core.adapter.header import read_header
from molora_cli.core.adapter.locate import WEIGHTS
from molora_cli.core.adapter.names import Named, group, parse_key
from molora_cli.core.adapter.tensors import TensorFile
from molora_cli.core.adapter.types import Adapter
from molora_cli.errors import InputError
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.bundle.manifest import AdapterEntry


@dataclass(frozen=True)
class Factors:
    """One module's part of an adapter. kind: "linear", "conv1d" or "embedding".

    A: (r, in), B: (out, r); for an embedding `in` is the vocabulary and a row of A^T takes the place of A x.
    Without magnitude the module adds scale * (B (A x) + bias); bias: (out,) or None (PEFT's lora_bias).
    magnitude: (out,) or None (DoRA, arXiv 2402.09353 eq. 5): with W' = W + scale * B A and n its row norms
    over the inputs, the module is magnitude / n * (W' x) plus the base's own bias.
    Tensors keep the file's dtype (float64 becomes float32); scale is a Python float.
    """

    A: Tensor
    B: Tensor
    scale: float
    bias: Tensor | None = None
    magnitude: Tensor | None = None
    kind: str = "linear"

    @property
    def rank(self) -> int:
        return int(self.A.shape[0])


def load_factors(adapter: Adapter) -> dict[str, Factors]:
    """The factors of every module of an adapter that `read_adapter` checked, by module path."""
    file = adapter.open()
    found: dict[str, Factors] = {}
    for path, module in adapter.modules.items():
        tensors = {
            role: _tensor(dtype, array) for role, (dtype, array) in factor_arrays(file, module).items()
        }
        found[path] = _factors(tensors, module.scale, module.kind)
    return found


def load_bundle_factors(folder: Path, entry: AdapterEntry) -> dict[str, Factors]:
    """The factors of one adapter in a bundle: `folder` is its canonical PEFT folder, `entry` the manifest's.

    The scale of each module is the manifest's. Raises InputError where the file's modules or ranks are not
    those of the manifest.
    """
    path = folder / WEIGHTS[0]
    file = TensorFile(path, read_header(path).tensors)
    named = [_parsed(key, path) for key in file.infos]
    modules = group(named, str(path))
    if set(modules) != set(entry.modules):
        odd = sorted(set(modules) ^ set(entry.modules))
        raise InputError(
            f"{path} does not hold the manifest's modules ({len(odd)} differ: {shorten(odd[0])})",
            "compose the bundle again",
        )
    found: dict[str, Factors] = {}
    for module, listed in entry.modules.items():
        roles = modules[module]
        tensors = {role: _tensor(file.infos[n.key].dtype, file.array(n.key)) for role, n in roles.items()}
        if "A" not in tensors or "B" not in tensors or tensors["A"].shape[0] != listed.rank:
            raise InputError(
                f"{path}: {shorten(module)} is not of rank {listed.rank} as the manifest says",
                "compose the bundle again",
            )
        kind = "embedding" if roles["A"].embedding else "linear"
        found[module] = _factors(tensors, listed.scale, kind)
    return found


def _parsed(key: str, path: Path) -> Named:
    named = parse_key(key)
    if named is None:
        raise InputError(f"{path}: '{shorten(key)}' is no LoRA tensor", "compose the bundle again")
    return named


def _factors(tensors: dict[str, Tensor], scale: float, kind: str) -> Factors:
    flat = {role: tensors[role].reshape(-1) for role in ("bias", "magnitude") if role in tensors}
    return Factors(tensors["A"], tensors["B"], scale, flat.get("bias"), flat.get("magnitude"), kind)


def _tensor(dtype: str, array: NDArray[Any]) -> Tensor:
    """A torch tensor with memory of its own, so that the file can go away."""
    own = np.array(array, order="C")
    if dtype == "BF16":
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    tensor = torch.from_numpy(own)
    return tensor.float() if tensor.dtype == torch.float64 else tensor
