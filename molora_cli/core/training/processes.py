"""Several processes that train one router together, as `accelerate launch` starts them.

Every process draws the same rows, reads its share of the forwards, and adds its gradients to those of the
others, so that a step is the one that a single process takes, up to the order of sums. The main process alone
writes files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process is number `index` of `count`; what they exchange lies on `device`."""

    index: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    @property
    def main(self) -> bool:
        return self.index == 0

    def share(self, parts: Sequence[T]) -> Sequence[T]:
        """The parts that this process takes; all of them together are `parts`."""
        return parts[self.index :: self.count]

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over all processes; every process must ask."""
        if self.count == 1:
            return value
        from accelerate.utils import reduce

        found: Tensor = reduce(value.to(self.device), "sum")
        return found.to(value.device)

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every parameter's gradient becomes the sum over all processes."""
        if self.count == 1:
            return
        for parameter in parameters:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.sum(own)

    def any(self, value: bool) -> bool:
        """Whether some process says so; every process must ask."""
        return value if self.count == 1 else bool(self.sum(torch.tensor(float(value))) > 0)


def processes() -> Processes:
    """Those that were launched together; one where nothing was launched."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Processes()
    from accelerate import PartialState

    state = PartialState()
    return Processes(state.process_index, state.num_processes, state.device)
