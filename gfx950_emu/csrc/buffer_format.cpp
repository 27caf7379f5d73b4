// Buffer loads and stores that convert: buffer_*_format_* by the descriptor's format, tbuffer_* by the
// instruction's. Components of 8, 16 and 32 bits; packed ones (10_11_11, 2_10_10_10, ...) are
// reported as not modelled.
//
// A load of unorm gives x / (2^n - 1), snorm max(x / (2^(n-1) - 1), -1), scaled the integer as a
// float; a store clamps and rounds to nearest even, integers are clamped to the component's range.
// d16 forms convert to and from f16 and 16-bit integers.
#include <algorithm>

#include "buffer.h"

namespace emu {
namespace {

enum Number : u32 { N_UNORM, N_SNORM, N_USCALED, N_SSCALED, N_UINT, N_SINT, N_FLOAT = 7 };

struct Layout {
  u32 count = 0, bytes = 0;  // components, bytes of one
};
Layout layout_of(u32 data_format) {
  switch (data_format) {
    case 1: return {1, 1};
    case 2: return {1, 2};
    case 3: return {2, 1};
    case 4: return {1, 4};
    case 5: return {2, 2};
    case 10: return {4, 1};
    case 11: return {2, 4};
    case 12: return {4, 2};
    case 13: return {3, 4};
    case 14: return {4, 4};
    default: return {};
  }
}
bool modelled(const Layout& l, u32 number, bool store) {
  bool scaled = number == N_USCALED || number == N_SSCALED;
  if (!l.count || number == 6 || (store && scaled)) return false;
  if (l.bytes == 4) return number == N_UINT || number == N_SINT || number == N_FLOAT;
  return l.bytes == 2 || number != N_FLOAT;
}

i32 signed_of(u32 raw, u32 bytes) { return bytes == 1 ? (i8)raw : bytes == 2 ? (i16)raw : (i32)raw; }

u32 expand(u32 raw, u32 bytes, u32 number, bool half) {
  u32 bits_ = 8 * bytes;
  float value = 0;
  switch (number) {
    case N_UINT: return raw;
    case N_SINT: return (u32)signed_of(raw, bytes) & (half ? 0xffff : ~0u);
    case N_FLOAT:
      if (bytes == 2 && half) return raw;
      value = bytes == 2 ? f16_to_f32(raw) : f32(raw);
      break;
    case N_UNORM: value = (float)raw / (float)((1u << bits_) - 1); break;
    case N_SNORM:
      value = std::fmax((float)signed_of(raw, bytes) / (float)((1u << (bits_ - 1)) - 1), -1.0f);
      break;
    case N_USCALED: value = (float)raw; break;
    case N_SSCALED: value = (float)signed_of(raw, bytes); break;
  }
  return half ? f32_to_f16(value) : bits(value);
}

u32 reduce(u32 x, u32 bytes, u32 number, bool half) {
  u32 bits_ = 8 * bytes;
  u64 most = (1ull << bits_) - 1;
  if (number == N_UINT) return (u32)std::min<u64>(x, most);
  if (number == N_SINT) {
    i64 high = (i64)(most >> 1), v = half ? (i16)x : (i32)x;
    return (u32)(std::max<i64>(-high - 1, std::min<i64>(v, high)) & (i64)most);
  }
  if (number == N_FLOAT && bytes == 2 && half) return x & 0xffff;
  float value = half ? f16_to_f32(x & 0xffff) : f32(x);
  if (number == N_FLOAT) return bytes == 2 ? f32_to_f16(value) : bits(value);
  if (value != value) value = 0;
  float low = number == N_SNORM ? -1.0f : 0.0f;
  float scale = (float)(number == N_SNORM ? most >> 1 : most);
  float clamped = std::fmin(std::fmax(value, low), 1.0f);
  return (u32)((i64)std::nearbyint((double)clamped * scale) & (i64)most);
}

// extra: components | d16 << 3 | high half << 4.
struct Request {
  u32 count;
  bool half, high;
  u32 number, data, select;
  Layout layout;
  Request(const Inst& i, const Buffer& b)
      : count(i.extra & 7), half(i.extra >> 3 & 1), high(i.extra >> 4 & 1) {
    bool typed = i.imm >> 31;
    data = typed ? i.imm & 15 : b.data_format;
    number = typed ? i.imm >> 4 & 7 : b.number_format;
    select = typed ? 4 | 5 << 3 | 6 << 6 | 7 << 9 : b.select;
    layout = layout_of(data);
  }
};

void put_component(Wave& w, int reg, const Request& q, u32 c, int l, u32 v) {
  if (!q.half) {
    w.reg(reg + c)[l] = v;
    return;
  }
  u32& d = w.reg(reg + c / 2)[l];
  d = (c & 1) || q.high ? (d & 0xffff) | v << 16 : (d & 0xffff0000) | (v & 0xffff);
}

void h_load_format(Wave& w, const Inst& i) {
  BufferAccess a(w, i);
  Request q(i, a.b);
  if (!modelled(q.layout, q.number, false)) report(w, FK_UNSUPPORTED, 0, a.b.base, q.data);
  int reg = i.dst[0].reg;
  bool integer = q.number == N_UINT || q.number == N_SINT;
  u32 one = integer ? 1 : q.half ? 0x3c00 : 0x3f800000;
  for (u32 c = 0; c < q.count; c++) {
    u32 sel = q.select >> (3 * c) & 7, from = sel - 4;
    bool there = sel >= 4 && from < q.layout.count;
    u32 fill = sel == 1 || (sel == 7 && !there) ? one : 0;  // a component that is not there
    for (u64 x = w.exec(); x; x &= x - 1)
      put_component(w, reg, q, c, __builtin_ctzll(x), fill);
    if (!there) continue;
    u32 bytes = q.layout.bytes;
    Address r = a.part(w, from * bytes, bytes);
    drain_overlap(w, r.a, r.lanes, bytes);
    u64 lanes = usable_lanes(w, r.a, r.lanes, bytes, false);
    scope_read(w, r.a, lanes, bytes, scope_level(i.flags));
    w.launch->c.global_read_bytes += (u64)bytes * __builtin_popcountll(lanes);
    for (u64 x = w.exec() & ~lanes; x; x &= x - 1)
      put_component(w, reg, q, c, __builtin_ctzll(x), 0);
    for (u64 x = lanes; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      u32 raw = 0;
      memcpy(&raw, reinterpret_cast<const void*>(r.a[l]), bytes);
      put_component(w, reg, q, c, l, expand(raw, bytes, q.number, q.half));
    }
  }
  finish_load(w, i, w.exec(), false);
}

void h_store_format(Wave& w, const Inst& i) {
  BufferAccess a(w, i);
  Request q(i, a.b);
  u64 seq = next_vm(w);
  if (!modelled(q.layout, q.number, true)) return report(w, FK_UNSUPPORTED, 0, a.b.base, q.data);
  int reg = i.src[3].reg;
  u32 bytes = q.layout.bytes;
  check_data(w, i.src[3], a.part(w, 0, bytes).lanes);
  for (u32 c = 0; c < std::min(q.count, q.layout.count); c++) {
    Address r = a.part(w, c * bytes, bytes);
    store_bytes(w, i, r, r.lanes, bytes, seq, [&](int l, u8* to) {
      u32 x = w.reg(reg + (q.half ? c / 2 : c))[l];
      if (q.half) x = (c & 1) || q.high ? x >> 16 : x & 0xffff;
      u32 raw = reduce(x, bytes, q.number, q.half);
      memcpy(to, &raw, bytes);
    });
  }
}

struct Table {
  Table() {
    const char* words[] = {"x", "xy", "xyz", "xyzw"};
    auto add = [](const std::string& n, const std::string& form, Handler h, u32 extra) {
      Reg(n.c_str(), FAM_MUBUF, form.c_str(), h, P_CUSTOM, extra);
    };
    for (const char* kind : {"buffer", "tbuffer"})
      for (u32 half = 0; half < 2; half++)
        for (u32 n = 1; n <= 4; n++) {
          u32 dwords = half ? (n + 1) / 2 : n;
          std::string width = std::to_string(32 * dwords), k = kind;
          std::string word = std::string("_format_") + (half ? "d16_" : "") + words[n - 1];
          bool keeps = half && (n & 1);  // the other half of the last register
          add(k + "_load" + word, (keeps ? "rb" : "db") + width + " a q n", h_load_format,
              n | half << 3);
          add(k + "_store" + word, "tb" + width + " a q n", h_store_format, n | half << 3);
        }
    add("buffer_load_format_d16_hi_x", "rb32 a q n", h_load_format, 1 | 1 << 3 | 1 << 4);
    add("buffer_store_format_d16_hi_x", "tb32 a q n", h_store_format, 1 | 1 << 3 | 1 << 4);
  }
} table;

}  // namespace
}  // namespace emu
