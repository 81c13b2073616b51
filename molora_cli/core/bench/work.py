"""What a forward must read and multiply at the least: the roofs that a side is held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from molora_cli.core.adapter.factors import Factors
from molora_cli.core.bench.material import LINEARS, Material
from molora_cli.core.routed.model import RoutedModel
from molora_cli.core.routed.modules import RoutedModule


def weight_bytes(model: Any) -> int:
    """Bytes of all linear weights, head included: what one decode step reads."""
    return sum(m.weight.nbytes for m in model.modules() if isinstance(m, LINEARS))


def adapter_elements(material: Material) -> float:
    """Elements of A and B of one adapter, mean over the adapters."""
    sizes = [sum(f.A.numel() + f.B.numel() for f in own.values()) for own in material.factors.values()]
    return sum(sizes) / max(1, len(sizes))


def cache_bytes(material: Material, context: int) -> float:
    """Keys and values of `context` positions of all layers, in the base's dtype."""
    config = material.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return (
        2.0 * config.num_hidden_layers * heads * _head_size(config) * context * material.base.dtype.itemsize
    )


def decode_bytes(material: Material, context: int, top: float) -> float:
    """A token's least reading: weights, cached keys and values, and the factors of `top` adapters."""
    itemsize = material.base.dtype.itemsize
    return (
        weight_bytes(material.base)
        + cache_bytes(material, context)
        + top * adapter_elements(material) * itemsize
    )


def forward_flops(material: Material, tokens: int, context: int, top: float, heads: int = 1) -> float:
    """Of a forward of `tokens` after `context` cached ones, logits of `heads` positions, `top` adapters a
    token: two per weight and token, and four per query, visible key and channel in the attention."""
    linears = sum(m.weight.numel() for m in material.linears.values())
    head = material.base.get_output_embeddings().weight.numel()
    config = material.config
    seen = tokens * context + tokens * (tokens + 1) / 2
    attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * _head_size(config) * seen
    return 2.0 * tokens * (linears + top * adapter_elements(material)) + 2.0 * heads * head + attention


def resident(model: RoutedModel, base: Any, factors: Mapping[str, Mapping[str, Factors]]) -> float:
    """Bytes of all tensors that a routed model holds, its router's among them, over those of the base and
    its adapters alone. base: as it was before; what stands in two places counts once."""
    own = _bytes(_tensors(base))
    own += base.dtype.itemsize * sum(f.A.numel() + f.B.numel() for m in factors.values() for f in m.values())
    stages = [] if model.router is None else model.router.stages
    held = [*_tensors(model.base), *(t for stage in stages for t in _inside(vars(stage).values()))]
    return _bytes(held) / own


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _inside(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among values, in modules and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from _tensors(value)
        elif isinstance(value, (list, tuple)):
            yield from _inside(value)


def _bytes(tensors: Iterable[Tensor]) -> int:
    stores = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(stores.values())


def ways(model: Any) -> dict[str, int]:
    """How many of a routed model's modules take which way: see `way`."""
    found: dict[str, int] = {}
    for module in model.base.modules():
        if isinstance(module, RoutedModule):
            name = way(module)
            found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items()))


def way(module: RoutedModule) -> str:
    """What a call without gradients runs: fused op, base module + delta op, or base module + torch twin."""
    from molora_kernels import cpu_ops

    from molora_cli.core.routed.modules import RoutedLinear, is_plain, row_scale

    backend = module._context[0].backend
    twin = "base module + torch twin"
    if backend != "cpu" or not isinstance(module, RoutedLinear) or not cpu_ops.takes(module.A.detach()):
        return twin
    if not is_plain(module.base):
        return "base module + delta op"
    same = row_scale(module.base) is not None or module.base.weight.dtype == module.A.dtype
    return "fused op" if same else twin


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
