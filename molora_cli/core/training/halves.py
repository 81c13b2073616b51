"""A training step as two halves of its batch, each on a thread of its own.

The batch is split in the same way whatever the machine, every half draws from a generator of its own, and
what they find is added in their order: two cores halve the time and change no bit of the result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from molora_cli.core.training.router_rows import TokenRow

HALVES = 2
AT_ONCE = 16
_DRAWN = 256  # values of the random byte that decides whether dropout keeps a number


@dataclass
class Part:
    """Of a part of a batch: the sum of its tokens' losses, how many they are, how many are right."""

    loss: Tensor
    tokens: int
    right: int = 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Within, torch uses one core: sums must not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def threads(count: int | None = None) -> Iterator[Executor]:
    """Threads that run torch on one core each, as this thread does within; None: two of them, where torch may
    use two cores."""
    number = min(HALVES, torch.get_num_threads()) if count is None else count
    # the number of threads is kept by each thread for itself
    with one_thread(), ThreadPoolExecutor(number, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        yield pool


def split(rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
    """Rows in halves of about as many tokens, without an empty one. Depends on the rows alone."""
    halves: list[list[TokenRow]] = [[] for _ in range(HALVES)]
    sizes = [0] * HALVES
    for row in sorted(rows, key=lambda r: len(r.ids), reverse=True):
        lighter = sizes.index(min(sizes))
        halves[lighter].append(row)
        sizes[lighter] += len(row.ids)
    return [half for half in halves if half]


def in_order_of_length(rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
    """All rows in parts of like length, `AT_ONCE` at most: what one call works on."""
    ordered = sorted(rows, key=lambda r: len(r.ids))
    return [ordered[first : first + AT_ONCE] for first in range(0, len(ordered), AT_ONCE)]


def generator(*what: object) -> torch.Generator:
    """Random numbers that depend on nothing else than what they are for."""
    return torch.Generator().manual_seed(random.Random(" ".join(map(str, what))).getrandbits(32))


def dropped(x: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """Dropout of about `share` of x (...,), the rest scaled so that the mean stays: one random byte a number,
    an eighth of the draws of torch's own. The share is rounded to 1/256."""
    least = round(share * _DRAWN)
    if least == 0:
        return x
    words = torch.empty(-(-x.numel() // 8), dtype=torch.int64)
    # `to=None` draws all 64 bits; without bounds the sign would always be 0
    words.random_(torch.iinfo(torch.int64).min, None, generator=draws)
    keep = words.view(torch.uint8)[: x.numel()].view(x.shape) >= least
    return x * keep * (_DRAWN / (_DRAWN - least))


def mean_gradients(
    pool: Executor, parameters: Iterable[nn.Parameter], parts: Sequence[Callable[[], Part]]
) -> tuple[float, float]:
    """Sets the parameters' gradients to those of the mean loss over the tokens of all parts.

    Returns that loss and the share of tokens that is right.
    """
    learnt = list(parameters)

    def take(part: Callable[[], Part]) -> tuple[Part, tuple[Tensor, ...]]:
        found = part()
        return Part(found.loss.detach(), found.tokens, found.right), torch.autograd.grad(found.loss, learnt)

    found = list(pool.map(take, parts))
    tokens = max(1, sum(part.tokens for part, _ in found))
    for parameter, *own in zip(learnt, *(gradients for _, gradients in found), strict=True):
        total = own[0]
        for more in own[1:]:
            total = total + more
        parameter.grad = total / tokens
    return sum(float(part.loss) for part, _ in found) / tokens, sum(p.right for p, _ in found) / tokens
