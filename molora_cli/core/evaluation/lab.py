"""The base with what is being measured attached to it: loaded when first needed, one thing at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from molora_cli.core.adapter.factors import Factors, load_bundle_factors
from molora_cli.core.base.model import load_base_model, load_tokenizer, pick_device, pick_dtype
from molora_cli.core.bundle.store import Bundle
from molora_cli.core.convert.merge import merge
from molora_cli.core.routed.model import RoutedModel, resolve_backend
from molora_cli.core.routed.quantise import FULL, INT8, check_weights, quantise_base
from molora_cli.core.router.files import load_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spec import read_spec
from molora_cli.core.router.stack import RouterStack
from molora_cli.errors import InputError

_MULTIPLY = ("weight", "scale")  # settings of a merge that multiply it


class Lab:
    """Models of one bundle. dtype, device, backend, weights: as `molora_cli.load` takes them.

    Only one model is alive at a time: asking for another one releases the one before it (but for
    `second_base`).
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "torch",
        weights: str = FULL,
        trust_remote_code: bool = False,
    ) -> None:
        bundle.verify()
        self.bundle = bundle
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, self.device)
        self.backend = resolve_backend(backend, self.device)
        check_weights(weights)
        self.weights = weights
        self.notes: list[str] = []  # of weights that stay
        self._trust = trust_remote_code
        self.tokenizer = load_tokenizer(bundle.base_path, trust_remote_code=trust_remote_code)
        if self.tokenizer is None:
            raise InputError(
                f"the base {bundle.base_path} has no tokenizer", "put its tokenizer.json beside its weights"
            )
        self.factors: dict[str, dict[str, Factors]] = {
            e.name: load_bundle_factors(bundle.folder(e.name), e) for e in bundle.manifest.adapters
        }
        self._base: Any = None
        self._second: Any = None
        self._routed: RoutedModel | None = None
        self._what: str | None = None
        # the last merge at 1/n each: dense ones take minutes, and weights only multiply what they give
        self._merge: tuple[str, dict[str, Factors]] | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        return tuple(self.factors)

    @property
    def digest(self) -> str:
        """Of the base and the adapters in order, without the router."""
        parts: list[Any] = [self.bundle.manifest.base.fingerprint.model_dump(mode="json")]
        parts += [
            [e.name, e.sha256, {m: v.scale for m, v in e.modules.items()}]
            for e in self.bundle.manifest.adapters
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def about(self) -> list[str]:
        """What an NLL measured here depends on, beside method and row."""
        import transformers

        versions = [torch.__version__, transformers.__version__]
        weights = [] if self.weights == FULL else [self.weights]
        return [self.digest, str(self.dtype), self.device, self.backend, *weights, *versions]

    # -- models ---------------------------------------------------------------
    def base(self) -> Any:
        """The base alone, as it was loaded; whatever was attached to it is taken off."""
        if self._routed is not None:
            self._routed.detach()
            self._routed = None
        self._what = None
        if self._base is None:
            self._base = self._loaded()
        return self._base

    def second_base(self) -> Any:
        """One more copy of the base, which nothing is ever attached to."""
        if self._second is None:
            self._second = self._loaded()
        return self._second

    def _loaded(self) -> Any:
        model, _ = load_base_model(
            self.bundle.base_path, dtype=self.dtype, device=self.device, trust_remote_code=self._trust
        )
        if self.weights == INT8:
            self.notes = quantise_base(model).lines()
        return model

    def forget(self) -> None:
        """Drop the base: something has changed it."""
        self._base = self._routed = self._what = None

    def routed(self) -> RoutedModel:
        """The bundle's adapters on the base; no router decides yet."""
        return self._attached("adapters", lambda: self.factors)

    def merged(self, method: str, settings: Mapping[str, float]) -> RoutedModel:
        """One adapter, the merge of all that `molora convert --to merged-peft` writes."""
        kept = {name: value for name, value in settings.items() if name not in _MULTIPLY}
        key = f"{method} {kept}"
        if self._merge is None or self._merge[0] != key:
            self._merge = None
            self._merge = key, merged_factors(self.factors, method, kept)
        made, share = self._merge[1], _multiple(settings, len(self.factors))
        factors = {path: replace(one, scale=one.scale * share) for path, one in made.items()}
        return self._attached(f"{method} {dict(settings)}", lambda: {"merged": factors})

    def _attached(self, what: str, factors: Callable[[], Mapping[str, Mapping[str, Factors]]]) -> RoutedModel:
        if self._routed is None or self._what != what:
            made = factors()
            base = self.base()
            self._routed = RoutedModel.from_parts(
                base, made, tokenizer=self.tokenizer, bundle=self.bundle, backend=self.backend
            )
            self._routed.eval()
            self._what = what
        return self._routed

    def router(self, file: Path) -> RouterStack:
        """A router file's stack, for the routed model. Raises InputError where it does not fit the bundle."""
        model = self.routed()
        base: Any = model.base
        weight = base.get_input_embeddings().weight
        around = Surroundings(
            n_layers=model.engine.context.n_layers, embedding=weight.detach(), device=weight.device
        )
        return RouterStack(read_spec(file), load_tensors(file), around, self.adapters)

    def adapter_folders(self) -> dict[str, Path]:
        return {name: self.bundle.folder(name) for name in self.adapters}


def merged_factors(
    adapters: Mapping[str, Mapping[str, Factors]], method: str, settings: Mapping[str, float]
) -> dict[str, Factors]:
    """Module -> the merge's factors. settings: `weight` 0 = 1/n each, `rank` 0 = the largest, density, seed;
    `scale` multiplies the result.

    Raises InputError for adapters that no such merge holds.
    """
    dora = [n for n, modules in adapters.items() if any(f.magnitude is not None for f in modules.values())]
    biased = [n for n, modules in adapters.items() if any(f.bias is not None for f in modules.values())]
    if dora:
        raise InputError(f"{dora[0]} is a DoRA adapter, which no sum of low-rank factors can say", "")
    if biased and method in ("ties", "dare"):
        raise InputError(f"{method} is defined on weights, and {biased[0]} has a bias", "")
    rank = int(settings.get("rank", 0)) or None
    made = merge(
        adapters,
        dict.fromkeys(adapters, 1.0 / len(adapters)),
        method,
        rank=None if method == "cat" else rank,
        density=settings.get("density"),
        seed=int(settings.get("seed", 0)),
    )
    share = _multiple(settings, len(adapters))
    return {path: replace(one.factors, scale=one.factors.scale * share) for path, one in made.items()}


def _multiple(settings: Mapping[str, float], adapters: int) -> float:
    """What weights and scale make of a merge at 1/n each: all weights being one, they multiply it."""
    return (settings.get("weight") or 1.0 / adapters) * adapters * settings.get("scale", 1.0)
