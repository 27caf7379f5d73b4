// The table of opcodes: one entry an instruction, made by the handler files, read by records.py.
#pragma once
#include <string>
#include <vector>

#include "state.h"

namespace emu {

enum Family : u8 { FAM_VALU, FAM_VOP3P, FAM_MFMA, FAM_SALU, FAM_BRANCH, FAM_SMEM, FAM_DS, FAM_FLAT,
                   FAM_MUBUF, FAM_MISC };
// How undefined lanes spread: lane by lane, to every lane, or the handler does it.
enum Prop : u8 { P_LANE, P_ALL, P_CUSTOM };

struct OpDef {
  std::string name;
  Family family;
  std::string form;  // operands, see operands.py
  Handler fn;
  Prop prop;
  u32 extra;  // for the handler's family: bytes, ...
};

std::vector<OpDef>& optable();

struct Reg {
  Reg(const char* name, Family family, const char* form, Handler fn, Prop prop = P_LANE,
      u32 extra = 0) {
    optable().push_back({name, family, form, fn, prop, extra});
  }
};

}  // namespace emu
