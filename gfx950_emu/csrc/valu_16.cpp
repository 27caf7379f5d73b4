// Vector instructions on 16-bit floats and integers.
#include "lanes.h"

namespace emu {
namespace {

const char* H1 = "df16 sf16";
const char* H2 = "df16 sf16 sf16";
const char* H3 = "df16 sf16 sf16 sf16";
const char* S2 = "db16 sb16 sb16";
const char* S3 = "db16 sb16 sb16 sb16";

u32 h16(float x) { return f32_to_f16(x); }
u32 fma16(float a, float b, float c) { return f64_to_f16(fma_odd(a, b, c)); }
float frac(float a) {
  float r = a - std::floor(a);
  return f32_to_f16(r) >= 0x3c00 && r > 0 ? 0.99951171875f : r;
}
u32 round_once(double x) { return f64_to_f16(x); }
// Revolutions, valid within 256 of zero: 0 and 1 outside.
u32 trig(float a, bool cosine) {
  if (!std::isfinite(a)) return 0x7e00;
  if (std::fabs(a) > 256) return cosine ? 0x3c00 : 0;
  if (a == 0) return cosine ? 0x3c00 : f32_to_f16(a);
  double x = ((double)a - std::nearbyint((double)a)) * 6.283185307179586476925;
  return round_once(cosine ? std::cos(x) : std::sin(x));
}
i32 sx(u32 a) { return (i16)a; }
u32 sat_i(i32 x) { return (x > 32767 ? 32767 : x < -32768 ? -32768 : x) & 0xffff; }
u32 sat_u(i32 x) { return x > 65535 ? 65535 : x < 0 ? 0 : x; }
#define CLAMPED (i.flags & F_CLAMP)

OP_H(v_add_f16, H2, 2, h16(a + b))
OP_H(v_sub_f16, H2, 2, h16(a - b))
OP_H(v_subrev_f16, H2, 2, h16(b - a))
OP_H(v_mul_f16, H2, 2, h16(a* b))
OP_HCODE(v_min_f16, H2, 2, false, min16(a, b, ieee))
OP_HCODE(v_max_f16, H2, 2, false, max16(a, b, ieee))
OP_HK(v_fma_f16, H3, 3, fma16(a, b, c))
OP_H(v_fma_legacy_f16, H3, 3, fma16(a, b, c))
OP_HK(v_mad_f16, H3, 3, h16(f16_to_f32(h16(a * b)) + c))
OP_H(v_mad_legacy_f16, H3, 3, h16(f16_to_f32(h16(a * b)) + c))
OP_HCODE(v_min3_f16, H3, 3, true, min16(min16(a, b, ieee), c, ieee))
OP_HCODE(v_max3_f16, H3, 3, true, max16(max16(a, b, ieee), c, ieee))
OP_HCODE(v_med3_f16, H3, 3, true,
         code_f16(med3(f16_code(a), f16_code(b), f16_code(c), ieee)))
OP_H(v_rcp_f16, H1, 1, round_once(1.0 / (double)a))
OP_H(v_rsq_f16, H1, 1, round_once(1.0 / std::sqrt((double)a)))
OP_H(v_sqrt_f16, H1, 1, round_once(std::sqrt((double)a)))
OP_H(v_log_f16, H1, 1, round_once(std::log2((double)a)))
OP_H(v_exp_f16, H1, 1, round_once(std::exp2((double)a)))
OP_H(v_floor_f16, H1, 1, h16(std::floor(a)))
OP_H(v_ceil_f16, H1, 1, h16(std::ceil(a)))
OP_H(v_trunc_f16, H1, 1, h16(std::trunc(a)))
OP_H(v_rndne_f16, H1, 1, h16(std::nearbyint(a)))
OP_H(v_fract_f16, H1, 1, h16(frac(a)))
OP_H(v_sin_f16, H1, 1, trig(a, false))
OP_H(v_cos_f16, H1, 1, trig(a, true))
float mant(float a) {
  int e;
  return std::isfinite(a) ? std::frexp(a, &e) : a;
}
int expo(float a) {
  int e = 0;
  if (!std::isfinite(a) || a == 0) return 0;
  std::frexp(a, &e);
  return e;
}
OP_H(v_frexp_mant_f16, H1, 1, h16(mant(a)))
OP_H(v_frexp_exp_i16_f16, "db16 sf16", 1, (u32)expo(a))

void h_ldexp(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch16(w, i, 0, ta), *b = fetch16(w, i, 1, tb);
  const FloatMode m(w);
  for (int l = 0; l < kLanes; l++) {
    float x = f16_to_f32(m.read16(a[l]));
    out.x[l] = m.result16(f64_to_f16(std::ldexp((double)x, sx(b[l]))), std::isfinite(x));
  }
  commit16(w, i, out.x);
}
Reg r_ldexp("v_ldexp_f16", FAM_VALU, "df16 sf16 sb16", h_ldexp);

u32 fixup(float s0, float s1, float s2) {
  bool neg = std::signbit(s1) != std::signbit(s2);
  if (is_nan(s2)) return h16(quiet(s2));
  if (is_nan(s1)) return h16(quiet(s1));
  if ((s1 == 0 && s2 == 0) || (std::isinf(s1) && std::isinf(s2))) return 0xfe00;
  if (s1 == 0 || std::isinf(s2)) return neg ? 0xfc00 : 0x7c00;
  if (std::isinf(s1) || s2 == 0) return neg ? 0x8000 : 0;
  return h16(neg ? -std::fabs(s0) : std::fabs(s0));
}
template <bool Keep>
void h_fixup(Wave& w, const Inst& i) {
  const FloatMode m(w);
  lanesi16(
      w, i, 3,
      [&](u32 a, u32 b, u32 c) {  // a division by zero stays infinite
        return m.write16(fixup(f16_to_f32(m.read16(a)), f16_to_f32(m.read16(b)),
                               f16_to_f32(m.read16(c))));
      },
      Keep);
}
Reg r_fixup("v_div_fixup_f16", FAM_VALU, H3, h_fixup<true>);
Reg r_fixup_legacy("v_div_fixup_legacy_f16", FAM_VALU, H3, h_fixup<false>);

OP_I16(v_add_u16, S2, 2, CLAMPED ? sat_u(a + b) : a + b)
OP_I16(v_sub_u16, S2, 2, CLAMPED ? sat_u((i32)a - (i32)b) : a - b)
OP_I16(v_subrev_u16, S2, 2, CLAMPED ? sat_u((i32)b - (i32)a) : b - a)
OP_I16(v_add_i16, S2, 2, CLAMPED ? sat_i(sx(a) + sx(b)) : a + b)
OP_I16(v_sub_i16, S2, 2, CLAMPED ? sat_i(sx(a) - sx(b)) : a - b)
OP_I16(v_mul_lo_u16, S2, 2, a* b)
OP_I16(v_lshlrev_b16, S2, 2, b << (a & 15))
OP_I16(v_lshrrev_b16, S2, 2, b >> (a & 15))
OP_I16(v_ashrrev_i16, S2, 2, (u32)(sx(b) >> (a & 15)))
OP_I16(v_max_u16, S2, 2, a > b ? a : b)
OP_I16(v_min_u16, S2, 2, a < b ? a : b)
OP_I16(v_max_i16, S2, 2, sx(a) > sx(b) ? a : b)
OP_I16(v_min_i16, S2, 2, sx(a) < sx(b) ? a : b)
u32 max3u(u32 a, u32 b, u32 c) { return std::max(std::max(a, b), c); }
u32 min3u(u32 a, u32 b, u32 c) { return std::min(std::min(a, b), c); }
u32 med3u(u32 a, u32 b, u32 c) { return std::max(std::min(a, b), std::min(std::max(a, b), c)); }
u32 max3i(i32 a, i32 b, i32 c) { return (u32)std::max(std::max(a, b), c); }
u32 min3i(i32 a, i32 b, i32 c) { return (u32)std::min(std::min(a, b), c); }
u32 med3i(i32 a, i32 b, i32 c) {
  return (u32)std::max(std::min(a, b), std::min(std::max(a, b), c));
}
OP_I16K(v_max3_u16, S3, 3, max3u(a, b, c))
OP_I16K(v_min3_u16, S3, 3, min3u(a, b, c))
OP_I16K(v_med3_u16, S3, 3, med3u(a, b, c))
OP_I16K(v_max3_i16, S3, 3, max3i(sx(a), sx(b), sx(c)))
OP_I16K(v_min3_i16, S3, 3, min3i(sx(a), sx(b), sx(c)))
OP_I16K(v_med3_i16, S3, 3, med3i(sx(a), sx(b), sx(c)))
OP_I16K(v_mad_u16, S3, 3, CLAMPED ? (u64)a* b + c > 65535 ? 65535 : a * b + c : a * b + c)
OP_I16K(v_mad_i16, S3, 3, CLAMPED ? sat_i(sx(a) * sx(b) + sx(c)) : a * b + c)
OP_I16(v_mad_legacy_u16, S3, 3, a* b + c)
OP_I16(v_mad_legacy_i16, S3, 3, a* b + c)

// 16-bit factors, a 32-bit sum.
template <bool Signed>
void mad32(Wave& w, const Inst& i) {
  Lanes ta, tb, tc, out;
  const u32 *a = fetch16(w, i, 0, ta), *b = fetch16(w, i, 1, tb), *c = fetch(w, i, 2, tc);
  for (int l = 0; l < kLanes; l++)
    out.x[l] = (Signed ? (u32)(sx(a[l]) * sx(b[l])) : a[l] * b[l]) + c[l];
  commit(w, i, out.x);
}
Reg r_mad_u32("v_mad_u32_u16", FAM_VALU, "db32 sb16 sb16 sb32", mad32<false>);
Reg r_mad_i32("v_mad_i32_i16", FAM_VALU, "db32 sb16 sb16 sb32", mad32<true>);

void h_pack(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch16(w, i, 0, ta), *b = fetch16(w, i, 1, tb);
  for (int l = 0; l < kLanes; l++) out.x[l] = a[l] | b[l] << 16;
  put(w, i.dst[0].reg, out.x);
}
Reg r_pack("v_pack_b32_f16", FAM_VALU, "db32 sf16 sf16", h_pack);

void h_sat_pk(Wave& w, const Inst& i) {
  Lanes ta, out;
  const u32* a = fetch(w, i, 0, ta);
  auto sat = [](i32 x) -> u32 { return x < 0 ? 0 : x > 255 ? 255 : x; };
  for (int l = 0; l < kLanes; l++)
    out.x[l] = sat((i16)a[l]) | sat((i32)a[l] >> 16) << 8;
  commit16(w, i, out.x, true);
}
Reg r_sat_pk("v_sat_pk_u8_i16", FAM_VALU, "db16 sb32", h_sat_pk);

}  // namespace
}  // namespace emu
