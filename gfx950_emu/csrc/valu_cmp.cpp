// Vector comparisons: a bit for each lane in an SGPR pair; v_cmpx also writes EXEC.
#include "lanes.h"

namespace emu {
namespace {

template <class T>
T load_as(u32 lo, u32 hi) {
  if constexpr (std::is_same_v<T, float>) return f32(lo);
  else if constexpr (std::is_same_v<T, double>) return f64(join(lo, hi));
  else if constexpr (sizeof(T) == 8) return (T)join(lo, hi);
  else return (T)lo;
}

struct F16 {};

template <class T, bool X, class F>
void compare(Wave& w, const Inst& i, F f) {
  Lanes ta, tb, tc, td;
  u64 mask = 0;
  if constexpr (std::is_same_v<T, F16>) {
    const u32 *a = fetch16(w, i, 0, ta), *b = fetch16(w, i, 1, tb);
    const FloatMode m(w);
    for (int l = 0; l < kLanes; l++)
      mask |= (u64)f(f16_to_f32(m.read16(a[l])), f16_to_f32(m.read16(b[l]))) << l;
  } else if constexpr (sizeof(T) == 2) {
    const u32 *a = fetch16(w, i, 0, ta), *b = fetch16(w, i, 1, tb);
    for (int l = 0; l < kLanes; l++) mask |= (u64)f((T)a[l], (T)b[l]) << l;
  } else {
    const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb), *a1 = a, *b1 = b;
    if (sizeof(T) == 8) a1 = fetch(w, i, 0, tc, 1), b1 = fetch(w, i, 1, td, 1);
    u8 r[kLanes];
    const FloatMode m(w);
    if (std::is_same_v<T, double> && !m.in16) {
      for (int l = 0; l < kLanes; l++) {
        u64 x = flush64(join(a[l], a1[l])), y = flush64(join(b[l], b1[l]));
        r[l] = f(load_as<T>((u32)x, (u32)(x >> 32)), load_as<T>((u32)y, (u32)(y >> 32)));
      }
    } else if (std::is_same_v<T, float> && !m.in32) {
      for (int l = 0; l < kLanes; l++)
        r[l] = f(load_as<T>(flush_denorm(a[l]), a1[l]), load_as<T>(flush_denorm(b[l]), b1[l]));
    } else {
      for (int l = 0; l < kLanes; l++) r[l] = f(load_as<T>(a[l], a1[l]), load_as<T>(b[l], b1[l]));
    }
    for (int l = 0; l < kLanes; l += 8) {
      u64 x;
      memcpy(&x, r + l, 8);
      mask |= ((x * 0x0102040810204080ull) >> 56) << l;
    }
  }
  mask &= w.exec();
  write_scalar64(w, i.dst[0].reg, mask);
  if (X) w.exec() = mask;
}

template <class T>
bool unord(T a, T b) {
  return a != a || b != b;
}

#define CMP(N, T, FORM, E)                                                                   \
  void h_##N(Wave& w, const Inst& i) {                                                       \
    compare<T, false>(w, i, []([[maybe_unused]] auto a, [[maybe_unused]] auto b) { return E; }); \
  }                                                                                          \
  Reg r_v_cmp_##N("v_cmp_" #N, FAM_VALU, FORM, h_##N);                                       \
  void x_##N(Wave& w, const Inst& i) {                                                       \
    compare<T, true>(w, i, []([[maybe_unused]] auto a, [[maybe_unused]] auto b) { return E; }); \
  }                                                                                          \
  Reg r_v_cmpx_##N("v_cmpx_" #N, FAM_VALU, FORM, x_##N);

#define CMP_FLOAT(S, T, FORM)                                                  \
  CMP(f_##S, T, FORM, false)                                                   \
  CMP(lt_##S, T, FORM, a < b)                                                  \
  CMP(eq_##S, T, FORM, a == b)                                                 \
  CMP(le_##S, T, FORM, a <= b)                                                 \
  CMP(gt_##S, T, FORM, a > b)                                                  \
  CMP(lg_##S, T, FORM, a < b || a > b)                                         \
  CMP(ge_##S, T, FORM, a >= b)                                                 \
  CMP(o_##S, T, FORM, !unord(a, b))                                            \
  CMP(u_##S, T, FORM, unord(a, b))                                             \
  CMP(nge_##S, T, FORM, !(a >= b))                                             \
  CMP(nlg_##S, T, FORM, !(a < b || a > b))                                     \
  CMP(ngt_##S, T, FORM, !(a > b))                                              \
  CMP(nle_##S, T, FORM, !(a <= b))                                             \
  CMP(neq_##S, T, FORM, !(a == b))                                             \
  CMP(nlt_##S, T, FORM, !(a < b))                                              \
  CMP(tru_##S, T, FORM, true)
#define CMP_INT(S, T, FORM)                                                    \
  CMP(f_##S, T, FORM, false)                                                   \
  CMP(lt_##S, T, FORM, a < b)                                                  \
  CMP(eq_##S, T, FORM, a == b)                                                 \
  CMP(le_##S, T, FORM, a <= b)                                                 \
  CMP(gt_##S, T, FORM, a > b)                                                  \
  CMP(ne_##S, T, FORM, a != b)                                                 \
  CMP(ge_##S, T, FORM, a >= b)                                                 \
  CMP(t_##S, T, FORM, true)

CMP_FLOAT(f32, float, "m sf32 sf32")
CMP_FLOAT(f64, double, "m sf64 sf64")
CMP_FLOAT(f16, F16, "m sf16 sf16")
CMP_INT(i32, i32, "m sb32 sb32")
CMP_INT(u32, u32, "m sb32 sb32")
CMP_INT(i64, i64, "m sb64 sb64")
CMP_INT(u64, u64, "m sb64 sb64")
CMP_INT(i16, i16, "m sb16 sb16")
CMP_INT(u16, u16, "m sb16 sb16")

// One bit of ten for each value, as v_cmp_class wants.
int float_class(int sign, u32 exp, u32 top, bool mant, bool quiet_bit) {
  if (exp == top && mant) return quiet_bit ? 1 : 0;
  if (exp == top) return sign ? 2 : 9;
  if (exp) return sign ? 3 : 8;
  if (mant) return sign ? 4 : 7;
  return sign ? 5 : 6;
}
int class32(u32 x) {
  return float_class(x >> 31, x >> 23 & 0xff, 0xff, x & 0x7fffff, x >> 22 & 1);
}
int class16(u32 x) {
  return float_class(x >> 15 & 1, x >> 10 & 0x1f, 0x1f, x & 0x3ff, x >> 9 & 1);
}
int class64(u64 x) {
  return float_class(x >> 63, x >> 52 & 0x7ff, 0x7ff, x & 0xfffffffffffffull, x >> 51 & 1);
}
template <int Bits, bool X>
void classify(Wave& w, const Inst& i) {
  Lanes ta, tb, tc;
  u64 mask = 0;
  const u32* b = fetch(w, i, 1, tb);
  if (Bits == 16) {
    const u32* a = fetch16(w, i, 0, ta);
    for (int l = 0; l < kLanes; l++) mask |= (u64)(b[l] >> class16(a[l]) & 1) << l;
  } else if (Bits == 32) {
    const u32* a = fetch(w, i, 0, ta);
    for (int l = 0; l < kLanes; l++) mask |= (u64)(b[l] >> class32(a[l]) & 1) << l;
  } else {
    const u32 *a = fetch(w, i, 0, ta), *a1 = fetch(w, i, 0, tc, 1);
    for (int l = 0; l < kLanes; l++)
      mask |= (u64)(b[l] >> class64(join(a[l], a1[l])) & 1) << l;
  }
  mask &= w.exec();
  write_scalar64(w, i.dst[0].reg, mask);
  if (X) w.exec() = mask;
}
Reg r_class32("v_cmp_class_f32", FAM_VALU, "m sf32 sb32", classify<32, false>);
Reg r_class32x("v_cmpx_class_f32", FAM_VALU, "m sf32 sb32", classify<32, true>);
Reg r_class16("v_cmp_class_f16", FAM_VALU, "m sf16 sb32", classify<16, false>);
Reg r_class16x("v_cmpx_class_f16", FAM_VALU, "m sf16 sb32", classify<16, true>);
Reg r_class64("v_cmp_class_f64", FAM_VALU, "m sf64 sb32", classify<64, false>);
Reg r_class64x("v_cmpx_class_f64", FAM_VALU, "m sf64 sb32", classify<64, true>);

}  // namespace
}  // namespace emu
