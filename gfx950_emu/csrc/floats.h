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
inline double sum_error(double a, double b, double s) {  // a + b - s, s being the rounded sum
  double z = s - a;
  return (a - (s - z)) + (b - z);
}
inline double fma_odd(double a, double b, double c) {
  double p = a * b, s = p + c;
  if (!std::isfinite(s)) return s;
  double err = sum_error(p, c, s);
  u64 v = bit_cast<u64>(s);
  if (err != 0 && !(v & 1)) v = (err > 0) == (s > 0) ? v + 1 : v - 1;
  return bit_cast<double>(v);
}
// a b + c - s of full doubles, s being the rounded sum; its sign is right.
inline double fma_error(double a, double b, double c, double s) {
  double p = a * b, low = std::fma(a, b, -p), x = c - s, y = x + p;
  return y + (sum_error(x, p, y) + sum_error(c, -s, x) + low);
}

inline bool is_nan(float x) { return x != x; }
inline float quiet(float x) { return bit_cast<float>(bit_cast<u32>(x) | 0x400000); }

inline bool is_nan(double x) { return x != x; }
inline double quiet(double x) { return bit_cast<double>(bit_cast<u64>(x) | 1ull << 51); }
inline bool signalling(float x) { return is_nan(x) && !(bit_cast<u32>(x) & 0x400000); }
inline bool signalling(double x) { return is_nan(x) && !(bit_cast<u64>(x) >> 51 & 1); }

// minNum / maxNum with -0 < +0. A NaN loses, except a signalling one in IEEE mode.
template <class T>
inline T min_num(T a, T b, bool ieee = false) {
  bool less = a < b || (a == b && std::signbit(a));
  T r = less ? a : b;
  r = is_nan(a) ? b : r;
  r = is_nan(b) ? (is_nan(a) ? quiet(a) : a) : r;
  r = ieee && signalling(b) ? quiet(b) : r;
  return ieee && signalling(a) ? quiet(a) : r;
}
template <class T>
inline T max_num(T a, T b, bool ieee = false) {
  bool more = a > b || (a == b && !std::signbit(a));
  T r = more ? a : b;
  r = is_nan(a) ? b : r;
  r = is_nan(b) ? (is_nan(a) ? quiet(a) : a) : r;
  r = ieee && signalling(b) ? quiet(b) : r;
  return ieee && signalling(a) ? quiet(a) : r;
}
// IEEE 754-2019 minimum / maximum: a NaN wins.
inline float minimum(float a, float b) {
  return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : min_num(a, b);
}
inline float maximum(float a, float b) {
  return is_nan(a) ? quiet(a) : is_nan(b) ? quiet(b) : max_num(a, b);
}
inline float med3(float a, float b, float c, bool ieee = false) {
  if (is_nan(a) || is_nan(b) || is_nan(c)) return min_num(min_num(a, b, ieee), c, ieee);
  float m = max_num(max_num(a, b), c);
  return m == a ? max_num(b, c) : m == b ? max_num(a, c) : max_num(a, b);
}

// The same on f16 codes: f32 copies whose NaNs still signal.
inline float f16_code(u32 h) {
  bool nan = (h & 0x7c00) == 0x7c00 && (h & 0x3ff);
  return nan ? bit_cast<float>((h & 0x8000) << 16 | 0x7f800000 | (h & 0x3ff) << 13) : f16_to_f32(h);
}
inline u32 code_f16(float x) {
  u32 b = bit_cast<u32>(x);
  return is_nan(x) ? (b >> 16 & 0x8000) | 0x7c00 | (b >> 13 & 0x3ff) : f32_to_f16(x);
}
inline bool nan16(u32 h) { return (h & 0x7fff) > 0x7c00; }
inline bool signalling16(u32 h) { return nan16(h) && !(h & 0x200); }
inline u32 order16(u32 h) { return h & 0x8000 ? 0x7fff - (h & 0x7fff) : 0x8000 | h; }  // -0 < +0
inline u32 pick16(u32 a, u32 b, u32 r, bool ieee) {
  r = nan16(a) ? b : r;
  r = nan16(b) ? (nan16(a) ? a | 0x200 : a) : r;
  r = ieee && signalling16(b) ? b | 0x200 : r;
  return ieee && signalling16(a) ? a | 0x200 : r;
}
inline u32 min16(u32 a, u32 b, bool ieee) {
  return pick16(a, b, order16(a) <= order16(b) ? a : b, ieee);
}
inline u32 max16(u32 a, u32 b, bool ieee) {
  return pick16(a, b, order16(a) >= order16(b) ? a : b, ieee);
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
