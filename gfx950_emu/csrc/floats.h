// Conversions between float formats, exact, rounding to nearest even unless said otherwise.
#pragma once
#include <cmath>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "inst.h"

namespace emu {

// A small format: `e` exponent bits, `m` mantissa bits, bias.
struct Format {
  int e, m, bias;
  bool has_inf, has_nan;  // E4M3 has a NaN and no infinity; FP6 and FP4 have neither
  u32 max_code;           // the largest finite magnitude
  u32 nan_code, inf_code;
};
constexpr Format kFp8{4, 3, 7, false, true, 0x7e, 0x7f, 0x7f};
constexpr Format kBf8{5, 2, 15, true, true, 0x7b, 0x7f, 0x7c};
constexpr Format kFp6{2, 3, 1, false, false, 0x1f, 0x1f, 0x1f};
constexpr Format kBf6{3, 2, 3, false, false, 0x1f, 0x1f, 0x1f};
constexpr Format kFp4{2, 1, 1, false, false, 0x7, 0x7, 0x7};
constexpr Format kF16{5, 10, 15, true, true, 0x7bff, 0x7e00, 0x7c00};
constexpr Format kBf16{8, 7, 127, true, true, 0x7f7f, 0x7fc0, 0x7f80};

float decode_small(u32 code, const Format& f);

enum class Round { NearestEven, Up, Down, Zero, Stochastic };
struct Overflow {
  bool saturate;  // to the largest finite value, otherwise to infinity or NaN
};
// `noise`: 32 bits, the highest are added below the last kept bit when rounding is stochastic.
u32 encode_small(double x, const Format& f, bool saturate, Round round = Round::NearestEven,
                 u32 noise = 0, bool saturate_inf = false);

const float (*small_tables())[256];  // by f8f6f4 code: E4M3, E5M2, E2M3, E3M2, E2M1

inline float f16_to_f32(u32 h) {
#ifdef __F16C__
  return __builtin_ia32_vcvtph2ps((__attribute__((vector_size(16))) short){(short)h})[0];
#else
  return decode_small(h & 0xffff, kF16);
#endif
}
inline u32 f32_to_f16(float x) {  // round to nearest even
#ifdef __F16C__
  return (u16)__builtin_ia32_vcvtps2ph((__attribute__((vector_size(16))) float){x}, 0)[0];
#else
  return encode_small(x, kF16, false);
#endif
}
inline void f16_lanes(const u32* h, float* out) {  // 64 of them
#ifdef __AVX512F__
  for (int l = 0; l < kLanes; l += 16)
    _mm512_storeu_ps(out + l, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_loadu_si512(h + l))));
#else
  for (int l = 0; l < kLanes; l++) out[l] = f16_to_f32(h[l]);
#endif
}
u32 f64_to_f16(double x);  // rounds once
inline float bf16_to_f32(u32 h) { return bit_cast<float>(h << 16); }
inline u32 f32_to_bf16(float x) {
  u32 b = bit_cast<u32>(x);
  u32 rounded = (b + 0x7fff + (b >> 16 & 1)) >> 16;
  return (b & 0x7fffffff) > 0x7f800000 ? (b >> 16 | 0x40) : rounded;
}

// a * b + c in 16 bits, rounded once: the sum in double is rounded to odd.
inline double fma_odd(double a, double b, double c) {
  double p = a * b, s = p + c;
  if (!std::isfinite(s)) return s;
  double z = s - p, err = (p - (s - z)) + (c - z);
  if (err != 0) {
    u64 v = bit_cast<u64>(s);
    if (!(v & 1)) {
      bool away = (err > 0) == (s > 0);
      v = away ? v + 1 : v - 1;
    }
    return bit_cast<double>(v);
  }
  return s;
}

inline bool is_nan(float x) { return x != x; }
inline float quiet(float x) { return bit_cast<float>(bit_cast<u32>(x) | 0x400000); }

// minNum / maxNum with -0 < +0.
inline float min_num(float a, float b) {
  bool less = a < b || (a == b && std::signbit(a));
  float r = less ? a : b;
  r = is_nan(a) ? b : r;
  return is_nan(b) ? (is_nan(a) ? quiet(a) : a) : r;
}
inline float max_num(float a, float b) {
  bool more = a > b || (a == b && !std::signbit(a));
  float r = more ? a : b;
  r = is_nan(a) ? b : r;
  return is_nan(b) ? (is_nan(a) ? quiet(a) : a) : r;
}
// IEEE 754-2019 minimum / maximum: a NaN wins.
inline float minimum(float a, float b) {
  return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : min_num(a, b);
}
inline float maximum(float a, float b) {
  return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : max_num(a, b);
}
inline float med3(float a, float b, float c) {
  if (is_nan(a) || is_nan(b) || is_nan(c)) return min_num(min_num(a, b), c);
  float m = max_num(max_num(a, b), c);
  return m == a ? max_num(b, c) : m == b ? max_num(a, c) : max_num(a, b);
}

// 2^x in double, to well under a float's half unit; vectorises.
inline float exp2_of(float x) {
  float y = x < -160.f ? -160.f : x > 130.f ? 130.f : x;
  double d = y, n = std::nearbyint(d), t = (d - n) * 0.693147180559945309417;
  double p = 1.0 / 479001600.0;
  p = p * t + 1.0 / 39916800.0;
  p = p * t + 1.0 / 3628800.0;
  p = p * t + 1.0 / 362880.0;
  p = p * t + 1.0 / 40320.0;
  p = p * t + 1.0 / 5040.0;
  p = p * t + 1.0 / 720.0;
  p = p * t + 1.0 / 120.0;
  p = p * t + 1.0 / 24.0;
  p = p * t + 1.0 / 6.0;
  p = p * t + 0.5;
  p = p * t + 1.0;
  p = p * t + 1.0;
  double s = bit_cast<double>((u64)((i64)n + 1023) << 52);
  float r = (float)(p * s);
  return is_nan(x) ? quiet(x) : r;
}

}  // namespace emu
