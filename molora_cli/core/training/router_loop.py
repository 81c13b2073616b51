"""Trains a context router on labelled tokens: no forward of the base, seconds on a laptop.

Bit-for-bit reproducible on one machine: a step's rows follow from seed and step, dropout from torch's
generator, whose state is kept in the checkpoint, so that a resumed run ends in the weights of an
uninterrupted one. It runs on one thread: the matrices are small, and the result must not depend on the number
of cores.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.context import ContextNet, normalised, sample_rows
from molora_cli.core.router.features import (
    causal_averages,
    centre_and_scale,
    context_features,
    start_averages,
)
from molora_cli.core.router.files import tensor_name
from molora_cli.core.router.moments import Moments
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.training.ahead import fit_ahead
from molora_cli.core.training.router_rows import RouterRows, RouterSettings, TokenRow, collate, draw_batch
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks

CHECKPOINT = "router-checkpoint.pt"
_STATISTICS_ROWS = 150  # rows per domain that the additive statistics are taken from


class Interrupted(MoloraError):
    """Ctrl-C during training, after the checkpoint was written."""

    exit_code = 130


@dataclass
class Trained:
    """A trained router: the file's header and tensors (`stages.0.*`), and how training went."""

    spec: RouterSpec
    tensors: dict[str, Tensor]
    steps: int
    best_step: int
    stopped_early: bool
    seconds: float


class _Batches:
    """Projects only the distinct tokens of a batch: most tokens of a text repeat."""

    def __init__(self, embedding: Tensor, cuts: Sequence[int]) -> None:
        self.cuts = torch.zeros(len(embedding), dtype=torch.bool)
        self.cuts[[i for i in cuts if 0 <= i < len(embedding)]] = True
        self.sampled, self.samples = sample_rows(embedding)
        self.centre, self.scale = centre_and_scale(embedding)
        self.table = normalised(embedding, self.centre, self.scale)  # (V, d) float32

    def features(self, net: ContextNet, ids: Tensor, wanted: Tensor) -> Tensor:
        """Context features (N, (1 + D) p) of the N tokens of ids (B, T) where `wanted` (B, T) is True,
        differentiable in the projection."""
        distinct, where = torch.unique(ids, return_inverse=True)
        e = F.embedding(where, net.project(self.table[distinct]))
        state = start_averages(ids.shape[0], net.projection, net.decays, dtype=torch.float32)
        averages, _ = causal_averages(e, None, state, net.decays)
        return context_features(e[wanted], averages[wanted])

    def all(self, net: ContextNet, ids: Tensor) -> Tensor:
        """Those of all tokens, (B, T, (1 + D) p)."""
        return self.features(net, ids, torch.ones_like(ids, dtype=torch.bool)).view(*ids.shape, -1)


def _loss(
    net: ContextNet, batches: _Batches, rows: Sequence[TokenRow], smoothing: float
) -> tuple[Tensor, float]:
    """Mean cross-entropy over labelled tokens, and the share of them that is right."""
    ids, labels, _ = collate(rows)
    known = labels >= 0
    logits = net(batches.features(net, ids, known))
    right = (logits.detach().argmax(-1) == labels[known]).float().mean()
    return F.cross_entropy(logits, labels[known], label_smoothing=smoothing), float(right)


@torch.no_grad()
def _held_out(
    net: ContextNet, batches: _Batches, rows: RouterRows, size: int = 16
) -> dict[str, tuple[float, float]]:
    """Loss and token accuracy per held-out group, the mixes among them."""
    net.eval()
    found = {}
    for name, group in rows.held_out.items():
        ordered = sorted(group, key=lambda r: len(r.ids))
        total = right = tokens = 0.0
        for first in range(0, len(ordered), size):
            part = ordered[first : first + size]
            n = float(sum(int((r.labels >= 0).sum()) for r in part))
            loss, accuracy = _loss(net, batches, part, 0.0)
            total, right, tokens = total + float(loss) * n, right + accuracy * n, tokens + n
        if tokens:
            found[name] = (total / tokens, right / tokens)
    net.train()
    return found


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def stop_flag() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag that the loop reads between steps; the second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def handler(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.tmp")
    torch.save(content, beside)
    with beside.open("rb") as file:
        os.fsync(file.fileno())
    beside.replace(path)


def load_checkpoint(path: Path, key: str) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(
            f"there is nothing to resume: {path} does not exist", "run the command without --resume"
        )
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises pickle, zip, runtime and key errors for a damaged file
        raise InputError(f"{path} cannot be read", "run the command without --resume") from error
    if found.get("key") != key:
        raise InputError(
            f"{path} belongs to other data or settings",
            "resume with the same --data, --seed and --steps, or run without --resume",
        )
    return found


def train_context(
    rows: RouterRows,
    embedding: Tensor,
    settings: RouterSettings,
    *,
    work: Path | None = None,
    resume: bool = False,
    again: str = "",
    ticker: Ticker = no_ticks,
    record: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Trained:
    """Train on `rows` for the input embedding (V, d) of the base.

    work: folder of the checkpoint (None: none is kept, Ctrl-C loses the run); resume: go on from it. again:
    the command that resumes, for the message. record: called with one line of metrics per evaluation.
    Raises Interrupted on Ctrl-C, InputError where there is nothing to resume or it belongs to another run.
    """
    began = time.monotonic()
    key = f"{rows.digest} {settings.digest()}"
    checkpoint = work / CHECKPOINT if work is not None else None
    batches = _Batches(embedding, rows.cuts)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(settings.seed)
        net = ContextNet(
            embedding.shape[1],
            len(rows.experts),
            projection=settings.projection,
            hidden=settings.hidden,
            decays=settings.decays,
            dropout=settings.dropout,
        ).train()
        optimizer = torch.optim.AdamW(net.parameters(), settings.lr, weight_decay=settings.weight_decay)
        progress: dict[str, Any] = {"step": 0, "best": None, "best_loss": None, "best_step": 0, "bad": 0}
        if resume and checkpoint is not None:
            saved = load_checkpoint(checkpoint, key)
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["rng"])
            progress = saved["progress"]

        def keep() -> None:
            if checkpoint is not None:
                parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                save_checkpoint(
                    checkpoint, {"key": key, "rng": torch.get_rng_state(), "progress": progress, **parts}
                )

        with stop_flag() as stop:
            while progress["step"] < settings.steps and progress["bad"] < settings.patience:
                if stop():
                    keep()
                    raise interrupted(progress["step"], settings.steps, checkpoint, again)
                loss, accuracy = _step(net, optimizer, batches, rows, settings, progress["step"])
                progress["step"] += 1
                ticker(progress["step"], settings.steps, f"loss {loss:.3f}")
                if progress["step"] % settings.every == 0 or progress["step"] == settings.steps:
                    found = _held_out(net, batches, rows)
                    _note_best(progress, net, found)
                    keep()
                    record(
                        _line(progress["step"], loss, accuracy, found, optimizer, time.monotonic() - began)
                    )
        if progress["best"] is not None:
            net.load_state_dict(progress["best"])
        net.eval()
        if settings.ahead is not None:  # a short run looks ahead as briefly
            ahead = replace(settings.ahead, steps=min(settings.ahead.steps, 2 * settings.steps))
            net.ahead = fit_ahead(net, batches.all, batches.cuts, rows, ahead, ticker=ticker)
        trained = _finish(net, batches, rows, settings)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    early = progress["step"] < settings.steps
    return Trained(
        *trained, progress["step"], progress["best_step"] or progress["step"], early, time.monotonic() - began
    )


def _step(
    net: ContextNet,
    optimizer: torch.optim.Optimizer,
    batches: _Batches,
    rows: RouterRows,
    settings: RouterSettings,
    step: int,
) -> tuple[float, float]:
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * (1 - step / settings.steps)
    loss, accuracy = _loss(net, batches, draw_batch(rows, settings, step), settings.smoothing)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), accuracy


def _note_best(progress: dict[str, Any], net: ContextNet, found: Mapping[str, tuple[float, float]]) -> None:
    """Keep the weights with the lowest held-out loss, every domain and the mixes counting alike."""
    if not found:
        return
    mean = sum(loss for loss, _ in found.values()) / len(found)
    if progress["best_loss"] is None or mean < progress["best_loss"]:
        progress["best_loss"], progress["best_step"], progress["bad"] = mean, progress["step"], 0
        progress["best"] = {name: value.detach().clone() for name, value in net.state_dict().items()}
    else:
        progress["bad"] += 1


def _line(
    step: int,
    loss: float,
    accuracy: float,
    found: Mapping[str, tuple[float, float]],
    optimizer: torch.optim.Optimizer,
    seconds: float,
) -> dict[str, Any]:
    return {
        "step": step,
        "loss": round(loss, 5),
        "accuracy": round(accuracy, 5),
        "lr": optimizer.param_groups[0]["lr"],
        "held_out": {n: {"loss": round(v, 5), "accuracy": round(a, 5)} for n, (v, a) in found.items()},
        "seconds": round(seconds, 2),
    }


def interrupted(step: int, steps: int, checkpoint: Path | None, again: str) -> MoloraError:
    if checkpoint is None:
        return Interrupted(f"stopped at step {step} of {steps}; nothing was kept", "run the command again")
    return Interrupted(
        f"stopped at step {step} of {steps}; kept in {checkpoint}", again or "resume with --resume"
    )


@torch.no_grad()
def _statistics(net: ContextNet, batches: _Batches, rows: RouterRows) -> dict[str, Tensor]:
    """The features' `Moments`, so that a closed-form expert can be added later without the old rows.

    Products are float32 (the features are layer-normed, a few thousand rows), sums float64.
    """
    experts, width = len(rows.experts), net.inner.in_features
    count = torch.zeros(experts, dtype=torch.float64)
    total = torch.zeros(experts, width, dtype=torch.float64)
    square = torch.zeros(width, width, dtype=torch.float64)
    chosen = [row for group in rows.train.values() for row in group[:_STATISTICS_ROWS]]
    chosen.sort(key=lambda r: len(r.ids))
    for first in range(0, len(chosen), 16):
        ids, labels, _ = collate(chosen[first : first + 16])
        known = labels >= 0
        found = batches.features(net, ids, known)  # (N, F)
        square += (found.T @ found).double()
        count += torch.bincount(labels[known], minlength=experts)
        total.index_add_(0, labels[known], found.double())
    mean = total / count.clamp(min=1).unsqueeze(1)
    scatter = square - (mean * count.unsqueeze(1)).T @ mean
    return Moments(count, mean, scatter).tensors()


def _finish(
    net: ContextNet, batches: _Batches, rows: RouterRows, settings: RouterSettings
) -> tuple[RouterSpec, dict[str, Tensor]]:
    """Header and tensors of the router file."""
    stage = StageSpec(
        kind="context",
        experts=list(rows.experts),
        k=settings.top_k,
        margin=settings.margin,
        params={
            "decays": list(settings.decays),
            "projection": settings.projection,
            "hidden": settings.hidden,
            "scale": batches.scale,
            "sampled": batches.sampled,
            **({"ahead": {"units": net.ahead.units, "cuts": list(rows.cuts)}} if net.ahead else {}),
        },
    )
    training = {"data": dict(rows.digests), "documents": dict(rows.documents), "settings": asdict(settings)}
    training["seen"] = dict(rows.seen)
    digest = hashlib.sha256(batches.samples.bfloat16().view(torch.int16).numpy().tobytes()).hexdigest()
    spec = RouterSpec(stages=[stage], training=training, embedding=digest)
    own = {**net.state_dict(), "centre": batches.centre.float(), "samples": batches.samples}
    own |= _statistics(net, batches, rows)
    return spec, {tensor_name(0, name): value.contiguous() for name, value in own.items()}
