"""Routes of many documents sooner: in float32, and once more in float64 where a choice is close.

Routes are decided in float64, so that they do not depend on how a text is cut into blocks. Most choices
are so clear that float32 comes to the same; a document with one that is not is decided again.
"""

from __future__ import annotations

from torch import Tensor

from molora_cli.core.router.deciding import Decision
from molora_cli.core.router.spec import RouterSpec
from molora_cli.core.router.stack import RouterStack

# Between log-probabilities, or that times the largest of them where that is more than 1. Float32 moves them
# by some 1e-6.
CLOSE = 1e-3


def is_quick(spec: RouterSpec) -> bool:
    """Whether `Quick` is sooner and safe: one trained context stage by itself."""
    stages = spec.stages
    return (
        [s.kind for s in stages] == ["context"] and not stages[0].margin and not stages[0].params.get("added")
    )


class Quick:
    """Two stacks of one router that `is_quick`: `exact` in float64, `single` in float32."""

    def __init__(self, exact: RouterStack, single: RouterStack) -> None:
        self.exact, self._single = exact, single

    def decide(self, ids: Tensor, real: Tensor) -> Decision:
        """The decision about whole documents, ids (B, T) int64, padded on the right; real (B, T) bool.

        Indices are those of `exact`. Scores of the usual size are within 1e-4 of its own, gates within that
        over the temperature; both are its own where a document was decided again. Padding means nothing.
        """
        found, _ = self._single.decide(ids, None, self._single.start(len(ids)))
        k = self.exact.k
        best = found.scores.topk(min(k + 1, found.scores.shape[-1]), dim=-1).values  # (B, T, G, k + 1)
        least = CLOSE * best.abs().amax((-1, -2), keepdim=True).clamp(min=1)
        apart = best.diff(dim=-1) < -least  # False for NaN too
        close = ((~apart).any(-1).any(-1) & real).any(1)  # (B,)
        if close.any():
            again, _ = self.exact.decide(ids[close], None, self.exact.start(int(close.sum())))
            found.route.indices[close] = again.route.indices
            found.route.gates[close] = again.route.gates
            found.scores[close] = again.scores
        return found
