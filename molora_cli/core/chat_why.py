"""Which training domain a token was nearest to: its distance from each domain's mean in the features that
the router reads. Only routers on token ids that keep statistics of their examples can tell; others say why
not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from molora_cli.text import shorten

if TYPE_CHECKING:
    from torch import Tensor

    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.router.kinds import Stage
    from molora_cli.core.router.stack import RouterStack

_SHRINKAGE = 0.1  # where the router's header names none
_BY_STATE = ("taps", "layer", "hidden")
_ELSEWHERE = ("xlora", "xlora-modules")


def training_note(model: Any, ids: Sequence[int], best: str) -> str:
    """One or two lines on what the router learnt from, and how near the last of `ids` is to it.

    model: a routed model with a router; ids: the tokens read up to the deciding one; best: the expert that
    scored highest. Distances are those of linear discriminant analysis (Mahalanobis, pooled covariance),
    divided by what training tokens of a domain usually have from their own mean: near 1 is like them.
    """
    router: RouterStack = model.router
    kind = shorten(router.spec.kind, 40)
    ranked = _distances(router, model.bundle, ids)
    if ranked:
        shown = ", ".join(f"{name} {distance:.2f}" for name, distance in ranked[:3])
        name = ranked[0][0]
        return (
            f"nearest training domain: {name}{_size(router, name)}\n"
            f"  distance from each domain's mean: {shown} (1 is usual for training text)"
        )
    if any(stage.kind in _BY_STATE for stage in router.stages):
        return f"nearest training domain by score: {best}{_size(router, best)}"
    if router.spec.training.get("documents"):
        return f"nearest training domain by score: {best}{_size(router, best)}"
    if any(stage.kind in _ELSEWHERE for stage in router.stages):
        return "no training domain is known: the router's classifier was trained elsewhere, by PEFT"
    return f"no training domain: a router of kind {kind} learns from no examples"


def _size(router: RouterStack, name: str) -> str:
    documents = router.spec.training.get("documents")
    count = documents.get(name) if isinstance(documents, dict) else None
    return f" (learnt from {count} texts)" if isinstance(count, int) else ""


def _distances(router: RouterStack, bundle: Bundle | None, ids: Sequence[int]) -> list[tuple[str, float]]:
    """(expert, distance) from the nearest on; empty where no stage on ids keeps statistics."""
    import torch

    from molora_cli.core.router.files import load_tensors, stage_tensors
    from molora_cli.core.router.moments import Moments

    file = None if bundle is None else bundle.router_file
    if file is None or not ids:
        return []
    tensors = load_tensors(file)
    for number, stage in enumerate(router.stages):
        own = stage_tensors(tensors, number)
        x = _features(stage, torch.tensor([list(ids)], device=router.device))
        if x is None or "statistics.scatter" not in own:
            continue
        known = Moments.of_tensors(own)
        if known.mean.shape != (len(stage.experts), len(x)):
            return []  # another router than the bundle's is in use
        tokens = float(stage.spec.params.get("scatter_tokens", known.count.sum()))
        shrinkage = float(stage.spec.params.get("shrinkage", _SHRINKAGE))
        pooled = known.scatter / max(tokens, 1.0)  # (F, F)
        level = pooled.diagonal().mean().clamp(min=1e-12)
        covariance = (1 - shrinkage) * pooled + shrinkage * level * torch.eye(len(pooled)).double()
        apart = (x.double().cpu() - known.mean).T  # (F, E)
        squares = (apart * torch.linalg.solve(covariance, apart)).sum(0)  # (E,)
        usual = torch.linalg.solve(covariance, pooled).diagonal().sum().clamp(min=1e-12)
        found = (squares / usual).clamp(min=0).sqrt().tolist()
        pairs = zip(stage.experts, found, known.count.tolist(), strict=True)
        return sorted(((n, d) for n, d, count in pairs if count > 0), key=lambda pair: pair[1])
    return []


def _features(stage: Stage, ids: Tensor) -> Tensor | None:
    """The features (F,) of the last of `ids` (1, T) as the stage reads them; None where it reads none."""
    from molora_cli.core.router.centroid import CentroidStage
    from molora_cli.core.router.context import ContextStage
    from molora_cli.core.router.features import causal_averages, context_features

    if isinstance(stage, ContextStage):
        return stage.net.features(stage.vectors(ids), None, stage.start(1))[0][0, -1].detach()
    if isinstance(stage, CentroidStage):
        vectors = stage.vectors(ids)
        averages, _ = causal_averages(vectors, None, stage.start(1), stage.decays)
        return context_features(vectors, averages)[0, -1]
    return None
