"""`bench end-to-end`: a prompt and a greedy answer, as users get them; and the start of the program."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from molora_cli.core.bench.material import Material
from molora_cli.core.bench.runners import Runner, random_ids
from molora_cli.core.bench.timing import Side, spread
from molora_cli.core.bench.work import forward_flops, weight_bytes
from molora_cli.core.generate import stream_ids
from molora_cli.errors import MoloraError
from molora_cli.text import shorten

START = "start"
_PROMPT = "Write a python function to count the vowels in a string."


def whole_sides(material: Material, runners: list[Runner], prompt: int, new: int) -> list[Side]:
    """A side per runner: `prompt` random ids, then `new` greedy tokens. Routed models answer through
    `stream`, as chat does, where the base has a tokenizer; all others through `generate` of transformers."""
    ids = random_ids(material.config.vocab_size, prompt)
    return [_answer(material, runner, ids, new) for runner in runners]


def _answer(material: Material, runner: Runner, ids: Tensor, new: int) -> Side:
    firsts: list[float] = []
    streams = runner.routed is not None and material.tokenizer is not None
    call = _streamed(runner, ids, new, firsts) if streams else _generated(runner, ids, new, firsts)
    length = ids.shape[1]
    flops = forward_flops(material, length, 0, runner.top)
    flops += sum(forward_flops(material, 1, length + i, runner.top) for i in range(new - 1))

    def after() -> Mapping[str, Any]:
        first = spread(firsts)
        return {
            "notes": [*runner.notes, "through stream" if streams else "through generate"],
            "first_token_seconds": None if first is None else first.document(),
            **runner.facts(),
        }

    return Side(
        runner.name,
        runner.title,
        call,
        units=new,
        moved=float(weight_bytes(material.base)),
        flops=flops / new,
        before=runner.ready,
        after=after,
    )


def _streamed(runner: Runner, ids: Tensor, new: int, firsts: list[float]) -> Callable[[], object]:
    route = "auto" if runner.router is not None else "off"

    def call() -> None:
        started = time.perf_counter()
        for number, _ in enumerate(
            stream_ids(runner.routed, ids[0].tolist(), route=route, max_new_tokens=new)
        ):
            if number == 0:
                firsts.append(time.perf_counter() - started)

    return call


class _Clock:
    """A streamer for `generate`: the prompt comes first, then token by token."""

    def __init__(self, firsts: list[float]) -> None:
        self.firsts, self.puts, self.started = firsts, 0, time.perf_counter()

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.firsts.append(time.perf_counter() - self.started)

    def end(self) -> None:
        pass


def _generated(runner: Runner, ids: Tensor, new: int, firsts: list[float]) -> Callable[[], object]:
    options = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "use_cache": runner.cached,
        "pad_token_id": 0,
        "attention_mask": ids.new_ones(ids.shape),
    }
    return lambda: runner.model.generate(input_ids=ids, streamer=_Clock(firsts), **options)


def start_side(bundle: Path, base: str | None, backend: str, dtype: str) -> Side:
    """`molora chat --prompt` in a process of its own, from its start to the end of a one-token answer."""
    code = "import sys; sys.argv[0] = 'molora'; from molora_cli.app import main; main()"
    options = ["--max-new-tokens", "1", "--backend", backend, "--dtype", dtype, "--quiet"]
    command = [sys.executable, "-c", code, "chat", str(bundle), "--prompt", _PROMPT, *options]
    if base is not None:
        command += ["--base", base]

    def call() -> float:
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise MoloraError(
                f"molora chat failed: {shorten(done.stderr.strip(), 200)}", "run molora chat yourself"
            )
        return time.perf_counter() - started

    return Side(START, "molora chat, process start to first token", call, timed=True)
