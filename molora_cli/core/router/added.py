"""Experts added to a trained `context` router: each takes its share before the others divide the rest.

    g_c(f)   logit of added expert c against all that were there before it, from the router's features f
    p_c = s(g_c) prod_{c' after c} (1 - s(g_c'))        s the logistic function
    p_e = p_old(e) prod_c (1 - s(g_c))                  for an expert e that was there before

So the others' weights stay as they are, bit for bit, and so do the odds among them. The logit is a small
network ("mlp"), or in closed form ("lda") that of a linear discriminant analysis on the statistics that the
router keeps (see `moments`): l_c - log sum_{e before c} exp l_e with l = f W + b.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from molora_cli.core.router.kinds import stage_tensor
from molora_cli.core.router.moments import Moments
from molora_cli.core.router.taps import LDA, MLP
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from molora_cli.core.router.spec import StageSpec

SHRINKAGE = 0.02
_MOST = 4096  # hidden units of a gate in a file


class MlpGate(nn.Module):
    """g = w gelu(U f + u) + v for features (..., F); hidden units H."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Logits (...) of features (..., F)."""
        out: Tensor = self.outer(F.gelu(self.inner(features)))
        return out.squeeze(-1)


class LdaGate(nn.Module):
    """weight (F, E + 1) and bias (E + 1,) of a discriminant analysis, the added expert last."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, classes))
        self.bias = nn.Parameter(torch.empty(classes))

    def forward(self, features: Tensor) -> Tensor:
        """Logits (...) of features (..., F)."""
        scores = features @ self.weight + self.bias
        return scores[..., -1] - scores[..., :-1].logsumexp(-1)


def split_experts(spec: StageSpec) -> tuple[list[str], list[str]]:
    """The experts that the router was trained for, and those that were added. Raises InputError for a header
    that contradicts itself."""
    heads = spec.params.get("added") or []
    if not isinstance(heads, list) or len(heads) >= len(spec.experts) or not {*map(str, heads)} <= {MLP, LDA}:
        raise InputError("the context router's header garbles its added experts", _AGAIN)
    first = len(spec.experts) - len(heads)
    return spec.experts[:first], spec.experts[first:]


def read_gates(spec: StageSpec, tensors: Mapping[str, Tensor], width: int) -> list[nn.Module]:
    """The gates of the added experts in order, float64. Raises InputError for tensors that do not fit."""
    trained, added = split_experts(spec)
    gates: list[nn.Module] = []
    for number, _ in enumerate(added):
        prefix = f"added.{number}."
        own = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
        if spec.params["added"][number] == LDA:
            gate: nn.Module = LdaGate(width, len(trained) + number + 1)
        else:
            hidden = own["inner.bias"].shape[0] if "inner.bias" in own and own["inner.bias"].ndim == 1 else 1
            gate = MlpGate(width, min(hidden, _MOST))
        gate = gate.double()
        shapes = {name: tuple(p.shape) for name, p in gate.state_dict().items()}
        gate.load_state_dict({n: stage_tensor(own, n, s, "context").double() for n, s in shapes.items()})
        gates.append(gate.requires_grad_(False).eval())
    return gates


def share_out(logp: Tensor, features: Tensor, gates: Sequence[nn.Module]) -> Tensor:
    """Log-probabilities (..., E) of the trained experts to those of all, (..., E + number of gates)."""
    for gate in gates:
        logit = gate(features).unsqueeze(-1)
        logp = torch.cat([logp + F.logsigmoid(-logit), F.logsigmoid(logit)], dim=-1)
    return logp


def append_gate(
    spec: StageSpec, tensors: Mapping[str, Tensor], name: str, features: Tensor, gate: MlpGate | None = None
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage with one more expert: with `gate`, or in closed form.

    features (N, F) float64 of the expert's tokens; they join the router's statistics, which then are what
    one pass over all tokens would have given. Raises InputError where there is no token, the router keeps no
    statistics, or it has the expert.
    """
    if name in spec.experts:
        raise InputError(f"the context router has '{name}' already", "molora remove it first, or train anew")
    if "statistics.scatter" not in tensors:
        raise InputError("the context router keeps no statistics to add an expert to", _AGAIN)
    if not len(features):
        raise InputError(f"no example has a token of '{name}'", "give rows with text in them")
    known = Moments.of_tensors(dict(tensors))
    pooled = float(spec.params.get("scatter_tokens", known.count.sum())) + len(features)
    grown = known.with_classes(1)
    grown.add(len(spec.experts), features)
    own: dict[str, Tensor]
    if gate is None:
        weight, bias = grown.columns(grown.mean, SHRINKAGE, pooled)
        own = {"weight": weight, "bias": bias}
    else:
        own = {n: t.detach().clone() for n, t in gate.state_dict().items()}
    heads = [*(spec.params.get("added") or []), LDA if gate is None else MLP]
    prefix = f"added.{len(heads) - 1}."
    params = {**spec.params, "added": heads}
    if "scatter_tokens" in params:
        params["scatter_tokens"] = pooled
    stage = spec.model_copy(update={"experts": [*spec.experts, name], "params": params})
    return stage, {**tensors, **grown.tensors(), **{prefix + n: t.contiguous() for n, t in own.items()}}


_AGAIN = "train the router again: molora train-router BUNDLE --data NAME=FILE ... --force"
