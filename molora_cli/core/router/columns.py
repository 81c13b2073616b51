"""Take an expert out of a router: its columns go, every bit of the others' stays."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from molora_cli.core.router.added import split_experts
from molora_cli.core.router.files import join_tensors, stage_tensors
from molora_cli.core.router.spans import PARTS
from molora_cli.core.router.spec import BASE_EXPERT, RouterSpec, StageSpec
from molora_cli.core.router.taps import LDA
from molora_cli.errors import InputError
from molora_cli.text import shorten

_HEADS = {
    "taps.*.outer.weight": 0,
    "taps.*.outer.bias": 0,
    "taps.*.weight": 1,
    "taps.*.bias": 0,
    "taps.*.statistics.count": 0,
    "taps.*.statistics.mean": 0,
}
# kind -> pattern of tensor names -> the dimension that counts experts; the first pattern that fits holds
_COLUMNS = {
    "uniform": {},
    "centroid": {"weight": 1, "bias": 0, "statistics.count": 0, "statistics.mean": 0},
    "context": {"outer.weight": 0, "outer.bias": 0, "statistics.count": 0, "statistics.mean": 0},
    "sequence": {"weight": 1, "bias": 0},
    "arrow": {"prototypes.*": 0},
    "taps": _HEADS,
    "layer": _HEADS,
    "hidden": _HEADS,
}  # fmt: skip
_RULES = ("fixed", "vocab")


def drop_expert(
    spec: RouterSpec, tensors: Mapping[str, Tensor], name: str, *, force: bool
) -> tuple[RouterSpec, dict[str, Tensor], list[str]]:
    """The router without `name`, its tensors as in a router file, and notes.

    force: what a rule gives to `name`, or a stage that knows nobody else, goes to the base.
    Raises InputError without it, and for a kind whose columns are not known here.
    """
    stages, own, notes = [], [], []
    for index, stage in enumerate(spec.stages):
        mine = stage_tensors(tensors, index)
        if name in stage.experts:
            stage, mine, note = _drop(stage, mine, name, index, force)
            notes.append(note)
        stages.append(stage)
        own.append(mine)
    return spec.model_copy(update={"stages": stages}), join_tensors(own), notes


def _drop(
    stage: StageSpec, tensors: dict[str, Tensor], name: str, index: int, force: bool
) -> tuple[StageSpec, dict[str, Tensor], str]:
    where = f"router stage {index} ({shorten(stage.kind, 40)})"
    alone = all(e in (name, BASE_EXPERT) for e in stage.experts)
    if stage.kind in _RULES or alone:
        if not force:
            why = _rules_of(stage, name) if stage.kind in _RULES else "it is the only expert there"
            raise InputError(
                f"{where} names '{name}': {why}",
                "--force gives its tokens to the base; or attach another router first",
            )
        stage, tensors = _to_base(stage, tensors, name)
        return stage, tensors, f"{where}: the tokens of '{name}' take the base now"
    if stage.kind not in _COLUMNS:
        raise InputError(
            f"{where}: this molora cannot take an expert out of a router of that kind",
            "train or attach another router first, or use the molora that made it",
        )
    keep = [i for i, expert in enumerate(stage.experts) if expert != name]
    kept = _select(stage, tensors, keep)
    params = _params(stage.params, tensors, name)
    if stage.kind == "context" and "ahead.inner.weight" in kept:
        kept = _less_ahead(stage, kept, name)
    if stage.params.get("added"):
        kept, heads = _without_gate(stage, kept, name)
        params = {**params, "added": heads} if heads else {k: v for k, v in params.items() if k != "added"}
    experts = [stage.experts[i] for i in keep]
    update: dict[str, Any] = {"experts": experts, "params": params, "k": min(stage.k, len(experts))}
    return stage.model_copy(update=update), kept, f"{where}: the column of '{name}' is gone"


def _select(stage: StageSpec, tensors: Mapping[str, Tensor], keep: list[int]) -> dict[str, Tensor]:
    """The tensors with the columns of the experts `keep` alone."""
    kept, wanted = dict(tensors), torch.tensor(keep)
    prior = stage.params.get("prior") is not None
    for name, tensor in tensors.items():
        if prior and fnmatchcase(name, "taps.*.inner.weight"):  # (h, d + E): it reads another stage's scores
            width = tensor.shape[1] - len(stage.experts)
            kept[name] = torch.cat([tensor[:, :width], tensor[:, width:].index_select(1, wanted)], 1)
            continue
        patterns = _COLUMNS.get(stage.kind, {}).items()
        dimension = next((d for pattern, d in patterns if fnmatchcase(name, pattern)), None)
        if dimension is not None and not name.endswith("inner.weight") and not name.endswith("inner.bias"):
            columns = wanted[wanted < tensor.shape[dimension]]  # fewer where others were added later
            kept[name] = tensor.index_select(dimension, columns).contiguous()
    return kept


def _less_ahead(stage: StageSpec, tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """A context stage's network that looks ahead (see `spans`) without what it reads and says of `name`."""
    trained, _ = split_experts(stage)
    keep = torch.tensor([i for i, expert in enumerate(trained) if expert != name])
    weight = tensors["ahead.inner.weight"]
    width = weight.shape[1] - PARTS * len(trained)
    blocks = weight[:, width:].unflatten(1, (PARTS, len(trained)))[:, :, keep].flatten(1)
    kept = {**tensors, "ahead.inner.weight": torch.cat([weight[:, :width], blocks], 1).contiguous()}
    for key in ("ahead.outer.weight", "ahead.outer.bias"):
        kept[key] = tensors[key].index_select(0, keep).contiguous()
    return kept


def _without_gate(
    stage: StageSpec, tensors: Mapping[str, Tensor], name: str
) -> tuple[dict[str, Tensor], list[str]]:
    """A context stage's gates of added experts (see `added`) without `name`: its own gate goes, and its
    column in the closed forms that know it. Raises InputError where only added experts would stay."""
    trained, added = split_experts(stage)
    if trained == [name]:
        raise InputError(
            f"'{name}' is the only adapter that the router was trained for",
            "train it again for those that stay: molora train-router BUNDLE --data NAME=FILE ... --force",
        )
    kept = {key: t for key, t in tensors.items() if not key.startswith("added.")}
    heads: list[str] = []
    for number, expert in enumerate(added):
        if expert == name:
            continue
        known = [*trained, *added[: number + 1]]
        columns = torch.tensor([i for i, other in enumerate(known) if other != name])
        for key, tensor in tensors.items():
            prefix = f"added.{number}."
            if not key.startswith(prefix):
                continue
            if stage.params["added"][number] == LDA:
                tensor = tensor.index_select(-1, columns).contiguous()
            kept[f"added.{len(heads)}.{key[len(prefix) :]}"] = tensor
        heads.append(stage.params["added"][number])
    return kept, heads


def _params(params: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    """Without the expert's count; the shared scatter keeps its tokens, and how many they were."""
    out = dict(params)
    if isinstance(out.get("tokens"), dict):
        out["tokens"] = {k: v for k, v in out["tokens"].items() if k != name}
    if "statistics.count" in tensors and "scatter_tokens" not in out:
        out["scatter_tokens"] = float(tensors["statistics.count"].sum())
    return out


def _rules_of(stage: StageSpec, name: str) -> str:
    if stage.kind == "fixed":
        return "a fixed router gives every token to it"
    rules = [r["rule"] for r in stage.params.get("rules", []) if r.get("expert") == name]
    if stage.params.get("rest") == name:
        rules.append("all other tokens")
    return shorten(f"rules {', '.join(map(str, rules))}" if rules else "a rule", 160)


def _to_base(stage: StageSpec, tensors: dict[str, Tensor], name: str) -> tuple[StageSpec, dict[str, Tensor]]:
    """`name` becomes the base where the stage has none yet, else its part is added to the base's."""
    experts = list(stage.experts)
    at = experts.index(name)
    params, kept = dict(stage.params), dict(tensors)
    if stage.kind == "vocab":
        rules = [
            {**r, "expert": BASE_EXPERT if r.get("expert") == name else r.get("expert")}
            for r in params.get("rules", [])
        ]
        params |= {"rules": rules, "rest": BASE_EXPERT if params.get("rest") == name else params.get("rest")}
    if BASE_EXPERT not in experts:
        experts[at] = BASE_EXPERT
        return stage.model_copy(update={"experts": experts, "params": params}), kept
    base = experts.index(BASE_EXPERT)
    if stage.kind == "vocab":
        table = torch.where(kept["table"] == at, base, kept["table"])
        kept["table"] = torch.where(table > at, table - 1, table).to(kept["table"].dtype)
    elif stage.kind == "fixed" and isinstance(params.get("weights"), list):
        weights = list(params["weights"])
        weights[base] += weights[at]
        params["weights"] = weights[:at] + weights[at + 1 :]
    else:
        kept = _select(stage, kept, [i for i in range(len(experts)) if i != at])
        params = _params(params, tensors, name)
    experts.pop(at)
    return stage.model_copy(
        update={"experts": experts, "params": params, "k": min(stage.k, len(experts))}
    ), kept
