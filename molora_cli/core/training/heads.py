"""Fits the heads of `taps`, `layer` and `hidden` routers to hidden states: an MLP by a few hundred steps, or
linear discriminant analysis in closed form with additive statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.moments import Moments
from molora_cli.core.router.spec import StageSpec
from molora_cli.core.router.taps import HIDDEN, LDA, MLP, TapHead
from molora_cli.core.training.states import States
from molora_cli.errors import InputError

SHRINKAGE = 0.1


@dataclass(frozen=True)
class HeadSettings:
    """How the MLP of one tap is trained: steps of `batch` tokens, AdamW with a linearly falling rate."""

    steps: int = 300
    batch: int = 512
    lr: float = 2e-3
    weight_decay: float = 0.01
    smoothing: float = 0.02
    hidden: int = HIDDEN
    seed: int = 0


def fit_mlp(
    states: States,
    experts: int,
    settings: HeadSettings,
    *,
    tick: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Tensor]:
    """One trained head per tap of `states`: the tensors `taps.<i>.*` of the stage, from the input up.

    The last layer starts at zero, so that training starts from equal gates. Deterministic for a seed on one
    machine. tick: called with the steps done over all taps and the loss.
    """
    found: dict[str, Tensor] = {}
    done = 0
    for number, tap in enumerate(sorted(states.hidden)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed + number)
            x = states.hidden[tap]  # (N, d) float16
            width = 0 if states.prior is None else states.prior.shape[1]
            head = TapHead(x.shape[1], experts, prior=width, hidden=settings.hidden)
            torch.nn.init.zeros_(head.outer.weight)
            torch.nn.init.zeros_(head.outer.bias)
            optimizer = torch.optim.AdamW(head.parameters(), settings.lr, weight_decay=settings.weight_decay)
            for step in range(settings.steps):
                for group in optimizer.param_groups:
                    group["lr"] = settings.lr * (1 - step / settings.steps)
                pick = torch.randint(len(states), (settings.batch,))
                prior = None if states.prior is None else states.prior[pick]
                logits = head(x[pick].float(), prior)
                loss = F.cross_entropy(logits, states.labels[pick], label_smoothing=settings.smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                done += 1
                if done % 20 == 0:
                    tick(done, float(loss.detach()))
        found |= {f"taps.{number}.{name}": value.detach() for name, value in head.state_dict().items()}
    return found


def fit_lda(
    states: States,
    experts: Sequence[str],
    *,
    shrinkage: float = SHRINKAGE,
    known: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Closed-form heads per tap with their statistics: tensors `taps.<i>.*`.

    known: tensors of a stage over the first of `experts`, to which these states are added; the result is what
    fitting all at once would give. Raises InputError for an expert without a token.
    """
    found: dict[str, Tensor] = {}
    for number, tap in enumerate(sorted(states.hidden)):
        prefix = f"taps.{number}."
        x = states.hidden[tap].double()
        if known is None:
            moments = Moments.empty(len(experts), x.shape[1])
        else:
            own = {k.removeprefix(prefix): t for k, t in known.items() if k.startswith(prefix)}
            moments = Moments.of_tensors(own)
            moments = moments.with_classes(len(experts) - len(moments.count))
        for label in range(len(experts)):
            moments.add(label, x[states.labels == label])
        empty = [name for name, count in zip(experts, moments.count.tolist(), strict=True) if count == 0]
        if empty:
            raise InputError(
                f"no example has a token of '{empty[0]}'", "give --data NAME=FILE for each adapter"
            )
        weight, bias = moments.classifier(shrinkage)
        tensors = {"weight": weight.float(), "bias": bias.float(), **moments.tensors()}
        found |= {prefix + name: value for name, value in tensors.items()}
    return found


def taps_spec(
    kind: str,
    experts: Sequence[str],
    groups: Sequence[tuple[int, int]],
    *,
    head: str = MLP,
    prior: str | None = None,
    tap: int | None = None,
    k: int = 1,
    temperature: float = 1.0,
    shrinkage: float = SHRINKAGE,
) -> StageSpec:
    """The header of a `taps`, `layer` or `hidden` stage. tap: the one layer that `hidden` reads."""
    params: dict[str, object] = {"head": head}
    if head == LDA:
        params["shrinkage"] = shrinkage
    if prior is not None:
        params["prior"] = prior
    if tap is not None:
        params["tap"] = tap
    return StageSpec(
        kind=kind,
        input="hidden",
        experts=list(experts),
        groups=list(groups),
        k=k,
        temperature=temperature,
        params=params,
    )
