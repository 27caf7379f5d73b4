// Buffer instructions, and the cache controls of their encoding.
#include "atomics.h"
#include "buffer.h"

namespace emu {

Buffer::Buffer(Wave& w, int s)
    : base(join(w.s[s], w.s[s + 1] & 0xffff)),
      stride(w.s[s + 1] >> 16 & 0x3fff),
      records(w.s[s + 2]),
      index_stride(8u << (w.s[s + 3] >> 21 & 3)),
      number_format(w.s[s + 3] >> 12 & 7),
      data_format(w.s[s + 3] >> 15 & 15),
      select(w.s[s + 3] & 0xfff),
      swizzle(w.s[s + 1] >> 31),
      add_tid(w.s[s + 3] >> 23 & 1) {
  if (add_tid) stride |= data_format << 14;
}

BufferAccess::BufferAccess(Wave& w, const Inst& i)
    : b(w, i.src[1].reg), soffset(read_scalar(w, i.src[2])), immediate(i.offset) {
  check_memory_address(w, i);
  auto copied = [&](int reg, Lanes& to) {
    memcpy(to.x, w.reg(reg), sizeof to.x);
    return to.x;
  };
  if (i.flags & F_IDXEN) index = copied(i.src[0].reg, index_copy);
  if (i.flags & F_OFFEN) offset = copied(i.src[0].reg + (index ? 1 : 0), offset_copy);
}

u64 BufferAccess::place(int l, u32 extra) const {
  u64 at = within(l) + extra, n = record(l);
  if (!swizzled()) return at + n * b.stride;
  u64 msb = n / b.index_stride, lsb = n % b.index_stride;
  return (msb * b.stride + (at & ~3ull)) * b.index_stride + lsb * 4 + (at & 3);
}

bool BufferAccess::in_range(int l, u32 extra, u32 bytes) const {
  if (!structured()) return place(l, extra) + bytes + soffset <= b.records;
  return record(l) < b.records && (!swizzled() || within(l) + extra + bytes <= b.stride);
}

Address BufferAccess::part(Wave& w, u32 extra, u32 bytes) const {
  Address r;
  r.lanes = w.exec();
  for (int l = 0; l < kLanes; l++) {
    r.a[l] = b.base + soffset + place(l, extra);
    if (!in_range(l, extra, bytes)) r.lanes &= ~(1ull << l);
  }
  return r;
}

namespace {

// Lanes whose `bytes` are all in range and lie one after another.
struct Whole {
  Address at;
  u32 parts;
  Whole(Wave& w, const BufferAccess& a, u32 bytes) : parts(bytes >= 4 ? bytes / 4 : 1) {
    at = a.part(w, 0, parts == 1 ? bytes : 4);
    for (u32 k = 1; k < parts; k++) at.lanes &= a.part(w, 4 * k, 4).lanes;
    if (a.swizzled() && parts > 1) at.lanes = 0;
  }
};

void h_buffer_load(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  BufferAccess a(w, i);
  Whole whole(w, a, bytes);
  int reg = i.dst[0].reg;
  if (i.flags & F_LDS) {
    if (a.swizzled() && bytes > 4) report(w, FK_UNSUPPORTED, 0, a.b.base, bytes);
    return dma(w, i, whole.at, whole.at.lanes, bytes, form);
  }
  u64 rest = w.exec() & ~whole.at.lanes;
  static const u8 zeros[16] = {};
  for (u64 x = rest; x; x &= x - 1) put_loaded(w, reg, __builtin_ctzll(x), zeros, bytes, form);
  load_lanes(w, i, whole.at, whole.at.lanes, bytes, form, reg);
  if (rest && whole.parts > 1)  // swizzled, or a range that ends within the lane's dwords
    for (u32 k = 0; k < whole.parts; k++) {
      Address part = a.part(w, 4 * k, 4);
      load_lanes(w, i, part, part.lanes & rest, 4, DF_DWORDS, reg + k);
    }
  finish_load(w, i, w.exec(), false);
}
void h_buffer_store(Wave& w, const Inst& i) {
  u32 bytes = extra_bytes(i);
  Form form = extra_form(i);
  BufferAccess a(w, i);
  Whole whole(w, a, bytes);
  int reg = i.src[3].reg;
  u64 seq = next_vm(w), rest = w.exec() & ~whole.at.lanes, any = whole.at.lanes;
  store_lanes(w, i, whole.at, whole.at.lanes, bytes, form, reg, seq);
  if (rest && whole.parts > 1)
    for (u32 k = 0; k < whole.parts; k++) {
      Address part = a.part(w, 4 * k, 4);
      any |= part.lanes & rest;
      store_lanes(w, i, part, part.lanes & rest, 4, DF_DWORDS, reg + k, seq);
    }
  check_data(w, i.src[3], any);
}
void h_buffer_atomic(Wave& w, const Inst& i) {
  const Rmw& op = kRmw[i.extra];
  BufferAccess a(w, i);
  Whole whole(w, a, op.bytes);
  if (a.swizzled() && op.bytes > 4) report(w, FK_UNSUPPORTED, 0, a.b.base, op.bytes);
  u64 lanes = whole.at.lanes;
  if (i.dst[0].kind == K_VGPR)
    for (u64 x = w.exec() & ~lanes; x; x &= x - 1)
      for (int k = 0; k < op.bytes / 4; k++) w.reg(i.dst[0].reg + k)[__builtin_ctzll(x)] = 0;
  atomic_lanes(w, i, whole.at, lanes, op);
  if (i.dst[0].kind == K_VGPR) finish_load(w, i, w.exec(), false);
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

struct Table {
  Table() {
    auto add = [](const std::string& n, const std::string& form, Handler h, u32 extra) {
      Reg(n.c_str(), FAM_MUBUF, form.c_str(), h, P_CUSTOM, extra);
    };
    for (auto& l : kLoadForms)
      add(std::string("buffer_load_") + l.name,
          (l.form >= DF_U8_D16 ? "rb" : "db") + dwords_of(l.bytes) + " a q n", h_buffer_load,
          pack_extra(l.bytes, l.form));
    for (auto& s : kStoreForms)
      add(std::string("buffer_store_") + s.name, "tb" + dwords_of(s.bytes) + " a q n",
          h_buffer_store, pack_extra(s.bytes, s.form));
    for (int k = 0; k < kRmwCount; k++)
      if (*kRmw[k].name)
        add(std::string("buffer_atomic_") + kRmw[k].name,
            "tb" + std::to_string(8 * kRmw[k].bytes * kRmw[k].sources) + " a q n", h_buffer_atomic,
            k);
  }
} table;

}  // namespace
}  // namespace emu
