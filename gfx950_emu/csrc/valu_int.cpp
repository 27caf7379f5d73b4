// Vector integer instructions of 32 and 64 bits.
#include "lanes.h"

namespace emu {
namespace {

const char* D1 = "db32 sb32";
const char* D2 = "db32 sb32 sb32";
const char* D3 = "db32 sb32 sb32 sb32";

u32 bfrev(u32 x) {
  x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
  x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
  x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(x);
}
i32 i24(u32 x) { return (i32)(x << 8) >> 8; }
u32 byte_perm(u32 s0, u32 s1, u32 sel) {
  u64 data = (u64)s0 << 32 | s1;
  if (sel >= 13) return 0xff;
  if (sel == 12) return 0;
  if (sel >= 8) return (data >> (16 * (sel - 8) + 15) & 1) ? 0xff : 0;
  return data >> (8 * sel) & 0xff;
}
u32 perm(u32 a, u32 b, u32 sel) {
  u32 r = 0;
  for (int k = 0; k < 4; k++) r |= byte_perm(a, b, sel >> (8 * k) & 0xff) << (8 * k);
  return r;
}
u32 bfe_u(u32 a, u32 off, u32 n) {
  off &= 31, n &= 31;
  return a >> off & ((1u << n) - 1);
}
u32 bfe_i(u32 a, u32 off, u32 n) {
  off &= 31, n &= 31;
  if (!n) return 0;
  u32 x = (u32)((i32)a >> off) & ((1u << n) - 1);
  return (x >> (n - 1) & 1) ? x | ~((1u << n) - 1) : x;
}
u32 sad8(u32 a, u32 b, u32 acc, bool masked = false) {
  for (int k = 0; k < 4; k++) {
    int x = a >> (8 * k) & 0xff, y = b >> (8 * k) & 0xff;
    if (!masked || y) acc += x > y ? x - y : y - x;
  }
  return acc;
}
u32 lerp8(u32 a, u32 b, u32 c) {
  u32 r = 0;
  for (int k = 0; k < 4; k++)
    r |= (((a >> (8 * k) & 0xff) + (b >> (8 * k) & 0xff) + (c >> (8 * k) & 1)) >> 1) << (8 * k);
  return r;
}
i32 min_i(i32 a, i32 b) { return a < b ? a : b; }
i32 max_i(i32 a, i32 b) { return a > b ? a : b; }
u32 min_u(u32 a, u32 b) { return a < b ? a : b; }
u32 max_u(u32 a, u32 b) { return a > b ? a : b; }
u32 sat_i(i64 x) { return x > INT32_MAX ? INT32_MAX : x < INT32_MIN ? INT32_MIN : (u32)x; }
u32 sat_u(i64 x) { return x > UINT32_MAX ? UINT32_MAX : x < 0 ? 0 : (u32)x; }
#define CLAMPED (i.flags & F_CLAMP)

OP_U1(v_mov_b32, D1, a)
OP_U1(v_not_b32, D1, ~a)
OP_U1(v_bfrev_b32, D1, bfrev(a))
OP_U1(v_ffbh_u32, D1, a ? __builtin_clz(a) : ~0u)
OP_U1(v_ffbl_b32, D1, a ? __builtin_ctz(a) : ~0u)
OP_U1(v_ffbh_i32, D1, (a == 0 || a == ~0u) ? ~0u : __builtin_clz((i32)a < 0 ? ~a : a))
OP_U1(v_prng_b32, D1, a << 1 ^ (a >> 31 ? 197u : 0u))
OP_U1(v_accvgpr_read_b32, D1, a)
OP_U1(v_accvgpr_write_b32, D1, a)
OP_U1(v_accvgpr_mov_b32, D1, a)

OP_U2(v_and_b32, D2, a & b)
OP_U2(v_or_b32, D2, a | b)
OP_U2(v_xor_b32, D2, a ^ b)
OP_U2(v_xnor_b32, D2, ~(a ^ b))
OP_U2(v_lshrrev_b32, D2, b >> (a & 31))
OP_U2(v_ashrrev_i32, D2, (u32)((i32)b >> (a & 31)))
OP_U2(v_lshlrev_b32, D2, b << (a & 31))
OP_U2(v_add_u32, D2, CLAMPED ? sat_u((i64)a + b) : a + b)
OP_U2(v_sub_u32, D2, CLAMPED ? sat_u((i64)a - b) : a - b)
OP_U2(v_subrev_u32, D2, CLAMPED ? sat_u((i64)b - a) : b - a)
OP_U2(v_add_i32, D2, CLAMPED ? sat_i((i64)(i32)a + (i32)b) : a + b)
OP_U2(v_sub_i32, D2, CLAMPED ? sat_i((i64)(i32)a - (i32)b) : a - b)
OP_U2(v_min_i32, D2, (u32)min_i((i32)a, (i32)b))
OP_U2(v_max_i32, D2, (u32)max_i((i32)a, (i32)b))
OP_U2(v_min_u32, D2, min_u(a, b))
OP_U2(v_max_u32, D2, max_u(a, b))
OP_U2(v_mul_i32_i24, D2, (u32)((i64)i24(a) * i24(b)))
OP_U2(v_mul_hi_i32_i24, D2, (u32)((i64)i24(a) * i24(b) >> 32))
OP_U2(v_mul_u32_u24, D2, (a & 0xffffff) * (b & 0xffffff))
OP_U2(v_mul_hi_u32_u24, D2, (u32)((u64)(a & 0xffffff) * (b & 0xffffff) >> 32))
OP_U2(v_mul_lo_u32, D2, a * b)
OP_U2(v_mul_hi_u32, D2, (u32)((u64)a * b >> 32))
OP_U2(v_mul_hi_i32, D2, (u32)((i64)(i32)a * (i32)b >> 32))
OP_U2(v_bfm_b32, D2, ((1u << (a & 31)) - 1) << (b & 31))
OP_U2(v_bcnt_u32_b32, D2, __builtin_popcount(a) + b)
OP_U2(v_cvt_pk_u16_u32, D2, min_u(a, 0xffff) | min_u(b, 0xffff) << 16)
OP_U2(v_cvt_pk_i16_i32, D2,
      (max_i(min_i((i32)a, 32767), -32768) & 0xffff) |
          (u32)max_i(min_i((i32)b, 32767), -32768) << 16)

OP_U3(v_bfe_u32, D3, bfe_u(a, b, c))
OP_U3(v_bfe_i32, D3, bfe_i(a, b, c))
OP_U3(v_bfi_b32, D3, (a & b) | (~a & c))
OP_U3(v_alignbit_b32, D3, (u32)(join(b, a) >> (c & 31)))
OP_U3(v_alignbyte_b32, D3, (u32)(join(b, a) >> (8 * (c & 3))))
OP_U3(v_min3_i32, D3, (u32)min_i(min_i((i32)a, (i32)b), (i32)c))
OP_U3(v_max3_i32, D3, (u32)max_i(max_i((i32)a, (i32)b), (i32)c))
OP_U3(v_min3_u32, D3, min_u(min_u(a, b), c))
OP_U3(v_max3_u32, D3, max_u(max_u(a, b), c))
OP_U3(v_med3_i32, D3,
      (u32)max_i(min_i((i32)a, (i32)b), min_i(max_i((i32)a, (i32)b), (i32)c)))
OP_U3(v_med3_u32, D3, max_u(min_u(a, b), min_u(max_u(a, b), c)))
OP_U3(v_mad_i32_i24, D3,
      CLAMPED ? sat_i((i64)i24(a) * i24(b) + (i32)c) : (u32)((i64)i24(a) * i24(b) + (i32)c))
OP_U3(v_mad_u32_u24, D3,
      CLAMPED ? sat_u((i64)((u64)(a & 0xffffff) * (b & 0xffffff) + c))
              : (a & 0xffffff) * (b & 0xffffff) + c)
OP_U3(v_xad_u32, D3, (a ^ b) + c)
OP_U3(v_lshl_add_u32, D3, (a << (b & 31)) + c)
OP_U3(v_add_lshl_u32, D3, (a + b) << (c & 31))
OP_U3(v_add3_u32, D3, a + b + c)
OP_U3(v_lshl_or_b32, D3, (a << (b & 31)) | c)
OP_U3(v_and_or_b32, D3, (a & b) | c)
OP_U3(v_or3_b32, D3, a | b | c)
OP_U3(v_perm_b32, D3, perm(a, b, c))
OP_U3(v_sad_u8, D3, sad8(a, b, c))
OP_U3(v_msad_u8, D3, sad8(a, b, c, true))
OP_U3(v_sad_hi_u8, D3, (sad8(a, b, 0) << 16) + c)
OP_U3(v_sad_u16, D3,
      c + (u32)std::abs((i32)(a & 0xffff) - (i32)(b & 0xffff)) +
          (u32)std::abs((i32)(a >> 16) - (i32)(b >> 16)))
OP_U3(v_sad_u32, D3, (a > b ? a - b : b - a) + c)
OP_U3(v_lerp_u8, D3, lerp8(a, b, c))

void h_bitop3_b32(Wave& w, const Inst& i) {
  u32 t = i.imm;
  auto m = [&](int k) { return (t >> k & 1) ? ~0u : 0u; };
  u32 k[8];
  for (int n = 0; n < 8; n++) k[n] = m(n);
  lanes3(w, i, [&](u32 a, u32 b, u32 c) -> u32 {
    u32 lo = (~b & ((~c & k[0]) | (c & k[1]))) | (b & ((~c & k[2]) | (c & k[3])));
    u32 hi = (~b & ((~c & k[4]) | (c & k[5]))) | (b & ((~c & k[6]) | (c & k[7])));
    return (~a & lo) | (a & hi);
  });
}
Reg r_bitop3_b32("v_bitop3_b32", FAM_VALU, D3, h_bitop3_b32);
void h_bitop3_b16(Wave& w, const Inst& i) {
  u32 t = i.imm;
  auto bits_of = [&](u32 a, u32 b, u32 c) -> u32 {
    u32 r = 0;
    for (int n = 0; n < 8; n++)
      if (t >> n & 1) r |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
    return r;
  };
  lanesi16(w, i, 3, bits_of, true);
}
Reg r_bitop3_b16("v_bitop3_b16", FAM_VALU, "db16 sb16 sb16 sb16", h_bitop3_b16);

// A dword of a 64-bit result that depends on the same dword of its sources alone, as compilers know:
// they leave the other dwords undefined when only this one is used.
enum Alone { LOW = 1, HIGH = 2 };
template <int Which, Handler F>
void by_dword(Wave& w, const Inst& i) {
  u64 all = undef_sources(w, i), part[2] = {0, 0};
  for (const Operand& o : i.src)
    for (int k = 0; k < 2; k++) {
      int reg = o.reg + (o.width == 2 ? k : 0);
      if (o.kind == K_VGPR) part[k] |= w.undef[reg];
      if (o.kind == K_SGPR && w.sundef[reg]) part[k] = ~0ull;
    }
  F(w, i);
  spread_undef(w, i, all);
  for (int k = 0; k < 2; k++) {
    u64& u = w.undef[i.dst[0].reg + k];
    if (Which >> k & 1) u = (u & ~w.wmask) | (part[k] & w.wmask);
  }
}
#define OP_DWORDS(N, FORM, COUNT, WHICH, E)                                                   \
  static void h_##N(Wave& w, const Inst& i) {                                                 \
    lanes64(w, i, COUNT, [&]([[maybe_unused]] u64 a, [[maybe_unused]] u64 b,                  \
                             [[maybe_unused]] u64 c) -> u64 { return E; });                   \
  }                                                                                           \
  static Reg r_##N(#N, FAM_VALU, FORM, by_dword<WHICH, h_##N>, P_CUSTOM);

OP_DWORDS(v_mov_b64, "db64 sb64", 1, LOW | HIGH, a)
OP_DWORDS(v_lshlrev_b64, "db64 sb32 sb64", 2, LOW, b << (a & 63))
OP_DWORDS(v_lshrrev_b64, "db64 sb32 sb64", 2, HIGH, b >> (a & 63))
OP_DWORDS(v_ashrrev_i64, "db64 sb32 sb64", 2, HIGH, (u64)((i64)b >> (a & 63)))
OP_DWORDS(v_lshl_add_u64, "db64 sb64 sb32 sb64", 3, LOW, (a << (b & 7)) + c)

// Carries: a mask in an SGPR pair. `in` adds the carry of another one.
template <class F>
void carry_op(Wave& w, const Inst& i, bool in, F f) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  u64 cin = in ? read_scalar64(w, i.src[2]) : 0, cout = 0;
  for (int l = 0; l < kLanes; l++) {
    i64 r = f((i64)a[l], (i64)b[l], (i64)(cin >> l & 1));
    out.x[l] = (u32)r;
    cout |= (u64)(r < 0 || r > (i64)0xffffffff) << l;
  }
  if (i.flags & F_CLAMP)
    for (int l = 0; l < kLanes; l++)
      if (cout >> l & 1) out.x[l] = f(1, 0, 0) == 1 && f(0, 1, 0) == 1 ? ~0u : 0;
  commit(w, i, out.x);
  write_scalar64(w, i.dst[1].reg, cout & w.wmask);
}
#define OP_CARRY(N, IN, E)                                                            \
  void h_##N(Wave& w, const Inst& i) {                                                \
    carry_op(w, i, IN, [](i64 a, i64 b, [[maybe_unused]] i64 c) -> i64 { return E; }); \
  }                                                                                   \
  Reg r_##N(#N, FAM_VALU, IN ? "db32 m sb32 sb32 k" : "db32 m sb32 sb32", h_##N);
OP_CARRY(v_add_co_u32, false, a + b)
OP_CARRY(v_sub_co_u32, false, a - b)
OP_CARRY(v_subrev_co_u32, false, b - a)
OP_CARRY(v_addc_co_u32, true, a + b + c)
OP_CARRY(v_subb_co_u32, true, a - b - c)
OP_CARRY(v_subbrev_co_u32, true, b - a - c)

template <bool Signed>
void mad64(Wave& w, const Inst& i) {
  Lanes t[4], lo, hi;
  const u32 *a = fetch(w, i, 0, t[0]), *b = fetch(w, i, 1, t[1]);
  const u32 *c = fetch(w, i, 2, t[2]), *d = fetch(w, i, 2, t[3], 1);
  u64 carry = 0;
  for (int l = 0; l < kLanes; l++) {
    u64 add = join(c[l], d[l]), r;
    if (Signed) {
      i64 p = (i64)(i32)a[l] * (i32)b[l], s;
      bool over = __builtin_add_overflow(p, (i64)add, &s);
      carry |= (u64)(over != (s < 0)) << l;  // bit 64 of the sum
      r = (u64)s;
    } else {
      carry |= (u64)__builtin_add_overflow((u64)a[l] * b[l], add, &r) << l;
    }
    lo.x[l] = (u32)r, hi.x[l] = (u32)(r >> 32);
  }
  // The lower half does not depend on the upper half of the addend: compilers that want 32 bits
  // leave that undefined.
  auto undef = [&](int k, int half) -> u64 {
    const Operand& o = i.src[k];
    if (o.kind == K_VGPR) return w.undef[o.reg + half];
    return sgpr_undef(w, o) ? ~0ull : 0;
  };
  u64 ul = undef(0, 0) | undef(1, 0) | undef(2, 0), uh = ul | undef(2, 1);
  put(w, i.dst[0].reg, lo.x);
  put(w, i.dst[0].reg + 1, hi.x);
  write_scalar64(w, i.dst[1].reg, carry & w.wmask);
  for (int k = 0; k < 2; k++) {
    u64& d = w.undef[i.dst[0].reg + k];
    d = (d & ~w.wmask) | ((k ? uh : ul) & w.wmask);
    w.sundef[i.dst[1].reg + k] = (u32)((uh & w.wmask) >> 32 * k);
  }
}
Reg r_mad_u64("v_mad_u64_u32", FAM_VALU, "db64 m sb32 sb32 sb64", mad64<false>, P_CUSTOM);
Reg r_mad_i64("v_mad_i64_i32", FAM_VALU, "db64 m sb32 sb32 sb64", mad64<true>, P_CUSTOM);

void h_cndmask(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  u64 mask = read_scalar64(w, i.src[2]);
  for (int l = 0; l < kLanes; l++) {
    u32 m = 0u - (u32)(mask >> l & 1);
    out.x[l] = (b[l] & m) | (a[l] & ~m);
  }
  auto undef = [&](int k) -> u64 {
    const Operand& o = i.src[k];
    if (o.kind == K_VGPR) {
      u64 u = w.undef[o.reg];
      return u && k == 0 && (i.flags & F_DPP) ? dpp_undef(w, i, u) : u;
    }
    return sgpr_undef(w, o) ? ~0ull : 0;
  };
  const Operand& k = i.src[2];
  u64 mu = k.kind == K_SGPR ? join(w.sundef[k.reg], w.sundef[k.reg + 1]) : 0;
  u64 u = (mask & undef(1)) | (~mask & undef(0)) | mu;
  commit(w, i, out.x);
  u64& d = w.undef[i.dst[0].reg];
  d = (d & ~w.wmask) | (u & w.wmask);
}
Reg r_cndmask("v_cndmask_b32", FAM_VALU, "df32 sf32 sf32 k", h_cndmask, P_CUSTOM);

u32 ashr_pk(u32 a, u32 b, u32 c, i32 low, i32 high) {
  i32 x = (i32)a >> (c & 31), y = (i32)b >> (c & 31);
  return (max_i(min_i(x, high), low) & 0xff) | (max_i(min_i(y, high), low) & 0xff) << 8;
}
void h_ashr_pk_i8(Wave& w, const Inst& i) {
  Lanes t[3], out;
  const u32 *a = fetch(w, i, 0, t[0]), *b = fetch(w, i, 1, t[1]), *c = fetch(w, i, 2, t[2]);
  for (int l = 0; l < kLanes; l++) out.x[l] = ashr_pk(a[l], b[l], c[l], -128, 127);
  commit16(w, i, out.x, true);
}
void h_ashr_pk_u8(Wave& w, const Inst& i) {
  Lanes t[3], out;
  const u32 *a = fetch(w, i, 0, t[0]), *b = fetch(w, i, 1, t[1]), *c = fetch(w, i, 2, t[2]);
  for (int l = 0; l < kLanes; l++) out.x[l] = ashr_pk(a[l], b[l], c[l], 0, 255);
  commit16(w, i, out.x, true);
}
Reg r_ashr_i8("v_ashr_pk_i8_i32", FAM_VALU, "db16 sb32 sb32 sb32", h_ashr_pk_i8);
Reg r_ashr_u8("v_ashr_pk_u8_i32", FAM_VALU, "db16 sb32 sb32 sb32", h_ashr_pk_u8);

void h_nop(Wave&, const Inst&) {}
Reg r_nop("v_nop", FAM_VALU, "", h_nop);

}  // namespace
}  // namespace emu
