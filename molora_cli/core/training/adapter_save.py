"""A trained adapter as a plain PEFT folder with a provenance card."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from molora_cli import __version__
from molora_cli.core.bundle.writing import new_folder
from molora_cli.core.training.adapter_loop import AdapterTrainer, TrainResult, TrainSettings

METRICS = "metrics.jsonl"
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class AdapterJob:
    """One adapter to train. data, held_out: JSON Lines; without held_out a part of the data is kept back.

    init: a LoRA folder to start from. For the card, source: what the data are and their licence, in words;
    licence: the adapter's own, as an identifier.
    """

    name: str
    data: Path
    held_out: Path | None = None
    init: Path | None = None
    source: str = ""
    licence: str = ""


class BaseName(Protocol):
    """The base: the local folder it is loaded from, and the id that is written into the adapter."""

    @property
    def path(self) -> Path: ...

    @property
    def id(self) -> str: ...


def write_adapter(
    trainer: AdapterTrainer, target: Path, base_id: str, card: str, metrics: Path, *, force: bool
) -> None:
    """Writes the PEFT folder, its card and the metrics, whole or not at all. Raises as `new_folder` does."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(trainer.model, save_embedding_layers=False)
    dtype = getattr(torch, trainer.settings.save_dtype)
    tensors = {k: v.detach().to("cpu", dtype).contiguous() for k, v in sorted(tensors.items())}
    config: Any = trainer.model.peft_config["default"]
    config.base_model_name_or_path = base_id
    config.inference_mode = True
    values = config.to_dict()
    values["target_modules"] = sorted(values["target_modules"])  # a set has no stable order on disk
    with new_folder(target, force=force, own_file=CONFIG) as folder:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(card, encoding="utf-8")
        shutil.copyfile(metrics, folder / METRICS)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def training_command(job: AdapterJob, base_id: str, settings: TrainSettings) -> str:
    """The command that repeats the training, with file names only: folders tell others nothing."""
    target = settings.target if isinstance(settings.target, str) else ",".join(settings.target)
    length = f"--epochs {settings.epochs:g}" if settings.epochs is not None else f"--tokens {settings.tokens}"
    parts = [
        f"molora train-adapter {job.name}={job.data.name} -o adapters --base {base_id}",
        f"--rank {settings.rank} --alpha {settings.alpha:g} --target {target} {length} --lr {settings.lr:g}",
        f"--warmup {settings.warmup} --batch-tokens {settings.batch_tokens}",
        f"--max-length {settings.max_length} --save-dtype {settings.save_dtype}",
        f"--seed {settings.seed}",
    ]
    if job.held_out is not None:
        parts.append(f"--val {job.name}={job.held_out.name}")
    if job.init is not None:
        parts.append(f"--init {job.name}={job.init.name}")
    return " \\\n    ".join(parts)


def card_text(
    job: AdapterJob, base: BaseName, settings: TrainSettings, result: TrainResult, rows: int, held_out: int
) -> str:
    import peft
    import transformers

    def nats(value: float | None) -> str:
        return "not measured" if value is None else f"{value:.3f}"

    start = ""
    if job.init is not None:
        start = f"It starts from `{job.init.name}`, an earlier LoRA cut to rank {settings.rank} by SVD.\n"
    measured = f"{held_out} rows kept back from the data"
    if job.held_out is not None:
        measured = f"the first {held_out} rows of `{job.held_out.name}`"
    licence = f"license: {json.dumps(job.licence)}\n" if job.licence else ""
    versions = ", ".join(
        f"{name} {version}"
        for name, version in (
            ("molora", __version__),
            ("torch", torch.__version__),
            ("transformers", transformers.__version__),
            ("peft", peft.__version__),
        )
    )
    return f"""---
base_model: {json.dumps(base.id)}
{licence}library_name: peft
tags: [lora]
---
# {job.name}: a LoRA adapter for {base.id}

Plain PEFT LoRA, rank {settings.rank}, alpha {settings.alpha:g}, {result.parameters:,} parameters.

## Data
{job.source or "Not stated."}

`{job.data.name}`, sha256 `{_sha256(job.data)}`, {rows} rows.

## Training
```sh
{training_command(job, base.id, settings)}
```
{start}{result.steps} steps, {result.tokens:,} tokens, {result.completion_tokens:,} of them completion.
It took {result.seconds:.0f} s.
Versions: {versions}.
`{METRICS}` holds the loss of every step.

## Held-out NLL, nats per completion token ({measured})
base: {nats(result.nll_base)}
with the adapter: {nats(result.nll)}
"""
