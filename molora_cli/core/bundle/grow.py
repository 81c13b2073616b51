"""The router of a bundle that gets more adapters: columns in closed form from a few examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from molora_cli.core.router.spec import RouterSpec
from molora_cli.errors import InputError
from molora_cli.out import no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from torch import Tensor

    from molora_cli.core.bundle.store import Bundle

_EXAMPLES = 400  # rows of a new domain that a column is made of

Router = tuple[RouterSpec, dict[str, "Tensor"]]


def takes_columns(spec: RouterSpec | None) -> int | None:
    """The number of the stage that takes a column from examples alone; None where there is none."""
    if spec is None or any(stage.params.get("prior") for stage in spec.stages):
        return None
    return next((i for i, stage in enumerate(spec.stages) if stage.kind in ("centroid", "context")), None)


def grown_router(
    bundle: Bundle, domains: Mapping[str, list[Any]], seed: int, notes: list[str], report: dict[str, Any]
) -> Router | None:
    """The router with a column for each domain, those of the others bit for bit as they were; None where its
    kind takes none. `report` gets what held-out rows say of them."""
    spec, file = bundle.router_spec, bundle.router_file
    place = takes_columns(spec)
    if spec is None or file is None or place is None:
        kind = f"the router is {shorten(spec.kind, 40)}" if spec else "there is no router"
        notes.append(
            f"--data was not used: {kind}, and only centroid and context take a column from examples"
        )
        return None
    from molora_cli.core.base.embedding import read_embedding
    from molora_cli.core.base.model import load_tokenizer
    from molora_cli.core.router.files import load_tensors

    tokenizer = load_tokenizer(bundle.base_path)
    if tokenizer is None:
        raise InputError(f"the base {bundle.base_path} has no tokenizer", "leave out --data")
    embedding = read_embedding(bundle.base_path)
    add = _centroid_column if spec.stages[place].kind == "centroid" else _context_column
    router: Router = (spec, load_tensors(file))
    accuracy: dict[str, float | None] = {}
    for name, rows in domains.items():
        router, found = add(router, place, name, rows, tokenizer, embedding, seed)
        accuracy[name] = found
        if found is not None and found < 0.7:
            notes.append(
                f"{name}: only {found:.0%} of held-out tokens find it; give more or clearer examples"
            )
    report["router"] = {"kind": spec.kind, "held_out_accuracy": accuracy}
    return router


def _context_column(
    router: Router, place: int, name: str, rows: list[Any], tokenizer: Any, embedding: Tensor, seed: int
) -> tuple[Router, float | None]:
    from molora_cli.core.router.taps import LDA
    from molora_cli.core.training.added_job import add_expert
    from molora_cli.core.training.router_rows import RouterSettings

    settings = RouterSettings(rows=_EXAMPLES, val_share=0.2, seed=seed)
    made = add_expert(router, place, name, {name: rows}, tokenizer, embedding, settings, head=LDA)
    return (made.spec, made.tensors), made.changed.get(name, {}).get("after")


def _centroid_column(
    router: Router, place: int, name: str, rows: list[Any], tokenizer: Any, embedding: Tensor, seed: int
) -> tuple[Router, float | None]:
    from molora_cli.core.router.centroid import append_centroid
    from molora_cli.core.router.files import join_tensors, stage_tensors

    spec = router[0]
    stages = [stage_tensors(router[1], i) for i in range(len(spec.stages))]
    learnt, held, digest = _token_rows(rows, name, tokenizer, seed)
    trial, tensors = append_centroid(spec.stages[place], stages[place], embedding, learnt, name)
    accuracy = _accuracy(trial, tensors, embedding, held)
    # measured; now they may teach too
    every = [*learnt, *held]
    stage, stages[place] = append_centroid(spec.stages[place], stages[place], embedding, every, name)
    training = dict(spec.training)
    for key, value in (("data", digest), ("documents", len(rows))):
        training[key] = {**training.get(key, {}), name: value}
    grown = [*spec.stages[:place], stage, *spec.stages[place + 1 :]]
    update = {"stages": grown, "training": training}
    return (spec.model_copy(update=update), join_tensors(stages)), accuracy


def _token_rows(rows: list[Any], name: str, tokenizer: Any, seed: int) -> tuple[list[Any], list[Any], str]:
    """Rows to learn from and held-out ones, every token of the domain labelled 0, and the rows' digest."""
    from molora_cli.core.training.encode import encode_all
    from molora_cli.core.training.mixing import labelled
    from molora_cli.core.training.router_rows import RouterSettings, rows_digest, split_documents, token_row

    ours = [labelled(row, name) for row in rows[:_EXAMPLES]]
    encoded = encode_all(tokenizer, ours, RouterSettings().max_length, no_ticks)
    tokens = {id(row): token_row(e, row, [name]) for e, row in zip(encoded, ours, strict=True)}
    learnt, held = split_documents(ours, 0.2, seed + 1)
    return [tokens[id(r)] for r in learnt], [tokens[id(r)] for r in held], rows_digest(rows)


def _accuracy(
    stage: Any, tensors: Mapping[str, Tensor], embedding: Tensor, rows: Sequence[Any]
) -> float | None:
    """Share of held-out tokens whose best expert is the stage's last one; None where there is no token."""
    import torch

    from molora_cli.core.router.centroid import CentroidStage
    from molora_cli.core.router.kinds import Surroundings

    trial = CentroidStage(stage, tensors, Surroundings(n_layers=1, embedding=embedding))
    right = total = 0
    for row in rows:
        ids = row.ids.unsqueeze(0)
        scores, _ = trial.score(ids, torch.ones_like(ids, dtype=torch.bool), trial.start(1))
        counted = row.labels >= 0
        best = scores.logp[0, :, 0].argmax(-1)
        right += int((best == len(stage.experts) - 1)[counted].sum())
        total += int(counted.sum())
    return round(right / total, 4) if total else None
