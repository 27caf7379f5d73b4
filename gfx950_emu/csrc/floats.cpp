#include "floats.h"

#include <cstring>

namespace emu {

float decode_small(u32 code, const Format& f) {
  u32 mant = code & ((1u << f.m) - 1), exp = code >> f.m & ((1u << f.e) - 1);
  bool neg = code >> (f.e + f.m) & 1;
  u32 top = (1u << f.e) - 1;
  double x;
  if (f.has_inf && exp == top) {
    if (mant) {
      u32 q = (neg ? 0xffc00000u : 0x7fc00000u) | mant << (23 - f.m);
      return bit_cast<float>(q);
    }
    x = INFINITY;
  } else if (f.has_nan && !f.has_inf && exp == top && mant == (1u << f.m) - 1) {
    return bit_cast<float>(neg ? 0xffc00000u : 0x7fc00000u);
  } else if (exp == 0) {
    x = std::ldexp((double)mant, 1 - f.bias - f.m);
  } else {
    x = std::ldexp((double)(mant | 1u << f.m), (int)exp - f.bias - f.m);
  }
  return (float)(neg ? -x : x);
}

u32 encode_small(double x, const Format& f, bool saturate, Round round, u32 noise,
                 bool saturate_inf) {
  u64 b = bit_cast<u64>(x);
  u32 sign = (u32)(b >> 63) << (f.e + f.m);
  int exp = (int)(b >> 52 & 0x7ff);
  u64 mant = b & ((1ull << 52) - 1);
  if (exp == 0x7ff && mant) {  // NaN: FP6 and FP4 have none and take the largest
    return f.has_nan ? sign | f.nan_code : sign | f.max_code;
  }
  if (exp == 0x7ff) {
    if (saturate_inf || !f.has_nan) return sign | f.max_code;
    return sign | (f.has_inf ? f.inf_code : f.nan_code);
  }
  if (exp == 0) return sign;  // doubles that small round to zero in every format here
  mant |= 1ull << 52;
  int e = exp - 1023;
  // Bits dropped: 52 - m for a normal result, more for a denormal one.
  int drop = 52 - f.m, low = 1 - f.bias;
  if (e < low) drop += low - e;
  u64 kept;
  if (drop > 62) {
    bool inc = round == Round::Up ? !sign : round == Round::Down ? sign != 0 : false;
    if (round == Round::Stochastic) inc = drop < 96 && (mant >> (drop - 32)) + noise >> 32;
    kept = inc ? 1 : 0;
  } else {
    u64 rest = mant & ((1ull << drop) - 1), half = 1ull << (drop - 1);
    kept = mant >> drop;
    bool inc = false;
    switch (round) {
      case Round::NearestEven: inc = rest > half || (rest == half && (kept & 1)); break;
      case Round::Up: inc = rest && !sign; break;
      case Round::Down: inc = rest && sign; break;
      case Round::Zero: break;
      case Round::Stochastic: {
        u64 n = drop >= 32 ? (u64)noise << (drop - 32) : (u64)noise >> (32 - drop);
        inc = rest + n >= (1ull << drop);
        break;
      }
    }
    kept += inc;
  }
  u32 code;
  if (e < low) {
    code = (u32)kept;  // a carry into the exponent gives the smallest normal number
  } else {
    i64 c = ((i64)(e + f.bias) << f.m) + (i64)(kept - (1ull << f.m));
    code = c > 0x7fffffff ? 0x7fffffff : (u32)c;
  }
  if (code > f.max_code) {
    bool to_max = saturate || !f.has_nan ||
                  (round == Round::Zero || (round == Round::Up && sign) ||
                   (round == Round::Down && !sign));
    code = to_max ? f.max_code : f.has_inf ? f.inf_code : f.nan_code;
  }
  return sign | code;
}

u32 f64_to_f16(double x) {
  if (x != x) return (u32)(bit_cast<u64>(x) >> 63) << 15 | 0x7e00;
  return encode_small(x, kF16, false);
}

namespace {
struct Tables {
  float t[5][256];
  Tables() {
    const Format* f[5] = {&kFp8, &kBf8, &kFp6, &kBf6, &kFp4};
    for (int k = 0; k < 5; k++)
      for (u32 c = 0; c < 256; c++) {
        u32 mask = (1u << (1 + f[k]->e + f[k]->m)) - 1;
        t[k][c] = decode_small(c & mask, *f[k]);
      }
  }
} tables;
}  // namespace

const float (*small_tables())[256] { return tables.t; }

}  // namespace emu
