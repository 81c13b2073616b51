"""Which sides a bench has, and what they are held against."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from molora_cli.core.bench.forwards import decode_sides, prefill_sides
from molora_cli.core.bench.job import Job, choose, tokens_of
from molora_cli.core.bench.llama import LORA, PLAIN, Llama, llama_sides, missing
from molora_cli.core.bench.material import Material
from molora_cli.core.bench.ops import op_names, op_sides
from molora_cli.core.bench.peft_runners import NAMES as PEFT
from molora_cli.core.bench.peft_runners import peft_runners
from molora_cli.core.bench.routing import routing_names, routing_references, routing_sides
from molora_cli.core.bench.runners import BASE, COMPILED, EIGHT, ENGINE, GROUPS, Engine, Runner, base_runner
from molora_cli.core.bench.timing import Side
from molora_cli.core.bench.whole import START, start_side, whole_sides


@dataclass(frozen=True)
class Prepared:
    """sides: ready to run; references: side -> the sides it is held against; notes: what was left out."""

    sides: Sequence[Side]
    references: Mapping[str, Sequence[str]]
    notes: Sequence[str]


@contextlib.contextmanager
def prepare(job: Job, material: Material, backend: str, folder: Path) -> Iterator[Prepared]:
    """The sides of a job. folder: for what they need on disk. Raises InputError for unknown sides."""
    if job.bench == "kernels":
        names = op_names(job.topk)
        wanted = choose(job.sides, names, names)
        sides = op_sides(material, set(wanted), tokens_of(job), job.topk, backend, job.seed)
        yield Prepared(sides, _held(wanted), [])
    elif job.bench == "routing":
        count = len(material.adapters)
        names = routing_names(count)
        wanted = choose(job.sides, names, names)
        sides, notes = routing_sides(material, set(wanted), backend, tokens_of(job), folder)
        yield Prepared(sides, routing_references(count), notes)
    else:
        yield from _models(job, material, backend, folder)


def _models(job: Job, material: Material, backend: str, folder: Path) -> Iterator[Prepared]:
    """Whole models: decode, prefill, end-to-end."""
    routed = [f"top{k}" for k in job.topk]
    plain = [BASE, ENGINE, *routed, GROUPS]
    there, usual = [*plain, *PEFT], [*plain, *PEFT]
    if job.bench != "end-to-end":
        there += [f"{name}{EIGHT}" for name in (ENGINE, *routed)]
    if job.bench == "decode":
        there += [f"{name}{COMPILED}" for name in (BASE, ENGINE, *routed, GROUPS)]
        there += [f"{name}{EIGHT}{COMPILED}" for name in (ENGINE, *routed)] + [PLAIN, LORA]
        usual += [] if missing(material) else [PLAIN, LORA]
    if job.bench == "end-to-end" and job.bundle is not None:
        there.append(START)
        usual.append(START)
    wanted = choose(job.sides, there, usual)
    notes = [] if job.sides else _unasked(job, material)
    pairs, more = _runners(job, material, backend, folder, set(wanted))
    notes += more
    processes: list[Llama] = []
    try:
        if job.bench == "decode":
            sides = decode_sides(material, pairs, job.context, job.turns)
            ours, processes, more = llama_sides(
                material, set(wanted), folder, job.context, job.turns, job.threads, busy=job.busy
            )
            sides += ours
            notes += more
        elif job.bench == "prefill":
            sides = prefill_sides(material, pairs, tokens_of(job))
        else:
            sides = whole_sides(material, [runner for _, runner in pairs], job.context, job.new)
        if START in wanted and job.bundle is not None:
            sides.append(start_side(job.bundle, job.base, backend, job.dtype))
        yield Prepared(sides, _held([side.name for side in sides]), notes)
    finally:
        for process in processes:
            process.close()


def _unasked(job: Job, material: Material) -> list[str]:
    why = missing(material) if job.bench == "decode" else None
    return [] if why is None else [f"no llama.cpp beside it: {why}"]


def _runners(
    job: Job, material: Material, backend: str, folder: Path, wanted: set[str]
) -> tuple[list[tuple[Engine, Runner]], list[str]]:
    """The runners with the engine that fills their caches, and notes."""
    engine = Engine(material, backend)
    pairs = [
        (engine, base_runner(material, compiled=by_torch))
        for by_torch in (False, True)
        if BASE + (COMPILED if by_torch else "") in wanted
    ]
    pairs += _ours(job, engine, wanted)
    if GROUPS in wanted:
        pairs.append((engine, engine.groups(min(job.topk))))
    if any(name.endswith((EIGHT, EIGHT + COMPILED)) for name in wanted):
        pairs += _ours(job, Engine(material.int8(), backend, mark=EIGHT), wanted)
    if GROUPS + COMPILED in wanted:
        deep = Engine(material, backend, compiled=True)
        pairs.append((deep, deep.groups(min(job.topk))))
    others, notes = peft_runners(material, wanted & set(PEFT), folder, max(job.topk))
    return [*pairs, *((engine, runner) for runner in others)], notes


def _ours(job: Job, engine: Engine, wanted: set[str]) -> list[tuple[Engine, Runner]]:
    """Our engine without adapters and routed, eager and compiled, on one kind of weights."""
    material, backend, mark = engine.material, engine.model.backend, engine.mark
    pairs = []
    if ENGINE + mark in wanted:
        pairs.append((engine, engine.plain()))
    pairs += [(engine, engine.routed(k)) for k in job.topk if f"top{k}{mark}" in wanted]
    if ENGINE + mark + COMPILED in wanted:
        alone = Engine(material.part([]), backend, compiled=True, mark=mark)
        pairs.append((alone, alone.plain()))
    compiled = [k for k in job.topk if f"top{k}{mark}{COMPILED}" in wanted]
    if compiled:
        one = Engine(material, backend, compiled=True, mark=mark)
        pairs += [(one, one.routed(k)) for k in compiled]
    return pairs


def _held(names: Sequence[str]) -> dict[str, list[str]]:
    """Every side against transformers' base, our engine without adapters and llama.cpp; a compiled one also
    against the compiled engine, one with int8 weights against the same without."""
    found = {}
    for name in names:
        others = [BASE, ENGINE, *([ENGINE + COMPILED] if name.endswith(COMPILED) else [])]
        if EIGHT in name:
            others += [name.replace(EIGHT, ""), ENGINE + EIGHT, ENGINE + EIGHT + COMPILED]
        others += [PLAIN, LORA] if name not in (PLAIN, LORA) else []
        found[name] = [other for other in dict.fromkeys(others) if other != name and other in names]
    return found
