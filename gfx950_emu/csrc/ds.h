// LDS: what reads, writes and atomics share.
#pragma once
#include "vmem.h"

namespace emu {

void note_open(Wave& w, const u32* addr, u64 lanes, u32 bytes, bool write, u64 seq);
void count_banks(Wave& w, const u32* addr, u64 lanes, u32 bytes);
// Lanes whose bytes lie in LDS; the first other one is reported.
u64 in_bounds(Wave& w, const u32* addr, u64 lanes, u32 bytes);
// Each lane's address register plus `offset`.
void lds_addresses(Wave& w, const Inst& i, i32 offset, u32* out);
void check_lds_address(Wave& w, const Inst& i);
void check_lds_alignment(Wave& w, const u32* addr, u64 lanes, u32 to);
u64 undefined_lanes(Wave& w, const u32* addr, u64 lanes, u32 bytes);
void lds_read(Wave& w, const u32* addr, u32 bytes, Form form, int reg, u64 seq);
void lds_write(Wave& w, const u32* addr, u32 bytes, Form form, const Operand& data, u64 seq);

}  // namespace emu
