"""Trains the heads of a live router through the base's language-model loss.

    loss = mean over counted tokens of -log p(token | routed base) + balance * L_b + z * L_z
    L_b = E sum_e f_e m_e          f_e share of tokens whose best expert is e, m_e its mean gate
    L_z = mean (logsumexp z)^2     z the logits of a head

(L_b of arXiv 2101.03961 eq. 4, L_z of arXiv 2202.08906 eq. 5; both are means over the heads.) Every expert
takes part with its softmax gate, so that the loss tells each head what another choice would have cost; in the
last third of the steps the gates are sharpened, since one expert a token runs afterwards. Base and adapters
stay as they are. Counted are completion tokens of a segment: domain labels have no other part in the loss.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molora_cli.core.router.stack import RouterStack
from molora_cli.core.router.taps import LayerStage, TapsStage
from molora_cli.core.training.adapter_loop import keep_freed_memory
from molora_cli.core.training.lm_rows import counted, draw_step, forwards, loss_pool, token_losses
from molora_cli.core.training.processes import Processes
from molora_cli.core.training.router_loop import interrupted, load_checkpoint, save_checkpoint, stop_flag
from molora_cli.core.training.router_rows import MIXED, RouterRows, TokenRow
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks

if TYPE_CHECKING:
    from molora_cli.core.routed.model import RoutedModel

LM_CHECKPOINT = "router-lm-checkpoint.pt"


@dataclass(frozen=True)
class LmSettings:
    """How heads are trained through the loss.

    tokens: of a step, prompts included; forward_tokens: padded tokens of one forward, of which a step
    accumulates as many as it needs. lr rises over `warmup` of the steps and falls along a cosine to a tenth.
    mix_share: of the rows drawn; max_length: longer rows are left out where there are others. soft:
    temperature of the gates during the first two thirds of the steps: heads that labels have trained are
    nearly sure, and a gate near 0 gets hardly any gradient. sharp: temperature at the last step, reached
    over the last third. held_out: rows per domain, and four times as many mixes; every: steps between
    measurements; patience: of them without progress.
    """

    steps: int = 70
    tokens: int = 800
    forward_tokens: int = 512
    lr: float = 1e-3
    weight_decay: float = 0.0
    warmup: float = 0.1
    mix_share: float = 0.5
    max_length: int = 448
    balance: float = 0.0
    z: float = 0.0
    soft: float = 2.0
    sharp: float = 0.5
    held_out: int = 3
    every: int = 25
    patience: int = 3
    seed: int = 0

    def check(self) -> None:
        """Raises InputError for a value out of range."""
        whole = ("steps", "tokens", "forward_tokens", "max_length", "held_out", "every", "patience")
        for name in whole:
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 1 or more", f"change {name}")
        for name in ("lr", "soft", "sharp"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be above 0", f"change {name}")
        for name in ("balance", "z", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} is {getattr(self, name)}; it must be 0 or more", f"change {name}")

    def rate(self, step: int) -> float:
        """Learning rate of step number `step`, from 0."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.lr * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

    def temperature(self, step: int) -> float:
        """Temperature of the gates at step number `step`: `soft`, then falling geometrically to `sharp`."""
        last_third = max(0.0, (step + 1) / self.steps * 3 - 2)
        return float(self.soft ** (1 - last_third) * self.sharp**last_third)


@dataclass
class Tuned:
    """How training went. start, best: held-out NLL per counted token with the gates used at run time."""

    steps: int
    best_step: int
    stopped_early: bool
    start: float | None
    best: float | None
    tokens: int
    seconds: float
    cpu_seconds: float


class Logits:
    """Collects the logits (B, T, E) of every head during a forward, for the extra losses."""

    def __init__(self, heads: Sequence[nn.Module]) -> None:
        self.seen: list[Tensor] = []
        self._handles = [head.register_forward_hook(self._keep) for head in heads]

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.append(output)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def losses(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """(L_b, L_z) of what was collected since the last call; real (B, T): tokens that are no padding."""
        seen, self.seen = [logits[real] for logits in self.seen], []
        balance, z = [], []
        for logits in seen:  # (N, E)
            gates, experts = logits.softmax(-1), logits.shape[-1]
            share = F.one_hot(logits.argmax(-1), experts).to(gates.dtype).mean(0)
            balance.append(experts * (share * gates.mean(0)).sum())
            z.append(logits.logsumexp(-1).square().mean())
        return torch.stack(balance).mean(), torch.stack(z).mean()


@torch.no_grad()
def held_out_nll(
    model: RoutedModel, groups: dict[str, list[TokenRow]], tokens: int, team: Processes
) -> dict[str, float]:
    """NLL per counted token of each group with the router as it is set."""
    found = {}
    for name, rows in groups.items():
        total = torch.zeros(2, dtype=torch.float64)  # sum of losses, tokens
        for part in team.share(forwards(rows, tokens)):
            losses = token_losses(model, part)[0].double().cpu()
            total += torch.tensor([float(losses.sum()), len(losses)])
        total = team.sum(total)
        found[name] = float(total[0] / total[1])
    return found


def tune(
    model: RoutedModel,
    rows: RouterRows,
    settings: LmSettings,
    *,
    key: str = "",
    work: Path | None = None,
    keep: dict[str, Any] | None = None,
    resume: bool = False,
    again: str = "",
    ticker: Ticker = no_ticks,
    record: Callable[[dict[str, Any]], None] = lambda line: None,
    team: Processes = Processes(),  # noqa: B008 - frozen
) -> Tuned:
    """Train the heads of the model's router in place; it ends with those of the lowest held-out NLL.

    The router is one with a single `taps` or `layer` stage. key: names the run together with rows and
    settings, for a checkpoint in the folder `work`; keep: what else goes into that (plain values and
    tensors). resume: go on from it; again: the command that does. record: called with a line of metrics a
    step. team: the processes that share the work, all of which call this. Deterministic for a seed on one
    machine and number of threads and processes. Raises InputError for a router that cannot be trained so,
    router_loop.Interrupted on Ctrl-C, MoloraError for a loss that is not finite.
    """
    settings.check()
    stack, stage = trainable(model)
    pool = loss_pool(rows, settings.max_length)
    few = settings.held_out
    groups = loss_pool(rows, settings.max_length, held_out=True)
    groups = {name: found[: few * 4 if name == MIXED else few] for name, found in groups.items()}
    key = run_key(key, rows, settings)
    checkpoint = None if work is None else work / LM_CHECKPOINT
    keep_freed_memory()
    parameters = stage.parameters()
    optimizer = torch.optim.AdamW(parameters, settings.lr, weight_decay=settings.weight_decay)
    progress: dict[str, Any] = {
        "step": 0, "tokens": 0, "start": None, "best": None, "best_nll": None, "best_step": 0, "bad": 0,
        "seconds": 0.0, "cpu": 0.0,
    }  # fmt: skip
    if resume and checkpoint is not None:
        saved = load_checkpoint(checkpoint, key)
        stage.heads.load_state_dict(saved["heads"])
        optimizer.load_state_dict(saved["optimizer"])
        progress = saved["progress"]
    wall, cpu = time.monotonic() - progress["seconds"], time.process_time() - progress["cpu"]

    def save() -> None:
        progress["seconds"], progress["cpu"] = time.monotonic() - wall, time.process_time() - cpu
        if checkpoint is not None and team.main:
            parts = {"heads": stage.heads.state_dict(), "optimizer": optimizer.state_dict()}
            content = {"key": key, "progress": progress, "keep": keep or {}, **parts}
            save_checkpoint(checkpoint, content)

    def measure() -> dict[str, float]:
        _as_run(stack)
        found = held_out_nll(model, groups, settings.forward_tokens, team)
        logits.seen.clear()
        _note_best(progress, stage, found)
        return found

    with ExitStack() as exits:
        logits = Logits(list(stage.heads))
        exits.callback(logits.remove)
        exits.enter_context(_trained(stack, stage))
        stop = exits.enter_context(stop_flag())
        if progress["start"] is None and groups:
            record({"step": 0, "held_out": _rounded(measure())})
            progress["start"] = progress["best_nll"]
        while progress["step"] < settings.steps and progress["bad"] < settings.patience:
            if team.any(stop()):
                save()
                raise interrupted(progress["step"], settings.steps, checkpoint, again)
            step = progress["step"]
            batch = draw_step(pool, settings, step)
            loss = _step(model, stack, optimizer, logits, batch, settings, step, team)
            progress["step"] += 1
            progress["tokens"] += sum(len(row.ids) for row in batch)
            line: dict[str, Any] = {"step": step + 1, "loss": round(loss, 5), "lr": settings.rate(step)}
            if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
                if groups:
                    line["held_out"] = _rounded(measure())
                save()
            line["tokens"], line["seconds"] = progress["tokens"], round(time.monotonic() - wall, 2)
            record(line)
            ticker(step + 1, settings.steps, f"loss {loss:.3f}")
        if progress["best"] is not None:
            stage.heads.load_state_dict(progress["best"])
    if checkpoint is not None and team.main:
        checkpoint.unlink(missing_ok=True)
    return Tuned(
        steps=progress["step"],
        best_step=progress["best_step"] if groups else progress["step"],
        stopped_early=progress["step"] < settings.steps,
        start=progress["start"],
        best=progress["best_nll"],
        tokens=progress["tokens"],
        seconds=time.monotonic() - wall,
        cpu_seconds=time.process_time() - cpu,
    )


def run_key(key: str, rows: RouterRows, settings: LmSettings) -> str:
    """What a checkpoint must agree with to be gone on from."""
    return hashlib.sha256(f"{key} {rows.digest} {sorted(asdict(settings).items())}".encode()).hexdigest()


def trainable(model: RoutedModel) -> tuple[RouterStack, TapsStage | LayerStage]:
    """The model's router and its stage with heads. Raises InputError where there is not one such stage."""
    stack = model.router
    stages = [s for s in (stack.live if stack is not None else []) if isinstance(s, TapsStage | LayerStage)]
    if stack is None or len(stages) != 1 or len(stack.live) != 1:
        raise InputError(
            "only routers with one taps or layer stage are trained through the language-model loss",
            "use --kind context+taps, taps or layer",
        )
    return stack, stages[0]


@contextmanager
def _trained(stack: RouterStack, stage: TapsStage | LayerStage) -> Iterator[None]:
    """Within, the heads' parameters carry gradients; afterwards gates are what the router's file says."""
    stack.differentiable = True
    stage.heads.requires_grad_(True)
    try:
        yield
    finally:
        stack.differentiable = False
        _as_run(stack)
        stage.heads.requires_grad_(False)


def _as_run(stack: RouterStack) -> None:
    stack.k, stack.temperature = None, None  # type: ignore[assignment]


def _step(
    model: RoutedModel,
    stack: RouterStack,
    optimizer: torch.optim.Optimizer,
    logits: Logits,
    rows: Sequence[TokenRow],
    settings: LmSettings,
    step: int,
    team: Processes,
) -> float:
    """One update; the mean NLL of its counted tokens."""
    for group in optimizer.param_groups:
        group["lr"] = settings.rate(step)
    total = sum(int(counted(row).sum()) for row in rows)
    optimizer.zero_grad(set_to_none=True)
    nll = 0.0
    parts = forwards(rows, settings.forward_tokens)
    stack.k, stack.temperature = len(stack.experts), settings.temperature(step)
    for part in team.share(parts):
        losses, real = token_losses(model, part)
        loss = losses.sum() / total
        nll += float(loss.detach())
        if settings.balance or settings.z:
            balance, z = logits.losses(real.to(stack.device))
            loss = loss + ((settings.balance * balance + settings.z * z) / len(parts)).to(loss)
        logits.seen.clear()
        loss.backward()  # type: ignore[no-untyped-call]
    nll = float(team.sum(torch.tensor(nll, dtype=torch.float64)))
    if not math.isfinite(nll):
        raise MoloraError(f"the loss of step {step + 1} is {nll}", "try a lower learning rate or float32")
    team.sum_gradients(_parameters(optimizer))
    torch.nn.utils.clip_grad_norm_(_parameters(optimizer), 1.0)
    optimizer.step()
    return nll


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _note_best(progress: dict[str, Any], stage: TapsStage | LayerStage, found: dict[str, float]) -> None:
    """Keep the heads with the lowest held-out NLL: half the mean of the domains, half the mixes."""
    if not found:
        return
    alone = [value for name, value in found.items() if name != MIXED]
    halves = ([sum(alone) / len(alone)] if alone else []) + ([found[MIXED]] if MIXED in found else [])
    nll = sum(halves) / len(halves)
    if progress["best_nll"] is None or nll < progress["best_nll"]:
        progress["best_nll"], progress["best_step"], progress["bad"] = nll, progress["step"], 0
        progress["best"] = {name: value.detach().clone() for name, value in stage.heads.state_dict().items()}
    else:
        progress["bad"] += 1


def _rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in found.items()}
