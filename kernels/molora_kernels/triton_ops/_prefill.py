"""Device code for many tokens, sorted by slot: a tile of BM rows has one adapter, so `tl.dot` applies.

The grid has cdiv(N, BM) + S tiles, as many as can be needed however the routes fall; those left over end at
once. UPCAST is for the interpreter alone: its `tl.dot` multiplies the bit patterns of bf16.
"""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def _locate(offsets, tiles, order, j, tile, tokens, n_slots, SP: tl.constexpr, BM: tl.constexpr):
    """Of a tile: its slot (n_slots where it is a left-over), its rows' place in the sort, which are inside,
    and the tokens there."""
    s = tl.arange(0, SP)
    upto = tl.load(tiles + j * n_slots + s, mask=s < n_slots, other=2147483647)
    slot = tl.sum((upto <= tile).to(tl.int32), axis=0)
    earlier = tl.max(tl.where(s < slot, upto, 0), axis=0)
    used = slot < n_slots
    begin = tl.load(offsets + j * (n_slots + 1) + slot, mask=used, other=0)
    end = tl.load(offsets + j * (n_slots + 1) + slot + 1, mask=used, other=0)
    place = begin + (tile - earlier) * BM + tl.arange(0, BM)
    inside = place < end
    token = tl.load(order + j.to(tl.int64) * tokens + place, mask=inside, other=0).to(tl.int64)
    return slot, place, inside, token


@triton.jit
def shrink_sorted(
    x, A, extent, scale, order, offsets, tiles, hidden,
    tokens, inputs, n_slots, width, s_xn, s_ar,
    SP: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    (
        """hidden[j, place, :rank] = scale * (A_slot x_token), (J, N, width).

    Grid (max_tiles, J, cdiv(width, BR)).
    """
        ""
    )
    j = tl.program_id(1)
    slot, place, inside, token = _locate(offsets, tiles, order, j, tl.program_id(0), tokens, n_slots, SP, BM)
    c = tl.program_id(2) * BR
    rank = tl.load(extent + 2 * slot + 1, mask=(slot > 0) & (slot < n_slots), other=0)
    if c < rank:
        first = tl.load(extent + 2 * slot)
        r = c + tl.arange(0, BR)
        rows = A + (first + r).to(tl.int64)[None, :] * s_ar
        acc = tl.zeros([BM, BR], dtype=tl.float32)
        for k in range(0, inputs, BK):
            h = k + tl.arange(0, BK)
            xv = tl.load(
                x + token[:, None] * s_xn + h[None, :],
                mask=inside[:, None] & (h < inputs)[None, :],
                other=0.0,
            ).to(A.dtype.element_ty)
            av = tl.load(rows + h[:, None], mask=(r < rank)[None, :] & (h < inputs)[:, None], other=0.0)
            if UPCAST:
                xv = xv.to(tl.float32)
                av = av.to(tl.float32)
            acc = tl.dot(xv, av, acc, input_precision="ieee")
        acc *= tl.load(scale + slot)
        row = (j.to(tl.int64) * tokens + place.to(tl.int64))[:, None] * width
        mask = inside[:, None] & (r < rank)[None, :]
        tl.store(hidden + row + r[None, :], acc.to(hidden.dtype.element_ty), mask=mask)


# j = 1 would otherwise become a constant of Python, without a dtype
@triton.jit(do_not_specialize=["j"])
def expand_sorted(
    hidden, y, bias, B, extent, weights, out_scale, out_bias, order, offsets, tiles, out,
    j, tokens, outputs, n_slots, width, s_yn, s_bo, s_br, s_gn, s_gj, s_ms, s_cs, s_on,
    FIRST: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SLOT_BIAS: tl.constexpr,
    SP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out_n += g_nj ((m - 1) * (y_n - bias) + m * (B_slot hidden_nj) + c_slot).

    Grid (max_tiles, cdiv(outputs, BN)). One launch per choice j, in which each token occurs once: no atomics.
    FIRST starts from y and writes every token, base-only ones too (unchanged); the other launches pass over
    tiles of slot 0.
    """
    slot, place, inside, token = _locate(offsets, tiles, order, j, tl.program_id(0), tokens, n_slots, SP, BM)
    o = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = inside[:, None] & (o < outputs)[None, :]
    if FIRST:
        wanted = slot < n_slots
    else:
        wanted = (slot > 0) & (slot < n_slots)
    if wanted:
        source = out + token[:, None] * s_on + o[None, :]
        base = y + token[:, None] * s_yn + o[None, :]
        delta = tl.zeros([BM, BN], dtype=tl.float32)
        if slot > 0:
            first = tl.load(extent + 2 * slot)
            rank = tl.load(extent + 2 * slot + 1).to(tl.int32)
            row = hidden + (j.to(tl.int64) * tokens + place.to(tl.int64))[:, None] * width
            for c in range(0, rank, BR):
                r = c + tl.arange(0, BR)
                hv = tl.load(row + r[None, :], mask=inside[:, None] & (r < rank)[None, :], other=0.0)
                bv = tl.load(
                    B + (first + r).to(tl.int64)[:, None] * s_br + o.to(tl.int64)[None, :] * s_bo,
                    mask=(r < rank)[:, None] & (o < outputs)[None, :],
                    other=0.0,
                )
                if UPCAST:
                    hv = hv.to(tl.float32)
                    bv = bv.to(tl.float32)
                delta = tl.dot(hv, bv, delta, input_precision="ieee")
            if HAS_SCALE:
                plain = tl.load(base, mask=mask, other=0.0).to(tl.float32)
                if HAS_BIAS:
                    plain -= tl.load(bias + o, mask=o < outputs, other=0.0).to(tl.float32)[None, :]
                m = tl.load(out_scale + slot * s_ms + o, mask=o < outputs, other=1.0).to(tl.float32)[None, :]
                delta = delta * m + plain * (m - 1.0)
            if HAS_SLOT_BIAS:
                constant = tl.load(out_bias + slot * s_cs + o, mask=o < outputs, other=0.0)
                delta += constant.to(tl.float32)[None, :]
            gate = tl.load(weights + token * s_gn + j * s_gj, mask=inside, other=0.0).to(tl.float32)
            delta *= gate[:, None]
        # read late: two tiles of fp32 at once would not fit into the registers
        if FIRST:
            total = tl.load(base, mask=mask, other=0.0)
        else:
            total = tl.load(source, mask=mask, other=0.0)
        tl.store(source, (total.to(tl.float32) + delta).to(out.dtype.element_ty), mask=mask)
