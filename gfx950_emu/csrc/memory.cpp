// Regions, wait counters, and stores and LDS DMA that take effect late.
#include <algorithm>

#include "vmem.h"

namespace emu {

const Region* Machine::find(u64 addr, u64 size) {
  if (last && addr - last->base < last->size && size <= last->size - (addr - last->base))
    return last;
  auto it = std::upper_bound(regions.begin(), regions.end(), addr,
                             [](u64 a, const Region& r) { return a < r.base; });
  if (it == regions.begin()) return nullptr;
  --it;
  if (addr - it->base >= it->size || size > it->size - (addr - it->base)) return nullptr;
  last = &*it;
  return last;
}

void set_tag(Wave& w, int reg, int count, int cls, u64 seq) {
  if (!(w.machine->checks & C_WAIT)) return;
  for (int k = 0; k < count; k++) w.tag[reg + k] = (u64)cls << 62 | seq;
}

// The counter has 6 bits: a wave stalls before its 64th access in flight, so that the oldest is done.
// Compilers know, and leave that wait out.
u64 next_vm(Wave& w) {
  constexpr u64 kMost = 63;
  ++w.vm_issued;
  if (w.vm_issued - w.vm_done > kMost) w.vm_done = w.vm_issued - kMost;
  return w.vm_issued;
}

u64 usable_lanes(Wave& w, const u64* addr, u64 lanes, u32 bytes, bool write) {
  if (!lanes) return 0;
  Machine& m = *w.machine;
  u64 lo = ~0ull, hi = 0;
  for (u64 x = lanes; x; x &= x - 1) {
    u64 a = addr[__builtin_ctzll(x)];
    lo = a < lo ? a : lo;
    hi = a > hi ? a : hi;
  }
  u32 want = write ? 2 : 1;
  const Region* r = hi - lo < (1ull << 40) ? m.find(lo, hi - lo + bytes) : nullptr;
  if (r && (r->perms & want)) {
    touch_lanes(w, r, addr, lanes, bytes, lo, hi + bytes - 1, write);
    return lanes;
  }
  u64 good = 0;
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    r = m.find(addr[l], bytes);
    if (r && (r->perms & want)) {
      touch_lanes(w, r, addr, 1ull << l, bytes, addr[l], addr[l] + bytes - 1, write);
      good |= 1ull << l;
    } else {
      report(w, write ? FK_OOB_WRITE : FK_OOB_READ, l, addr[l], bytes);
    }
  }
  return good;
}

namespace {

void apply(Machine& m, const DeferredStore& s) {
  const u8* data = s.data.data();
  bool changed = false;
  for (u64 x = s.lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u8* to = reinterpret_cast<u8*>(s.addr[l]);
    changed |= memcmp(to, data + l * s.bytes, s.bytes) != 0;
    copy_memory(to, data + l * s.bytes, s.bytes);
  }
  if (changed) m.progress++;
  scope_write(m, s.who, s.addr, s.lanes, s.bytes);
}

void range_of(const DeferredStore& s, u64& lo, u64& hi) {
  lo = ~0ull, hi = 0;
  for (u64 x = s.lanes; x; x &= x - 1) {
    u64 a = s.addr[__builtin_ctzll(x)];
    lo = std::min(lo, a), hi = std::max(hi, a + s.bytes);
  }
}

void apply(Wave& w, const DeferredDma& d) {
  Workgroup& g = *w.wg;
  for (u64 x = d.lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    memcpy(&g.lds[d.lds[l]], d.data.data() + l * d.bytes, d.bytes);
    memset(&g.lds_def[d.lds[l]], 1, d.bytes);
  }
  mark_lds(w, d.lds, d.lanes, d.bytes, true, d.pc_index);
}

}  // namespace

void drain_vm(Wave& w, u64 upto) {
  size_t n = 0;
  while (n < w.stores.size() && w.stores[n].seq <= upto) apply(*w.machine, w.stores[n++]);
  if (n) w.stores.erase(w.stores.begin(), w.stores.begin() + n);
  n = 0;
  for (; n < w.write_backs.size() && w.write_backs[n].seq <= upto; n++)
    scope_write_back(w, w.write_backs[n].level, w.write_backs[n].issued);
  if (n) w.write_backs.erase(w.write_backs.begin(), w.write_backs.begin() + n);
  n = 0;
  while (n < w.dmas.size() && w.dmas[n].seq <= upto) apply(w, w.dmas[n++]);
  if (n) w.dmas.erase(w.dmas.begin(), w.dmas.begin() + n);
}

void drain_overlap(Wave& w, const u64* addr, u64 lanes, u32 bytes) {
  if (w.stores.empty() || !lanes) return;
  u64 lo = ~0ull, hi = 0;
  for (u64 x = lanes; x; x &= x - 1) {
    u64 a = addr[__builtin_ctzll(x)];
    lo = std::min(lo, a), hi = std::max(hi, a + bytes);
  }
  u64 upto = 0;
  for (auto& s : w.stores) {
    u64 a, b;
    range_of(s, a, b);
    if (a < hi && lo < b) upto = s.seq;
  }
  size_t n = 0;
  while (n < w.stores.size() && w.stores[n].seq <= upto) apply(*w.machine, w.stores[n++]);
  w.stores.erase(w.stores.begin(), w.stores.begin() + n);
}

// A write buffer empties by itself, in any order that keeps overlapping stores in sequence.
void drain_some(Machine& m, std::vector<DeferredStore>& stores) {
  std::vector<std::pair<u64, u64>> kept;
  size_t out = 0;
  for (size_t n = 0; n < stores.size(); n++) {
    DeferredStore& s = stores[n];
    u64 lo, hi;
    range_of(s, lo, hi);
    bool hold = (m.rng.next() & 1) && m.quantum - s.born < 64;
    for (auto& k : kept) hold |= lo < k.second && k.first < hi;
    if (hold) {
      kept.push_back({lo, hi});
      if (out != n) stores[out] = std::move(s);
      out++;
    } else {
      apply(m, s);
    }
  }
  stores.resize(out);
}

void drain_orphans(Machine& m, Launch& l) {
  for (auto& s : l.orphans) apply(m, s);
  l.orphans.clear();
}

// The end of a wave does not wait for its stores; write-backs that it did not wait for count for
// nothing until the launch ends.
void drain_all(Wave& w) {
  auto& o = w.launch->orphans;
  for (auto& s : w.stores) o.push_back(std::move(s));
  w.stores.clear();
  w.write_backs.clear();
  drain_vm(w, ~0ull);
  w.ds_open.clear();
}

void wait_counters(Wave& w, u32 vm, u32 lgkm) {
  if (vm != 255) {
    if (w.vm_issued - w.vm_done > vm) w.vm_done = w.vm_issued - vm;
    if (vm == 0) w.flat_vm = w.flat_issued;
    if (!w.stores.empty() || !w.dmas.empty() || !w.write_backs.empty()) drain_vm(w, w.vm_done);
  }
  if (lgkm != 255) {
    if (w.ds_issued - w.ds_done > lgkm) w.ds_done = w.ds_issued - lgkm;
    if (lgkm == 0) w.smem_done = w.smem_issued, w.flat_lgkm = w.flat_issued;
    size_t n = 0;
    while (n < w.ds_open.size() && w.ds_open[n].seq <= w.ds_done) n++;
    if (n) w.ds_open.erase(w.ds_open.begin(), w.ds_open.begin() + n);
  }
  w.flat_done = std::min(w.flat_vm, w.flat_lgkm);
}

}  // namespace emu
