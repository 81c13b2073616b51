"""Per-token dispatch of LoRA adapters. Knows tensors, slots and gates; nothing of bundles, routers or
text."""

from molora_kernels.backend import resolve
from molora_kernels.bank import Bank, Columns, Layout, Plan, Sorted, make_extent, make_plan
from molora_kernels.dispatch import routed_embedding, routed_linear
from molora_kernels.hot import HotBank
from molora_kernels.int8 import Quantised, int8_linear, quantise_rows, widen_rows
from molora_kernels.ops import mixed_delta, mixed_linear, plain_linear, prepared

__all__ = [
    "Bank",
    "Columns",
    "HotBank",
    "Layout",
    "Plan",
    "Quantised",
    "Sorted",
    "int8_linear",
    "make_extent",
    "make_plan",
    "mixed_delta",
    "mixed_linear",
    "plain_linear",
    "prepared",
    "quantise_rows",
    "resolve",
    "routed_embedding",
    "routed_linear",
    "widen_rows",
]
