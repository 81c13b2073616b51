"""`bench decode` and `bench prefill`: one forward of a whole model, token by token or many tokens at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.bench.material import Material
from molora_cli.core.bench.runners import (
    Engine,
    Runner,
    cache_argument,
    changing_ids,
    plain_copy,
    random_ids,
)
from molora_cli.core.bench.timing import Side
from molora_cli.core.bench.work import decode_bytes, forward_flops, weight_bytes

STEPS = 4  # tokens of a decode turn; one where the whole text runs for each


def decode_sides(
    material: Material, runners: list[tuple[Engine, Runner]], context: int, turns: int
) -> list[Side]:
    """A side per runner: a few tokens a turn after `context` cached ones, all sides fed the same ids.

    runners: with the engine that fills their caches. turns: at most so many; the context grows as they go.
    """
    vocabulary = material.config.vocab_size
    prompt = random_ids(vocabulary, context)
    count = STEPS * turns
    router = next((r.router for _, r in runners if r.router is not None and not r.router.live), None)
    fed = random_ids(vocabulary, count, 1) if router is None else changing_ids(router, prompt, count, 1)
    return [_decode(engine, runner, prompt, fed) for engine, runner in runners]


def _decode(engine: Engine, runner: Runner, prompt: Tensor, fed: Tensor) -> Side:
    material = engine.material
    whole = torch.cat([prompt, fed], 1)
    context = place = prompt.shape[1]
    steps = STEPS if runner.cached else 1
    room = whole.shape[1] if runner.static else None
    cache: Any = None
    if runner.routed is not None:
        cache = engine.filled(prompt, room)
    elif runner.cached:
        cache = plain_copy(engine.filled(prompt), material.base.config, room)

    if runner.static:
        # modules put their adapters together when first used: a graph traced before that is traced again
        runner.ready()
        runner.forward(random_ids(material.config.vocab_size, 2))

    def call() -> None:
        nonlocal place
        for _ in range(steps):
            ids = whole[:, place : place + 1] if runner.cached else whole[:, : place + 1]
            runner.forward(ids, cache)
            place += 1

    return Side(
        runner.name,
        runner.title,
        call,
        units=steps,
        moved=decode_bytes(material, context, runner.top),
        flops=forward_flops(material, 1, context, runner.top),
        before=runner.ready,
        after=lambda: {"notes": runner.notes, **runner.facts(cache, context)},
    )


def prefill_sides(material: Material, runners: list[tuple[Engine, Runner]], tokens: int) -> list[Side]:
    """A side per runner: a forward of `tokens` ids without a cache before it, logits of the last one."""
    ids = random_ids(material.config.vocab_size, tokens)
    return [_prefill(engine.material, runner, ids) for engine, runner in runners]


def _prefill(material: Material, runner: Runner, ids: Tensor) -> Side:
    output: Any = None

    def call() -> None:
        nonlocal output
        output = runner.forward(ids)

    def after() -> Mapping[str, Any]:
        cache = getattr(output, cache_argument(runner.model), None)
        return {"notes": runner.notes, **runner.facts(cache)}

    return Side(
        runner.name,
        runner.title,
        call,
        moved=float(weight_bytes(material.base)),
        flops=forward_flops(material, ids.shape[1], 0, runner.top),
        before=runner.ready,
        after=after,
    )
