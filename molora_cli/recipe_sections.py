"""What a recipe may say below each command's key. Every option is optional: what is unset, a flag or the
default decides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo


def _beside(value: Any, info: ValidationInfo) -> Any:
    """A path relative to the recipe's folder."""
    if not isinstance(value, str) or not value:
        raise ValueError("a path is needed")
    path = Path(value).expanduser()
    return str(path if path.is_absolute() else (info.context or {})["folder"] / path)


def _beside_if_local(value: Any, info: ValidationInfo) -> Any:
    """As `_beside` for what is a path; hub ids and built-in names stay as they are. An existing path wins."""
    if not isinstance(value, str) or not value:
        raise ValueError("a path or a hub id is needed")
    path = Path(value).expanduser()
    local = value.startswith((".", "~")) or os.path.lexists((info.context or {})["folder"] / path)
    return _beside(value, info) if local else value


RecipePath = Annotated[str, BeforeValidator(_beside)]
RecipeRef = Annotated[str, BeforeValidator(_beside_if_local)]


class RecipeSection(BaseModel):
    """Base of what a command reads below its key: unknown options are errors, unset ones stay unset."""

    model_config = ConfigDict(extra="forbid")


class ComposeSection(RecipeSection):
    """What a recipe may say below `compose:`."""

    output: RecipePath | None = None
    base: RecipeRef | None = None
    adapters: dict[str, RecipeRef] = Field(default_factory=dict)
    allow_noop: bool = False
    same_base: bool = False
    modules_to_save: str | None = None
    default: bool = False


class AttachRouterSection(RecipeSection):
    """What a recipe may say below `attach-router:`."""

    bundle: RecipePath | None = None
    kind: str | None = None
    expert: dict[str, float] | None = None
    rule: list[str] | None = None
    rest: str | None = None
    data: dict[str, RecipePath] | list[RecipePath] | None = None
    top_k: int | None = None
    temperature: float | None = None
    margin: float | None = None
    taps: list[int] | None = None
    xlora: RecipePath | None = None
    before: bool = False
    seed: int | None = None


class TrainRouterSection(RecipeSection):
    """The `train-router:` section of a recipe."""

    bundle: RecipePath | None = None
    data: dict[str, RecipePath] | list[RecipePath] | None = None
    kind: str | None = None
    steps: int | None = None
    seed: int | None = None
    top_k: int | None = None
    margin: float | None = None
    val_share: float | None = None
    rows: int | None = None
    mixes: int | None = None
    max_length: int | None = None
    taps: list[int] | None = None
    head: str | None = None
    loss: str | None = None
    labels: str | None = None
    lm_steps: int | None = None
    balance: float | None = None
    z_loss: float | None = None


class TrainAdapterSection(RecipeSection):
    """What a recipe may say below `train-adapter:`."""

    output: RecipePath | None = None
    base: RecipeRef | None = None
    data: dict[str, RecipePath] = Field(default_factory=dict)
    val: dict[str, RecipePath] = Field(default_factory=dict)
    init: dict[str, RecipePath] = Field(default_factory=dict)
    source: dict[str, str] = Field(default_factory=dict)
    licence: dict[str, str] = Field(default_factory=dict)
    rank: int | None = None
    alpha: float | None = None
    target: str | list[str] | None = None
    tokens: int | None = None
    epochs: float | None = None
    lr: float | None = None
    warmup: int | None = None
    batch_tokens: int | None = None
    max_length: int | None = None
    grad_clip: float | None = None
    save_dtype: str | None = None
    seed: int | None = None
    val_every: int | None = None


class EvalSection(RecipeSection):
    """What a recipe may say below `eval:`. Running programs that a model wrote is asked for by flag alone."""

    bundle: RecipePath | None = None
    data: dict[str, RecipePath] | list[RecipePath] | None = None
    mixed: int | None = None
    baselines: list[str] | None = None
    tune: dict[str, RecipePath] | list[RecipePath] | None = None
    tune_limit: int | None = None
    router: list[RecipePath] | None = None
    modes: str | None = None
    train: dict[str, RecipePath] | list[RecipePath] | None = None
    limit: int | None = None
    single: int | None = None
    timing: bool = False
    max_length: int | None = None
    tasks: int | None = None
    max_new_tokens: int | None = None
    lm_eval: list[RecipeRef] | None = None
    min: dict[str, float] | None = None
    draws: int | None = None
    seed: int | None = None


SECTIONS: dict[str, type[RecipeSection]] = {
    "compose": ComposeSection,
    "attach-router": AttachRouterSection,
    "train-router": TrainRouterSection,
    "train-adapter": TrainAdapterSection,
    "eval": EvalSection,
}
