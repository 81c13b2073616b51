"""Routes in float32 with a second look at close ones are the routes in float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from molora_cli.app import app
from molora_cli.core.router import quick
from molora_cli.core.router.context import sample_rows
from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.files import join_tensors
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.products import affine
from molora_cli.core.router.spec import RouterSpec, StageSpec
from molora_cli.core.router.stack import RouterStack

VOCABULARY, WIDTH, EXPERTS = 60, 24, ("a", "b", "c")
DECAYS = (0.5, 0.9)


def made(k: int, *, twins: bool = False) -> quick.Quick:
    """A random router that looks ahead; twins: its first two experts always score the same."""
    torch.manual_seed(k)
    embedding = torch.randn(VOCABULARY, WIDTH)
    net = ContextNet(WIDTH, len(EXPERTS), projection=8, hidden=16, decays=DECAYS, units=8)
    assert net.ahead is not None
    torch.nn.init.normal_(net.ahead.outer.weight)
    torch.nn.init.normal_(net.outer.weight, std=4.0)
    if twins:
        for layer in (net.outer, net.ahead.outer):
            layer.weight.data[1], layer.bias.data[1] = layer.weight.data[0], layer.bias.data[0]
    ids, rows = sample_rows(embedding)
    params: dict[str, Any] = {
        "decays": list(DECAYS),
        "projection": 8,
        "hidden": 16,
        "scale": 1.1,
        "sampled": ids,
        "ahead": {"units": 8, "cuts": [0, 7]},
    }
    spec = RouterSpec(stages=[StageSpec(kind="context", experts=list(EXPERTS), params=params, k=k)])
    assert quick.is_quick(spec)
    around = Surroundings(n_layers=4, embedding=embedding)
    own = {**net.state_dict(), "centre": torch.randn(WIDTH), "samples": rows}
    tensors = join_tensors([own])
    exact = RouterStack(spec, tensors, around, EXPERTS)
    return quick.Quick(exact, RouterStack(spec, tensors, replace(around, dtype=torch.float32), EXPERTS))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("twins", [False, True])
def test_the_routes_are_those_of_float64(k: int, twins: bool) -> None:
    router = made(k, twins=twins)
    ids = torch.randint(0, VOCABULARY, (9, 300))
    real = torch.arange(300) < torch.randint(1, 301, (9, 1))
    found = router.decide(ids, real)
    wanted, _ = router.exact.decide(ids, None, router.exact.start(9))
    assert torch.equal(found.route.indices[real], wanted.route.indices[real])
    torch.testing.assert_close(found.route.gates[real], wanted.route.gates[real], atol=1e-4, rtol=0)
    torch.testing.assert_close(found.scores[real], wanted.scores[real], atol=1e-4, rtol=0)


def test_close_choices_are_decided_again_and_padding_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    router = made(1)
    ids = torch.randint(0, VOCABULARY, (6, 80))
    wanted, _ = router.exact.decide(ids, None, router.exact.start(6))
    again: list[int] = []
    decide = router.exact.decide

    def counted(ids: torch.Tensor, mask: Any, state: Any) -> Any:
        again.append(len(ids))
        return decide(ids, mask, state)

    monkeypatch.setattr(router.exact, "decide", counted)
    monkeypatch.setattr(quick, "CLOSE", 100.0)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[2:] = False
    found = router.decide(ids, real)
    assert again == [2]
    torch.testing.assert_close(found.scores[:2], wanted.scores[:2], atol=1e-12, rtol=0)
    assert not torch.allclose(found.scores[2:], wanted.scores[2:], atol=1e-12, rtol=0)
    torch.testing.assert_close(found.scores, wanted.scores, atol=1e-4, rtol=0)


def test_many_documents_are_traced_as_one_by_one(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from molora_cli.core import tracing
    from molora_cli.core.bundle.store import Bundle

    data = []
    for name, text in (("one", "1 + 1 = 2 "), ("two", "def f(): ")):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": text * (3 + i)}) + "\n" for i in range(12)))
        data.append(f"--data={name}={file}")
    trained = CliRunner().invoke(app, ["train-router", str(pair), *data, "--steps", "20", "--force"])
    assert trained.exit_code == 0, (trained.output, trained.exception)
    made: list[quick.Quick] = []
    real = quick.Quick.__init__

    def noted(self: quick.Quick, *stacks: RouterStack) -> None:
        real(self, *stacks)
        made.append(self)

    monkeypatch.setattr(quick.Quick, "__init__", noted)
    texts = [(None, ("1 + 1 = def f(): " * 9)[i : i + 1 + 3 * i]) for i in range(tracing.MANY)]
    together = tracing.trace_texts(Bundle.open(pair), texts)
    assert len(made) == 1
    few = [tracing.trace_texts(Bundle.open(pair), texts[i : i + 32]) for i in (0, 32)]
    assert len(made) == 1
    assert np.array_equal(together.indices, np.concatenate([part.indices for part in few]))
    for part in few:
        assert part.scores is not None
    scores = np.concatenate([part.scores for part in few if part.scores is not None])
    assert together.scores is not None
    np.testing.assert_allclose(together.scores, scores, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 255, 256, 1000])
def test_an_affine_map_is_the_layer(rows: int) -> None:
    layer = torch.nn.Linear(30, 7).double()
    x = torch.randn(rows, 1, 30, dtype=torch.float64)
    torch.testing.assert_close(affine(layer, x), layer(x), atol=1e-12, rtol=1e-12)
