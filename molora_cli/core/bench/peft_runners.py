"""The same adapters under PEFT: one adapter, a sum of all, Arrow and X-LoRA."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from molora_cli.core.bench.material import Material
from molora_cli.core.bench.runners import Runner
from molora_cli.core.evaluation.peft_models import arrow, xlora_model
from molora_cli.errors import InputError

SINGLE, DENSE, ARROW, XLORA = "peft-single", "peft-dense", "peft-arrow", "peft-xlora"
NAMES = (SINGLE, DENSE, ARROW, XLORA)


def peft_runners(
    material: Material, wanted: set[str], root: Path, top: int = 2
) -> tuple[list[Runner], list[str]]:
    """Runners of the wanted names, and notes on those that PEFT refuses. root: for PEFT folders of random
    adapters; top: of Arrow. Factors are kept in the base's dtype: PEFT would widen half ones, and be slower.
    """
    makers: dict[str, Callable[[], list[Runner]]] = {
        SINGLE: lambda: _loaded(material, root, [SINGLE] if DENSE not in wanted else [SINGLE, DENSE]),
        DENSE: lambda: [] if SINGLE in wanted else _loaded(material, root, [DENSE]),
        ARROW: lambda: [_arrow(material, root, top)],
        XLORA: lambda: [_xlora(material, root)],
    }
    found, notes = [], []
    for name in NAMES:
        if name in wanted:
            try:
                found += makers[name]()
            except (InputError, ValueError, TypeError, RuntimeError) as error:
                message = error.message if isinstance(error, InputError) else str(error)
                notes.append(f"{name} left out: {message}")
    return found, notes


def _loaded(material: Material, root: Path, names: list[str]) -> list[Runner]:
    from peft import PeftModel

    folders = material.folders(root)
    first, *others = folders
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(material.copy(), str(folders[first]), adapter_name=first)
        if DENSE in names:
            for name in others:
                model.load_adapter(str(folders[name]), adapter_name=name)
    model = _settled(model, material)
    count = len(folders)
    made = {
        SINGLE: Runner(SINGLE, "PEFT, one adapter", model, top=1, select=_select(model, [first])),
        DENSE: Runner(DENSE, f"PEFT, sum of {count}", model, top=count, select=_select(model, list(folders))),
    }
    return [made[name] for name in names]


def _select(model: Any, names: list[str]) -> Callable[[], None]:
    return lambda: model.base_model.set_adapter(names if len(names) > 1 else names[0], inference_mode=True)


def _arrow(material: Material, root: Path, top: int) -> Runner:
    folders = material.folders(root)
    top = min(top, len(folders))
    model = _settled(arrow(material.copy(), folders, top, 1.0), material)
    return Runner(ARROW, f"PEFT Arrow, top-{top}", model, top=top)


def _xlora(material: Material, root: Path) -> Runner:
    folders = material.folders(root)
    model = _settled(xlora_model(material.copy(), folders), material)
    notes = ["runs without a cache: the whole text, twice, for every token"]
    return Runner(XLORA, "PEFT X-LoRA", model, top=len(folders), cached=False, notes=notes)


def _settled(model: Any, material: Material) -> Any:
    model.requires_grad_(False)
    return model.to(material.base.dtype).eval()
