"""When a model's compiled step is used: at once where its package is there, else as soon as it is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from molora_kernels.cpu_ops import DTYPES
from torch import Tensor

from molora_cli.core.routed.attach import layer_number
from molora_cli.core.routed.int8 import Int8Linear
from molora_cli.core.routed.modules import Replacement, RoutedLinear, RoutedModule, is_plain
from molora_cli.core.routed.next_token import Traced
from molora_cli.core.routed.route import Route
from molora_cli.core.runtime.cache import RoomCache, new_cache
from molora_cli.core.runtime.loaded import LoadedStep, PackagedProgram, Program
from molora_cli.core.runtime.package import PackageError, damaged, failure, package_path, start, trusted
from molora_cli.core.runtime.step import TOP, Shape
from molora_cli.core.trace import Trace

Notify = Callable[[str], None]
LOOK_EVERY = 16  # tokens between two looks for a package that is being made
# RMS between compiled and eager logits, of their standard deviation (unrelated ones are 1.4 apart): in half
# widths the two round in other places
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.1
DOUBTS = 3  # tokens that may differ one after another where a router reads hidden states


@dataclass(frozen=True)
class Stepped:
    """What a token gave. logits: (V,) float32. found: its route, as the step or as a forward gives it."""

    logits: Tensor
    found: Traced | Trace

    @property
    def trace(self) -> Trace:
        """The token's route."""
        return self.found if isinstance(self.found, Trace) else self.found.trace()


# of a config, what says nothing of the graph
_ASIDE = (
    "transformers_version",
    "torch_dtype",
    "dtype",
    "architectures",
    "id2label",
    "label2id",
    "problem_type",
)


class Runtime:
    """The compiled step of one routed model, and the way to it.

    notify: told once that it is being compiled, or why it is not. load: how a package becomes a program;
    make: begins a build, None where another process is at it. builds: how many this object has begun. said:
    what it has told, in order.
    """

    def __init__(
        self,
        model: Any,
        notify: Notify = lambda message: None,
        *,
        load: Callable[[Path], Program] = PackagedProgram,
        make: Callable[[dict[str, Any], Path], Any] = start,
    ) -> None:
        self._model, self._notify, self._load, self._make = model, notify, load, make
        self._step: LoadedStep | None = None
        self._path: Path | None = None
        self.said: list[str] = []
        self._countdown = 0
        self._checked, self._doubts = False, 0
        self._taps: tuple[int, ...] = ()
        self.builds = 0
        self.prepare()

    @property
    def ready(self) -> bool:
        """Whether the next token may be a compiled one."""
        return self._step is not None

    def prepare(self) -> None:
        """Find the package for the model as it is now, or begin to make it; to be called when adapters came.

        A step that is loaded goes on where only factors changed.
        """
        reason = unsupported(self._model)
        if reason is not None:
            self._step, self._path = None, None
            return
        shape = shape_of(self._model)
        document = json.loads(json.dumps(shape.document(), default=str))
        path = package_path(document)
        if self._step is not None and path == self._path:
            self._bind(self._step)
            return
        self._step, self._path, self._checked, self._doubts = None, path, False, 0
        self._taps = shape.taps
        if path.is_file() and self._open():
            return
        known = failure(path)
        if known is not None:
            return  # it was said when it failed
        try:
            if self._make(document, path) is not None:  # None: another process is at it
                self.builds += 1
            self._tell(
                "the decode step is being compiled in the background, once for this base and machine: some "
                "minutes; answers get faster then"
            )
        except PackageError as error:
            self._path = None
            self._tell(f"the decode step is not compiled ({error}): tokens take longer")

    def look(self) -> None:
        """Take the package that has been made meanwhile. Cheap, to be called before every token."""
        if self._step is not None or self._path is None:
            return
        if self._countdown > 0:
            self._countdown -= 1
            return
        self._countdown = LOOK_EVERY
        if self._path.is_file() and self._open():
            return
        reason = failure(self._path)
        if reason is not None:
            self._path = None
            self._tell(f"the decode step could not be compiled ({reason}): tokens take longer")

    def _open(self) -> bool:
        """Take the package, or say why not; False where it is gone, because others could have written it."""
        path = self._path
        assert path is not None
        reason = trusted(path)
        if reason is not None:
            if not path.is_file():
                return False
            self._refuse(reason)
            return True
        try:
            program = self._load(path)
            self._step = LoadedStep(program, self._model.base, self._slots)
        except PackageError as error:
            if damaged(path):
                path.unlink(missing_ok=True)  # the next start makes it again
            self._refuse(str(error))
        return True

    def _bind(self, step: LoadedStep) -> None:
        self._checked, self._doubts = False, 0
        try:
            step.bind(self._model.base, self._slots)
        except PackageError as error:
            self._refuse(str(error))

    def _refuse(self, reason: str) -> None:
        self._step, self._path = None, None
        self._tell(f"the compiled decode step is not used ({reason}): tokens take longer")

    def _tell(self, message: str) -> None:
        if message not in self.said:
            self.said.append(message)
            self._notify(message)

    @property
    def _slots(self) -> int:
        return int(self._model.engine.context.n_adapters) + 1

    def new_cache(self) -> RoomCache | None:
        """An empty cache that both ways can use; None where this base has none."""
        return new_cache(self._model.config) if self._path is not None else None

    def token(
        self, token: int, cache: Any, given: Route | None, eager: Callable[[], tuple[Tensor, Any]]
    ) -> Stepped | None:
        """One more token of the text in `cache`; None, and nothing has happened, where it takes a forward.

        given: its route, (1, 1, [G,] k), where no router decides. eager: that forward, which gives the logits
        (V,) and the trace: the first token is computed both ways, up to DOUBTS where a router reads
        hidden states, and a step that fails or says something else is used no more.
        """
        if self._step is not None and self._step.is_stale():
            self.prepare()  # the base was moved, or got other weights
        self.look()
        if self._step is None or not isinstance(cache, RoomCache):
            return None
        decided = self._model.engine.next_token(token, cache, given)
        if decided is None or not set(decided.taps) <= set(self._taps):
            return None
        try:
            logits = self._step.run(token, decided, cache)
        except RuntimeError as error:  # the cache is as it was: a forward writes the token again
            self._refuse(f"it failed: {(str(error).splitlines() or ['?'])[0][:160]}")
            return None
        if logits is None:
            return None
        if self._checked:
            return Stepped(logits, decided.finish())
        cache.take_back()
        wanted, trace = eager()
        far = float((logits - wanted).square().mean().sqrt() / wanted.std().clamp_min(1e-9))
        self._checked = far <= TOLERANCE.get(self._model.base.dtype, HALF_TOLERANCE)  # False of NaN
        # rounding may turn a close decision about hidden states: one more token tells
        self._doubts += not self._checked
        if self._doubts >= (DOUBTS if decided.taps else 1):
            self._refuse(f"its first logits were off by {far:.2g} of their spread")
        return Stepped(wanted, trace)


def shape_of(model: Any) -> Shape:
    """The shape of a routed model's decode step."""
    config = json.loads(model.base.config.to_json_string(use_diff=False))
    config = {
        name: value for name, value in config.items() if not name.startswith("_") and name not in _ASIDE
    }
    routed = {path: m for path, m in model.base.named_modules() if isinstance(m, RoutedLinear)}
    return Shape(
        kind=type(model.base).__name__,
        config=config,
        dtype=str(model.base.dtype).removeprefix("torch."),
        adapters=bool(routed),
        extra=tuple(sorted(p for p in routed if layer_number(p) is None)),
        scaled=tuple(sorted(p for p, m in routed.items() if m.out_scale is not None)),
        biased=tuple(sorted(p for p, m in routed.items() if m.out_bias is not None)),
        taps=model.engine.step_taps or (),
        int8=tuple(sorted(p for p, m in _linears(model.base) if isinstance(m, Int8Linear))),
    )


def unsupported(model: Any) -> str | None:
    """Why this model has no compiled step, None where it may have one."""
    base = model.base
    if model.backend != "cpu":
        return f"the backend is {model.backend}"
    if not type(base).__module__.startswith("transformers."):
        return "the base's code is not transformers' own"
    if not getattr(base, "_supports_attention_backend", False):
        return "the base's attention is its own"
    if base.dtype not in DTYPES or getattr(base, "is_quantized", False):
        return "the base's weights are not plain"
    if new_cache(base.config) is None:
        return "the base does not keep all keys and values"
    head = base.get_output_embeddings()
    if not isinstance(getattr(head, "base", head), Int8Linear) and _is_tied(base) != bool(
        getattr(base.config.get_text_config(decoder=True), "tie_word_embeddings", False)
    ):
        return "the base's head is not tied to its embedding as its config says"
    if model.engine.step_taps is None or (model.router is not None and model.router.k > TOP):
        return "the router reads more than a token's hidden states on their way, or takes too many adapters"
    for module in base.modules():
        if isinstance(module, RoutedModule) and not isinstance(module, RoutedLinear):
            return "an adapter touches the embedding"
        if isinstance(module, Replacement) and not is_plain(module.base):
            return "an adapter touches a module that is no plain linear"
    return None


def _linears(base: Any) -> Iterator[tuple[str, Any]]:
    """Path and own module of every linear that something stands in for."""
    for path, module in base.named_modules():
        if isinstance(module, Replacement):
            yield path, module.base


def _is_tied(base: Any) -> bool:
    """Whether the head is the input embedding."""
    head = base.get_output_embeddings()
    weight = getattr(getattr(head, "base", head), "weight", None)
    return weight is not None and weight.data_ptr() == base.get_input_embeddings().weight.data_ptr()
