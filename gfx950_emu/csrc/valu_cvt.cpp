// Conversions between 16, 32 and 64-bit numbers.
#include "lanes.h"

namespace emu {
namespace {

u32 to_u32(double x) { return x != x || x <= 0 ? 0 : x >= 4294967295.0 ? ~0u : (u32)x; }
u32 to_i32(double x) {
  return x != x ? 0 : x >= 2147483647.0 ? 0x7fffffffu : x <= -2147483648.0 ? 0x80000000u
                                                                           : (u32)(i32)x;
}
u32 to_u16(float x) { return x != x || x <= 0 ? 0 : x >= 65535.f ? 65535 : (u32)x; }
u32 to_i16(float x) {
  return (x != x ? 0 : x >= 32767.f ? 32767 : x <= -32768.f ? -32768 : (i32)x) & 0xffff;
}
u32 snorm16(float x) {
  if (x != x) return 0;
  x = x > 1 ? 1 : x < -1 ? -1 : x;
  return (u32)(i32)std::nearbyint(x * 32767.0) & 0xffff;
}
u32 unorm16(float x) {
  if (x != x) return 0;
  x = x > 1 ? 1 : x < 0 ? 0 : x;
  return (u32)std::nearbyint(x * 65535.0);
}
u32 f16_rtz(float x) {
  u32 b = bits(x);
  if ((b & 0x7fffffff) > 0x7f800000) return (b >> 16 & 0x8000) | 0x7e00;
  return encode_small(x, kF16, false, Round::Zero);
}
// MODE's rounding of 16-bit results.
u32 f16_by_mode(const FloatMode& m, u32 round, float x) {
  u32 r;
  if (round == 0) r = f32_to_f16(x);
  else if (x != x) r = (bits(x) >> 16 & 0x8000) | 0x7e00;
  else
    r = encode_small(x, kF16, false,
                     round == 1 ? Round::Up : round == 2 ? Round::Down : Round::Zero);
  return m.result16(r, std::isfinite(x));
}
// f32 sources and f16 results, denormals by MODE.
template <class F>
void from32(Wave& w, const Inst& i, F f) {
  const FloatMode m(w);
  lanes2(w, i, [&](u32 a, u32 b) {
    return f(m, f32(m.read32(a))) | f(m, f32(m.read32(b))) << 16;
  });
}

OP_U1(v_cvt_f32_i32, "df32 sb32", bits((float)(i32)a))
OP_U1(v_cvt_f32_u32, "df32 sb32", bits((float)a))
OP_U1(v_cvt_u32_f32, "db32 sf32", to_u32(f32(a)))
OP_U1(v_cvt_i32_f32, "db32 sf32", to_i32(f32(a)))
OP_U1(v_cvt_rpi_i32_f32, "db32 sf32", to_i32(std::floor((double)f32(a) + 0.5)))
OP_U1(v_cvt_flr_i32_f32, "db32 sf32", to_i32(std::floor(f32(a))))
OP_U1(v_cvt_f32_ubyte0, "df32 sb32", bits((float)(a & 0xff)))
OP_U1(v_cvt_f32_ubyte1, "df32 sb32", bits((float)(a >> 8 & 0xff)))
OP_U1(v_cvt_f32_ubyte2, "df32 sb32", bits((float)(a >> 16 & 0xff)))
OP_U1(v_cvt_f32_ubyte3, "df32 sb32", bits((float)(a >> 24)))
OP_U1(v_cvt_off_f32_i4, "df32 sb32", bits((float)((i32)(a << 28) >> 28) / 16.f))
OP_64(v_cvt_i32_f64, "db32 sf64", 1, to_i32(f64(a)))
OP_64(v_cvt_u32_f64, "db32 sf64", 1, to_u32(f64(a)))
OP_64(v_cvt_f64_i32, "df64 sb32", 1, bits((double)(i32)(u32)a))
OP_64(v_cvt_f64_u32, "df64 sb32", 1, bits((double)(u32)a))
OP_64(v_cvt_f64_f32, "df64 sf32", 1, bits((double)f32(FloatMode(w).read32((u32)a))))
void h_f32_f64(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 0, tb, 1);
  const FloatMode m(w);
  for (int l = 0; l < kLanes; l++)
    out.x[l] = m.write32(bits((float)f64(m.read64(join(a[l], b[l])))));
  commit(w, i, out.x);
}
Reg r_f32_f64("v_cvt_f32_f64", FAM_VALU, "df32 sf64", h_f32_f64);

void h_pkrtz(Wave& w, const Inst& i) {
  from32(w, i, [](const FloatMode& m, float x) { return m.write16(f16_rtz(x)); });
}
Reg r_pkrtz("v_cvt_pkrtz_f16_f32", FAM_VALU, "db32 sf32 sf32", h_pkrtz);
void h_pk_f16(Wave& w, const Inst& i) {
  const FloatMode mode(w);
  if (mode.in32 && mode.out16 && !mode.ovfl)
    return lanes2(w, i, [](u32 a, u32 b) { return f32_to_f16(f32(a)) | f32_to_f16(f32(b)) << 16; });
  from32(w, i, [](const FloatMode& m, float x) {
    return m.result16(f32_to_f16(x), std::isfinite(x));
  });
}
Reg r_pk_f16("v_cvt_pk_f16_f32", FAM_VALU, "db32 sf32 sf32", h_pk_f16);
OP_U2(v_cvt_pk_bf16_f32, "db32 sf32 sf32", f32_to_bf16(f32(a)) | f32_to_bf16(f32(b)) << 16)
OP_U2(v_cvt_pknorm_i16_f32, "db32 sf32 sf32", snorm16(f32(a)) | snorm16(f32(b)) << 16)
OP_U2(v_cvt_pknorm_u16_f32, "db32 sf32 sf32", unorm16(f32(a)) | unorm16(f32(b)) << 16)

u32 to_u8(float x) { return x != x || x <= 0 ? 0 : x >= 255 ? 255 : (u32)x; }
u32 pack_u8(float x, u32 which, u32 old) {
  int s = 8 * (which & 3);
  return (old & ~(0xffu << s)) | to_u8(x) << s;
}
OP_U3(v_cvt_pk_u8_f32, "db32 sf32 sb32 sb32", pack_u8(f32(a), b, c))

void h_f16_f32(Wave& w, const Inst& i) {
  Lanes ta, out;
  const u32* a = fetch(w, i, 0, ta);
  const FloatMode m(w);
  const u32 round = w.mode >> 2 & 3;
  if (round == 0 && !m.ovfl && m.in32 && m.out16)
    for (int l = 0; l < kLanes; l++) out.x[l] = f32_to_f16(f32(a[l]));
  else
    for (int l = 0; l < kLanes; l++) out.x[l] = f16_by_mode(m, round, f32(m.read32(a[l])));
  commit16(w, i, out.x);
}
Reg r_f16_f32("v_cvt_f16_f32", FAM_VALU, "df16 sf32", h_f16_f32);

template <class F>
void from16(Wave& w, const Inst& i, F f) {
  Lanes ta, out;
  const u32* a = fetch16(w, i, 0, ta);
  for (int l = 0; l < kLanes; l++) out.x[l] = f(a[l]);
  commit(w, i, out.x);
}
void h_f32_f16(Wave& w, const Inst& i) {
  const FloatMode m(w);
  from16(w, i, [&](u32 a) { return bits(f16_to_f32(m.read16(a))); });
}
Reg r_f32_f16("v_cvt_f32_f16", FAM_VALU, "df32 sf16", h_f32_f16);
void h_f32_bf16(Wave& w, const Inst& i) {
  from16(w, i, [](u32 a) { return a << 16; });
}
Reg r_f32_bf16("v_cvt_f32_bf16", FAM_VALU, "df32 sbf16", h_f32_bf16);

OP_I16(v_cvt_f16_u16, "df16 sb16", 1, FloatMode(w).result16(f32_to_f16((float)a), true))
OP_I16(v_cvt_f16_i16, "df16 sb16", 1, f32_to_f16((float)(i16)a))
OP_H(v_cvt_u16_f16, "db16 sf16", 1, to_u16(a))
OP_H(v_cvt_i16_f16, "db16 sf16", 1, to_i16(a))
OP_HK(v_cvt_norm_i16_f16, "db16 sf16", 1, snorm16(a))
OP_HK(v_cvt_norm_u16_f16, "db16 sf16", 1, unorm16(a))

template <class F>
void pack2_16(Wave& w, const Inst& i, F f) {
  Lanes ta, tb, out;
  const u32 *a = fetch16(w, i, 0, ta), *b = fetch16(w, i, 1, tb);
  for (int l = 0; l < kLanes; l++)
    out.x[l] = f(f16_to_f32(a[l])) | f(f16_to_f32(b[l])) << 16;
  put(w, i.dst[0].reg, out.x);
}
void h_pknorm_i16(Wave& w, const Inst& i) { pack2_16(w, i, snorm16); }
void h_pknorm_u16(Wave& w, const Inst& i) { pack2_16(w, i, unorm16); }
Reg r_pknorm_i16("v_cvt_pknorm_i16_f16", FAM_VALU, "db32 sf16 sf16", h_pknorm_i16);
Reg r_pknorm_u16("v_cvt_pknorm_u16_f16", FAM_VALU, "db32 sf16 sf16", h_pknorm_u16);

// Stochastic rounding to 16 bits: 'b' holds the random bits; the highest count.
template <bool Bf>
void sr16(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  const Format& f = Bf ? kBf16 : kF16;
  const FloatMode m(w);
  for (int l = 0; l < kLanes; l++) {
    float x = f32(a[l]);
    if (x != x) out.x[l] = (a[l] >> 31) << 15 | f.nan_code;
    else out.x[l] = encode_small(x, f, !Bf && m.ovfl, Round::Stochastic, b[l]);
  }
  const u32* old = w.reg(i.dst[0].reg);
  for (int l = 0; l < kLanes; l++)
    out.x[l] = i.op_sel & 8 ? (old[l] & 0xffff) | out.x[l] << 16
                            : (old[l] & 0xffff0000) | out.x[l];
  put(w, i.dst[0].reg, out.x);
}
Reg r_sr_f16("v_cvt_sr_f16_f32", FAM_VALU, "rb32 sf32 sb32", sr16<false>);
Reg r_sr_bf16("v_cvt_sr_bf16_f32", FAM_VALU, "rb32 sf32 sb32", sr16<true>);

}  // namespace
}  // namespace emu
