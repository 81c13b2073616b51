"""A measured set as the document that `--json` prints and the views show."""

from __future__ import annotations

from typing import Any

from molora_cli.core.evaluation.lines import BASE_ROW, OWN_ROW, Line, Measured
from molora_cli.core.evaluation.tally import Bootstrap, Means, Recovered, difference, recovered

_COMPARED = ("adapter", "baseline", "oracle", "router")


def mean_recovered(measured: Measured) -> dict[str, float | None]:
    """Row -> share of the gain recovered, mean over domains, without an interval; None = there is none."""
    bootstrap = Bootstrap(measured.documents, draws=1)
    means = {title: bootstrap.means(line.tally) for title, line in measured.lines.items()}
    base, own = means[BASE_ROW], means[OWN_ROW]
    return {t: recovered(base, m, own).mean.document()["value"] for t, m in means.items()}


def set_document(measured: Measured, draws: int, seed: int) -> dict[str, Any]:
    """One set. NLLs in nats per completion token, shares as fractions; each value with its 95 % interval.

    "rows": the table; "first_router": the row of the first router as its file says; "differences": each
    router's rows minus each other row, paired over documents: recovered, or where nothing can be recovered
    NLL. "without_gain": domains whose adapter gains nothing.
    """
    bootstrap = Bootstrap(measured.documents, draws=draws, seed=seed)
    names = measured.set.names
    used = [i for i in range(len(names)) if any(r.has(i) for r in measured.rows)]
    blended = measured.set.blended
    means = {t: bootstrap.means(line.tally) for t, line in measured.lines.items()}
    overall = {t: bootstrap.overall(line.tally) for t, line in measured.lines.items()}
    shares: dict[str, Recovered] = {}
    without = []
    if not blended:
        base, own = means[BASE_ROW], means[OWN_ROW]
        shares = {t: recovered(base, found, own) for t, found in means.items()}
        singles = [i for i in used if i < measured.set.adapters]
        without = [names[i] for i in singles if not base.value[i] > own.value[i]]
    rows = []
    for title, line in measured.lines.items():
        rows.append(_row(line, means[title], overall[title], shares.get(title), used, measured))
    return {
        "documents": int(bootstrap.weights.shape[1]),
        "rows_measured": len(measured.rows),
        "tokens": measured.tokens(),
        "domains": [names[i] for i in used],
        "blended": blended,
        "without_gain": without,
        "rows": rows,
        "first_router": next((r["name"] for r in rows if r["group"] == "router" and r["default"]), None),
        "differences": _differences(measured, shares, overall, used),
    }


def _row(
    line: Line,
    means: Means,
    overall: Means,
    share: Recovered | None,
    used: list[int],
    measured: Measured,
) -> dict[str, Any]:
    names = measured.set.names
    row: dict[str, Any] = {
        "name": line.title,
        "group": line.group,
        "default": line.default,
        "nll": {names[i]: means.interval(i).document() for i in used},
        "nll_per_token": overall.interval(0).document(),
        "recovered": None,
        "passes": line.passes,
        "caches": line.caches,
        "time": line.time,
        "routing": None if line.observed is None else line.observed.document(names),
    }
    if share is not None:
        row["recovered"] = {
            "mean": share.mean.document(),
            "domains": {names[i]: share.interval(i).document() for i in used if i < measured.set.adapters},
        }
    return row


def _differences(
    measured: Measured, shares: dict[str, Recovered], overall: dict[str, Means], used: list[int]
) -> list[dict[str, Any]]:
    names = measured.set.names
    singles = [i for i in used if i < measured.set.adapters]
    found = []
    for router in [x for x in measured.lines.values() if x.group == "router"]:
        for other in [x for x in measured.lines.values() if x.group in _COMPARED and x is not router]:
            one: dict[str, Any] = {"router": router.title, "baseline": other.title}
            if shares:
                mine, its = shares[router.title], shares[other.title]
                one |= {"of": "recovered", **mine.minus(its).document()}
                one["domains"] = {names[i]: mine.minus_at(its, i).document() for i in singles}
            else:
                one |= {"of": "nll", **difference(overall[router.title], overall[other.title]).document()}
            found.append(one)
    return found
