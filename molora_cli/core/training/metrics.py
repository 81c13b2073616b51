"""What a trained router does on held-out rows: accuracy, confusion, use, entropy, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.router.hysteresis import hold, traded
from molora_cli.core.router.kinds import IdStage
from molora_cli.core.training.router_rows import MIXED, RouterRows, TokenRow, collate, collate_ahead

PARTS = ("prompt", "completion")
FEW_DOCUMENTS = 8
_ONE_SIDED = 10  # largest domain over smallest, in documents
_DEAD = 0.005  # share of held-out tokens
_COLLAPSE = 0.9  # of the tokens of other domains
_FLAT = 0.95  # mean entropy over its maximum
_WEAK = 0.7  # token accuracy of a domain
_BATCH = 8


@dataclass
class Measured:
    """Counts over held-out rows.

    confusion: part -> (E, E), labelled tokens of row's domain that took column's expert, in rows of one
    domain; mixed: the same over rows that change domain; taken (E,): all tokens, template included; masked:
    tokens without a label; entropy: mean over tokens, in nats. held_out: False where there was nothing to
    hold out and the training rows were measured instead.
    """

    experts: tuple[str, ...]
    confusion: dict[str, Tensor]
    mixed: Tensor
    taken: Tensor
    masked: int
    entropy: float
    held_out: bool

    @property
    def tokens(self) -> int:
        return int(self.taken.sum())

    def accuracy(self, expert: int, part: str | None = None) -> float | None:
        """Share of a domain's labelled tokens that took its expert; None where there is no token."""
        rows = [self.confusion[p][expert] for p in PARTS if part in (None, p)]
        counts = torch.stack(rows).sum(0)
        total = int(counts.sum())
        return float(counts[expert]) / total if total else None

    @property
    def mixed_accuracy(self) -> float | None:
        total = int(self.mixed.sum())
        return float(self.mixed.diagonal().sum()) / total if total else None

    def utilisation(self) -> dict[str, float]:
        return {n: int(c) / max(1, self.tokens) for n, c in zip(self.experts, self.taken, strict=True)}

    def document(self) -> dict[str, Any]:
        """For `--json`, numbers rounded."""
        domains: dict[str, dict[str, Any]] = {}
        both = sum(self.confusion.values(), torch.zeros_like(self.mixed))
        for i, name in enumerate(self.experts):
            shares = {"accuracy": self.accuracy(i), **{p: self.accuracy(i, p) for p in PARTS}}
            domains[name] = {k: None if v is None else round(v, 5) for k, v in shares.items()}
            domains[name]["took"] = dict(zip(self.experts, both[i].tolist(), strict=True))
        mixed = self.mixed_accuracy
        return {
            "held_out": self.held_out,
            "tokens": self.tokens,
            "masked_tokens": self.masked,
            "domains": domains,
            "mixed_accuracy": None if mixed is None else round(mixed, 5),
            "utilisation": {n: round(v, 5) for n, v in self.utilisation().items()},
            "entropy": round(self.entropy, 5),
        }


# (ids (B, T) int64, mask (B, T) bool) -> log-probabilities (B, T, E)
Score = Callable[[Tensor, Tensor], Tensor]


def stage_score(stage: IdStage) -> Score:
    """How a stage on ids scores whole rows."""

    def score(ids: Tensor, mask: Tensor) -> Tensor:
        logp = stage.score(ids, mask, stage.start(len(ids)))[0].logp
        if stage.spec.margin > 0:
            nothing = torch.full((len(ids), logp.shape[2]), -1, device=logp.device)
            logp = traded(logp, hold(logp, mask, nothing, stage.spec.margin)[0])
        return logp[:, :, 0]

    return score


def _count(experts: int, labels: Tensor, chosen: Tensor) -> Tensor:
    return torch.bincount(labels * experts + chosen, minlength=experts * experts).view(experts, experts)


@torch.no_grad()
def measure(score: IdStage | Score, rows: RouterRows) -> Measured:
    """Route the held-out rows with the router itself (float64, top-1), as it will route in use."""
    if isinstance(score, IdStage):
        score = stage_score(score)
    experts = len(rows.experts)
    held = any(rows.held_out[name] for name in rows.experts)
    groups = rows.held_out if held else rows.train
    found = Measured(
        rows.experts,
        {part: torch.zeros(experts, experts, dtype=torch.int64) for part in PARTS},
        torch.zeros(experts, experts, dtype=torch.int64),
        torch.zeros(experts, dtype=torch.int64),
        0,
        0.0,
        held,
    )
    entropy = 0.0
    for name, group in groups.items():
        ordered = sorted(group, key=lambda r: len(r.ids))
        for first in range(0, len(ordered), _BATCH):
            part = ordered[first : first + _BATCH]
            ids, _, completion = collate(part)
            labels, _ = collate_ahead(part)
            real = _real(part, ids.shape[1])
            logp = score(ids, real)  # (B, T, E)
            chosen = logp.argmax(-1)
            known = labels >= 0
            if name == MIXED:
                found.mixed += _count(experts, labels[known], chosen[known])
            else:
                for which, wanted in (("prompt", ~completion), ("completion", completion)):
                    here = known & wanted
                    found.confusion[which] += _count(experts, labels[here], chosen[here])
            found.taken += torch.bincount(chosen[real], minlength=experts)
            found.masked += int((real & ~known).sum())
            entropy += float(-(logp.exp() * logp)[real].sum())
    found.entropy = entropy / max(1, found.tokens)
    return found


def _real(rows: Sequence[TokenRow], width: int) -> Tensor:
    """(B, T) bool, False = padding."""
    return torch.stack([torch.arange(width) < len(r.ids) for r in rows])


def data_warnings(
    documents: dict[str, int], adapters: Sequence[str], formats: dict[str, set[str]]
) -> list[str]:
    """What is wrong with the rows before any training. formats: domain -> {"messages", "text"} as found."""
    warnings = []
    for name, count in documents.items():
        if count < FEW_DOCUMENTS:
            warnings.append(
                f"{name}: only {count} document{'s' * (count != 1)}; fewer than {FEW_DOCUMENTS} teach "
                "little, and the held-out numbers say little"
            )
    most, least = max(documents, key=documents.__getitem__), min(documents, key=documents.__getitem__)
    if documents[most] >= _ONE_SIDED * documents[least]:
        warnings.append(
            f"one-sided data: {most} has {documents[most]} documents, {least} {documents[least]}; "
            "domains are drawn equally often, so the few are repeated"
        )
    if len({frozenset(found) for found in formats.values()}) > 1:
        shown = ", ".join(f"{name}: {' and '.join(sorted(found))}" for name, found in formats.items())
        warnings.append(f"the domains differ in format ({shown}): the router may learn the format instead")
    missing = [name for name in adapters if name not in documents]
    if missing:
        warnings.append(
            f"no rows for {', '.join(missing)}: no token will take {'it' if len(missing) == 1 else 'them'}"
        )
    return warnings


def result_warnings(found: Measured) -> list[str]:
    """Collapse, dead adapters, a gate that does not choose, domains that are not told apart."""
    warnings = []
    if not found.held_out:
        warnings.append("too little data to hold any out: the accuracy is that of the training rows")
    both = sum(found.confusion.values(), torch.zeros_like(found.mixed))
    used = found.utilisation()
    for i, name in enumerate(found.experts):
        others = both.sum() - both[i].sum()
        if others > 0 and int(both[:, i].sum() - both[i, i]) / int(others) > _COLLAPSE:
            warnings.append(f"collapse: {name} takes nearly every token, those of the other domains too")
        if used[name] < _DEAD:
            warnings.append(f"dead adapter: {name} takes {used[name]:.1%} of the held-out tokens")
        accuracy = found.accuracy(i)
        if accuracy is not None and accuracy < _WEAK:
            row = both[i].clone()
            row[i] = -1
            other = found.experts[int(row.argmax())]
            warnings.append(
                f"{name}: only {accuracy:.0%} of its tokens are recognised; most others go to {other}"
            )
    limit = math.log(len(found.experts))
    if found.entropy > _FLAT * limit:
        warnings.append(
            f"the gate does not choose: its mean entropy is {found.entropy:.2f} of at most {limit:.2f} nats"
        )
    return warnings
