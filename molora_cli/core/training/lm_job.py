"""`train-router --loss lm`: where the heads start, their tuning through the loss, and the router's header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from molora_cli.core.router.files import join_tensors, load_tensors, stage_tensors
from molora_cli.core.router.spec import ROUTER_FILE, RouterSpec, dump_spec, parse_spec
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.router.taps import MLP
from molora_cli.core.training.live_job import CONTEXT_TAPS, surroundings
from molora_cli.core.training.lm_loop import LM_CHECKPOINT, LmSettings, Tuned, run_key, trainable, tune
from molora_cli.core.training.processes import processes
from molora_cli.core.training.router_loop import load_checkpoint
from molora_cli.core.training.router_rows import RouterRows
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from torch import Tensor

    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.routed.model import RoutedModel

LABELS, LM = "labels", "lm"
LOSSES = (LABELS, LM)
LM_KINDS = (CONTEXT_TAPS, "taps", "layer")
# Rows prepared for a run: 70 steps read some 200, drawn with replacement.
LM_ROWS, LM_MIXES = 120, 300

Router = tuple[RouterSpec, "dict[str, Tensor]"]


def check_loss(loss: str, kind: str, head: str, settings: LmSettings) -> None:
    """Raises InputError for a loss, kind and head that do not go together."""
    if loss not in LOSSES:
        raise InputError(f"there is no loss '{shorten(loss, 40)}'", f"--loss {' or '.join(LOSSES)}")
    if loss == LABELS:
        return
    if kind not in LM_KINDS:
        raise InputError(
            f"a router of kind '{shorten(kind, 40)}' is not trained through the language-model loss",
            f"--kind {', '.join(LM_KINDS)}",
        )
    if head != MLP:
        raise InputError(
            "heads in closed form are not trained through the language-model loss", "leave out --head"
        )
    settings.check()


def find_start(
    bundle: Bundle, kind: str, rows: RouterRows, settings: LmSettings, work: Path, resume: bool
) -> Router | None:
    """The router whose heads are tuned: that of an interrupted run where `resume`, else the bundle's own
    where it is of this kind over the same experts, with heads that can be trained. None = train one from the
    labels first."""
    checkpoint = work / LM_CHECKPOINT
    if resume:
        if not checkpoint.is_file():
            return None  # it was stopped while it learned from labels
        kept = load_checkpoint(checkpoint, run_key(kind, rows, settings))["keep"]
        return parse_spec(kept["spec"], str(checkpoint)), kept["tensors"]
    spec = bundle.router_spec
    if spec is None or spec.kind != kind:
        return None
    last = spec.stages[-1]
    if set(last.experts) != set(rows.experts) or last.params.get("head") != MLP:
        return None
    return spec, load_tensors(bundle.path / ROUTER_FILE)


def tune_router(
    kind: str,
    model: RoutedModel,
    rows: RouterRows,
    start: Router,
    settings: LmSettings,
    *,
    work: Path | None = None,
    resume: bool = False,
    again: str = "",
    ticker: Ticker = no_ticks,
    record: Callable[[dict[str, Any]], None] = lambda line: None,
) -> tuple[Router, Tuned]:
    """The router `start` with its heads trained through the loss; everything else in it stays as it is. The
    other arguments are those of `lm_loop.tune`."""
    spec, tensors = start
    model.router = RouterStack(spec, tensors, surroundings(model), model.adapters)
    stack, stage = trainable(model)
    tuned = tune(
        model,
        rows,
        settings,
        key=kind,
        work=work,
        keep={"spec": dump_spec(spec), "tensors": tensors},
        resume=resume,
        again=again,
        ticker=ticker,
        record=lambda line: record({"loss_of": LM, **line}),
        team=processes(),
    )
    parts = [stage_tensors(tensors, i) for i in range(len(spec.stages))]
    parts[stack.stages.index(stage)] |= stage.tensors()
    made = spec.model_copy(deep=True)
    made.training["lm"] = {"settings": asdict(settings), **asdict(tuned)}
    return (made, join_tensors(parts)), tuned
