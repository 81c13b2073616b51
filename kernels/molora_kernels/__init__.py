"""Per-token dispatch of LoRA adapters. Knows tensors, slots and gates; nothing of bundles, routers or
text."""

from molora_kernels.backend import resolve
from molora_kernels.bank import Bank, Columns, Layout, Plan, make_plan
from molora_kernels.dispatch import routed_embedding, routed_linear

__all__ = ["Bank", "Columns", "Layout", "Plan", "make_plan", "resolve", "routed_embedding", "routed_linear"]
