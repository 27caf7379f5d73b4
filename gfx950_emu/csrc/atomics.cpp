#include "atomics.h"

#include "floats.h"

namespace emu {
namespace {

template <class T>
u64 add_float(u64 m, u64 d, u64) {
  using I = std::conditional_t<sizeof(T) == 4, u32, u64>;
  return (u64)bit_cast<I>((T)(bit_cast<T>((I)m) + bit_cast<T>((I)d)));
}
template <class T, bool Max>
u64 pick_float(u64 m, u64 d, u64) {
  using I = std::conditional_t<sizeof(T) == 4, u32, u64>;
  T a = bit_cast<T>((I)m), b = bit_cast<T>((I)d);
  if (a != a) return d;
  if (b != b) return m;
  return (Max ? b > a : b < a) ? d : m;
}
u64 pk_f16(u64 m, u64 d, u64) {
  u32 lo = f32_to_f16(f16_to_f32(m & 0xffff) + f16_to_f32(d & 0xffff));
  u32 hi = f32_to_f16(f16_to_f32(m >> 16 & 0xffff) + f16_to_f32(d >> 16 & 0xffff));
  return lo | hi << 16;
}
u64 pk_bf16(u64 m, u64 d, u64) {
  u32 lo = f32_to_bf16(bf16_to_f32(m & 0xffff) + bf16_to_f32(d & 0xffff));
  u32 hi = f32_to_bf16(bf16_to_f32(m >> 16 & 0xffff) + bf16_to_f32(d >> 16 & 0xffff));
  return lo | hi << 16;
}
#define FN(E) [](u64 m, u64 d, u64 e) -> u64 { (void)m, (void)d, (void)e; return E; }
#define I32(x) ((i32)(u32)(x))
#define U32(x) ((u32)(x))

}  // namespace

const Rmw kRmw[] = {
    {"swap", "wrxchg_b32", 4, 1, FN(d)},
    {"cmpswap", "", 4, 2, FN(U32(m) == U32(e) ? d : m)},
    {"add", "add_u32", 4, 1, FN(U32(m + d))},
    {"sub", "sub_u32", 4, 1, FN(U32(m - d))},
    {"smin", "min_i32", 4, 1, FN(I32(d) < I32(m) ? d : m)},
    {"umin", "min_u32", 4, 1, FN(U32(d) < U32(m) ? d : m)},
    {"smax", "max_i32", 4, 1, FN(I32(d) > I32(m) ? d : m)},
    {"umax", "max_u32", 4, 1, FN(U32(d) > U32(m) ? d : m)},
    {"and", "and_b32", 4, 1, FN(m & d)},
    {"or", "or_b32", 4, 1, FN(m | d)},
    {"xor", "xor_b32", 4, 1, FN(m ^ d)},
    {"inc", "inc_u32", 4, 1, FN(U32(m) >= U32(d) ? 0 : m + 1)},
    {"dec", "dec_u32", 4, 1, FN(U32(m) == 0 || U32(m) > U32(d) ? d : m - 1)},
    {"", "rsub_u32", 4, 1, FN(U32(d - m))},
    {"", "cmpst_b32", 4, 2, FN(U32(m) == U32(d) ? e : m)},
    {"", "cmpst_f32", 4, 2,
     FN(bit_cast<float>(U32(m)) == bit_cast<float>(U32(d)) ? e : m)},
    {"", "mskor_b32", 4, 2, FN((m & ~d) | e)},
    {"", "wrap_b32", 4, 2, FN(U32(m) >= U32(d) ? U32(m - d) : U32(m + e))},
    {"add_f32", "add_f32", 4, 1, add_float<float>},
    {"pk_add_f16", "pk_add_f16", 4, 1, pk_f16},
    {"pk_add_bf16", "pk_add_bf16", 4, 1, pk_bf16},
    {"", "min_f32", 4, 1, pick_float<float, false>},
    {"", "max_f32", 4, 1, pick_float<float, true>},
    {"add_f64", "add_f64", 8, 1, add_float<double>},
    {"min_f64", "min_f64", 8, 1, pick_float<double, false>},
    {"max_f64", "max_f64", 8, 1, pick_float<double, true>},
    {"swap_x2", "wrxchg_b64", 8, 1, FN(d)},
    {"cmpswap_x2", "", 8, 2, FN(m == e ? d : m)},
    {"add_x2", "add_u64", 8, 1, FN(m + d)},
    {"sub_x2", "sub_u64", 8, 1, FN(m - d)},
    {"smin_x2", "min_i64", 8, 1, FN((i64)d < (i64)m ? d : m)},
    {"umin_x2", "min_u64", 8, 1, FN(d < m ? d : m)},
    {"smax_x2", "max_i64", 8, 1, FN((i64)d > (i64)m ? d : m)},
    {"umax_x2", "max_u64", 8, 1, FN(d > m ? d : m)},
    {"and_x2", "and_b64", 8, 1, FN(m & d)},
    {"or_x2", "or_b64", 8, 1, FN(m | d)},
    {"xor_x2", "xor_b64", 8, 1, FN(m ^ d)},
    {"inc_x2", "inc_u64", 8, 1, FN(m >= d ? 0 : m + 1)},
    {"dec_x2", "dec_u64", 8, 1, FN(m == 0 || m > d ? d : m - 1)},
    {"", "rsub_u64", 8, 1, FN(d - m)},
    {"", "cmpst_b64", 8, 2, FN(m == d ? e : m)},
    {"", "cmpst_f64", 8, 2, FN(bit_cast<double>(m) == bit_cast<double>(d) ? e : m)},
    {"", "mskor_b64", 8, 2, FN((m & ~d) | e)},
};
const int kRmwCount = sizeof kRmw / sizeof kRmw[0];

}  // namespace emu
