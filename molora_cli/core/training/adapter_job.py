"""From data files to trained adapter folders: what to train, on what, starting from what."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from molora_cli.core.bundle.writing import check_target
from molora_cli.core.training.adapter_loop import AdapterTrainer, TrainSettings, run
from molora_cli.core.training.adapter_save import (
    CONFIG,
    METRICS,
    AdapterJob,
    BaseName,
    card_text,
    write_adapter,
)
from molora_cli.core.training.data import Example, read_examples
from molora_cli.core.training.encode import encode_all
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks

MAX_HELD_OUT = 40


def settings_from(values: Mapping[str, Any]) -> TrainSettings:
    """Checked settings from named values; alpha 0 is twice the rank, epochs 0 none. Raises InputError."""
    chosen = dict(values)
    target = chosen.get("target", "all-linear")
    if target != "all-linear":
        names = target.split(",") if isinstance(target, str) else target
        chosen["target"] = tuple(name.strip() for name in names if name.strip())
    chosen["alpha"] = chosen.get("alpha") or 2.0 * chosen.get("rank", TrainSettings.rank)
    chosen["epochs"] = chosen.get("epochs") or None
    settings = TrainSettings(**chosen)
    settings.check()
    return settings


def plan_jobs(
    data: Mapping[str, Path],
    *,
    held_out: Mapping[str, Path],
    init: Mapping[str, Path],
    source: Mapping[str, str],
    licence: Mapping[str, str],
) -> list[AdapterJob]:
    """One job per adapter, checked before anything is trained.

    Raises InputError where held-out rows or a start name an adapter without data, or a path does not exist.
    """
    if not data:
        raise InputError("no data is given", "write NAME=FILE, say math=math.jsonl")
    for what, named in (("--val", held_out), ("--init", init)):
        for name, path in named.items():
            if name not in data:
                raise InputError(
                    f"{what} {name}: no data is given for {name}", f"there are: {', '.join(data)}"
                )
            if not path.exists():
                raise InputError(f"{what} {name}: {path} does not exist", "check the path")
    for name, path in data.items():
        if not path.is_file():
            raise InputError(f"the data of {name} is no file: {path}", "check the path")
    return [
        AdapterJob(n, p, held_out.get(n), init.get(n), source.get(n, ""), licence.get(n, ""))
        for n, p in data.items()
    ]


def train_job(
    job: AdapterJob,
    base: BaseName,
    settings: TrainSettings,
    out: Path,
    *,
    force: bool = False,
    device: str = "auto",
    val_every: int = 0,
    ticker: Ticker = no_ticks,
) -> dict[str, Any]:
    """Trains one adapter and writes it to `out / job.name`, whole or not at all; returns its numbers.

    val_every: steps between measures on the held-out rows, 0 for only before and after.

    An interrupted run leaves `out / .NAME.partial` and goes on from it when started again with the same data
    and settings. Raises InputError for bad data or an existing folder without `force`.
    """
    from transformers import AutoTokenizer

    from molora_cli.core.base.model import load_base_model

    settings.check()
    target = out / job.name
    check_target(target, force=force, own_file=CONFIG)
    rows = read_examples(job.data)
    if job.held_out is not None:
        kept = read_examples(job.held_out)[:MAX_HELD_OUT]
    else:
        rows, kept = split_held_out(rows, settings.seed)
    tokenizer = AutoTokenizer.from_pretrained(base.path)
    train = encode_all(tokenizer, rows, settings.max_length)
    held_out = encode_all(tokenizer, kept, settings.max_length)
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    # half precision is emulated and slow on CPUs without it; LoRA weights are float32 either way
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    model, _ = load_base_model(base.path, dtype=dtype, device=str(place))
    trainer = AdapterTrainer(model, settings, tokenizer.pad_token_id or 0, job.init)
    partial = out / f".{job.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    result = run(
        trainer,
        train,
        held_out,
        state=partial,
        metrics=partial / METRICS,
        val_every=val_every,
        ticker=ticker,
    )
    card = card_text(job, base, settings, result, len(train), len(held_out))
    write_adapter(trainer, target, base.id, card, partial / METRICS, force=force)
    shutil.rmtree(partial)
    return {
        "name": job.name,
        "path": str(target),
        "rows": len(train),
        "rows_cut": sum(r.cut for r in train),
        "held_out_rows": len(held_out),
        **vars(result),
    }


def split_held_out(rows: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """(train, held out): a twentieth of the rows, at most MAX_HELD_OUT, held out by document.

    Rows with one `document`, or else with the same first message, are one document and stay together.
    """
    groups: dict[str, list[Example]] = {}
    for row in rows:
        key = f"d:{row.document}" if row.document is not None else f"t:{row.contents[0]}"
        groups.setdefault(key, []).append(row)
    names = sorted(groups)
    random.Random(seed).shuffle(names)
    wanted = min(MAX_HELD_OUT, len(rows) // 20)
    kept: set[str] = set()
    count = 0
    for name in names:
        if count + len(groups[name]) <= wanted:
            kept.add(name)
            count += len(groups[name])
    train = [r for n, group in groups.items() if n not in kept for r in group]
    return train, [r for n in names if n in kept for r in groups[n]]
