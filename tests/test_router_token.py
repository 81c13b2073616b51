"""One token at a time: the compiled networks of routers against their torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from molora_cli.core.router.context_net import ContextNet
from molora_cli.core.router.kinds import State
from molora_cli.core.router.taps import TapHead
from molora_cli.core.router.token_step import TokenStep

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def made(experts: int, width: int, hidden: int, units: int, decays: tuple[float, ...]) -> ContextNet:
    """A network whose experts win in turn."""
    gen = torch.Generator().manual_seed(experts * width + units)
    net = ContextNet(8, experts, projection=width, hidden=hidden, decays=decays, units=units).double()
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=1.5 / max(1, parameter.shape[-1]) ** 0.5, generator=gen)
    return net.requires_grad_(False).eval()


@torch.no_grad()
def twin(net: ContextNet, row: Tensor, cut: bool, state: State) -> tuple[Tensor, Tensor, State]:
    features, after = net.features(row[None, None], None, state)
    logits, spans = net.corrected(features, torch.tensor([[cut]]), None, state)
    return features, logits.log_softmax(-1), {**after, **spans}


@pytest.mark.parametrize("units", [0, 1, 17])
@pytest.mark.parametrize(
    ("experts", "width", "hidden", "decays"),
    [(4, 96, 128, (0.5, 0.8, 0.93, 0.98)), (1, 1, 1, (0.9,)), (7, 13, 5, (0.1, 0.999)), (2, 16, 8, ())],
)
def test_it_is_the_twin(experts: int, width: int, hidden: int, units: int, decays: tuple[float, ...]) -> None:
    if not decays and units:
        pytest.skip("what looks ahead reads an average")
    net = made(experts, width, hidden, units, decays)
    step = TokenStep.of(net)
    assert step is not None and step.ready
    gen = torch.Generator().manual_seed(3)
    state = wanted = net.start(1, torch.float64)
    seen = set()
    for number in range(60):
        row = torch.randn(width, generator=gen) * (number % 7 != 3)
        table = torch.stack([row + 1, row])
        cut = number in (0, 5, 12, 13, 30, 59)
        kept = {name: tensor.clone() for name, tensor in state.items()}
        features, logp, after = step(table, 1, cut, state)
        assert all(torch.equal(state[name], kept[name]) for name in kept)
        exact = twin(net, row.double(), cut, wanted)
        for got, right in zip((features, logp), exact, strict=False):
            assert got.shape == right.shape and torch.allclose(got, right, rtol=0, atol=1e-12)
        assert after.keys() == exact[2].keys()
        for name, right in exact[2].items():
            assert after[name].shape == right.shape, name
            assert torch.allclose(after[name], right, rtol=1e-13, atol=1e-13), name
        state, wanted = after, exact[2]
        seen.add(int(logp.argmax()))
    assert len(seen) > 1 or experts == 1


def test_what_does_not_fit_is_refused() -> None:
    net = made(3, 8, 6, 4, (0.5, 0.9))
    step = TokenStep.of(net)
    assert step is not None
    table = torch.zeros(3, 8)
    for name, tensor in net.start(1, torch.float64).items():
        state = {**net.start(1, torch.float64), name: torch.cat([tensor, tensor], -1)}
        with pytest.raises(RuntimeError, match="of the state"):
            step(table, 0, False, state)
    with pytest.raises(RuntimeError, match="do not fit"):
        step(table[:, :5], 0, False, net.start(1, torch.float64))


def test_only_float64_takes_it() -> None:
    assert TokenStep.of(made(3, 8, 6, 4, (0.5,)).float()) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "experts", "prior", "units"), [(576, 4, 4, 128), (7, 1, 0, 1), (33, 5, 5, 3)]
)
def test_a_head_is_its_twin(dtype: torch.dtype, width: int, experts: int, prior: int, units: int) -> None:
    torch.manual_seed(width)
    head = TapHead(width, experts, prior=prior, hidden=units).double().requires_grad_(False)
    hidden = (3 + 40 * torch.randn(1, 1, width)).to(dtype)
    before = torch.randn(1, 1, prior).double().log_softmax(-1) if prior else None
    assert head.compiled
    got, twin = head.log_probabilities(hidden, before), head(hidden, before).log_softmax(-1)
    assert got.shape == twin.shape and got.dtype == twin.dtype
    assert torch.allclose(got, twin, rtol=0, atol=1e-12)
    # many tokens, wanted gradients and other dtypes go the other way, to the same
    twice = None if before is None else before.repeat(1, 2, 1)
    many = head.log_probabilities(torch.cat([hidden, hidden], 1), twice)
    assert torch.allclose(many[:, 1:], got, rtol=0, atol=1e-12)
    assert torch.allclose(head.log_probabilities(hidden.double(), before), got, rtol=0, atol=1e-12)
    head.requires_grad_(True)
    assert head.log_probabilities(hidden, before).requires_grad


def test_a_head_of_other_sizes_is_refused() -> None:
    head = TapHead(8, 3, prior=3).double().requires_grad_(False)
    with pytest.raises(RuntimeError, match="do not fit the head"):
        head.log_probabilities(torch.zeros(1, 1, 8), None)
