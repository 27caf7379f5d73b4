// Vector instructions on 32-bit and 64-bit floats.
#include <cfenv>

#include "lanes.h"

namespace emu {
namespace {

const char* F1 = "df32 sf32";
const char* F2 = "df32 sf32 sf32";
const char* F3 = "df32 sf32 sf32 sf32";
const char* ACC = "rf32 sf32 sf32";

float fma_(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
float legacy_mul(float a, float b) { return a == 0 || b == 0 ? 0.f : a * b; }
float frac(float a) {
  float r = a - __builtin_floorf(a);
  return r >= 1.f ? bit_cast<float>(0x3f7fffffu) : r;
}
// Revolutions, valid within 256 of zero: 0 and 1 outside.
float trig(float a, bool cosine) {
  if (!std::isfinite(a)) return NAN;
  if (std::fabs(a) > 256) return cosine;
  if (a == 0) return cosine ? 1.f : a;
  double x = ((double)a - std::nearbyint((double)a)) * 6.283185307179586476925;
  return (float)(cosine ? std::cos(x) : std::sin(x));
}
float frexp_mant(float a) {
  int e;
  return std::isfinite(a) ? std::frexp(a, &e) : a;
}
i32 frexp_exp(double a) {
  int e = 0;
  if (!std::isfinite(a) || a == 0) return 0;
  std::frexp(a, &e);
  return e;
}
int exponent(float x) { return bits(x) >> 23 & 0xff; }
int exponent(double x) { return bits(x) >> 52 & 0x7ff; }
float ldexp_(float a, i32 n) {
  return (float)std::ldexp(a, n > 600 ? 600 : n < -600 ? -600 : n);
}

OP_F(v_add_f32, F2, 2, a + b)
OP_F(v_sub_f32, F2, 2, a - b)
OP_F(v_subrev_f32, F2, 2, b - a)
OP_F(v_mul_f32, F2, 2, a* b)
OP_F(v_mul_legacy_f32, F2, 2, legacy_mul(a, b))
#define IEEE (w.mode >> 9 & 1)
OP_F(v_min_f32, F2, 2, min_num(a, b, IEEE))
OP_F(v_max_f32, F2, 2, max_num(a, b, IEEE))
OP_F(v_fma_f32, F3, 3, fma_(a, b, c))
OP_F(v_fmamk_f32, F3, 3, fma_(a, b, c))
OP_F(v_fmaak_f32, F3, 3, fma_(a, b, c))
OP_F(v_min3_f32, F3, 3, min_num(min_num(a, b, IEEE), c, IEEE))
OP_F(v_max3_f32, F3, 3, max_num(max_num(a, b, IEEE), c, IEEE))
OP_F(v_med3_f32, F3, 3, med3(a, b, c, IEEE))
OP_F(v_minimum3_f32, F3, 3, minimum(minimum(a, b), c))
OP_F(v_maximum3_f32, F3, 3, maximum(maximum(a, b), c))

void h_fmac(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb), *c = w.reg(i.dst[0].reg);
  if (flush32(w)) {
    const FloatMode m(w);
    for (int l = 0; l < kLanes; l++)
      out.x[l] = m.write32(
          bits(fma_(f32(m.read32(a[l])), f32(m.read32(b[l])), f32(m.read32(c[l])))));
  } else {
    for (int l = 0; l < kLanes; l++) out.x[l] = bits(fma_(f32(a[l]), f32(b[l]), f32(c[l])));
  }
  commit(w, i, out.x);
}
Reg r_fmac("v_fmac_f32", FAM_VALU, ACC, h_fmac);

OP_F(v_fract_f32, F1, 1, frac(a))
OP_F(v_trunc_f32, F1, 1, __builtin_truncf(a))
OP_F(v_ceil_f32, F1, 1, __builtin_ceilf(a))
OP_F(v_rndne_f32, F1, 1, std::nearbyint(a))
OP_F(v_floor_f32, F1, 1, __builtin_floorf(a))
OP_T(v_exp_f32, F1, exp2_of(a))
OP_T(v_log_f32, F1, (float)std::log2((double)a))
OP_T(v_rcp_f32, F1, 1.0f / a)
OP_T(v_rcp_iflag_f32, F1, 1.0f / a)
OP_T(v_rsq_f32, F1, (float)(1.0 / std::sqrt((double)a)))
OP_T(v_sqrt_f32, F1, std::sqrt(a))
OP_F(v_sin_f32, F1, 1, trig(a, false))
OP_F(v_cos_f32, F1, 1, trig(a, true))
OP_F(v_frexp_mant_f32, F1, 1, frexp_mant(a))

float cube_ma(float a, float b, float c) {
  float x = std::fabs(a), y = std::fabs(b), z = std::fabs(c);
  return z >= x && z >= y ? c * 2 : y >= x ? b * 2 : a * 2;
}
float cube_id(float a, float b, float c) {
  float x = std::fabs(a), y = std::fabs(b), z = std::fabs(c);
  return z >= x && z >= y ? (c < 0 ? 5.f : 4.f) : y >= x ? (b < 0 ? 3.f : 2.f) : a < 0 ? 1.f : 0.f;
}
float cube_sc(float a, float b, float c) {
  float x = std::fabs(a), y = std::fabs(b), z = std::fabs(c);
  return z >= x && z >= y ? (c < 0 ? -a : a) : y >= x ? a : a < 0 ? c : -c;
}
float cube_tc(float a, float b, float c) {
  float x = std::fabs(a), y = std::fabs(b), z = std::fabs(c);
  return z >= x && z >= y ? -b : y >= x ? (b < 0 ? -c : c) : -b;
}
OP_F(v_cubema_f32, F3, 3, cube_ma(a, b, c))
OP_F(v_cubeid_f32, F3, 3, cube_id(a, b, c))
OP_F(v_cubesc_f32, F3, 3, cube_sc(a, b, c))
OP_F(v_cubetc_f32, F3, 3, cube_tc(a, b, c))

void h_ldexp(Wave& w, const Inst& i) {
  const FloatMode m(w);
  lanes2(w, i, [&](u32 a, u32 b) {
    return m.write32(bits(ldexp_(f32(m.read32(a)), (i32)b)));
  });
}
Reg r_ldexp("v_ldexp_f32", FAM_VALU, "df32 sf32 sb32", h_ldexp);
void h_frexp_exp(Wave& w, const Inst& i) {
  const FloatMode m(w);
  lanes1(w, i, [&](u32 a) { return (u32)frexp_exp(f32(m.read32(a))); });
}
Reg r_frexp_exp("v_frexp_exp_i32_f32", FAM_VALU, "db32 sf32", h_frexp_exp);

// Division: the scale, the fix-up, and the multiply-add that undoes the scale. (The CDNA document
// says 2^32 for the last one; 2^64 or 2^-64, as in RDNA 4's, is what fits v_div_scale.)
struct DivF32 {
  using T = float;
  static constexpr int kScale = 64, kMax = 96, kTiny = 23, kUnder = -150, kInf = 255;
};
struct DivF64 {
  using T = double;
  static constexpr int kScale = 128, kMax = 768, kTiny = 53, kUnder = -1075, kInf = 2047;
};
bool denormal(float x) { return x != 0 && exponent(x) == 0; }
bool denormal(double x) { return x != 0 && exponent(x) == 0; }

template <class P>
typename P::T div_scale(typename P::T s0, typename P::T s1, typename P::T s2, bool& vcc) {
  using T = typename P::T;
  vcc = false;
  auto scaled = [&](int n) { return (T)std::ldexp(s0, n); };
  if (s2 == 0 || s1 == 0) return std::numeric_limits<T>::quiet_NaN();
  if (exponent(s2) - exponent(s1) >= P::kMax) {
    vcc = true;
    return s0 == s1 ? scaled(P::kScale) : s0;
  }
  if (denormal(s1)) return scaled(P::kScale);
  // Where quotient and reciprocal are both denormal the pseudo-code scales a large denominator up,
  // which overflows: down is what keeps the reciprocal normal and what v_div_fmas undoes.
  bool quot_small = denormal((T)(s2 / s1)), rcp_small = denormal((T)(1 / s1));
  if (rcp_small && quot_small) {
    vcc = true;
    return s0 == s1 ? scaled(-P::kScale) : s0;
  }
  if (rcp_small) return scaled(-P::kScale);
  if (quot_small) {
    vcc = true;
    return s0 == s2 ? scaled(P::kScale) : s0;
  }
  if (exponent(s2) <= P::kTiny) return scaled(P::kScale);
  return s0;
}
// An infinity or a NaN as the quotient of finite numbers says that it overflowed on the way: the
// result is what MODE's rounding makes of an overflow. (The document tests the denominator's
// exponent there, which the lines above have already excluded.)
template <class T>
T div_fixup(T s0, T s1, T s2, int under, int top) {
  bool neg = std::signbit(s1) != std::signbit(s2);
  const T inf = std::numeric_limits<T>::infinity();
  if (s2 != s2) return s2;
  if (s1 != s1) return s1;
  if ((s1 == 0 && s2 == 0) || (std::isinf(s1) && std::isinf(s2)))
    return -std::numeric_limits<T>::quiet_NaN();
  if (s1 == 0 || std::isinf(s2)) return neg ? -inf : inf;
  if (std::isinf(s1) || s2 == 0) return neg ? (T)-0.0 : (T)0.0;
  if (exponent(s2) - exponent(s1) < under) return neg ? (T)-0.0 : (T)0.0;
  if (exponent(s0) == top) {
    volatile T big = std::numeric_limits<T>::max();
    return neg ? -big - big : big + big;
  }
  return neg ? -std::fabs(s0) : std::fabs(s0);
}
OP_F(v_div_fixup_f32, F3, 3, div_fixup(a, b, c, DivF32::kUnder, DivF32::kInf))

void h_div_scale32(Wave& w, const Inst& i) {
  u64 mask = 0;
  int lane = 0;
  lanesf(w, i, 3, [&](float a, float b, float c) {
    bool v;
    float r = div_scale<DivF32>(a, b, c, v);
    mask |= (u64)v << lane++;
    return r;
  });
  write_scalar64(w, i.dst[1].reg, mask & w.wmask);
}
Reg r_div_scale32("v_div_scale_f32", FAM_VALU, "df32 m sf32 sf32 sf32", h_div_scale32);
void h_div_scale64(Wave& w, const Inst& i) {
  u64 mask = 0;
  int lane = 0;
  lanes64(w, i, 3, [&](u64 a, u64 b, u64 c) {
    bool v;
    double r = div_scale<DivF64>(f64(a), f64(b), f64(c), v);
    mask |= (u64)v << lane++;
    return bits(r);
  });
  write_scalar64(w, i.dst[1].reg, mask & w.wmask);
}
Reg r_div_scale64("v_div_scale_f64", FAM_VALU, "df64 m sf64 sf64 sf64", h_div_scale64);
void h_div_fmas32(Wave& w, const Inst& i) {
  u64 vcc = w.vcc();
  int lane = 0;
  lanesf(w, i, 3, [&](float a, float b, float c) {
    if (!(vcc >> lane++ & 1)) return fma_(a, b, c);
    return (float)std::ldexp(fma_odd(a, b, c), exponent(c) > 127 ? 64 : -64);  // rounded once
  });
}
Reg r_div_fmas32("v_div_fmas_f32", FAM_VALU, F3, h_div_fmas32);
// (a b + c) 2^n, rounded once where the scaled sum is normal or becomes denormal.
double fma_scaled(double a, double b, double c, int n) {
  double s = std::fma(a, b, c), r = std::ldexp(s, n);
  if (n > 0 || !std::isfinite(s)) return r;
  // A tie of the second rounding is none when the first one was inexact.
  double rest = s - std::ldexp(r, -n), err = fma_error(a, b, c, s);
  bool tie = std::fabs(rest) == std::ldexp(1.0, -1075 - n);
  if (tie && err != 0 && (err > 0) == (rest > 0))
    r = std::nextafter(r, rest > 0 ? HUGE_VAL : -HUGE_VAL);
  return r;
}
void h_div_fmas64(Wave& w, const Inst& i) {
  u64 vcc = w.vcc();
  int lane = 0;
  lanes64(w, i, 3, [&](u64 a, u64 b, u64 c) {
    if (!(vcc >> lane++ & 1)) return bits(std::fma(f64(a), f64(b), f64(c)));
    return bits(fma_scaled(f64(a), f64(b), f64(c), exponent(f64(c)) > 1023 ? 128 : -128));
  });
}
Reg r_div_fmas64("v_div_fmas_f64", FAM_VALU, "df64 sf64 sf64 sf64", h_div_fmas64);

const char* G1 = "df64 sf64";
const char* G2 = "df64 sf64 sf64";
const char* G3 = "df64 sf64 sf64 sf64";
double frac64(double a) {
  double r = a - std::floor(a);
  return r >= 1 ? bit_cast<double>(0x3fefffffffffffffull) : r;
}
OP_64(v_add_f64, G2, 2, bits(f64(a) + f64(b)))
OP_64(v_mul_f64, G2, 2, bits(f64(a) * f64(b)))
OP_64(v_min_f64, G2, 2, bits(min_num(f64(a), f64(b), IEEE)))
OP_64(v_max_f64, G2, 2, bits(max_num(f64(a), f64(b), IEEE)))
OP_64(v_fma_f64, G3, 3, bits(std::fma(f64(a), f64(b), f64(c))))
OP_64(v_div_fixup_f64, G3, 3,
      bits(div_fixup(f64(a), f64(b), f64(c), DivF64::kUnder, DivF64::kInf)))
OP_64(v_ldexp_f64, "df64 sf64 sb32", 2, bits(std::ldexp(f64(a), (i32)b)))
OP_64(v_trunc_f64, G1, 1, bits(std::trunc(f64(a))))
OP_64(v_ceil_f64, G1, 1, bits(std::ceil(f64(a))))
OP_64(v_rndne_f64, G1, 1, bits(std::nearbyint(f64(a))))
OP_64(v_floor_f64, G1, 1, bits(std::floor(f64(a))))
OP_64(v_fract_f64, G1, 1, bits(frac64(f64(a))))
OP_64(v_rcp_f64, G1, 1, bits(1.0 / f64(a)))
OP_64(v_rsq_f64, G1, 1, bits(1.0 / std::sqrt(f64(a))))
OP_64(v_sqrt_f64, G1, 1, bits(std::sqrt(f64(a))))
double mant64(double a) {
  int e;
  return std::isfinite(a) ? std::frexp(a, &e) : a;
}
OP_64(v_frexp_mant_f64, G1, 1, bits(mant64(f64(a))))
OP_64(v_frexp_exp_i32_f64, "db32 sf64", 1, (u32)frexp_exp(f64(a)))
void h_fmac64(Wave& w, const Inst& i) {
  Lanes t[4], lo, hi;
  const u32 *a = fetch(w, i, 0, t[0]), *a1 = fetch(w, i, 0, t[1], 1);
  const u32 *b = fetch(w, i, 1, t[2]), *b1 = fetch(w, i, 1, t[3], 1);
  const u32 *c = w.reg(i.dst[0].reg), *c1 = w.reg(i.dst[0].reg + 1);
  const FloatMode m(w);
  auto read = [&](u32 low, u32 high) { return f64(m.read64(join(low, high))); };
  for (int l = 0; l < kLanes; l++) {
    double sum = std::fma(read(a[l], a1[l]), read(b[l], b1[l]), read(c[l], c1[l]));
    u64 r = finish64(m, i, bits(sum));
    lo.x[l] = (u32)r, hi.x[l] = (u32)(r >> 32);
  }
  put(w, i.dst[0].reg, lo.x);
  put(w, i.dst[0].reg + 1, hi.x);
}
Reg r_fmac64("v_fmac_f64", FAM_VALU, "rf64 sf64 sf64", h_fmac64);

}  // namespace
}  // namespace emu
