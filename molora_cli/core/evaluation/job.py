"""`molora eval` as one call: bundle and rows in, the table out as one document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from molora_cli.core.bundle.store import Bundle
from molora_cli.core.evaluation.baselines import ARROW, PEFT_MERGES, XLORA, Baseline, parse_baselines
from molora_cli.core.evaluation.cost import cache_bytes
from molora_cli.core.evaluation.document import set_document
from molora_cli.core.evaluation.harness import check_harness, run_harness
from molora_cli.core.evaluation.lab import Lab
from molora_cli.core.evaluation.lines import Measured, RouterFile
from molora_cli.core.evaluation.measure import Measurement
from molora_cli.core.evaluation.rows import evaluation_rows
from molora_cli.core.evaluation.sets import EvalSet, build_sets, read_sets
from molora_cli.core.evaluation.store import NllStore
from molora_cli.core.evaluation.tasks import TaskOptions, check_tasks, run_tasks
from molora_cli.core.evaluation.thresholds import check_sets, parse_minimum
from molora_cli.core.evaluation.tuning import tune
from molora_cli.core.evaluation.ways import parse_mode
from molora_cli.core.routed.quantise import FULL, check_weights
from molora_cli.core.router.spec import read_spec
from molora_cli.core.training.data import Example, read_domains
from molora_cli.core.training.overlap import Seen
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import cache_dir
from molora_cli.text import shorten


@dataclass(frozen=True)
class Job:
    """What the command line asks for; see `molora eval --help`.

    single: rows of each domain's own file at most, None = `limit`. tune: rows, as for `data`, that the
    baselines' settings are chosen on; tune_limit: of each set, its files sharing it. timing: also take CPU
    times. cache: keep and look up NLLs that no router decides. tasks: rows per domain to answer; None = none.
    lm_eval: tasks of lm-evaluation-harness. minimum: SET[/ROW[/DOMAIN]]=PERCENT.
    """

    data: Sequence[str] = ()
    mixed: int = 0
    baselines: Sequence[str] = ()
    routers: Sequence[Path] = ()
    modes: Sequence[str] = ("1", "2", "soft")
    train: Sequence[str] = ()
    limit: int | None = None
    single: int | None = None
    tune: Sequence[str] = ()
    tune_limit: int = 16
    timing: bool = False
    max_length: int = 640
    seed: int = 0
    draws: int = 1000
    dtype: str = "auto"
    device: str = "auto"
    backend: str = "torch"
    weights: str = FULL
    cache: bool = True
    tasks: int | None = None
    max_new_tokens: int = 256
    allow_code_execution: bool = False
    lm_eval: Sequence[str] = ()
    minimum: Sequence[str] = ()
    trust_remote_code: bool = False


def evaluate(
    bundle: Bundle,
    job: Job,
    *,
    ticker: Ticker = no_ticks,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measure what the job asks for. Returns the document that `--json` prints; `thresholds.check` reads it.

    warn: told of rows that were trained on, and of adapters that gain nothing, before the long work where
    possible. Raises InputError for options, rows or routers that do not fit.
    """
    _check(job)
    check_weights(job.weights)
    wanted = parse_baselines(job.baselines, bundle.adapters)
    _check_weights(job, wanted)
    minimum = parse_minimum(job.minimum)
    single = job.limit if job.single is None else job.single
    domains, given = read_sets(job.data, bundle.adapters, job.limit, single)
    routers = _routers(bundle, job)
    warnings: list[str] = []
    overlap = _overlap(domains, given, routers)
    if overlap["rows"]:
        warnings.append(
            f"{overlap['rows']} of {overlap['of']} rows, or their questions, are among what a router was "
            f"trained on ({', '.join(f'{n} {c}' for n, c in overlap['by_name'].items())})"
        )
    warnings += overlap.pop("unknown")
    for text in warnings:
        warn(text)
    sets = build_sets(
        domains,
        given,
        bundle.adapters,
        mixed=job.mixed,
        max_length=job.max_length,
        seed=job.seed,
        fresh=overlap.pop("fresh"),
    )
    check_sets(minimum, [s.name for s in sets])
    options = TaskOptions(job.tasks or 0, job.max_new_tokens, job.allow_code_execution)
    tasks = check_tasks(domains, given, bundle.adapters, options) if job.tasks else []
    train = _train(bundle, job)
    lab = Lab(
        bundle,
        dtype=job.dtype,
        device=job.device,
        backend=job.backend,
        weights=job.weights,
        trust_remote_code=job.trust_remote_code,
    )
    measured, notes = _tokenised(lab, sets, job)
    tuning = _tokenised(lab, _tuning_sets(bundle, job), job)[0] if job.tune else []
    store = NllStore(cache_dir() / "evaluation" if job.cache else None, lab.about)
    measurement = Measurement(lab, measured, store, train=train, timing=job.timing)
    tuned = None
    try:
        if tuning:
            wanted, tuned, refused = tune(lab, tuning, store, wanted, ticker=ticker)
            notes += refused
        measurement.run(wanted, routers, job.modes, ticker=ticker)
    finally:
        store.close()
    document: dict[str, Any] = {
        "bundle": str(bundle.path),
        "base": bundle.manifest.base.id,
        "adapters": list(bundle.adapters),
        "dtype": str(lab.dtype).removeprefix("torch."),
        "weights": lab.weights,
        "routers": {r.title: _router_facts(r) for r in routers},
        "overlap": overlap,
        "sets": {m.set.name: set_document(m, job.draws, job.seed) for m in measured},
        "cache_bytes_per_token": cache_bytes(lab.base(), measured[0].rows[0].ids[:8]) if measured else None,
    }
    if tuned is not None:
        document["tuned"] = tuned
    for name, one in document["sets"].items():
        for domain in one["without_gain"]:
            warnings.append(
                f"{name}: the adapter {domain} gains nothing on its own domain, which is left out"
            )
            warn(warnings[-1])
    if measurement.about:
        document["trained"] = measurement.about
    if tasks:
        document["tasks"] = run_tasks(lab, tasks, routers, options, ticker=ticker, note=notes.append)
    if job.lm_eval:
        document["lm_eval"] = run_harness(lab, routers, job.lm_eval, limit=job.limit, seed=job.seed)
    document["notes"] = notes + lab.notes + measurement.notes
    document["warnings"] = warnings
    return document


def _check(job: Job) -> None:
    if not job.data and not job.lm_eval:
        raise InputError("no rows were given", "give --data NAME=FILE for each adapter, or --lm-eval TASK")
    if job.lm_eval:
        check_harness()
    for name, value, least in (
        ("--limit", job.limit, 1),
        ("--single", job.single, 1),
        ("--tune-limit", job.tune_limit, 1),
        ("--mixed", job.mixed, 0),
        ("--max-length", job.max_length, 8),
        ("--draws", job.draws, 10),
        ("--tasks", job.tasks, 1),
        ("--max-new-tokens", job.max_new_tokens, 1),
    ):
        if value is not None and value < least:
            raise InputError(f"{name} {value} is too small", f"give {least} or more")
    for mode in job.modes or ("",):
        parse_mode(mode)


def _check_weights(job: Job, wanted: Sequence[Baseline]) -> None:
    """PEFT has no layer for int8 linears of ours, so what it attaches needs full weights."""
    others = [b.name for b in wanted if b.name in (*PEFT_MERGES, ARROW, XLORA)]
    if job.weights != FULL and others:
        raise InputError(
            f"--weights {shorten(job.weights)}: PEFT attaches {others[0]} to full weights only",
            "leave --weights out, or name other --baselines",
        )


def _tuning_sets(bundle: Bundle, job: Job) -> list[EvalSet]:
    """The sets of `--tune`. The files of the single-domain set share its rows."""
    names = {spec.partition("=")[0] for spec in job.tune} & set(bundle.adapters)
    share = max(1, job.tune_limit // max(1, len(names)))
    domains, given = read_sets(job.tune, bundle.adapters, job.tune_limit, share)
    return build_sets(domains, given, bundle.adapters, mixed=0, max_length=job.max_length, seed=job.seed)


def _routers(bundle: Bundle, job: Job) -> list[RouterFile]:
    """The bundle's own router, then the files given, each under a name of its own."""
    found = []
    own = bundle.router_file
    if own is not None:
        found.append(RouterFile("router", own))
    for path in job.routers:
        if not path.is_file():
            raise InputError(f"--router {shorten(str(path))} is no file", "name a router.safetensors")
        title = path.stem if path.stem != "router" else path.absolute().parent.name
        taken = {r.title for r in found}
        while title in taken:
            title += "'"
        found.append(RouterFile(title, path))
    for router in found:
        read_spec(router.path)
    return found


def _overlap(
    domains: dict[str, list[Example]],
    given: Sequence[tuple[str, list[Example]]],
    routers: Sequence[RouterFile],
) -> dict[str, Any]:
    """Rows that a router was trained on, by name; and the rows that no router was trained on ("fresh")."""
    training = {r.title: read_spec(r.path).training for r in routers}
    seen = {title: Seen(found) for title, found in training.items()}
    silent = [title for title, found in training.items() if found.get("data") and not seen[title].known]
    counts: dict[str, int] = {}
    fresh: dict[str, list[Example]] = {}
    for name, rows in [*domains.items(), *given]:
        known = [any(row in s for s in seen.values()) for row in rows]
        if any(known):
            counts[name] = sum(known)
        if name in domains:
            new = [row for row, old in zip(rows, known, strict=True) if not old]
            fresh[name] = new or list(rows)  # nothing new: a mix of what was seen, which was said
    return {
        "rows": sum(counts.values()),
        "of": sum(len(rows) for _, rows in [*domains.items(), *given]),
        "by_name": counts,
        "fresh": fresh,
        "unknown": [
            f"{title} does not say which documents it was trained on (it is older): an overlap is not found"
            for title in silent
        ],
    }


def _router_facts(router: RouterFile) -> dict[str, Any]:
    spec = read_spec(router.path)
    return {
        "file": str(router.path),
        "kind": spec.kind,
        "k": spec.stages[-1].k,
        "bytes": router.path.stat().st_size,
    }


def _train(bundle: Bundle, job: Job) -> dict[str, list[Example]]:
    return read_domains(job.train, known=bundle.adapters) if job.train else {}


def _tokenised(lab: Lab, sets: Sequence[EvalSet], job: Job) -> tuple[list[Measured], list[str]]:
    measured, notes = [], []
    for one in sets:
        rows, cut = evaluation_rows(lab.tokenizer, one.rows, one.names, job.max_length)
        if not rows:
            raise InputError(
                f"{one.name}: no row has an answer within {job.max_length} tokens", "raise --max-length"
            )
        if cut:
            notes.append(f"{one.name}: {cut} of {len(one.rows)} rows are cut to {job.max_length} tokens")
        if len(rows) < len(one.rows) - cut:
            notes.append(f"{one.name}: {len(one.rows) - len(rows)} rows have no answer to measure")
        measured.append(Measured(one, rows))
    return measured, notes
