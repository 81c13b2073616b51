"""The `context` kind: one route whatever the block size or padding, and a file that is checked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from molora_cli.core.router.context import ContextStage, normalised, project_table, sample_rows
from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.features import centre_and_scale
from molora_cli.core.router.kinds import Surroundings
from molora_cli.core.router.spec import StageSpec
from molora_cli.errors import MoloraError

VOCABULARY, WIDTH = 50, 24
DECAYS = (0.5, 0.9)


def _parts(seed: int = 0) -> tuple[StageSpec, dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(seed)
    embedding = torch.randn(VOCABULARY, WIDTH)
    net = ContextNet(WIDTH, 3, projection=8, hidden=16, decays=DECAYS)
    ids, rows = sample_rows(embedding)
    params: dict[str, Any] = {
        "decays": list(DECAYS),
        "projection": 8,
        "hidden": 16,
        "scale": 1.1,
        "sampled": ids,
    }
    spec = StageSpec(kind="context", experts=["a", "b", "c"], params=params)
    return spec, {**net.state_dict(), "centre": torch.randn(WIDTH), "samples": rows}, embedding


def _stage(embedding: torch.Tensor, spec: StageSpec, tensors: dict[str, torch.Tensor]) -> ContextStage:
    return ContextStage(spec, tensors, Surroundings(n_layers=4, embedding=embedding))


def test_full_chunked_cached_and_padded_runs_agree() -> None:
    spec, tensors, embedding = _parts()
    stage = _stage(embedding, spec, tensors)
    ids = torch.randint(0, VOCABULARY, (2, 70))
    everything = torch.ones_like(ids, dtype=torch.bool)
    full, end = stage.score(ids, everything, stage.start(2))
    assert full.logp.shape == (2, 70, 1, 3) and full.logp.dtype == torch.float64
    torch.testing.assert_close(full.logp.exp().sum(-1), torch.ones(2, 70, 1, dtype=torch.float64))
    for size in (1, 7, 33):
        state, found = stage.start(2), []
        for first in range(0, 70, size):
            part = ids[:, first : first + size]
            scores, state = stage.score(part, torch.ones_like(part, dtype=torch.bool), state)
            found.append(scores.logp)
        torch.testing.assert_close(torch.cat(found, 1), full.logp, atol=1e-10, rtol=0)
        for name in end:
            torch.testing.assert_close(state[name], end[name], atol=1e-10, rtol=0)
    padded = torch.cat([torch.full((2, 5), 3), ids], 1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.bool), everything], 1)
    left, _ = stage.score(padded, mask, stage.start(2))
    torch.testing.assert_close(left.logp[:, 5:], full.logp, atol=1e-10, rtol=0)


def test_an_id_outside_the_table_is_its_edge_however_many_come() -> None:
    """One token goes through the compiled step where that is there, many through torch."""
    from molora_kernels import resolve

    try:
        resolve("cpu")
    except ValueError as error:
        pytest.skip(str(error))
    spec, tensors, embedding = _parts()
    net = ContextNet(WIDTH, 3, projection=8, hidden=16, decays=DECAYS, units=5)
    torch.nn.init.normal_(net.ahead.outer.weight)  # type: ignore[union-attr]
    spec.params["ahead"] = {"units": 5, "cuts": [0, VOCABULARY - 1]}
    stage = _stage(embedding, spec, {**tensors, **net.state_dict()})
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9, VOCABULARY + 7, 4, 5, -2, 6]])
    mask = torch.ones_like(ids, dtype=torch.bool)
    full, _ = stage.score(ids, mask, stage.start(1))
    state, found = stage.start(1), []
    for part in ids.split(1, dim=1):
        scores, state = stage.score(part, mask[:, :1], state)
        found.append(scores.logp)
    torch.testing.assert_close(torch.cat(found, 1), full.logp, atol=1e-10, rtol=0)


def test_it_is_causal_and_reads_the_context() -> None:
    spec, tensors, embedding = _parts()
    stage = _stage(embedding, spec, tensors)
    ids = torch.arange(40)[None] % VOCABULARY
    other = ids.clone()
    other[0, 20] = 49
    mask = torch.ones_like(ids, dtype=torch.bool)
    one, two = (stage.score(x, mask, stage.start(1))[0].logp for x in (ids, other))
    assert torch.equal(one[:, :20], two[:, :20])
    assert not torch.equal(one[:, 25], two[:, 25])


def test_the_projected_table_is_what_training_computes() -> None:
    embedding = torch.randn(VOCABULARY, WIDTH) * 3 + 1
    centre, scale = centre_and_scale(embedding)
    net = ContextNet(WIDTH, 2, projection=8, hidden=4, decays=DECAYS)
    with torch.no_grad():
        wanted = net.project(normalised(embedding, centre, scale))
    torch.testing.assert_close(project_table(net, embedding, centre, scale), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["centre", "project.weight", "inner.bias", "outer.weight", "samples"])
def test_a_missing_or_misshapen_tensor_is_named(name: str) -> None:
    spec, tensors, embedding = _parts()
    lacking = {k: v for k, v in tensors.items() if k != name}
    with pytest.raises(MoloraError, match=name):
        _stage(embedding, spec, lacking)
    with pytest.raises(MoloraError, match=name):
        _stage(embedding, spec, {**tensors, name: tensors[name][..., :-1]})


@pytest.mark.parametrize(
    "change",
    [
        {"decays": [1.0]},
        {"decays": "x"},
        {"projection": 10**9},
        {"hidden": 0},
        {"scale": 0.0},
        {"scale": None},
    ],
)
def test_a_header_out_of_range_is_refused(change: dict[str, Any]) -> None:
    spec, tensors, embedding = _parts()
    spec.params.update(change)
    with pytest.raises(MoloraError, match="header"):
        _stage(embedding, spec, tensors)


def test_another_embedding_is_refused_and_another_precision_is_not() -> None:
    spec, tensors, embedding = _parts()
    _stage(embedding.bfloat16(), spec, tensors)
    with pytest.raises(MoloraError, match="another input embedding"):
        _stage(torch.randn_like(embedding), spec, tensors)
    with pytest.raises(MoloraError, match="--base"):
        ContextStage(spec, tensors, Surroundings(n_layers=4))
