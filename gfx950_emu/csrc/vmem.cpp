// Vector memory: lanes that load, store, do atomics or fill LDS, whatever their addresses come from.
#include "vmem.h"

#include "atomics.h"

namespace emu {

const MemoryForm kLoadForms[14] = {
    {"ubyte", 1, DF_U8}, {"sbyte", 1, DF_I8}, {"ushort", 2, DF_U16}, {"sshort", 2, DF_I16},
    {"dword", 4, DF_DWORDS}, {"dwordx2", 8, DF_DWORDS}, {"dwordx3", 12, DF_DWORDS},
    {"dwordx4", 16, DF_DWORDS}, {"ubyte_d16", 1, DF_U8_D16}, {"ubyte_d16_hi", 1, DF_U8_D16_HI},
    {"sbyte_d16", 1, DF_I8_D16}, {"sbyte_d16_hi", 1, DF_I8_D16_HI}, {"short_d16", 2, DF_D16},
    {"short_d16_hi", 2, DF_D16_HI}};
const MemoryForm kStoreForms[8] = {
    {"byte", 1, DF_U8}, {"byte_d16_hi", 1, DF_U8_D16_HI}, {"short", 2, DF_U16},
    {"short_d16_hi", 2, DF_D16_HI}, {"dword", 4, DF_DWORDS}, {"dwordx2", 8, DF_DWORDS},
    {"dwordx3", 12, DF_DWORDS}, {"dwordx4", 16, DF_DWORDS}};

void put_loaded(Wave& w, int reg, int l, const u8* from, u32 bytes, Form form) {
  if (form == DF_DWORDS) {
    for (u32 k = 0; k < bytes / 4; k++) memcpy(&w.reg(reg + k)[l], from + 4 * k, 4);
    return;
  }
  u16 h = from[0];
  if (bytes == 2) memcpy(&h, from, 2);
  u32& d = w.reg(reg)[l];
  switch (form) {
    case DF_I8: d = (u32)(i32)(i8)h; break;
    case DF_I16: d = (u32)(i32)(i16)h; break;
    case DF_U8_D16: case DF_D16: d = (d & 0xffff0000) | h; break;
    case DF_U8_D16_HI: case DF_D16_HI: d = (d & 0xffff) | (u32)h << 16; break;
    case DF_I8_D16: d = (d & 0xffff0000) | (u16)(i16)(i8)h; break;
    case DF_I8_D16_HI: d = (d & 0xffff) | (u32)(u16)(i16)(i8)h << 16; break;
    default: d = h;
  }
}
void take_stored(Wave& w, int reg, int l, u8* to, u32 bytes, Form form) {
  if (form == DF_DWORDS) {
    for (u32 k = 0; k < bytes / 4; k++) memcpy(to + 4 * k, &w.reg(reg + k)[l], 4);
    return;
  }
  u32 x = w.reg(reg)[l];
  if (form == DF_D16_HI || form == DF_U8_D16_HI) x >>= 16;
  memcpy(to, &x, bytes);
}

void check_memory_address(Wave& w, const Inst& i) {
  if (!(w.machine->checks & C_UNINIT)) return;
  u64 e = w.exec();
  for (int k = 0; k < 3; k++)
    if (undef_in(w, i.src[k], e)) {
      u64 u = undef_lanes(w, i.src[k]) & e;
      return report(w, FK_UNINIT_ADDRESS, u ? __builtin_ctzll(u) : 0, 0);
    }
}

void finish_load(Wave& w, const Inst& i, u64 lanes, bool flat) {
  int n = i.dst[0].width;
  for (int k = 0; k < n; k++) w.undef[i.dst[0].reg + k] &= ~lanes;
  if (flat) {
    next_vm(w), w.ds_issued++;
    set_tag(w, kVgprBase + i.dst[0].reg, n, TC_FLAT, ++w.flat_issued);
  } else {
    set_tag(w, kVgprBase + i.dst[0].reg, n, TC_VM, next_vm(w));
  }
}

void load_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form,
                int reg) {
  drain_overlap(w, r.a, lanes, bytes);
  lanes = usable_lanes(w, r.a, lanes, bytes, false);
  scope_read(w, r.a, lanes, bytes, scope_level(i.flags));
  w.launch->c.global_read_bytes += (u64)bytes * __builtin_popcountll(lanes);
  if (form == DF_DWORDS) {
    u32 n = bytes / 4;
    alignas(8) u32 words[4];
    for (u64 x = lanes; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      copy_memory(words, reinterpret_cast<const u8*>(r.a[l]), bytes);
      for (u32 k = 0; k < n; k++) w.reg(reg + k)[l] = words[k];
    }
    return;
  }
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    put_loaded(w, reg, l, reinterpret_cast<const u8*>(r.a[l]), bytes, form);
  }
}


namespace {

Writer writer(Wave& w, u32 level) {
  return {w.launch->d.rank, w.wg->cu, w.launch->id, level};
}

// Others see a flag while its writer goes no further: what it left undone by then is found out.
void hold_after_flag(Wave& w) {
  Machine& m = *w.machine;
  if (m.schedule.kind == 0 || m.rng.below(8)) return;
  w.held = m.quantum + 1 + m.rng.below(64);
  w.stop = true;
}

}  // namespace

void store_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form, int reg,
                 u64 seq) {
  store_bytes(w, i, r, lanes, bytes, seq,
              [&](int l, u8* to) { take_stored(w, reg, l, to, bytes, form); });
}

void store_bytes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, u64 seq,
                 const std::function<void(int lane, u8* to)>& take) {
  Machine& m = *w.machine;
  lanes = usable_lanes(w, r.a, lanes, bytes, true);
  if (!lanes) return;
  w.launch->c.global_write_bytes += (u64)bytes * __builtin_popcountll(lanes);
  DeferredStore s;
  s.seq = seq, s.lanes = lanes, s.bytes = bytes, s.born = m.quantum;
  s.who = writer(w, scope_level(i.flags));
  s.data.resize((size_t)bytes * kLanes);
  memcpy(s.addr, r.a, sizeof s.addr);
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    take(l, s.data.data() + l * bytes);
  }
  w.stores.push_back(std::move(s));
  if (!(m.checks & C_DEFER)) drain_vm(w, seq);
  if (i.flags & F_COHERENT) hold_after_flag(w);
}

void check_data(Wave& w, const Operand& o, u64 lanes) {
  if (!(w.machine->checks & C_UNINIT)) return;
  u64 u = undef_lanes(w, o) & lanes;
  if (u) report(w, FK_UNINIT_STORE, __builtin_ctzll(u), 0);
}

// LDS DMA: lane l's bytes go to M0 + offset + l * bytes.
void dma(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form) {
  Machine& m = *w.machine;
  u32 each = bytes < 4 ? 4 : bytes;
  DeferredDma d;
  d.seq = next_vm(w), d.bytes = each, d.pc_index = w.pc - 1;
  d.data.assign((size_t)each * kLanes, 0);
  u64 exec = w.exec();
  if ((m.checks & C_UNINIT) && w.sundef[kM0]) report(w, FK_UNINIT_ADDRESS, 0, 0);
  drain_overlap(w, r.a, lanes, bytes);
  u64 good = usable_lanes(w, r.a, lanes, bytes, false);
  scope_read(w, r.a, good, bytes, scope_level(i.flags));
  w.launch->c.dma_bytes += (u64)bytes * __builtin_popcountll(good);
  for (u64 x = good; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    const u8* p = reinterpret_cast<const u8*>(r.a[l]);
    u32 v = 0;
    if (form == DF_DWORDS) memcpy(&d.data[l * each], p, bytes);
    else {
      memcpy(&v, p, bytes);
      if (form == DF_I8) v = (u32)(i32)(i8)v;
      if (form == DF_I16) v = (u32)(i32)(i16)v;
      memcpy(&d.data[l * each], &v, 4);
    }
  }
  u32 base = w.s[kM0] + (u32)i.offset;
  d.lanes = 0;
  for (u64 x = exec; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    d.lds[l] = base + l * each;
    if ((u64)d.lds[l] + each > w.wg->lds.size()) report(w, FK_LDS_BOUNDS, l, d.lds[l], each);
    else d.lanes |= 1ull << l;
  }
  if ((m.checks & C_ALIGN) && (base & 3)) report(w, FK_MISALIGNED, 0, base, 4);
  mark_lds(w, d.lds, d.lanes, each, true, d.pc_index);
  for (u64 x = d.lanes; x; x &= x - 1)
    memset(&w.wg->lds_def[d.lds[__builtin_ctzll(x)]], 2, each);
  w.dmas.push_back(std::move(d));
  if (!(m.checks & C_DEFER)) drain_vm(w, w.vm_issued);
}

// One lane's read-modify-write at `p`.
void modify(Wave& w, const Inst& i, int l, void* p, const Rmw& op) {
  int data = i.src[3].reg, n = op.bytes / 4;
  u64 mem = 0, d = 0, e = 0;
  memcpy(&mem, p, op.bytes);
  d = n == 1 ? w.reg(data)[l] : join(w.reg(data)[l], w.reg(data + 1)[l]);
  if (op.sources == 2)
    e = n == 1 ? w.reg(data + 1)[l] : join(w.reg(data + 2)[l], w.reg(data + 3)[l]);
  u64 v = op.fn(mem, d, e);
  if (memcmp(&v, &mem, op.bytes)) w.machine->progress++;
  memcpy(p, &v, op.bytes);
  if (i.dst[0].kind == K_VGPR) {
    w.reg(i.dst[0].reg)[l] = (u32)mem;
    if (n == 2) w.reg(i.dst[0].reg + 1)[l] = (u32)(mem >> 32);
  }
}

void atomic_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, const Rmw& op) {
  Machine& m = *w.machine;
  u32 bytes = op.bytes;
  drain_overlap(w, r.a, lanes, bytes);
  check_data(w, i.src[3], lanes);
  if (m.checks & C_ALIGN)
    for (u64 x = lanes; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      if (r.a[l] & (bytes - 1)) {
        report(w, FK_MISALIGNED, l, r.a[l], bytes);
        break;
      }
    }
  lanes = usable_lanes(w, r.a, usable_lanes(w, r.a, lanes, bytes, true), bytes, false);
  // In L2, where the rank's CUs meet; with sc1 where all ranks do. sc0 asks for the old value.
  u32 level = i.flags & F_SC1 ? 2 : 1;
  scope_read(w, r.a, lanes, bytes, level);
  scope_write(m, writer(w, level), r.a, lanes, bytes);
  hold_after_flag(w);
  w.launch->c.atomic_bytes += (u64)bytes * __builtin_popcountll(lanes);
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    modify(w, i, l, reinterpret_cast<void*>(r.a[l]), op);
  }
}

}  // namespace emu
