// Conversions to and from FP8, FP6 and FP4, plain and scaled.
//
// Scaled ones (v_cvt_scalef32_*) use only the exponent of their f32 scale: to a small format the
// source is divided by the scale, from one it is multiplied. FP16_OVFL (MODE bit 23) makes
// conversions to FP8 saturate; FP6 and FP4, with no infinity, always do.
#include "lanes.h"

namespace emu {
namespace {

bool ovfl(Wave& w) { return w.mode >> 23 & 1; }

u32 to_small(float x, const Format& f, bool sat, bool sr = false, u32 noise = 0) {
  return encode_small(x, f, sat, sr ? Round::Stochastic : Round::NearestEven, noise, sat);
}
u32 next_noise(u32 x) { return x << 1 ^ (x >> 31 ? 197u : 0u); }
double scale_of(u32 s) {
  u32 e = s >> 23 & 0xff;
  if (e == 0xff) return NAN;
  return std::ldexp(1.0, (int)e - 127);
}
// The two 16-bit halves or a whole float of a source.
enum Wide { W32, W16, WBF };
float widen(u32 x, Wide t) {
  return t == W32 ? f32(x) : t == W16 ? f16_to_f32(x & 0xffff) : bf16_to_f32(x & 0xffff);
}
u32 narrow(double x, Wide t, bool sat) {  // `sat`: FP16_OVFL
  if (t == W32) return bits((float)x);
  if (t == W16) return f64_to_f16(sat && std::isfinite(x) ? std::fmin(std::fmax(x, -65504), 65504) : x);
  return x != x ? 0x7fc0 : encode_small(x, kBf16, false);
}

// v_cvt_f32_fp8 and v_cvt_pk_f32_fp8: SDWA chooses another byte or word.
template <int Code>
void cvt_f32(Wave& w, const Inst& i) {
  Lanes ta, out;
  const u32* a = fetch(w, i, 0, ta);
  const float* t = small_tables()[Code];
  for (int l = 0; l < kLanes; l++) out.x[l] = bits(t[a[l] & 0xff]);
  commit(w, i, out.x);
}
Reg r_f32_fp8("v_cvt_f32_fp8", FAM_VALU, "df32 sb32", cvt_f32<0>);
Reg r_f32_bf8("v_cvt_f32_bf8", FAM_VALU, "df32 sb32", cvt_f32<1>);
template <int Code>
void cvt_pk_f32(Wave& w, const Inst& i) {
  Lanes ta, lo, hi;
  const u32* a = fetch(w, i, 0, ta);
  const float* t = small_tables()[Code];
  for (int l = 0; l < kLanes; l++)
    lo.x[l] = bits(t[a[l] & 0xff]), hi.x[l] = bits(t[a[l] >> 8 & 0xff]);
  put(w, i.dst[0].reg, lo.x);
  put(w, i.dst[0].reg + 1, hi.x);
}
Reg r_pk_f32_fp8("v_cvt_pk_f32_fp8", FAM_VALU, "df64 sb32", cvt_pk_f32<0>);
Reg r_pk_f32_bf8("v_cvt_pk_f32_bf8", FAM_VALU, "df64 sb32", cvt_pk_f32<1>);

// Puts `bits` bits at op_sel's place into the old destination.
void put_part(Wave& w, const Inst& i, Lanes& out, int bits_) {
  int at = bits_ == 16 ? (i.op_sel >> 3 & 1) * 16 : (i.op_sel >> 2 & 3) * 8;
  u32 mask = ((1u << bits_) - 1) << at;
  const u32* old = w.reg(i.dst[0].reg);
  for (int l = 0; l < kLanes; l++) out.x[l] = (old[l] & ~mask) | (out.x[l] << at & mask);
  put(w, i.dst[0].reg, out.x);
}

template <bool Bf>
void cvt_pk_fp8(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  const Format& f = Bf ? kBf8 : kFp8;
  bool sat = ovfl(w);
  for (int l = 0; l < kLanes; l++)
    out.x[l] = to_small(f32(a[l]), f, sat) | to_small(f32(b[l]), f, sat) << 8;
  put_part(w, i, out, 16);
}
Reg r_pk_fp8("v_cvt_pk_fp8_f32", FAM_VALU, "rb32 sf32 sf32", cvt_pk_fp8<false>);
Reg r_pk_bf8("v_cvt_pk_bf8_f32", FAM_VALU, "rb32 sf32 sf32", cvt_pk_fp8<true>);
template <bool Bf>
void cvt_sr_fp8(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  bool sat = ovfl(w);
  for (int l = 0; l < kLanes; l++)
    out.x[l] = to_small(f32(a[l]), Bf ? kBf8 : kFp8, sat, true, b[l]);
  put_part(w, i, out, 8);
}
Reg r_sr_fp8("v_cvt_sr_fp8_f32", FAM_VALU, "rb32 sf32 sb32", cvt_sr_fp8<false>);
Reg r_sr_bf8("v_cvt_sr_bf8_f32", FAM_VALU, "rb32 sf32 sb32", cvt_sr_fp8<true>);

const Format& format(int code) {
  static const Format* f[] = {&kFp8, &kBf8, &kFp6, &kBf6, &kFp4};
  return *f[code];
}

// Two f32 (two sources) or two halves of one source -> two small ones.
template <int Code, Wide T>
void scale_pk_to(Wave& w, const Inst& i) {
  Lanes ta, tb, ts, out;
  const u32* a = fetch(w, i, 0, ta);
  const u32* b = T == W32 ? fetch(w, i, 1, tb) : nullptr;
  const u32* s = fetch(w, i, T == W32 ? 2 : 1, ts);
  const Format& f = format(Code);
  bool sat = ovfl(w);
  int width = Code == 4 ? 4 : 8;
  for (int l = 0; l < kLanes; l++) {
    double k = scale_of(s[l]);
    double x = widen(a[l], T), y = T == W32 ? f32(b[l]) : widen(a[l] >> 16, T);
    out.x[l] = encode_small(x / k, f, sat, Round::NearestEven, 0, sat) |
               encode_small(y / k, f, sat, Round::NearestEven, 0, sat) << width;
  }
  put_part(w, i, out, 2 * width);
}
// One value, stochastic.
template <int Code, Wide T>
void scale_sr_to(Wave& w, const Inst& i) {
  Lanes ta, tb, ts, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb), *s = fetch(w, i, 2, ts);
  bool sat = ovfl(w);
  for (int l = 0; l < kLanes; l++)
    out.x[l] = encode_small(widen(a[l], T) / scale_of(s[l]), format(Code), sat,
                            Round::Stochastic, b[l], sat);
  put_part(w, i, out, 8);
}
// Two FP4, stochastic: source pair in one or two dwords.
template <Wide T>
void scale_sr_pk_fp4(Wave& w, const Inst& i) {
  Lanes ta, ta1, tb, ts, out;
  const u32 *a = fetch(w, i, 0, ta), *a1 = T == W32 ? fetch(w, i, 0, ta1, 1) : nullptr;
  const u32 *b = fetch(w, i, 1, tb), *s = fetch(w, i, 2, ts);
  for (int l = 0; l < kLanes; l++) {
    double k = scale_of(s[l]);
    double x = widen(a[l], T), y = T == W32 ? f32(a1[l]) : widen(a[l] >> 16, T);
    out.x[l] = encode_small(x / k, kFp4, true, Round::Stochastic, b[l], true) |
               encode_small(y / k, kFp4, true, Round::Stochastic, next_noise(b[l]), true) << 4;
  }
  put_part(w, i, out, 8);
}
// Two small ones -> two f32 or one dword of halves.
template <int Code, Wide T>
void scale_pk_from(Wave& w, const Inst& i) {
  Lanes ta, ts, lo, hi;
  const u32 *a = fetch(w, i, 0, ta), *s = fetch(w, i, 1, ts);
  const float* t = small_tables()[Code];
  int width = Code == 4 ? 4 : 8;
  int at = Code == 4 ? ((i.op_sel & 1) | (i.op_sel & 2)) * 8 : (i.op_sel & 1) * 16;
  u32 mask = (1u << width) - 1;
  const bool sat = ovfl(w);
  for (int l = 0; l < kLanes; l++) {
    double k = scale_of(s[l]);
    u32 x = a[l] >> at;
    lo.x[l] = narrow(t[x & mask] * k, T, sat);
    hi.x[l] = narrow(t[x >> width & mask] * k, T, sat);
  }
  if (T == W32) {
    put(w, i.dst[0].reg, lo.x);
    put(w, i.dst[0].reg + 1, hi.x);
  } else {
    for (int l = 0; l < kLanes; l++) lo.x[l] |= hi.x[l] << 16;
    put(w, i.dst[0].reg, lo.x);
  }
}
// One byte -> f32, or a half at op_sel's place.
template <int Code, Wide T>
void scale_from(Wave& w, const Inst& i) {
  Lanes ta, ts, out;
  const u32 *a = fetch(w, i, 0, ta), *s = fetch(w, i, 1, ts);
  const float* t = small_tables()[Code];
  int at = (i.op_sel & 3) * 8;
  for (int l = 0; l < kLanes; l++)
    out.x[l] = narrow(t[a[l] >> at & 0xff] * scale_of(s[l]), T, ovfl(w));
  if (T == W32) put(w, i.dst[0].reg, out.x);
  else put_part(w, i, out, 16);
}
#define PAIR_SR(N, C, T, SRC) Reg EMU_CAT(r_sr_, __COUNTER__)("v_cvt_scalef32_sr_" N, FAM_VALU, "rb32 " SRC " sb32 sf32", scale_sr_to<C, T>);
#define PAIR_PK(N, C, T, FORM) Reg EMU_CAT(r_pk_, __COUNTER__)("v_cvt_scalef32_pk_" N, FAM_VALU, FORM, scale_pk_to<C, T>);
#define FROM_PK(N, C, T, DST) Reg EMU_CAT(r_fp_, __COUNTER__)("v_cvt_scalef32_pk_" N, FAM_VALU, DST " sb32 sf32", scale_pk_from<C, T>);
#define FROM_1(N, C, T, DST) Reg EMU_CAT(r_f1_, __COUNTER__)("v_cvt_scalef32_" N, FAM_VALU, DST " sb32 sf32", scale_from<C, T>);
PAIR_PK("fp8_f32", 0, W32, "rb32 sf32 sf32 sf32")
PAIR_PK("bf8_f32", 1, W32, "rb32 sf32 sf32 sf32")
PAIR_PK("fp4_f32", 4, W32, "rb32 sf32 sf32 sf32")
PAIR_PK("fp8_f16", 0, W16, "rb32 sb32 sf32")
PAIR_PK("bf8_f16", 1, W16, "rb32 sb32 sf32")
PAIR_PK("fp4_f16", 4, W16, "rb32 sb32 sf32")
PAIR_PK("fp8_bf16", 0, WBF, "rb32 sb32 sf32")
PAIR_PK("bf8_bf16", 1, WBF, "rb32 sb32 sf32")
PAIR_PK("fp4_bf16", 4, WBF, "rb32 sb32 sf32")
PAIR_SR("fp8_f32", 0, W32, "sf32")
PAIR_SR("bf8_f32", 1, W32, "sf32")
PAIR_SR("fp8_f16", 0, W16, "sb32")
PAIR_SR("bf8_f16", 1, W16, "sb32")
PAIR_SR("fp8_bf16", 0, WBF, "sb32")
PAIR_SR("bf8_bf16", 1, WBF, "sb32")
Reg r_sr_pk4a("v_cvt_scalef32_sr_pk_fp4_f32", FAM_VALU, "rb32 sb64 sb32 sf32", scale_sr_pk_fp4<W32>);
Reg r_sr_pk4b("v_cvt_scalef32_sr_pk_fp4_f16", FAM_VALU, "rb32 sb32 sb32 sf32", scale_sr_pk_fp4<W16>);
Reg r_sr_pk4c("v_cvt_scalef32_sr_pk_fp4_bf16", FAM_VALU, "rb32 sb32 sb32 sf32", scale_sr_pk_fp4<WBF>);
FROM_PK("f32_fp8", 0, W32, "df64")
FROM_PK("f32_bf8", 1, W32, "df64")
FROM_PK("f32_fp4", 4, W32, "df64")
FROM_PK("f16_fp8", 0, W16, "db32")
FROM_PK("f16_bf8", 1, W16, "db32")
FROM_PK("f16_fp4", 4, W16, "db32")
FROM_PK("bf16_fp8", 0, WBF, "db32")
FROM_PK("bf16_bf8", 1, WBF, "db32")
FROM_PK("bf16_fp4", 4, WBF, "db32")
FROM_1("f32_fp8", 0, W32, "db32")
FROM_1("f32_bf8", 1, W32, "db32")
FROM_1("f16_fp8", 0, W16, "rb32")
FROM_1("f16_bf8", 1, W16, "rb32")

// 32 values at once, six bits each.
u32 six(const u32* words, int n) {
  int bit = 6 * n, w = bit >> 5, s = bit & 31;
  u64 pair = words[w] | (w + 1 < 6 ? (u64)words[w + 1] << 32 : 0);
  return pair >> s & 63;
}
void set_six(u32* words, int n, u32 v) {
  int bit = 6 * n, w = bit >> 5, s = bit & 31;
  words[w] |= v << s;
  if (s > 26) words[w + 1] |= v >> (32 - s);
}
template <int Code, Wide T>
void pk32_from(Wave& w, const Inst& i) {
  Lanes ts;
  const u32* s = fetch(w, i, 1, ts);
  const float* t = small_tables()[Code];
  int per = T == W32 ? 1 : 2;
  std::vector<Lanes> out(32 / per);
  for (int l = 0; l < kLanes; l++) {
    u32 words[6];
    for (int k = 0; k < 6; k++) words[k] = w.reg(i.src[0].reg + k)[l];
    double k = scale_of(s[l]);
    for (int n = 0; n < 32; n++) {
      u32 v = narrow(t[six(words, n)] * k, T, ovfl(w));
      if (T == W32) out[n].x[l] = v;
      else if (n & 1) out[n / 2].x[l] |= v << 16;
      else out[n / 2].x[l] = v;
    }
  }
  for (size_t k = 0; k < out.size(); k++) put(w, i.dst[0].reg + k, out[k].x);
}
// Source k-th value of a lane; for two f32 sources they alternate.
template <int Code, Wide T, bool Sr, bool Two>
void pk32_to(Wave& w, const Inst& i) {
  Lanes tb, ts, out[6];
  const u32* noise = Sr ? fetch(w, i, 1, tb) : nullptr;
  const u32* s = fetch(w, i, (Sr || Two) ? 2 : 1, ts);
  for (int l = 0; l < kLanes; l++) {
    u32 words[6] = {0}, r = Sr ? noise[l] : 0;
    double k = scale_of(s[l]);
    for (int n = 0; n < 32; n++) {
      float x;
      if (Two) x = f32(w.reg(i.src[n & 1].reg + n / 2)[l]);
      else if (T == W32) x = f32(w.reg(i.src[0].reg + n)[l]);
      else x = widen(w.reg(i.src[0].reg + n / 2)[l] >> (16 * (n & 1)), T);
      set_six(words, n, encode_small(x / k, format(Code), true,
                                     Sr ? Round::Stochastic : Round::NearestEven, r, true));
      if (Sr) r = next_noise(r);
    }
    for (int q = 0; q < 6; q++) out[q].x[l] = words[q];
  }
  for (int q = 0; q < 6; q++) put(w, i.dst[0].reg + q, out[q].x);
}
#define SIX(NAME, C)                                                                           \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_pk32_f32_" NAME, FAM_VALU, "db1024 sb192 sf32", pk32_from<C, W32>); \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_pk32_f16_" NAME, FAM_VALU, "db512 sb192 sf32", pk32_from<C, W16>);  \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_pk32_bf16_" NAME, FAM_VALU, "db512 sb192 sf32", pk32_from<C, WBF>); \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_2xpk16_" NAME "_f32", FAM_VALU, "db192 sb512 sb512 sf32", pk32_to<C, W32, false, true>); \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_sr_pk32_" NAME "_f32", FAM_VALU, "db192 sb1024 sb32 sf32", pk32_to<C, W32, true, false>); \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_pk32_" NAME "_f16", FAM_VALU, "db192 sb512 sf32", pk32_to<C, W16, false, false>); \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_pk32_" NAME "_bf16", FAM_VALU, "db192 sb512 sf32", pk32_to<C, WBF, false, false>); \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_sr_pk32_" NAME "_f16", FAM_VALU, "db192 sb512 sb32 sf32", pk32_to<C, W16, true, false>); \
  Reg EMU_CAT(r_six_, __COUNTER__)("v_cvt_scalef32_sr_pk32_" NAME "_bf16", FAM_VALU, "db192 sb512 sb32 sf32", pk32_to<C, WBF, true, false>);
SIX("fp6", 2)
SIX("bf6", 3)

}  // namespace
}  // namespace emu
