"""What a number was measured on: processor, threads, versions, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from molora_cli._version import __version__

RESULTS = Path("docs/benchmarks/results.csv")  # of a checkout
_PACKAGES = ("torch", "transformers", "peft", "triton")
# features that decide which kernel runs; Linux spells them so
_FEATURES = (
    *(
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx_vnni",
        "avx512_bf16",
    ),
    *("amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)


def about() -> dict[str, Any]:
    """Machine, features, versions, commit and date, as they go into a result."""
    name, features = _processor()
    return {
        "machine": name,
        "features": [f for f in _FEATURES if f in features],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": _memory(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"molora": __version__, **{p: v for p in _PACKAGES if (v := _version(p))}},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "load": _load(),
    }


def checkout() -> Path | None:
    """The checkout that this molora runs from, where the working directory lies in it; else None."""
    root = Path(__file__).resolve().parents[3]
    inside = Path.cwd().resolve().is_relative_to(root)
    return root if inside and (root / ".git").exists() and (root / RESULTS.parent).is_dir() else None


def commit() -> str:
    """Short commit of the checkout, with "+" where its code has changed since; "" outside one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return ""
    code = ("molora_cli", "kernels")
    head = _git(root, "rev-parse", "--short", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *code)
    return "" if head is None else head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> tuple[str, set[str]]:
    """Name of the processor and what it can do; the machine's kind where the system does not say."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine(), set()
    facts: dict[str, str] = {}
    for line in text.split("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    features = set((facts.get("flags") or facts.get("Features") or "").split())
    name = facts.get("model name") or platform.machine()
    family = [facts[k] for k in ("cpu family", "model") if k in facts]
    return name + (f" (family {family[0]}, model {family[1]})" if len(family) == 2 else ""), features


def _memory() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (ValueError, OSError, AttributeError):
        return None


def _load() -> float | None:
    """Processes that wanted a core during the last minute: more than the cores is a machine at work."""
    try:
        return round(os.getloadavg()[0], 1)
    except (OSError, AttributeError):
        return None
