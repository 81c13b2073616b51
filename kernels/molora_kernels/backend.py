"""Which implementation runs an op: asked for by name, resolved once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from molora_kernels.cpu_build import BuildError

BACKENDS = ("torch", "cpu", "triton")

Notify = Callable[[str], None]


def resolve(name: str = "auto", *, device: str = "cpu", notify: Notify | None = None) -> str:
    """The backend that `name` stands for on a kind of device ("cpu", "cuda", ...).

    "auto" on a CPU: "cpu" where its operators are compiled. Where they are not they begin to be, beside this
    process, which goes on in "torch" at once; `notify` (None = a Python warning) is told so, or that there is
    no compiler, once. "cpu" waits for the compiler. "auto" on a GPU is "torch": the Triton kernels have not
    been measured on one. Raises ValueError for a name that is unknown or not
    available here.
    """
    if name == "auto":
        return _best(device, notify)
    if name == "cpu":
        if device != "cpu":
            raise ValueError(f"the backend 'cpu' does not run on {device}")
        failure = _cpu_failure(notify)
        if failure:
            raise ValueError(f"the CPU kernels are not available: {failure}")
        return name
    if name == "triton":
        from molora_kernels import triton_ops

        reason = triton_ops.available()
        if reason:
            raise ValueError(f"the Triton kernels cannot run here: {reason}")
        if device != "cuda" and not triton_ops.interpreted():
            raise ValueError(f"the backend 'triton' does not run on {device}")
        return name
    if name in BACKENDS:
        return name
    raise ValueError(f"there is no backend '{name}' (available: {', '.join(('auto', *BACKENDS))})")


def _best(device: str, notify: Notify | None) -> str:
    from molora_kernels import cpu_build

    if device != "cpu":
        return "torch"
    if "cpu" not in _known and not cpu_build.is_cached():
        try:
            cpu_build.start()
            message = (
                "the CPU kernels are being compiled in the background, once for this machine; "
                "until then adapters run in plain torch"
            )
        except cpu_build.BuildError as error:
            message = _missing(error)
        _tell_once(message, notify)
        return "torch"
    failure = _cpu_failure(notify)
    if failure:
        _tell_once(_missing(failure), notify)
    return "torch" if failure else "cpu"


_known: dict[str, BuildError | None] = {}
_told: set[str] = set()


def _cpu_failure(notify: Notify | None) -> BuildError | None:
    """None where the CPU operators are loaded, else why they are not; tried once per process."""
    if "cpu" not in _known:
        from molora_kernels.cpu_build import BuildError

        try:
            from molora_kernels import cpu_ops

            cpu_ops.load(notify)
            _known["cpu"] = None
        except BuildError as error:
            _known["cpu"] = error
    return _known["cpu"]


def _missing(failure: BuildError) -> str:
    return (
        f"the CPU kernels are not available ({failure}): adapters run in plain torch, which is slower; "
        f"{failure.remedy}"
    )


def _tell_once(message: str, notify: Notify | None) -> None:
    if message not in _told:
        _told.add(message)
        if notify is None:
            warnings.warn(message, stacklevel=5)
        else:
            notify(message)
