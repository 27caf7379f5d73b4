// LDS: read-modify-write, exchanges of two places, counters.
#include "atomics.h"
#include "ds.h"

namespace emu {
namespace {

// The checks of an access that reads and writes; returns the lanes that may.
u64 begin_atomic(Wave& w, const u32* addr, u64 lanes, u32 bytes) {
  lanes = in_bounds(w, addr, lanes, bytes);
  check_lds_alignment(w, addr, lanes, bytes);
  mark_lds(w, addr, lanes, bytes, true, (w.pc - 1) | kAtomicAccess);
  count_banks(w, addr, lanes, bytes);
  w.launch->c.lds_read_bytes += (u64)bytes * __builtin_popcountll(lanes);
  w.launch->c.lds_write_bytes += (u64)bytes * __builtin_popcountll(lanes);
  u64 bad = undefined_lanes(w, addr, lanes, bytes);
  if (bad) report(w, FK_UNINIT_LDS, __builtin_ctzll(bad), addr[__builtin_ctzll(bad)], bytes);
  return lanes;
}
u64 lane_value(Wave& w, int reg, u32 dwords, int l) {
  return dwords == 1 ? w.reg(reg)[l] : join(w.reg(reg)[l], w.reg(reg + 1)[l]);
}
void set_lane(Wave& w, int reg, u32 dwords, int l, u64 value) {
  w.reg(reg)[l] = (u32)value;
  if (dwords == 2) w.reg(reg + 1)[l] = (u32)(value >> 32);
}
void finish(Wave& w, const Inst& i, u64 seq) {
  int reg = i.dst[0].reg, n = i.dst[0].width;
  for (int k = 0; k < n; k++) w.undef[reg + k] &= ~w.exec();
  set_tag(w, kVgprBase + reg, n, TC_DS, seq);
}
// One lane's step: the new value of what was `mem`.
template <class F>
u64 step(Wave& w, u32 addr, u32 bytes, F f) {
  u8* p = w.wg->lds.data() + addr;
  u64 mem = 0;
  memcpy(&mem, p, bytes);
  u64 v = f(mem);
  if (memcmp(&v, &mem, bytes)) w.machine->progress++;
  memcpy(p, &v, bytes);
  return mem;
}

void h_atomic(Wave& w, const Inst& i) {
  const Rmw& op = kRmw[i.extra & 0xff];
  u32 addr[kLanes], n = op.bytes / 4;
  bool rtn = i.extra >> 8;
  check_lds_address(w, i);
  lds_addresses(w, i, i.offset, addr);
  u64 seq = ++w.ds_issued, lanes = begin_atomic(w, addr, w.exec(), op.bytes);
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u64 d = lane_value(w, i.src[1].reg, n, l);
    u64 e = op.sources == 2 ? lane_value(w, i.src[2].reg, n, l) : 0;
    u64 mem = step(w, addr[l], op.bytes, [&](u64 m) { return op.fn(m, d, e); });
    if (rtn) set_lane(w, i.dst[0].reg, n, l, mem);
  }
  if (rtn) finish(w, i, seq);
}

// Two places exchanged: offset0 and offset1 in units of the element times Scale.
template <int Scale>
void h_exchange2(Wave& w, const Inst& i) {
  u32 addr[kLanes], bytes = i.extra, n = bytes / 4;
  check_lds_address(w, i);
  u64 seq = ++w.ds_issued;
  u32 old[4][kLanes];
  u64 got[2];
  for (int k = 0; k < 2; k++) {
    lds_addresses(w, i, (i32)((u32)(k ? i.offset1 : i.offset) * bytes * Scale), addr);
    got[k] = begin_atomic(w, addr, w.exec(), bytes);
    for (u64 x = got[k]; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      u64 d = lane_value(w, i.src[1 + k].reg, n, l);
      u64 mem = step(w, addr[l], bytes, [&](u64) { return d; });
      old[k * n][l] = (u32)mem;
      if (n == 2) old[k * n + 1][l] = (u32)(mem >> 32);
    }
  }
  for (int k = 0; k < 2; k++)  // last: the result may lie on the data
    for (u64 x = got[k]; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      for (u32 r = 0; r < n; r++) w.reg(i.dst[0].reg + k * n + r)[l] = old[k * n + r][l];
    }
  finish(w, i, seq);
}

// Each half is replaced by the low 31 bits of its data where the data's bit 31 is set.
void h_conditional(Wave& w, const Inst& i) {
  u32 addr[kLanes];
  check_lds_address(w, i);
  lds_addresses(w, i, i.offset, addr);
  for (u32& a : addr) a &= 0xfff8;
  u64 seq = ++w.ds_issued, lanes = begin_atomic(w, addr, w.exec(), 8);
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u64 d = lane_value(w, i.src[1].reg, 2, l);
    u64 mem = step(w, addr[l], 8, [&](u64 m) {
      u32 lo = (u32)d >> 31 ? (u32)d & 0x7fffffff : (u32)m;
      u32 hi = d >> 63 ? (u32)(d >> 32) & 0x7fffffff : (u32)(m >> 32);
      return join(lo, hi);
    });
    set_lane(w, i.dst[0].reg, 2, l, mem);
  }
  finish(w, i, seq);
}

// A counter at M0 + offset grows or shrinks by the active lanes; all get its old value.
template <bool Append>
void h_count(Wave& w, const Inst& i) {
  u32 addr[kLanes];
  if ((w.machine->checks & C_UNINIT) && w.sundef[kM0]) report(w, FK_UNINIT_ADDRESS, 0, 0);
  addr[0] = (w.s[kM0] & 0xffff) + (u32)i.offset;
  u64 seq = ++w.ds_issued, exec = w.exec();
  if (exec && begin_atomic(w, addr, 1, 4)) {
    u32 n = (u32)__builtin_popcountll(exec);
    u32 mem = (u32)step(w, addr[0], 4, [&](u64 m) { return (u32)(Append ? m + n : m - n); });
    for (u64 x = exec; x; x &= x - 1) w.reg(i.dst[0].reg)[__builtin_ctzll(x)] = mem;
  }
  finish(w, i, seq);
}

// M0 + offset + 4 * lane.
void lane_places(Wave& w, const Inst& i, u32* addr) {
  if ((w.machine->checks & C_UNINIT) && w.sundef[kM0]) report(w, FK_UNINIT_ADDRESS, 0, 0);
  for (int l = 0; l < kLanes; l++) addr[l] = (w.s[kM0] & 0xffff) + (u32)i.offset + 4 * l;
}
void h_read_addtid(Wave& w, const Inst& i) {
  u32 addr[kLanes];
  lane_places(w, i, addr);
  lds_read(w, addr, 4, DF_DWORDS, i.dst[0].reg, ++w.ds_issued);
}
void h_write_addtid(Wave& w, const Inst& i) {
  u32 addr[kLanes];
  lane_places(w, i, addr);
  lds_write(w, addr, 4, DF_DWORDS, i.src[0], ++w.ds_issued);
}

struct Table {
  Table() {
    auto add = [](std::string n, std::string form, Handler h, u32 extra) {
      Reg(n.c_str(), FAM_DS, form.c_str(), h, P_CUSTOM, extra);
    };
    for (int k = 0; k < kRmwCount; k++) {
      std::string n = kRmw[k].ds;
      if (n.empty()) continue;
      std::string b = " vb" + std::to_string(8 * kRmw[k].bytes);
      std::string rest = "vb32" + b + (kRmw[k].sources == 2 ? b : "");
      size_t cut = n.rfind('_');
      add("ds_" + n.substr(0, cut) + "_rtn" + n.substr(cut),
          "db" + std::to_string(8 * kRmw[k].bytes) + " " + rest, h_atomic, k | 256);
      if (n.compare(0, 6, "wrxchg") && n.compare(0, 4, "wrap")) add("ds_" + n, rest, h_atomic, k);
    }
    add("ds_wrxchg2_rtn_b32", "db64 vb32 vb32 vb32", h_exchange2<1>, 4);
    add("ds_wrxchg2_rtn_b64", "db128 vb32 vb64 vb64", h_exchange2<1>, 8);
    add("ds_wrxchg2st64_rtn_b32", "db64 vb32 vb32 vb32", h_exchange2<64>, 4);
    add("ds_wrxchg2st64_rtn_b64", "db128 vb32 vb64 vb64", h_exchange2<64>, 8);
    add("ds_condxchg32_rtn_b64", "db64 vb32 vb64", h_conditional, 0);
    add("ds_append", "db32", h_count<true>, 0);
    add("ds_consume", "db32", h_count<false>, 0);
    add("ds_read_addtid_b32", "db32", h_read_addtid, 0);
    add("ds_write_addtid_b32", "vb32", h_write_addtid, 0);
  }
} table;

}  // namespace
}  // namespace emu
