"""Routes in float32 with a second look at close ones are the routes in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from molora_cli.core.router import quick
from molora_cli.core.router.context import ContextNet, sample_rows
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


@pytest.mark.parametrize("rows", [1, 255, 256, 1000])
def test_an_affine_map_is_the_layer(rows: int) -> None:
    layer = torch.nn.Linear(30, 7).double()
    x = torch.randn(rows, 1, 30, dtype=torch.float64)
    torch.testing.assert_close(affine(layer, x), layer(x), atol=1e-12, rtol=1e-12)
