"""Baselines that PEFT ships, run by PEFT itself: its merges, Arrow, and X-LoRA trained on the spot.

Arrow: Ostapenko et al., arXiv 2405.11157, section 3.2. X-LoRA: Buehler and Buehler, arXiv 2402.07148.
"""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from molora_cli.core.bundle.writing import new_file
from molora_cli.core.training.data import Example
from molora_cli.core.training.router_rows import RouterSettings, TokenRow, collate, prepare
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

STEP_TOKENS = 800  # of one optimiser step, padding left out
_MIXED_SHARE = 0.2
_ABOUT = "molora_trained"  # key of the metadata
_MERGED = "molora merged"  # no name of an adapter has a blank


def merged(base: Any, folders: Mapping[str, Path], kind: str, settings: Mapping[str, float]) -> Any:
    """The base under the one adapter that PEFT's `add_weighted_adapter` makes of these PEFT folders.

    kind: its combination_type (those used here work on A and B apart). settings: weight of each adapter, 0 =
    1/n; density; seed of what is dropped. Raises InputError where PEFT refuses the adapters.
    """
    from peft import PeftModel

    names = list(folders)
    weight = settings["weight"] or 1.0 / len(names)
    density = settings.get("density")
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(int(settings.get("seed", 0)))
            model = PeftModel.from_pretrained(base, folders[names[0]], adapter_name=names[0])
            for name in names[1:]:
                model.load_adapter(folders[name], adapter_name=name)
            given = {} if density is None else {"density": density}
            model.add_weighted_adapter(names, [weight] * len(names), _MERGED, combination_type=kind, **given)
            model.set_adapter(_MERGED)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise InputError(
            f"PEFT's {kind} merge refuses these adapters: {shorten(str(error), 160)}", ""
        ) from error
    return model.eval()


def arrow(base: Any, folders: Mapping[str, Path], k: int, temperature: float) -> Any:
    """The base under PEFT's Arrow with these PEFT folders. Raises InputError where PEFT refuses them (it
    wants one rank and the same target modules in all)."""
    from peft import ArrowConfig
    from peft.tuners.lora import create_arrow_model

    config = ArrowConfig(top_k=k, router_temperature=temperature, rng_seed=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = create_arrow_model(base, [str(path) for path in folders.values()], config)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(f"PEFT's Arrow refuses these adapters: {shorten(str(error), 160)}", "") from error
    return model.eval()


def xlora(
    base: Any,
    folders: Mapping[str, Path],
    rows: Mapping[str, Sequence[Example]],
    tokenizer: Any,
    settings: Mapping[str, float],
    *,
    max_length: int = 512,
    kept: Path | None = None,
    ticker: Ticker = no_ticks,
) -> tuple[Any, dict[str, Any]]:
    """The base under PEFT's X-LoRA, its classifier trained on `rows`; and what was done.

    rows: adapter -> training rows; a fifth of what is drawn changes domain, as for a router. settings:
    tokens (of the run), lr (AdamW, linear decay), depth, layerwise, seed. The loss is taken over completion
    tokens. kept: the classifier is read from this file where it is there, else written to it. Raises
    InputError where PEFT refuses the adapters.
    """
    seed = int(settings["seed"])
    model = xlora_model(
        base, folders, depth=int(settings["depth"]), layerwise=bool(settings["layerwise"]), seed=seed
    )
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if kept is not None and kept.is_file():
        return model.eval(), _read(kept, trained)
    chosen = RouterSettings(seed=seed, max_length=max_length, val_share=0.0, mixes=400)
    prepared = prepare(rows, tokenizer, chosen)
    parameters = list(trained.values())
    optimiser = torch.optim.AdamW(parameters, float(settings["lr"]))
    budget, seen, steps = int(settings["tokens"]), 0, 0
    rng = random.Random(seed)
    losses: list[float] = []
    model.train()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        while seen < budget:
            batch = _draw(prepared.train, prepared.experts, rng)
            for group in optimiser.param_groups:
                group["lr"] = float(settings["lr"]) * (1 - seen / budget)
            loss = _loss(model, batch)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            losses.append(float(loss.detach()))
            seen += sum(len(r.ids) for r in batch)
            steps += 1
            ticker(min(seen, budget), budget, "training X-LoRA")
    tenth = max(1, len(losses) // 10)
    about = {
        "steps": steps,
        "tokens": seen,
        "parameters": sum(p.numel() for p in parameters),
        "loss_first": round(sum(losses[:tenth]) / tenth, 4),
        "loss_last": round(sum(losses[-tenth:]) / tenth, 4),
    }
    if kept is not None:
        tensors = {name: p.detach().cpu().contiguous() for name, p in trained.items()}
        with new_file(kept) as work:
            save_file(tensors, work, {_ABOUT: json.dumps(about)})
    return model.eval(), about


def _read(file: Path, trained: Mapping[str, torch.nn.Parameter]) -> dict[str, Any]:
    """Fill in parameters that were trained in an earlier run; what was done then."""
    with safe_open(file, "pt") as found, torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(found.get_tensor(name))
        return dict(json.loads(found.metadata()[_ABOUT]))


def xlora_model(
    base: Any, folders: Mapping[str, Path], *, depth: int = 1, layerwise: bool = False, seed: int = 0
) -> Any:
    """The base under X-LoRA with an untrained classifier of `depth` layers; the base keeps no keys and values
    from here on. Raises InputError where PEFT refuses the adapters."""
    from peft import XLoraConfig, get_peft_model

    config = XLoraConfig(
        task_type="CAUSAL_LM",
        hidden_size=base.config.get_text_config().hidden_size,
        # PEFT activates the experts by these names and loads them as "0", "1", ...
        adapters={str(i): str(path) for i, path in enumerate(folders.values())},
        xlora_depth=depth,
        layerwise_scalings=layerwise,
    )
    base.config.use_cache = False
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            return get_peft_model(base, config)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        raise InputError(f"PEFT's X-LoRA refuses these adapters: {shorten(str(error), 160)}", "") from error


def _draw(
    train: Mapping[str, Sequence[TokenRow]], experts: Sequence[str], rng: random.Random
) -> list[TokenRow]:
    """Rows of one step: STEP_TOKENS tokens or a little more."""
    mixed = next((rows for name, rows in train.items() if name not in experts and rows), [])
    rows: list[TokenRow] = []
    while sum(len(r.ids) for r in rows) < STEP_TOKENS:
        pool = mixed if mixed and rng.random() < _MIXED_SHARE else train[rng.choice(list(experts))]
        rows.append(rng.choice(list(pool)))
    return rows


def _loss(model: Any, rows: Sequence[TokenRow]) -> torch.Tensor:
    """Mean NLL over completion tokens."""
    ids, _, completion = collate(rows)
    device = next(iter(model.parameters())).device
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        mask[i, : len(row.ids)] = 1
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits[:, :-1].float()
    here = completion[:, 1:].to(device)
    return F.cross_entropy(logits[here], ids[:, 1:].to(device)[here])
