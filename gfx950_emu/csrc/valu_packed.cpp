// VOP3P without the matrix instructions: two 16-bit or two 32-bit values a lane, dot products.
#include "lanes.h"

namespace emu {
namespace {

// Half `high` of the result reads this half of source k, its sign flipped as neg_lo / neg_hi say.
u32 half(const Inst& i, int k, u32 x, bool high, bool flips) {
  bool up = (high ? i.op_sel_hi : i.op_sel) >> k & 1;
  u32 h = up ? x >> 16 : x & 0xffff;
  bool neg = (high ? i.neg_hi : i.neg_lo) >> k & 1;
  return flips && neg ? h ^ 0x8000 : h;
}

template <class F>
void packed16(Wave& w, const Inst& i, int n, bool flips, F f) {
  Lanes t[3], out;
  const u32* p[3];
  for (int k = 0; k < 3; k++) p[k] = k < n ? fetch(w, i, k, t[k]) : p[0];
  for (int l = 0; l < kLanes; l++) {
    u32 r[2];
    for (int h = 0; h < 2; h++) {
      u32 x[3] = {0, 0, 0};
      for (int k = 0; k < n; k++) x[k] = half(i, k, p[k][l], h, flips);
      r[h] = f(x[0], x[1], x[2]) & 0xffff;
    }
    out.x[l] = r[0] | r[1] << 16;
  }
  put(w, i.dst[0].reg, out.x);
}
u32 clamp16(const FloatMode& m, const Inst& i, u32 h, bool finite) {
  if (i.flags & F_CLAMP) h = f32_to_f16(m.clamp(f16_to_f32(h)));
  return m.result16(h, finite);
}
float h2f(u32 h) { return f16_to_f32(h); }
i32 sx(u32 a) { return (i16)a; }
u32 sat_i(i32 x) { return (x > 32767 ? 32767 : x < -32768 ? -32768 : x) & 0xffff; }
u32 sat_u(i32 x) { return x > 65535 ? 65535 : x < 0 ? 0 : x; }

#define PK_F(N, COUNT, E)                                                                \
  void h_##N(Wave& w, const Inst& i) {                                                   \
    const FloatMode m(w);                                                                \
    auto plain = [&](u32 a_, u32 b_, u32 c_) -> u32 {                                    \
      [[maybe_unused]] float a = h2f(a_), b = h2f(b_), c = h2f(c_);                      \
      return E;                                                                          \
    };                                                                                   \
    if (m.plain16() && !(i.flags & F_CLAMP)) return packed16(w, i, COUNT, true, plain);  \
    packed16(w, i, COUNT, true, [&](u32 a, u32 b, u32 c) -> u32 {                        \
      a = m.read16(a), b = m.read16(b), c = m.read16(c);                                 \
      return clamp16(m, i, plain(a, b, c), std::isfinite(h2f(a) + h2f(b) + h2f(c)));     \
    });                                                                                  \
  }                                                                                      \
  Reg r_##N(#N, FAM_VOP3P, COUNT == 3 ? "dpk16 spk16 spk16 spk16" : "dpk16 spk16 spk16", h_##N);
#define PK_I(N, COUNT, E)                                                                \
  void h_##N(Wave& w, const Inst& i) {                                                   \
    packed16(w, i, COUNT, false,                                                         \
             [&](u32 a, u32 b, [[maybe_unused]] u32 c) -> u32 { return E; });            \
  }                                                                                      \
  Reg r_##N(#N, FAM_VOP3P, COUNT == 3 ? "dpkb16 spkb16 spkb16 spkb16"                    \
                                      : "dpkb16 spkb16 spkb16", h_##N);
#define CLAMPED (i.flags & F_CLAMP)

PK_F(v_pk_fma_f16, 3, f64_to_f16(fma_odd(a, b, c)))
PK_F(v_pk_add_f16, 2, f32_to_f16(a + b))
PK_F(v_pk_mul_f16, 2, f32_to_f16(a* b))
PK_F(v_pk_min_f16, 2, min16(a_, b_, m.ieee))
PK_F(v_pk_max_f16, 2, max16(a_, b_, m.ieee))
PK_F(v_pk_minimum3_f16, 3, f32_to_f16(minimum(minimum(a, b), c)))
PK_F(v_pk_maximum3_f16, 3, f32_to_f16(maximum(maximum(a, b), c)))
PK_I(v_pk_mad_i16, 3, CLAMPED ? sat_i(sx(a) * sx(b) + sx(c)) : a * b + c)
PK_I(v_pk_mad_u16, 3, CLAMPED ? ((u64)a * b + c > 65535 ? 65535u : a * b + c) : a * b + c)
PK_I(v_pk_mul_lo_u16, 2, a* b)
PK_I(v_pk_add_i16, 2, CLAMPED ? sat_i(sx(a) + sx(b)) : a + b)
PK_I(v_pk_sub_i16, 2, CLAMPED ? sat_i(sx(a) - sx(b)) : a - b)
PK_I(v_pk_add_u16, 2, CLAMPED ? sat_u(a + b) : a + b)
PK_I(v_pk_sub_u16, 2, CLAMPED ? sat_u((i32)a - (i32)b) : a - b)
PK_I(v_pk_lshlrev_b16, 2, b << (a & 15))
PK_I(v_pk_lshrrev_b16, 2, b >> (a & 15))
PK_I(v_pk_ashrrev_i16, 2, (u32)(sx(b) >> (a & 15)))
PK_I(v_pk_max_i16, 2, sx(a) > sx(b) ? a : b)
PK_I(v_pk_min_i16, 2, sx(a) < sx(b) ? a : b)
PK_I(v_pk_max_u16, 2, a > b ? a : b)
PK_I(v_pk_min_u16, 2, a < b ? a : b)

// Two 32-bit values: op_sel picks the dword of a source for each of the two results.
template <class F>
void packed32(Wave& w, const Inst& i, int n, F f) {
  Lanes t[6], out[2];
  const FloatMode m(w);
  for (int h = 0; h < 2; h++) {
    const u32* p[3] = {nullptr, nullptr, nullptr};
    for (int k = 0; k < n; k++) {
      bool up = (h ? i.op_sel_hi : i.op_sel) >> k & 1;
      bool neg = (h ? i.neg_hi : i.neg_lo) >> k & 1;
      const Operand& o = i.src[k];
      Lanes& tmp = t[3 * h + k];
      p[k] = o.kind == K_CONST ? fetch(w, i, k, tmp, 0) : fetch(w, i, k, tmp, up);
      if (neg) {
        for (int l = 0; l < kLanes; l++) tmp.x[l] = p[k][l] ^ 0x80000000;
        p[k] = tmp.x;
      }
    }
    for (int k = n; k < 3; k++) p[k] = p[0];
    if (flush32(w)) {
      for (int l = 0; l < kLanes; l++)
        out[h].x[l] = m.write32(f(m.read32(p[0][l]), m.read32(p[1][l]), m.read32(p[2][l])));
    } else {
      for (int l = 0; l < kLanes; l++) out[h].x[l] = f(p[0][l], p[1][l], p[2][l]);
    }
    if (i.flags & F_CLAMP)
      for (int l = 0; l < kLanes; l++) out[h].x[l] = bits(m.clamp(f32(out[h].x[l])));
  }
  put(w, i.dst[0].reg, out[0].x);
  put(w, i.dst[0].reg + 1, out[1].x);
}
void h_pk_fma_f32(Wave& w, const Inst& i) {
  packed32(w, i, 3, [](u32 a, u32 b, u32 c) {
    return bits(__builtin_fmaf(f32(a), f32(b), f32(c)));
  });
}
void h_pk_mul_f32(Wave& w, const Inst& i) {
  packed32(w, i, 2, [](u32 a, u32 b, u32) { return bits(f32(a) * f32(b)); });
}
void h_pk_add_f32(Wave& w, const Inst& i) {
  packed32(w, i, 2, [](u32 a, u32 b, u32) { return bits(f32(a) + f32(b)); });
}
Reg r_pk_fma("v_pk_fma_f32", FAM_VOP3P, "dpk32 spk32 spk32 spk32", h_pk_fma_f32);
Reg r_pk_mul("v_pk_mul_f32", FAM_VOP3P, "dpk32 spk32 spk32", h_pk_mul_f32);
Reg r_pk_add("v_pk_add_f32", FAM_VOP3P, "dpk32 spk32 spk32", h_pk_add_f32);
void h_pk_mov(Wave& w, const Inst& i) {
  Lanes ta, tb;
  const u32* a = fetch(w, i, 0, ta, i.op_sel & 1);
  const u32* b = fetch(w, i, 1, tb, i.op_sel >> 1 & 1);
  Lanes x;
  memcpy(x.x, b, sizeof x.x);
  Lanes y;
  memcpy(y.x, a, sizeof y.x);
  put(w, i.dst[0].reg, y.x);
  put(w, i.dst[0].reg + 1, x.x);
}
Reg r_pk_mov("v_pk_mov_b32", FAM_VOP3P, "dpk32 spk32 spk32", h_pk_mov);

// Mixed precision: op_sel_hi says that a source is a half, op_sel which one.
template <int Where>  // 0: f32, 1: low half, 2: high half
void mix(Wave& w, const Inst& i) {
  Lanes t[3], out;
  const u32* p[3];
  Inst raw = i;  // neg and abs hold for the half that is read
  for (int k = 0; k < 3; k++) raw.src[k].mods = 0;
  for (int k = 0; k < 3; k++) p[k] = fetch(w, raw, k, t[k]);
  const u32* old = w.reg(i.dst[0].reg);
  const FloatMode m(w);
  for (int l = 0; l < kLanes; l++) {
    float x[3];
    for (int k = 0; k < 3; k++) {
      u32 raw = p[k][l];
      x[k] = !(i.op_sel_hi >> k & 1)
                 ? f32(m.read32(raw))
                 : h2f(m.read16(i.op_sel >> k & 1 ? raw >> 16 : raw & 0xffff));
      if (i.neg_hi >> k & 1 || i.src[k].mods & M_ABS) x[k] = std::fabs(x[k]);
      if (i.neg_lo >> k & 1 || i.src[k].mods & M_NEG) x[k] = -x[k];
    }
    bool finite = std::isfinite(x[0]) && std::isfinite(x[1]) && std::isfinite(x[2]);
    float r = f32(m.write32(bits(__builtin_fmaf(x[0], x[1], x[2]))));
    if (i.flags & F_CLAMP) r = m.clamp(r);
    u32 h = Where ? m.result16(f32_to_f16(r), finite) : 0;
    out.x[l] = Where == 0   ? bits(r)
               : Where == 1 ? (old[l] & 0xffff0000) | h
                            : (old[l] & 0xffff) | h << 16;
  }
  put(w, i.dst[0].reg, out.x);
}
Reg r_mix("v_fma_mix_f32", FAM_VOP3P, "df32 sf32 sf32 sf32", mix<0>);
Reg r_mixlo("v_fma_mixlo_f16", FAM_VOP3P, "rb32 sf32 sf32 sf32", mix<1>);
Reg r_mixhi("v_fma_mixhi_f16", FAM_VOP3P, "rb32 sf32 sf32 sf32", mix<2>);

// Dot products; the c forms add to the destination.
template <int Bits, bool Signed>
u32 dot_int(u32 a, u32 b, u32 acc, bool clamp) {
  i64 r = Signed ? (i64)(i32)acc : (i64)acc;
  for (int k = 0; k < 32 / Bits; k++) {
    u32 x = a >> (Bits * k) & ((1u << Bits) - 1), y = b >> (Bits * k) & ((1u << Bits) - 1);
    if (Signed)
      r += (i64)((i32)(x << (32 - Bits)) >> (32 - Bits)) * ((i32)(y << (32 - Bits)) >> (32 - Bits));
    else
      r += (i64)x * y;
  }
  if (clamp && Signed) r = r > INT32_MAX ? INT32_MAX : r < INT32_MIN ? INT32_MIN : r;
  if (clamp && !Signed) r = r > UINT32_MAX ? UINT32_MAX : r;
  return (u32)r;
}
// Three operands that are added in order: the accumulator first, or last for bf16 in VOP3P.
template <bool Bf>
u32 dot_float(const Inst& i, u32 a, u32 b, float acc, bool vop3p) {
  float x[2], y[2];
  for (int h = 0; h < 2; h++) {
    u32 p = vop3p ? half(i, 0, a, h, true) : a >> (16 * h) & 0xffff;
    u32 q = vop3p ? half(i, 1, b, h, true) : b >> (16 * h) & 0xffff;
    x[h] = Bf ? bf16_to_f32(p) : h2f(p), y[h] = Bf ? bf16_to_f32(q) : h2f(q);
  }
  if (vop3p && (i.neg_lo >> 2 & 1)) acc = -acc;
  if (Bf && vop3p) return bits(x[0] * y[0] + x[1] * y[1] + acc);
  return bits(acc + x[0] * y[0] + x[1] * y[1]);
}
template <bool Bf>
void dot2_float(Wave& w, const Inst& i) {
  const FloatMode m(w);
  lanes3(w, i, [&](u32 a, u32 b, u32 c) {
    u32 r = dot_float<Bf>(i, a, b, f32(c), true);
    return i.flags & F_CLAMP ? bits(m.clamp(f32(r))) : r;
  });
}
#define DOT_I(N, B, S)                                                                         \
  void h_##N(Wave& w, const Inst& i) {                                                         \
    lanes3(w, i, [&](u32 a, u32 b, u32 c) { return dot_int<B, S>(a, b, c, i.flags & F_CLAMP); }); \
  }                                                                                            \
  Reg r_##N(#N, FAM_VOP3P, "db32 sb32 sb32 sb32", h_##N);
DOT_I(v_dot2_i32_i16, 16, true)
DOT_I(v_dot2_u32_u16, 16, false)
DOT_I(v_dot4_i32_i8, 8, true)
DOT_I(v_dot4_u32_u8, 8, false)
DOT_I(v_dot8_i32_i4, 4, true)
DOT_I(v_dot8_u32_u4, 4, false)
Reg r_dot2_f16("v_dot2_f32_f16", FAM_VOP3P, "df32 spk16 spk16 sf32", dot2_float<false>);
Reg r_dot2_bf16("v_dot2_f32_bf16", FAM_VOP3P, "df32 spk16 spk16 sf32", dot2_float<true>);

template <class F>
void dotc(Wave& w, const Inst& i, F f) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb), *c = w.reg(i.dst[0].reg);
  for (int l = 0; l < kLanes; l++) out.x[l] = f(a[l], b[l], c[l]);
  commit(w, i, out.x);
}
#define DOTC(N, E)                                                                       \
  void h_##N(Wave& w, const Inst& i) {                                                   \
    dotc(w, i, [&](u32 a, u32 b, u32 c) -> u32 { return E; });                           \
  }                                                                                      \
  Reg r_##N(#N, FAM_VALU, "rb32 sb32 sb32", h_##N);
DOTC(v_dot2c_f32_f16, dot_float<false>(i, a, b, f32(c), false))
DOTC(v_dot2c_f32_bf16, dot_float<true>(i, a, b, f32(c), false))
DOTC(v_dot2c_i32_i16, (dot_int<16, true>(a, b, c, false)))
DOTC(v_dot4c_i32_i8, (dot_int<8, true>(a, b, c, false)))
DOTC(v_dot8c_i32_i4, (dot_int<4, true>(a, b, c, false)))
void h_pk_fmac(Wave& w, const Inst& i) {
  const FloatMode m(w);
  auto one = [&](u32 a, u32 b, u32 c) {
    float x = h2f(m.read16(a)), y = h2f(m.read16(b)), z = h2f(m.read16(c));
    return m.result16(f64_to_f16(fma_odd(x, y, z)), std::isfinite(x + y + z));
  };
  dotc(w, i, [&](u32 a, u32 b, u32 c) -> u32 {
    return one(a & 0xffff, b & 0xffff, c & 0xffff) | one(a >> 16, b >> 16, c >> 16) << 16;
  });
}
Reg r_pk_fmac("v_pk_fmac_f16", FAM_VALU, "rb32 spk16 spk16", h_pk_fmac);

}  // namespace
}  // namespace emu
