"""From times to what is said of them: medians, ratios within rounds, shares of what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from molora_cli.core.bench.timing import Side, Times, ratios, spread

READ, PRODUCT = "reading", "product"  # names of the two ceilings


def side_documents(
    sides: Sequence[Side], times: Mapping[str, Times], references: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """One entry per side that is no ceiling. references: side -> the sides that it is held against."""
    probes = {side.name: side for side in sides if side.name in (READ, PRODUCT)}
    found = []
    for side in sides:
        taken = [t for t in times[side.name] if t is not None]
        own = spread(taken)
        if side.name in probes or own is None:
            continue
        said = dict(side.after()) if side.after is not None else {}
        held = {}
        for name in references.get(side.name, ()):
            ratio = spread(ratios(times[side.name], times[name])) if name in times else None
            if ratio is not None:
                held[name] = ratio.document()
        found.append(
            {
                "name": side.name,
                "title": side.title,
                "seconds": own.document(),
                "ratios": held,
                "gb_per_s": None if side.moved is None else side.moved / own.median / 1e9,
                "of_reading": _share(side.moved, side, probes.get(READ), times),
                "gflop_per_s": None if side.flops is None else side.flops / own.median / 1e9,
                "of_product": _share(side.flops, side, probes.get(PRODUCT), times),
                "bytes": side.moved,
                "flops": side.flops,
                **said,
                "notes": list(said.get("notes", [])),
            }
        )
    return found


def ceiling_documents(sides: Sequence[Side], times: Mapping[str, Times]) -> dict[str, dict[str, Any]]:
    """What the two probes reached: bytes or operations a second, in thousands of millions."""
    found = {}
    for side in sides:
        if side.name in (READ, PRODUCT):
            amount = side.moved if side.moved is not None else side.flops
            reached = spread(
                [amount / t / 1e9 for t in times[side.name] if t is not None and amount is not None]
            )
            if reached is not None:
                unit = "GB/s" if side.moved is not None else "GFLOP/s"
                found[side.name] = {"title": side.title, "unit": unit, **reached.document()}
    return found


def _share(amount: float | None, side: Side, probe: Side | None, times: Mapping[str, Times]) -> float | None:
    """What a side reaches of a ceiling: median over rounds of its rate over the probe's in the same round."""
    if amount is None or probe is None:
        return None
    limit = probe.moved if probe.moved is not None else probe.flops
    shares = spread([r * amount / (limit or 1) for r in ratios(times[probe.name], times[side.name])])
    return None if shares is None else shares.median
