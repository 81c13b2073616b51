"""Settings of the baselines, chosen on rows of their own: every family at its best before it is measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from molora_cli.core.evaluation import baselines as bl
from molora_cli.core.evaluation.baselines import Baseline, usual
from molora_cli.core.evaluation.document import mean_recovered
from molora_cli.core.evaluation.lab import Lab
from molora_cli.core.evaluation.lines import BASE_ROW, Measured
from molora_cli.core.evaluation.measure import Measurement
from molora_cli.core.evaluation.store import NllStore
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

# what is tried of each family; weight 0 = 1/n each
_TRIED: dict[str, dict[str, tuple[float, ...]]] = {
    "cat": {"weight": (0, 0.4, 0.6, 1)},
    "svd": {"weight": (0, 0.5, 1)},
    "linear": {"weight": (0, 0.5, 1)},
    "ties": {"density": (0.2, 0.5), "scale": (1, 2)},
    "dare": {"density": (0.3, 0.7), "weight": (0, 0.5)},
    bl.PEFT + "linear": {"weight": (0, 0.5, 1)},
    bl.PEFT + "ties": {"density": (0.2, 0.5), "weight": (0.5, 1)},
    bl.PEFT + "dare_linear": {"density": (0.5, 0.8), "weight": (0, 0.5)},
    bl.PEFT + "dare_ties": {"density": (0.5, 0.8), "weight": (1,)},
    bl.ARROW: {"temperature": (0.3, 1, 3)},
}


def tune(
    lab: Lab,
    sets: Sequence[Measured],
    store: NllStore,
    wanted: Sequence[Baseline],
    *,
    ticker: Ticker = no_ticks,
) -> tuple[list[Baseline], dict[str, Any], list[str]]:
    """The wanted baselines with the settings that recover most of the gain, as the mean over `sets`; what was
    tried, for the document; and notes on what PEFT refused.

    A baseline whose settings were given stays as it is, and so does one without settings. Raises InputError
    where no set has anything to recover.
    """
    sets = [m for m in sets if not m.set.blended]
    if not sets:
        raise InputError(
            "--tune: these rows have nothing to recover", "give --tune NAME=FILE for each adapter"
        )
    families = [candidates(one) for one in _arrows_apart(wanted)]
    measurement = Measurement(lab, sets, store)
    measurement.run([b for family in families if len(family) > 1 for b in family], [], [], ticker=ticker)
    shares = {m.set.name: mean_recovered(m) for m in sets}
    notes = list(measurement.notes)
    for name in [name for name, values in shares.items() if values[BASE_ROW] is None]:
        notes.append(
            f"--tune: nothing was chosen on {name}, where no adapter gains anything on its own domain"
        )
        del shares[name]
    chosen, tried = [], []
    for family in families:
        found = []
        for one in family if len(family) > 1 else ():
            of = {name: values.get(one.row) for name, values in shares.items()}
            known = [v for v in of.values() if v is not None]
            if known and len(known) == len(of):
                found.append((sum(known) / len(known), one, of))
        best = max(found, key=lambda each: each[0])[1] if found else family[0]
        chosen.append(best)
        tried += [
            {"family": _family(one), "row": one.row, "recovered": mean, "sets": of, "chosen": one is best}
            for mean, one, of in found
        ]
    facts = {m.set.name: {"rows": len(m.rows), "tokens": m.tokens()} for m in sets if m.set.name in shares}
    return chosen, {"sets": facts, "tried": tried}, notes


def candidates(baseline: Baseline) -> list[Baseline]:
    """The baseline with each setting of its family; itself alone where there is nothing to choose."""
    given = {k: v for k, v in baseline.settings.items() if k != "k"}
    plain = {k: v for k, v in usual(baseline.name).items() if k != "k"}
    tried = _TRIED.get(baseline.name, {})
    if given != plain or not tried or baseline.settings.get("k") == 1:  # one adapter: no gate to temper
        return [baseline]
    combined = itertools.product(*tried.values())
    return [
        replace(baseline, settings=baseline.settings | dict(zip(tried, values, strict=True)))
        for values in combined
    ]


def _arrows_apart(wanted: Sequence[Baseline]) -> list[Baseline]:
    """Arrow's top-1 and top-2 are two families."""
    found = []
    for one in wanted:
        if one.name == bl.ARROW and not one.settings["k"]:
            found += [replace(one, settings=one.settings | {"k": k}) for k in (1, 2)]
        else:
            found.append(one)
    return found


def _family(baseline: Baseline) -> str:
    return f"arrow top-{baseline.settings['k']:g}" if baseline.name == bl.ARROW else baseline.name
