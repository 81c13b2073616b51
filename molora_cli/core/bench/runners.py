"""What runs a forward: transformers' base, the routed model in its modes. One runner serves every bench."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from molora_cli.core.bench.compiled import compile_forward
from molora_cli.core.bench.material import Material
from molora_cli.core.bench.work import resident, ways
from molora_cli.core.routed.model import RoutedModel
from molora_cli.core.routed.state import state_of
from molora_cli.core.router.stack import RouterStack
from molora_cli.core.runtime.package import make_now
from molora_cli.core.runtime.runtime import Runtime, unsupported
from molora_cli.errors import InputError, MoloraError

BASE, ENGINE, GROUPS = "base", "engine", "groups"
# after the name of a side: our engine with the compiled step of a chat, the base compiled by torch
COMPILED = "-compiled"
EIGHT = "-int8"  # before that: with int8 weights


@dataclass
class Runner:
    """A model in one mode.

    name, title: as of `timing.Side`. model: called with input_ids and keywords. top: adapters that a token
    takes. cached: False where it cannot keep keys and values and runs the whole text for every token. static:
    its keys and values need room of a fixed size. select: puts the model into this mode. routed, material:
    the routed model where it is one, and what it was made of. runtime: what runs single tokens, None = the
    model itself. notes: what there is to say.
    """

    name: str
    title: str
    model: Any
    top: float = 0
    cached: bool = True
    static: bool = False
    select: Callable[[], object] | None = None
    routed: RoutedModel | None = None
    material: Material | None = None
    router: RouterStack | None = None
    runtime: Runtime | None = None
    notes: list[str] = field(default_factory=list)

    def ready(self) -> None:
        if self.select is not None:
            self.select()

    def forward(self, ids: Tensor, cache: Any = None, *, keep: int = 1) -> Any:
        """ids (1, T) after `cache` -> the output; logits of the last `keep` positions, 0 = of all."""
        named: dict[str, Any] = {"use_cache": self.cached}
        if self.cached and cache is not None:
            named[cache_argument(self.model)] = cache
        if keep:
            named["logits_to_keep"] = keep
        if self.runtime is not None and cache is not None and ids.shape[1] == 1:

            def eager() -> tuple[Tensor, Any]:
                output = self.model(input_ids=ids, **named)
                return output.logits[0, -1].float(), output.trace

            return self._token(int(ids), cache, eager)
        return self.model(input_ids=ids, **named)

    def _token(self, token: int, cache: Any, eager: Callable[[], tuple[Tensor, Any]]) -> Any:
        assert self.runtime is not None
        stepped = self.runtime.token(token, cache, None, eager)
        if stepped is None:
            said = ": ".join(["", *self.runtime.said[-1:]])
            raise MoloraError(f"the side {self.name} fell back to an eager forward{said}", "leave it out")
        return stepped

    def facts(self, cache: Any = None, first: int = 0) -> Mapping[str, Any]:
        """What a routed runner's modules ran, and how often the route changed in `cache` from `first` on."""
        if self.routed is None:
            return {}
        found: dict[str, Any] = {}
        if self.top:
            found["paths"] = ways(self.routed)
            if self.material is not None:
                self.ready()
                found["memory"] = resident(self.routed, self.material.base, self.material.factors)
        state = state_of(cache)
        if self.router is not None and state is not None and state.length > first + 1:
            found["route_changes"] = changes(state.history.indices[:, first:])
        return found


def changes(indices: Tensor) -> float:
    """Share of neighbouring tokens whose routes differ anywhere. indices (1, T, G, k)."""
    one = indices[0]
    return float((one[1:] != one[:-1]).flatten(1).any(1).double().mean())


def cache_argument(model: Any) -> str:
    """Renamed in transformers 5.24."""
    base: Any = model.base if isinstance(model, RoutedModel) else model
    if hasattr(base, "get_base_model"):  # PEFT's
        base = base.get_base_model()
    return "cache" if "cache" in inspect.signature(type(base).forward).parameters else "past_key_values"


def new_cache(config: Any, room: int | None) -> Cache:
    """An empty cache that grows, or one with room for so many positions."""
    return DynamicCache(config=config) if room is None else StaticCache(config=config, max_cache_len=room)


def plain_copy(cache: Any, config: Any, room: int | None = None) -> Cache:
    """The keys and values of a growing cache alone, in one of transformers that no engine knows."""
    copy = new_cache(config, room)
    for number, layer in enumerate(cache.layers):
        copy.update(layer.keys.clone(), layer.values.clone(), number)
    return copy


def base_runner(material: Material, *, compiled: bool = False) -> Runner:
    """transformers' own forward."""
    if not compiled:
        return Runner(BASE, "transformers eager, no adapters", material.base)
    model = material.copy()
    compile_forward(model)
    return Runner(BASE + COMPILED, "transformers compiled, no adapters", model, static=True)


class Engine:
    """Our engine over one routed model: modes share its weights and adapters."""

    def __init__(self, material: Material, backend: str, *, compiled: bool = False, mark: str = "") -> None:
        """compiled: with the compiled decode step of a chat, made for the first mode that is asked for. mark:
        of its sides' names, EIGHT where the material has int8 weights."""
        self.material, self.mark = material, mark
        self.model = material.routed(backend)
        self.compiled = compiled
        self.runtime: Runtime | None = None

    def plain(self) -> Runner:
        """The engine with no adapter loaded: its fast linears alone, no router."""
        return self._runner(ENGINE, "own engine, no adapters", None, self.model.off)

    def routed(self, top: int) -> Runner:
        router = self.material.router(self.model)
        router.k = top
        kind = "the bundle's" if self.material.bundle is not None else "a random"
        title = f"own engine, top-{top}, {kind} {router.spec.kind} router"
        return self._runner(f"top{top}", title, router)

    def groups(self, top: int) -> Runner:
        """Layer groups that are decided as the forward goes."""
        router = self.material.deep_router(self.model)
        router.k = top
        title = f"own engine, top-{top}, {router.groups} layer groups by hidden states"
        return self._runner(GROUPS, title, router)

    def only(self, name: str) -> Runner:
        """One adapter on every token, applied as a mixture of one."""
        title = f"own engine, {name} on every token"
        return self._runner("only", title, None, lambda: self.model.only(name), top=1)

    def _runner(
        self,
        name: str,
        title: str,
        router: RouterStack | None,
        select: Callable[[], object] | None = None,
        top: int = 0,
    ) -> Runner:
        def routed() -> None:
            if self.model.router is not router:
                self.model.router = router
            self.model.auto()

        if self.compiled and self.runtime is None:
            (select or routed)()
            self.runtime = _compiled(self.model)
        return Runner(
            name + self.mark + (COMPILED if self.compiled else ""),
            title + (", int8 weights" if self.mark else "") + (", compiled" if self.compiled else ""),
            self.model,
            top=top if router is None else router.k,
            select=select or routed,
            routed=self.model,
            material=self.material,
            router=router,
            runtime=self.runtime,
        )

    def filled(self, ids: Tensor, room: int | None = None) -> Cache:
        """Keys and values of ids (1, T), made by the base alone, and known to the engine; room: as of
        `new_cache`."""
        self.model.off()
        roomy = None if self.runtime is None else self.runtime.new_cache()
        cache = roomy or new_cache(self.material.base.config, room)
        self.model(ids, use_cache=True, logits_to_keep=1, **{cache_argument(self.model): cache})
        return cache


def _compiled(model: RoutedModel) -> Runtime:
    """The compiled step of a model, made now where there is none yet. Raises InputError where there can be
    none."""
    runtime = Runtime(model, make=make_now)
    runtime.look()
    if not runtime.ready:
        reason = unsupported(model) or (runtime.said or ["it failed before"])[-1]
        raise InputError(
            f"this engine has no compiled decode step: {reason}", "leave the -compiled sides out"
        )
    return runtime


def changing_ids(router: RouterStack, before: Tensor, count: int, seed: int = 0) -> Tensor:
    """(1, count) token ids after before (1, T), each routed otherwise than the one before it, as far as 16
    draws allow. For routers on token ids."""
    generator = torch.Generator().manual_seed(seed)
    high = int(before.max()) + 1
    decision, state = router.decide(before, None, router.start(1))
    last, found = decision.route.indices[0, -1], []
    for _ in range(count):
        drawn = torch.randint(0, high, (16, 1), generator=generator)
        wide = [{n: t.expand(16, *t.shape[1:]) for n, t in stage.items()} for stage in state]
        decision, after = router.decide(drawn, None, wide)
        indices = decision.route.indices[:, 0]  # (16, G, k)
        other = (indices != last).flatten(1).any(1).nonzero().flatten()
        row = int(other[0]) if len(other) else 0
        found.append(int(drawn[row]))
        last = indices[row]
        state = [{n: t[row : row + 1] for n, t in stage.items()} for stage in after]
    return torch.tensor([found])


def random_ids(vocabulary: int, count: int, seed: int = 0) -> Tensor:
    """(1, count) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, min(vocabulary, 20000), (1, count), generator=generator)
