"""Triton kernels for the per-token mixture: a routing sort, decode, prefill, and the rule between them.

Nothing here imports triton before an op runs, so that the package loads where triton does not exist
(macOS, Windows); ask `available` first. Each op is registered with torch.library as `molora_triton::NAME`,
with a fake kernel; device code lies in the modules whose names begin with an underscore.
"""

from __future__ import annotations

import importlib.util
import os

import torch

MINIMUM = (3, 6)
CAPABILITY = (8, 0)


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1 before its import), for tests on CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available() -> str | None:
    """None where the kernels can run here, else the reason why not, one clause without a full stop."""
    # a bare folder of that name imports as an empty namespace package; only the real one has this module
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("triton.runtime") is None:
        return "triton is not installed (it exists for Linux)"
    import triton

    found = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if found < MINIMUM:
        return f"triton {triton.__version__} is older than {MINIMUM[0]}.{MINIMUM[1]}"
    if interpreted():
        return None
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device is visible to torch"
    if torch.version.hip is None and torch.cuda.get_device_capability() < CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"the GPU has compute capability {major}.{minor}, the kernels need 8.0 or newer"
    return None
