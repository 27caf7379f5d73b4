// Matrix operands in registers.
#pragma once
#include "lanes.h"

namespace emu {

enum Elem { E_F32, E_F16, E_BF16, E_I8, E_F64, E_FP8, E_BF8, E_F8F6F4 };

inline int elem_bytes(Elem e) {
  return e == E_F64 ? 8 : e == E_F32 ? 4 : e == E_F16 || e == E_BF16 ? 2 : 1;
}

// Element `n` of each lane's registers.
template <Elem E>
void elements(Wave& w, int reg, int n, float* out) {
  if constexpr (E == E_F32) {
    const u32* p = w.reg(reg + n);
    for (int l = 0; l < kLanes; l++) out[l] = f32(p[l]);
  } else if constexpr (E == E_F16) {
    const u32* p = w.reg(reg + n / 2);
    alignas(64) u32 h[kLanes];
    for (int l = 0; l < kLanes; l++) h[l] = p[l] >> (16 * (n & 1)) & 0xffff;
    f16_lanes(h, out);
  } else if constexpr (E == E_BF16) {
    const u32* p = w.reg(reg + n / 2);
    if (n & 1)
      for (int l = 0; l < kLanes; l++) out[l] = f32(p[l] & 0xffff0000);
    else
      for (int l = 0; l < kLanes; l++) out[l] = f32(p[l] << 16);
  } else {
    const u32* p = w.reg(reg + n / 4);
    int shift = 8 * (n & 3);
    const float* t = small_tables()[E == E_BF8 ? 1 : 0];
    for (int l = 0; l < kLanes; l++) {
      u32 b = p[l] >> shift & 0xff;
      out[l] = E == E_I8 ? (float)(i8)b : t[b];
    }
  }
}

// Rows of D: register r of lane l.
inline int d_row(int m, int l, int r) {
  return m == 32 ? 8 * (r / 4) + 4 * (l / 32) + r % 4 : m == 16 ? 4 * (l / 16) + r % 4 : r % 4;
}

// Any undefined input spoils the whole result.
void undef_result(Wave& w, const Inst& i);

}  // namespace emu
