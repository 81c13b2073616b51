"""The input embedding of a base, read alone: what routers on token ids need of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from molora_cli.core.base.structure import read_structure, read_tensor_shapes
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def read_embedding(base_path: Path) -> Tensor:
    """The input embedding (V, d) of the base in `base_path`, in its own dtype, on the CPU.

    No other tensor is read. Raises InputError where the files show no input embedding or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    structure = read_structure(base_path)
    if structure.embedding is None:
        raise InputError(
            f"{base_path} shows no input embedding (its files hold {len(structure)} modules)",
            "use a router that needs none: molora attach-router BUNDLE --kind vocab",
        )
    name = structure.tensors[structure.embedding]
    file = read_tensor_shapes(base_path)[name][2]
    try:
        with safe_open(file, framework="pt") as tensors:
            embedding: Tensor = tensors.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} cannot be read: {error}", "download the base again") from error
    return embedding
