// LDS: reads, writes, transposed reads, and the instructions that only move lanes.
#include "ds.h"

namespace emu {

void note_open(Wave& w, const u32* addr, u64 lanes, u32 bytes, bool write, u64 seq) {
  if (!(w.machine->checks & C_LDS_RACE)) return;
  OutstandingDs o;
  o.seq = seq, o.pc_index = w.pc - 1, o.bytes = bytes, o.write = write, o.lanes = lanes;
  memcpy(o.addr, addr, sizeof o.addr);
  w.ds_open.push_back(o);
}

// Bank rule (documented in README.md): 64 banks of 4 bytes; the lanes go in groups whose accesses
// fill 256 bytes; a group takes as many cycles as its busiest bank has different dwords.
void count_banks(Wave& w, const u32* addr, u64 lanes, u32 bytes) {
  Counters& c = w.launch->c;
  u32 words = bytes < 4 ? 1 : bytes / 4, group = 64 / words;
  if (words == 3) group = 16;
  u64 cycles = 0, ideal = 0;
  for (u32 g = 0; g < kLanes; g += group) {
    u64 part = lanes >> g & (group == 64 ? ~0ull : (1ull << group) - 1);
    if (!part) continue;
    u32 first[64];
    bool run = true;  // lanes one after another: no conflict
    for (u32 k = 1; k < group && run; k++)
      run = (part >> k & 1) && addr[g + k] == addr[g] + k * 4 * words;
    if (run && words != 3) {
      cycles++, ideal++;
      continue;
    }
    u8 n[64] = {0}, most = 1;
    for (; part; part &= part - 1) {
      u32 a = addr[g + __builtin_ctzll(part)] >> 2;
      for (u32 k = 0; k < words; k++) {
        u32 bank = (a + k) & 63;
        if (n[bank] && first[bank] == a + k) continue;
        first[bank] = a + k;
        if (++n[bank] > most) most = n[bank];
      }
    }
    cycles += most, ideal++;
  }
  c.lds_cycles += cycles;
  c.lds_conflict_cycles += cycles - ideal;
  c.lds_accesses++;
}

// Lanes whose bytes lie in LDS.
u64 in_bounds(Wave& w, const u32* addr, u64 lanes, u32 bytes) {
  u64 size = w.wg->lds.size(), good = lanes;
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    if ((u64)addr[l] + bytes > size) {
      if (good == lanes && (w.machine->checks & C_BOUNDS)) report(w, FK_LDS_BOUNDS, l, addr[l], bytes);
      good &= ~(1ull << l);
    }
  }
  return good;
}

void lds_addresses(Wave& w, const Inst& i, i32 offset, u32* out) {
  const u32* a = w.reg(i.src[0].reg);
  for (int l = 0; l < kLanes; l++) out[l] = a[l] + (u32)offset;
}

void check_lds_address(Wave& w, const Inst& i) {
  if (!(w.machine->checks & C_UNINIT)) return;
  u64 u = undef_lanes(w, i.src[0]) & w.exec();
  if (u) report(w, FK_UNINIT_ADDRESS, __builtin_ctzll(u), 0);
}

void check_lds_alignment(Wave& w, const u32* addr, u64 lanes, u32 to) {
  if (!(w.machine->checks & C_ALIGN)) return;
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    if (addr[l] & (to - 1)) return report(w, FK_MISALIGNED, l, addr[l], to);
  }
}

// Lanes that read a byte that nobody wrote, or one that LDS DMA has yet to write.
u64 undefined_lanes(Wave& w, const u32* addr, u64 lanes, u32 bytes) {
  if (!(w.machine->checks & C_UNINIT)) return 0;
  const u8* def = w.wg->lds_def.data();
  u64 bad = 0;
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    const u8* d = def + addr[l];
    if (bytes >= 4) {
      u32 bad_words = 0, x;
      for (u32 k = 0; k < bytes; k += 4) memcpy(&x, d + k, 4), bad_words |= x ^ 0x01010101;
      if (!bad_words) continue;
    }
    bool ok = true, dma = false;
    for (u32 k = 0; k < bytes; k++) ok &= d[k] == 1, dma |= d[k] == 2;
    if (dma) report(w, FK_DMA_PENDING, l, addr[l], bytes);
    if (!ok) bad |= 1ull << l;
  }
  return bad;
}

void lds_read(Wave& w, const u32* addr, u32 bytes, Form form, int reg, u64 seq) {
  u64 lanes = in_bounds(w, addr, w.exec(), bytes);
  mark_lds(w, addr, lanes, bytes, false, w.pc - 1);
  note_open(w, addr, lanes, bytes, false, seq);
  count_banks(w, addr, lanes, bytes);
  w.launch->c.lds_read_bytes += (u64)bytes * __builtin_popcountll(lanes);
  u64 bad = undefined_lanes(w, addr, lanes, bytes);
  const u8* lds = w.wg->lds.data();
  u32 n = bytes < 4 ? 1 : bytes / 4;
  if (form == DF_DWORDS) {
    for (u32 k = 0; k < n; k++) {
      u32* d = w.reg(reg + k);
      for (u64 x = lanes; x; x &= x - 1) {
        int l = __builtin_ctzll(x);
        memcpy(&d[l], lds + addr[l] + 4 * k, 4);
      }
    }
  } else {
    for (u64 x = lanes; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      put_loaded(w, reg, l, lds + addr[l], bytes, form);
    }
  }
  u64 out = w.exec() & ~lanes;
  for (u32 k = 0; k < n; k++) {
    for (u64 x = out; x; x &= x - 1) w.reg(reg + k)[__builtin_ctzll(x)] = 0;
    w.undef[reg + k] = (w.undef[reg + k] & ~w.exec()) | bad;
  }
  set_tag(w, kVgprBase + reg, n, TC_DS, seq);
}

void lds_write(Wave& w, const u32* addr, u32 bytes, Form form, const Operand& data,
              u64 seq) {
  u64 lanes = in_bounds(w, addr, w.exec(), bytes);
  count_banks(w, addr, lanes, bytes);
  w.launch->c.lds_write_bytes += (u64)bytes * __builtin_popcountll(lanes);
  u8 *lds = w.wg->lds.data(), *def = w.wg->lds_def.data();
  u32 n = bytes < 4 ? 1 : bytes / 4;
  u64 same = w.machine->checks & C_LDS_RACE ? lanes : 0;
  for (u32 k = 0; k < n; k++) {
    u64 u = w.undef[data.reg + k];
    const u32* d = w.reg(data.reg + k);
    for (u64 x = lanes; x; x &= x - 1) {
      int l = __builtin_ctzll(x);
      u32 v = form == DF_D16_HI || form == DF_U8_D16_HI ? d[l] >> 16 : d[l];
      u32 defined = u >> l & 1 ? 0 : 0x01010101;
      u8 *to = lds + addr[l] + 4 * k, *mark = def + addr[l] + 4 * k;
      if (bytes >= 4) {
        u32 old;
        memcpy(&old, to, 4);
        if (old != v) same &= ~(1ull << l);
        memcpy(to, &v, 4);
        memcpy(mark, &defined, 4);
      } else {
        if (memcmp(to, &v, bytes)) same &= ~(1ull << l);
        memcpy(to, &v, bytes);
        memcpy(mark, &defined, bytes);
      }
    }
  }
  mark_lds(w, addr, lanes, bytes, true, w.pc - 1, same);
  note_open(w, addr, lanes & ~same, bytes, true, seq);
}

namespace {

void h_read(Wave& w, const Inst& i) {
  u32 addr[kLanes];
  check_lds_address(w, i);
  lds_addresses(w, i, i.offset, addr);
  lds_read(w, addr, extra_bytes(i), extra_form(i), i.dst[0].reg, ++w.ds_issued);
}
void h_write(Wave& w, const Inst& i) {
  u32 addr[kLanes];
  check_lds_address(w, i);
  lds_addresses(w, i, i.offset, addr);
  lds_write(w, addr, extra_bytes(i), extra_form(i), i.src[1], ++w.ds_issued);
}
template <int Scale>
void h_read2(Wave& w, const Inst& i) {
  u32 addr[kLanes], bytes = extra_bytes(i);
  check_lds_address(w, i);
  u64 seq = ++w.ds_issued;
  Lanes keep;  // the first result may overwrite the address
  memcpy(keep.x, w.reg(i.src[0].reg), sizeof keep.x);
  for (int k = 0; k < 2; k++) {
    u32 off = (u32)(k ? i.offset1 : i.offset) * bytes * Scale;
    for (int l = 0; l < kLanes; l++) addr[l] = keep.x[l] + off;
    lds_read(w, addr, bytes, DF_DWORDS, i.dst[0].reg + k * bytes / 4, seq);
  }
}
template <int Scale>
void h_write2(Wave& w, const Inst& i) {
  u32 addr[kLanes], bytes = extra_bytes(i);
  check_lds_address(w, i);
  u64 seq = ++w.ds_issued;
  for (int k = 0; k < 2; k++) {
    lds_addresses(w, i, (i32)((u32)(k ? i.offset1 : i.offset) * bytes * Scale), addr);
    lds_write(w, addr, bytes, DF_DWORDS, i.src[1 + k], seq);
  }
}

// Transposed reads: in each 16 lanes, lane i gets column i of the rows that the lanes read.
template <int Bits>
void h_read_tr(Wave& w, const Inst& i) {
  u32 addr[kLanes];
  constexpr u32 bytes = Bits == 6 ? 12 : 8, words = bytes / 4, per = bytes * 8 / Bits;
  check_lds_address(w, i);
  lds_addresses(w, i, i.offset, addr);
  u64 seq = ++w.ds_issued;
  check_lds_alignment(w, addr, w.exec(), Bits == 6 ? 4 : 8);
  lds_read(w, addr, bytes, DF_DWORDS, i.dst[0].reg, seq);
  u32 in[words][kLanes], out[words][kLanes];
  u64 undef = 0;
  for (u32 k = 0; k < words; k++) {
    memcpy(in[k], w.reg(i.dst[0].reg + k), sizeof in[k]);
    undef |= w.undef[i.dst[0].reg + k];
  }
  memset(out, 0, sizeof out);
  auto get = [&](int lane, u32 n) -> u32 {
    u32 bit = n * Bits, at = bit & 31;
    u64 pair = in[bit >> 5][lane];
    if ((bit >> 5) + 1 < words) pair |= (u64)in[(bit >> 5) + 1][lane] << 32;
    return pair >> at & ((1u << Bits) - 1);
  };
  constexpr u32 lanes_a_row = 16 / per ? 16 / per : 1;
  u64 spread = 0;
  for (int base = 0; base < kLanes; base += 16) {
    if (undef >> base & 0xffff) spread |= 0xffffull << base;
    for (u32 c = 0; c < 16; c++)
      for (u32 row = 0; row < per; row++) {
        u64 v = get(base + row * lanes_a_row + c / per, c % per);
        u32 bit = row * Bits, at = bit & 31;
        out[bit >> 5][base + c] |= (u32)(v << at);
        if (at + Bits > 32) out[(bit >> 5) + 1][base + c] |= (u32)(v >> (32 - at));
      }
  }
  for (u32 k = 0; k < words; k++) {
    put(w, i.dst[0].reg + k, out[k]);
    w.undef[i.dst[0].reg + k] = (w.undef[i.dst[0].reg + k] & ~w.exec()) | (spread & w.exec());
  }
}

void lane_result(Wave& w, const Inst& i, const u32* out, u64 undef) {
  put(w, i.dst[0].reg, out);
  w.undef[i.dst[0].reg] = (w.undef[i.dst[0].reg] & ~w.exec()) | (undef & w.exec());
  set_tag(w, kVgprBase + i.dst[0].reg, 1, TC_DS, ++w.ds_issued);
}
void h_bpermute(Wave& w, const Inst& i) {
  Lanes out;
  const u32 *a = w.reg(i.src[0].reg), *d = w.reg(i.src[1].reg);
  u64 exec = w.exec(), u = 0, du = w.undef[i.src[1].reg];
  check_lds_address(w, i);
  for (int l = 0; l < kLanes; l++) {
    int from = (a[l] + (u32)i.offset) >> 2 & 63;
    out.x[l] = exec >> from & 1 ? d[from] : 0;
    u |= (exec >> from & du >> from & 1) << l;
  }
  lane_result(w, i, out.x, u);
}
void h_permute(Wave& w, const Inst& i) {
  Lanes out{};
  memset(out.x, 0, sizeof out.x);
  const u32 *a = w.reg(i.src[0].reg), *d = w.reg(i.src[1].reg);
  u64 u = 0, du = w.undef[i.src[1].reg];
  check_lds_address(w, i);
  for (u64 x = w.exec(); x; x &= x - 1) {
    int l = __builtin_ctzll(x), to = (a[l] + (u32)i.offset) >> 2 & 63;
    out.x[to] = d[l];
    u = (u & ~(1ull << to)) | (du >> l & 1) << to;
  }
  lane_result(w, i, out.x, u);
}
// imm is the 16-bit pattern: quads when bit 15 is set, otherwise and, or, xor masks.
void h_swizzle(Wave& w, const Inst& i) {
  Lanes out;
  const u32* d = w.reg(i.src[0].reg);
  u64 exec = w.exec(), u = 0, du = w.undef[i.src[0].reg];
  for (int l = 0; l < kLanes; l++) {
    int from;
    if (i.imm & 0x8000) from = (l & ~3) | (i.imm >> (2 * (l & 3)) & 3);
    else from = (l & 32) | ((((l & 31) & (i.imm & 31)) | (i.imm >> 5 & 31)) ^ (i.imm >> 10 & 31));
    out.x[l] = exec >> from & 1 ? d[from] : 0;
    u |= (exec >> from & du >> from & 1) << l;
  }
  lane_result(w, i, out.x, u);
}
void h_nop(Wave&, const Inst&) {}

struct Table {
  Table() {
    struct L { const char* name; u32 bytes; Form form; };
    const L reads[] = {{"b32", 4, DF_DWORDS}, {"b64", 8, DF_DWORDS}, {"b96", 12, DF_DWORDS},
                       {"b128", 16, DF_DWORDS}, {"u8", 1, DF_U8}, {"i8", 1, DF_I8},
                       {"u16", 2, DF_U16}, {"i16", 2, DF_I16}, {"u8_d16", 1, DF_U8_D16},
                       {"u8_d16_hi", 1, DF_U8_D16_HI}, {"i8_d16", 1, DF_I8_D16},
                       {"i8_d16_hi", 1, DF_I8_D16_HI}, {"u16_d16", 2, DF_D16},
                       {"u16_d16_hi", 2, DF_D16_HI}};
    const L writes[] = {{"b8", 1, DF_U8}, {"b16", 2, DF_U16}, {"b32", 4, DF_DWORDS},
                        {"b64", 8, DF_DWORDS}, {"b96", 12, DF_DWORDS}, {"b128", 16, DF_DWORDS},
                        {"b8_d16_hi", 1, DF_U8_D16_HI}, {"b16_d16_hi", 2, DF_D16_HI}};
    auto width = [](u32 b) { return std::to_string(b < 4 ? 32 : 8 * b); };
    auto add = [](std::string n, std::string form, Handler h, u32 extra) {
      Reg(n.c_str(), FAM_DS, form.c_str(), h, P_CUSTOM, extra);
    };
    for (auto& r : reads)
      add(std::string("ds_read_") + r.name, (r.form >= DF_U8_D16 ? "rb" : "db") + width(r.bytes) + " vb32",
          h_read, pack_extra(r.bytes, r.form));
    for (auto& s : writes)
      add(std::string("ds_write_") + s.name, "vb32 vb" + width(s.bytes), h_write,
          pack_extra(s.bytes, s.form));
    add("ds_read2_b32", "db64 vb32", h_read2<1>, 4);
    add("ds_read2_b64", "db128 vb32", h_read2<1>, 8);
    add("ds_read2st64_b32", "db64 vb32", h_read2<64>, 4);
    add("ds_read2st64_b64", "db128 vb32", h_read2<64>, 8);
    add("ds_write2_b32", "vb32 vb32 vb32", h_write2<1>, 4);
    add("ds_write2_b64", "vb32 vb64 vb64", h_write2<1>, 8);
    add("ds_write2st64_b32", "vb32 vb32 vb32", h_write2<64>, 4);
    add("ds_write2st64_b64", "vb32 vb64 vb64", h_write2<64>, 8);
    add("ds_read_b64_tr_b4", "db64 vb32", h_read_tr<4>, 8);
    add("ds_read_b64_tr_b8", "db64 vb32", h_read_tr<8>, 8);
    add("ds_read_b64_tr_b16", "db64 vb32", h_read_tr<16>, 8);
    add("ds_read_b96_tr_b6", "db96 vb32", h_read_tr<6>, 12);
    add("ds_bpermute_b32", "db32 vb32 vb32", h_bpermute, 0);
    add("ds_permute_b32", "db32 vb32 vb32", h_permute, 0);
    add("ds_swizzle_b32", "db32 vb32", h_swizzle, 0);
    add("ds_nop", "", h_nop, 0);
  }
} table;

}  // namespace
}  // namespace emu
