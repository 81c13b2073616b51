"""What a row of the table costs beside its passes: CPU time over the base's, and bytes of keys and values."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from molora_cli.core.evaluation.rows import Batch, EvalRow, batches
from molora_cli.core.evaluation.score import Decide, forward

_TOKENS = 320  # of the forward that is timed, padding included
_ROUNDS = 5


class Clock:
    """Times forwards over one batch of short rows, in turns with those of a second base that nothing is
    attached to, so that a busier machine slows both."""

    def __init__(self, base: Any, rows: Sequence[EvalRow]) -> None:
        """base: a causal model of its own. rows: what the batch is taken from."""
        self._base = base
        self._batch: Batch = batches(rows, range(len(rows)), _TOKENS)[0]
        self._known: dict[str, float] = {}

    def ratio(self, key: str, build: Callable[[], Any], decide: Decide | None) -> float:
        """CPU time of a forward of what `build` gives over that of the base: the median of the rounds'
        ratios. What was timed under `key` before is not built or timed again."""
        if key not in self._known:
            model = build()
            self._seconds(model, decide)  # the first one warms up
            pairs = [(self._seconds(self._base, None), self._seconds(model, decide)) for _ in range(_ROUNDS)]
            self._known[key] = round(float(np.median([it / base for base, it in pairs])), 3)
        return self._known[key]

    def _seconds(self, model: Any, decide: Decide | None) -> float:
        device = next(iter(model.parameters())).device
        watch: Callable[[], float] = time.process_time
        if device.type != "cpu":
            torch.accelerator.synchronize()
            watch = time.perf_counter
        began = watch()
        forward(model, self._batch, decide)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return watch() - began


@torch.no_grad()
def cache_bytes(base: Any, ids: Tensor) -> float | None:
    """Bytes of keys and values per token that `base` keeps after ids (T,); None where its cache has no such
    tensors."""
    output = base(input_ids=ids[None].to(base.device), use_cache=True)
    kept = [output[name] for name in ("cache", "past_key_values") if output.get(name) is not None]
    layers = getattr(kept[0], "layers", ()) if kept else ()
    found = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    tensors = [t for t in found if isinstance(t, Tensor)]
    if not tensors or len(tensors) != len(found):
        return None
    return sum(t.numel() * t.element_size() for t in tensors) / len(ids)
