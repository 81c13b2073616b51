"""Write an adapter as the folder that MLX-LM loads with --adapter-path.

adapters.safetensors: MODULE.lora_a (in, r), MODULE.lora_b (r, out), for an embedding (V, r) and (r, d), for
DoRA also MODULE.m (out,). adapter_config.json: one rank and one raw `scale` for all modules, the layers
counted from the end, module names below a layer in `keys`. (mlx_lm/tuner/utils.py, linear_to_lora_layers.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molora_cli.core.adapter.types import Adapter
from molora_cli.core.convert.refusals import MLX_LAYER, mlx_gaps, mlx_layers, mlx_tied

if TYPE_CHECKING:
    from molora_cli.core.adapter.factors import Factors
    from molora_cli.core.base.structure import BaseModules

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"


def write_mlx(
    adapter: Adapter,
    factors: Mapping[str, Factors],
    base: BaseModules,
    base_id: str,
    folder: Path,
    dtype: torch.dtype | None,
) -> list[str]:
    """Both files into `folder`; returns notes. dtype: of the factors, None keeps each one's own.

    The scale most modules share stands in the config. Where another's differs, the ratio goes into its
    lora_b; smaller ranks are filled up with zeros, and so are modules that MLX adapts along with the others.
    A tied head that changes as its embedding does is left to it.
    """
    from safetensors.torch import save_file

    if mlx_tied(adapter, base):
        factors = {module: f for module, f in factors.items() if module != base.head}
    scale = Counter(f.scale for f in factors.values()).most_common(1)[0][0]
    rank = max(f.rank for f in factors.values())
    tensors: dict[str, Tensor] = {}
    for module, f in factors.items():
        a, b = f.A, _scaled(f.B, f.scale / scale)
        kind = dtype or a.dtype
        tensors[f"{module}.lora_a"] = _padded(a.T, rank, 1).to(kind).contiguous()
        tensors[f"{module}.lora_b"] = _padded(b.T, rank, 0).to(dtype or b.dtype).contiguous()
        if f.magnitude is not None:
            tensors[f"{module}.m"] = f.magnitude.to(dtype or f.magnitude.dtype).contiguous()
    gaps = mlx_gaps(adapter, base)
    kind = dtype or next(iter(factors.values())).A.dtype
    for module in gaps:
        shape = base[module]
        tensors[f"{module}.lora_a"] = torch.zeros(shape.in_features, rank, dtype=kind)
        tensors[f"{module}.lora_b"] = torch.zeros(rank, shape.out_features, dtype=kind)
    layers, names = mlx_layers(adapter, base)
    whole = [m for m in factors if not MLX_LAYER.match(m)]
    config = {
        "fine_tune_type": "dora" if any(f.magnitude is not None for f in factors.values()) else "lora",
        "model": base_id,
        # 0 would mean all layers; keys decide then, and they name modules outside the layers
        "num_layers": layers or 1,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": [*names, *whole]},
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "mlx"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    notes = []
    if gaps:
        notes.append(
            f"MLX adapts the same modules in each layer: {len(gaps)} that are skipped are written as zeros"
        )
    if any(f.rank != rank for f in factors.values()):
        notes.append(f"MLX has one rank: smaller ones are filled up to {rank} with zeros")
    return notes


def _scaled(b: Tensor, ratio: float) -> Tensor:
    """B times a ratio: in its own type where that is exact (a power of two), else in float32."""
    if ratio == 1.0:
        return b
    own = (b.double() * ratio).to(b.dtype)
    if bool((own.double() == b.double() * ratio).all()):
        return own
    return (b.double() * ratio).float()


def _padded(matrix: Tensor, rank: int, side: int) -> Tensor:
    missing = rank - matrix.shape[side]
    if not missing:
        return matrix
    return torch.nn.functional.pad(matrix, (0, missing) if side == 1 else (0, 0, 0, missing))
