// Scalar memory: loads through the constant cache, clocks, cache control.
#include <algorithm>

#include "vmem.h"

namespace emu {
namespace {

void load(Wave& w, const Inst& i, u64 addr, u64 limit, bool limited) {
  Machine& m = *w.machine;
  int n = i.dst[0].width, reg = i.dst[0].reg;
  if ((addr & 3) && (m.checks & C_ALIGN)) report(w, FK_MISALIGNED, 0, addr, 4);
  addr &= ~3ull;
  w.launch->c.smem_bytes += 4 * n;
  u64 seq = ++w.smem_issued;
  u32 inside = limited ? (u32)std::min<u64>(4 * n, limit > addr ? (limit - addr) & ~3ull : 0) : 4 * n;
  if (inside) scope_scalar_read(w, addr, inside);
  for (int k = 0; k < n; k++) {
    u64 a = addr + 4 * k;
    u32 value = 0;
    if (!limited || a + 4 <= limit) {
      if (const Region* r = m.find(a, 4)) {
        memcpy(&value, reinterpret_cast<void*>(a), 4);
        if (k == 0 || !(a & 127)) {
          touch_line(w, r->line0 + (a >> 7) - (r->base >> 7), false);
          w.launch->c.read_lines_instructions++;
        }
      } else {
        report(w, FK_OOB_READ, 0, a, 4);
      }
    }
    write_scalar(w, reg + k, value);
  }
  set_tag(w, reg, n, TC_SMEM, seq);
}
bool undef_address(Wave& w, const Inst& i) {
  if (!(w.machine->checks & C_UNINIT)) return false;
  for (int k = 0; k < 2; k++)
    if (sgpr_undef(w, i.src[k])) {
      report(w, FK_UNINIT_ADDRESS, 0, 0);
      return true;
    }
  return false;
}
void h_load(Wave& w, const Inst& i) {
  undef_address(w, i);
  load(w, i, read_scalar64(w, i.src[0]) + (u64)(i64)i.offset + read_scalar(w, i.src[1]), 0, false);
}
void h_buffer_load(Wave& w, const Inst& i) {
  undef_address(w, i);
  u64 base = read_scalar64(w, i.src[0]) & 0xffffffffffffull;
  u32 stride = w.s[i.src[0].reg + 1] >> 16 & 0x3fff, records = w.s[i.src[0].reg + 2];
  u64 limit = base + (stride ? (u64)stride * records : records);
  u64 off = (u32)i.offset + (u64)read_scalar(w, i.src[1]);
  load(w, i, base + off, limit, true);
}
const char* kLoad[] = {"dword", "dwordx2", "dwordx3", "dwordx4", "dwordx8", "dwordx16"};
const int kSizes[] = {1, 2, 3, 4, 8, 16};
struct Loads {
  Loads() {
    for (int k = 0; k < 6; k++) {
      std::string d = "xb" + std::to_string(32 * kSizes[k]);
      Reg((std::string("s_load_") + kLoad[k]).c_str(), FAM_SMEM, (d + " sb64 o").c_str(), h_load,
          P_CUSTOM);
      Reg((std::string("s_buffer_load_") + kLoad[k]).c_str(), FAM_SMEM, (d + " sb128 o").c_str(),
          h_buffer_load, P_CUSTOM);
    }
  }
} loads;

void clock_read(Wave& w, const Inst& i, u64 value) {
  w.used_clock = true;
  write_scalar64(w, i.dst[0].reg, value);
  set_tag(w, i.dst[0].reg, 2, TC_SMEM, ++w.smem_issued);
}
void h_memtime(Wave& w, const Inst& i) { clock_read(w, i, w.machine->clock); }
void h_memrealtime(Wave& w, const Inst& i) { clock_read(w, i, w.machine->clock / 24); }
Reg r_time("s_memtime", FAM_SMEM, "xb64", h_memtime, P_CUSTOM);
Reg r_real("s_memrealtime", FAM_SMEM, "xb64", h_memrealtime, P_CUSTOM);
void h_inv(Wave& w, const Inst&) { scope_scalar_invalidate(w); }
void h_write_back(Wave&, const Inst&) {}  // there are no scalar stores
Reg r_inv("s_dcache_inv", FAM_SMEM, "", h_inv, P_CUSTOM);
Reg r_wb("s_dcache_wb", FAM_SMEM, "", h_write_back, P_CUSTOM);
Reg r_invv("s_dcache_inv_vol", FAM_SMEM, "", h_inv, P_CUSTOM);
Reg r_wbv("s_dcache_wb_vol", FAM_SMEM, "", h_write_back, P_CUSTOM);

}  // namespace
}  // namespace emu
