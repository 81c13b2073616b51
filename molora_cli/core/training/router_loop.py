"""Trains a context router on labelled tokens: no forward of the base, seconds on a laptop.

Bit-for-bit reproducible on one machine: a step's rows and dropout follow from seed and step, so that a
resumed run ends in the weights of an uninterrupted one. A step runs in two halves, see `halves`: the result
does not depend on the number of cores.
"""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.files import tensor_name
from molora_cli.core.router.moments import Moments
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.training.adapter_loop import keep_freed_memory
from molora_cli.core.training.ahead import fit_ahead
from molora_cli.core.training.context_batches import ContextBatches
from molora_cli.core.training.halves import (
    Part,
    dropped,
    generator,
    in_order_of_length,
    mean_gradients,
    split,
    threads,
)
from molora_cli.core.training.router_rows import RouterRows, RouterSettings, TokenRow, draw_batch
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks

CHECKPOINT = "router-checkpoint.pt"
_STEPS = "halves"  # how a step is taken: a run begun in another way would not end in the same router
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


def _part(
    net: ContextNet,
    batches: ContextBatches,
    rows: Sequence[TokenRow],
    smoothing: float = 0.0,
    dropout: float = 0.0,
    draws: torch.Generator | None = None,
) -> Part:
    """Cross-entropy over the rows' labelled tokens. draws: where the dropout of hidden units comes from."""
    labels = torch.cat([row.labels for row in rows])
    known = labels >= 0
    hidden = net.hidden(batches.features(net, [row.ids for row in rows], known))
    logits = net.outer(hidden if draws is None else dropped(hidden, dropout, draws))
    right = int((logits.detach().argmax(-1) == labels[known]).sum())
    loss = F.cross_entropy(logits, labels[known], label_smoothing=smoothing, reduction="sum")
    return Part(loss, len(logits), right)


def _held_out(
    net: ContextNet, batches: ContextBatches, rows: RouterRows, pool: Executor
) -> dict[str, tuple[float, float]]:
    """Loss and token accuracy per held-out group, the mixes among them."""

    @torch.no_grad()
    def measure(part: Sequence[TokenRow]) -> Part:
        return _part(net, batches, part)

    found = {}
    for name, group in rows.held_out.items():
        parts = list(pool.map(measure, in_order_of_length(group)))
        tokens = sum(p.tokens for p in parts)
        if tokens:
            found[name] = (sum(float(p.loss) for p in parts) / tokens, sum(p.right for p in parts) / tokens)
    return found


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
            f"{path} belongs to other data or settings, or to another version of molora",
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
    workers: int | None = None,
    ticker: Ticker = no_ticks,
    record: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Trained:
    """Train on `rows` for the input embedding (V, d) of the base.

    work: folder of the checkpoint (None: none is kept, Ctrl-C loses the run); resume: go on from it. again:
    the command that resumes, for the message. workers: threads, which change no bit of the result; None: two,
    where torch may use two cores. record: called with one line of metrics per evaluation.
    Raises Interrupted on Ctrl-C, InputError where there is nothing to resume or it belongs to another run.
    """
    began = time.monotonic()
    key = f"{rows.digest} {settings.digest()} {_STEPS}"
    checkpoint = work / CHECKPOINT if work is not None else None
    keep_freed_memory()
    batches = ContextBatches(embedding, rows.cuts, settings.decays)
    with torch.random.fork_rng(devices=[]), threads(workers) as pool:
        torch.manual_seed(settings.seed)
        net = ContextNet(
            embedding.shape[1],
            len(rows.experts),
            projection=settings.projection,
            hidden=settings.hidden,
            decays=settings.decays,
        )
        optimizer = torch.optim.AdamW(net.parameters(), settings.lr, weight_decay=settings.weight_decay)
        progress: dict[str, Any] = {"step": 0, "best": None, "best_loss": None, "best_step": 0, "bad": 0}
        if resume and checkpoint is not None:
            saved = load_checkpoint(checkpoint, key)
            net.load_state_dict(saved["net"])
            optimizer.load_state_dict(saved["optimizer"])
            progress = saved["progress"]

        def keep() -> None:
            if checkpoint is not None:
                parts = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                save_checkpoint(checkpoint, {"key": key, "progress": progress, **parts})

        with stop_flag() as stop:
            while progress["step"] < settings.steps and progress["bad"] < settings.patience:
                if stop():
                    keep()
                    raise interrupted(progress["step"], settings.steps, checkpoint, again)
                loss, accuracy = _step(net, optimizer, batches, rows, settings, progress["step"], pool)
                progress["step"] += 1
                ticker(progress["step"], settings.steps, f"loss {loss:.3f}")
                if progress["step"] % settings.every == 0 or progress["step"] == settings.steps:
                    found = _held_out(net, batches, rows, pool)
                    _note_best(progress, net, found)
                    keep()
                    record(
                        _line(progress["step"], loss, accuracy, found, optimizer, time.monotonic() - began)
                    )
        if progress["best"] is not None:
            net.load_state_dict(progress["best"])
        if settings.ahead is not None:  # a short run looks ahead as briefly
            ahead = replace(settings.ahead, steps=min(settings.ahead.steps, 2 * settings.steps))
            net.ahead = fit_ahead(net, batches, rows, ahead, pool, seed=settings.seed, ticker=ticker)
        trained = _finish(net, batches, rows, settings, pool)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    early = progress["step"] < settings.steps
    return Trained(
        *trained, progress["step"], progress["best_step"] or progress["step"], early, time.monotonic() - began
    )


def _step(
    net: ContextNet,
    optimizer: torch.optim.Optimizer,
    batches: ContextBatches,
    rows: RouterRows,
    settings: RouterSettings,
    step: int,
    pool: Executor,
) -> tuple[float, float]:
    for group in optimizer.param_groups:
        group["lr"] = settings.lr * (1 - step / settings.steps)
    parts = [
        partial(
            _part,
            net,
            batches,
            half,
            settings.smoothing,
            settings.dropout,
            generator(settings.seed, step, number),
        )
        for number, half in enumerate(split(draw_batch(rows, settings, step)))
    ]
    loss, accuracy = mean_gradients(pool, net.parameters(), parts)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return loss, accuracy


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


def _statistics(
    net: ContextNet, batches: ContextBatches, rows: RouterRows, pool: Executor
) -> dict[str, Tensor]:
    """The features' `Moments`, so that a closed-form expert can be added later without the old rows.

    Products are float32 (the features are layer-normed, a few thousand rows), sums float64.
    """
    experts, width = len(rows.experts), net.inner.in_features

    @torch.no_grad()
    def sums(part: Sequence[TokenRow]) -> tuple[Tensor, Tensor, Tensor]:
        labels = torch.cat([row.labels for row in part])
        known = labels >= 0
        found = batches.features(net, [row.ids for row in part], known)  # (N, F)
        total = torch.zeros(experts, width, dtype=torch.float64)
        total.index_add_(0, labels[known], found.double())
        return torch.bincount(labels[known], minlength=experts), total, (found.T @ found).double()

    chosen = [row for group in rows.train.values() for row in group[:_STATISTICS_ROWS]]
    count = torch.zeros(experts, dtype=torch.float64)
    total = torch.zeros(experts, width, dtype=torch.float64)
    square = torch.zeros(width, width, dtype=torch.float64)
    for own in pool.map(sums, in_order_of_length(chosen)):
        for whole, part in zip((count, total, square), own, strict=True):
            whole += part
    mean = total / count.clamp(min=1).unsqueeze(1)
    scatter = square - (mean * count.unsqueeze(1)).T @ mean
    return Moments(count, mean, scatter).tensors()


def _finish(
    net: ContextNet, batches: ContextBatches, rows: RouterRows, settings: RouterSettings, pool: Executor
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
    own |= _statistics(net, batches, rows, pool)
    return spec, {tensor_name(0, name): value.contiguous() for name, value in own.items()}
