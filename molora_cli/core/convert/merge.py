"""Several adapters to one weight change per module, on their exact weight changes D_i = s_i B_i A_i.

cat: sum w_i D_i, ranks side by side: exact. svd, linear: the same sum, cut to a rank. ties: Yadav et al.,
arXiv 2306.01708, section 3. dare: Yu et al., arXiv 2311.03099, eq. 2. (Averaging A and B apart is none of
these: it brings in the products of one adapter's B with another's A.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molora_cli.core.adapter.factors import Factors
from molora_cli.core.convert.deltas import Thin, best, best_dense, minus, norm, thin, total

Adapters = Mapping[str, Mapping[str, Factors]]
DENSITY = 0.5


@dataclass(frozen=True)
class Merged:
    """One module of the merge. error: ||merged - sum w_i D_i|| / ||sum w_i D_i||; cut: what the rank costs,
    relative to what the method gave."""

    factors: Factors
    error: float
    cut: float


def merge(
    adapters: Adapters,
    weights: Mapping[str, float],
    method: str,
    *,
    rank: int | None = None,
    density: float | None = None,
    seed: int = 0,
) -> dict[str, Merged]:
    """Module -> merged factors, scale 1, float32. adapters: name -> module -> factors without magnitude.

    rank: of svd, linear, ties and dare; None = the largest that an adapter has in that module. density: the
    share of entries that ties and dare keep. seed: of dare's choice.
    """
    used = [name for name in adapters if weights[name] != 0]
    paths = list(dict.fromkeys(path for name in used for path in adapters[name]))
    biased = any(f.bias is not None for name in used for f in adapters[name].values())
    merged = {}
    for path in paths:
        parts = [(weights[name], adapters[name].get(path)) for name in used]
        present = [(w, f) for w, f in parts if f is not None]
        exact = total([thin(f, w) for w, f in present])
        largest = rank or max(f.rank for _, f in present)
        if method == "cat":
            made, cut = exact, 0.0
        elif method in ("svd", "linear"):
            made = best(exact, largest)
            cut = _relative(norm(minus(made, exact)), norm(exact))
        else:
            dense = combine(
                [None if f is None else f.scale * (f.B.float() @ f.A.float()) for _, f in parts],
                [w for w, _ in parts],
                method,
                DENSITY if density is None else density,
                module_seed(seed, path),
            )
            made = best_dense(dense, largest, seed)
            cut = _relative(float((dense.double() - made[0] @ made[1]).norm()), float(dense.norm()))
        made = made[0].float(), made[1].float()
        error = _relative(norm(minus(_double(made), exact)), norm(exact))
        bias = _bias(present, made[0]) if biased else None
        merged[path] = Merged(Factors(made[1], made[0], 1.0, bias, None, present[0][1].kind), error, cut)
    return merged


def combine(
    deltas: Sequence[Tensor | None], weights: Sequence[float], method: str, density: float, seed: int
) -> Tensor:
    """ties or dare on dense weight changes (out, in) of one module; None = the adapter leaves it alone.

    ties: each change keeps its largest entries; the sign with more weighted mass wins; the weighted mean over
    those of that sign. Weights are relative there: (1, 1) and (0.5, 0.5) are the same. dare: each entry is
    kept with probability `density` and divided by it; the weighted sum.
    """
    first = next(d for d in deltas if d is not None)
    kept = [torch.zeros_like(first) if d is None else d for d in deltas]
    if method == "dare":
        generator = torch.Generator().manual_seed(seed)
        out = torch.zeros_like(first)
        for delta, weight in zip(kept, weights, strict=True):
            mask = torch.rand(delta.shape, generator=generator) < density
            out += (weight / density) * delta * mask
        return out
    trimmed = [_largest(delta, density) for delta in kept]
    signed = sum(weight * delta for weight, delta in zip(weights, trimmed, strict=True))
    sign = torch.sign(torch.as_tensor(signed))
    out, mass = torch.zeros_like(first), torch.zeros_like(first)
    for delta, weight in zip(trimmed, weights, strict=True):
        agrees = (torch.sign(weight * delta) == sign) & (delta != 0)
        out += torch.where(agrees, weight * delta, 0.0)
        mass += torch.where(agrees, abs(weight), 0.0)
    return torch.where(mass > 0, out / mass.clamp(min=1e-30), 0.0)


def fold(
    weight: Tensor,
    parts: Sequence[tuple[float, Factors | None]],
    method: str,
    density: float | None,
    seed: int,
) -> Tensor:
    """(out, in) float32: W with adapters folded in; exact for cat, svd and linear, also for DoRA."""
    changes = [None if f is None else dense_delta(f, weight) for _, f in parts]
    if method in ("ties", "dare"):
        share = DENSITY if density is None else density
        return weight + combine(changes, [w for w, _ in parts], method, share, seed)
    out = weight.clone()
    for (share, _), change in zip(parts, changes, strict=True):
        if change is not None:
            out += share * change
    return out


def dense_delta(factors: Factors, weight: Tensor) -> Tensor:
    """(out, in) float32: what one adapter adds to W (out, in). DoRA: m / ||W + s B A|| (W + s B A) - W, by
    rows (arXiv 2402.09353, eq. 5)."""
    plain = factors.scale * (factors.B.float() @ factors.A.float())
    if factors.magnitude is None:
        return plain
    moved = weight + plain
    return (factors.magnitude.float() / moved.norm(dim=1)).unsqueeze(1) * moved - weight


def _largest(delta: Tensor, density: float) -> Tensor:
    """The share `density` of entries with the largest magnitude, the others zero."""
    count = max(1, int(density * delta.numel()))
    if count == delta.numel():
        return delta
    flat = delta.flatten()
    top = flat.abs().topk(count).indices
    return torch.zeros_like(flat).index_copy(0, top, flat[top]).reshape(delta.shape)


def module_seed(seed: int, path: str) -> int:
    """A seed per module: the same whatever other modules there are."""
    return int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:7], "big")


def _bias(present: Sequence[tuple[float, Factors]], like: Tensor) -> Tensor:
    bias = torch.zeros(like.shape[0], dtype=torch.float64)
    for weight, f in present:
        if f.bias is not None:
            bias += weight * f.scale * f.bias.double()
    return bias.float()


def _double(part: Thin) -> Thin:
    return part[0].double(), part[1].double()


def _relative(difference: float, size: float) -> float:
    return 0.0 if difference == 0 else difference / size if size else float("inf")
