"""Hopper (sm_90) tiles over NVFP4 pages in Gluon: every lane loads its own matrix fragments.

One warp is one workgroup; nothing but the query passes through shared memory and there is no
barrier between the loads and the products. The m16n8k16 instruction sums over k in any order, so
the order of head_dim (for K) and of the tokens (for V) is the one in which 16 or 8 bytes of a lane
lie in memory; the query and the result are permuted instead:

    K  lane (n = token mod 8, j): words 4 j .. 4 j + 3 of the token = head_dim 32 j .. 32 j + 31
       k = h + 2 j + 8 (p mod 2) + 16 (p div 2) + 32 w     <->   head_dim 32 j + 8 w + p + 4 h
    V  lane (n = g, j): words 2 g, 2 g + 1 of tokens 2 j, 2 j + 1 mod 8 = head_dim 16 g .. 16 g + 15
       n = g + 8 i + 64 w                                   <->   head_dim 16 g + 8 w + i

Values: an E2M1 code moved to the top of a half is the number times 2^-14; times its E4M3 scale it
is a multiple of 2^-24 with at most 6 bits, so it is exact in fp16. Queries are scaled by a power of
two into fp16's range a row (exact for bf16 unless a value is 2^-24 of its row's largest). The
factors 2^14 are undone in fp32. Scale codes 0x7F and 0xFF read as 0. head_dim is 128.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Two E4M3 bytes -> a pair of halves d, NaN codes -> 0; for K each one twice.
_SCALES = """{
.reg .b32 d, m;
cvt.rn.f16x2.e4m3x2 d, %IN;
set.num.u32.f16x2 m, d, d;
and.b32 d, d, m;
"""
K_SCALES = gl.constexpr(
    _SCALES.replace("%IN", "$2") + "prmt.b32 $0, d, d, 0x1010; prmt.b32 $1, d, d, 0x3232;}"
)
_V_SCALES = gl.constexpr(_SCALES.replace("%IN", "$1") + "mov.b32 $0, d;}")

# A byte of x or y holds a code as the top byte of a half, with bits of its neighbours between; the
# masks 0x8E00 clear those. lop3 0xE4: the sign from the first operand, the rest from the second.
# Eight codes of a word -> halves (p, h) = code p + 4 h, times the scale, which $9 holds twice.
K_WORD = gl.constexpr("""{
.reg .b32 x, y, t, u, a, b, c, d;
shr.u32 t, $8, 3;
lop3.b32 x, $8, t, 0x80808080, 0xE4;
shl.b32 u, $8, 4;
shl.b32 t, $8, 1;
lop3.b32 y, u, t, 0x80808080, 0xE4;
shl.b32 a, y, 8;
shl.b32 b, x, 8;
and.b32 a, a, 0x8E008E00;
and.b32 b, b, 0x8E008E00;
and.b32 c, y, 0x8E008E00;
and.b32 d, x, 0x8E008E00;
mul.rn.f16x2 a, a, $9;
mul.rn.f16x2 b, b, $9;
mul.rn.f16x2 c, c, $9;
mul.rn.f16x2 d, d, $9;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
mov.b32 {$4, $5}, c;
mov.b32 {$6, $7}, d;
}""")

# The words of two neighbouring tokens -> for each code i the halves (token 0, token 1), times
# their scales, the pair $18.
_V_WORDS = gl.constexpr("""{
.reg .b32 t, u, xa, ya, xb, yb, r;
shr.u32 t, $16, 3;
lop3.b32 xa, $16, t, 0x80808080, 0xE4;
shl.b32 u, $16, 4;
shl.b32 t, $16, 1;
lop3.b32 ya, u, t, 0x80808080, 0xE4;
shr.u32 t, $17, 3;
lop3.b32 xb, $17, t, 0x80808080, 0xE4;
shl.b32 u, $17, 4;
shl.b32 t, $17, 1;
lop3.b32 yb, u, t, 0x80808080, 0xE4;
prmt.b32 r, ya, yb, 0x4400;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$0, $1}, r;
prmt.b32 r, xa, xb, 0x4400;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$2, $3}, r;
prmt.b32 r, ya, yb, 0x5511;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$4, $5}, r;
prmt.b32 r, xa, xb, 0x5511;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$6, $7}, r;
prmt.b32 r, ya, yb, 0x6622;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$8, $9}, r;
prmt.b32 r, xa, xb, 0x6622;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$10, $11}, r;
prmt.b32 r, ya, yb, 0x7733;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$12, $13}, r;
prmt.b32 r, xa, xb, 0x7733;
and.b32 r, r, 0x8E008E00;
mul.rn.f16x2 r, r, $18;
mov.b32 {$14, $15}, r;
}""")

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
A = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
B = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))
ROWS = gl.constexpr(gl.SliceLayout(1, MMA))
COLUMNS = gl.constexpr(gl.SliceLayout(0, MMA))
Q_LOAD = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0]))
Q_ROWS = gl.constexpr(gl.SliceLayout(1, Q_LOAD))
QUERIES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # of the A operand


@gluon.constexpr_function
def _bits(first: int, last: int, rank: int) -> list[list[int]]:
    """Bases of the bits from `first` on, below `last`, of the first of `rank` dimensions."""
    bases = []
    while first < last:
        bases.append([first] + [0] * (rank - 1))
        first *= 2
    return bases


@gluon.constexpr_function
def k_layout(tile: int, warps: int = 1) -> gl.DistributedLinearLayout:
    """Words of K `[tokens, j 4, w_high 2, w_low 2]`, `tile` tokens a warp."""
    regs = [[0, 0, 0, 1], [0, 0, 1, 0], *_bits(8, tile, 4)]
    lanes = [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    split = _bits(tile, tile * warps, 4)
    return gl.DistributedLinearLayout(regs, lanes, split, [], [tile * warps, 4, 2, 2])


@gluon.constexpr_function
def k_load_layout(tile: int, warps: int = 1) -> gl.DistributedLinearLayout:
    """The same with the four words of a lane as one dimension: `[tokens, j 4, w 4]`."""
    regs = [[0, 0, 1], [0, 0, 2], *_bits(8, tile, 3)]
    lanes = [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    split = _bits(tile, tile * warps, 3)
    return gl.DistributedLinearLayout(regs, lanes, split, [], [tile * warps, 4, 4])


@gluon.constexpr_function
def v_layout(tile: int, warps: int = 1) -> gl.DistributedLinearLayout:
    """Words of V, of every second token: `[tokens / 2, g 8, w 2]`, `tile` tokens a warp."""
    regs = [[0, 0, 1], *_bits(4, tile // 2, 3)]
    lanes = [[1, 0, 0], [2, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    split = _bits(tile // 2, tile * warps // 2, 3)
    return gl.DistributedLinearLayout(regs, lanes, split, [], [tile * warps // 2, 8, 2])


@gluon.jit
def query_rows(q_ptr, row_stride, head_stride, rows, heads, live, scale, LAYOUT: gl.constexpr):
    """fp16 queries `[M, 128]` of M (row, head) pairs in k order, in LAYOUT, and their factors > 0.

    rows, heads, live: `[M]` int64 / int64 / bool in SliceLayout(1, LAYOUT).
    scale: q . k is query . key * factor * sign: |scale| is in the factor, its sign in the query.
    """
    M: gl.constexpr = rows.shape[0]
    d = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))
    offset = (rows * row_stride + heads * head_stride)[:, None] + d[None, :]
    q = gl.load(q_ptr + offset, mask=live[:, None], other=0.0).to(gl.float32)
    top = gl.max(gl.abs(q), 1)
    bits = gl.minimum(top.to(gl.int32, bitcast=True) & 0x7F800000, 0x7E800000)
    bits = gl.maximum(bits, 0x2B800000)  # 2^-40: a factor of 0 would spoil the mask of -inf
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    inverse = gl.where(scale < 0, -inverse, inverse)
    q = (q * inverse[:, None]).to(gl.float16)
    # head_dim bits j1 j0 | w1 w0 | h | p1 p0  ->  k bits w1 w0 p1 p0 j1 j0 h
    q = q.reshape([M, 4, 2, 2, 2, 2, 2]).permute(0, 2, 3, 5, 6, 1, 4).reshape([M, 128])
    return q, bits.to(gl.float32, bitcast=True) * gl.maximum(gl.abs(scale) * 16384.0, 1e-20)


@gluon.jit
def scaled_query(q_ptr, row_stride, head_stride, rows, heads, live, scale, M: gl.constexpr):
    """query_rows as the A operand of one warp, factors in the layout ROWS."""
    q, factor = query_rows(q_ptr, row_stride, head_stride, rows, heads, live, scale, Q_LOAD)
    return gl.convert_layout(q, A), gl.convert_layout(factor, ROWS)


@gluon.jit
def load_k(k_words, k_scales, TILE: gl.constexpr, WARPS: gl.constexpr = 1):
    """Data words and scale bytes of TILE tokens a warp, from their first token on."""
    L: gl.constexpr = k_load_layout(TILE, WARPS)
    L2: gl.constexpr = gl.SliceLayout(2, L)
    t = gl.arange(0, TILE * WARPS, gl.SliceLayout(1, L2))
    j = gl.arange(0, 4, gl.SliceLayout(0, L2))
    w = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at = t[:, None] * 16 + j[None, :] * 4
    words = gl.load(k_words + (at[:, :, None] + w[None, None, :]))  # 16 bytes a lane
    words = words.reshape([TILE * WARPS, 4, 2, 2])
    words = gl.convert_layout(words, k_layout(TILE, WARPS), assert_trivial=True)
    return words, gl.load(k_scales + (t[:, None] * 4 + j[None, :]))


@gluon.jit
def k_values(words, scales, TILE: gl.constexpr, WARPS: gl.constexpr = 1):
    """fp16 K `[128 k, tokens]`, where the lanes that loaded it hold it."""
    L: gl.constexpr = k_layout(TILE, WARPS)
    low, high = gl.inline_asm_elementwise(
        K_SCALES, "=r,=r,h", [scales], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    s = gl.convert_layout(gl.join(low, high), gl.SliceLayout(3, L), assert_trivial=True)
    s = gl.expand_dims(s, 3)
    e = gl.inline_asm_elementwise(
        K_WORD,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [words, s],
        dtype=(gl.float16,) * 8,
        is_pure=True,
        pack=1,
    )
    p0 = gl.join(gl.join(e[0], e[1]), gl.join(e[2], e[3]))  # [t, j, w1, w0, h, p0]
    p1 = gl.join(gl.join(e[4], e[5]), gl.join(e[6], e[7]))
    k = gl.join(p0, p1)  # [t, j, w1, w0, h, p0, p1]
    return k.permute(2, 3, 6, 5, 1, 4, 0).reshape([128, TILE * WARPS])


@gluon.jit
def k_operand(words, scales, TILE: gl.constexpr):
    """k_values of one warp as its B operand."""
    return gl.convert_layout(k_values(words, scales, TILE), B, assert_trivial=True)


@gluon.jit
def load_v(v_words, v_scales, TILE: gl.constexpr, WARPS: gl.constexpr = 1):
    """Data words and scale bytes of the even and of the odd tokens of TILE tokens a warp."""
    L: gl.constexpr = v_layout(TILE, WARPS)
    L2: gl.constexpr = gl.SliceLayout(2, L)
    t = gl.arange(0, TILE * WARPS // 2, gl.SliceLayout(1, L2))
    g = gl.arange(0, 8, gl.SliceLayout(0, L2))
    w = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    at2 = t[:, None] * 32 + g[None, :] * 2
    at = at2[:, :, None] + w[None, None, :]
    at_scale = t[:, None] * 16 + g[None, :]
    even, odd = gl.load(v_words + at), gl.load(v_words + at + 16)
    return even, odd, gl.load(v_scales + at_scale), gl.load(v_scales + at_scale + 8)


@gluon.jit
def v_values(even, odd, s_even, s_odd, TOKENS: gl.constexpr):
    """fp16 V `[TOKENS, 128]`, columns in the permuted order above, where it was loaded."""
    pair = s_even.to(gl.uint16) | (s_odd.to(gl.uint16) << 8)
    s = gl.inline_asm_elementwise(_V_SCALES, "=r,h", [pair], dtype=gl.int32, is_pure=True, pack=1)
    e = gl.inline_asm_elementwise(
        _V_WORDS,
        "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
        [even, odd, gl.expand_dims(s, 2)],
        dtype=(gl.float16,) * 16,
        is_pure=True,
        pack=1,
    )
    i0 = gl.join(gl.join(e[0], e[1]), gl.join(e[2], e[3]))  # [t, g, w, token, i0]
    i1 = gl.join(gl.join(e[4], e[5]), gl.join(e[6], e[7]))
    i2 = gl.join(gl.join(e[8], e[9]), gl.join(e[10], e[11]))
    i3 = gl.join(gl.join(e[12], e[13]), gl.join(e[14], e[15]))
    v = gl.join(gl.join(i0, i1), gl.join(i2, i3))  # [t, g, w, token, i0, i1, i2]
    return v.permute(0, 3, 2, 6, 5, 4, 1).reshape([TOKENS, 128])


@gluon.jit
def v_operand(even, odd, s_even, s_odd, TILE: gl.constexpr):
    """v_values of one warp as its B operand."""
    return gl.convert_layout(v_values(even, odd, s_even, s_odd, TILE), B, assert_trivial=True)
