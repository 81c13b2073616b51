"""`molora train-router` as one call: bundle and rows in, router in the bundle and a report out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molora_cli.core.base.embedding import read_embedding
from molora_cli.core.base.model import load_tokenizer
from molora_cli.core.router.context import ContextStage
from molora_cli.core.router.files import join_tensors, stage_tensors
from molora_cli.core.router.kinds import BASE_EXPERT, Surroundings
from molora_cli.core.router.sequence import SequenceStage, answer_marker, fit_sequence
from molora_cli.core.router.spec import RouterSpec
from molora_cli.core.training.data import Example, conflicts, read_domains
from molora_cli.core.training.leakage import leaks
from molora_cli.core.training.live_job import (
    CONTEXT_TAPS,
    LIVE_KINDS,
    LiveSettings,
    attached_model,
    live_score,
    measured_rows,
    train_live,
)
from molora_cli.core.training.lm_job import (
    LABELS,
    LM,
    LM_MIXES,
    LM_ROWS,
    check_loss,
    find_start,
    tune_router,
)
from molora_cli.core.training.lm_loop import LM_CHECKPOINT, LmSettings
from molora_cli.core.training.metrics import Measured, data_warnings, measure, result_warnings
from molora_cli.core.training.processes import processes
from molora_cli.core.training.router_loop import CHECKPOINT, Trained, train_context
from molora_cli.core.training.router_rows import RouterRows, RouterSettings, prepare
from molora_cli.core.training.weak_labels import ROWS as WEAK_ROWS
from molora_cli.core.training.weak_labels import Weak, label_rows, read_unlabelled
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from torch import Tensor

    from molora_cli.core.bundle.store import Bundle

KINDS = ("context", *LIVE_KINDS, "sequence")
GIVEN, FROM_ADAPTERS = "given", "from-adapters"
_SHOWN_CONFLICTS = 3


@dataclass
class Job:
    """What the command line asks for. work: folder of the checkpoint, beside the bundle where None; again:
    the command that resumes; metrics: JSON Lines file. loss: "labels", or "lm": heads that labels have
    trained are tuned through the base's loss, as `lm` says. only: the one adapter to train, in the bundle's
    context router; see `added_job`. labels: "given", or "from-adapters": see `weak_labels`."""

    data: Sequence[str]
    settings: RouterSettings = field(default_factory=RouterSettings)
    live: LiveSettings = field(default_factory=LiveSettings)
    kind: str = "context"
    loss: str = LABELS
    lm: LmSettings = field(default_factory=LmSettings)
    work: Path | None = None
    resume: bool = False
    force: bool = False
    metrics: Path | None = None
    again: str = ""
    only: str | None = None
    labels: str = GIVEN


@dataclass
class Report:
    """A trained router, already in the bundle. document: for `--json`."""

    measured: Measured
    warnings: list[str]
    notes: list[str]
    document: dict[str, Any]


def work_folder(bundle: Bundle) -> Path:
    """Where a run that was interrupted waits: beside the bundle, never inside it."""
    path = bundle.path.resolve()
    return path.parent / f".{path.name}.train-router"


def train_router(
    bundle: Bundle,
    job: Job,
    *,
    ticker: Ticker = no_ticks,
    warn: Callable[[str], None] = lambda text: None,
) -> Report:
    """Train a router on labelled rows and write it into the bundle.

    Where several processes were launched together all of them call this; see `processes`. ticker: sees the
    rows being read, then the steps. warn: called for what is wrong with the data before training starts, and
    with the router after it. Raises InputError for rows, names or options that do not fit;
    router_loop.Interrupted on Ctrl-C.
    """
    _check(bundle, job)
    main = processes().main  # the one that writes
    job = job if main else replace(job, metrics=None)
    weak = None if job.labels == GIVEN else _weak_labels(bundle, job, ticker)
    domains = read_rows(bundle, job.data) if weak is None else weak.domains
    warnings = _data_warnings(bundle, domains)
    for text in warnings:
        warn(text)
    tokenizer = base_tokenizer(bundle, ticker)
    changing = weak.mixed if weak is not None else []
    rows = prepare(domains, tokenizer, _row_settings(job), changing=changing, ticker=ticker)
    work = job.work or work_folder(bundle)
    with ExitStack() as stack:
        record = recorder(job, stack)
        trained, measured = _trained(bundle, job, rows, tokenizer, work, ticker, record)
        trained.spec.tokenizer = bundle.manifest.base.fingerprint.tokenizer
        trained.spec.training["held_out"] = measured.document()
        if weak is not None:
            trained.spec.training["labels"] = {"from": FROM_ADAPTERS, "agreement": weak.agreement}
        record({"step": trained.steps, "final": measured.document()})
    if main:
        bundle.set_router(trained.spec, trained.tensors)
        _remove(work)
    found = result_warnings(measured)
    for text in found:
        warn(text)
    document = {
        "bundle": str(bundle.path),
        "kind": job.kind,
        "loss": job.loss,
        "experts": list(rows.experts),
        "k": job.settings.top_k,
        "steps": trained.steps,
        "best_step": trained.best_step,
        "stopped_early": trained.stopped_early,
        "seconds": round(trained.seconds, 2),
        "documents": rows.documents,
        **measured.document(),
        **({"lm": trained.spec.training["lm"]} if job.loss == LM else {}),
        "warnings": warnings + found,
        "notes": rows.notes,
    }
    return Report(measured, warnings + found, rows.notes, document)


def base_tokenizer(bundle: Bundle, ticker: Ticker = no_ticks) -> Any:
    """The tokenizer of the bundle's base. Raises InputError where it has none."""
    base_path = bundle.find_base(ticker=ticker)
    tokenizer = load_tokenizer(base_path)
    if tokenizer is None:
        raise InputError(
            f"the base {base_path} has no tokenizer", "put its tokenizer.json beside its weights"
        )
    return tokenizer


def _weak_labels(bundle: Bundle, job: Job, ticker: Ticker) -> Weak:
    """The rows with the labels that the bundle's own adapters give them."""
    most = min(job.settings.rows, WEAK_ROWS) * len(bundle.adapters)
    rows = read_unlabelled(job.data, most, job.settings.seed)
    tokenizer = base_tokenizer(bundle, ticker)
    model = attached_model(bundle, tokenizer)
    return label_rows(model, tokenizer, rows, job.settings.max_length, ticker=ticker)


def _row_settings(job: Job) -> RouterSettings:
    """Rows cost a forward each where hidden states are read: no more are prepared than are used."""
    if job.kind not in LIVE_KINDS or job.kind == CONTEXT_TAPS:
        return job.settings
    count, mixes = job.live.rows, job.live.mixes
    if job.loss == LM:
        count, mixes = max(count, LM_ROWS), max(mixes, LM_MIXES)
    wanted = round(count / (1 - job.settings.val_share)) + 1
    return replace(job.settings, rows=min(job.settings.rows, wanted), mixes=min(job.settings.mixes, mixes))


def _trained(
    bundle: Bundle,
    job: Job,
    rows: RouterRows,
    tokenizer: Any,
    work: Path,
    ticker: Ticker,
    record: Callable[[dict[str, Any]], None],
) -> tuple[Trained, Measured]:
    """A router of the kind that is asked for, and what it does on held-out rows."""
    began = time.monotonic()
    embedding = read_embedding(bundle.base_path)
    around = Surroundings(n_layers=1, embedding=embedding)
    context, start = None, None
    if job.loss == LM:
        start = find_start(bundle, job.kind, rows, job.lm, work, job.resume)
    if job.kind in ("context", CONTEXT_TAPS) and start is None:
        context = train_context(
            rows,
            embedding,
            job.settings,
            work=work if processes().main else None,
            resume=job.resume,
            again=job.again,
            ticker=ticker,
            record=record,
        )
    if job.kind == "context":
        assert context is not None
        stage = ContextStage(context.spec.stages[0], stage_tensors(context.tensors, 0), around)
        return context, measure(stage, rows)
    if job.kind == "sequence":
        labelled = [(row, i) for i, name in enumerate(rows.experts) for row in rows.train[name]]
        marker = answer_marker(tokenizer)
        spec, own = fit_sequence(embedding, labelled, rows.experts, marker=marker, seed=job.settings.seed)
        made = _as_trained(rows, RouterSpec(stages=[spec]), join_tensors([own]), began)
        return made, measure(SequenceStage(spec, own, around), rows)
    model = attached_model(bundle, tokenizer)
    known = None if context is None else (context.spec, context.tensors)
    resume = job.resume and start is not None
    if start is None:
        start = train_live(job.kind, model, rows, job.settings, job.live, context=known, ticker=ticker)
        start[0].training["live"] = asdict(job.live)
    made = _as_trained(rows, *start, began, context)
    if job.loss == LM:
        (made.spec, made.tensors), tuned = tune_router(
            job.kind,
            model,
            rows,
            start,
            job.lm,
            work=work,
            resume=resume,
            again=job.again,
            ticker=ticker,
            record=record,
        )
        made.steps, made.best_step, made.stopped_early = tuned.steps, tuned.best_step, tuned.stopped_early
        made.seconds = time.monotonic() - began
    return made, measure(live_score(model, made.spec, made.tensors), measured_rows(rows))


def _as_trained(
    rows: RouterRows,
    spec: RouterSpec,
    tensors: dict[str, Tensor],
    began: float,
    context: Trained | None = None,
) -> Trained:
    spec.training.setdefault("data", dict(rows.digests))
    spec.training.setdefault("documents", dict(rows.documents))
    seconds = time.monotonic() - began
    steps, best, early = (0, 0, False)
    if context is not None:
        steps, best, early = context.steps, context.best_step, context.stopped_early
    return Trained(spec, tensors, steps, best, early, seconds)


def _check(bundle: Bundle, job: Job) -> None:
    if job.kind not in KINDS:
        raise InputError(
            f"train-router trains no router of kind '{shorten(job.kind, 40)}'",
            f"--kind {', '.join(KINDS)}; without training: molora attach-router BUNDLE --kind ...",
        )
    if job.labels not in (GIVEN, FROM_ADAPTERS):
        raise InputError(f"--labels is '{shorten(job.labels, 40)}'", f"it can be {GIVEN} or {FROM_ADAPTERS}")
    check_loss(job.loss, job.kind, job.live.head, job.lm)
    if not job.data:
        raise InputError("no training rows were given", "give --data NAME=FILE once for each adapter")
    if bundle.manifest.routing is not None and not job.force:
        raise InputError(
            f"{bundle.path} has a router already ({shorten(bundle.manifest.routing.kind, 40)})",
            "--force replaces it",
        )
    settings = job.settings
    if not 0 <= settings.margin <= 1 or (settings.margin and job.kind != "context"):
        raise InputError(
            f"a margin of {settings.margin:g} cannot be for --kind {job.kind}",
            "it is a difference of probabilities, 0 to 1, of a context router",
        )
    if settings.steps < 1 or settings.top_k < 1 or not 0 <= settings.val_share < 1:
        raise InputError(
            f"steps {settings.steps}, top-k {settings.top_k} and val-share {settings.val_share} cannot be",
            "steps and top-k are 1 or more, val-share is from 0 to below 1",
        )
    if job.metrics is not None and job.metrics.exists() and not (job.force or job.resume):
        raise InputError(f"{job.metrics} is there already", "--force replaces it")


def read_rows(bundle: Bundle, data: Sequence[str], least: int = 2) -> dict[str, list[Example]]:
    """Rows per expert in the bundle's order, `least` experts or more; "base" is the model without an
    adapter."""
    specs = [BASE_EXPERT + text[4:] if text.startswith("base=") else text for text in data]
    order = [*bundle.adapters, BASE_EXPERT]
    found = read_domains(specs, known=order)
    domains = {name: found[name] for name in order if name in found}
    if len(domains) < least:
        only = next(iter(domains), "")
        raise InputError(
            f"only '{only}' has rows; a router needs two domains or more to choose between",
            "give --data NAME=FILE once for each adapter",
        )
    return domains


def _data_warnings(bundle: Bundle, domains: Mapping[str, Sequence[Example]]) -> list[str]:
    documents = {name: len({row.contents for row in rows}) for name, rows in domains.items()}
    formats = {
        name: {"text" if r.text is not None else "messages" for r in rows} for name, rows in domains.items()
    }
    warnings = data_warnings(documents, bundle.adapters, formats)
    twice = conflicts({name: list(rows) for name, rows in domains.items()})
    if twice:
        more = f" (and {len(twice) - _SHOWN_CONFLICTS} more)" if len(twice) > _SHOWN_CONFLICTS else ""
        shown = "; ".join(twice[:_SHOWN_CONFLICTS])
        warnings.append(f"the same row stands under two names: {shown}{more}")
    return warnings + leaks(domains)


def recorder(job: Job, stack: ExitStack) -> Callable[[dict[str, Any]], None]:
    if job.metrics is None:
        return lambda line: None
    file = stack.enter_context(job.metrics.open("a" if job.resume else "w", encoding="utf-8"))

    def record(line: dict[str, Any]) -> None:
        file.write(json.dumps(line, allow_nan=False) + "\n")
        file.flush()

    return record


def _remove(work: Path) -> None:
    """The folder of a run that is done; what somebody else put there stays."""
    for name in (CHECKPOINT, LM_CHECKPOINT):
        (work / name).unlink(missing_ok=True)
    if work.is_dir() and not any(work.iterdir()):
        work.rmdir()
