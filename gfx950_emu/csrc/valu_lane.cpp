// Instructions that cross lanes, and those between VGPRs and SGPRs.
#include "lanes.h"

namespace emu {
namespace {

int first_lane(u64 exec) { return exec ? __builtin_ctzll(exec) : 0; }

void set_scalar(Wave& w, const Inst& i, int lane) {
  const Operand& o = i.src[0];
  if (o.kind != K_VGPR) return write_scalar(w, i.dst[0].reg, read_scalar(w, o));
  write_scalar(w, i.dst[0].reg, w.reg(o.reg)[lane]);
  if (w.undef[o.reg] >> lane & 1) w.sundef[i.dst[0].reg] = ~0u;
}
void h_readfirstlane(Wave& w, const Inst& i) { set_scalar(w, i, first_lane(w.exec())); }
void h_readlane(Wave& w, const Inst& i) { set_scalar(w, i, read_scalar(w, i.src[1]) & 63); }
void h_writelane(Wave& w, const Inst& i) {
  int lane = read_scalar(w, i.src[1]) & 63;
  w.reg(i.dst[0].reg)[lane] = read_scalar(w, i.src[0]);
  u64 bit = 1ull << lane;
  if (sgpr_undef(w, i.src[0])) w.undef[i.dst[0].reg] |= bit;
  else w.undef[i.dst[0].reg] &= ~bit;
}
Reg r_rfl("v_readfirstlane_b32", FAM_VALU, "x sb32", h_readfirstlane, P_CUSTOM);
Reg r_rl("v_readlane_b32", FAM_VALU, "x sb32 sb32", h_readlane, P_CUSTOM);
Reg r_wl("v_writelane_b32", FAM_VALU, "rb32 sb32 sb32", h_writelane, P_CUSTOM);

void h_mbcnt_lo(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  for (int l = 0; l < kLanes; l++) {
    u32 below = l >= 32 ? ~0u : (1u << l) - 1;
    out.x[l] = __builtin_popcount(a[l] & below) + b[l];
  }
  commit(w, i, out.x);
}
void h_mbcnt_hi(Wave& w, const Inst& i) {
  Lanes ta, tb, out;
  const u32 *a = fetch(w, i, 0, ta), *b = fetch(w, i, 1, tb);
  for (int l = 0; l < kLanes; l++) {
    u32 below = l >= 32 ? (1u << (l - 32)) - 1 : 0;
    out.x[l] = __builtin_popcount(a[l] & below) + b[l];
  }
  commit(w, i, out.x);
}
Reg r_mb_lo("v_mbcnt_lo_u32_b32", FAM_VALU, "db32 sb32 sb32", h_mbcnt_lo);
Reg r_mb_hi("v_mbcnt_hi_u32_b32", FAM_VALU, "db32 sb32 sb32", h_mbcnt_hi);

void h_swap(Wave& w, const Inst& i) {
  int a = i.dst[0].reg, b = i.src[0].reg;
  Lanes x, y;
  memcpy(x.x, w.reg(a), sizeof x.x);
  memcpy(y.x, w.reg(b), sizeof y.x);
  put(w, a, y.x);
  put(w, b, x.x);
  u64 m = w.exec(), u = w.undef[a], v = w.undef[b];
  w.undef[a] = (u & ~m) | (v & m);
  w.undef[b] = (v & ~m) | (u & m);
}
Reg r_swap("v_swap_b32", FAM_VALU, "rb32 wb32", h_swap, P_CUSTOM);

// Rows of the destination at the odd places trade with rows of the source at the even ones.
template <int Row>
void permlane_swap(Wave& w, const Inst& i) {
  int dr = i.dst[0].reg, sr = i.src[0].reg;
  u32 *d = w.reg(dr), *s = w.reg(sr);
  u64 exec = w.exec();
  for (int base = 0; base < kLanes; base += 2 * Row)
    for (int l = 0; l < Row; l++) {
      int x = base + l + Row, y = base + l;  // d[x] <-> s[y]
      if (exec >> x & exec >> y & 1) {
        std::swap(d[x], s[y]);
        u64 ud = w.undef[dr] >> x & 1, us = w.undef[sr] >> y & 1;
        w.undef[dr] = (w.undef[dr] & ~(1ull << x)) | us << x;
        w.undef[sr] = (w.undef[sr] & ~(1ull << y)) | ud << y;
      }
    }
}
Reg r_pl16("v_permlane16_swap_b32", FAM_VALU, "rb32 wb32", permlane_swap<16>, P_CUSTOM);
Reg r_pl32("v_permlane32_swap_b32", FAM_VALU, "rb32 wb32", permlane_swap<32>, P_CUSTOM);

}  // namespace
}  // namespace emu
