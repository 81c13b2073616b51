"""What routers on ids need of a base, read from its files: no model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from molora_cli.core.base.structure import read_structure, read_tensor_shapes
from molora_cli.core.router.kinds import Surroundings
from molora_cli.errors import InputError


def read_embedding(base_path: Path) -> Tensor:
    """The base's input embedding (V, d) in the dtype it is stored in, on the CPU. Raises InputError."""
    from safetensors import safe_open

    base = read_structure(base_path)
    name = base.tensors.get(base.embedding) if base.embedding else None
    if name is None:
        raise InputError(
            f"no input embedding was found in the base {base_path}",
            "use a router that needs none: vocab or fixed",
        )
    with safe_open(read_tensor_shapes(base_path)[name][2], framework="pt") as file:
        embedding: Tensor = file.get_tensor(name)
    if not embedding.is_floating_point():
        raise InputError(
            f"the input embedding of {base_path} is quantised ({embedding.dtype})",
            "use a router that needs none: vocab or fixed",
        )
    return embedding


def read_surroundings(base_path: Path, *, device: Any = "cpu") -> Surroundings:
    """Number of layers and input embedding of the base in `base_path`. Raises InputError."""
    return Surroundings(
        n_layers=read_structure(base_path).n_layers, embedding=read_embedding(base_path), device=device
    )
