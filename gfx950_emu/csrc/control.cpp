// Branches, waits, barriers and the end of a program.
#include "lanes.h"

namespace emu {
namespace {

u64 address_after(Wave& w) {  // w.pc is already the next instruction
  const Code& c = *w.launch->code;
  return c.text_address + c.insts[w.pc].pc;
}
void jump_to(Wave& w, u64 address) {
  const Code& c = *w.launch->code;
  auto at = c.index_of_pc.find(address - c.text_address);
  if (at == c.index_of_pc.end()) {
    report(w, FK_OOB_READ, 0, address);
    w.status = Status::Done;
    w.stop = true;
    return;
  }
  w.pc = at->second;
}
void undef_branch(Wave& w, bool undef) {
  if (undef && (w.machine->checks & C_UNINIT)) report(w, FK_UNINIT_BRANCH, 0, 0);
}

void h_branch(Wave& w, const Inst& i) { w.pc = i.target; }
Reg r_branch("s_branch", FAM_BRANCH, "j", h_branch, P_CUSTOM);
#define BRANCH(N, TAKEN, UNDEF)                                                \
  void h_##N(Wave& w, const Inst& i) {                                         \
    undef_branch(w, UNDEF);                                                    \
    if (TAKEN) w.pc = i.target;                                                \
  }                                                                            \
  Reg r_##N(#N, FAM_BRANCH, "j", h_##N, P_CUSTOM);
// An undefined bit decides a test for zero only when no defined bit is set.
bool zero_undef(Wave& w, int reg) {
  u64 u = join(w.sundef[reg], w.sundef[reg + 1]);
  return u && !(w.s64[reg / 2] & ~u);
}
BRANCH(s_cbranch_scc0, !w.scc, w.scc_undef)
BRANCH(s_cbranch_scc1, w.scc, w.scc_undef)
BRANCH(s_cbranch_vccz, w.vcc() == 0, zero_undef(w, kVccLo))
BRANCH(s_cbranch_vccnz, w.vcc() != 0, zero_undef(w, kVccLo))
BRANCH(s_cbranch_execz, w.exec() == 0, zero_undef(w, kExecLo))
BRANCH(s_cbranch_execnz, w.exec() != 0, zero_undef(w, kExecLo))
BRANCH(s_cbranch_cdbgsys, false, false)
BRANCH(s_cbranch_cdbguser, false, false)

void h_getpc(Wave& w, const Inst& i) { write_scalar64(w, i.dst[0].reg, address_after(w)); }
Reg r_getpc("s_getpc_b64", FAM_BRANCH, "xb64", h_getpc, P_CUSTOM);
void h_setpc(Wave& w, const Inst& i) { jump_to(w, read_scalar64(w, i.src[0])); }
Reg r_setpc("s_setpc_b64", FAM_BRANCH, "sb64", h_setpc, P_CUSTOM);
void h_swappc(Wave& w, const Inst& i) {
  u64 to = read_scalar64(w, i.src[0]);
  write_scalar64(w, i.dst[0].reg, address_after(w));
  jump_to(w, to);
}
Reg r_swappc("s_swappc_b64", FAM_BRANCH, "xb64 sb64", h_swappc, P_CUSTOM);
void h_call(Wave& w, const Inst& i) {
  write_scalar64(w, i.dst[0].reg, address_after(w));
  w.pc = i.target;
}
Reg r_call("s_call_b64", FAM_BRANCH, "xb64 j", h_call, P_CUSTOM);

void h_waitcnt(Wave& w, const Inst& i) { wait_counters(w, i.wait_vm, i.wait_lgkm); }
Reg r_waitcnt("s_waitcnt", FAM_MISC, "wait", h_waitcnt, P_CUSTOM);

void h_barrier(Wave& w, const Inst&) {
  w.status = Status::Barrier;
  w.stop = true;
}
Reg r_barrier("s_barrier", FAM_MISC, "", h_barrier, P_CUSTOM);

void h_endpgm(Wave& w, const Inst&) {
  drain_all(w);
  w.status = Status::Done;
  w.stop = true;
}
Reg r_endpgm("s_endpgm", FAM_MISC, "", h_endpgm, P_CUSTOM);
void h_trap(Wave& w, const Inst& i) {
  report(w, FK_TRAP, 0, i.imm);
  h_endpgm(w, i);
}
Reg r_trap("s_trap", FAM_MISC, "n", h_trap, P_CUSTOM);

void h_sleep(Wave& w, const Inst&) { w.stop = true; }  // others go first
Reg r_sleep("s_sleep", FAM_MISC, "n", h_sleep, P_CUSTOM);
void h_setprio(Wave& w, const Inst& i) { w.priority = i.imm & 3; }
Reg r_setprio("s_setprio", FAM_MISC, "n", h_setprio, P_CUSTOM);
void h_nothing(Wave&, const Inst&) {}
Reg r_nop("s_nop", FAM_MISC, "n", h_nothing, P_CUSTOM);
Reg r_icache("s_icache_inv", FAM_MISC, "", h_nothing, P_CUSTOM);
Reg r_wakeup("s_wakeup", FAM_MISC, "", h_nothing, P_CUSTOM);
Reg r_incperf("s_incperflevel", FAM_MISC, "n", h_nothing, P_CUSTOM);
Reg r_decperf("s_decperflevel", FAM_MISC, "n", h_nothing, P_CUSTOM);
Reg r_ttrace("s_ttracedata", FAM_MISC, "", h_nothing, P_CUSTOM);
Reg r_sendmsg("s_sendmsg", FAM_MISC, "msg", h_nothing, P_CUSTOM);
void h_sethalt(Wave& w, const Inst& i) {
  if (i.imm) h_trap(w, i);
}
Reg r_sethalt("s_sethalt", FAM_MISC, "n", h_sethalt, P_CUSTOM);

}  // namespace
}  // namespace emu
