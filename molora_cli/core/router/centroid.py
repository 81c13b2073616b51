"""The `centroid` router: the nearest domain mean in the context features. Closed form, from a few examples.

Token vectors are the base's input embedding, centred and projected on its principal directions, each at unit
variance; features are these vectors and their causal averages, layer-normed. Distance is Mahalanobis with the
shrunk covariance that all domains share, which is linear discriminant analysis. (Plain Euclidean or cosine
distance finds the right domain for 66 % of the tokens where this finds it for 96 %: tokens of one domain
differ among themselves far more than domains do.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from molora_cli.core.router.features import (
    DECAYS,
    causal_averages,
    centre_and_scale,
    context_features,
    start_averages,
)
from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind, stage_tensor
from molora_cli.core.router.moments import Moments
from molora_cli.core.router.spec import StageSpec
from molora_cli.errors import InputError

PROJECTION = 192
SHRINKAGE = 0.1
TOKENS = 20_000  # per domain that are learnt from; more changes little and costs time
_SAMPLE = 32_768  # rows of the embedding that principal directions are taken from
_BLOCK = 2048  # tokens of a sequence at a time: bounds the memory of the features
_AGAIN = "attach the router again: molora attach-router BUNDLE --kind centroid --data NAME=FILE ..."


class Labelled(Protocol):
    """A row of tokens: ids (T,) int64 and labels (T,) int64, the index of an expert or -1 = not counted."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...


@register_kind
class CentroidStage(IdStage):
    """tensors: centre (d,), project (d, p), weight ((1 + D) p, E), bias (E,), and statistics (not read here).
    params: decays (D,)."""

    kind = "centroid"
    needs_embedding = True

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        if around.embedding is None:
            raise InputError(
                "a centroid router reads the base's input embedding, and no base is at hand",
                "give --base PATH",
            )
        self.decays = _decays(spec)
        width = around.embedding.shape[1]
        project = stage_tensor(tensors, "project", (width, None), self.kind)
        features = project.shape[1] * (1 + len(self.decays))
        centre = stage_tensor(tensors, "centre", (width,), self.kind)
        self.weight = stage_tensor(tensors, "weight", (features, len(spec.experts)), self.kind).double()
        self.bias = stage_tensor(tensors, "bias", (len(spec.experts),), self.kind).double()
        self.vectors = TokenVectors(around.embedding.to(around.device), centre, project)

    def start(self, batch: int) -> State:
        return start_averages(batch, self.vectors.width, self.decays, device=self.bias.device)

    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        parts = []
        for first in range(0, ids.shape[1], _BLOCK):
            block = slice(first, first + _BLOCK)
            e = self.vectors(ids[:, block])  # (B, T, p)
            averages, state = causal_averages(e, mask[:, block], state, self.decays)
            parts.append(context_features(e, averages) @ self.weight + self.bias)
        scores = torch.cat(parts, 1) if parts else self.bias.new_zeros(*ids.shape, len(self.bias))
        logp = scores.log_softmax(-1).unsqueeze(2)  # (B, T, 1, E)
        return Scores(logp.expand(-1, -1, self.groups, -1)), state


class TokenVectors:
    """(E[id] - centre) project: (B, T) ids -> (B, T, p) float64 vectors.

    Each distinct id of a block is projected once; the whole table would cost seconds at every start.
    """

    def __init__(self, embedding: Tensor, centre: Tensor, project: Tensor) -> None:
        self._embedding = embedding.detach()  # (V, d)
        self._centre = centre.double()  # (d,)
        self._project = project.double()  # (d, p)

    @property
    def width(self) -> int:
        return self._project.shape[1]

    def __call__(self, ids: Tensor) -> Tensor:
        # ids beyond the table are padding, or the base itself refuses them
        distinct, where = ids.clamp(0, len(self._embedding) - 1).unique(return_inverse=True)
        return ((self._embedding[distinct].double() - self._centre) @ self._project)[where]


def principal_directions(embedding: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Centre (d,) float64 and projection (d, p) float32 on the p = min(width, d) directions of largest
    variance, each scaled to unit variance.

    Large vocabularies are sampled at equal steps. Signs are set (largest component positive), so that the
    same embedding gives the same projection.
    """
    centre, _ = centre_and_scale(embedding)
    step = -(-len(embedding) // _SAMPLE)
    rows = embedding[::step].detach().double() - centre
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))  # ascending
    width = min(width, len(values))
    values, vectors = values.flip(0)[:width], vectors.flip(1)[:, :width]
    heaviest = vectors.abs().argmax(0)
    vectors = vectors * vectors[heaviest, torch.arange(width)].sign()
    return centre, (vectors / values.clamp(min=float(values[0]) * 1e-9 + 1e-30).sqrt()).float()


def fit_centroid(
    embedding: Tensor,
    rows: Sequence[Labelled],
    experts: Sequence[str],
    *,
    projection: int = PROJECTION,
    shrinkage: float = SHRINKAGE,
    tokens: int = TOKENS,
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage and its tensors from labelled rows; rows beyond `tokens` tokens of a domain are left out.

    embedding (V, d) of the base. Raises InputError for an expert without a token.
    """
    centre, project = principal_directions(embedding, projection)
    vectors = TokenVectors(embedding, centre, project)
    moments = Moments.empty(len(experts), vectors.width * (1 + len(DECAYS)))
    _collect(moments, vectors, rows, tokens)
    empty = [name for name, count in zip(experts, moments.count.tolist(), strict=True) if count == 0]
    if empty:
        raise InputError(f"no example has a token of '{empty[0]}'", "give --data NAME=FILE for each adapter")
    spec = StageSpec(
        kind="centroid",
        experts=list(experts),
        params={
            "decays": list(DECAYS),
            "shrinkage": shrinkage,
            "tokens": {name: int(n) for name, n in zip(experts, moments.count.tolist(), strict=True)},
        },
    )
    return spec, {"centre": centre, "project": project, **_with_classifier(moments, shrinkage)}


def extend_centroid(
    spec: StageSpec,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    rows: Sequence[Labelled],
    experts: Sequence[str],
    *,
    tokens: int = TOKENS,
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage with more examples, of new or of known experts: what fitting all at once would give.

    rows are labelled by index into `experts`, which start with the stage's own in their order. Raises
    InputError where they do not.
    """
    own = list(spec.experts)
    if list(experts[: len(own)]) != own:
        raise InputError("experts of a router keep their order when others are added", "append the new ones")
    vectors = TokenVectors(embedding, tensors["centre"], tensors["project"])
    moments = Moments.of_tensors(dict(tensors)).with_classes(len(experts) - len(own))
    _collect(moments, vectors, rows, tokens, _decays(spec))
    shrinkage = float(spec.params.get("shrinkage", SHRINKAGE))
    counts = {name: int(n) for name, n in zip(experts, moments.count.tolist(), strict=True)}
    grown = spec.model_copy(update={"experts": list(experts), "params": {**spec.params, "tokens": counts}})
    return grown, {**tensors, **_with_classifier(moments, shrinkage)}


def append_centroid(
    spec: StageSpec,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    rows: Sequence[Labelled],
    name: str,
    *,
    tokens: int = TOKENS,
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage with one more expert; the columns, means and counts of the others keep every bit.

    The new mean meets the covariance that the others were fitted with, which is why that stays as it is: its
    number of tokens is `scatter_tokens` from then on. rows: labelled 0. Raises InputError where there is no
    token, or the router keeps no statistics.
    """
    if name in spec.experts:
        raise InputError(f"the centroid router has '{name}' already", _AGAIN)
    if "statistics.scatter" not in tensors:
        raise InputError("the centroid router keeps no statistics to add an expert to", _AGAIN)
    known = Moments.of_tensors(dict(tensors))
    vectors = TokenVectors(embedding, tensors["centre"], tensors["project"])
    new = Moments.empty(1, known.mean.shape[1])
    _collect(new, vectors, rows, tokens, _decays(spec))
    if float(new.count) == 0:
        raise InputError(f"no example has a token of '{name}'", "give rows with text in them")
    pooled = float(spec.params.get("scatter_tokens", known.count.sum()))
    shrinkage = float(spec.params.get("shrinkage", SHRINKAGE))
    weight, bias = known.columns(new.mean, shrinkage, pooled)
    grown = {
        **tensors,
        "weight": torch.cat([tensors["weight"], weight.to(tensors["weight"].dtype)], 1),
        "bias": torch.cat([tensors["bias"], bias.to(tensors["bias"].dtype)]),
        "statistics.count": torch.cat([tensors["statistics.count"], new.count]),
        "statistics.mean": torch.cat([tensors["statistics.mean"], new.mean]),
    }
    counts = {**spec.params.get("tokens", {}), name: int(new.count)}
    params = {**spec.params, "tokens": counts, "scatter_tokens": pooled}
    return spec.model_copy(update={"experts": [*spec.experts, name], "params": params}), grown


def _with_classifier(moments: Moments, shrinkage: float) -> dict[str, Tensor]:
    weight, bias = moments.classifier(shrinkage)
    return {"weight": weight, "bias": bias, **moments.tensors()}


def _collect(
    moments: Moments,
    vectors: TokenVectors,
    rows: Sequence[Labelled],
    tokens: int,
    decays: Sequence[float] = DECAYS,
) -> None:
    """Add the features of labelled tokens, up to `tokens` per class."""
    seen = torch.zeros(len(moments.count))
    for row in rows:
        wanted = [k for k in row.labels.unique().tolist() if k >= 0 and seen[k] < tokens]
        if not wanted:
            continue
        e = vectors(row.ids.unsqueeze(0))  # (1, T, p)
        averages, _ = causal_averages(e, None, start_averages(1, vectors.width, decays), decays)
        features = context_features(e, averages)[0]  # (T, F)
        for label in wanted:
            mine = features[row.labels == label]
            moments.add(label, mine)
            seen[label] += len(mine)


def _decays(spec: StageSpec) -> tuple[float, ...]:
    decays = spec.params.get("decays")
    if not isinstance(decays, list) or not 1 <= len(decays) <= 32:
        raise InputError("the centroid router's header lacks its decays", _AGAIN)
    if not all(isinstance(a, float) and 0 < a < 1 for a in decays):
        raise InputError("the centroid router's header has decays outside 0 to 1", _AGAIN)
    return tuple(decays)
