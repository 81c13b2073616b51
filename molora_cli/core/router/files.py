"""Writing and reading the tensors of `router.safetensors`; its header is `spec`'s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from molora_cli.core.bundle.writing import new_file
from molora_cli.core.router.spec import HEADER_KEY, RouterSpec, check_spec, dump_spec
from molora_cli.errors import InputError, MoloraError
from molora_cli.text import shorten


def tensor_name(stage: int, name: str) -> str:
    """The name in the file of tensor `name` of stage number `stage`."""
    return f"stages.{stage}.{name}"


def stage_tensors(tensors: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """The tensors of one stage under their own names."""
    prefix = tensor_name(stage, "")
    return {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}


def join_tensors(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The file's tensors from each stage's own."""
    return {tensor_name(i, name): value for i, own in enumerate(stages) for name, value in own.items()}


def save(path: Path, spec: RouterSpec, tensors: Mapping[str, Tensor | NDArray[Any]]) -> None:
    """Write a router file: beside its place, flushed to disk, then renamed. Same input, same bytes.

    tensors: by their names in the file (`stages.<i>.<name>`), torch or numpy. Raises InputError for a spec
    that could not be read again, MoloraError where a tensor is not finite.
    """
    from safetensors.numpy import save_file

    check_spec(spec, str(path))
    arrays = {name: _array(value) for name, value in tensors.items()}
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise MoloraError(f"the router tensor '{name}' holds NaN or infinity", "train the router again")
    with new_file(path) as work:
        save_file(arrays, work, metadata={HEADER_KEY: dump_spec(spec)})


def load_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a router file on the CPU. Raises InputError where it cannot be read or is not finite."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    again = "attach or train the router again"
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({shorten(str(error))})", again) from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{path}: the tensor '{shorten(name)}' holds NaN or infinity", again)
    return tensors


def _array(value: Tensor | NDArray[Any]) -> NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return np.ascontiguousarray(value)
