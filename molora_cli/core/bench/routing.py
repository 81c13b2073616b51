"""`bench routing`: one pass in which every token takes its adapter, against a pass per adapter.

The claim of MoLoRA (arXiv 2603.15965): routing whole sequences needs K passes to have every token's best
adapter, routing tokens needs one. A choice per token is made from the tokens' losses, so that all logits are
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.bench.material import Material
from molora_cli.core.bench.peft_runners import SINGLE, peft_runners
from molora_cli.core.bench.runners import Engine, Runner, random_ids
from molora_cli.core.bench.timing import Side
from molora_cli.core.bench.work import forward_flops, weight_bytes

TOKEN, MERGED, APPLIED, PEFT = "token", "merged", "applied", "peft"
COUNTS = (1, 2, 4, 8)


def routing_counts(adapters: int) -> list[int]:
    """The numbers of adapters to measure, up to `adapters`."""
    return [k for k in COUNTS if k <= adapters]


def routing_names(adapters: int) -> list[str]:
    return [f"{kind}-{k}" for k in routing_counts(adapters) for kind in (TOKEN, MERGED, APPLIED, PEFT)]


def routing_references(adapters: int) -> dict[str, list[str]]:
    """Per side what it is held against: per-token routing among as many adapters."""
    others = (MERGED, APPLIED, PEFT)
    return {f"{kind}-{k}": [f"{TOKEN}-{k}"] for k in routing_counts(adapters) for kind in others}


def routing_sides(
    material: Material, wanted: set[str], backend: str, tokens: int, root: Path
) -> tuple[list[Side], list[str]]:
    """Sides for K = 1, 2, 4, 8 as far as there are adapters, and notes.

    token-K: one pass, a router among K. applied-K: K passes, one adapter at a time. merged-K: K passes of the
    base alone, which stand for passes over K copies of the weights with an adapter merged into each: shapes
    and operators are the same. peft-K: K passes of PEFT, one adapter at a time. root: as of `peft_runners`.
    """
    ids = random_ids(material.config.vocab_size, tokens)
    made: list[Side] = []
    notes: list[str] = []
    names = material.adapters
    runners: list[Runner] = []
    if any(name.startswith(PEFT) for name in wanted):
        runners, notes = peft_runners(material, {SINGLE}, root)
    for count in routing_counts(len(names)):
        engine = Engine(material.part(names[:count]), backend)
        kinds: dict[str, tuple[str, Callable[[], object], float]] = {
            TOKEN: ("per token: one pass", _one(engine.routed(1), ids), 1),
            MERGED: ("per sequence: a pass per adapter, merged", _several([engine.plain()] * count, ids), 0),
            APPLIED: (
                "per sequence: a pass per adapter, applied",
                _several([engine.only(name) for name in names[:count]], ids),
                1,
            ),
        }
        if runners:
            kinds[PEFT] = ("per sequence in PEFT", _several(runners * count, ids), 1)
        for kind, (title, call, top) in kinds.items():
            passes = 1 if kind == TOKEN else count
            flops = passes * forward_flops(material, tokens, 0, top, tokens)
            moved = float(passes * weight_bytes(material.base))
            side = Side(f"{kind}-{count}", f"K={count}, {title}", call, moved=moved, flops=flops)
            made.append(side)
    return [side for side in made if side.name in wanted], notes


def _one(runner: Runner, ids: Tensor) -> Callable[[], object]:
    def call() -> Tensor:
        runner.ready()
        return _losses(runner, ids)

    return call


def _several(runners: Sequence[Runner], ids: Tensor) -> Callable[[], object]:
    """A pass of each, and per token the best."""

    def call() -> Tensor:
        found = []
        for runner in runners:
            runner.ready()
            found.append(_losses(runner, ids))
        return torch.stack(found).argmin(0)

    return call


def _losses(runner: Runner, ids: Tensor) -> Tensor:
    """(T - 1,) the loss of each next token."""
    logits: Any = runner.forward(ids, keep=0).logits
    return F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
