// Vector memory: what flat, buffer and LDS handlers share.
#pragma once
#include "lanes.h"

namespace emu {

// Lanes that may access their address; the others are reported.
u64 usable_lanes(Wave& w, const u64* addr, u64 lanes, u32 bytes, bool write);
// The wave's own buffered stores become visible where a load or atomic follows them.
void drain_overlap(Wave& w, const u64* addr, u64 lanes, u32 bytes);
// An LDS access for the race check; `same`: lanes that write what is there already.
void mark_lds(Wave& w, const u32* addr, u64 lanes, u32 bytes, bool write, u32 pc_index,
              u64 same = 0);

enum class Op { Load, Store, Atomic };

// How a load or store treats its data.
enum Form : u32 {
  DF_DWORDS,      // bytes / 4 registers
  DF_U8, DF_I8, DF_U16, DF_I16,
  DF_U8_D16, DF_U8_D16_HI, DF_I8_D16, DF_I8_D16_HI, DF_D16, DF_D16_HI,
};
inline u32 pack_extra(u32 bytes, Form f) { return bytes | f << 8; }
inline u32 extra_bytes(const Inst& i) { return i.extra & 0xff; }
inline Form extra_form(const Inst& i) { return (Form)(i.extra >> 8); }

// Puts loaded bytes of lane `l` into the registers at `reg`.
void put_loaded(Wave& w, int reg, int l, const u8* from, u32 bytes, Form form);
// Takes the bytes to store.
void take_stored(Wave& w, int reg, int l, u8* to, u32 bytes, Form form);

inline bool undef_in(Wave& w, const Operand& o, u64 lanes) {
  if (o.kind == K_SGPR) return sgpr_undef(w, o);
  if (o.kind != K_VGPR) return false;
  u64 u = 0;
  for (int k = 0; k < o.width; k++) u |= w.undef[o.reg + k];
  return u & lanes;
}
inline u64 undef_lanes(Wave& w, const Operand& o) {
  u64 u = 0;
  if (o.kind == K_VGPR)
    for (int k = 0; k < o.width; k++) u |= w.undef[o.reg + k];
  return u;
}

}  // namespace emu
