"""Modules that take the place of a base model's linears and embeddings and add each token's adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from molora_kernels import (
    Bank,
    Plan,
    make_extent,
    mixed_delta,
    mixed_linear,
    plain_linear,
    routed_embedding,
)
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from molora_cli.core.routed.context import Context
from molora_cli.core.routed.int8 import Int8Linear
from molora_cli.errors import InputError, MoloraError

if TYPE_CHECKING:
    from molora_cli.core.adapter.factors import Factors


class Replacement(nn.Module):
    """Whatever stands in the place of a base model's module. base: that module, called and never changed."""

    base: nn.Module

    # Model code reads these of the module it put here.
    @property
    def weight(self) -> Tensor:
        return self.base.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]


class RoutedModule(Replacement):
    """The common part: the base module, its adapters' factors, and the place in the model.

    present: (slot, factors) of the adapters that touch it, slots ascending. A (R, in) and B (out, R) are
    parameters in the base's compute dtype, frozen until `requires_grad_` is set. The norm of DoRA is taken
    once, from the factors given here: training A or B afterwards does not move it.
    """

    A: nn.Parameter
    B: nn.Parameter
    owner: Tensor
    extent: Tensor
    scale: Tensor
    out_scale: Tensor | None
    out_bias: Tensor | None

    def __init__(
        self,
        base: nn.Module,
        present: Sequence[tuple[int, Factors]],
        context: Context,
        *,
        path: str,
        layer: int,
        is_head: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.base = base
        self.path, self.layer, self.is_head = path, layer, is_head
        self._made: Bank | None = None  # built when first used: the same tensors serve every call
        self._context = (context,)  # in a tuple: the context is no part of the module's own state

        def there(tensor: Tensor) -> Tensor:
            return tensor.to(device, dtype)

        self.A = nn.Parameter(torch.cat([there(f.A) for _, f in present]), requires_grad=False)
        self.B = nn.Parameter(self._columns([there(f.B) for _, f in present]), requires_grad=False)
        owner = torch.cat([torch.full((len(f.A),), slot, device=device) for slot, f in present])
        scale = torch.cat([torch.full((len(f.A),), float(f.scale), device=device) for _, f in present])
        ranks, factor = [0] * (context.n_adapters + 1), torch.zeros(context.n_adapters + 1, device=device)
        for slot, f in present:
            ranks[slot], factor[slot] = len(f.A), float(f.scale)
        self._max_rank = max(ranks)
        self.register_buffer("owner", owner, persistent=False)
        self.register_buffer("extent", make_extent(ranks, device), persistent=False)
        self.register_buffer("scale", factor, persistent=False)
        self.register_buffer("out_scale", self._out_scale(present, device), persistent=False)
        self.register_buffer("out_bias", self._out_bias(present, device), persistent=False)
        self.layout = context.layout(owner, scale.float())
        parts = [self.A, self.B, self.out_scale, self.out_bias]
        self.finite = all(bool(t.isfinite().all()) for t in parts if t is not None)

    def _columns(self, parts: list[Tensor]) -> Tensor:
        """B (out, R) side by side; stored by columns where a kernel reads the columns of one slot alone."""
        if self._context[0].backend == "torch":
            return torch.cat(parts, dim=1)
        return torch.cat([part.t() for part in parts]).t()

    def grow(self, slot: int, factors: Factors | None) -> None:
        """Room for slot `slot`, one more than there were; None where its adapter leaves this module alone.

        The tables by slot become longer, and the adapter's columns stand beside the others'.
        """
        device, dtype = self.A.device, self.A.dtype
        present = [] if factors is None else [(slot, factors)]
        scale = 0.0 if factors is None else float(factors.scale)
        rank = 0 if factors is None else len(factors.A)
        self.extent = torch.cat([self.extent, self.extent.new_tensor([[len(self.owner), rank]])])
        self.scale = torch.cat([self.scale, self.scale.new_tensor([scale])])
        self.out_scale = _longer(self.out_scale, self._out_scale(present, device), 1.0)
        self.out_bias = _longer(self.out_bias, self._out_bias(present, device), 0.0)
        self._max_rank = max(self._max_rank, rank)
        self._made = None
        if factors is None:
            return
        A, B = factors.A.to(device, dtype), factors.B.to(device, dtype)
        self.A = nn.Parameter(torch.cat([self.A.detach(), A]), requires_grad=False)
        self.B = nn.Parameter(self._columns([self.B.detach(), B]), requires_grad=False)
        self.owner = torch.cat([self.owner, self.owner.new_full((rank,), slot)])
        parts = [A, B, self.out_scale, self.out_bias]
        self.finite = self.finite and all(bool(t.isfinite().all()) for t in parts if t is not None)

    def _out_scale(self, present: Sequence[tuple[int, Factors]], device: torch.device) -> Tensor | None:
        """(S, out) float32: magnitude / row norm of W + s B A (Liu et al., arXiv 2402.09353, eq. 5); one
        elsewhere."""
        if all(f.magnitude is None for _, f in present):
            return None
        weight = dense_weight(self.base, self.path).to(device).float()  # (out, in)
        out_scale = torch.ones(self._context[0].n_adapters + 1, weight.shape[0], device=device)
        for slot, f in present:
            if f.magnitude is not None:
                moved = weight + f.scale * (f.B.to(device).float() @ f.A.to(device).float())
                out_scale[slot] = f.magnitude.to(device).float().flatten() / moved.norm(dim=1)
        return out_scale

    def _out_bias(self, present: Sequence[tuple[int, Factors]], device: torch.device) -> Tensor | None:
        """(S, out) float32: lora_bias times scale; zero elsewhere."""
        if all(f.bias is None for _, f in present):
            return None
        out_bias = torch.zeros(self._context[0].n_adapters + 1, len(self.B), device=device)
        for slot, f in present:
            if f.bias is not None:
                out_bias[slot] = f.scale * f.bias.to(device).float()
        return out_bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoutedModule:
        """Follow the model to another device or dtype, but keep scales and biases in float32: a factor near
        one would lose what makes it differ from one.
        """
        exact = {name: getattr(self, name) for name in ("scale", "out_scale", "out_bias")}
        super()._apply(fn, recurse)
        for name, tensor in exact.items():
            setattr(self, name, None if tensor is None else tensor.to(self.A.device))
        self._made = None
        return self

    def _plan(self, lead: torch.Size) -> Plan | None:
        """This layer's plan, checked against the leading dimensions of what the module was given."""
        plan = self._context[0].plan(self.layer, self.is_head)
        if plan is None or tuple(lead) == plan.shape or tuple(lead) == (len(plan.slots),):
            return plan
        raise MoloraError(
            f"module '{self.path}' was called with tokens {tuple(lead)}, but their routes are {plan.shape}: "
            "this base hands its tokens on in an order that cannot be followed",
            "leave the module out of the adapters",
        )

    def _bank(self) -> Bank:
        if self._made is None:
            base_bias = getattr(self.base, "bias", None) if self.out_scale is not None else None
            self._made = Bank(
                self.A,
                self.B,
                self.owner,
                self.layout,
                self.out_scale,
                self.out_bias,
                base_bias,
                self.finite,
                self.extent,
                self.scale,
                self._max_rank,
            )
        return self._made


def _longer(known: Tensor | None, grown: Tensor | None, rest: float) -> Tensor | None:
    """A table by slot, (S, out), with a row more: `grown` (S + 1, out) where its last row says something,
    otherwise `known` with a row of `rest`. None where neither is there."""
    if grown is None:
        if known is None:
            return None
        return torch.cat([known, known.new_full((1, known.shape[1]), rest)])
    return grown if known is None else torch.cat([known, grown[-1:]])


class RoutedLinear(RoutedModule):
    """In place of a linear: nn.Linear, Conv1D, a fused projection, or a quantised linear."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """x: (B, T, in) or (B*T, in) -> the mixture, (..., out)."""
        plan, backend, base = self._plan(x.shape[:-1]), self._context[0].backend, self.base
        if backend != "torch" and is_plain(base):
            if plan is None:
                return plain_linear(x, base.weight, base.bias, backend, row_scale(base))
            bank = self._bank()
            return mixed_linear(x, base.weight, base.bias, bank, plan, backend, row_scale(base))
        y = base(x, *args, **kwargs)
        return y if plan is None else mixed_delta(x, y, self._bank(), plan, backend)

    @property
    def in_features(self) -> int:
        return self.A.shape[1]

    @property
    def out_features(self) -> int:
        return self.B.shape[0]


class PlainLinear(Replacement):
    """In place of a linear that no adapter touches, where a backend is faster than the module."""

    def __init__(self, base: nn.Linear | Int8Linear, backend: str) -> None:
        super().__init__()
        self.base, self.backend = base, backend

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) -> W x + bias, (..., out)."""
        base = self.base
        if is_plain(base):
            return plain_linear(x, base.weight, base.bias, self.backend, row_scale(base))
        return base(x)

    @property
    def in_features(self) -> int:
        return self.base.in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        return self.base.out_features  # type: ignore[return-value]


class RoutedEmbedding(RoutedModule):
    """In place of the input embedding. A is (R, vocabulary): the shrink is a lookup."""

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (B, T) -> the mixture, (B, T, out)."""
        y = self.base(ids)
        plan = self._plan(ids.shape)
        if plan is None:
            return y
        return routed_embedding(ids, y, self._bank(), plan, getattr(self.base, "embed_scale", 1.0))

    @property
    def num_embeddings(self) -> int:
        return self.A.shape[1]

    @property
    def embedding_dim(self) -> int:
        return self.B.shape[0]


def is_plain(base: nn.Module) -> TypeGuard[nn.Linear | Int8Linear]:
    """Whether a module is W x + bias with a dense or int8 weight and nothing around it, so that an operator
    may stand for it.

    Read at every call: hooks (offloading) and parametrisations come later.
    """
    return (
        type(base) in (nn.Linear, Int8Linear)
        and type(base.weight) in (Tensor, nn.Parameter)
        and not base._forward_pre_hooks
        and not base._forward_hooks
    )


def row_scale(base: nn.Linear | Int8Linear) -> Tensor | None:
    """What the rows of an int8 weight are to be multiplied with, (out,) float32; None for a dense weight."""
    return base.row_scale if isinstance(base, Int8Linear) else None


def features(base: nn.Module) -> tuple[int, int] | None:
    """(in, out) of a module that can be routed; None for one that cannot."""
    if isinstance(base, nn.Embedding):
        return base.num_embeddings, base.embedding_dim
    if isinstance(base, Conv1D):
        return base.weight.shape[0], base.weight.shape[1]
    if isinstance(base, (nn.modules.conv._ConvNd, nn.Bilinear)):
        return None
    for names in (("in_features", "out_features"), ("infeatures", "outfeatures")):
        sizes = tuple(getattr(base, name, None) for name in names)
        if isinstance(sizes[0], int) and isinstance(sizes[1], int):
            return sizes[0], sizes[1]
    return None


def dense_weight(base: nn.Module, path: str) -> Tensor:
    """The weight as (out, in). Raises InputError where the base holds it in another form (quantised)."""
    if isinstance(base, Int8Linear):
        return base.widened()
    weight, sizes = getattr(base, "weight", None), features(base)
    if isinstance(weight, Tensor) and weight.is_floating_point() and sizes is not None:
        turned = weight.t() if isinstance(base, (nn.Embedding, Conv1D)) else weight
        if type(weight) in (Tensor, nn.Parameter) and tuple(turned.shape) == (sizes[1], sizes[0]):
            return turned.detach()
    raise InputError(
        f"a DoRA adapter touches '{path}', whose base weight is not a dense floating-point matrix "
        f"({type(base).__name__}); DoRA needs its norm",
        "load the base unquantised, or leave the DoRA adapter out",
    )
