"""Device code of the stable counting sort by slot. One sort per choice j of a token, all in one launch.

    hist     block b counts its tokens per slot                                  counts (J, NB, SP)
    scan     prefix sums: per slot over all tokens, per block within the slot    base (J, NB, SP)
    scatter  token t of block b goes to base[b, slot] + its rank among its block's tokens of that slot

Every shape and grid follows from N alone; no atomics, so the order is the stable one.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def _one_hot(slots, j, tokens, s_sn, s_sj, block, SP: tl.constexpr, BT: tl.constexpr):
    t = block * BT + tl.arange(0, BT)
    slot = tl.load(slots + t.to(tl.int64) * s_sn + j * s_sj, mask=t < tokens, other=-1).to(tl.int32)
    return t, (slot[:, None] == tl.arange(0, SP)[None, :]).to(tl.int32)  # (BT, SP)


@triton.jit
def hist(slots, counts, tokens, s_sn, s_sj, SP: tl.constexpr, BT: tl.constexpr):
    """Grid (NB, J)."""
    b = tl.program_id(0)
    j = tl.program_id(1)
    _, one_hot = _one_hot(slots, j, tokens, s_sn, s_sj, b, SP, BT)
    tl.store(counts + (j * tl.num_programs(0) + b) * SP + tl.arange(0, SP), tl.sum(one_hot, axis=0))


@triton.jit
def scan(counts, base, offsets, tiles, blocks, n_slots, SP: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr):
    """Grid (J,). offsets (J, S+1): where a slot's tokens begin. tiles (J, S): BM-row tiles up to and with
    it."""
    j = tl.program_id(0)
    s = tl.arange(0, SP)
    row = counts + j * blocks * SP + s
    total = tl.zeros([SP], dtype=tl.int32)
    for b0 in range(0, blocks, NB):
        b = b0 + tl.arange(0, NB)
        count = tl.load(row[None, :] + b[:, None] * SP, mask=(b < blocks)[:, None], other=0)
        total += tl.sum(count, axis=0)
    end = tl.cumsum(total, axis=0)
    tl.store(offsets + j * (n_slots + 1) + s, end - total, mask=s < n_slots)
    tl.store(offsets + j * (n_slots + 1) + s + 1, end, mask=s == n_slots - 1)
    tl.store(tiles + j * n_slots + s, tl.cumsum((total + BM - 1) // BM, axis=0), mask=s < n_slots)
    before = end - total
    for b0 in range(0, blocks, NB):
        b = b0 + tl.arange(0, NB)
        inside = (b < blocks)[:, None]
        count = tl.load(row[None, :] + b[:, None] * SP, mask=inside, other=0)
        first = before[None, :] + tl.cumsum(count, axis=0) - count
        tl.store(base + (j * blocks + b[:, None]) * SP + s[None, :], first, mask=inside)
        before += tl.sum(count, axis=0)


@triton.jit
def scatter(slots, base, order, tokens, s_sn, s_sj, SP: tl.constexpr, BT: tl.constexpr):
    """Grid (NB, J). order (J, N)."""
    b = tl.program_id(0)
    j = tl.program_id(1)
    t, one_hot = _one_hot(slots, j, tokens, s_sn, s_sj, b, SP, BT)
    first = tl.load(base + (j * tl.num_programs(0) + b) * SP + tl.arange(0, SP))
    earlier = tl.cumsum(one_hot, axis=0) - one_hot
    place = tl.sum(one_hot * (earlier + first[None, :]), axis=1)
    tl.store(order + j.to(tl.int64) * tokens + place, t, mask=t < tokens)
