"""The routed model: a frozen base in which every token takes the adapter it needs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import molora_kernels
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from molora_cli.core.routed.attach import attach, detach
from molora_cli.core.routed.engine import AUTO, OFF, Engine
from molora_cli.core.routed.grow import grow
from molora_cli.core.routed.quantise import FULL, INT8, check_weights, quantise_base
from molora_cli.core.routed.route import BASE, Route
from molora_cli.errors import InputError
from molora_cli.text import printable

if TYPE_CHECKING:
    from molora_cli.core.adapter.factors import Factors
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.generate import TokenEvent
    from molora_cli.core.router.stack import RouterStack
    from molora_cli.core.runtime.runtime import Runtime


class RoutedModel(nn.Module):
    """A causal language model of transformers with adapters attached and a router in front.

    base: the transformers model; its forward, `generate`, pipelines and trainers are routed too. adapters:
    names, in the order that routes point into. tokenizer, bundle, router: None where there is none.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        factors: Mapping[str, Mapping[str, Factors]],
        *,
        router: RouterStack | None = None,
        tokenizer: Any = None,
        bundle: Bundle | None = None,
        backend: str = "torch",
    ) -> None:
        """factors: adapter name -> module path -> factors. backend: "torch" runs what trains and equals
        transformers bit for bit where no adapter is taken; "auto" the fastest. Raises InputError where
        factors do not fit the base, or the backend is not available.
        """
        super().__init__()
        self.backend = resolve_backend(backend, base.device.type)
        self.adapters = tuple(factors)
        self.tokenizer = tokenizer
        self.bundle = bundle
        base.requires_grad_(False)
        context = attach(base, factors, self.backend)
        self.base = base
        self.engine = Engine(base, context, self.adapters, router)
        # set by `compile_step`
        self.runtime: Runtime | None = None

    @classmethod
    def from_parts(
        cls,
        base_model: PreTrainedModel,
        factors: Mapping[str, Mapping[str, Factors]],
        *,
        router: RouterStack | None = None,
        tokenizer: Any = None,
        bundle: Bundle | None = None,
        backend: str = "torch",
    ) -> RoutedModel:
        """A routed model from a loaded base and factors by adapter name and module path; no bundle needed."""
        return cls(base_model, factors, router=router, tokenizer=tokenizer, bundle=bundle, backend=backend)

    # -- running -------------------------------------------------------------
    def forward(self, input_ids: Tensor | None = None, *, route: Route | None = None, **kwargs: Any) -> Any:
        """The base's forward, routed.

        input_ids: (B, T) int64. route: (B, T, k) or (B, T, G, k) for these tokens; None = what `auto`,
        `only` or `off` say. kwargs: whatever the base takes. Returns the base's output; `.trace` on it holds
        the routes. Raises InputError for a route that does not fit, or a cache without matching router state.
        """
        return self.base(input_ids=input_ids, route=route, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of transformers on the routed base."""
        return self.base.generate(*args, **kwargs)  # type: ignore[operator]

    def stream(self, messages_or_text: Any, **options: Any) -> Iterator[TokenEvent]:
        """Token events of an answer; see `molora_cli.core.generate.stream` for the options."""
        from molora_cli.core.generate import stream

        return stream(self, messages_or_text, **options)

    def compile_step(self, notify: Callable[[str], None] = lambda message: None) -> None:
        """Have `stream` and chats take a compiled step for each token after the first.

        It is compiled once per base and machine, beside this process; until it is there, and where there
        can be none, tokens are forwards as before. notify: told that it is being compiled, or why it is not.
        """
        from molora_cli.core.runtime.runtime import Runtime

        self.runtime = Runtime(self, notify)

    def add(self, name: str, modules: Mapping[str, Factors]) -> None:
        """One more adapter, the last in order: module path -> factors. Takes a fraction of a second.

        The router goes on choosing among the adapters it knows; the new one takes tokens where it is named.
        Raises InputError for a name that is taken, factors that do not fit the base, or modules that an
        `arrow` router would have to know; the model is then as it was.
        """
        if name in self.adapters:
            raise InputError(f"there is an adapter '{printable(name)}' already", "use another name")
        self.engine.check_modules(modules)
        grow(self.base, self.engine.context, name, modules)
        self.adapters = self.engine.adapters = (*self.adapters, name)
        if self.router is not None:
            self.router.adapters = self.adapters
            self.engine.router = self.router  # its hooks, on the modules that are routed now
        if self.runtime is not None:
            self.runtime.prepare()

    def detach(self) -> PreTrainedModel:
        """Take routing off and return the base as it was; this object is of no use afterwards."""
        self.engine.remove()
        self.runtime = None
        detach(self.base)
        return self.base

    # -- who decides ---------------------------------------------------------
    def auto(self) -> None:
        """The router decides again."""
        self.engine.mode, self.engine.chosen = AUTO, BASE

    def off(self) -> None:
        """No adapter at all: the base, bit for bit."""
        self.engine.mode, self.engine.chosen = OFF, BASE

    def only(self, name: str | None) -> None:
        """Every token takes this adapter; None is `auto`. Raises InputError for a name that is not there."""
        if name is None:
            self.auto()
            return
        self.engine.chosen = self.index(name)
        self.engine.mode = "only"

    def index(self, name: str) -> int:
        """The index of an adapter in routes. Raises InputError for a name that is not there."""
        if name not in self.adapters:
            raise InputError(
                f"there is no adapter '{printable(name)}' (there are: {', '.join(self.adapters)})",
                "use one of these names",
            )
        return self.adapters.index(name)

    @property
    def routing(self) -> tuple[Any, ...]:
        """What decides, as a value to compare: where it changed, a cached prefix holds keys of other
        routes."""
        router = self.router
        who = (self.engine.mode, self.engine.chosen)
        return who if router is None else (*who, id(router), router.muted, router.k, router.temperature)

    @property
    def router(self) -> RouterStack | None:
        return self.engine.router

    @router.setter
    def router(self, router: RouterStack | None) -> None:
        self.engine.router = router

    @property
    def muted(self) -> frozenset[str]:
        """Adapters that the router may not choose."""
        return frozenset() if self.router is None else self.router.muted

    @muted.setter
    def muted(self, names: Iterable[str]) -> None:
        self._tuned().muted = frozenset(names)

    @property
    def topk(self) -> int:
        """How many adapters the router gives a token."""
        return 1 if self.router is None else self.router.k

    @topk.setter
    def topk(self, k: int) -> None:
        self._tuned().k = k

    @property
    def temperature(self) -> float | None:
        """Of the router's gates; None = what the router file says."""
        return None if self.router is None else self.router.temperature

    @temperature.setter
    def temperature(self, value: float | None) -> None:
        self._tuned().temperature = value

    def _tuned(self) -> RouterStack:
        if self.router is None:
            raise InputError(
                "there is no router to adjust", "attach one: molora train-router BUNDLE --data NAME=FILE ..."
            )
        return self.router

    # -- the base's own ------------------------------------------------------
    @property
    def config(self) -> Any:
        return self.base.config

    @property
    def device(self) -> torch.device:
        return self.base.device

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


def resolve_backend(name: str, device: str = "cpu", notify: Callable[[str], None] | None = None) -> str:
    """The backend by name on a kind of device. Raises InputError for one that is unknown or not available."""
    try:
        return molora_kernels.resolve(name, device=device.partition(":")[0], notify=notify)
    except ValueError as error:
        raise InputError(
            f"--backend {printable(name)}: {error}", "use --backend torch, or leave it out"
        ) from error


def load(
    bundle: str | Path,
    *,
    base: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    backend: str = "auto",
    weights: str = FULL,
    trust_remote_code: bool = False,
    notify: Callable[[str], None] | None = None,
) -> RoutedModel:
    """The routed model of a bundle.

    base: where the base is, instead of what the bundle says. device: "cpu", "cuda", ...; "auto" = a GPU where
    there is one. dtype: "float32", "bfloat16", ...; "auto" = float32 on the CPU, else as the base is stored.
    backend: "torch", "cpu", "triton" (on a GPU); "auto" = "cpu" where it runs, else "torch". weights: "full",
    or "int8": the base's linears keep a byte a weight (`routed.int8`). notify: told of a backend that has to
    be compiled first or is missing, and of weights that stay; None = a Python warning. Raises InputError for
    a bundle that cannot be read or was changed after it was made, a base that does not match, or a backend
    that is not available.
    """
    from molora_cli.core.adapter.factors import load_bundle_factors
    from molora_cli.core.base.model import load_base_model, pick_device
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.router.kinds import Surroundings
    from molora_cli.core.router.stack import load_router

    check_weights(weights)
    backend = resolve_backend(backend, pick_device(device), notify)
    opened = Bundle.open(bundle, base=base)
    opened.verify()
    model, tokenizer = load_base_model(
        opened.base_path, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    if weights == INT8:
        for line in quantise_base(model).lines():
            (notify or warnings.warn)(line)
    factors = {
        entry.name: load_bundle_factors(opened.folder(entry.name), entry)
        for entry in opened.manifest.adapters
    }
    routed = RoutedModel(model, factors, tokenizer=tokenizer, bundle=opened, backend=backend)
    routed.eval()
    weight = model.get_input_embeddings().weight
    around = Surroundings(
        n_layers=routed.engine.context.n_layers, embedding=weight.detach(), device=weight.device
    )
    routed.router = load_router(opened, around)
    routed.engine.meta = {
        "bundle": str(opened.path),
        "digest": opened.digest,
        "base": opened.manifest.base.id,
    }
    return routed
