"""A compiled step in this process, on the tensors of one routed model."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from molora_cli.core.routed.next_token import NextToken
from molora_cli.core.runtime.cache import RoomCache
from molora_cli.core.runtime.package import PackageError
from molora_cli.core.runtime.step import TABLES, TOP, listening

_LOOKED_AT = 4  # weights, before every token


class Program(Protocol):
    """What runs a step. constants: names of the tensors that it wants. about: sizes and literals of them."""

    constants: list[str]
    about: dict[str, Any]

    def bind(self, tensors: dict[str, Tensor]) -> None: ...

    def run(self, inputs: list[Tensor]) -> Tensor: ...


class PackagedProgram:
    """A step out of a package. Raises PackageError where it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        from molora_kernels import cpu_ops

        cpu_ops.load()
        try:
            # not aoti_load_package: it imports the compiler, which takes a second
            self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
            self.constants = list(self._loader.get_constant_fqns())
            self.about = json.loads(self._loader.get_metadata()["molora"])
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise PackageError(f"{path} cannot be loaded: {str(error).splitlines()[0][:200]}") from error

    def bind(self, tensors: dict[str, Tensor]) -> None:
        """These tensors from here on; they are read where they are, so the caller keeps them."""
        self._loader.load_constants(tensors, False, True, True)

    def run(self, inputs: list[Tensor]) -> Tensor:
        return self._loader.boxed_run(inputs)[0]  # type: ignore[no-any-return]


class LoadedStep:
    """One token at a time through `base`, whose tensors the program reads. slots: adapters + 1."""

    def __init__(self, program: Program, base: Any, slots: int) -> None:
        self._program = program
        count = int(base.config.get_text_config(decoder=True).num_hidden_layers)
        self._token = torch.zeros(1, 1, dtype=torch.int64)
        self._position = torch.zeros(1, dtype=torch.int64)
        self._rows = count
        self._held: dict[str, Tensor] = {}
        self.bind(base, slots)

    def bind(self, base: Any, slots: int) -> None:
        """Read these tensors from here on. Raises PackageError where they are not what was compiled."""
        own: dict[str, Tensor] = dict(base.named_parameters(remove_duplicate=False))
        own.update(base.named_buffers(remove_duplicate=False))
        about, held = self._program.about, {}
        for name in self._program.constants:
            if name in about["literals"]:
                shape, dtype, values = about["literals"][name]
                held[name] = torch.tensor(values, dtype=_dtype(dtype)).reshape(shape)
                continue
            found = own.get(name.removeprefix("base."))
            if found is None and name.endswith(TABLES):
                found = _nothing(name, own, slots, base.dtype)
            if found is None:
                raise PackageError(f"the base has no tensor {name}")
            size = about["sizes"].get(name)
            if size is not None and [list(found.shape), str(found.dtype)] != size:
                raise PackageError(f"{name} is {tuple(found.shape)} {found.dtype}, compiled was {size}")
            held[name] = found.detach()
        self._program.bind(held)
        self._held = held
        self._sample = _sample(base)
        self._weights = [_place(owner, name) for owner, name in self._sample]

    def is_stale(self) -> bool:
        """Whether the base's weights are elsewhere than those that were bound: some of them are looked at."""
        return [_place(owner, name) for owner, name in self._sample] != self._weights

    def run(self, token: int, decided: NextToken, cache: RoomCache) -> Tensor | None:
        """Logits (V,) float32 after `token`, whose keys and values join the cache; None, and nothing has
        happened, where the cache or the route is of another kind."""
        rooms = cache.rooms()
        if rooms is None or decided.width > TOP:
            return None
        # new ones for every token: its trace is read from them later
        slots = torch.zeros(self._rows, 1, TOP, dtype=torch.int64)
        gates = torch.zeros(self._rows, 1, TOP)
        decided.write(slots, gates)
        raised: list[BaseException] = []

        def tapped(layer: int, hidden: Tensor, slots: Tensor, gates: Tensor) -> None:
            # the graph would turn Ctrl-C, or an error of the router, into one of its own
            try:
                if not raised:
                    decided.tap(layer, hidden, slots, gates)
            except BaseException as error:
                raised.append(error)

        self._token.numpy()[:] = token
        self._position.numpy()[:] = cache.length
        heard = listening(tapped) if decided.taps else contextlib.nullcontext()
        with torch.no_grad(), heard:
            logits = self._program.run([self._token, self._position, slots, gates, *rooms[0], *rooms[1]])
        if raised:
            raise raised[0]
        cache.advance()
        return logits


def _sample(base: Any) -> list[tuple[Any, str]]:
    """Some of the base's weights, as modules and names in them: to go through all takes too long."""
    found = [
        (module, name) for module in base.modules() for name, p in module._parameters.items() if p is not None
    ]
    return found[:: max(1, len(found) // _LOOKED_AT)]


def _place(owner: Any, name: str) -> tuple[int, torch.dtype] | None:
    parameter = owner._parameters.get(name)
    return None if parameter is None else (parameter.data_ptr(), parameter.dtype)


def _nothing(name: str, own: dict[str, Tensor], slots: int, dtype: torch.dtype) -> Tensor | None:
    """The table of a linear that no adapter touches."""
    path, _, table = name.removeprefix("base.").rpartition(".")
    weight = own.get(f"{path}.base.weight")
    if weight is None:
        return None
    if table == "A":
        return torch.zeros(0, weight.shape[1], dtype=dtype)
    if table == "B":
        return torch.zeros(0, weight.shape[0], dtype=dtype).t()
    if table == "extent":
        return torch.zeros(slots, 2, dtype=torch.int64)
    return torch.zeros(slots) if table == "scale" else None


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found
