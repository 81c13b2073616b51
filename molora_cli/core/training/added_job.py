"""`molora train-router --only NAME`: one more expert in a trained `context` router, the others untouched.

The expert gets a gate (`router.added`): a small network that tells its tokens from all others, or its closed
form. What the others' tokens look like is learnt from their rows where some are given, else from the class
statistics that the router keeps: features are drawn from N(mean_e, pooled covariance) of each expert.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.base.embedding import read_embedding
from molora_cli.core.router.added import MlpGate, append_gate
from molora_cli.core.router.context import ContextStage
from molora_cli.core.router.files import join_tensors, load_tensors, stage_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.moments import Moments
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.taps import LDA, MLP
from molora_cli.core.training.halves import one_thread
from molora_cli.core.training.overlap import united
from molora_cli.core.training.router_job import Job, base_tokenizer, read_rows, recorder
from molora_cli.core.training.router_rows import MIXED, RouterRows, RouterSettings, TokenRow, prepare
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.training.data import Example

ROWS, MIXES = 400, 600  # rows per domain and rows that change domain that are read at most
_LEARNT = 150  # rows of the new domain that join the statistics
_PLAIN = 40  # rows per domain whose tokens without a label are read
_DRAWN = 10_000  # features drawn from the statistics of a domain without rows
_CHUNK = 16
_WEAK, _LOST = 0.7, 0.02  # shares of tokens that are worth a warning


@dataclass(frozen=True)
class GateSettings:
    """How a gate's network is trained: `batch` tokens of every domain a step, linear decay of lr. guard: how
    much more a token of another domain counts than one of the new: those were there before."""

    hidden: int = 128
    steps: int = 500
    batch: int = 256
    lr: float = 2e-3
    weight_decay: float = 0.01
    smoothing: float = 0.02
    guard: float = 1.5
    seed: int = 0


@dataclass
class Added:
    """A router with one more expert, not yet written. changed: domain -> what its held-out tokens do now and
    did before; drawn: the domains that only their statistics spoke for."""

    spec: RouterSpec
    tensors: dict[str, Tensor]
    changed: dict[str, dict[str, Any]]
    drawn: list[str]
    notes: list[str]
    seconds: float


def train_only(
    bundle: Bundle,
    job: Job,
    *,
    ticker: Ticker = no_ticks,
    warn: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train `job.only` alone and write the router into the bundle; a document for `--json`.

    Raises InputError for a router, rows or options that do not fit.
    """
    name = job.only or ""
    if name not in bundle.adapters:
        raise InputError(
            f"{bundle.path} has no adapter '{shorten(name, 40)}'", f"it has {', '.join(bundle.adapters)}"
        )
    if job.resume or job.loss != "labels" or job.kind != "context":
        raise InputError(
            "--only adds one adapter to a context router, in seconds, from labels",
            "leave out --kind, --loss and --resume",
        )
    spec, file = bundle.router_spec, bundle.router_file
    place = context_place(spec, name, str(bundle.path))
    assert spec is not None and file is not None  # context_place says so
    domains = read_rows(bundle, job.data, least=1)
    tokenizer = base_tokenizer(bundle, ticker)
    with ExitStack() as stack:
        made = add_expert(
            (spec, load_tensors(file)),
            place,
            name,
            domains,
            tokenizer,
            read_embedding(bundle.base_path),
            job.settings,
            head=job.live.head,
            gate=GateSettings(steps=job.settings.steps, seed=job.settings.seed),
            ticker=ticker,
            record=recorder(job, stack),
        )
    warnings = _warnings(made, name)
    for text in warnings:
        warn(text)
    bundle.set_router(made.spec, made.tensors)
    return {
        "bundle": str(bundle.path),
        "kind": made.spec.kind,
        "only": name,
        "head": job.live.head,
        "experts": list(made.spec.stages[-1].experts),
        "changed": made.changed,
        "from_statistics": made.drawn,
        "seconds": round(made.seconds, 2),
        "warnings": warnings,
        "notes": made.notes,
    }


def _warnings(made: Added, name: str) -> list[str]:
    """What the held-out tokens say against the new column."""
    found = []
    for domain, shares in made.changed.items():
        if domain == name and shares["after"] < _WEAK:
            found.append(f"{name}: only {shares['after']:.0%} of its tokens are recognised; give more rows")
        if domain not in (name, "mixed") and shares["before"] - shares["after"] > _LOST:
            lost = shares["before"] - shares["after"]
            found.append(f"{domain}: {lost:.1%} of its tokens are no longer recognised; train with all rows")
    if made.drawn:
        found.append(
            f"no rows of {', '.join(made.drawn)}: what their tokens look like was drawn from the router's "
            "statistics, and what they lose was not measured"
        )
    return found


def context_place(spec: RouterSpec | None, name: str, where: str) -> int:
    """The number of the stage that `name` can be added to. Raises InputError where there is none."""
    train = f"molora train-router {where} --data NAME=FILE ... --force"
    if spec is None:
        raise InputError(f"{where} has no router to add '{name}' to", f"train one: {train}")
    if any(stage.params.get("prior") for stage in spec.stages):
        raise InputError(
            f"a {spec.kind} router cannot take one more adapter: its taps were trained for the present ones",
            f"train it again with all rows: {train} --kind {shorten(spec.kind, 40)}",
        )
    places = [i for i, stage in enumerate(spec.stages) if stage.kind == "context"]
    if not places:
        raise InputError(
            f"a {shorten(spec.kind, 40)} router has no column to train for one adapter alone",
            f"train a context router: {train}; a centroid router takes one with molora add --data",
        )
    if name in spec.stages[places[0]].experts:
        raise InputError(f"the router knows '{name}' already", f"train it again with all rows: {train}")
    return places[0]


def add_expert(
    router: tuple[RouterSpec, dict[str, Tensor]],
    place: int,
    name: str,
    domains: Mapping[str, Sequence[Example]],
    tokenizer: Any,
    embedding: Tensor,
    settings: RouterSettings,
    *,
    head: str = MLP,
    gate: GateSettings = GateSettings(),
    ticker: Ticker = no_ticks,
    record: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Added:
    """A router, its header and its file's tensors, with one more expert in stage number `place`.

    `name` is learnt from `domains[name]`; rows of experts that the router knows are optional. head: "mlp" or
    "lda"; see `router.added`. Every tensor of the trained experts keeps its bits. Raises InputError for a
    router or rows that do not fit.
    """
    began = time.monotonic()
    spec = router[0]
    if head not in (MLP, LDA):
        raise InputError(f"there is no head '{shorten(head, 40)}'", f"use {MLP} or {LDA}")
    if name not in domains:
        raise InputError(f"there are no rows for '{name}'", f"give --data {name}=FILE")
    stages = [stage_tensors(router[1], i) for i in range(len(spec.stages))]
    old = spec.stages[place]
    order = [*(e for e in old.experts if e in domains), name]
    limits = replace(
        settings, rows=min(settings.rows, ROWS), mixes=min(settings.mixes, MIXES) if len(order) > 1 else 0
    )
    rows = prepare({n: domains[n] for n in order}, tokenizer, limits, least=1, ticker=ticker)
    around = Surroundings(n_layers=1, embedding=embedding)
    before = ContextStage(old, stages[place], around)
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(gate.seed)
        own = _features(before, rows.train[name][:_LEARNT])[0]
        trained: MlpGate | None = None
        drawn: list[str] = []
        if head == MLP:
            groups, drawn = _groups(before, rows, old, stages[place], name)
            others = [*(groups[e] for e in old.experts), *_of_nobody(before, rows)]
            trained = fit_gate(groups[name], others, gate, ticker, record)
        stage, stages[place] = append_gate(old, stages[place], name, own, trained)
        changed = _changed(before, ContextStage(stage, stages[place], around), rows, name)
    training = dict(spec.training)
    for key, new in (("data", rows.digests), ("documents", rows.documents)):
        training[key] = {**training.get(key, {}), name: new[name]}
    training["seen"] = united(training.get("seen", {}), rows.seen)
    made = [*spec.stages[:place], stage, *spec.stages[place + 1 :]]
    grown = spec.model_copy(update={"stages": made, "training": training})
    seconds = time.monotonic() - began
    return Added(grown, join_tensors(stages), changed, drawn, rows.notes, seconds)


def _of_nobody(stage: ContextStage, rows: RouterRows) -> list[Tensor]:
    """Features (N, F) float32 of tokens without a label, one tensor, or none where there are none.

    A system prompt begins every text alike: where the new expert took it, all others would answer under it.
    """
    some = [row for group in rows.train.values() for row in group[:_PLAIN]]
    features = _features(stage, some, labelled=False)[0].float()
    return [features] if len(features) else []


def _features(
    stage: ContextStage, rows: Sequence[TokenRow], *, labelled: bool = True
) -> tuple[Tensor, Tensor]:
    """Features (N, F) float64 of the labelled tokens of rows, or of the others, and their labels (N,)."""
    features, labels = [], []
    for row in rows:
        known = (row.labels >= 0) == labelled
        found, _ = stage.features(row.ids.unsqueeze(0), None, stage.start(1))
        features.append(found[0][known])
        labels.append(row.labels[known])
    if not features:
        return torch.zeros(0, stage.net.inner.in_features, dtype=torch.float64), torch.zeros(0).long()
    return torch.cat(features), torch.cat(labels)


def _groups(
    stage: ContextStage, rows: RouterRows, spec: StageSpec, tensors: dict[str, Tensor], name: str
) -> tuple[dict[str, Tensor], list[str]]:
    """Features (N, F) float32 by expert, and the experts whose features were drawn from their statistics."""
    found: dict[str, list[Tensor]] = {n: [] for n in (*spec.experts, name)}
    everything = [row for group in rows.train.values() for row in group]
    for first in range(0, len(everything), _CHUNK):
        features, labels = _features(stage, everything[first : first + _CHUNK])
        for label in labels.unique().tolist():
            found[rows.experts[label]].append(features[labels == label].float())
    drawn = [n for n, parts in found.items() if not parts and n != name]
    if drawn:
        moments = Moments.of_tensors(tensors)
        pooled = moments.scatter / float(spec.params.get("scatter_tokens", moments.count.sum()))
        values, vectors = torch.linalg.eigh(pooled)  # few rows span no more than some directions
        factor = vectors * values.clamp(min=0).sqrt()
        for n in drawn:
            noise = torch.randn(_DRAWN, len(pooled), dtype=torch.float64)
            found[n] = [(moments.mean[spec.experts.index(n)] + noise @ factor.T).float()]
    return {n: torch.cat(parts) for n, parts in found.items()}, drawn


def fit_gate(
    own: Tensor,
    others: Sequence[Tensor],
    settings: GateSettings,
    ticker: Ticker = no_ticks,
    record: Callable[[dict[str, Any]], None] = lambda line: None,
) -> MlpGate:
    """A network that tells the features own (N, F) from those of the other experts, each as likely.

    float32 in, float64 weights out. record: called with a line of metrics every 50 steps.
    """
    gate = MlpGate(own.shape[1], settings.hidden)
    optimizer = torch.optim.AdamW(gate.parameters(), settings.lr, weight_decay=settings.weight_decay)
    groups = [own, *others]
    answer = torch.zeros(len(groups) * settings.batch)
    answer[: settings.batch] = 1.0
    answer = answer * (1 - settings.smoothing) + settings.smoothing / len(groups)
    weight = torch.full_like(answer, settings.guard)
    weight[: settings.batch] = 1.0
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * (1 - step / settings.steps)
        batch = torch.cat([g[torch.randint(len(g), (settings.batch,))] for g in groups])
        loss = F.binary_cross_entropy_with_logits(gate(batch), answer, weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        ticker(step + 1, settings.steps, f"loss {float(loss.detach()):.3f}")
        if (step + 1) % 50 == 0 or step + 1 == settings.steps:
            record({"step": step + 1, "loss": round(float(loss.detach()), 5)})
    return gate


def _changed(
    before: ContextStage, after: ContextStage, rows: RouterRows, name: str
) -> dict[str, dict[str, Any]]:
    """Per domain (and for rows that change domain), shares of labelled held-out tokens: right before and
    after, and those that the new expert takes."""
    held = any(rows.held_out[n] for n in rows.experts)
    found = {}
    for domain, group in (rows.held_out if held else rows.train).items():
        counts = {"tokens": 0, "before": 0, "after": 0, "new": 0}
        for row in group:
            known = row.labels >= 0
            labels = torch.tensor([after.experts.index(n) for n in rows.experts])[row.labels[known]]
            first, second = (_chosen(stage, row)[known] for stage in (before, after))
            counts["tokens"] += len(labels)
            counts["before"] += int((first == labels).sum())
            counts["after"] += int((second == labels).sum())
            counts["new"] += int((second == after.experts.index(name)).sum())
        if counts["tokens"]:
            shares = {key: round(counts[key] / counts["tokens"], 5) for key in ("before", "after", "new")}
            found["mixed" if domain == MIXED else domain] = {"tokens": counts["tokens"], **shares}
    return found


def _chosen(stage: ContextStage, row: TokenRow) -> Tensor:
    """The best expert of each token, (T,) index."""
    ids = row.ids.unsqueeze(0)
    scores, _ = stage.score(ids, torch.ones_like(ids, dtype=torch.bool), stage.start(1))
    return scores.logp[0, :, 0].argmax(-1)
