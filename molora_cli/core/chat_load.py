"""An adapter that joins a running chat: read, checked and attached, while everything else stays loaded."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from molora_cli.errors import InputError
from molora_cli.refs import check_adapter_name, parse_ref
from molora_cli.text import shorten


@dataclass(frozen=True)
class Loaded:
    """What became of it. modules: how many it changes; seconds: reading, checking and attaching; notes: what
    the reader of the adapter has to say."""

    name: str
    modules: int
    seconds: float
    notes: tuple[str, ...]


def load_adapter(model: Any, name: str, place: str) -> Loaded:
    """Attach the adapter at `place` (path or hub id) to a routed model under `name`.

    The bundle on disk stays as it is. The router goes on choosing among the adapters it knows; the new one
    takes tokens where it is named (`only`). Raises InputError: a name that is taken or no name, an adapter
    that does not fit the base or has no effect; the model is then as it was.
    """
    from molora_cli.core.adapter.factors import load_factors
    from molora_cli.core.adapter.read import read_adapter
    from molora_cli.core.base.structure import read_structure

    start = time.perf_counter()
    check_adapter_name(name)
    taken = {known.lower(): known for known in model.adapters}
    if name.lower() in taken:
        raise InputError(
            f"there is an adapter '{taken[name.lower()]}' already",
            f"use another name: /load my-{name}={shorten(place)}",
        )
    if model.bundle is None:
        raise InputError("this model came without a bundle, so its base's files are not known", "use add()")
    adapter = read_adapter(name, parse_ref(place), read_structure(model.bundle.base_path))
    model.add(name, load_factors(adapter))
    return Loaded(name, len(adapter.modules), time.perf_counter() - start, adapter.notes)
