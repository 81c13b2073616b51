"""The trace of a forward, attached to its output and built when it is first read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from molora_cli.core.routed.route import Route
from molora_cli.core.trace import Trace


@dataclass(frozen=True)
class Routed:
    """What a forward decided. ids, mask (B, T); route (B, T, G, k); scores (B, T, G, E) or None."""

    ids: Tensor
    mask: Tensor
    route: Route
    adapters: tuple[str, ...]
    scores: Tensor | None = None
    experts: tuple[str, ...] = ()
    meta: tuple[tuple[str, Any], ...] = ()

    def trace(self) -> Trace:
        """One document per row of the batch, padding left out."""
        real = self.mask.cpu().numpy()
        lengths = real.sum(1)
        scores = None
        if self.scores is not None:
            scores = self.scores.detach().float().cpu().numpy()[real]
        return Trace(
            token_ids=self.ids.cpu().numpy()[real].astype(np.int64),
            starts=np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64),
            indices=self.route.indices.cpu().numpy()[real].astype(np.int16),
            gates=self.route.gates.detach().float().cpu().numpy()[real],
            adapters=self.adapters,
            scores=scores,
            experts=self.experts,
            domains=(None,) * len(real),
            meta=dict(self.meta),
        )


class _Traced:
    """Mixed into an output's own class."""

    @property
    def trace(self) -> Trace | None:
        """The routes of this call's tokens; None on a copy made from the fields alone."""
        made = self.__dict__.get("_molora_trace")
        if isinstance(made, Routed):
            made = self.__dict__["_molora_trace"] = made.trace()
        return made

    def __reduce__(self) -> Any:
        # pickled as the output it was: its class can be found by name, this one cannot
        plain = type(self).__mro__[2]
        return plain, tuple(self.__dict__.get(field.name) for field in fields(plain))


_traced: dict[type, type] = {}


def add_trace(output: Any, routed: Routed) -> Any:
    """Give `output` a lazy `.trace`; an output without attributes (a tuple) is returned as it is."""
    if not isinstance(output, ModelOutput):
        return output
    kind = type(output)
    if not issubclass(kind, _Traced):
        if kind not in _traced:
            _traced[kind] = type(kind.__name__, (_Traced, kind), {"__module__": kind.__module__})
        output.__class__ = _traced[kind]
    output.__dict__["_molora_trace"] = routed
    return output


def cache_in(output: Any) -> Cache | None:
    """The cache that a forward made by itself."""
    values = output if isinstance(output, tuple) else getattr(output, "values", tuple)()
    return next((value for value in values if isinstance(value, Cache)), None)
