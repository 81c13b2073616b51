"""Routers that need no training loop, made for a bundle from rules, examples or constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from molora_cli.core.router.centroid import CentroidStage, extend_centroid, fit_centroid
from molora_cli.core.router.constant import fixed_spec, uniform_spec
from molora_cli.core.router.files import join_tensors, load_tensors, stage_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spec import BASE_EXPERT, RouterSpec, StageSpec, check_spec
from molora_cli.core.router.vocab import Vocabulary, build_vocab, list_tokens, missed_tokens, parse_rule
from molora_cli.errors import InputError
from molora_cli.out import Ticker, no_ticks
from molora_cli.text import shorten

if TYPE_CHECKING:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.training.router_rows import RouterRows, TokenRow

KINDS = ("vocab", "centroid", "taps", "arrow", "xlora", "fixed", "uniform")
_EXAMPLES = 400  # rows of a domain that a centroid router reads at most
_TAP_EXAMPLES = 80  # of a taps router, which runs the base over each
# which options mean something for which kind
_OPTIONS = {
    "expert": ("fixed",),
    "rule": ("vocab",),
    "rest": ("vocab",),
    "before": ("vocab",),
    "data": ("centroid", "taps"),
    "taps": ("taps",),
    "top-k": ("centroid", "taps", "arrow"),
    "temperature": ("centroid", "taps", "arrow"),
    "margin": ("centroid",),
    "xlora": ("xlora",),
}


@dataclass(frozen=True)
class Request:
    """What the command line asks for; see `molora attach-router --help`."""

    kind: str
    experts: Sequence[str] = ()
    rules: Sequence[str] = ()
    rest: str | None = None
    data: Sequence[str] = ()
    top_k: int | None = None
    temperature: float | None = None
    margin: float | None = None
    before: bool = False
    seed: int = 0
    taps: Sequence[int] | None = None
    xlora: str | None = None


@dataclass
class Attached:
    """A router ready to be written with `Bundle.set_router`. summary: for --json and the terminal."""

    spec: RouterSpec
    tensors: dict[str, Tensor]
    summary: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def attach(bundle: Bundle, request: Request, *, force: bool = False, ticker: Ticker = no_ticks) -> Attached:
    """Build the router that is asked for; writes nothing. Raises InputError."""
    _check_request(bundle, request, force)
    notes: list[str] = []
    training: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if request.kind == "fixed":
        stage = fixed_spec(_weights(request.experts, bundle))
        summary: dict[str, Any] = {"weights": dict(zip(stage.experts, stage.params["weights"], strict=True))}
    elif request.kind == "uniform":
        stage, summary = uniform_spec(bundle.adapters), {}
    elif request.kind == "vocab":
        stage, tensors, summary = _vocab(bundle, request)
    elif request.kind == "arrow":
        stage, tensors, summary = _arrow(bundle, request)
    elif request.kind == "xlora":
        from molora_cli.core.router.xlora_folder import attach_xlora

        stage, tensors, summary = attach_xlora(bundle, request.xlora, notes)
    else:
        fit = _taps if request.kind == "taps" else _centroid
        stage, tensors, summary, training = fit(bundle, request, notes, ticker)
    spec = RouterSpec(stages=[stage], tokenizer=bundle.manifest.base.fingerprint.tokenizer, training=training)
    everything = join_tensors([tensors])
    if request.before:
        spec, everything = _in_front(bundle, stage, tensors)
    check_spec(spec, "this router")
    unused = [name for name in bundle.adapters if not any(name in s.experts for s in spec.stages)]
    if unused:
        notes.append(f"no token can take {', '.join(unused)}: the router does not name it")
    summary = {"kind": spec.kind, "experts": list(stage.experts), "k": stage.k, **summary}
    return Attached(spec, everything, summary, notes)


def _check_request(bundle: Bundle, request: Request, force: bool) -> None:
    if request.kind not in KINDS:
        trained = ("context", "layer", "hidden", "context+taps", "sequence")
        hint = f"molora train-router {bundle.path} --kind {request.kind} --data NAME=FILE ..."
        hint = hint if request.kind in trained else ""
        raise InputError(
            f"attach-router makes no router of kind '{shorten(request.kind, 40)}'",
            hint or f"--kind takes {', '.join(KINDS)}",
        )
    given = {
        "expert": bool(request.experts),
        "rule": bool(request.rules),
        "rest": request.rest is not None,
        "before": request.before,
        "data": bool(request.data),
        "taps": request.taps is not None,
        "top-k": request.top_k is not None,
        "temperature": request.temperature is not None,
        "margin": request.margin is not None,
        "xlora": request.xlora is not None,
    }
    for option, kinds in _OPTIONS.items():
        if given[option] and request.kind not in kinds:
            raise InputError(
                f"--{option} means nothing for --kind {request.kind}", f"it is for --kind {', '.join(kinds)}"
            )
    present = bundle.manifest.routing
    if request.before and present is None:
        raise InputError(
            f"{bundle.path} has no router yet to put rules before",
            "leave out --before and say with --rest who takes the other tokens",
        )
    if present is not None and not request.before and not force:
        raise InputError(
            f"{bundle.path} has a router already ({shorten(present.kind, 40)})",
            "--force replaces it; --kind vocab --before puts rules in front of it",
        )


def expert_name(text: str, bundle: Bundle) -> str:
    """An adapter of the bundle, or "__base__" for "base". Raises InputError that lists the names."""
    if text in ("base", BASE_EXPERT):
        return BASE_EXPERT
    if text not in bundle.adapters:
        raise InputError(
            f"{bundle.path} has no adapter '{shorten(text, 40)}'",
            f"it has {', '.join(bundle.adapters)}; 'base' is the model without an adapter",
        )
    return text


def _weights(experts: Sequence[str], bundle: Bundle) -> dict[str, float]:
    """`NAME` or `NAME=WEIGHT` each. Raises InputError."""
    weights: dict[str, float] = {}
    for text in experts:
        name, sep, value = text.partition("=")
        name = expert_name(name, bundle)
        if name in weights:
            raise InputError(f"--expert {shorten(text, 40)}: '{name}' is named twice", "name each once")
        try:
            weights[name] = float(value) if sep else 1.0
        except ValueError:
            raise InputError(
                f"--expert {shorten(text, 40)}: '{shorten(value, 20)}' is no number", "write NAME=0.5"
            ) from None
    return weights


def _vocab(bundle: Bundle, request: Request) -> tuple[StageSpec, dict[str, Tensor], dict[str, Any]]:
    from molora_cli.core.base.structure import read_structure

    rules = [parse_rule(text) for text in request.rules]
    rules = [type(r)(expert_name(r.expert, bundle), r.form, r.value) for r in rules]
    leave = request.rest == "none" or (request.rest is None and request.before)
    rest = None if request.rest is None or leave else expert_name(request.rest, bundle)
    base = read_structure(bundle.base_path)
    tokenizer = _tokenizer(bundle)
    size = base[base.embedding].in_features if base.embedding else len(tokenizer)
    vocabulary = Vocabulary.of(tokenizer, size, base.config)
    stage, tensors = build_vocab(rules, vocabulary, rest)
    missed = missed_tokens(tensors["table"])
    if missed and not leave:
        raise InputError(
            f"no rule covers {len(missed)} of {size} tokens: {list_tokens(missed, vocabulary, 6)}",
            "--rest NAME gives them to an adapter, --rest base to none",
        )
    owners = torch.bincount(tensors["table"].long() + 1, minlength=len(stage.experts) + 1).tolist()
    summary = {
        "rules": stage.params["rules"],
        "tokens": dict(zip(stage.experts, owners[1:], strict=True)),
        "left": len(missed),
    }
    return stage, tensors, summary


def _centroid(
    bundle: Bundle, request: Request, notes: list[str], ticker: Ticker
) -> tuple[StageSpec, dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    from molora_cli.core.base.embedding import read_embedding

    rows = _examples(bundle, request, _EXAMPLES, notes, ticker)
    embedding = read_embedding(bundle.base_path)
    learnt = [row for found in rows.train.values() for row in found]
    held = [row for found in rows.held_out.values() for row in found]
    stage, tensors = fit_centroid(embedding, learnt, rows.experts)
    accuracy = {}
    if held:
        trial = CentroidStage(stage, tensors, Surroundings(n_layers=1, embedding=embedding))
        accuracy = {name: _accuracy(trial, rows.held_out[name]) for name in rows.experts}
        # measured; now they may teach too
        stage, tensors = extend_centroid(stage, tensors, embedding, held, rows.experts)
    return _finish(stage, tensors, request, rows, accuracy, notes)


def _arrow(bundle: Bundle, request: Request) -> tuple[StageSpec, dict[str, Tensor], dict[str, Any]]:
    from molora_cli.core.adapter.factors import load_bundle_factors
    from molora_cli.core.base.structure import read_structure
    from molora_cli.core.router.arrow import fit_arrow

    entries = bundle.manifest.adapters
    factors = {entry.name: load_bundle_factors(bundle.folder(entry.name), entry) for entry in entries}
    stage, tensors = fit_arrow(factors, read_structure(bundle.base_path).n_layers, seed=request.seed)
    stage.k = min(len(stage.experts), stage.k if request.top_k is None else request.top_k)
    stage.temperature = stage.temperature if request.temperature is None else request.temperature
    return stage, tensors, {"modules": len(tensors), "seed": request.seed}


def _taps(
    bundle: Bundle, request: Request, notes: list[str], ticker: Ticker
) -> tuple[StageSpec, dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    from molora_cli.core.router.taps import LDA
    from molora_cli.core.training.live_job import (
        LiveSettings,
        attached_model,
        fit_live,
        live_accuracy,
        live_score,
    )

    rows = _examples(bundle, request, _TAP_EXAMPLES, notes, ticker)
    model = attached_model(bundle)
    learnt = [row for found in rows.train.values() for row in found]
    live = LiveSettings(taps=request.taps, head=LDA)
    stage, tensors = fit_live("taps", model, learnt, rows.experts, live, ticker=ticker)
    score = live_score(model, RouterSpec(stages=[stage]), join_tensors([tensors]))
    accuracy = {name: live_accuracy(score, rows.held_out[name]) for name in rows.experts}
    counts = tensors["taps.0.statistics.count"].tolist()
    stage.params["tokens"] = {name: int(n) for name, n in zip(rows.experts, counts, strict=True)}
    return _finish(stage, tensors, request, rows, accuracy, notes)


def _examples(bundle: Bundle, request: Request, most: int, notes: list[str], ticker: Ticker) -> RouterRows:
    """Labelled token rows of `--data`, at most `most` of a domain."""
    from molora_cli.core.training.data import conflicts, read_domains
    from molora_cli.core.training.router_rows import RouterSettings, prepare

    specs = [BASE_EXPERT + text[4:] if text.startswith("base=") else text for text in request.data]
    domains = read_domains(specs, known=[*bundle.adapters, BASE_EXPERT])
    notes += conflicts(domains)
    # some rows that change domain: without them 81 % of tokens are right where two questions share a prompt,
    # with them 90 % (64 examples a domain; two turns 91 and 95 %, one domain 98 and 97.5 %)
    mixes = sum(min(len(found), most) for found in domains.values()) // 4
    settings = RouterSettings(mixes=mixes, rows=most, val_share=0.2, seed=request.seed)
    rows = prepare(domains, _tokenizer(bundle), settings, ticker=ticker)
    notes += rows.notes
    return rows


def _finish(
    stage: StageSpec,
    tensors: dict[str, Tensor],
    request: Request,
    rows: RouterRows,
    accuracy: dict[str, float | None],
    notes: list[str],
) -> tuple[StageSpec, dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """The stage with the settings that were asked for, and what to say of it."""
    stage.k = stage.k if request.top_k is None else request.top_k
    stage.temperature = stage.temperature if request.temperature is None else request.temperature
    stage.margin = stage.margin if request.margin is None else request.margin
    for name, value in accuracy.items():
        if value is not None and value < 0.7:
            notes.append(
                f"{name}: only {value:.0%} of held-out tokens find it; give more or clearer examples"
            )
    summary = {"tokens": stage.params["tokens"], "held_out_accuracy": accuracy}
    training = {"data": dict(rows.digests), "documents": dict(rows.documents), "held_out_accuracy": accuracy}
    return stage, tensors, summary, training


def _accuracy(stage: CentroidStage, rows: Sequence[TokenRow]) -> float | None:
    """Share of labelled tokens whose best expert is their own; None where there is no token."""
    right = total = 0
    for row in rows:
        ids = row.ids.unsqueeze(0)
        scores, _ = stage.score(ids, torch.ones_like(ids, dtype=torch.bool), stage.start(1))
        counted = row.labels >= 0
        best = scores.logp[0, :, 0].argmax(-1)
        right += int((best == row.labels)[counted].sum())
        total += int(counted.sum())
    return round(right / total, 4) if total else None


def _in_front(
    bundle: Bundle, stage: StageSpec, tensors: dict[str, Tensor]
) -> tuple[RouterSpec, dict[str, Tensor]]:
    """The bundle's router with one more stage before its own."""
    spec, file = bundle.router_spec, bundle.router_file
    if spec is None or file is None:
        raise InputError(f"{bundle.path} has no router", "leave out --before")
    old = load_tensors(file)
    stages = [tensors, *(stage_tensors(old, i) for i in range(len(spec.stages)))]
    return spec.model_copy(update={"stages": [stage, *spec.stages]}), join_tensors(stages)


def _tokenizer(bundle: Bundle) -> Any:
    from molora_cli.core.base.model import load_tokenizer

    tokenizer = load_tokenizer(bundle.base_path)
    if tokenizer is None or not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the base {bundle.base_path} has no fast tokenizer, which rules and examples need",
            "put its tokenizer.json beside its weights",
        )
    return tokenizer
