"""/why in molora chat: the route of one token explained, for every kind of router."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from molora_cli import load
from molora_cli.errors import InputError


@pytest.fixture
def repl(chat_model: Any, make_repl: Callable[..., Any]) -> Any:
    return make_repl(chat_model)


def test_why_lists_tokens_and_explains_one(repl: Any) -> None:
    repl.said("hello")
    assert re.search(r"1 .*\b5 ", repl.said("/why"), re.DOTALL)
    text = repl.said("/why 1")
    # the answer's first token was decided at the newline that the template ends with, id 201: code's range
    assert "takes code at gate 1.00" in text
    assert re.search(r"code +1\.000", text) and re.search(r"runner-up \w+, margin 1\.000", text)
    assert "learns from no examples" in text
    for number in ("0", "6", "x", "²"):
        with pytest.raises(InputError, match="1 to 5"):
            repl.handle(f"/why {number}")


def stage_of(kind: str, bundle: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A stage of a kind with random numbers, for the tiny base (4 layers, width 64)."""
    from molora_cli.core.base.embedding import read_embedding
    from molora_cli.core.router.context import sample_rows
    from molora_cli.core.router.context_net import ContextNet
    from molora_cli.core.router.moments import Moments
    from molora_cli.core.router.spec import StageSpec
    from molora_cli.core.router.taps import tap_groups

    torch.manual_seed(0)
    names = list(bundle.adapters)
    if kind in ("taps", "layer", "hidden"):
        groups = {"taps": tap_groups((1, 2), 4), "layer": tap_groups(range(4), 4), "hidden": []}[kind]
        heads = {"taps": 2, "layer": 4, "hidden": 1}[kind]
        tensors = {}
        for i in range(heads):
            tensors |= {f"taps.{i}.weight": torch.randn(64, 2), f"taps.{i}.bias": torch.zeros(2)}
        params = {"head": "lda", **({"tap": 2} if kind == "hidden" else {})}
        return StageSpec(kind=kind, experts=names, groups=groups, params=params), tensors
    if kind.startswith("xlora"):
        modules = sorted({path for entry in bundle.manifest.adapters for path in entry.modules})
        own = modules if kind == "xlora-modules" else []
        width = 2 * max(1, len(own))
        params = {"softmax": True, "temperature": 1.0, "top_k": None, "again": False, "weight": 1.0}
        params |= {"linears": 1, "modules": own}
        groups = [(i, i + 1) for i in range(4)] if own else []
        tensors = {"linear.0.weight": torch.randn(width, 64), "linear.0.bias": torch.zeros(width)}
        return StageSpec(
            kind=kind, input="hidden", experts=[*names, "__base__"], groups=groups, k=3, params=params
        ), tensors
    embedding = read_embedding(bundle.base_path)
    if kind == "sequence":
        shapes = {"centre": (64,), "project": (64, 8), "weight": (8, 2), "bias": (2,)}
        return StageSpec(kind=kind, experts=names), {k: torch.randn(*s) for k, s in shapes.items()}
    net = ContextNet(64, 2, projection=8, hidden=8, decays=(0.5, 0.9))
    sampled, samples = sample_rows(embedding)
    params = {"decays": [0.5, 0.9], "projection": 8, "hidden": 8, "scale": 1.0, "sampled": sampled}
    moments = Moments.empty(2, 24)
    for label in range(2):
        moments.add(label, torch.randn(30, 24).double() + label)
    tensors = {**net.state_dict(), "centre": torch.zeros(64), "samples": samples, **moments.tensors()}
    return StageSpec(kind="context", experts=names, params=params), tensors


LEARNT = {"context": True, "centroid": True, "sequence": True, "taps": True, "layer": True, "hidden": True}


@pytest.mark.parametrize(
    "kind",
    [
        *("fixed", "uniform", "vocab", "centroid", "context", "sequence", "taps", "layer", "hidden", "arrow"),
        *("xlora", "xlora-modules"),
    ],
)
def test_why_explains_the_routes_of_every_kind(
    pair: Path, tmp_path: Path, kind: str, make_repl: Callable[..., Any]
) -> None:
    from molora_cli.core.bundle.store import Bundle
    from molora_cli.core.router.attach import Request as Rules
    from molora_cli.core.router.attach import attach
    from molora_cli.core.router.files import join_tensors
    from molora_cli.core.router.kinds import _HOMES
    from molora_cli.core.router.spec import RouterSpec

    assert kind in _HOMES and len(_HOMES) == 12, "a kind without a test of /why"
    bundle = Bundle.open(pair)
    more: dict[str, Any] = {}
    if kind == "fixed":
        more = {"experts": ("one",)}
    elif kind == "vocab":
        more = {"rules": ("one=range:0-100",), "rest": "two"}
    elif kind == "centroid":
        rows = {"one": ["ab ab ab"] * 6, "two": ["xy xy xy"] * 6}
        for name, texts in rows.items():
            (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
        more = {"data": tuple(f"{name}={tmp_path / name}.jsonl" for name in rows)}
    if kind in ("fixed", "uniform", "vocab", "centroid", "arrow"):
        made = attach(bundle, Rules(kind=kind, **more))
        bundle.set_router(made.spec, made.tensors)
    else:
        stage, tensors = stage_of(kind, bundle)
        documents = {} if kind.startswith("xlora") else {"documents": {"one": 12, "two": 30}}
        bundle.set_router(RouterSpec(stages=[stage], training=documents), join_tensors([tensors]))
    repl = make_repl(load(pair))
    repl.said("hello")
    text = repl.said("/why 3")
    assert "token 3 " in text and "decided at the token before it" in text
    assert re.search(r"\bone\b", text) and ("margin " in text or kind == "fixed")
    if kind in LEARNT:
        assert re.search(r"nearest training domain( by score)?: (one|two) \(learnt from \d+ texts\)", text)
    elif kind.startswith("xlora"):
        assert "trained elsewhere" in text
    else:
        assert "learns from no examples" in text
    if kind in ("context", "centroid"):
        assert re.search(r"distance from each domain's mean: (one|two) \d+\.\d\d, (one|two) \d+\.\d\d", text)
    if kind in ("taps", "layer"):
        assert re.search(r"layers? [\d-]+: .*; scores ", text)


def test_why_says_what_was_muted(repl: Any) -> None:
    repl.session.settings.max_new_tokens = 30
    repl.said("/mute code")
    repl.said("hello")
    assert re.search(r"code +1\.000  muted", repl.said("/why 1"))
