"""Which implementation runs an op: asked for by name, resolved once."""

from __future__ import annotations

BACKENDS = ("torch",)
PLANNED = ("cpu", "triton")


def resolve(name: str = "auto") -> str:
    """The backend that `name` stands for; "auto" takes the best one that is available.

    Raises ValueError for a name that is unknown or not available in this version.
    """
    if name == "auto":
        return BACKENDS[0]
    if name in BACKENDS:
        return name
    if name in PLANNED:
        raise ValueError(f"the backend '{name}' is not available in this version (available: auto, torch)")
    raise ValueError(f"there is no backend '{name}' (available: auto, torch)")
