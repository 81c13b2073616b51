"""A run of `molora bench`: settings to document. Torch is imported when it starts."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molora_cli.core.bench import machine
from molora_cli.core.bench.timing import interleave
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.bench.material import Material

BENCHES = ("kernels", "decode", "prefill", "end-to-end", "routing")
WARMUP = 2
_ROUNDS = {"kernels": 15, "decode": 15, "prefill": 5, "end-to-end": 5, "routing": 5}
_UNITS = {
    "kernels": "a pass over all linears",
    "decode": "a token",
    "prefill": "a forward",
    "end-to-end": "a token of the answer",
    "routing": "all passes of a text",
}


@dataclass(frozen=True)
class Job:
    """What to measure; None = as the bench has it.

    context: cached tokens of a decode, prompt of an end-to-end run. tokens: of a prefill, a routing run or a
    kernels call. new: tokens of an answer. adapters, rank: of random adapters. topk: adapters per token, one
    side each. sides: names, None = all that need no compilation by torch. busy: the process's own CPU time.
    """

    bench: str
    threads: int = 1
    rounds: int | None = None
    context: int = 64
    tokens: int | None = None
    new: int = 32
    adapters: int | None = None
    rank: int | None = None
    topk: tuple[int, ...] = (1, 2)
    dtype: str = "bfloat16"
    sides: tuple[str, ...] | None = None
    base: str | None = None
    bundle: Path | None = None
    backend: str = "auto"
    busy: bool = False
    seed: int = 0

    @property
    def turns(self) -> int:
        """How often a side runs at most."""
        return WARMUP + self.repeats

    @property
    def repeats(self) -> int:
        return self.rounds or _ROUNDS[self.bench]


def check(job: Job) -> None:
    """Raises InputError for settings that cannot be; imports no torch."""
    if job.bench not in BENCHES:
        raise InputError(f"there is no bench '{shorten(job.bench)}'", f"one of: {', '.join(BENCHES)}")
    for name in ("threads", "rounds", "context", "tokens", "new", "adapters", "rank"):
        value = getattr(job, name)
        if value is not None and value < 1:
            raise InputError(f"--{name} is {value}", "give 1 or more")
    if job.bench == "routing" and job.tokens == 1:
        raise InputError("--tokens is 1, and a choice per token is made by the next one", "give 2 or more")
    if not job.topk or min(job.topk) < 1 or len(set(job.topk)) != len(job.topk):
        raise InputError(f"--topk {','.join(map(str, job.topk))}: no ways to route", "give 1,2 or the like")
    if job.bundle is not None and (job.adapters is not None or job.rank is not None):
        raise InputError(
            "--adapters and --rank are of random adapters, and --bundle brings its own",
            "leave them or it out",
        )
    if job.busy and (job.threads != 1 or job.bench == "end-to-end"):
        raise InputError(
            "--busy counts the CPU time of one thread: neither several threads nor a user's wait",
            "leave --busy out",
        )


def run(
    job: Job, *, command: str = "", ticker: Ticker = no_ticks, clock: Callable[[], float] | None = None
) -> dict[str, Any]:
    """Measure, and say it: machine, settings, ceilings, sides with seconds, ratios and shares.

    command: the command line, for the record. clock: another clock, for tests. Raises InputError for
    settings, sides or adapters that cannot be measured.
    """
    check(job)
    import torch

    from molora_cli.core.base.model import pick_dtype
    from molora_cli.core.bench.ceilings import probes
    from molora_cli.core.bench.compiled import Graphs
    from molora_cli.core.bench.material import load_material
    from molora_cli.core.bench.prepare import prepare
    from molora_cli.core.bench.summary import ceiling_documents, side_documents
    from molora_cli.core.routed.model import resolve_backend

    dtype = pick_dtype(job.dtype, "cpu")
    notes: list[str] = []
    backend = resolve_backend(job.backend, "cpu", notes.append)
    clock = clock or (time.process_time if job.busy else time.perf_counter)
    threads = torch.get_num_threads()
    torch.set_num_threads(job.threads)
    try:
        with tempfile.TemporaryDirectory(prefix="molora-bench-") as folder, torch.inference_mode():
            ticker(0, None, "loading the base")
            adapters = job.adapters or (8 if job.bench == "routing" else 4)
            material = load_material(job.base, job.bundle, adapters, job.rank or 16, dtype, job.seed)
            _check_topk(job.topk, material)
            about = machine.about()
            ticker(0, None, "preparing the sides")
            with prepare(job, material, backend, Path(folder)) as ready:
                sides = [*probes(dtype), *ready.sides]
                graphs = Graphs()
                times = interleave(sides, job.repeats, clock, warmup=WARMUP, warm=graphs.warm, ticker=ticker)
                found = side_documents(sides, times, ready.references)
    finally:
        torch.set_num_threads(threads)
    return {
        "bench": job.bench,
        "case": _case(job, material),
        "unit": _UNITS[job.bench],
        "base": material.title,
        "backend": backend,
        "clock": "CPU time of the process" if job.busy else "wall clock",
        "command": command,
        "settings": {**asdict(job), "rounds": job.repeats, "adapters": len(material.adapters)},
        "machine": about,
        "ceilings": ceiling_documents(sides, times),
        "sides": found,
        "compiled": graphs.document(),
        "notes": [*notes, *ready.notes],
    }


def choose(wanted: Sequence[str] | None, there: Sequence[str], usual: Sequence[str]) -> list[str]:
    """The names of the sides to run, in the order of `there`; None = `usual`, "all" = all of them.

    Raises InputError for a name that is not there.
    """
    if wanted is None:
        return [name for name in there if name in usual]
    unknown = [name for name in wanted if name not in there and name != "all"]
    if unknown:
        raise InputError(f"there is no side '{shorten(unknown[0])}'", f"one of: all, {', '.join(there)}")
    return [name for name in there if "all" in wanted or name in wanted]


def _check_topk(topk: Sequence[int], material: Material) -> None:
    count = len(material.adapters)
    if max(topk) > count:
        raise InputError(
            f"--topk {max(topk)} of {count} adapters", "give fewer adapters per token, or more adapters"
        )


def _case(job: Job, material: Material) -> str:
    """What was run, in words."""
    ranks = sorted({f.rank for own in material.factors.values() for f in own.values()})
    said = f"K={len(material.adapters)} r={'-'.join(str(r) for r in dict.fromkeys((ranks[0], ranks[-1])))}"
    size = {
        "decode": f"context {job.context}",
        "end-to-end": f"prompt {job.context}, answer {job.new}",
    }.get(job.bench, "1 token" if tokens_of(job) == 1 else f"{tokens_of(job)} tokens")
    return f"{size}, {said}, {material.title}"


def tokens_of(job: Job) -> int:
    """Tokens of a call: one for kernels, 512 for prefill and routing, unless given."""
    return job.tokens or (1 if job.bench == "kernels" else 512)
