// Operands of vector instructions as arrays of 64 lanes, and writing results back under EXEC.
#pragma once
#include <cmath>

#include "floats.h"
#include "optable.h"

namespace emu {

struct Lanes {
  alignas(64) u32 x[kLanes];
};

u32 read_special(Wave&, u16 which);
u64 read_scalar64(Wave&, const Operand&);
u32 read_scalar(Wave&, const Operand&);
void write_scalar(Wave&, int reg, u32 value);
void write_scalar64(Wave&, int reg, u64 value);

// Fills `tmp` with dword `part` of the operand: DPP, SDWA, neg, abs, sext applied.
const u32* fetch_slow(Wave&, const Inst&, int k, int part, Lanes& tmp);

inline const u32* fetch(Wave& w, const Inst& i, int k, Lanes& tmp, int part = 0) {
  const Operand& o = i.src[k];
  if (o.kind == K_VGPR && (i.flags & F_PLAIN)) return w.reg(o.reg + part);
  return fetch_slow(w, i, k, part, tmp);
}

// Undefined lanes of the first source after DPP moved them.
u64 dpp_undef(Wave& w, const Inst& i, u64 undef);

// 16 bits a lane: the half that op_sel names, in the low bits.
const u32* fetch16(Wave& w, const Inst& i, int k, Lanes& tmp);

void commit(Wave& w, const Inst& i, const u32* out, int part = 0);
// `keep`: the half that is not written stays (the 16-bit VOP3 instructions that GFX9 added).
void commit16(Wave& w, const Inst& i, const u32* out, bool keep = false);
void commit_slow(Wave& w, const Inst& i, Lanes& out);

inline void put(Wave& w, int reg, const u32* out) {
  u32* d = w.reg(reg);
  if (w.wmask == ~0ull) {
    memcpy(d, out, kLanes * 4);
  } else {
    const u32* m = w.mask_lanes(w.wmask);
    for (int l = 0; l < kLanes; l++) d[l] = (out[l] & m[l]) | (d[l] & ~m[l]);
  }
}

inline float f32(u32 x) { return bit_cast<float>(x); }
inline u32 bits(float x) { return bit_cast<u32>(x); }
inline double f64(u64 x) { return bit_cast<double>(x); }
inline u64 bits(double x) { return bit_cast<u64>(x); }
inline u64 join(u32 lo, u32 hi) { return (u64)hi << 32 | lo; }

inline u32 flush_denorm(u32 x) { return (x & 0x7f800000) ? x : x & 0x80000000; }
inline u32 flush16(u32 x) { return (x & 0x7c00) ? x : x & 0x8000; }
inline u64 flush64(u64 x) { return (x << 1 >> 53) ? x : x & (1ull << 63); }
inline bool infinite16(u32 x) { return (x & 0x7fff) == 0x7c00; }

// MODE: what float instructions do with denormals, NaNs and overflows.
struct FloatMode {
  bool in32, out32, in16, out16;  // denormals kept; the 16-bit flags hold for f64 too
  bool dx10_clamp;                // clamp makes a NaN 0
  bool ieee;                      // a signalling NaN wins in min and max; no omod
  bool ovfl;                      // FP16_OVFL: f16 results saturate unless a source was infinite
  explicit FloatMode(const Wave& w)
      : in32(w.mode >> 4 & 1), out32(w.mode >> 5 & 1), in16(w.mode >> 6 & 1),
        out16(w.mode >> 7 & 1), dx10_clamp(w.mode >> 8 & 1), ieee(w.mode >> 9 & 1),
        ovfl(w.mode >> 23 & 1) {}
  bool plain16() const { return in16 && out16 && !ovfl; }
  u32 read32(u32 x) const { return in32 ? x : flush_denorm(x); }
  u32 write32(u32 x) const { return out32 ? x : flush_denorm(x); }
  u32 read16(u32 x) const { return in16 ? x : flush16(x); }
  u32 write16(u32 x) const { return out16 ? x : flush16(x); }
  u64 read64(u64 x) const { return in16 ? x : flush64(x); }
  u64 write64(u64 x) const { return out16 ? x : flush64(x); }
  // The f16 result `r`; `finite`: it comes from finite sources and no division by zero.
  u32 result16(u32 r, bool finite) const {
    if (ovfl && finite && infinite16(r)) r -= 1;
    return write16(r);
  }
  template <class T>
  T clamp(T x) const {
    return x > 1 ? T(1) : x > 0 ? x : !dx10_clamp && x != x ? x : T(0);
  }
};
inline bool flush32(const Wave& w) { return (w.mode >> 4 & 3) != 3; }
inline float omod_factor(u8 omod) { return omod == 1 ? 2.f : omod == 2 ? 4.f : .5f; }

// A definition of one instruction each; `a`, `b`, `c` are its sources.
#define EMU_CAT_(a, b) a##b
#define EMU_CAT(a, b) EMU_CAT_(a, b)

template <class F>
void lanes1(Wave& w, const Inst& i, F f) {
  Lanes ta, out;
  const u32* a = fetch(w, i, 0, ta);
  for (int l = 0; l < kLanes; l++) out.x[l] = f(a[l]);
  commit(w, i, out.x);
}
template <class F>
void lanes2(Wave& w, const Inst& i, F f) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  for (int l = 0; l < kLanes; l++) out.x[l] = f(a[l], b[l]);
  commit(w, i, out.x);
}
template <class F>
void lanes3(Wave& w, const Inst& i, F f) {
  Lanes ta, tb, tc, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb), *c = fetch(w, i, 2, tc);
  for (int l = 0; l < kLanes; l++) out.x[l] = f(a[l], b[l], c[l]);
  commit(w, i, out.x);
}

// 32-bit floats: denormals flushed when MODE says so.
template <class F>
void lanesf(Wave& w, const Inst& i, int n, F f) {
  Lanes ta, tb, tc, out;
  const u32* a = fetch(w, i, 0, ta);
  const u32* b = n > 1 ? fetch(w, i, 1, tb) : a;
  const u32* c = n > 2 ? fetch(w, i, 2, tc) : a;
  if (__builtin_expect(flush32(w), 0)) {
    const FloatMode m(w);
    for (int l = 0; l < kLanes; l++)
      out.x[l] = m.write32(bits(f(f32(m.read32(a[l])), f32(m.read32(b[l])), f32(m.read32(c[l])))));
  } else {
    for (int l = 0; l < kLanes; l++) out.x[l] = bits(f(f32(a[l]), f32(b[l]), f32(c[l])));
  }
  commit(w, i, out.x);
}

// omod, clamp and the flushing of denormals of an f64 result.
inline u64 finish64(const FloatMode& m, const Inst& i, u64 r) {
  if (i.flags & F_SLOW_OUT) {
    double d = f64(r);
    if (i.omod && !m.ieee && !m.out16) {
      d *= omod_factor(i.omod);
      if (d == 0 || std::fabs(d) < 0x1p-1022) d = 0;
    }
    r = bits(i.flags & F_CLAMP ? m.clamp(d) : d);
  }
  return m.write64(r);
}

// Transcendental f32 instructions: they flush denormals in every mode.
template <class F>
void lanest(Wave& w, const Inst& i, F f) {
  Lanes ta, out;
  const u32* a = fetch(w, i, 0, ta);
  for (int l = 0; l < kLanes; l++) out.x[l] = flush_denorm(bits(f(f32(flush_denorm(a[l])))));
  commit(w, i, out.x);
}

// 64 bits a lane.
template <class F>
void lanes64(Wave& w, const Inst& i, int n, F f) {
  Lanes t[6], lo, hi;
  const u32* p[6];
  for (int k = 0; k < 3; k++) {
    int kk = k < n ? k : 0;
    if (k < n) {
      p[2 * k] = fetch(w, i, kk, t[2 * k]);
      p[2 * k + 1] = i.src[kk].width == 2 ? fetch(w, i, kk, t[2 * k + 1], 1) : p[2 * k];
    } else {
      p[2 * k] = p[0], p[2 * k + 1] = p[1];
    }
  }
  const FloatMode m(w);
  if (m.in16 && m.out16 && !(i.flags & F_SLOW_OUT)) {
    for (int l = 0; l < kLanes; l++) {
      u64 r = f(join(p[0][l], p[1][l]), join(p[2][l], p[3][l]), join(p[4][l], p[5][l]));
      lo.x[l] = (u32)r, hi.x[l] = (u32)(r >> 32);
    }
  } else {
    auto source = [&](int k, int l) {
      u64 x = join(p[2 * k][l], p[2 * k + 1][l]);
      return i.src[k].type == T_F64 ? m.read64(x) : x;
    };
    for (int l = 0; l < kLanes; l++) {
      u64 r = f(source(0, l), source(1, l), source(2, l));
      if (i.dst[0].type == T_F64) r = finish64(m, i, r);
      lo.x[l] = (u32)r, hi.x[l] = (u32)(r >> 32);
    }
  }
  put(w, i.dst[0].reg, lo.x);
  if (i.dst[0].width == 2) put(w, i.dst[0].reg + 1, hi.x);
}

// 16 bits a lane, as floats.
template <class F>
void lanesh(Wave& w, const Inst& i, int n, F f, bool keep = false) {
  Lanes ta, tb, tc, out;
  const u32* a = fetch16(w, i, 0, ta);
  const u32* b = n > 1 ? fetch16(w, i, 1, tb) : a;
  const u32* c = n > 2 ? fetch16(w, i, 2, tc) : a;
  const FloatMode m(w);
  if (m.plain16()) {
    for (int l = 0; l < kLanes; l++)
      out.x[l] = f(f16_to_f32(a[l]), f16_to_f32(b[l]), f16_to_f32(c[l]));
    return commit16(w, i, out.x, keep);
  }
  const bool is_float = i.dst[0].type == T_F16;
  for (int l = 0; l < kLanes; l++) {
    float x = f16_to_f32(m.read16(a[l])), y = f16_to_f32(m.read16(b[l])),
          z = f16_to_f32(m.read16(c[l]));
    u32 r = f(x, y, z);
    bool pole = n == 1 && x == 0;  // 1/0, log 0
    out.x[l] = is_float ? m.result16(r, !pole && std::isfinite(x + y + z)) : r;
  }
  commit16(w, i, out.x, keep);
}
// 16-bit integers.
template <class F>
void lanesi16(Wave& w, const Inst& i, int n, F f, bool keep = false) {
  Lanes ta, tb, tc, out;
  const u32* a = fetch16(w, i, 0, ta);
  const u32* b = n > 1 ? fetch16(w, i, 1, tb) : a;
  const u32* c = n > 2 ? fetch16(w, i, 2, tc) : a;
  for (int l = 0; l < kLanes; l++) out.x[l] = f(a[l], b[l], c[l]) & 0xffff;
  commit16(w, i, out.x, keep);
}
// 16-bit floats as codes: signalling NaNs do not survive a conversion to f32.
template <class F>
void lanesh_codes(Wave& w, const Inst& i, int n, F f, bool keep = false) {
  const FloatMode m(w);
  lanesi16(
      w, i, n,
      [&](u32 a, u32 b, u32 c) {
        return m.write16(f(m.read16(a), m.read16(b), m.read16(c), m.ieee));
      },
      keep);
}

// NAME, form, body: the body is an expression of a, b, c.
#define OP_U1(N, FORM, E)                                                             \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanes1(w, i, [&](u32 a) -> u32 { return E; });                                    \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_U2(N, FORM, E)                                                             \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanes2(w, i, [&](u32 a, u32 b) -> u32 { return E; });                             \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_U3(N, FORM, E)                                                             \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanes3(w, i, [&](u32 a, u32 b, u32 c) -> u32 { return E; });                      \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_F(N, FORM, COUNT, E)                                                       \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanesf(w, i, COUNT,                                                               \
           [&]([[maybe_unused]] float a, [[maybe_unused]] float b,                    \
               [[maybe_unused]] float c) -> float { return E; });                     \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_T(N, FORM, E)                                                              \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanest(w, i, [&](float a) -> float { return E; });                                \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_64(N, FORM, COUNT, E)                                                      \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanes64(w, i, COUNT,                                                              \
            [&]([[maybe_unused]] u64 a, [[maybe_unused]] u64 b,                       \
                [[maybe_unused]] u64 c) -> u64 { return E; });                        \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
// KEEP: the other half of the destination stays.
#define OP_16(N, FORM, COUNT, KEEP, LANES, T, E)                                      \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    LANES(w, i, COUNT,                                                                \
          [&]([[maybe_unused]] T a, [[maybe_unused]] T b,                             \
              [[maybe_unused]] T c) -> u32 { return E; }, KEEP);                      \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_H(N, FORM, COUNT, E) OP_16(N, FORM, COUNT, false, lanesh, float, E)
#define OP_HK(N, FORM, COUNT, E) OP_16(N, FORM, COUNT, true, lanesh, float, E)
#define OP_I16(N, FORM, COUNT, E) OP_16(N, FORM, COUNT, false, lanesi16, u32, E)
#define OP_I16K(N, FORM, COUNT, E) OP_16(N, FORM, COUNT, true, lanesi16, u32, E)
#define OP_HCODE(N, FORM, COUNT, KEEP, E)                                             \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanesh_codes(w, i, COUNT,                                                         \
                 [&](u32 a, u32 b, [[maybe_unused]] u32 c, bool ieee) -> u32 { return E; }, \
                 KEEP);                                                               \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);

}  // namespace emu
