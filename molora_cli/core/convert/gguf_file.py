"""Write an adapter as the .gguf file that llama.cpp loads with --lora, through the gguf library.

llama.cpp adds alpha / rank(B) * B A, or B A alone where alpha is 0. Tensors are named after the base's in
GGUF with .lora_a (r, in) and .lora_b (out, r); that of token_embd is (V, r). Rows of B that the base's
converter reorders are reordered with it (gguf_layout).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from molora_cli.core.adapter.gguf_layout import gguf_layout, interleave_rows
from molora_cli.errors import MoloraError

if TYPE_CHECKING:
    from molora_cli.core.adapter.factors import Factors
    from molora_cli.core.base.structure import BaseModules


def write_gguf(
    factors: Mapping[str, Factors],
    base: BaseModules,
    path: Path,
    *,
    name: str,
    base_id: str,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """The file; returns notes. One alpha serves where every module's scale is alpha / r, and factors are then
    kept as they are; else scales go into B and alpha is 0.

    Raises MoloraError where float16 cannot hold a factor.
    """
    import gguf

    layout = gguf_layout(base)
    alphas = {_alpha(f) for f in factors.values()}
    alpha = alphas.pop() if len(alphas) == 1 else 0.0
    if alpha is None or float(np.float32(alpha)) != alpha:
        alpha = 0.0
    writer = gguf.GGUFWriter(path, layout.architecture)
    kinds = {
        torch.float32: (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
        torch.float16: (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
        torch.bfloat16: (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    }
    file_type, kind = kinds[dtype]
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    writer.add_name(name)
    writer.add_string("general.base_model.0.name", base_id)
    writer.add_uint32("general.base_model.count", 1)
    writer.add_file_type(file_type)
    for module, f in factors.items():
        a, b = f.A.float(), f.B.float()
        if alpha == 0.0:
            b = (f.B.double() * f.scale).float()
        if f.kind == "embedding":
            a = a.T
        rows = b.numpy()
        if module in layout.heads:
            rows = interleave_rows(rows, layout.heads[module])
        for half, tensor in (("lora_a", a), ("lora_b", torch.from_numpy(rows))):
            key = f"{layout.names[module]}.weight.{half}"
            _add(writer, key, tensor.contiguous(), dtype, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if alpha == 0.0:
        return ["scales are multiplied into lora_b (alpha 0): one alpha cannot say those of all modules"]
    return []


def _alpha(factors: Factors) -> float | None:
    """The alpha that gives this scale by llama.cpp's rule, None where no float32 does, or it is 0."""
    alpha = float(np.float32(factors.scale * factors.rank))
    exact = alpha != 0 and alpha / factors.rank == factors.scale
    return alpha if exact else None


def _add(writer: Any, key: str, tensor: Tensor, dtype: torch.dtype, kind: Any) -> None:
    stored = tensor.to(dtype)
    if not bool(torch.isfinite(stored).all()):
        raise MoloraError(f"{key} does not fit into float16", "use --dtype float32 or bfloat16")
    if dtype is torch.bfloat16:  # numpy has no such type: its bits, with the type said beside
        bits = stored.view(torch.int16).numpy().view(np.uint8)
        writer.add_tensor(key, bits, raw_dtype=kind)
    else:
        writer.add_tensor(key, stored.numpy())
