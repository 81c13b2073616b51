"""The decode step as a graph: one token through the unchanged transformers model, to its logits.

The graph knows the base's shapes and nothing else. Weights, factors and routes come from outside:

    inputs      token (1, 1), position (1,), slots and gates (L, 1, TOP), keys and values of every layer
    constants   the base's tensors; of each linear in a layer A (R, in), B (out, R), extent (S, 2), scale (S,)

Neither R, S nor the room of keys and values is part of it: they only reach operators that read them from the
tensors. So adapters come and go, and texts grow, without another graph. A router that reads hidden states
is called by the graph in front of the layers it reads, and fills the rows of slots and gates behind it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from molora_cli.core.routed.attach import layer_number, put
from molora_cli.core.routed.int8 import Int8Linear
from molora_cli.core.routed.live import LayerHooks
from molora_cli.core.routed.modules import Replacement, row_scale

TOP = 8  # adapters that a token may take in one layer
ATTENTION = "molora_step"
# What a linear has of its adapters.
TABLES = (".A", ".B", ".extent", ".scale", ".out_scale", ".out_bias")
# Stand for the sizes that the graph does not know; above 8, because shorter tensors are taken for literals.
_RANK, _SLOTS, _ROOM = 16, 12, 32


# Called by the graph with the number of a layer, its input (1, 1, d), and slots and gates to write.
Listener = Callable[[int, Tensor, Tensor, Tensor], None]
_heard = threading.local()


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """The taps of graphs that this thread runs call this meanwhile."""
    before = getattr(_heard, "by", None)
    _heard.by = listener
    try:
        yield
    finally:
        _heard.by = before


def _tap(hidden: Tensor, slots: Tensor, gates: Tensor, layer: int) -> Tensor:
    listener = getattr(_heard, "by", None)
    if listener is not None:
        listener(layer, hidden, slots, gates)
    return hidden.new_empty(0)


_library = torch.library.Library("molora_step", "DEF")
_library.define("tap(Tensor hidden, Tensor(a!) slots, Tensor(b!) gates, int layer) -> Tensor")
_library.impl("tap", _tap, "CPU")
torch.library.register_fake("molora_step::tap", lambda hidden, *rest: hidden.new_empty(0), lib=_library)


@dataclass(frozen=True)
class Shape:
    """What a graph is made of: all that two models must agree in to share one.

    kind: class of transformers. config: of the base. dtype: "float32", ... adapters: False where there are
    none at all, so that every linear is a plain product. extra: linears outside the layers (the head) that
    adapters touch. scaled, biased: linears with a table of output scales (DoRA) or biases. taps: layers whose
    input a router reads. int8: linears with int8 weights.
    """

    kind: str
    config: Mapping[str, Any]
    dtype: str
    adapters: bool
    extra: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()
    biased: tuple[str, ...] = ()
    taps: tuple[int, ...] = ()
    int8: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Shape:
        lists = {name: tuple(document[name]) for name in ("extra", "scaled", "biased", "taps", "int8")}
        return cls(**{**document, **lists})


@dataclass
class _Running:
    """What the modules of a step share while it is traced."""

    slots: Tensor | None = None
    gates: Tensor | None = None
    position: Tensor | None = None
    keys: Sequence[Tensor] = field(default_factory=list)
    values: Sequence[Tensor] = field(default_factory=list)
    written: set[int] = field(default_factory=set)  # layers whose attention has run

    def tap(self, layer: int, hidden: Tensor) -> None:
        torch.ops.molora_step.tap(hidden, self.slots, self.gates, layer)


class StepLinear(Replacement):
    """In place of a linear. row: whose slots and gates it takes, None = no adapters. dtype: of factors."""

    base: nn.Linear | Int8Linear
    A: nn.Parameter
    B: nn.Parameter
    extent: Tensor
    scale: Tensor
    out_scale: Tensor | None
    out_bias: Tensor | None

    def __init__(
        self,
        base: nn.Linear | Int8Linear,
        running: _Running,
        row: int | None,
        scaled: bool,
        biased: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.base, self.row = base, row
        self._running = (running,)
        if row is None:
            return
        out, inputs = base.weight.shape
        self.A = nn.Parameter(torch.empty(_RANK, inputs, dtype=dtype), requires_grad=False)
        self.B = nn.Parameter(torch.empty(_RANK, out, dtype=dtype).t(), requires_grad=False)
        self.register_buffer("extent", torch.zeros(_SLOTS, 2, dtype=torch.int64))
        self.register_buffer("scale", torch.zeros(_SLOTS))
        self.register_buffer("out_scale", torch.zeros(_SLOTS, out) if scaled else None)
        self.register_buffer("out_bias", torch.zeros(_SLOTS, out) if biased else None)

    def forward(self, x: Tensor) -> Tensor:
        """x (1, 1, in) -> (1, 1, out)."""
        ops, base = torch.ops.molora_cpu, self.base
        own = (base.weight, base.bias, row_scale(base))
        if self.row is None:
            return ops.gemv(x, *own)
        running = self._running[0]
        assert running.slots is not None and running.gates is not None
        slots, gates = running.slots[self.row], running.gates[self.row]
        tables = (self.A, self.B, self.extent, self.scale)
        return ops.linear(x, *own, *tables, slots, gates, self.out_scale, self.out_bias)

    @property
    def in_features(self) -> int:
        return self.base.in_features  # type: ignore[return-value]

    @property
    def out_features(self) -> int:
        return self.base.out_features  # type: ignore[return-value]


class _StepCache:
    """What the base takes for its cache. New keys and values pass through: the attention writes them where
    they belong, and reads the others."""

    is_compileable = False

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


class Step(nn.Module):
    """The base for one token. base: a model of transformers whose linears are `StepLinear`s."""

    def __init__(self, base: Any, running: _Running, cache_name: str) -> None:
        super().__init__()
        self.base = base
        self._running, self._cache_name = (running,), cache_name

    def forward(
        self,
        token: Tensor,
        position: Tensor,
        slots: Tensor,
        gates: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """The logits of the next token, (V,) float32. Keys and values are written in place at `position`."""
        running = self._running[0]
        running.slots, running.gates, running.position = slots, gates, position
        running.keys, running.values, running.written = keys, values, set()
        named = {self._cache_name: _StepCache(), "use_cache": True}
        output = self.base.forward(input_ids=token, position_ids=position.unsqueeze(0), **named)
        return output.logits[0, -1].float()


def make_step(shape: Shape) -> Step:
    """The step of a base with that shape, its tensors without values. Raises ValueError where it is no model
    of transformers."""
    import inspect

    import transformers

    kind: Any = getattr(transformers, shape.kind, None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ValueError(f"{shape.kind} is no model of transformers")
    running = _Running()
    _register(running)
    read: Any = kind.config_class
    config = read.from_dict(dict(shape.config))
    with torch.device("meta"):
        base = kind._from_config(config, dtype=getattr(torch, shape.dtype), attn_implementation=ATTENTION)
    base.to_empty(device="cpu")  # memory that nobody touches takes none
    base.tie_weights()
    base.requires_grad_(False)
    dtype = getattr(torch, shape.dtype)
    for path, module in list(base.named_modules()):
        if type(module) is nn.Linear:
            own = Int8Linear.empty(module) if path in shape.int8 else module
            has = (path in shape.scaled, path in shape.biased)
            put(base, path, StepLinear(own, running, _row(path, shape, config), *has, dtype))
    if shape.taps:
        LayerHooks(base, shape.taps, running.tap)
    takes = inspect.signature(base.forward).parameters
    return Step(base.eval(), running, "cache" if "cache" in takes else "past_key_values").eval()


def _row(path: str, shape: Shape, config: Any) -> int | None:
    number = layer_number(path)
    if not shape.adapters or (number is None and path not in shape.extra):
        return None
    return number if number is not None else layers(config) - 1


def layers(config: Any) -> int:
    return int(config.get_text_config(decoder=True).num_hidden_layers)


def _register(running: _Running) -> None:
    """Make transformers call the operator for attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **more: Any,
    ) -> tuple[Tensor, None]:
        """query (1, H, 1, D), key (1, G, 1, D), value (1, G, 1, E) -> (1, 1, H, E)."""
        asked = sorted(name for name in _CHANGES if more.get(name) is not None)
        if attention_mask is not None:
            asked.append("a mask of its own")
        if asked:
            raise ValueError(f"its attention has {asked[0]}")
        layer = module.layer_idx
        if layer in running.written:
            raise ValueError("its attention runs twice in a layer")
        running.written.add(layer)
        for new, room in ((key, running.keys[layer]), (value, running.values[layer])):
            if (new.shape[1], new.shape[3]) != (room.shape[1], room.shape[3]):
                raise ValueError("it keeps keys and values in another form")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        kept = (running.keys[layer], running.values[layer], running.position)
        return torch.ops.molora_cpu.attend(query, key, value, *kept, scale), None

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attend)


# what would make an attention another one than softmax(scale q K^T) V
_CHANGES = ("softcap", "s_aux", "sinks", "sliding_window", "position_bias", "head_mask", "block_indices")


def example_inputs(shape: Shape, step: Step) -> tuple[Any, ...]:
    """Inputs of the right shapes and dtypes."""
    text = step.base.config.get_text_config(decoder=True)
    count, dtype = layers(step.base.config), getattr(torch, shape.dtype)
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    token, position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    slots, gates = torch.zeros(count, 1, TOP, dtype=torch.int64), torch.zeros(count, 1, TOP)
    rooms = [[torch.zeros(1, heads, _ROOM, width, dtype=dtype) for _ in range(count)] for _ in range(2)]
    return token, position, slots, gates, *rooms


def export_step(shape: Shape) -> torch.export.ExportedProgram:
    """The graph. Raises whatever torch.export raises for code that it cannot trace."""
    step = make_step(shape)
    with torch.no_grad():
        return torch.export.export(step, example_inputs(shape, step), strict=False)
