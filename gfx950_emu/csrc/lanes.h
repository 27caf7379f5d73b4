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
void commit16(Wave& w, const Inst& i, const u32* out);
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

inline bool flush32(const Wave& w) { return (w.mode >> 4 & 3) != 3; }
inline u32 flush_denorm(u32 x) { return (x & 0x7f800000) ? x : x & 0x80000000; }

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
    for (int l = 0; l < kLanes; l++)
      out.x[l] = flush_denorm(bits(f(f32(flush_denorm(a[l])), f32(flush_denorm(b[l])),
                                     f32(flush_denorm(c[l])))));
  } else {
    for (int l = 0; l < kLanes; l++) out.x[l] = bits(f(f32(a[l]), f32(b[l]), f32(c[l])));
  }
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
  for (int l = 0; l < kLanes; l++) {
    u64 r = f(join(p[0][l], p[1][l]), join(p[2][l], p[3][l]), join(p[4][l], p[5][l]));
    lo.x[l] = (u32)r, hi.x[l] = (u32)(r >> 32);
  }
  if (i.dst[0].type == T_F64 && (i.flags & F_SLOW_OUT)) {
    for (int l = 0; l < kLanes; l++) {
      double d = f64(join(lo.x[l], hi.x[l]));
      d = i.omod == 1 ? d * 2 : i.omod == 2 ? d * 4 : i.omod == 3 ? d * 0.5 : d;
      if (i.flags & F_CLAMP) d = d > 1 ? 1 : d > 0 ? d : 0;
      lo.x[l] = (u32)bits(d), hi.x[l] = (u32)(bits(d) >> 32);
    }
  }
  put(w, i.dst[0].reg, lo.x);
  if (i.dst[0].width == 2) put(w, i.dst[0].reg + 1, hi.x);
}

// 16 bits a lane, as floats.
template <class F>
void lanesh(Wave& w, const Inst& i, int n, F f) {
  Lanes ta, tb, tc, out;
  const u32* a = fetch16(w, i, 0, ta);
  const u32* b = n > 1 ? fetch16(w, i, 1, tb) : a;
  const u32* c = n > 2 ? fetch16(w, i, 2, tc) : a;
  for (int l = 0; l < kLanes; l++)
    out.x[l] = f(f16_to_f32(a[l]), f16_to_f32(b[l]), f16_to_f32(c[l]));
  commit16(w, i, out.x);
}
// 16-bit integers.
template <class F>
void lanesi16(Wave& w, const Inst& i, int n, F f) {
  Lanes ta, tb, tc, out;
  const u32* a = fetch16(w, i, 0, ta);
  const u32* b = n > 1 ? fetch16(w, i, 1, tb) : a;
  const u32* c = n > 2 ? fetch16(w, i, 2, tc) : a;
  for (int l = 0; l < kLanes; l++) out.x[l] = f(a[l], b[l], c[l]) & 0xffff;
  commit16(w, i, out.x);
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
#define OP_64(N, FORM, COUNT, E)                                                      \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanes64(w, i, COUNT,                                                              \
            [&]([[maybe_unused]] u64 a, [[maybe_unused]] u64 b,                       \
                [[maybe_unused]] u64 c) -> u64 { return E; });                        \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_H(N, FORM, COUNT, E)                                                       \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanesh(w, i, COUNT,                                                               \
           [&]([[maybe_unused]] float a, [[maybe_unused]] float b,                    \
               [[maybe_unused]] float c) -> u32 { return E; });                       \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);
#define OP_I16(N, FORM, COUNT, E)                                                     \
  static void h_##N(Wave& w, const Inst& i) {                                         \
    lanesi16(w, i, COUNT,                                                             \
             [&]([[maybe_unused]] u32 a, [[maybe_unused]] u32 b,                      \
                 [[maybe_unused]] u32 c) -> u32 { return E; });                       \
  }                                                                                   \
  static Reg r_##N(#N, FAM_VALU, FORM, h_##N);

}  // namespace emu
