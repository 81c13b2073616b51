"""A linear with int8 weights, in the place of an nn.Linear of the base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from molora_kernels import int8_linear, widen_rows
from torch import Tensor, nn

from molora_cli.errors import MoloraError


class Int8Linear(nn.Module):
    """In place of an nn.Linear: weight (out, in) int8, row_scale (out,) float32, bias as it was."""

    weight: Tensor
    row_scale: Tensor

    def __init__(self, weight: Tensor, row_scale: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)
        self.register_buffer("row_scale", row_scale)
        self.bias = bias

    @classmethod
    def empty(cls, like: nn.Linear) -> Int8Linear:
        """One without values, of that linear's sizes and on its device."""
        weight = torch.empty(like.weight.shape, dtype=torch.int8, device=like.weight.device)
        scale = torch.empty(len(weight), dtype=torch.float32, device=like.weight.device)
        return cls(weight, scale, like.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> W x + bias, (..., out), in x's dtype."""
        return int8_linear(x, self.weight, self.bias, self.row_scale)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and isinstance(value, Tensor) and value.is_floating_point():
            # transformers' tie_weights would, and the scales would then be applied to a plain weight
            raise MoloraError(
                "an int8 linear cannot share a float weight with the embedding",
                "tie weights before they become int8",
            )
        super().__setattr__(name, value)

    def widened(self) -> Tensor:
        """The weight (out, in) in float32."""
        return widen_rows(self.weight, self.row_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        """Follow the model to another device or dtype, but keep the scales in float32."""
        exact = self.row_scale
        super()._apply(fn, recurse)
        self.row_scale = exact.to(self.weight.device)
        return self
