"""The `context` kind: a small network on the token's embedding and its causal averages.

    x_t = (E[id_t] - centre) / scale            centred, scaled input embedding, (d,)
    e_t = P x_t + b                             projection, (p,)
    f_t = [LN(e_t), LN(avg_a(e)_t) for each decay a]    context features, ((1 + D) p,), see `features`
    h_t = gelu(U f_t + u),  z_t = V h_t + v             logits over the experts, (E,)

and then what the conversation's parts so far say of the one that comes next, see `spans`.

The route depends on token ids alone: it is known before the forward, serves all layers in one pass and costs
O(T). Training runs in float32, routing in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from molora_cli.core.router.added import read_gates, share_out, split_experts
from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind, stage_tensor
from molora_cli.core.router.token_step import TokenStep
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from molora_cli.core.router.spec import StageSpec

_ROWS = 512  # of the embedding projected at a time: their float64 copies stay in the cache
_SAMPLES = 16  # rows of the embedding kept in the file
_SAME = 0.98  # their least cosine: another precision of one base stays above, another base far below


def normalised(embedding: Tensor, centre: Tensor, scale: float) -> Tensor:
    """(E - centre) / scale of an embedding (V, d), in float32: what the projection reads."""
    return (embedding.detach().to(torch.float32) - centre.to(torch.float32)) / scale


def project_table(net: ContextNet, embedding: Tensor, centre: Tensor, scale: float) -> Tensor:
    """Projected embedding table (V, p), computed once in float64 by blocks of rows and kept in float32: half
    the memory, and all runs read the same rounded vectors and go on in float64."""
    weight = net.project.weight.detach().double()
    # P (x - centre) / scale + b with the constant part taken out of the loop
    shift = net.project.bias.detach().double() - weight @ (centre.double() / scale)
    table = torch.empty(embedding.shape[0], net.projection, dtype=torch.float32, device=embedding.device)
    for first in range(0, embedding.shape[0], _ROWS):
        rows = embedding[first : first + _ROWS].detach().double()
        table[first : first + _ROWS] = rows @ (weight.T / scale) + shift
    return table


def sample_rows(embedding: Tensor) -> tuple[list[int], Tensor]:
    """Ids spread over the vocabulary and their embedding rows (16, d) float32: its fingerprint."""
    ids = torch.linspace(0, embedding.shape[0] - 1, _SAMPLES).long()
    return ids.tolist(), embedding[ids].detach().float().cpu()


@register_kind
class ContextStage(IdStage):
    """A trained `context` stage.

    tensors: centre (d,), project.weight (p, d), project.bias (p,), inner.*, outer.*, samples (n, d) rows of
    the embedding it was trained on, the statistics of training (not read here), and added.* gates of experts
    that came later. params: decays, projection, hidden, scale, sampled ids, added; ahead: `units` of the
    network that looks ahead, and the ids of the tokens that cut spans, `cuts`.
    """

    kind = "context"
    needs_embedding = True

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        if around.embedding is None:
            raise InputError(
                "a context router reads the base's input embedding, and no base is at hand",
                "give --base PATH",
            )
        params = _params(spec.params)
        _check_embedding(params["sampled"], tensors, around.embedding)
        centre = stage_tensor(tensors, "centre", (around.embedding.shape[1],), self.kind)
        self.net = ContextNet(
            around.embedding.shape[1],
            len(split_experts(spec)[0]),
            projection=params["projection"],
            hidden=params["hidden"],
            decays=params["decays"],
            units=params["units"],
        ).to(around.dtype)
        shapes = {name: tuple(p.shape) for name, p in self.net.state_dict().items()}
        weights = {
            n: stage_tensor(tensors, n, shape, self.kind).to(around.dtype) for n, shape in shapes.items()
        }
        self.net.load_state_dict(weights)
        self.net.requires_grad_(False).eval().to(around.device)
        self.gates = read_gates(spec, tensors, self.net.inner.in_features)
        for gate in self.gates:
            gate.to(around.device)
        embedding = around.embedding.to(around.device)
        self._cut_ids = frozenset(i for i in params["cuts"] if 0 <= i < len(embedding))
        self.cuts = torch.zeros(len(embedding), dtype=torch.bool)
        self.cuts[list(self._cut_ids)] = True
        self.cuts = self.cuts.to(around.device)
        self.table = project_table(self.net, embedding, centre.to(around.device), params["scale"])  # (V, p)
        self.dtype = around.dtype
        self._step = TokenStep.of(self.net)

    def start(self, batch: int) -> State:
        return self.net.start(batch, self.dtype, self.table.device)

    @torch.no_grad()
    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        if ids.numel() == 1 and bool(mask):
            one = self.score_token(int(ids), state)
            if one is not None:
                return Scores(one[0].unsqueeze(2)), one[1]
        features, after = self.features(ids, mask, state)
        cuts = self.cuts[ids.clamp(0, len(self.cuts) - 1)]
        logits, spans = self.net.corrected(features, cuts, mask, state)
        logp = share_out(logits.log_softmax(-1), features, self.gates)
        return Scores(logp.unsqueeze(2)), {**after, **spans}

    def score_token(self, token: int, state: State) -> tuple[Tensor, State] | None:
        if self._step is None or not self._step.ready:
            return None
        token = min(max(token, 0), len(self.table) - 1)  # as for many, see `vectors`
        features, logp, after = self._step(self.table, token, token in self._cut_ids, state)
        return share_out(logp, features, self.gates), after

    @torch.no_grad()
    def features(self, ids: Tensor, mask: Tensor | None, state: State) -> tuple[Tensor, State]:
        """Context features (B, T, F) of the next tokens, and the state after them."""
        return self.net.features(self.vectors(ids), mask, state)

    def vectors(self, ids: Tensor) -> Tensor:
        """The tokens' projected vectors, (..., p)."""
        # ids outside the table (padding of some processors) are masked or refused by the model itself
        return self.table[ids.clamp(0, self.table.shape[0] - 1)].to(self.dtype)


def _params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and decays of the header, checked: a damaged file must not allocate without bound."""
    ahead = params.get("ahead") or {}
    try:
        decays = tuple(float(a) for a in params["decays"])
        found: dict[str, Any] = {
            "decays": decays,
            "projection": int(params["projection"]),
            "hidden": int(params["hidden"]),
            "scale": float(params["scale"]),
            "sampled": [int(i) for i in params["sampled"]],
            "units": int(ahead.get("units", 0)),
            "cuts": [int(i) for i in ahead.get("cuts", [])],
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"the context router's header lacks or garbles a parameter ({error})", _AGAIN
        ) from error
    sizes_fit = (
        len(found["sampled"]) <= 4096
        and 0 < found["projection"] <= 4096
        and 0 < found["hidden"] <= 16384
        and 0 <= found["units"] <= 4096
        and len(found["cuts"]) <= 65536
        and len(decays) <= 32
    )
    if not sizes_fit or not all(0 < a < 1 for a in decays) or not found["scale"] > 0:
        raise InputError("the context router's header holds sizes or decays out of range", _AGAIN)
    return found


def _check_embedding(ids: list[int], tensors: Mapping[str, Tensor], embedding: Tensor) -> None:
    """Raises InputError where the base's embedding is not the one that the router was trained on."""
    kept = stage_tensor(tensors, "samples", (len(ids), embedding.shape[1]), "context").float().cpu()
    fits = all(0 <= i < embedding.shape[0] for i in ids)
    if fits and ids:
        rows = embedding[torch.tensor(ids, device=embedding.device)].detach().float().cpu()
        fits = float(torch.nn.functional.cosine_similarity(rows, kept, dim=-1).median()) >= _SAME
    if not fits:
        raise InputError("the context router was trained on another input embedding than this base's", _AGAIN)


_AGAIN = "train the router again: molora train-router BUNDLE --data NAME=FILE ... --force"
