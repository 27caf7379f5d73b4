// Vector memory: what flat, buffer and LDS handlers share.
#pragma once
#include <functional>

#include "lanes.h"

namespace emu {

// Lanes that may access their address; the others are reported.
u64 usable_lanes(Wave& w, const u64* addr, u64 lanes, u32 bytes, bool write);
// The wave's own buffered stores become visible where a load or atomic follows them.
void drain_overlap(Wave& w, const u64* addr, u64 lanes, u32 bytes);
// An LDS access for the race check; `same`: lanes that write what is there already. Atomics of
// several waves do not race: kAtomicAccess in pc_index.
constexpr u32 kAtomicAccess = 1u << 31;
void mark_lds(Wave& w, const u32* addr, u64 lanes, u32 bytes, bool write, u32 pc_index,
              u64 same = 0);

// To or from global memory. Aligned 64-bit words are never torn, also where another process that
// shares the memory looks on.
inline void copy_memory(void* to, const void* from, u32 bytes) {
  if (bytes % 8 || (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 8) {
    memcpy(to, from, bytes);
    return;
  }
  for (u32 k = 0; k < bytes / 8; k++)
    __atomic_store_n(static_cast<u64*>(to) + k,
                     __atomic_load_n(static_cast<const u64*>(from) + k, __ATOMIC_RELAXED),
                     __ATOMIC_RELAXED);
}

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

// vmem.cpp: what flat and buffer instructions share.
struct Rmw;
struct Address {
  u64 a[kLanes];
  u64 lanes;  // those that access memory
};
void check_memory_address(Wave& w, const Inst& i);
void check_data(Wave& w, const Operand& o, u64 lanes);
void load_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form,
                int reg);
void store_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form, int reg,
                 u64 seq);
void store_bytes(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, u64 seq,
                 const std::function<void(int lane, u8* to)>& take);
void modify(Wave& w, const Inst& i, int l, void* p, const Rmw& op);
void atomic_lanes(Wave& w, const Inst& i, const Address& r, u64 lanes, const Rmw& op);
void dma(Wave& w, const Inst& i, const Address& r, u64 lanes, u32 bytes, Form form);
// The result of a load is there after a wait.
void finish_load(Wave& w, const Inst& i, u64 lanes, bool flat);

struct MemoryForm {
  const char* name;
  u32 bytes;
  Form form;
};
extern const MemoryForm kLoadForms[14], kStoreForms[8];  // by the mnemonic's last words
inline std::string dwords_of(u32 bytes) { return std::to_string(bytes < 4 ? 32 : 8 * bytes); }

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
