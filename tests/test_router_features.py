"""Context features: right by definition, for any chunking and any padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from molora_cli.core.router.features import (
    DECAYS,
    causal_averages,
    centre_and_scale,
    context_features,
    start_averages,
)


def by_definition(e: Tensor, mask: Tensor) -> Tensor:
    """(B, T, D, p): one token after the other."""
    out = e.new_zeros(*e.shape[:2], len(DECAYS), e.shape[2])
    for b in range(e.shape[0]):
        for d, decay in enumerate(DECAYS):
            total, weight = e.new_zeros(e.shape[2]), 0.0
            for t in range(e.shape[1]):
                if mask[b, t]:
                    total, weight = total * decay + e[b, t], weight * decay + 1
                    out[b, t, d] = total / weight
    return out


def noise(batch: int, length: int, width: int = 5) -> Tensor:
    return torch.randn(
        batch, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(length)
    )


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 100])
@pytest.mark.parametrize("chunk", [1, 7, 32, 256])
def test_equals_definition(length: int, chunk: int) -> None:
    e = noise(2, length)
    found, _ = causal_averages(e, None, start_averages(2, 5), chunk=chunk)
    torch.testing.assert_close(
        found, by_definition(e, torch.ones(2, length, dtype=torch.bool)), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("side", ["left", "right", "holes", "none_real"])
def test_padding_never_enters(side: str) -> None:
    e, mask = noise(3, 70), torch.ones(3, 70, dtype=torch.bool)
    if side == "left":
        mask[0, :11] = mask[1, :69] = False
    elif side == "right":
        mask[0, 50:] = mask[1, 1:] = False
    elif side == "holes":
        mask = torch.rand(3, 70, generator=torch.Generator().manual_seed(1)) > 0.5
    else:
        mask[1] = False
    poisoned = torch.where(mask.unsqueeze(-1), e, torch.nan)
    found, state = causal_averages(poisoned, mask, start_averages(3, 5))
    torch.testing.assert_close(found[mask], by_definition(e, mask)[mask], rtol=0, atol=1e-12)
    assert found.isfinite().all()
    for row in range(3):  # the state is that of the row's real tokens alone
        alone = e[row : row + 1, mask[row]]
        _, expected = causal_averages(alone, None, start_averages(1, 5))
        torch.testing.assert_close(state["sums"][row], expected["sums"][0], rtol=0, atol=1e-12)
        torch.testing.assert_close(state["weights"][row], expected["weights"][0], rtol=0, atol=1e-12)


def test_blocks_carry_the_state() -> None:
    e, mask = noise(2, 90), torch.ones(2, 90, dtype=torch.bool)
    mask[0, :40] = False
    whole, after = causal_averages(e, mask, start_averages(2, 5))
    state, parts = start_averages(2, 5), []
    for first, end in [(0, 1), (1, 37), (37, 38), (38, 90)]:
        before = {name: tensor.clone() for name, tensor in state.items()}
        part, new = causal_averages(e[:, first:end], mask[:, first:end], state)
        assert all(torch.equal(state[name], before[name]) for name in state), "the state was changed in place"
        state, parts = new, [*parts, part]
    torch.testing.assert_close(torch.cat(parts, 1)[mask], whole[mask], rtol=0, atol=1e-12)
    torch.testing.assert_close(state["sums"], after["sums"], rtol=0, atol=1e-12)


def test_differentiable_in_float32() -> None:
    e = noise(2, 40).float().requires_grad_()
    found, _ = causal_averages(e, None, start_averages(2, 5, dtype=torch.float32), chunk=16)
    assert found.dtype == torch.float32
    found[:, 20].sum().backward()
    assert e.grad is not None
    assert (e.grad[:, :21] != 0).all() and (e.grad[:, 21:] == 0).all(), "the averages must be causal"


def test_features_are_layer_normed_parts() -> None:
    e = noise(1, 3)
    features = context_features(e, causal_averages(e, None, start_averages(1, 5))[0])
    assert features.shape == (1, 3, 25)
    parts = features.view(1, 3, 5, 5)
    torch.testing.assert_close(parts.mean(-1), torch.zeros(1, 3, 5, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(parts[0, 0, 0], parts[0, 0, 1])  # the first token is its own average


def test_centre_and_scale() -> None:
    table = (noise(1, 9000, 6)[0] * 3 + 2).float()
    mean, scale = centre_and_scale(table)
    torch.testing.assert_close(mean, table.double().mean(0), rtol=0, atol=1e-9)
    assert scale == pytest.approx(float((table.double() - mean).std(correction=0)), rel=1e-3)
    assert centre_and_scale(torch.ones(4, 2))[1] == 1.0
