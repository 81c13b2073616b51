"""Routers with small heads on hidden states: `taps` at a few depths, `layer` at every layer, `hidden` on one
deep state of a first pass.

    x = LN(h)                          h the input of a layer, (d,), layer-normed without parameters
    z = V gelu(U [x, p] + u) + v       head "mlp": logits over the experts, (E,)
    z = x W + b + p                    head "lda": linear discriminant analysis in closed form, see `moments`

p: the log-probabilities of a stage on token ids where `prior` names one (p = 0 in "lda" without it). `taps`
and `layer` take one pass: each head decides the layers from its own up to the next, from the state that the
routes below it have made. `hidden` takes two (a 2-layer gate on a deep state, as in arXiv 2603.15965): the
upper bound of what a hidden state tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from molora_kernels import cpu_ops
from torch import Tensor, nn

from molora_cli.core.router.kinds import LiveStage, Scores, Surroundings, register_kind, stage_tensor
from molora_cli.errors import InputError

if TYPE_CHECKING:
    from molora_cli.core.router.spec import StageSpec

HIDDEN = 128
MLP, LDA = "mlp", "lda"
_AGAIN = "train the router again: molora train-router BUNDLE --kind taps --data NAME=FILE ... --force"


class TapHead(nn.Module):
    """The trained head of one depth: width d of the state, E experts, `prior` = E where it reads another
    stage's log-probabilities and 0 where not."""

    def __init__(self, width: int, experts: int, *, prior: int = 0, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.width = width
        self.inner = nn.Linear(width + prior, hidden)
        self.outer = nn.Linear(hidden, experts)

    def forward(self, hidden: Tensor, prior: Tensor | None) -> Tensor:
        """Logits (..., E) of hidden (..., d) and prior (..., E) or None, in the head's dtype."""
        x = normed(hidden, self.inner.weight.dtype)
        if prior is not None:
            x = torch.cat([x, prior.to(x.dtype)], dim=-1)
        out: Tensor = self.outer(F.gelu(self.inner(x)))
        return out

    def log_probabilities(self, hidden: Tensor, prior: Tensor | None) -> Tensor:
        """Of the experts, (..., E), as `forward`. A single token goes through one compiled operator, where it
        is there and nobody wants a gradient: some fifteen calls of torch on as few numbers take longer."""
        if hidden.numel() == self.width and self.compiled and hidden.dtype in cpu_ops.DTYPES:
            weight = self.inner.weight
            if not torch.is_grad_enabled() or not (weight.requires_grad or hidden.requires_grad):
                return torch.ops.molora_cpu.head(hidden, prior, self.net)
        return self(hidden, prior).log_softmax(-1)  # type: ignore[no-any-return]

    @property
    def net(self) -> list[Tensor]:
        """Weight and bias of both layers, as the operator takes them."""
        return [self.inner.weight, self.inner.bias, self.outer.weight, self.outer.bias]

    @property
    def compiled(self) -> bool:
        """Whether the operator is loaded here and can run this head."""
        weight = self.inner.weight
        return cpu_ops.loaded() and weight.is_cpu and weight.dtype == torch.float64


class LinearHead(nn.Module):
    """The closed-form head: weight (d, E), bias (E,)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.zeros(width, experts))
        self.bias = nn.Parameter(torch.zeros(experts))

    def forward(self, hidden: Tensor, prior: Tensor | None) -> Tensor:
        """As TapHead's."""
        out = normed(hidden, self.weight.dtype) @ self.weight + self.bias
        return out if prior is None else out.log_softmax(-1) + prior.to(out.dtype)

    def log_probabilities(self, hidden: Tensor, prior: Tensor | None) -> Tensor:
        """Of the experts, (..., E), as `forward`."""
        return self(hidden, prior).log_softmax(-1)  # type: ignore[no-any-return]


def normed(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden (..., d) layer-normed without parameters, in `dtype`."""
    return F.layer_norm(hidden.to(dtype), (hidden.shape[-1],))


def default_taps(n_layers: int) -> tuple[int, ...]:
    """1, L/8 and L/2: where the measured routers read (one more early tap gains little, late ones lose)."""
    return tuple(sorted({min(1, n_layers - 1), n_layers // 8, n_layers // 2} - {0})) or (0,)


def tap_groups(taps: Sequence[int], n_layers: int) -> list[tuple[int, int]]:
    """[first, end) of the layers that each tap decides. Raises InputError for taps outside the base."""
    ordered = sorted(set(taps))
    if not ordered or ordered[0] < 0 or ordered[-1] >= n_layers:
        raise InputError(
            f"taps {', '.join(map(str, taps)) or '(none)'} are not layers of a base with {n_layers}",
            f"give layers from 0 to {n_layers - 1}",
        )
    return list(zip(ordered, [*ordered[1:], n_layers], strict=True))


class _HeadStage(LiveStage):
    """One head per tap. tensors: `taps.<i>.*`, the parameters of head i from the input up, and statistics
    (not read here). params: head, hidden (units of an "mlp" head), prior."""

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        if spec.params.get("head") not in (MLP, LDA):
            raise InputError(f"the {self.kind} router's header names no head that this molora knows", _AGAIN)
        self.heads = nn.ModuleList([self._head(i, tensors) for i in range(len(self.taps))])
        self.heads.double().requires_grad_(False).eval().to(around.device)

    def _head(self, number: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        own = {k.removeprefix(f"taps.{number}."): t for k, t in tensors.items()}
        experts = len(self.experts)
        if self.spec.params["head"] == LDA:
            width = stage_tensor(own, "weight", (None, experts), self.kind).shape[0]
            head: nn.Module = LinearHead(width, experts)
        else:
            units, wide = stage_tensor(own, "inner.weight", (None, None), self.kind).shape
            prior = experts if self.prior is not None else 0
            head = TapHead(wide - prior, experts, prior=prior, hidden=units)
        shapes = {name: tuple(p.shape) for name, p in head.state_dict().items()}
        head.load_state_dict({n: stage_tensor(own, n, shape, self.kind) for n, shape in shapes.items()})
        return head

    @property
    def prior(self) -> str | None:
        kind = self.spec.params.get("prior")
        return kind if isinstance(kind, str) else None

    def parameters(self) -> list[nn.Parameter]:
        """What training through the base's loss changes; `requires_grad_` them first."""
        return list(self.heads.parameters())

    def tensors(self) -> dict[str, Tensor]:
        """The heads as a router file keeps them, float32."""
        state = self.heads.state_dict()
        return {f"taps.{name}": value.detach().float().cpu().contiguous() for name, value in state.items()}

    def score(self, tap: int, hidden: Tensor, mask: Tensor, prior: Tensor | None) -> Scores:
        head: Any = self.heads[self.taps.index(tap)]
        if hidden.shape[-1] != head.width:
            raise InputError(
                f"the {self.kind} router reads hidden states of {head.width} numbers, the base has "
                f"{hidden.shape[-1]}",
                _AGAIN,
            )
        return Scores(head.log_probabilities(hidden, prior).unsqueeze(2))


@register_kind
class TapsStage(_HeadStage):
    """Re-gates the layers above a few depths."""

    kind = "taps"


@register_kind
class LayerStage(_HeadStage):
    """A head for every layer, on that layer's own input."""

    kind = "layer"


@register_kind
class HiddenStage(_HeadStage):
    """A head on one deep hidden state of the base alone; decides all layers, in two passes. params: tap."""

    kind = "hidden"
    first_pass = True

    @property
    def taps(self) -> tuple[int, ...]:
        tap = self.spec.params.get("tap")
        if not isinstance(tap, int) or not 0 <= tap <= self.around.n_layers:
            raise InputError("the hidden router's header names no layer of this base", _AGAIN)
        return (tap,)
