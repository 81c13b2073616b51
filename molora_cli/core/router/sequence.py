"""The `sequence` router: one decision for a whole sequence, from the mean of its prompt's token vectors.

    p = LN(mean over the prompt of (E[id] - centre) P)        prompt features, (p,), see `centroid`
    z = p W + b                                               logits over the experts, (E,)

A baseline, and as good as any router where a sequence keeps to one domain. The prompt is what the first
block of a sequence holds up to and including the first start of an answer (`marker`, from the chat template),
or all of it where there is none; the decision is kept for everything after it. So its route is not causal
within the prompt, and a prompt that is fed in pieces is judged by the first piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.centroid import PROJECTION, Labelled, TokenVectors, principal_directions
from molora_cli.core.router.kinds import IdStage, Scores, State, Surroundings, register_kind, stage_tensor
from molora_cli.core.router.spec import StageSpec
from molora_cli.errors import InputError

_STEPS, _RATE, _DECAY = 200, 1e-2, 0.01
_AGAIN = "train it again: molora train-router BUNDLE --kind sequence --data NAME=FILE ... --force"


@register_kind
class SequenceStage(IdStage):
    """tensors: centre (d,), project (d, p), weight (p, E), bias (E,). params: marker, token ids."""

    kind = "sequence"
    needs_embedding = True

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        if around.embedding is None:
            raise InputError(
                "a sequence router reads the base's input embedding, and no base is at hand",
                "give --base PATH",
            )
        marker = spec.params.get("marker", [])
        if not isinstance(marker, list) or len(marker) > 64 or not all(type(i) is int for i in marker):
            raise InputError("the sequence router's header has no readable marker", _AGAIN)
        project = stage_tensor(tensors, "project", (around.embedding.shape[1], None), self.kind)
        centre = stage_tensor(tensors, "centre", (around.embedding.shape[1],), self.kind)
        experts = len(spec.experts)
        self.weight = stage_tensor(tensors, "weight", (project.shape[1], experts), self.kind).double()
        self.bias = stage_tensor(tensors, "bias", (experts,), self.kind).double()
        self.marker = torch.tensor(marker, dtype=torch.int64, device=around.device)
        self.vectors = TokenVectors(around.embedding.to(around.device), centre, project)

    def start(self, batch: int) -> State:
        device = self.bias.device
        return {
            "logp": torch.zeros(batch, len(self.experts), dtype=torch.float64, device=device),
            "decided": torch.zeros(batch, dtype=torch.bool, device=device),
        }

    def score(self, ids: Tensor, mask: Tensor, state: State) -> tuple[Scores, State]:
        logp, decided = state["logp"], state["decided"]
        if not bool(decided.all()):
            prompt = prompt_tokens(ids, mask, self.marker)
            found = prompt_features(self.vectors, ids, prompt) @ self.weight + self.bias
            logp = torch.where(decided.unsqueeze(1), logp, found.log_softmax(-1))
            decided = decided | mask.any(1)
        spread = logp[:, None, None].expand(-1, ids.shape[1], self.groups, -1)
        return Scores(spread), {"logp": logp, "decided": decided}


def prompt_tokens(ids: Tensor, mask: Tensor, marker: Tensor) -> Tensor:
    """(B, T) bool: the real tokens up to the end of the first `marker` (M,) in ids (B, T); all where there is
    none."""
    length, wide = ids.shape[1], len(marker)
    if wide == 0 or wide > length:
        return mask
    hit = (ids.unfold(1, wide, 1) == marker).all(-1)  # (B, T - M + 1)
    hit = hit & mask.unfold(1, wide, 1).all(-1)
    first = torch.where(hit.any(1), hit.int().argmax(1) + wide, length)  # (B,)
    return mask & (torch.arange(length, device=ids.device) < first.unsqueeze(1))


def prompt_features(vectors: TokenVectors, ids: Tensor, prompt: Tensor) -> Tensor:
    """(B, p) float64: the mean vector of the prompt's tokens, layer-normed; zeros without a token."""
    e = vectors(ids) * prompt.unsqueeze(-1)  # (B, T, p)
    mean = e.sum(1) / prompt.sum(1, keepdim=True).clamp(min=1)
    return F.layer_norm(mean, (mean.shape[-1],))


def fit_sequence(
    embedding: Tensor,
    rows: Sequence[tuple[Labelled, int]],
    experts: Sequence[str],
    *,
    marker: Sequence[int] = (),
    projection: int = PROJECTION,
    seed: int = 0,
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage and its tensors by logistic regression. rows: (row, index of its expert)."""
    centre, project = principal_directions(embedding, projection)
    vectors = TokenVectors(embedding, centre, project)
    ends = torch.tensor(list(marker), dtype=torch.int64)
    features = []
    for row, _ in rows:
        ids = row.ids.unsqueeze(0)
        prompt = prompt_tokens(ids, torch.ones_like(ids, dtype=torch.bool), ends)
        features.append(prompt_features(vectors, ids, prompt))
    x, y = torch.cat(features).float(), torch.tensor([label for _, label in rows])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        linear = torch.nn.Linear(x.shape[1], len(experts))
        optimizer = torch.optim.AdamW(linear.parameters(), _RATE, weight_decay=_DECAY)
        for _ in range(_STEPS):
            loss = F.cross_entropy(linear(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    spec = StageSpec(kind="sequence", experts=list(experts), params={"marker": list(marker)})
    weight = linear.weight.detach().T.contiguous()
    return spec, {"centre": centre, "project": project, "weight": weight, "bias": linear.bias.detach()}


def answer_marker(tokenizer: object) -> list[int]:
    """Ids that a chat template puts before an answer; empty where there is no template."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    chat = [{"role": "user", "content": "?"}]
    render = tokenizer.apply_chat_template  # type: ignore[attr-defined]
    try:
        whole = render(chat, tokenize=False, add_generation_prompt=True)
        before = render(chat, tokenize=False, add_generation_prompt=False)
    except Exception:  # a template may raise whatever it likes
        return []
    if not whole.startswith(before) or whole == before:
        return []
    found: list[int] = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    return found
