"""Proof that what was written is the function that was read: weight changes per module, and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.adapter.factors import Factors, load_factors
from molora_cli.core.adapter.read import read_adapter
from molora_cli.core.adapter.types import Adapter
from molora_cli.core.base.model import load_base_model
from molora_cli.core.base.structure import weight_files
from molora_cli.core.convert.deltas import relative_errors
from molora_cli.core.convert.plan import Plan
from molora_cli.core.effect import probe_ids
from molora_cli.core.routed.model import RoutedModel
from molora_cli.core.routed.route import Route
from molora_cli.errors import MoloraError
from molora_cli.out import Ticker, no_ticks
from molora_cli.refs import parse_ref
from molora_cli.text import shorten

# largest relative error of a module by what its factors were written as: some units of the last place
TOLERANCE = {"F64": 1e-6, "F32": 1e-6, "F16": 2e-3, "BF16": 1.2e-2}
LOGITS = 1e-4  # largest difference of float32 logits, relative to their RMS where that is above 1
_LARGEST_BASE = 3e9  # bytes of files; larger bases are not loaded in float32 to compare logits


@dataclass(frozen=True)
class LogitDifference:
    """Two functions on the probe: largest and RMS difference of their logits, the RMS of the effect that the
    reference has on the base, and the RMS of the base's logits."""

    max_abs: float
    rms: float
    effect_rms: float
    base_rms: float
    probe: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare_written(
    before: Mapping[str, Factors], written: Adapter, *, what: str, tolerance: float
) -> dict[str, float]:
    """Module -> relative error of the written adapter. Raises MoloraError above `tolerance`."""
    after = load_factors(written)
    errors = relative_errors(before, after)
    worst = max(errors, key=lambda m: errors[m])
    if not errors[worst] <= tolerance:
        raise MoloraError(
            f"{what} does not hold the adapter that was read: {shorten(worst)} differs by "
            f"{errors[worst]:.2g} (at most {tolerance:.2g}); it was removed",
            "report this with the adapter's config; the source is unchanged",
        )
    return errors


def read_back(path: Path, work: Plan) -> Adapter:
    """What was written, read as a stranger's adapter would be. Raises MoloraError where it is refused."""
    try:
        return read_adapter("written", parse_ref(str(path.absolute())), work.modules, allow_noop=True)
    except MoloraError as error:
        raise MoloraError(
            f"what was written cannot be read again ({error.message}); it was removed",
            "report this with the adapter's config; the source is unchanged",
        ) from error


def tolerance_of(adapter: Adapter) -> float:
    """The tolerance of the coarsest type among an adapter's factors."""
    return max(TOLERANCE.get(m.dtype, 1e-6) for m in adapter.modules.values())


class Probe:
    """The base in float32 on the CPU and the probe's ids; None where the base is too large to be loaded."""

    def __init__(self, work: Plan, ticker: Ticker) -> None:
        ticker(0, None, "loading the base")
        self.model, tokenizer = load_base_model(
            work.base.path,
            dtype="float32",
            device="cpu",
            trust_remote_code=work.request.trust_remote_code,
        )
        config = self.model.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        self.ids, self.name = probe_ids(tokenizer, config.vocab_size, context)
        self.base = self.logits({}, {})

    @classmethod
    def of(cls, work: Plan, ticker: Ticker = no_ticks) -> Probe | None:
        size = sum(file.stat().st_size for file in weight_files(work.base.path))
        return None if size > _LARGEST_BASE else cls(work, ticker)

    @torch.no_grad()
    def logits(
        self, adapters: Mapping[str, Mapping[str, Factors]], weights: Mapping[str, float], model: Any = None
    ) -> Tensor:
        """(1, T, V) float64 logits of a mixture with constant gates; of `model` itself where one is given."""
        if model is not None:
            return model(input_ids=self.ids, use_cache=False).logits.double()  # type: ignore[no-any-return]
        if not adapters:
            return self.model(input_ids=self.ids, use_cache=False).logits.double()  # type: ignore[no-any-return]
        routed = RoutedModel.from_parts(self.model, adapters, backend="torch")
        gates = [weights[name] for name in adapters]
        route = Route.constant(list(range(len(gates))), gates, 1, self.ids.shape[1])
        try:
            return routed(self.ids, route=route, use_cache=False).logits.double()  # type: ignore[no-any-return]
        finally:
            routed.detach()

    def difference(self, reference: Tensor, other: Tensor) -> LogitDifference:
        """How far `other` is from `reference`, beside what the reference does to the base."""
        moved = (other - reference).abs()
        return LogitDifference(
            moved.max().item(),
            moved.square().mean().sqrt().item(),
            (reference - self.base).square().mean().sqrt().item(),
            self.base.square().mean().sqrt().item(),
            self.name,
        )


def check_logits(found: LogitDifference, *, exact: bool, what: str) -> None:
    """Raises MoloraError where logits that should be equal are not, or any are not finite."""
    allowed = LOGITS * max(1.0, found.base_rms) if exact else float("inf")
    if not found.max_abs <= allowed or found.max_abs != found.max_abs:
        raise MoloraError(
            f"{what} gives other logits than what was read: they differ by {found.max_abs:.2g} "
            f"(at most {allowed:.2g}); it was removed",
            "report this with the adapter's config; the source is unchanged",
        )
