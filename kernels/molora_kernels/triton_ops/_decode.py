"""Device code for few tokens: one program per token and tile of outputs, memory-bound, no tensor cores."""

# mypy: disallow-untyped-defs=False

import triton
import triton.language as tl


@triton.jit
def _project(x, A, first, rank, c, inputs, s_ar, BR: tl.constexpr, BK: tl.constexpr):
    """(BR,) fp32: rows first+c .. of A times one token x; zero from `rank` on."""
    r = c + tl.arange(0, BR)
    rows = A + (first + r).to(tl.int64)[:, None] * s_ar
    part = tl.zeros([BR, BK], dtype=tl.float32)
    for k in range(0, inputs, BK):
        h = k + tl.arange(0, BK)
        xv = tl.load(x + h, mask=h < inputs, other=0.0).to(tl.float32)
        inside = (r < rank)[:, None] & (h < inputs)[None, :]
        part += tl.load(rows + h[None, :], mask=inside, other=0.0).to(tl.float32) * xv[None, :]
    return tl.sum(part, axis=1)


@triton.jit
def shrink_rows(
    x, A, extent, scale, slots, z,
    inputs, max_rank, s_xn, s_ar, s_sn, s_sj,
    TOPK: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """z[n, j, :rank] = scale * (A_slot x_n), (N, TOPK, max_rank) fp32. Grid (N * TOPK, cdiv(max_rank, BR)).

    Entries of z at and after the rank stay unwritten; the reader stops there too.
    """
    pair = tl.program_id(0).to(tl.int64)
    n = pair // TOPK
    c = tl.program_id(1) * BR
    slot = tl.load(slots + n * s_sn + (pair % TOPK) * s_sj)
    if slot > 0:
        first = tl.load(extent + 2 * slot)
        rank = tl.load(extent + 2 * slot + 1).to(tl.int32)
        if c < rank:
            hidden = _project(x + n * s_xn, A, first, rank, c, inputs, s_ar, BR, BK)
            r = c + tl.arange(0, BR)
            tl.store(z + pair * max_rank + r, hidden * tl.load(scale + slot), mask=r < rank)


@triton.jit
def linear_rows(
    x, W, bias, y, A, B, extent, scale, slots, weights, z, out_scale, out_bias, out,
    inputs, outputs, max_rank,
    s_xn, s_wo, s_yn, s_ar, s_bo, s_br, s_sn, s_sj, s_gn, s_gj, s_ms, s_cs, s_on,
    TOPK: tl.constexpr, HAS_W: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_Z: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_SLOT_BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """out_n = base_n + sum_j g_nj ((m - 1) * (base_n - bias) + m * (B_j z_nj) + c_j).

    Grid (N, cdiv(outputs, BN)); tokens are the fast axis, for they share a tile of W.
    HAS_W: base = W x + bias is made here, else read from y. HAS_Z: z comes from `shrink_rows`, else it is
    recomputed by each tile (A is in L2; a launch saved).
    The base's sum does not depend on the adapters, so a base-only token has the bits of a run without any.
    """
    n = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BN
    o = tl.arange(0, BN)
    inside = tile + o < outputs
    if HAS_BIAS:
        constant = tl.load(bias + tile + o, mask=inside, other=0.0).to(tl.float32)
    else:
        constant = tl.zeros([BN], dtype=tl.float32)
    if HAS_W:
        rows = W + tile.to(tl.int64) * s_wo
        part = tl.zeros([BN, BK], dtype=tl.float32)
        for k in range(0, inputs, BK):
            h = k + tl.arange(0, BK)
            xv = tl.load(x + n * s_xn + h, mask=h < inputs, other=0.0).to(tl.float32)
            wv = tl.load(
                rows + o[:, None] * s_wo + h[None, :],
                mask=inside[:, None] & (h < inputs)[None, :],
                other=0.0,
            )
            part += wv.to(tl.float32) * xv[None, :]
        plain = tl.sum(part, axis=1)
        total = plain + constant
    else:
        total = tl.load(y + n * s_yn + tile + o, mask=inside, other=0.0).to(tl.float32)
        plain = total - constant
    for j in tl.static_range(TOPK):
        slot = tl.load(slots + n * s_sn + j * s_sj)
        if slot > 0:
            first = tl.load(extent + 2 * slot)
            rank = tl.load(extent + 2 * slot + 1).to(tl.int32)
            low = tl.zeros([BN], dtype=tl.float32)
            for c in range(0, rank, BR):
                r = c + tl.arange(0, BR)
                if HAS_Z:
                    hidden = tl.load(z + (n * TOPK + j) * max_rank + r, mask=r < rank, other=0.0)
                else:
                    hidden = _project(x + n * s_xn, A, first, rank, c, inputs, s_ar, BR, BK)
                    hidden *= tl.load(scale + slot)
                columns = B + (first + r).to(tl.int64)[None, :] * s_br
                bv = tl.load(
                    columns + (tile + o).to(tl.int64)[:, None] * s_bo,
                    mask=inside[:, None] & (r < rank)[None, :],
                    other=0.0,
                )
                low += tl.sum(bv.to(tl.float32) * hidden[None, :], axis=1)
            if HAS_SCALE:
                m = tl.load(out_scale + slot * s_ms + tile + o, mask=inside, other=1.0).to(tl.float32)
                low = low * m + plain * (m - 1.0)
            if HAS_SLOT_BIAS:
                low += tl.load(out_bias + slot * s_cs + tile + o, mask=inside, other=0.0).to(tl.float32)
            total += low * tl.load(weights + n * s_gn + j * s_gj).to(tl.float32)
    tl.store(out + n * s_on + tile + o, total.to(out.dtype.element_ty), mask=inside)
