// Buffer instructions, and the cache controls of their encoding.
#include "atomics.h"
#include "vmem.h"

namespace emu {
namespace {

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
  check_memory_address(w, i);
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
