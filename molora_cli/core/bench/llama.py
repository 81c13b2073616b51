"""llama.cpp as a side: a process of an environment that has llama-cpp-python, told of every turn."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import torch

from molora_cli.core.base.structure import read_structure
from molora_cli.core.bench.forwards import STEPS
from molora_cli.core.bench.material import Material
from molora_cli.core.bench.timing import Side
from molora_cli.core.convert.gguf_file import write_gguf
from molora_cli.errors import InputError, MoloraError

PLAIN, LORA = "llama.cpp", "llama.cpp-lora"
VARIABLE = "MOLORA_LLAMA_PYTHON"
_SERVER = """
import json, sys, time
import llama_cpp
o = json.loads(sys.argv[1])
clock = time.process_time if o["busy"] else time.perf_counter
room, threads = o["context"] + o["room"], o["threads"]
engine = llama_cpp.Llama(o["model"], lora_path=o["lora"], n_ctx=room, n_threads=threads,
    n_threads_batch=threads, verbose=False)
engine.eval([i % 20000 for i in range(7, 7 + o["context"])])
print("ready", llama_cpp.__version__, flush=True)
for line in sys.stdin:
    started = clock()
    for i in range(int(line)):
        engine.eval([1000 + i])
    print(clock() - started, flush=True)
"""


def python() -> str | None:
    """The interpreter that has llama-cpp-python: $MOLORA_LLAMA_PYTHON, or this one; None = none has it."""
    other = os.environ.get(VARIABLE)
    if other:
        return other
    return sys.executable if importlib.util.find_spec("llama_cpp") is not None else None


def missing(material: Material) -> str | None:
    """Why there is no such side; None where there is one."""
    if python() is None:
        return f"llama-cpp-python is not installed here, and {VARIABLE} names no Python that has it"
    if material.gguf is None or material.path is None:
        return "llama.cpp needs the base as a .gguf file: --base smollm2 or --base FILE.gguf"
    return None


class Llama:
    """One process; close it. Raises MoloraError where it does not start or stops."""

    def __init__(self, options: dict[str, object]) -> None:
        command = [str(python()), "-c", _SERVER, json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in: IO[str] = self._process.stdin
        self._out: IO[str] = self._process.stdout
        word, _, self.version = self._line().partition(" ")
        if word != "ready":
            raise MoloraError(f"llama.cpp said '{word}'", "leave it out: --sides")

    def _line(self) -> str:
        line = self._out.readline().strip()
        if not line:
            self.close()
            raise MoloraError(
                f"llama.cpp stopped (exit code {self._process.returncode})",
                "build llama-cpp-python for this processor, or leave it out: --sides",
            )
        return line

    def turn(self) -> float:
        """Seconds of STEPS tokens."""
        self._in.write(f"{STEPS}\n")
        self._in.flush()
        return float(self._line())

    def close(self) -> None:
        self._in.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def llama_sides(
    material: Material, wanted: set[str], root: Path, context: int, turns: int, threads: int, *, busy: bool
) -> tuple[list[Side], list[Llama], list[str]]:
    """Sides, processes to close, and notes on what was left out. root: for the exported adapter; busy: count
    CPU time."""
    names = [name for name in (PLAIN, LORA) if name in wanted]
    why = missing(material)
    if why is not None:
        return [], [], [f"{name} left out: {why}" for name in names]
    sides: list[Side] = []
    running: list[Llama] = []
    notes: list[str] = []
    for name in names:
        try:
            lora = _export(material, root) if name == LORA else None
            shared = {"model": str(material.gguf), "context": context, "room": STEPS * turns + 8}
            engine = Llama({**shared, "lora": lora, "threads": threads, "busy": busy})
        except (InputError, MoloraError) as error:
            notes.append(f"{name} left out: {error.message}")
            continue
        running.append(engine)
        title = f"llama.cpp ({engine.version}), {Path(str(material.gguf)).name}" + (
            ", one LoRA" if lora else ""
        )
        sides.append(Side(name, title, engine.turn, units=STEPS, timed=True))
    return sides, running, notes


def _export(material: Material, root: Path) -> str:
    """The first adapter as a .gguf file."""
    assert material.path is not None
    name = material.adapters[0]
    file = root / f"{name}.gguf"
    structure = read_structure(material.path)
    write_gguf(
        dict(material.factors[name]), structure, file, name=name, base_id=material.title, dtype=torch.float16
    )
    return str(file)
