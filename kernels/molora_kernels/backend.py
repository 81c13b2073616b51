"""Which implementation runs an op: asked for by name, resolved once."""

from __future__ import annotations

import warnings
from collections.abc import Callable

BACKENDS = ("torch", "cpu")
PLANNED = ("triton",)

Notify = Callable[[str], None]


def resolve(name: str = "auto", *, device: str = "cpu", notify: Notify | None = None) -> str:
    """The backend that `name` stands for on a kind of device ("cpu", "cuda", ...).

    "auto" on a CPU: "cpu" where its operators are cached or a compiler is found, else "torch", told once
    through `notify` (None = a Python warning). Raises ValueError for a name that is unknown or not available
    here.
    """
    if name == "auto":
        if device != "cpu":
            return "torch"
        failure = _cpu_failure(notify)
        if failure:
            _tell_once(failure, notify)
        return "torch" if failure else "cpu"
    if name == "cpu":
        if device != "cpu":
            raise ValueError(f"the backend 'cpu' does not run on {device}")
        failure = _cpu_failure(notify)
        if failure:
            raise ValueError(f"the CPU kernels are not available: {failure}")
        return name
    if name in BACKENDS:
        return name
    available = ", ".join(("auto", *BACKENDS))
    if name in PLANNED:
        raise ValueError(f"the backend '{name}' is not available in this version (available: {available})")
    raise ValueError(f"there is no backend '{name}' (available: {available})")


_known: dict[str, str | None] = {}
_told: set[str] = set()


def _cpu_failure(notify: Notify | None) -> str | None:
    """None where the CPU operators are loaded, else why they are not; tried once per process."""
    if "cpu" not in _known:
        from molora_kernels.cpu_build import BuildError

        try:
            from molora_kernels import cpu_ops

            cpu_ops.load(notify)
            _known["cpu"] = None
        except BuildError as error:
            _known["cpu"] = str(error)
    return _known["cpu"]


def _tell_once(failure: str, notify: Notify | None) -> None:
    message = (
        f"the CPU kernels are not available ({failure}): adapters run in plain torch, which is slower; "
        "install g++ or clang, or set CXX"
    )
    if message not in _told:
        _told.add(message)
        if notify is None:
            warnings.warn(message, stacklevel=4)
        else:
            notify(message)
