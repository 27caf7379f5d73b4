// The decoded instruction, as gfx950_emu/records.py writes it (INST_DTYPE there mirrors this file).
#pragma once
#include <cstdint>
#include <cstring>

namespace emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kLanes = 64;

template <class To, class From>
constexpr To bit_cast(const From& x) {
  return __builtin_bit_cast(To, x);
}

enum Kind : u8 { K_NONE, K_VGPR, K_SGPR, K_CONST, K_SPECIAL };
enum Special : u16 { SP_SCC, SP_VCCZ, SP_EXECZ, SP_SHARED_BASE, SP_SHARED_LIMIT, SP_PRIVATE_BASE,
                     SP_PRIVATE_LIMIT };

// What an operand means to modifiers and to inline constants.
enum Type : u8 { T_B32, T_F32, T_F16, T_B16, T_BF16, T_B64, T_F64, T_PK16, T_PKB16, T_PK32, T_WIDE,
                 T_MASK };

enum Mod : u8 { M_NEG = 1, M_ABS = 2, M_SEXT = 4 };
enum Sel : u8 { SEL_BYTE0, SEL_BYTE1, SEL_BYTE2, SEL_BYTE3, SEL_WORD0, SEL_WORD1, SEL_DWORD };

struct Operand {
  u8 kind;
  u8 type;
  u8 width;  // dwords
  u8 mods;
  u8 sel;  // of SDWA
  u8 pad;
  u16 reg;  // VGPR (AGPRs follow at the kernel's accum offset), SGPR or Special
  u64 lit;
};

enum Flag : u32 {
  F_SC0 = 1 << 0,
  F_SC1 = 1 << 1,
  F_NT = 1 << 2,
  F_OFFEN = 1 << 3,
  F_IDXEN = 1 << 4,
  F_LDS = 1 << 5,
  F_CLAMP = 1 << 6,
  F_DPP = 1 << 7,
  F_SDWA = 1 << 8,
  F_BOUND_CTRL = 1 << 9,
  F_GDS = 1 << 10,
  F_SPIN = 1 << 11,      // inside a polling loop
  F_CLOCK = 1 << 12,     // that loop reads a clock
  F_SLOW_OUT = 1 << 13,  // the result needs more than a masked copy
  F_READS_DST = 1 << 14,
  F_COHERENT = 1 << 15,
  F_FLAT = 1 << 17,       // flat_*: LDS and scratch are possible
  F_PLAIN = 1 << 16,  // no modifier at all: sources are whole registers or constants
};

enum Dpp : u8 { DPP_NONE, DPP_QUAD_PERM, DPP_ROW_SHL, DPP_ROW_SHR, DPP_ROW_ROR, DPP_WAVE_SHL,
                DPP_WAVE_ROL, DPP_WAVE_SHR, DPP_WAVE_ROR, DPP_ROW_MIRROR, DPP_ROW_HALF_MIRROR,
                DPP_ROW_BCAST15, DPP_ROW_BCAST31, DPP_ROW_NEWBCAST };

struct Inst {
  Operand dst[2];
  Operand src[5];
  u32 op;
  u32 flags;
  i32 offset;
  i32 offset1;
  u32 target;  // index of the branch target
  u32 pc;
  u32 extra;   // OpDef::extra, set when loaded
  u32 imm;  // hwreg, swizzle pattern, bitop3 table, immediate
  u8 omod;  // 0, 1: *2, 2: *4, 3: /2
  u8 op_sel, op_sel_hi, neg_lo, neg_hi;
  u8 cbsz, abid, blgp;
  u8 dpp, dpp_arg, row_mask, bank_mask;
  u8 dst_sel, dst_unused;  // 0 pad, 1 sign-extend, 2 preserve
  u8 wait_vm, wait_lgkm;   // 255: not waited for
};
static_assert(sizeof(Operand) == 16 && sizeof(Inst) == 160);

}  // namespace emu
