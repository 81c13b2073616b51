"""The `arrow` router: each adapter's own direction in each module's input space. No training, no data.

For a module with factors B (out, r), A (r, in) the prototype v is the top right singular vector of B A, the
input that the adapter changes most; a token with input x scores |v . x| (the sign of v means nothing). Top-k
of the scores, gates by softmax: Ostapenko et al., arXiv 2405.11157, section 3.2. Every routed module decides
for itself; a trace shows the mean gates of a layer's modules. Adapters may differ in rank and in the modules
they touch: where an adapter leaves a module alone it cannot be chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from molora_cli.core.router.kinds import LiveStage, Scores, Surroundings, register_kind
from molora_cli.core.router.spec import BASE_EXPERT, StageSpec
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from molora_cli.core.adapter.factors import Factors

_PREFIX = "prototypes."
_AGAIN = "attach it again: molora attach-router BUNDLE --kind arrow --force"


def prototype(factors: Factors, seed: int) -> Tensor:
    """The top right singular vector of B A, (in,) float32 of length 1.

    Through a small (r, r) matrix: with A^T = Q R it is Q times that of B R^T. Where the two largest singular
    values are equal every vector of their plane is one; then the nearest to a vector drawn from `seed` is
    taken. The sign makes the largest component positive.
    """
    A, B = factors.A.detach().double().cpu(), factors.B.detach().double().cpu()
    q, r = torch.linalg.qr(A.T)  # (in, r), (r, r)
    _, values, right = torch.linalg.svd(B @ r.T, full_matrices=False)
    top = right[values >= values[0] * (1 - 1e-9)]  # (n, r), n = 1 almost always
    direction = q @ top[0]
    if len(top) > 1:
        drawn = torch.randn(len(direction), generator=torch.Generator().manual_seed(seed)).double()
        plane = q @ top.T  # (in, n), orthonormal
        direction = plane @ (plane.T @ drawn)
    direction = direction / direction.norm().clamp(min=1e-30)
    return (direction * direction[direction.abs().argmax()].sign()).float()


def fit_arrow(
    factors: Mapping[str, Mapping[str, Factors]],
    n_layers: int,
    *,
    k: int = 1,
    temperature: float = 1.0,
    seed: int = 0,
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage and its tensors. factors: adapter name -> module path -> factors.

    Raises InputError for an adapter on the embedding or the head, where tokens are ids or not all there.
    """
    from molora_cli.core.routed.attach import layer_number

    names = list(factors)
    paths = sorted({path for modules in factors.values() for path in modules})
    outside = [path for path in paths if layer_number(path) is None]
    if outside:
        who = next(name for name in names if outside[0] in factors[name])
        raise InputError(
            f"arrow reads the inputs of a layer's linear modules; adapter '{who}' also changes {outside[0]}",
            "attach another router: molora attach-router BUNDLE --kind centroid --data NAME=FILE ...",
        )
    tensors = {}
    for path in paths:
        width = next(m[path].A.shape[1] for m in factors.values() if path in m)
        rows = torch.zeros(len(names), width)
        for i, name in enumerate(names):
            if path in factors[name]:
                rows[i] = prototype(factors[name][path], seed)
        tensors[_PREFIX + path] = rows
    spec = StageSpec(
        kind="arrow",
        input="modules",
        experts=names,
        groups=[(i, i + 1) for i in range(n_layers)],
        k=k,
        temperature=temperature,
        params={"seed": seed},
    )
    return spec, tensors


@register_kind
class ArrowStage(LiveStage):
    """tensors: `prototypes.<module path>` (E, in), a row of zeros where the adapter has no such module; the
    base expert may be among the experts and scores what a row of zeros gives, nothing."""

    kind = "arrow"
    per_module = True

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        self.prototypes = {k[len(_PREFIX) :]: t for k, t in tensors.items() if k.startswith(_PREFIX)}
        experts = len(spec.experts)
        if not self.prototypes or any(t.dim() != 2 or len(t) != experts for t in self.prototypes.values()):
            raise InputError("the arrow router's prototypes do not fit its experts", _AGAIN)
        self._absent = {path: (rows == 0).all(1) for path, rows in self.prototypes.items()}  # (E,)
        self._base = _position(spec.experts)

    def score_module(self, path: str, x: Tensor) -> Scores:
        """Log-softmax of |x V^T| in float64, (B, T, 1, E); -inf for an adapter without this module."""
        if path not in self.prototypes or self.prototypes[path].shape[1] != x.shape[-1]:
            raise InputError(f"the arrow router knows no prototype that fits module {path}", _AGAIN)
        found = (x.double() @ self.prototypes[path].double().T).abs()
        absent = self._absent[path].clone()
        if self._base is not None:
            absent[self._base] = False
        # the softmax over the k best comes out the same; a trace shows log-probabilities
        return Scores(found.masked_fill(absent, -torch.inf).log_softmax(-1).unsqueeze(2))


def _position(experts: Sequence[str]) -> int | None:
    return list(experts).index(BASE_EXPERT) if BASE_EXPERT in experts else None
