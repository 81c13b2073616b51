"""molora: several LoRA adapters of one base model, every token takes the adapter it needs.

The names below are loaded on first use: importing `molora_cli` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from molora_cli._version import __version__

if TYPE_CHECKING:
    from molora_cli.core.routed.model import RoutedModel, load
    from molora_cli.core.routed.route import Route
    from molora_cli.core.trace import Trace

__all__ = ["Route", "RoutedModel", "Trace", "__version__", "load"]

_HOMES = {
    "load": "molora_cli.core.routed.model",
    "RoutedModel": "molora_cli.core.routed.model",
    "Route": "molora_cli.core.routed.route",
    "Trace": "molora_cli.core.trace",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'molora_cli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
