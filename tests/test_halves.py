"""A training step in two halves, and context features of rows side by side."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.features import DECAYS
from molora_cli.core.training import context_batches
from molora_cli.core.training.context_batches import CHUNK, ContextBatches, _groups
from molora_cli.core.training.halves import (
    Part,
    dropped,
    generator,
    in_order_of_length,
    mean_gradients,
    split,
    threads,
)
from molora_cli.core.training.router_rows import TokenRow

WIDTH = 24
LENGTHS = (CHUNK, 1, CHUNK + 1, 3, 5 * CHUNK - 1, 300)


@pytest.fixture(scope="module")
def batches() -> ContextBatches:
    draws = torch.Generator().manual_seed(0)
    return ContextBatches(torch.randn(90, WIDTH, generator=draws), [3, 95], DECAYS)


@pytest.fixture
def net() -> ContextNet:
    torch.manual_seed(1)
    return ContextNet(WIDTH, 3, projection=8, hidden=12)


def _ids(length: int) -> Tensor:
    return torch.randint(90, (length,), generator=torch.Generator().manual_seed(length))


def _row(length: int) -> TokenRow:
    return TokenRow(_ids(length), torch.zeros(length, dtype=torch.int64), torch.ones(length).bool())


def _alone(net: ContextNet, batches: ContextBatches, ids: Tensor) -> Tensor:
    """Features (T, F) of one row by the router's own code, in its float64."""
    exact = ContextNet(WIDTH, 3, projection=8, hidden=12).double()
    exact.load_state_dict(net.state_dict())
    e = exact.project(batches.table[ids].double()).unsqueeze(0)
    return exact.features(e, None, exact.start(1, torch.float64))[0][0].detach()


def test_rows_side_by_side_have_the_features_that_each_has_alone(
    net: ContextNet, batches: ContextBatches
) -> None:
    rows = [_ids(length) for length in LENGTHS]
    found = batches.features(net, rows)
    wanted = torch.cat([_alone(net, batches, ids) for ids in rows])
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)
    some = torch.rand(len(found), generator=torch.Generator().manual_seed(2)) < 0.4
    assert torch.equal(batches.features(net, rows, some), found[some])


@pytest.mark.parametrize(("together", "sizes"), [(1, [1] * 6), (2, [2, 1, 1, 1, 1]), (8, [4, 1, 1])])
def test_long_rows_are_worked_on_one_after_another(
    together: int, sizes: list[int], net: ContextNet, batches: ContextBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [_ids(length) for length in LENGTHS]
    some = torch.rand(sum(LENGTHS), generator=torch.Generator().manual_seed(2)) < 0.4
    wanted = batches.features(net, rows, some)
    assert len(_groups(rows)) == 1
    monkeypatch.setattr(context_batches, "_TOGETHER", together)
    assert [len(group) for group in _groups(rows)] == sizes
    torch.testing.assert_close(batches.features(net, rows, some), wanted, rtol=0, atol=1e-5)


def test_gradients_reach_the_projection_through_every_chunk(net: ContextNet, batches: ContextBatches) -> None:
    """The last token of a row of five chunks hears of its first, by as much as the slowest average keeps."""
    ids = _ids(5 * CHUNK)
    ids[0] = 0
    ids[1:][ids[1:] == 0] = 1  # token 0 stands at the beginning alone
    last = torch.zeros(len(ids), dtype=torch.bool)
    last[-1] = True
    before = batches.features(net, [ids], last)
    table = batches.table.clone()
    batches.table[0] += 1
    moved = (batches.features(net, [ids], last) - before)[0].view(1 + len(DECAYS), -1).abs().amax(1)
    batches.table.copy_(table)
    assert moved[0] == 0 and moved[-1] > 1e-3
    assert torch.autograd.grad(before.square().sum(), net.project.weight)[0].abs().max() > 0


def test_two_halves_have_the_gradient_of_the_whole(net: ContextNet, batches: ContextBatches) -> None:
    rows = [_row(length) for length in LENGTHS]

    def loss(part: list[TokenRow]) -> Part:
        logits = net(batches.features(net, [row.ids for row in part]))
        return Part(
            F.cross_entropy(logits, logits.new_zeros(len(logits)).long(), reduction="sum"), len(logits)
        )

    whole = loss(rows)
    wanted = torch.autograd.grad(whole.loss / whole.tokens, list(net.parameters()))
    with threads(2) as pool:
        mean, _ = mean_gradients(pool, net.parameters(), [partial(loss, half) for half in split(rows)])
        with pytest.raises(ZeroDivisionError):
            mean_gradients(pool, net.parameters(), [partial(loss, rows), lambda: Part(torch.ones(1), 1 // 0)])
    assert mean == pytest.approx(float(whole.loss.detach()) / whole.tokens, rel=1e-5)
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_halves_are_of_like_size_and_parts_of_like_length() -> None:
    rows = [_row(length) for length in LENGTHS]
    first, second = split(rows)
    assert sorted(len(r.ids) for r in first + second) == sorted(LENGTHS)
    assert sum(len(r.ids) for r in second) == sum(LENGTHS) - 300 and len(split(rows[:1])) == 1
    parts = in_order_of_length([_row(1 + n % 50) for n in range(40)])
    assert [len(part) for part in parts] == [16, 16, 8]
    lengths = [len(row.ids) for part in parts for row in part]
    assert lengths == sorted(lengths)


def test_dropout_keeps_its_share_and_the_mean() -> None:
    x = torch.ones(1001, 100)
    found = dropped(x, 0.1, generator(5, "a"))
    assert torch.equal(found, dropped(x, 0.1, generator(5, "a")))
    assert not torch.equal(found, dropped(x, 0.1, generator(5, "b")))
    kept = (256 - 26) / 256
    assert found.unique().tolist() == pytest.approx([0, 1 / kept])
    assert float((found > 0).float().mean()) == pytest.approx(kept, abs=0.003)
    # each of the eight bytes of a drawn word is a fair one, the highest too
    assert (found.flatten()[:100_000].view(-1, 8) > 0).float().mean(0).sub(kept).abs().max() < 0.01
    assert dropped(x, 0.0, generator(5)) is x


def test_threads_leave_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    with threads(2) as pool:
        assert torch.get_num_threads() == 1
        assert list(pool.map(lambda n: (n, torch.get_num_threads()), range(4))) == [(n, 1) for n in range(4)]
    assert torch.get_num_threads() == before
