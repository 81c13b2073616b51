"""Routers that read hidden states: run the base over some labelled rows, fit heads, measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from molora_cli.core.router.context import ContextStage
from molora_cli.core.router.files import join_tensors, stage_tensors
from molora_cli.core.router.kinds import IdStage, Surroundings
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.router.taps import LDA, MLP, default_taps, tap_groups
from molora_cli.core.training.heads import HeadSettings, fit_lda, fit_mlp, taps_spec
from molora_cli.core.training.router_rows import MIXED, RouterRows, RouterSettings, TokenRow
from molora_cli.core.training.states import collect_states
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.routed.model import RoutedModel

CONTEXT_TAPS = "context+taps"
LIVE_KINDS = ("taps", "layer", "hidden", CONTEXT_TAPS)
_MEASURED = 6  # rows per domain that a router is measured on, and twice as many mixes: each costs a forward


@dataclass(frozen=True)
class LiveSettings:
    """taps: layers whose input is read, None = the kind's own choice. head: "mlp" or "lda". rows: per domain
    that states are taken from, mixes: rows that change domain. heads: how an "mlp" is trained."""

    taps: Sequence[int] | None = None
    head: str = MLP
    rows: int = 14
    mixes: int = 70
    heads: HeadSettings = field(default_factory=HeadSettings)


def attached_model(bundle: Bundle, tokenizer: Any = None) -> RoutedModel:
    """The bundle's adapters on its base, without its router, on the GPU where there is one."""
    from molora_cli.core.adapter.factors import load_bundle_factors
    from molora_cli.core.base.model import load_base_model
    from molora_cli.core.routed.model import RoutedModel

    bundle.verify()
    base, found = load_base_model(bundle.base_path)
    entries = bundle.manifest.adapters
    factors = {entry.name: load_bundle_factors(bundle.folder(entry.name), entry) for entry in entries}
    model = RoutedModel(base, factors, tokenizer=tokenizer or found, bundle=bundle)
    model.eval()
    return model


def fewer(rows: RouterRows, count: int, mixes: int) -> list[TokenRow]:
    """`count` training rows of each domain and `mixes` rows that change domain."""
    chosen = [row for name in rows.experts for row in rows.train[name][:count]]
    return [replace(row, labels=row.led) for row in [*chosen, *rows.train.get(MIXED, [])[:mixes]]]


def measured_rows(rows: RouterRows) -> RouterRows:
    """The rows with few held out, so that measuring takes no longer than training."""
    some = {name: held[: _MEASURED * (1 + (name == MIXED))] for name, held in rows.held_out.items()}
    some_train = {name: found[:_MEASURED] for name, found in rows.train.items()}
    return replace(rows, held_out=some, train=some_train)


def chosen_taps(kind: str, n_layers: int, taps: Sequence[int] | None) -> tuple[int, ...]:
    """The layers that a kind reads. Raises InputError for some that it cannot."""
    if kind == "hidden":
        found = tuple(taps) if taps else (n_layers // 2,)
        if len(found) != 1 or not 0 <= found[0] <= n_layers:
            raise InputError(
                "a hidden router reads one layer", f"give --taps one number from 0 to {n_layers}"
            )
        return found
    if kind == "layer":
        if taps:
            raise InputError("a layer router reads every layer", "leave out --taps, or use --kind taps")
        return tuple(range(n_layers))
    found = tuple(taps) if taps else default_taps(n_layers)
    tap_groups(found, n_layers)
    if kind == CONTEXT_TAPS and min(found) == 0:
        raise InputError("context decides the layers below the first tap", "give taps from 1 on")
    return tuple(sorted(set(found)))


def fit_live(
    kind: str,
    model: RoutedModel,
    learnt: Sequence[TokenRow],
    experts: Sequence[str],
    live: LiveSettings,
    *,
    prior: IdStage | None = None,
    k: int = 1,
    ticker: Ticker = no_ticks,
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage of a kind in LIVE_KINDS and its tensors (for "context+taps" that of the taps, `prior` being
    the context stage). Raises InputError for taps or a head that cannot be."""
    if live.head not in (MLP, LDA):
        raise InputError(f"there is no head '{live.head}'", f"use {MLP} or {LDA}")
    n_layers = model.engine.context.n_layers
    taps = chosen_taps(kind, n_layers, live.taps)
    states = collect_states(
        model, learnt, experts, taps, prior=prior, base_only=kind == "hidden", ticker=ticker
    )
    if live.head == LDA:
        tensors = fit_lda(states, experts)
    else:
        total = live.heads.steps * len(taps)
        tensors = fit_mlp(
            states,
            len(experts),
            live.heads,
            tick=lambda step, loss: ticker(step, total, f"loss {loss:.3f}"),
        )
    spec = taps_spec(
        "taps" if kind == CONTEXT_TAPS else kind,
        experts,
        [] if kind == "hidden" else tap_groups(taps, n_layers),
        head=live.head,
        prior=None if prior is None else prior.kind,
        tap=taps[0] if kind == "hidden" else None,
        k=k,
    )
    return spec, {name: value.contiguous() for name, value in tensors.items()}


def with_context(
    context: tuple[StageSpec, dict[str, Tensor]], taps: tuple[StageSpec, dict[str, Tensor]]
) -> tuple[list[StageSpec], list[dict[str, Tensor]]]:
    """Both stages of one router: context decides the layers below the first tap."""
    below = context[0].model_copy(update={"groups": [(0, taps[0].groups[0][0])]})
    return [below, taps[0]], [context[1], taps[1]]


def train_live(
    kind: str,
    model: RoutedModel,
    rows: RouterRows,
    settings: RouterSettings,
    live: LiveSettings,
    *,
    context: tuple[RouterSpec, dict[str, Tensor]] | None = None,
    ticker: Ticker = no_ticks,
) -> tuple[RouterSpec, dict[str, Tensor]]:
    """Header and tensors of a router file. context: a trained context router, for "context+taps"."""
    learnt = fewer(rows, live.rows, live.mixes)
    if context is None:
        stage, tensors = fit_live(kind, model, learnt, rows.experts, live, k=settings.top_k, ticker=ticker)
        return RouterSpec(stages=[stage]), join_tensors([tensors])
    spec, own = context[0].stages[0], stage_tensors(context[1], 0)
    prior = ContextStage(spec, own, surroundings(model))
    made = fit_live(kind, model, learnt, rows.experts, live, prior=prior, k=settings.top_k, ticker=ticker)
    stages, parts = with_context((spec, own), made)
    return context[0].model_copy(deep=True, update={"stages": stages}), join_tensors(parts)


def surroundings(model: RoutedModel) -> Surroundings:
    """What stages may read of a loaded model."""
    weight = model.base.get_input_embeddings().weight
    return Surroundings(
        n_layers=model.engine.context.n_layers,
        embedding=weight.detach(),  # type: ignore[union-attr, operator]
        device=weight.device,
    )


def live_score(
    model: RoutedModel, spec: RouterSpec, tensors: dict[str, Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Scores (B, T, E) of the layers nearest the output, by a router that runs in the model; the model keeps
    it."""
    model.router = RouterStack(spec, tensors, surroundings(model), model.adapters)
    experts = list(model.router.experts)

    def score(ids: Tensor, mask: Tensor) -> Tensor:
        device = model.device
        decision = model.engine.decide(ids.to(device), mask.to(device))
        return decision.scores[:, :, -1, [experts.index(e) for e in spec.stages[-1].experts]].cpu()

    return score


@torch.no_grad()
def live_accuracy(score: Callable[[Tensor, Tensor], Tensor], rows: Sequence[TokenRow]) -> float | None:
    """Share of labelled tokens whose best expert is their own; None where there is no token."""
    right = total = 0
    for row in rows:
        ids = row.ids.unsqueeze(0)
        best = score(ids, torch.ones_like(ids, dtype=torch.bool))[0].argmax(-1)
        counted = row.labels >= 0
        right += int((best == row.labels)[counted].sum())
        total += int(counted.sum())
    return round(right / total, 4) if total else None
