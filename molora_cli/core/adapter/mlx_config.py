"""What the adapter_config.json of an MLX-LM adapter says (written by mlx_lm.lora since 2024).

The product is added `scale` times as it stands, no alpha and no rank in it. Configs of January to June 2024
hold an `alpha` besides: their trainer used scale * alpha / rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from molora_cli.core.adapter.verdict import Classification, Findings, active, check_factor, check_rank
from molora_cli.text import shorten

WEIGHTS = ("adapters.safetensors", "adapters.npz")
_TYPES = ("lora", "dora")
_PARAMETERS = frozenset({"rank", "scale", "dropout", "keys", "alpha"})
# what mlx_lm.lora writes of its training run beside them
_TRAINING = frozenset(
    {
        "adapter_path", "batch_size", "clear_cache_threshold", "completion_feature", "config", "data",
        "fine_tune_type", "grad_accumulation_steps", "grad_checkpoint", "hf_dataset", "iters",
        "learning_rate", "lora_layers", "lora_parameters", "lr_schedule", "mask_prompt", "max_seq_length",
        "model", "num_layers", "optimizer", "optimizer_config", "project_name", "prompt_feature",
        "report_to", "resume_adapter_file", "save_every", "seed", "steps_per_eval", "steps_per_report",
        "test", "test_batches", "train", "use_chat_template", "use_dora", "val_batches", "wandb",
    }
)  # fmt: skip
_ADAPTER = "give an adapter trained with fine_tune_type lora or dora"


@dataclass(frozen=True)
class MlxSettings:
    """scale: factor of the product; rank: as the config says it, or None; dora: whether magnitudes belong to
    it; layers: the last n are adapted, -1 all, None not said; keys: module names below a layer, or None."""

    scale: float
    rank: int | None
    dora: bool
    layers: int | None
    keys: tuple[str, ...] | None
    alpha_style: bool = False


def is_mlx(config: dict[str, Any]) -> bool:
    """Whether a config without peft_type is one of MLX-LM's."""
    return (
        "lora_parameters" in config
        or "fine_tune_type" in config
        or {"lora_layers", "adapter_path"} <= set(config)
    )


def classify_mlx(config: dict[str, Any]) -> Classification:
    """Sort an MLX-LM config: supported, or refused with every reason."""
    found = Findings()
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        found.refuse("fine_tune_type", "it is a full fine-tune by MLX, not an adapter", _ADAPTER)
        return Classification("mlx", tuple(found.reasons))
    if kind not in _TYPES:
        found.refuse("fine_tune_type", f"'{shorten(str(kind), 40)}' is not known to MLX-LM", _ADAPTER)
    given = config.get("lora_parameters")
    if not isinstance(given, dict):
        found.refuse(
            "lora_parameters",
            "is missing, and the scale of the adapter is in it",
            'add "lora_parameters": {"rank": R, "scale": S} as in training (20 is mlx_lm.lora\'s own scale)',
        )
        return Classification("mlx", tuple(found.reasons))
    for name, value in given.items():
        if name not in _PARAMETERS and active(value):
            found.refuse(
                f"lora_parameters.{shorten(str(name), 40)}",
                f"this field is not known and active ({shorten(str(value), 60)}); it may change the function",
                "update molora, or remove the field if it describes only the training",
            )
    if "scale" not in given:
        found.refuse(
            "lora_parameters.scale",
            "is missing: the strength of the adapter is unknown",
            "add the scale it was trained with (mlx_lm.lora's default is 20)",
        )
    else:
        check_factor("lora_parameters.scale", given["scale"], found)
    if "rank" in given:
        check_rank("lora_parameters.rank", given["rank"], found)
    if "alpha" in given:
        check_factor("lora_parameters.alpha", given["alpha"], found)
        if "rank" not in given:
            found.refuse(
                "lora_parameters.rank", "is missing beside alpha", "add the rank it was trained with"
            )
        found.notes.append("alpha beside scale (MLX of early 2024): the strength is scale * alpha / rank")
    _check_shape_of_rest(config, given, found)
    if unknown := [shorten(str(n), 40) for n, v in config.items() if n not in _TRAINING and active(v)]:
        more = ", ..." if len(unknown) > 4 else ""
        found.notes.append(f"fields that MLX-LM does not know were ignored ({', '.join(unknown[:4])}{more})")
    return Classification("mlx", tuple(found.reasons), tuple(found.notes))


def _check_shape_of_rest(config: dict[str, Any], given: dict[str, Any], found: Findings) -> None:
    layers = config.get("num_layers", config.get("lora_layers"))
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int) or layers < -1):
        found.refuse("num_layers", f"must be a whole number, not {shorten(str(layers), 30)}", "correct it")
    keys = given.get("keys")
    if keys is not None and not (isinstance(keys, list) and all(isinstance(k, str) for k in keys)):
        found.refuse("lora_parameters.keys", "must be a list of module names", "correct it")


def mlx_settings(config: dict[str, Any]) -> MlxSettings:
    """The numbers of a supported MLX-LM config."""
    given = config["lora_parameters"]
    scale = float(given["scale"])
    if "alpha" in given:
        scale *= float(given["alpha"]) / int(given["rank"])
    keys = given.get("keys")
    layers = config.get("num_layers", config.get("lora_layers"))
    return MlxSettings(
        scale=scale,
        rank=given.get("rank"),
        dora=config.get("fine_tune_type") == "dora" or config.get("use_dora") is True,
        layers=layers,
        keys=tuple(keys) if keys is not None else None,
        alpha_style="alpha" in given,
    )
