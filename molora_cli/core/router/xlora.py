"""The `xlora` router: the classifier of an X-LoRA model that PEFT saved, with the gates that PEFT computes.

    z = W h + b, or W_n relu(... relu(W_1 h + b_1)) + b_n      h (d,): what the base alone gives, after its
    s = softmax(z / temperature)                               last norm
    gates: s; its k largest where PEFT's top_k_lora is set, as they are or through one more softmax;
    times global_scaling_weight

(Buehler and Buehler, arXiv 2402.07148; PEFT's tuners/xlora, 0.21.) Two passes. The gates need not sum to 1:
what is missing is the base's gate, which adds nothing. With PEFT's layerwise scalings every adapted module
has gates of its own (kind `xlora-modules`), else all share them. Unlike PEFT's, generation keeps keys and
values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.adapter.xlora import XLoraFolder
from molora_cli.core.router.kinds import LiveStage, Scores, Surroundings, register_kind, stage_tensor
from molora_cli.core.router.spec import BASE_EXPERT, StageSpec
from molora_cli.errors import InputError

_AGAIN = "attach it again: molora attach-router BUNDLE --kind xlora --xlora FOLDER --force"
_LEAST = 1e-12  # less than this is missing from 1 by rounding


def fit_xlora(
    folder: XLoraFolder, experts: Sequence[str], modules: Sequence[str], n_layers: int
) -> tuple[StageSpec, dict[str, Tensor]]:
    """The stage and its tensors `linear.<n>.weight`, `.bias`, float32.

    experts: the bundle's adapters in the order of the folder's. modules: paths that some adapter touches, in
    the base's order. Raises InputError for settings that are no gates, or a classifier of other sizes.
    """
    soft, again = folder.flag("enable_softmax", True), folder.flag("enable_softmax_topk", False)
    weight, temperature = folder.number("global_scaling_weight", 1), folder.number("softmax_temperature", 1)
    top_k = None if folder.config.get("top_k_lora") is None else int(folder.number("top_k_lora", 1))
    train = "train a router: molora train-router BUNDLE --data NAME=FILE ..."
    if not soft and not again:
        raise InputError(f"{folder.shown}: without enable_softmax its scalings are no gates", train)
    if folder.number("scaling_pass_value", 0) != 0:
        raise InputError(f"{folder.shown}: its first pass runs with adapters (scaling_pass_value)", train)
    if not 0 < weight <= 1:
        raise InputError(
            f"{folder.shown}: its global_scaling_weight is {weight:g}; gates go up to 1",
            "multiply the adapters' lora_alpha by it and set it to 1",
        )
    if temperature <= 0 or (top_k is not None and top_k < 1):
        raise InputError(f"{folder.shown}: softmax_temperature {temperature:g}, top_k_lora {top_k}", train)
    layerwise = folder.flag("layerwise_scalings", False)
    tensors = {
        f"linear.{number}.{part}": torch.from_numpy(folder.linear(name, part).copy())
        for number, name in enumerate(folder.linears)
        for part in ("weight", "bias")
    }
    outputs = len(experts) * (len(modules) if layerwise else 1)
    found = tensors[f"linear.{len(folder.linears) - 1}.bias"].shape[0]
    if found != outputs:
        raise InputError(
            f"{folder.shown}: its classifier has {found} outputs, these {len(experts)} adapters "
            f"{f'in {len(modules)} modules ' if layerwise else ''}need {outputs}",
            "compose the bundle from the adapters in this folder",
        )
    spec = StageSpec(
        kind=XLoraModulesStage.kind if layerwise else XLoraStage.kind,
        input="hidden",
        experts=[*experts, BASE_EXPERT],
        groups=[(i, i + 1) for i in range(n_layers)] if layerwise else [],
        k=len(experts) + 1,
        temperature=1.0,
        params={
            "softmax": soft,
            "temperature": temperature,
            "top_k": top_k,
            "again": again,
            "weight": weight,
            "linears": len(folder.linears),
            "modules": list(modules) if layerwise else [],
        },
    )
    return spec, tensors


class _XLora(LiveStage):
    first_pass = True
    tunable = False

    def __init__(self, spec: StageSpec, tensors: Mapping[str, Tensor], around: Surroundings) -> None:
        super().__init__(spec, tensors, around)
        count = spec.params.get("linears")
        if not isinstance(count, int) or not 1 <= count <= 64 or list(spec.experts)[-1:] != [BASE_EXPERT]:
            raise InputError(f"the header of the {self.kind} router is not one that molora wrote", _AGAIN)
        self._linears = []
        width: int | None = None
        for number in range(count):
            weight = stage_tensor(tensors, f"linear.{number}.weight", (None, width), self.kind)
            bias = stage_tensor(tensors, f"linear.{number}.bias", (weight.shape[0],), self.kind)
            self._linears.append((weight.double(), bias.double()))
            width = weight.shape[0]
        wanted = (len(spec.experts) - 1) * max(1, len(self._modules))
        if width != wanted:
            raise InputError(f"the {self.kind} router's classifier has {width} outputs, not {wanted}", _AGAIN)

    @property
    def _modules(self) -> list[str]:
        return list(self.spec.params.get("modules") or [])

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.around.n_layers + 1,)

    def prepare(self, hidden: Tensor) -> Tensor:
        """What the last linear layer reads, float64. hidden (B, T, d): what the base gives after its norm."""
        width = self._linears[0][0].shape[1]
        if hidden.shape[-1] != width:
            found = f"the {self.kind} router reads {width} numbers a token, the base has {hidden.shape[-1]}"
            raise InputError(found, _AGAIN)
        x = hidden.double()
        for weight, bias in self._linears[:-1]:
            x = F.relu(F.linear(x, weight, bias))
        return x

    def _logp(self, logits: Tensor) -> Tensor:
        """Log-gates (..., E) of logits (..., E - 1), the base's last."""
        params: dict[str, Any] = self.spec.params
        gates = (logits / params["temperature"]).softmax(-1) if params["softmax"] else logits
        kept = torch.ones_like(gates, dtype=torch.bool)
        if params["top_k"] is not None:
            best = gates.topk(min(int(params["top_k"]), gates.shape[-1]), dim=-1).indices
            kept = torch.zeros_like(kept).scatter(-1, best, True)
        if params["again"]:
            gates = gates.masked_fill(~kept, -torch.inf).softmax(-1)
        gates = torch.where(kept, gates, 0.0) * params["weight"]
        rest = 1.0 - gates.sum(-1, keepdim=True)
        return torch.cat([gates, torch.where(rest > _LEAST, rest, 0.0)], dim=-1).log()


@register_kind
class XLoraStage(_XLora):
    """The same gates for all layers."""

    kind = "xlora"

    def score(self, tap: int, hidden: Tensor, mask: Tensor, prior: Tensor | None) -> Scores:
        logits = F.linear(self.prepare(hidden), *self._linears[-1])
        return Scores(self._logp(logits).unsqueeze(2))


@register_kind
class XLoraModulesStage(_XLora):
    """Gates of its own for each module. params: modules, paths in the order of the classifier's outputs."""

    kind = "xlora-modules"
    per_module = True

    def score_module(self, path: str, x: Tensor) -> Scores:
        """x: what `prepare` gave."""
        if path not in self._modules:
            raise InputError(f"the {self.kind} router does not know the module {path}", _AGAIN)
        adapters = len(self.experts) - 1
        first = self._modules.index(path) * adapters
        weight, bias = (part[first : first + adapters] for part in self._linears[-1])
        return Scores(self._logp(F.linear(x, weight, bias)).unsqueeze(2))
