"""What an adapter_config.json says, and whether molora can honour all of it.

A field that changes the function is understood or the reason for a refusal: nothing active is ignored.
(Fields and their defaults: PEFT's LoraConfig, 0.2 to 0.21.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from molora_cli.core.adapter.mlx_config import classify_mlx, is_mlx
from molora_cli.core.adapter.patterns import check_pattern, pattern_key
from molora_cli.core.adapter.verdict import (
    Classification,
    Findings,
    Reason,
    active,
    check_factor,
    check_rank,
)
from molora_cli.errors import InputError
from molora_cli.text import printable, shorten

_ADAPTER = "give a LoRA adapter made by PEFT"

# fields that describe the training or the origin and never the function
_SILENT = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "layers_pattern",
        "lora_dropout", "lora_ga_config", "corda_config", "loftq_config", "megatron_core", "merge_weights",
        "model_type", "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config",
        "task_type", "transformers_version", "velora_config",
    }
)  # fmt: skip
# fields that the reader honours
_HONOURED = frozenset(
    {
        "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "lora_bias",
        "fan_in_fan_out", "target_modules", "exclude_modules", "layers_to_transform", "init_lora_weights",
        "ensure_weight_tying",
    }
)  # fmt: skip
# active: reason and remedy
_REFUSED = {
    "modules_to_save": (
        "the adapter carries full copies of modules, which no low-rank adapter can express",
        "--modules-to-save svd:16 approximates each by LoRA of rank 16 and says how closely; "
        "or train with LoRA on these modules",
    ),
    "target_parameters": (
        "LoRA on the experts' parameters (target_parameters) is not supported",
        "train with target_modules on the attention instead",
    ),
    "trainable_token_indices": (
        "trained rows of the embedding are not supported",
        "train with LoRA on embed_tokens instead",
    ),
    "layer_replication": (
        "it builds a deeper base out of repeated layers",
        "train without layer_replication",
    ),
    "alora_invocation_tokens": (
        "an activated LoRA works only after its invocation tokens; applied to other tokens it is wrong",
        "train a plain LoRA without alora_invocation_tokens",
    ),
    "arrow_config": (
        "it is an Arrow router over other adapters, not one adapter",
        "compose those adapters themselves",
    ),
    "kasa_config": ("KaSA changes the base weights and the product of the factors", "train a plain LoRA"),
    "use_bdlora": ("block-diagonal factors are not supported", "train a plain LoRA without use_bdlora"),
    "monteclora_config": ("MonteCLoRA's sampled factors are not supported", "train a plain LoRA"),
    "use_qalora": (
        "QALoRA pools the input in groups; its factors have another meaning",
        "train without use_qalora",
    ),
    "megatron_config": (
        "adapters over Megatron's parallel layers are not supported",
        "export the adapter to PEFT",
    ),
    "enable_lora": (
        "the fused format of PEFT 0.2 (enable_lora) is not supported",
        "load it with PEFT 0.2 and train or export it again with separate or plain fused projections",
    ),
}
_INITS_KEEPING_BASE = frozenset({"gaussian", "eva", "orthogonal"})
_INITS_CHANGING_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_TASKS_OF_TEXT = frozenset({"CAUSAL_LM", "SEQ_2_SEQ_LM"})
# auto_mapping names the module of the base's class: these families are no causal language models
_OTHER_FAMILIES = frozenset(
    {
        "whisper", "wav2vec2", "hubert", "speech_to_text", "t5", "mt5", "bart", "mbart", "pegasus", "marian",
        "bert", "roberta", "distilbert", "deberta_v2", "electra", "vit", "clip", "siglip", "dinov2", "dinov3",
        "sam",
    }
)  # fmt: skip


@dataclass(frozen=True)
class LoraSettings:
    """The numbers of a supported config. Patterns map PEFT's keys (regex suffixes) to a rank or alpha.

    fixed: module path in the file -> (rank, alpha), which win over everything else.
    """

    r: int
    alpha: float
    rslora: bool
    dora: bool
    bias: bool
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    fixed: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def scale(self, rank: int, alpha: float) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA (arXiv 2312.03732)."""
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def classify(config: dict[str, Any]) -> Classification:
    """Sort an adapter_config.json: supported, or refused with every reason. Needs no weights and no base."""
    special = _other_kinds(config)
    if special is not None:
        return special
    found = Findings()
    _check_task(config, found)
    _check_fields(config, found)
    _check_numbers(config, found)
    _check_targets(config, found)
    _check_init(config, found)
    _note_base(config, found)
    return Classification("lora", tuple(found.reasons), tuple(found.notes))


def _other_kinds(config: dict[str, Any]) -> Classification | None:
    kind = config.get("peft_type")
    if kind == "LORA":
        return None
    if kind == "XLORA":
        why = "it is an X-LoRA: a router over several adapters, not one adapter"
        remedy = "compose the adapters it was made from (or NAME=FOLDER/0 ...), then molora train-router"
        return Classification("xlora", (Reason("peft_type", why, remedy),))
    if kind is not None:
        named = shorten(str(kind), 40)
        why = f"{named} is another method than LoRA: its tensors have another meaning"
        return Classification("peft-other", (Reason("peft_type", why, _ADAPTER),))
    if is_mlx(config):
        return classify_mlx(config)
    keys = ", ".join(shorten(str(k), 30) for k in list(config)[:6]) or "none"
    why = f"it is no PEFT adapter config: peft_type is missing, as are r and lora_alpha (fields: {keys})"
    if "r" in config or "lora_alpha" in config:
        why = f"peft_type is missing (fields: {keys})"
    return Classification("unknown", (Reason("peft_type", why, 'a LoRA config says "peft_type": "LORA"'),))


def _check_task(config: dict[str, Any], found: Findings) -> None:
    task = config.get("task_type")
    if task is not None and (not isinstance(task, str) or task not in _TASKS_OF_TEXT):
        found.refuse(
            "task_type",
            f"{shorten(str(task), 40)}: not an adapter of a language model that writes text",
            "give an adapter trained with task_type CAUSAL_LM",
        )
    elif task == "SEQ_2_SEQ_LM":
        found.notes.append("task_type says SEQ_2_SEQ_LM; the tensors decide whether it fits a causal model")
    mapping = config.get("auto_mapping")
    if isinstance(mapping, dict):
        name, library = str(mapping.get("base_model_class", "")), str(mapping.get("parent_library", ""))
        parts = set(library.split("."))
        textual = name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model"))
        if name and (parts & _OTHER_FAMILIES or not textual):
            found.refuse(
                "auto_mapping", f"made for {shorten(name, 60)}, which is no causal language model", _ADAPTER
            )
    targets = config.get("target_modules")
    if isinstance(targets, list) and {"to_q", "to_k", "to_v"} & {str(t).rpartition(".")[2] for t in targets}:
        found.refuse(
            "target_modules",
            "to_q, to_k, to_v are modules of an image model, not of a language model",
            _ADAPTER,
        )


def _check_fields(config: dict[str, Any], found: Findings) -> None:
    for name, value in config.items():
        if name in _SILENT or name in _HONOURED or name == "bias":
            continue
        if name in _REFUSED:
            if active(value):
                found.refuse(name, *_REFUSED[name])
        elif active(value):
            found.refuse(
                shorten(str(name), 60),
                f"this field is not known and active ({shorten(str(value), 60)}); it may change the function",
                "update molora, or remove the field if it describes only the training",
            )
        else:
            found.notes.append(f"unknown field {shorten(str(name), 60)} is off and was ignored")
    bias = config.get("bias", "none")
    if bias not in ("none", None):
        found.refuse(
            "bias", f"'{shorten(str(bias), 20)}' trains the base's own biases", "train with bias='none'"
        )


def _check_numbers(config: dict[str, Any], found: Findings) -> None:
    check_rank("r", config.get("r", 8), found)
    check_factor("lora_alpha", config.get("lora_alpha", 8), found)
    for name, check in (("rank_pattern", check_rank), ("alpha_pattern", check_factor)):
        pattern = config.get(name)
        if pattern is None:
            continue
        if not isinstance(pattern, dict):
            found.refuse(name, "must be an object of module names and numbers", f"correct {name}")
            continue
        for key, value in pattern.items():
            check(f"{name}['{shorten(key, 60)}']", value, found)
            try:
                check_pattern(pattern_key(key), name)
            except InputError as error:
                found.refuse(name, error.message, error.remedy)
    for name in ("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"):
        value = config.get(name)
        if value is not None and not isinstance(value, bool):
            found.refuse(name, f"must be true or false, not {shorten(str(value), 30)}", f"correct {name}")
    if config.get("use_dora") is True and config.get("lora_bias") is True:
        found.refuse("lora_bias", "cannot be combined with use_dora", "train with one of the two")


def _check_targets(config: dict[str, Any], found: Findings) -> None:
    for name in ("target_modules", "exclude_modules"):
        value = config.get(name)
        if isinstance(value, str):
            if value != "all-linear":
                try:
                    check_pattern(value, name)
                except InputError as error:
                    found.refuse(name, error.message, error.remedy)
        elif value is not None and not (isinstance(value, list) and all(isinstance(v, str) for v in value)):
            found.refuse(name, "must be a list of module names or one pattern", f"correct {name}")
    layers = config.get("layers_to_transform")
    if layers is not None:
        numbers = layers if isinstance(layers, list) else [layers]
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
            found.refuse("layers_to_transform", "must be layer numbers", "correct layers_to_transform")


def _check_init(config: dict[str, Any], found: Findings) -> None:
    init = config.get("init_lora_weights", True)
    if isinstance(init, bool) or init is None:
        return
    text = str(init).lower()
    if text.startswith(_INITS_CHANGING_BASE):
        found.refuse(
            "init_lora_weights",
            f"'{shorten(str(init), 40)}' changed the base's weights before training; "
            "on the original base this adapter is wrong",
            "convert it where it was trained: save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    elif text not in _INITS_KEEPING_BASE:
        found.refuse(
            "init_lora_weights",
            f"'{shorten(str(init), 40)}' is not known; it may have changed the base's weights",
            "update molora, or train with a plain initialisation",
        )


def _note_base(config: dict[str, Any], found: Findings) -> None:
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and quantised_name(base):
        found.notes.append(
            f"trained on a quantised base ({shorten(base, 80)}); on the full one results differ a little"
        )
    targets = config.get("target_modules")
    if isinstance(targets, list) and len(set(map(str, targets))) < len(targets):
        found.notes.append("target_modules names some modules twice")


def quantised_name(base: str) -> bool:
    """Whether the name of a base says that its weights are quantised."""
    text = base.lower()
    marks = ("4bit", "8bit", "-awq", "-gptq", "bnb-", "int4", "int8", "-fp8")
    return any(mark in text for mark in marks)


def settings(config: dict[str, Any]) -> LoraSettings:
    """The numbers of a supported config; PEFT's defaults (r 8, alpha 8) fill what is missing."""
    return LoraSettings(
        r=int(config.get("r", 8)),
        alpha=float(config.get("lora_alpha", 8)),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        bias=bool(config.get("lora_bias")),
        rank_pattern={k: int(v) for k, v in (config.get("rank_pattern") or {}).items()},
        alpha_pattern={k: float(v) for k, v in (config.get("alpha_pattern") or {}).items()},
    )


def base_hint(config: dict[str, Any]) -> str | None:
    """The name of the base that a config gives, made safe to show. It is never opened as a path."""
    base = config.get("base_model_name_or_path") or config.get("model")
    return printable(base)[:300] if isinstance(base, str) and base else None
