// Flat, global and scratch instructions.
#include "atomics.h"
#include "vmem.h"

namespace emu {
namespace {

constexpr u32 kShared = kSharedAperture >> 32, kPrivate = kPrivateAperture >> 32;

Address flat_address(Wave& w, const Inst& i) {
  Address r;
  r.lanes = w.exec();
  check_memory_address(w, i);
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

// A byte of LDS that nobody wrote, or that LDS DMA has yet to write.
void undef_local(Wave& w, u32 off, int lane, u32 bytes) {
  if (!(w.machine->checks & C_UNINIT)) return;
  const u8* def = &w.wg->lds_def[off];
  bool ok = true, dma = false;
  for (u32 k = 0; k < bytes; k++) ok &= def[k] == 1, dma |= def[k] == 2;
  if (!ok) report(w, dma ? FK_DMA_PENDING : FK_UNINIT_LDS, lane, off, bytes);
}

// LDS or scratch behind a flat address; null when out of bounds.
u8* local(Wave& w, u64 a, int lane, u32 bytes, bool write, bool atomic = false) {
  u32 off = (u32)a;
  if ((u32)(a >> 32) == kShared) {
    auto& lds = w.wg->lds;
    if ((u64)off + bytes > lds.size()) {
      report(w, FK_LDS_BOUNDS, lane, off, bytes);
      return nullptr;
    }
    u32 addr[kLanes];
    addr[lane] = off;
    mark_lds(w, addr, 1ull << lane, bytes, write, (w.pc - 1) | (atomic ? kAtomicAccess : 0));
    if (!write || atomic) undef_local(w, off, lane, bytes);
    if (write) memset(&w.wg->lds_def[off], 1, bytes);
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
  load_lanes(w, i, r, r.lanes & ~near, bytes, form, i.dst[0].reg);
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

void h_flat_atomic(Wave& w, const Inst& i) {
  const Rmw& op = kRmw[i.extra];
  Address r = flat_address(w, i);
  u64 near = (i.flags & F_FLAT) ? split_local(r) : 0;
  if (near) check_data(w, i.src[3], near);
  for (u64 x = near; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    if ((u32)(r.a[l] >> 32) == kPrivate) {
      report(w, FK_UNSUPPORTED, l, r.a[l], 2);
    } else if (u8* p = local(w, r.a[l], l, op.bytes, true, true)) {
      if ((w.machine->checks & C_ALIGN) && (r.a[l] & (op.bytes - 1)))
        report(w, FK_MISALIGNED, l, r.a[l], op.bytes);
      modify(w, i, l, p, op);
    }
  }
  atomic_lanes(w, i, r, r.lanes & ~near, op);
  if (i.dst[0].kind == K_VGPR) finish_load(w, i, r.lanes, (i.flags & F_FLAT));
  else {
    next_vm(w);
    if ((i.flags & F_FLAT)) w.ds_issued++, w.flat_issued++;
  }
}

Address scratch_address(Wave& w, const Inst& i) {
  Address r;
  r.lanes = w.exec();
  check_memory_address(w, i);
  u32 base = read_scalar(w, i.src[1]) + (u32)i.offset;
  const u32* v = i.src[0].kind == K_VGPR ? w.reg(i.src[0].reg) : nullptr;
  for (int l = 0; l < kLanes; l++) r.a[l] = kPrivateAperture | (u32)(base + (v ? v[l] : 0));
  return r;
}

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
    auto add = [](const std::string& n, const std::string& form, Handler h, u32 extra) {
      Reg(n.c_str(), FAM_FLAT, form.c_str(), h, P_CUSTOM, extra);
    };
    for (auto& l : kLoadForms) {
      u32 e = pack_extra(l.bytes, l.form);
      bool keeps = l.form >= DF_U8_D16;
      std::string d = (keeps ? "rb" : "db") + dwords_of(l.bytes);
      add(std::string("flat_load_") + l.name, d + " a", h_flat_load, e);
      add(std::string("global_load_") + l.name, d + " a g", h_flat_load, e);
      add(std::string("scratch_load_") + l.name, d + " a g", h_scratch_load, e);
      if (!keeps && l.bytes != 8)
        add(std::string("global_load_lds_") + l.name, "a g", h_flat_load, e);
    }
    for (auto& s : kStoreForms) {
      u32 e = pack_extra(s.bytes, s.form);
      std::string d = "tb" + dwords_of(s.bytes);
      add(std::string("flat_store_") + s.name, "a " + d, h_flat_store, e);
      add(std::string("global_store_") + s.name, "a " + d + " g", h_flat_store, e);
      add(std::string("scratch_store_") + s.name, "a " + d + " g", h_scratch_store, e);
    }
    for (int k = 0; k < kRmwCount; k++) {
      if (!*kRmw[k].name) continue;
      std::string d = std::to_string(8 * kRmw[k].bytes);
      std::string form = "@b" + d + " a tb" + std::to_string(8 * kRmw[k].bytes * kRmw[k].sources);
      add(std::string("flat_atomic_") + kRmw[k].name, form, h_flat_atomic, k);
      add(std::string("global_atomic_") + kRmw[k].name, form + " g", h_flat_atomic, k);
    }
  }
} table;

}  // namespace
}  // namespace emu
