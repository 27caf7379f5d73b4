// Read-modify-write operations, shared by LDS, flat and buffer instructions.
#pragma once
#include "inst.h"

namespace emu {

struct Rmw {
  const char* name;     // of flat and buffer instructions, without "_x2"
  const char* ds;       // of LDS instructions ("" when they have none): add_u32 -> ds_add[_rtn]_u32
  u8 bytes;
  u8 sources;           // 2 for compare-and-swap
  u64 (*fn)(u64 mem, u64 data, u64 data2);
};
extern const Rmw kRmw[];
extern const int kRmwCount;

}  // namespace emu
