// Scalar arithmetic (SOP1, SOP2, SOPC, SOPK).
//
// Undefined bits: exact through moves, bitwise operations and selections, otherwise an undefined
// bit of a source makes the whole result undefined.
#include "lanes.h"

namespace emu {
namespace {

u64 undef_of(Wave& w, const Operand& o) {
  if (o.kind == K_SPECIAL && o.reg == SP_SCC) return w.scc_undef ? ~0ull : 0;
  if (o.kind != K_SGPR) return 0;
  return o.width == 2 ? join(w.sundef[o.reg], w.sundef[o.reg + 1]) : w.sundef[o.reg];
}
u64 get(Wave& w, const Operand& o) {
  return o.width == 2 ? read_scalar64(w, o) : read_scalar(w, o);
}
void set(Wave& w, const Inst& i, u64 value, u64 undef) {
  const Operand& d = i.dst[0];
  if (d.kind != K_SGPR) return;
  w.s[d.reg] = (u32)value;
  w.sundef[d.reg] = (u32)undef;
  if (d.width == 2) {
    w.s[d.reg + 1] = (u32)(value >> 32);
    w.sundef[d.reg + 1] = (u32)(undef >> 32);
  }
}
u64 smear(u64 undef) { return undef ? ~0ull : 0; }
void set_scc(Wave& w, bool value, u64 undef) {
  w.scc = value;
  w.scc_undef = undef != 0;
}

// f(a, b, scc in and out) -> value; undefinedness smeared. `Scc`: the instruction writes SCC.
template <bool Scc, bool ReadsScc = false, class F>
void arith(Wave& w, const Inst& i, F f) {
  u64 a = get(w, i.src[0]), b = get(w, i.src[1]);
  u64 u = undef_of(w, i.src[0]) | undef_of(w, i.src[1]);
  if (ReadsScc && w.scc_undef) u = ~0ull;
  bool scc = w.scc;
  u64 r = f(a, b, scc);
  set(w, i, r, smear(u));
  if (Scc) set_scc(w, scc, u);
}

const char* X1 = "xb32 sb32";
const char* X2 = "xb32 sb32 sb32";
const char* Y1 = "xb64 sb64";
const char* Y2 = "xb64 sb64 sb64";

#define SALU(N, FORM, WRITES, READS, BODY)                                                   \
  void h_##N(Wave& w, const Inst& i) {                                                       \
    arith<WRITES, READS>(w, i, []([[maybe_unused]] u64 a, [[maybe_unused]] u64 b,            \
                                  [[maybe_unused]] bool& scc) -> u64 BODY);                  \
  }                                                                                          \
  Reg r_##N(#N, FAM_SALU, FORM, h_##N, P_CUSTOM);

SALU(s_add_u32, X2, true, false, { u64 r = a + b; scc = r >> 32; return (u32)r; })
SALU(s_sub_u32, X2, true, false, { scc = b > a; return (u32)(a - b); })
SALU(s_addc_u32, X2, true, true, { u64 r = a + b + scc; scc = r >> 32; return (u32)r; })
SALU(s_subb_u32, X2, true, true, { u64 c = scc; scc = b + c > a; return (u32)(a - b - c); })
SALU(s_add_i32, X2, true, false, {
  i64 r = (i64)(i32)a + (i32)b;
  scc = r != (i32)r;
  return (u32)r;
})
SALU(s_sub_i32, X2, true, false, {
  i64 r = (i64)(i32)a - (i32)b;
  scc = r != (i32)r;
  return (u32)r;
})
SALU(s_min_i32, X2, true, false, { scc = (i32)a < (i32)b; return scc ? a : b; })
SALU(s_max_i32, X2, true, false, { scc = (i32)a >= (i32)b; return scc ? a : b; })
SALU(s_min_u32, X2, true, false, { scc = a < b; return scc ? a : b; })
SALU(s_max_u32, X2, true, false, { scc = a >= b; return scc ? a : b; })
SALU(s_mul_i32, X2, false, false, { return (u32)((u32)a * (u32)b); })
SALU(s_mul_hi_u32, X2, false, false, { return a * b >> 32; })
SALU(s_mul_hi_i32, X2, false, false, { return (u32)((i64)(i32)a * (i32)b >> 32); })
SALU(s_absdiff_i32, X2, true, false, {
  u32 r = (u32)a - (u32)b;  // wraps before its sign is looked at
  if ((i32)r < 0) r = 0 - r;
  scc = r != 0;
  return r;
})
SALU(s_lshl_b32, X2, true, false, { u32 r = (u32)a << (b & 31); scc = r; return r; })
SALU(s_lshr_b32, X2, true, false, { u32 r = (u32)a >> (b & 31); scc = r; return r; })
SALU(s_ashr_i32, X2, true, false, { u32 r = (u32)((i32)a >> (b & 31)); scc = r; return r; })
SALU(s_lshl_b64, "xb64 sb64 sb32", true, false, { u64 r = a << (b & 63); scc = r; return r; })
SALU(s_lshr_b64, "xb64 sb64 sb32", true, false, { u64 r = a >> (b & 63); scc = r; return r; })
SALU(s_ashr_i64, "xb64 sb64 sb32", true, false, {
  u64 r = (u64)((i64)a >> (b & 63));
  scc = r;
  return r;
})
SALU(s_bfm_b32, X2, false, false, { return (u32)(((1u << (a & 31)) - 1) << (b & 31)); })
SALU(s_bfm_b64, "xb64 sb32 sb32", false, false, { return ((1ull << (a & 63)) - 1) << (b & 63); })
u64 bfe(u64 x, u64 spec, int size, bool is_signed) {
  int off = spec & (size - 1), n = spec >> 16 & 0x7f;
  if (n == 0) return 0;
  u64 v = size == 64 ? (is_signed ? (u64)((i64)x >> off) : x >> off)
                     : (is_signed ? (u64)(i64)((i32)x >> off) : (u32)x >> off);
  if (n >= size) return size == 64 ? v : (u32)v;
  v &= (1ull << n) - 1;
  if (is_signed && (v >> (n - 1) & 1)) v |= ~((1ull << n) - 1);
  return size == 64 ? v : (u32)v;
}
SALU(s_bfe_u32, X2, true, false, { u64 r = bfe(a, b, 32, false); scc = r; return r; })
SALU(s_bfe_i32, X2, true, false, { u64 r = bfe(a, b, 32, true); scc = r; return r; })
SALU(s_bfe_u64, "xb64 sb64 sb32", true, false, { u64 r = bfe(a, b, 64, false); scc = r; return r; })
SALU(s_bfe_i64, "xb64 sb64 sb32", true, false, { u64 r = bfe(a, b, 64, true); scc = r; return r; })
#define LSHL_ADD(K)                                                                     \
  SALU(s_lshl##K##_add_u32, X2, true, false, {                                          \
    u64 r = (a << K) + b;                                                               \
    scc = r >> 32;                                                                      \
    return (u32)r;                                                                      \
  })
LSHL_ADD(1)
LSHL_ADD(2)
LSHL_ADD(3)
LSHL_ADD(4)
SALU(s_pack_ll_b32_b16, X2, false, false, { return (a & 0xffff) | (b & 0xffff) << 16; })
SALU(s_pack_lh_b32_b16, X2, false, false, { return (a & 0xffff) | (b & 0xffff0000); })
SALU(s_pack_hh_b32_b16, X2, false, false, { return (a >> 16) | (b & 0xffff0000); })

// Bitwise: an undefined bit stays one unless the other source decides.
enum Bit { AND, OR, XOR, ANDN2, ORN2, NAND, NOR, XNOR };
struct Bits {
  u64 v, u;
};
Bits bitwise(Bit op, Bits a, Bits b) {
  if (op == ANDN2 || op == ORN2) b.v = ~b.v;
  Bits r{};
  switch (op) {
    case AND: case ANDN2: case NAND:
      r.v = a.v & b.v;
      r.u = (a.u | b.u) & (a.v | a.u) & (b.v | b.u);
      break;
    case OR: case ORN2: case NOR:
      r.v = a.v | b.v;
      r.u = (a.u | b.u) & (~a.v | a.u) & (~b.v | b.u);
      break;
    default: r.v = a.v ^ b.v, r.u = a.u | b.u;
  }
  if (op == NAND || op == NOR || op == XNOR) r.v = ~r.v;
  return r;
}
template <Bit Op, bool Wide>
void h_bitwise(Wave& w, const Inst& i) {
  Bits r = bitwise(Op, {get(w, i.src[0]), undef_of(w, i.src[0])},
                   {get(w, i.src[1]), undef_of(w, i.src[1])});
  if (!Wide) r.v = (u32)r.v, r.u = (u32)r.u;
  set(w, i, r.v, r.u);
  set_scc(w, r.v != 0, r.u && !(r.v & ~r.u));
}
template <Bit Op, bool Swap>  // Swap: the n1 forms negate the first source
void h_saveexec(Wave& w, const Inst& i) {
  Bits s{get(w, i.src[0]), undef_of(w, i.src[0])};
  Bits e{w.exec(), join(w.sundef[kExecLo], w.sundef[kExecLo + 1])};
  // The plain forms combine source and EXEC in this order: S0 op EXEC.
  Bits r = Swap ? bitwise(Op, e, s) : bitwise(Op, s, e);
  set(w, i, e.v, e.u);
  w.exec() = r.v;
  w.sundef[kExecLo] = (u32)r.u, w.sundef[kExecLo + 1] = (u32)(r.u >> 32);
  set_scc(w, r.v != 0, r.u && !(r.v & ~r.u));
}
template <Bit Op, bool Swap>
void h_wrexec(Wave& w, const Inst& i) {
  Bits s{get(w, i.src[0]), undef_of(w, i.src[0])};
  Bits e{w.exec(), 0};
  Bits r = Swap ? bitwise(Op, e, s) : bitwise(Op, s, e);
  set(w, i, r.v, r.u);
  w.exec() = r.v;
  set_scc(w, r.v != 0, r.u && !(r.v & ~r.u));
}
#define BITS(N, OP)                                                                \
  Reg r_##N##32("s_" #N "_b32", FAM_SALU, X2, h_bitwise<OP, false>, P_CUSTOM);     \
  Reg r_##N##64("s_" #N "_b64", FAM_SALU, Y2, h_bitwise<OP, true>, P_CUSTOM);      \
  Reg r_##N##_save("s_" #N "_saveexec_b64", FAM_SALU, Y1, h_saveexec<OP, false>, P_CUSTOM);
BITS(and, AND)
BITS(or, OR)
BITS(xor, XOR)
BITS(andn2, ANDN2)
BITS(orn2, ORN2)
BITS(nand, NAND)
BITS(nor, NOR)
BITS(xnor, XNOR)
Reg r_an1("s_andn1_saveexec_b64", FAM_SALU, Y1, h_saveexec<ANDN2, true>, P_CUSTOM);
Reg r_on1("s_orn1_saveexec_b64", FAM_SALU, Y1, h_saveexec<ORN2, true>, P_CUSTOM);
Reg r_an1w("s_andn1_wrexec_b64", FAM_SALU, Y1, h_wrexec<ANDN2, true>, P_CUSTOM);
Reg r_an2w("s_andn2_wrexec_b64", FAM_SALU, Y1, h_wrexec<ANDN2, false>, P_CUSTOM);

void h_mov(Wave& w, const Inst& i) { set(w, i, get(w, i.src[0]), undef_of(w, i.src[0])); }
Reg r_mov32("s_mov_b32", FAM_SALU, X1, h_mov, P_CUSTOM);
Reg r_mov64("s_mov_b64", FAM_SALU, Y1, h_mov, P_CUSTOM);
void h_not(Wave& w, const Inst& i) {
  u64 v = ~get(w, i.src[0]), u = undef_of(w, i.src[0]);
  if (i.dst[0].width == 1) v = (u32)v;
  set(w, i, v, u);
  set_scc(w, v != 0, u && !(v & ~u));
}
Reg r_not32("s_not_b32", FAM_SALU, X1, h_not, P_CUSTOM);
Reg r_not64("s_not_b64", FAM_SALU, Y1, h_not, P_CUSTOM);
void h_cselect(Wave& w, const Inst& i) {
  const Operand& o = i.src[w.scc ? 0 : 1];
  set(w, i, get(w, o), w.scc_undef ? ~0ull : undef_of(w, o));
}
Reg r_csel32("s_cselect_b32", FAM_SALU, X2, h_cselect, P_CUSTOM);
Reg r_csel64("s_cselect_b64", FAM_SALU, Y2, h_cselect, P_CUSTOM);
void h_cmov(Wave& w, const Inst& i) {
  if (w.scc) h_mov(w, i);
}
Reg r_cmov32("s_cmov_b32", FAM_SALU, X1, h_cmov, P_CUSTOM);
Reg r_cmov64("s_cmov_b64", FAM_SALU, Y1, h_cmov, P_CUSTOM);
Reg r_movk("s_movk_i32", FAM_SALU, "xb32 i16", h_mov, P_CUSTOM);
Reg r_cmovk("s_cmovk_i32", FAM_SALU, "xb32 i16", h_cmov, P_CUSTOM);

u64 rev64(u64 x) {
  u64 r = 0;
  for (int k = 0; k < 64; k++) r |= (x >> k & 1) << (63 - k);
  return r;
}
u64 wqm(u64 x, int n) {
  u64 r = 0;
  for (int k = 0; k < n; k += 4)
    if (x >> k & 15) r |= 15ull << k;
  return r;
}
u64 quadmask(u64 x, int n) {
  u64 r = 0;
  for (int k = 0; k < n; k += 4) r |= (u64)((x >> k & 15) != 0) << (k / 4);
  return r;
}
u64 spread(u64 x) {
  u64 r = 0;
  for (int k = 0; k < 32; k++)
    if (x >> k & 1) r |= 3ull << (2 * k);
  return r;
}
u64 flbit(i64 x, int n) {
  u64 v = (u64)(x < 0 ? ~x : x);
  return v ? (u32)(__builtin_clzll(v) - (64 - n)) : ~0u;
}
SALU(s_brev_b32, X1, false, false, { return rev64(a) >> 32; })
SALU(s_brev_b64, Y1, false, false, { return rev64(a); })
SALU(s_bcnt0_i32_b32, X1, true, false, { u64 r = 32 - __builtin_popcountll(a); scc = r; return r; })
SALU(s_bcnt0_i32_b64, "xb32 sb64", true, false, { u64 r = 64 - __builtin_popcountll(a); scc = r; return r; })
SALU(s_bcnt1_i32_b32, X1, true, false, { u64 r = __builtin_popcountll(a); scc = r; return r; })
SALU(s_bcnt1_i32_b64, "xb32 sb64", true, false, { u64 r = __builtin_popcountll(a); scc = r; return r; })
SALU(s_ff0_i32_b32, X1, false, false, { return (u32)~a ? __builtin_ctz(~(u32)a) : ~0u; })
SALU(s_ff0_i32_b64, "xb32 sb64", false, false, { return ~a ? __builtin_ctzll(~a) : ~0u; })
SALU(s_ff1_i32_b32, X1, false, false, { return a ? __builtin_ctzll(a) : ~0u; })
SALU(s_ff1_i32_b64, "xb32 sb64", false, false, { return a ? __builtin_ctzll(a) : ~0u; })
SALU(s_flbit_i32_b32, X1, false, false, { return a ? __builtin_clz((u32)a) : ~0u; })
SALU(s_flbit_i32_b64, "xb32 sb64", false, false, { return a ? __builtin_clzll(a) : ~0u; })
SALU(s_flbit_i32, X1, false, false, { return flbit((i32)a, 32); })
SALU(s_flbit_i32_i64, "xb32 sb64", false, false, { return flbit((i64)a, 64); })
SALU(s_sext_i32_i8, X1, false, false, { return (u32)(i32)(i8)a; })
SALU(s_sext_i32_i16, X1, false, false, { return (u32)(i32)(i16)a; })
SALU(s_abs_i32, X1, true, false, { u32 r = (i32)a < 0 ? 0 - (u32)a : (u32)a; scc = r; return r; })
SALU(s_wqm_b32, X1, true, false, { u64 r = wqm(a, 32); scc = r; return r; })
SALU(s_wqm_b64, Y1, true, false, { u64 r = wqm(a, 64); scc = r; return r; })
SALU(s_quadmask_b32, X1, true, false, { u64 r = quadmask(a, 32); scc = r; return r; })
SALU(s_quadmask_b64, Y1, true, false, { u64 r = quadmask(a, 64); scc = r; return r; })
SALU(s_bitreplicate_b64_b32, "xb64 sb32", false, false, { return spread(a); })
template <bool One>
void h_bitset(Wave& w, const Inst& i) {
  bool wide = i.dst[0].width == 2;
  u64 old = wide ? join(w.s[i.dst[0].reg], w.s[i.dst[0].reg + 1]) : w.s[i.dst[0].reg];
  u64 bit = 1ull << (get(w, i.src[0]) & (wide ? 63 : 31));
  u64 u = undef_of(w, i.dst[0]) | smear(undef_of(w, i.src[0]));
  set(w, i, One ? old | bit : old & ~bit, u);
}
Reg r_bs0("s_bitset0_b32", FAM_SALU, X1, h_bitset<false>, P_CUSTOM);
Reg r_bs1("s_bitset1_b32", FAM_SALU, X1, h_bitset<true>, P_CUSTOM);
Reg r_bs0w("s_bitset0_b64", FAM_SALU, "xb64 sb32", h_bitset<false>, P_CUSTOM);
Reg r_bs1w("s_bitset1_b64", FAM_SALU, "xb64 sb32", h_bitset<true>, P_CUSTOM);

template <class F>
void compare(Wave& w, const Inst& i, F f) {
  u64 u = undef_of(w, i.src[0]) | undef_of(w, i.src[1]);
  set_scc(w, f(get(w, i.src[0]), get(w, i.src[1])), u);
}
#define SCMP(N, FORM, E)                                                       \
  void h_##N(Wave& w, const Inst& i) {                                         \
    compare(w, i, [](u64 a, u64 b) -> bool { return E; });                     \
  }                                                                            \
  Reg r_##N(#N, FAM_SALU, FORM, h_##N, P_CUSTOM);
#define SCMP_BOTH(OP, E32, EU)                                                 \
  SCMP(s_cmp_##OP##_i32, "sb32 sb32", E32)                                     \
  SCMP(s_cmp_##OP##_u32, "sb32 sb32", EU)                                      \
  SCMP(s_cmpk_##OP##_i32, "sb32 i16", E32)                                     \
  SCMP(s_cmpk_##OP##_u32, "sb32 u16", EU)
SCMP_BOTH(eq, (u32)a == (u32)b, (u32)a == (u32)b)
SCMP_BOTH(lg, (u32)a != (u32)b, (u32)a != (u32)b)
SCMP_BOTH(gt, (i32)a > (i32)b, (u32)a > (u32)b)
SCMP_BOTH(ge, (i32)a >= (i32)b, (u32)a >= (u32)b)
SCMP_BOTH(lt, (i32)a < (i32)b, (u32)a < (u32)b)
SCMP_BOTH(le, (i32)a <= (i32)b, (u32)a <= (u32)b)
SCMP(s_cmp_eq_u64, "sb64 sb64", a == b)
SCMP(s_cmp_lg_u64, "sb64 sb64", a != b)
SCMP(s_bitcmp0_b32, "sb32 sb32", !(a >> (b & 31) & 1))
SCMP(s_bitcmp1_b32, "sb32 sb32", a >> (b & 31) & 1)
SCMP(s_bitcmp0_b64, "sb64 sb32", !(a >> (b & 63) & 1))
SCMP(s_bitcmp1_b64, "sb64 sb32", a >> (b & 63) & 1)

void h_addk(Wave& w, const Inst& i) {
  i64 r = (i64)(i32)w.s[i.dst[0].reg] + (i32)i.src[0].lit;
  u64 u = undef_of(w, i.dst[0]);
  set(w, i, (u32)r, smear(u));
  set_scc(w, r != (i32)r, u);
}
Reg r_addk("s_addk_i32", FAM_SALU, "xb32 i16", h_addk, P_CUSTOM);
void h_mulk(Wave& w, const Inst& i) {
  set(w, i, w.s[i.dst[0].reg] * (u32)i.src[0].lit, smear(undef_of(w, i.dst[0])));
}
Reg r_mulk("s_mulk_i32", FAM_SALU, "xb32 i16", h_mulk, P_CUSTOM);

// Hardware registers: imm = id | offset << 6 | (size - 1) << 11.
u32 hwreg_value(Wave& w, u32 id) {
  switch (id) {
    case 1: return w.mode;
    case 4: return w.id & 3;  // HW_ID: the SIMD
    case 20: return w.wg->cu % w.machine->device.xcds;  // XCC_ID
    case 6: return (u32)(w.wg->lds.size() / 512) << 12;  // LDS_ALLOC
    default: return 0;
  }
}
void h_getreg(Wave& w, const Inst& i) {
  u32 id = i.imm & 63, off = i.imm >> 6 & 31, n = (i.imm >> 11 & 31) + 1;
  u32 v = hwreg_value(w, id) >> off;
  set(w, i, n == 32 ? v : v & ((1u << n) - 1), 0);
}
void set_mode(Wave& w, const Inst& i, u32 value) {
  u32 id = i.imm & 63, off = i.imm >> 6 & 31, n = (i.imm >> 11 & 31) + 1;
  if (id != 1) return report(w, FK_UNSUPPORTED, 0, id);
  u32 mask = (n == 32 ? ~0u : (1u << n) - 1) << off;
  w.mode = (w.mode & ~mask) | (value << off & mask);
}
void h_setreg(Wave& w, const Inst& i) { set_mode(w, i, read_scalar(w, i.src[0])); }
Reg r_getreg("s_getreg_b32", FAM_SALU, "xb32 h", h_getreg, P_CUSTOM);
Reg r_setreg("s_setreg_b32", FAM_SALU, "h sb32", h_setreg, P_CUSTOM);
Reg r_setregi("s_setreg_imm32_b32", FAM_SALU, "h sb32", h_setreg, P_CUSTOM);

}  // namespace
}  // namespace emu
