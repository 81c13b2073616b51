"""Weight changes as products of thin factors: their sums, norms and differences, without the dense matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from molora_cli.core.adapter.factors import Factors

Thin = tuple[Tensor, Tensor]  # B (out, r), A (r, in): the matrix B A; float64


def thin(factors: Factors, weight: float = 1.0) -> Thin:
    """weight * scale * B and A, in float64."""
    return factors.B.double() * (weight * factors.scale), factors.A.double()


def total(parts: Sequence[Thin]) -> Thin:
    """The sum of products as one product: B's side by side, A's one above the other."""
    return torch.cat([b for b, _ in parts], 1), torch.cat([a for _, a in parts])


def norm(part: Thin) -> float:
    """The Frobenius norm of B A. With B = Q R and A^T = P S it is that of R S^T, which is r by r."""
    b, a = part
    left = torch.linalg.qr(b, mode="r").R
    right = torch.linalg.qr(a.T, mode="r").R
    return float((left @ right.T).norm())


def minus(one: Thin, other: Thin) -> Thin:
    """B A - B' A' as one product."""
    return total([one, (-other[0], other[1])])


def best(part: Thin, rank: int) -> Thin:
    """The product of rank `rank` nearest to B A (Eckart and Young): truncated SVD, its root on both sides."""
    b, a = part
    q_left, r_left = torch.linalg.qr(b)
    q_right, r_right = torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T)
    return _rooted(q_left @ u, s, vh @ q_right.T, rank)


def best_dense(matrix: Tensor, rank: int, seed: int = 0) -> Thin:
    """As `best`, of a dense (out, in) matrix. Large ones by randomised SVD (Halko, Martinsson and Tropp 2011,
    algorithm 5.1 with four power iterations), which is exact to a few digits where values decay."""
    small = min(matrix.shape)
    if small <= 1024 or rank * 2 > small:
        u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
        return _rooted(u, s, vh, rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        u, s, v = torch.svd_lowrank(matrix, q=min(small, rank + 16), niter=4)
    return _rooted(u.double(), s.double(), v.T.double(), rank)


def _rooted(u: Tensor, s: Tensor, vh: Tensor, rank: int) -> Thin:
    keep = min(rank, len(s))
    root = s[:keep].sqrt()
    b, a = u[:, :keep] * root, root.unsqueeze(1) * vh[:keep]
    if keep < rank:  # the asked rank, so that all modules have one
        b = torch.nn.functional.pad(b, (0, rank - keep))
        a = torch.nn.functional.pad(a, (0, 0, 0, rank - keep))
    return b, a


def relative_errors(before: Mapping[str, Factors], after: Mapping[str, Factors]) -> dict[str, float]:
    """Module -> ||after - before|| / ||before|| of the weight change (Frobenius), in float64.

    A bias and a DoRA magnitude count as further parts, the largest error wins. A module that only one side
    has is compared with no change; an error where `before` is zero is infinite.
    """
    return {m: _error(before.get(m), after.get(m)) for m in dict.fromkeys([*before, *after])}


def _error(one: Factors | None, other: Factors | None) -> float:
    parts = [f for f in (one, other) if f is not None]
    signed = [thin(f, 1.0 if f is one else -1.0) for f in parts]
    errors = [_ratio(norm(total(signed)), 0.0 if one is None else norm(thin(one)))]
    for name in ("bias", "magnitude"):
        vectors = [getattr(f, name, None) for f in (one, other)]
        if all(v is None for v in vectors):
            continue
        a, b = (_vector(v, f, name) for v, f in zip(vectors, (one, other), strict=True))
        if name == "magnitude" and (vectors[0] is None or vectors[1] is None):
            errors.append(float("inf"))
        else:
            errors.append(_ratio(float((b - a).norm()), float(a.norm())))
    return max(errors)


def _vector(value: Tensor | None, factors: Factors | None, name: str) -> Tensor:
    if value is None or factors is None:
        return torch.zeros((), dtype=torch.float64)
    return value.double() * (factors.scale if name == "bias" else 1.0)


def _ratio(difference: float, size: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / size if size else float("inf")
