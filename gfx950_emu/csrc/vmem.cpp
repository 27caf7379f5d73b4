// Flat, global, scratch and buffer memory.
#include "vmem.h"

#include "atomics.h"

namespace emu {

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

namespace {

constexpr u32 kShared = kSharedAperture >> 32, kPrivate = kPrivateAperture >> 32;

struct Address {
  u64 a[kLanes];
  u64 lanes;     // those that access memory
  u64 zero = 0;  // those out of a buffer's range: loads give 0, stores do nothing
  u32 part_ok[4] = {~0u, ~0u, ~0u, ~0u};  // unused unless a buffer's range cuts a lane
};

void check_address(Wave& w, const Inst& i) {
  if (!(w.machine->checks & C_UNINIT)) return;
  u64 e = w.exec();
  for (int k = 0; k < 3; k++)
    if (undef_in(w, i.src[k], e)) {
      u64 u = undef_lanes(w, i.src[k]) & e;
      return report(w, FK_UNINIT_ADDRESS, u ? __builtin_ctzll(u) : 0, 0);
    }
}

Address flat_address(Wave& w, const Inst& i) {
  Address r;
  r.lanes = w.exec();
  check_address(w, i);
  const Operand &v = i.src[0], &s = i.src[1];
  u64 off = (u64)(i64)i.offset;
  if (s.kind != K_NONE) {
    u64 base = read_scalar64(w, s) + off;
    const u32* lo = v.kind == K_VGPR ? w.reg(v.reg) : nullptr;
    for (int l = 0; l < kLanes; l++) r.a[l] = base + (lo ? lo[l] : 0);
  } else {
    const u32 *lo = w.reg(v.reg), *hi = w.reg(v.reg + 1);
    for (int l = 0; l < kLanes; l++) r.a[l] = join(lo[l], hi[l]) + off;
  }
  return r;
}

// Buffers. Raw (stride 0 or no swizzle): each dword is in range when its offset is below
// num_records less soffset. Structured and swizzled ones are refused by the caller.
struct Buffer {
  u64 base;
  u32 stride, records;
  bool swizzle, add_tid;
  Buffer(Wave& w, int s)
      : base(join(w.s[s], w.s[s + 1] & 0xffff)),
        stride(w.s[s + 1] >> 16 & 0x3fff),
        records(w.s[s + 2]),
        swizzle(w.s[s + 1] >> 31),
        add_tid(w.s[s + 3] >> 23 & 1) {}
};

Address buffer_address(Wave& w, const Inst& i, u32 bytes, u64* in_range) {
  Address r;
  check_address(w, i);
  Buffer b(w, i.src[1].reg);
  if ((b.swizzle && b.stride) || b.add_tid) report(w, FK_UNSUPPORTED, 0, b.base, 1);
  u32 soff = read_scalar(w, i.src[2]);
  const u32 *index = nullptr, *off = nullptr;
  if (i.flags & F_IDXEN) index = w.reg(i.src[0].reg);
  if (i.flags & F_OFFEN) off = w.reg(i.src[0].reg + ((i.flags & F_IDXEN) ? 1 : 0));
  r.lanes = w.exec();
  u32 parts = bytes >= 4 ? bytes / 4 : 1, step = bytes >= 4 ? 4 : bytes;
  for (u32 k = 0; k < parts; k++) in_range[k] = 0;
  for (int l = 0; l < kLanes; l++) {
    u64 o = (u64)(u32)i.offset + (off ? off[l] : 0) + (index ? (u64)index[l] * b.stride : 0);
    r.a[l] = b.base + soff + o;
    for (u32 k = 0; k < parts; k++) {
      bool ok;
      if (b.stride == 0 || !(i.flags & F_IDXEN))
        ok = o + k * step + step + soff <= b.records;
      else
        ok = index[l] < b.records;
      in_range[k] |= (u64)ok << l;
    }
  }
  return r;
}

void finish_load(Wave& w, const Inst& i, u64 lanes, bool flat) {
  int n = i.dst[0].width;
  for (int k = 0; k < n; k++) w.undef[i.dst[0].reg + k] &= ~lanes;
  if (flat) {
    w.vm_issued++, w.ds_issued++;
    set_tag(w, kVgprBase + i.dst[0].reg, n, TC_FLAT, ++w.flat_issued);
  } else {
    set_tag(w, kVgprBase + i.dst[0].reg, n, TC_VM, next_vm(w));
  }
}

// LDS or scratch behind a flat address; null when out of bounds.
u8* local(Wave& w, u64 a, int lane, u32 bytes, bool write) {
  u32 off = (u32)a;
  if ((u32)(a >> 32) == kShared) {
    auto& lds = w.wg->lds;
    if ((u64)off + bytes > lds.size()) {
      report(w, FK_LDS_BOUNDS, lane, off, bytes);
      return nullptr;
    }
    if (write) memset(&w.wg->lds_def[off], 1, bytes);
    u32 addr[kLanes];
    addr[lane] = off;
    mark_lds(w, addr, 1ull << lane, bytes, write, w.pc - 1);
    return &lds[off];
  }
  u32 size = w.launch->d.scratch_bytes;
  if ((u64)off + bytes > size) {
    report(w, write ? FK_OOB_WRITE : FK_OOB_READ, lane, a, bytes);
    return nullptr;
  }
  u8* def = &w.scratch_def[(u64)lane * size + off];
  if (write) memset(def, 1, bytes);
  return &w.scratch[(u64)lane * size + off];
}

u64 split_local(const Address& r) {
  u64 m = 0;
  for (u64 x = r.lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u32 hi = (u32)(r.a[l] >> 32);
    if (hi == kShared || hi == kPrivate) m |= 1ull << l;
  }
  return m;
}

void load_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form) {
  drain_overlap(w, r.a, lanes, bytes);
  lanes = usable_lanes(w, r.a, lanes, bytes, false);
  scope_read(w, r.a, lanes, bytes, scope_level(i.flags));
  w.launch->c.global_read_bytes += (u64)bytes * __builtin_popcountll(lanes);
  int reg = i.dst[0].reg;
  if (form == DF_DWORDS) {
    u32 n = bytes / 4;
    for (u64 x = lanes; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      const u8* p = reinterpret_cast<const u8*>(r.a[l]);
      for (u32 k = 0; k < n; k++) memcpy(&w.reg(reg + k)[l], p + 4 * k, 4);
    }
    return;
  }
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    put_loaded(w, reg, l, reinterpret_cast<const u8*>(r.a[l]), bytes, form);
  }
}

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

void store_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form, int reg,
                 u64 seq) {
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
    take_stored(w, reg, l, s.data.data() + l * bytes, bytes, form);
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

void h_flat_load(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  Address r = flat_address(w, i);
  bool flat = i.flags & F_FLAT;
  u64 near = flat ? split_local(r) : 0;
  if (i.flags & F_LDS) return dma(w, i, r, r.lanes, bytes, form);
  for (u64 x = near; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    static const u8 zeros[16] = {};
    u8* p = local(w, r.a[l], l, bytes, false);
    put_loaded(w, i.dst[0].reg, l, p ? p : zeros, bytes, form);
  }
  load_lanes(w, i, r, r.lanes & ~near, bytes, form);
  finish_load(w, i, r.lanes, flat);
}
void h_flat_store(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  Address r = flat_address(w, i);
  bool flat = i.flags & F_FLAT;
  u64 near = flat ? split_local(r) : 0;
  u64 seq = next_vm(w);
  if (flat) w.ds_issued++, w.flat_issued++;
  u64 undef = undef_lanes(w, i.src[3]);
  for (u64 x = near; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    if (u8* p = local(w, r.a[l], l, bytes, true)) {
      take_stored(w, i.src[3].reg, l, p, bytes, form);
      if ((undef >> l & 1) && (u32)(r.a[l] >> 32) == kPrivate)
        memset(&w.scratch_def[p - w.scratch.data()], 0, bytes);
    }
  }
  check_data(w, i.src[3], r.lanes & ~near);
  store_lanes(w, i, r, r.lanes & ~near, bytes, form, i.src[3].reg, seq);
}

Address scratch_address(Wave& w, const Inst& i) {
  Address r;
  r.lanes = w.exec();
  check_address(w, i);
  u32 base = read_scalar(w, i.src[1]) + (u32)i.offset;
  const u32* v = i.src[0].kind == K_VGPR ? w.reg(i.src[0].reg) : nullptr;
  for (int l = 0; l < kLanes; l++) r.a[l] = kPrivateAperture | (u32)(base + (v ? v[l] : 0));
  return r;
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
  lanes = usable_lanes(w, r.a, lanes, bytes, true);
  // In L2, where the rank's CUs meet; with sc1 where all ranks do. sc0 asks for the old value.
  u32 level = i.flags & F_SC1 ? 2 : 1;
  scope_read(w, r.a, lanes, bytes, level);
  scope_write(m, writer(w, level), r.a, lanes, bytes);
  hold_after_flag(w);
  w.launch->c.atomic_bytes += (u64)bytes * __builtin_popcountll(lanes);
  int data = i.src[3].reg, n = bytes / 4;
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u64 mem = 0, d = 0, e = 0;
    void* p = reinterpret_cast<void*>(r.a[l]);
    memcpy(&mem, p, bytes);
    d = n == 1 ? w.reg(data)[l] : join(w.reg(data)[l], w.reg(data + 1)[l]);
    if (op.sources == 2)
      e = n == 1 ? w.reg(data + 1)[l] : join(w.reg(data + 2)[l], w.reg(data + 3)[l]);
    u64 v = op.fn(mem, d, e);
    if (memcmp(&v, &mem, bytes)) m.progress++;
    memcpy(p, &v, bytes);
    if (i.dst[0].kind == K_VGPR) {
      w.reg(i.dst[0].reg)[l] = (u32)mem;
      if (n == 2) w.reg(i.dst[0].reg + 1)[l] = (u32)(mem >> 32);
    }
  }
}

void h_flat_atomic(Wave& w, const Inst& i) {
  const Rmw& op = kRmw[i.extra];
  Address r = flat_address(w, i);
  u64 near = (i.flags & F_FLAT) ? split_local(r) : 0;
  for (u64 x = near; x; x &= x - 1) report(w, FK_UNSUPPORTED, __builtin_ctzll(x), r.a[0], 2), x = 1;
  atomic_lanes(w, i, r, r.lanes & ~near, op);
  if (i.dst[0].kind == K_VGPR) finish_load(w, i, r.lanes, (i.flags & F_FLAT));
  else {
    next_vm(w);
    if ((i.flags & F_FLAT)) w.ds_issued++, w.flat_issued++;
  }
}

void h_buffer_load(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  u64 in[4];
  Address r = buffer_address(w, i, bytes, in);
  u32 parts = bytes >= 4 ? bytes / 4 : 1;
  u64 all = r.lanes, any = 0;
  for (u32 k = 0; k < parts; k++) all &= in[k], any |= in[k];
  if (i.flags & F_LDS) return dma(w, i, r, all, bytes, form);
  u64 rest = r.lanes & ~all;
  static const u8 zeros[16] = {};
  for (u64 x = rest; x; x &= x - 1) put_loaded(w, i.dst[0].reg, __builtin_ctzll(x), zeros, bytes, form);
  load_lanes(w, i, r, all, bytes, form);
  for (u64 x = rest & any; x; x &= x - 1) {  // a range that ends within the lane's dwords
    int l = __builtin_ctzll(x);
    for (u32 k = 0; k < parts; k++)
      if (in[k] >> l & 1) {
        Address one = r;
        one.a[l] = r.a[l] + 4 * k;
        if (usable_lanes(w, one.a, 1ull << l, 4, false))
          memcpy(&w.reg(i.dst[0].reg + k)[l], reinterpret_cast<void*>(one.a[l]), 4);
      }
  }
  finish_load(w, i, r.lanes, false);
}
void h_buffer_store(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  u64 in[4];
  Address r = buffer_address(w, i, bytes, in);
  u32 parts = bytes >= 4 ? bytes / 4 : 1;
  u64 all = r.lanes, any = 0;
  for (u32 k = 0; k < parts; k++) all &= in[k], any |= in[k];
  any &= r.lanes;
  check_data(w, i.src[3], any);
  u64 seq = next_vm(w);
  store_lanes(w, i, r, all, bytes, form, i.src[3].reg, seq);
  if (any & ~all)
    for (u32 k = 0; k < parts; k++) {
      Address part = r;
      for (int l = 0; l < kLanes; l++) part.a[l] += 4 * k;
      store_lanes(w, i, part, in[k] & r.lanes & ~all, 4, DF_DWORDS, i.src[3].reg + k, seq);
    }
}
void h_buffer_atomic(Wave& w, const Inst& i) {
  const Rmw& op = kRmw[i.extra];
  u64 in[4];
  Address r = buffer_address(w, i, op.bytes, in);
  u64 lanes = r.lanes & in[0] & (op.bytes == 8 ? in[1] : ~0ull);
  if (i.dst[0].kind == K_VGPR)
    for (u64 x = r.lanes & ~lanes; x; x &= x - 1)
      for (int k = 0; k < op.bytes / 4; k++) w.reg(i.dst[0].reg + k)[__builtin_ctzll(x)] = 0;
  atomic_lanes(w, i, r, lanes, op);
  if (i.dst[0].kind == K_VGPR) finish_load(w, i, r.lanes, false);
  else next_vm(w);
}

void h_wbl2(Wave& w, const Inst& i) {
  u32 level = scope_level(i.flags);
  u64 seq = next_vm(w);
  if (!level) return;
  drain_vm(w, seq - 1);  // the wave's own stores are ahead of it
  w.write_backs.push_back({seq, scope_now(*w.machine), level});
}
void h_inv(Wave& w, const Inst& i) {
  next_vm(w);
  scope_invalidate(w, i.flags);
}
Reg r_wbl2("buffer_wbl2", FAM_MUBUF, "", h_wbl2, P_CUSTOM);
Reg r_inv("buffer_inv", FAM_MUBUF, "", h_inv, P_CUSTOM);

void h_scratch_load(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  Address r = scratch_address(w, i);
  u32 size = w.launch->d.scratch_bytes;
  finish_load(w, i, r.lanes, false);
  for (u64 x = r.lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    static const u8 zeros[16] = {};
    u8* p = local(w, r.a[l], l, bytes, false);
    put_loaded(w, i.dst[0].reg, l, p ? p : zeros, bytes, form);
    u32 off = (u32)r.a[l];
    if (p)
      for (u32 k = 0; k < bytes; k++)
        if (!w.scratch_def[(u64)l * size + off + k]) w.undef[i.dst[0].reg + k / 4] |= 1ull << l;
  }
}
void h_scratch_store(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  Address r = scratch_address(w, i);
  next_vm(w);
  for (u64 x = r.lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u8* p = local(w, r.a[l], l, bytes, true);
    if (!p) continue;
    take_stored(w, i.src[3].reg, l, p, bytes, form);
    for (u32 k = 0; k < bytes; k++)
      w.scratch_def[p - w.scratch.data() + k] = !(w.undef[i.src[3].reg + k / 4] >> l & 1);
  }
}

struct Table {
  Table() {
    struct L { const char* name; u32 bytes; Form form; };
    const L loads[] = {{"ubyte", 1, DF_U8}, {"sbyte", 1, DF_I8}, {"ushort", 2, DF_U16},
                       {"sshort", 2, DF_I16}, {"dword", 4, DF_DWORDS}, {"dwordx2", 8, DF_DWORDS},
                       {"dwordx3", 12, DF_DWORDS}, {"dwordx4", 16, DF_DWORDS},
                       {"ubyte_d16", 1, DF_U8_D16}, {"ubyte_d16_hi", 1, DF_U8_D16_HI},
                       {"sbyte_d16", 1, DF_I8_D16}, {"sbyte_d16_hi", 1, DF_I8_D16_HI},
                       {"short_d16", 2, DF_D16}, {"short_d16_hi", 2, DF_D16_HI}};
    const L stores[] = {{"byte", 1, DF_U8}, {"byte_d16_hi", 1, DF_U8_D16_HI}, {"short", 2, DF_U16},
                        {"short_d16_hi", 2, DF_D16_HI}, {"dword", 4, DF_DWORDS},
                        {"dwordx2", 8, DF_DWORDS}, {"dwordx3", 12, DF_DWORDS},
                        {"dwordx4", 16, DF_DWORDS}};
    auto width = [](u32 b) { return std::to_string(b < 4 ? 32 : 8 * b); };
    auto add = [](const std::string& n, Family f, const std::string& form, Handler h, u32 extra) {
      Reg(n.c_str(), f, form.c_str(), h, P_CUSTOM, extra);
    };
    for (auto& l : loads) {
      u32 e = pack_extra(l.bytes, l.form);
      bool keeps = l.form >= DF_U8_D16;
      std::string d = (keeps ? "rb" : "db") + width(l.bytes);
      add(std::string("flat_load_") + l.name, FAM_FLAT, d + " a", h_flat_load, e);
      add(std::string("global_load_") + l.name, FAM_FLAT, d + " a g", h_flat_load, e);
      add(std::string("scratch_load_") + l.name, FAM_FLAT, d + " a g", h_scratch_load, e);
      add(std::string("buffer_load_") + l.name, FAM_MUBUF, d + " a q n", h_buffer_load, e);
      if (!keeps && l.bytes != 8)
        add(std::string("global_load_lds_") + l.name, FAM_FLAT, "a g", h_flat_load, e);
    }
    for (auto& s : stores) {
      u32 e = pack_extra(s.bytes, s.form);
      std::string d = "tb" + width(s.bytes);
      add(std::string("flat_store_") + s.name, FAM_FLAT, "a " + d, h_flat_store, e);
      add(std::string("global_store_") + s.name, FAM_FLAT, "a " + d + " g", h_flat_store, e);
      add(std::string("scratch_store_") + s.name, FAM_FLAT, "a " + d + " g", h_scratch_store, e);
      add(std::string("buffer_store_") + s.name, FAM_MUBUF, d + " a q n", h_buffer_store, e);
    }
    for (int k = 0; k < kRmwCount; k++) {
      if (!*kRmw[k].name) continue;
      std::string d = std::to_string(8 * kRmw[k].bytes), t = std::to_string(8 * kRmw[k].bytes * kRmw[k].sources);
      for (const char* where : {"flat", "global", "buffer"}) {
        bool buf = *where == 'b';
        std::string form = buf ? "tb" + t + " a q n" : "@b" + d + " a tb" + t + (*where == 'g' ? " g" : "");
        add(std::string(where) + "_atomic_" + kRmw[k].name, buf ? FAM_MUBUF : FAM_FLAT, form,
            buf ? h_buffer_atomic : h_flat_atomic, k);
      }
    }
  }
} table;

}  // namespace
}  // namespace emu
