"""Train one LoRA adapter with PEFT on the completion tokens of chat rows.

What makes it quick on a CPU: the head, which dwarfs a small model's layers, is evaluated on completion
positions only; batches hold rows of like length; freed memory is kept for the next step.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.training.encode import Encoded
from molora_cli.errors import InputError, MoloraError
from molora_cli.out import Ticker, no_ticks

# Batches whose rows are sorted by length together: enough for little padding, few enough to stay random.
_POOL_BATCHES = 24


@dataclass(frozen=True)
class TrainSettings:
    """How an adapter is trained. tokens: budget counted with prompts and template; epochs wins where given.

    target: PEFT's target_modules ("all-linear" or module names). lr rises over `warmup` steps, a quarter of
    all at most, and falls linearly to zero. batch_tokens: padded tokens per step.
    save_dtype: precision of the written weights; they are rounded to it before the final measurement.
    """

    rank: int = 4
    alpha: float = 8.0
    target: str | tuple[str, ...] = "all-linear"
    tokens: int = 150_000
    epochs: float | None = None
    lr: float = 1e-3
    warmup: int = 20
    batch_tokens: int = 1200
    max_length: int = 512
    grad_clip: float = 1.0
    seed: int = 0
    save_dtype: str = "bfloat16"

    def check(self) -> None:
        """Raises InputError for a value out of range."""
        for name in ("rank", "alpha", "tokens", "lr", "batch_tokens", "max_length", "grad_clip", "epochs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                flag = name.replace("_", "-")
                raise InputError(f"{flag} must be above 0, not {value}", f"give --{flag} another value")
        if self.save_dtype not in ("bfloat16", "float16", "float32"):
            raise InputError(
                f"save-dtype '{self.save_dtype}' is not known", "use bfloat16, float16 or float32"
            )


@dataclass(frozen=True)
class TrainResult:
    """What came out. NLL: nats per completion token on the held-out rows; None where there are none."""

    steps: int
    tokens: int
    completion_tokens: int
    seconds: float
    nll_base: float | None
    nll: float | None
    parameters: int


def plan_batches(lengths: Sequence[int], settings: TrainSettings) -> list[list[int]]:
    """Row numbers per step, the same for the same seed: shuffled, then batched with rows of like length.

    lengths: tokens per row. A row longer than `batch_tokens` is a batch of its own. Ends at the token budget
    (real tokens, padding not counted) or after `epochs`.
    """
    rng = random.Random(settings.seed)
    budget = sum(lengths) * settings.epochs if settings.epochs is not None else settings.tokens
    plan: list[list[int]] = []
    done = 0
    while True:
        order = list(range(len(lengths)))
        rng.shuffle(order)
        for batch in _one_pass(order, lengths, settings.batch_tokens, rng):
            plan.append(batch)
            done += sum(lengths[i] for i in batch)
            if done >= budget:
                return plan


def _one_pass(
    order: list[int], lengths: Sequence[int], batch_tokens: int, rng: random.Random
) -> Iterator[list[int]]:
    mean = sum(lengths) / len(lengths)
    pool = max(1, round(_POOL_BATCHES * batch_tokens / mean))
    for first in range(0, len(order), pool):
        rows = sorted(order[first : first + pool], key=lambda i: lengths[i])
        batches: list[list[int]] = [[]]
        for i in rows:
            if batches[-1] and lengths[i] * (len(batches[-1]) + 1) > batch_tokens:
                batches.append([])
            batches[-1].append(i)
        rng.shuffle(batches)
        yield from batches


class AdapterTrainer:
    """A base with one fresh PEFT LoRA adapter, and the steps that train it.

    model: a transformers causal LM; it is wrapped in place. pad_id: any valid token id. init: a LoRA folder
    whose deltas, cut to the rank by SVD, are the start.
    Raises InputError where the target names no module of the base.
    """

    def __init__(self, model: Any, settings: TrainSettings, pad_id: int, init: Path | None = None) -> None:
        from peft import LoraConfig, get_peft_model

        settings.check()
        keep_freed_memory()
        torch.manual_seed(settings.seed)
        self.settings = settings
        self.pad_id = pad_id
        target = settings.target if isinstance(settings.target, str) else list(settings.target)
        # readers that take only whole numbers are common
        alpha: Any = int(settings.alpha) if float(settings.alpha).is_integer() else settings.alpha
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=alpha,
            target_modules=target,
            task_type="CAUSAL_LM",
        )
        try:
            with warnings.catch_warnings():  # of transformers, about how PEFT calls it
                warnings.simplefilter("ignore", FutureWarning)
                self.model = get_peft_model(model, config)
        except ValueError as error:
            raise InputError(
                f"the base has no modules named {target}: {error}",
                "name its linear modules, or use all-linear",
            ) from error
        self.init = init
        if init is not None:
            start_from(self.model, init)
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.step = 0

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def losses(self, rows: Sequence[Encoded]) -> Tensor:
        """NLL of every completion token of the batch, (N,) float32; row by row, in order.

        Rows are padded on the right: a causal model's earlier positions do not see it, so no mask is needed.
        """
        longest = max(len(r.ids) for r in rows)
        ids = torch.full((len(rows), longest), self.pad_id)
        wanted = torch.zeros(len(rows), longest, dtype=torch.bool)  # position t predicts token t + 1
        for b, row in enumerate(rows):
            ids[b, : len(row.ids)] = torch.tensor(row.ids)
            wanted[b, : len(row.ids) - 1] = torch.tensor(row.completion[1:], dtype=torch.bool)
        targets = ids[:, 1:][wanted[:, :-1]].to(self.device)
        ids, wanted = ids.to(self.device), wanted.to(self.device)
        with _head_on(self.model.get_base_model(), wanted):
            logits = self.model(input_ids=ids, use_cache=False).logits
        logits = logits[0] if logits.shape[:2] == (1, len(targets)) else logits[wanted]
        return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")

    def train_step(self, rows: Sequence[Encoded], total_steps: int) -> float:
        """One optimiser step on the batch; returns its mean NLL. MoloraError where it is not finite."""
        self.model.train()
        rising = max(1, min(self.settings.warmup, total_steps // 4))  # a short run has to get there too
        warm = min(1.0, (self.step + 1) / rising)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * warm * (1 - self.step / total_steps)
        loss = self.losses(rows).mean()
        if not torch.isfinite(loss):
            raise MoloraError(f"the loss is not finite at step {self.step + 1}", "use a lower --lr")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.settings.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return float(loss.detach())

    @torch.no_grad()
    def round_weights(self) -> None:
        """Rounds the adapter to the precision it is written in, so that what is measured is what is saved."""
        for parameter in self.parameters.values():
            parameter.copy_(parameter.to(getattr(torch, self.settings.save_dtype)))

    @torch.no_grad()
    def nll(self, rows: Sequence[Encoded], *, adapter: bool = True) -> float | None:
        """Mean NLL per completion token over the rows, with or without the adapter; None without rows."""
        self.model.eval()
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids))
        total, count = 0.0, 0
        off = contextlib.nullcontext() if adapter else self.model.disable_adapter()
        with off:
            for first in range(0, len(order), 8):
                losses = self.losses([rows[i] for i in order[first : first + 8]])
                total += float(losses.double().sum())
                count += len(losses)
        return total / count if count else None

    # -- interruption ---------------------------------------------------------
    def save_state(self, folder: Path, digest: str, seconds: float) -> None:
        """Everything that a later `load_state` needs to go on as if nothing had happened."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"p.{n}": p.detach().cpu().contiguous() for n, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if parameter in self.optimizer.state:
                    tensors[f"{key}.{name}"] = self.optimizer.state[parameter][key].cpu().contiguous()
        meta = {"digest": digest, "step": str(self.step), "seconds": str(seconds)}
        save_file(tensors, folder / "state.new", metadata=meta)
        (folder / "state.new").replace(folder / "state.safetensors")

    def load_state(self, folder: Path, digest: str) -> float | None:
        """Seconds trained so far, after restoring; None where the folder has no state of this very run."""
        from safetensors import safe_open

        path = folder / "state.safetensors"
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            if meta.get("digest") != digest:
                return None
            self.step = int(meta["step"])
            for name, parameter in self.parameters.items():
                parameter.data.copy_(file.get_tensor(f"p.{name}"))
                if self.step:
                    state = {
                        k: file.get_tensor(f"{k}.{name}").to(parameter.device)
                        for k in ("exp_avg", "exp_avg_sq")
                    }
                    self.optimizer.state[parameter] = {"step": torch.tensor(float(self.step)), **state}
        return float(meta["seconds"])


def start_from(peft_model: Any, folder: Path) -> None:
    """Sets the adapter to the best approximation of another LoRA's deltas at its own rank (Eckart-Young).

    Per module: s B A = U S V^T; A = sqrt(S) V^T and B = U sqrt(S) / s_new with the largest singular values.
    Raises InputError where the folder is no plain LoRA or touches other modules.
    """
    from peft.tuners.lora import LoraLayer

    try:
        peft_model.load_adapter(str(folder), "source")
    except Exception as error:  # PEFT raises many kinds for a folder it cannot read
        raise InputError(
            f"cannot start from {folder}: {error}", "give the folder of a plain LoRA of this base"
        ) from error
    if peft_model.peft_config["source"].use_dora:
        raise InputError(f"cannot start from {folder}: it is a DoRA adapter", "give a plain LoRA")
    for name, module in peft_model.named_modules():
        if isinstance(module, LoraLayer):
            layer: Any = module
            if ("source" in layer.lora_A) != ("default" in layer.lora_A):
                raise InputError(
                    f"cannot start from {folder}: it targets other modules ({name})", "set --target"
                )
            _truncate(layer)
    peft_model.delete_adapter("source")
    peft_model.set_adapter("default")


@torch.no_grad()
def _truncate(layer: Any) -> None:
    """Sets "default" of one LoRA layer to the cut deltas of "source"; rows of A to spare keep their start."""
    a, b = layer.lora_A["source"].weight.double(), layer.lora_B["source"].weight.double()
    left, r_left = torch.linalg.qr(b)  # (out, r), (r, r)
    right, r_right = torch.linalg.qr(a.T)  # (in, r), (r, r)
    u, s, vt = torch.linalg.svd(layer.scaling["source"] * r_left @ r_right.T)
    rank = min(layer.r["default"], len(s))
    root = s[:rank].sqrt()
    new_a, new_b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    new_b.zero_()
    new_a[:rank] = (root[:, None] * vt[:rank] @ right.T).to(new_a)
    new_b[:, :rank] = (left @ u[:, :rank] * root / layer.scaling["default"]).to(new_b)


@contextlib.contextmanager
def _head_on(model: Any, wanted: Tensor) -> Iterator[None]:
    """Within, the output head sees only the hidden states at `wanted` (B, T): logits are (1, N, V)."""
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _module, args: (args[0][wanted][None], *args[1:]))
    try:
        yield
    finally:
        handle.remove()


def keep_freed_memory() -> None:
    """Tells glibc to keep freed blocks: every step asks for the same large ones, and under contention mapping
    them anew costs more than the arithmetic. Nothing happens with another C library."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            libc = ctypes.CDLL("libc.so.6")
            libc.mallopt(-4, 0)  # M_MMAP_MAX: no separate mappings
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def run(
    trainer: AdapterTrainer,
    rows: Sequence[Encoded],
    held_out: Sequence[Encoded],
    *,
    state: Path,
    metrics: Path,
    val_every: int = 0,
    ticker: Ticker = no_ticks,
) -> TrainResult:
    """Trains to the budget and measures before and after. `metrics` gets a JSON line a step.

    val_every: steps between measures on the held-out rows, "nll" of the step's line; 0 for none.
    state: folder that keeps an interrupted run; the same rows and settings go on from it. Raises InputError
    without rows that have completion tokens, MoloraError for a loss that is not finite.
    """
    rows = [r for r in rows if any(r.completion[1:])]
    held_out = [r for r in held_out if any(r.completion[1:])]
    if not rows:
        raise InputError(
            "no row has a completion: nothing to learn", "rows need a message with role 'assistant'"
        )
    plan = plan_batches([len(r.ids) for r in rows], trainer.settings)
    digest = _digest(trainer, rows)
    nll_base = trainer.nll(held_out, adapter=False)
    earlier = trainer.load_state(state, digest) or 0.0
    begun = saved = time.monotonic()
    mean: float | None = None
    torch.set_flush_denormal(True)  # to compute with denormal numbers is slow
    try:
        with metrics.open("a" if trainer.step else "w", encoding="utf-8") as log:
            while trainer.step < len(plan):
                batch = [rows[i] for i in plan[trainer.step]]
                loss = trainer.train_step(batch, len(plan))
                mean = loss if mean is None else 0.95 * mean + 0.05 * loss
                elapsed = earlier + time.monotonic() - begun
                line = {"step": trainer.step, "loss": round(loss, 5), "seconds": round(elapsed, 2)}
                try:
                    if held_out and val_every and trainer.step % val_every == 0:
                        paused, nll = time.monotonic(), trainer.nll(held_out)
                        assert nll is not None  # there are rows
                        line["nll"] = round(nll, 5)
                        begun += time.monotonic() - paused  # it is no part of the training's time
                finally:  # a step that was made is written, interrupted or not
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                ticker(trainer.step, len(plan), f"loss {mean:.3f}")
                if time.monotonic() - saved > 60:
                    trainer.save_state(state, digest, elapsed)
                    saved = time.monotonic()
    except KeyboardInterrupt:
        trainer.save_state(state, digest, earlier + time.monotonic() - begun)
        raise
    finally:
        torch.set_flush_denormal(False)  # of the whole thread, whatever runs in it later
    seconds = earlier + time.monotonic() - begun
    trainer.round_weights()
    trained = [rows[i] for batch in plan for i in batch]
    return TrainResult(
        steps=len(plan),
        tokens=sum(len(r.ids) for r in trained),
        completion_tokens=sum(sum(r.completion[1:]) for r in trained),
        seconds=seconds,
        nll_base=nll_base,
        nll=trainer.nll(held_out),
        parameters=sum(p.numel() for p in trainer.parameters.values()),
    )


def _digest(trainer: AdapterTrainer, rows: Sequence[Encoded]) -> str:
    start = None if trainer.init is None else str(trainer.init)
    text = json.dumps([asdict(trainer.settings), start, [r.ids for r in rows]])
    return hashlib.sha256(text.encode()).hexdigest()
