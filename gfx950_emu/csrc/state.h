// Waves, workgroups, launches and the machine that runs them.
#pragma once
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "inst.h"

namespace emu {

enum Check : u32 {
  C_WAIT = 1,         // a register read or overwritten before its wait
  C_DEFER = 2,        // stores and LDS DMA take effect late
  C_LDS_RACE = 4,     // happens-before in LDS
  C_BOUNDS = 8,       // LDS bounds (regions are always checked)
  C_UNINIT = 16,      // uninitialised registers and LDS
  C_ALIGN = 32,       // misaligned accesses that fault
  C_BARRIER = 64,     // waves that end while others wait
  C_SCOPE = 128,      // global happens-before and stale caches at scopes
  C_HELD = 256,       // caches that fetched every line when they were last emptied
};

enum class Status : u32 { Ready, Barrier, Done };

// Registers are numbered together for the wait check: SGPRs, then VGPRs.
constexpr int kVgprBase = 128, kRegisters = 128 + 512;
constexpr int kVccLo = 106, kM0 = 124, kExecLo = 126;

// Apertures of the flat address space, in the high dword.
constexpr u64 kSharedAperture = 0x10000000ull << 32, kPrivateAperture = 0x20000000ull << 32;

struct Wave;
struct Workgroup;
struct Launch;
struct Machine;

using Handler = void (*)(Wave&, const Inst&);

struct Writer {  // who made a store, and how far it was written through
  u32 rank = 0, cu = 0, launch = 0, level = 0;
};

struct DeferredStore {  // a global store that memory does not see yet
  u64 seq;
  u64 addr[kLanes];
  u64 lanes;
  u32 bytes;  // a lane
  u32 born;   // quantum
  Writer who;
  std::vector<u8> data;
};

struct WriteBack {  // a buffer_wbl2 that no wait covers yet
  u64 seq, issued;
  u32 level;
};

struct DeferredDma {  // LDS DMA on its way
  u64 seq;
  u32 lds[kLanes];
  u64 lanes;
  u32 bytes;
  u32 pc_index;
  std::vector<u8> data;
};

struct OutstandingDs {  // an LDS access that no wait covers yet
  u64 seq;
  u32 pc_index;
  u32 bytes;
  bool write;
  u64 lanes;
  u32 addr[kLanes];
};

struct Wave {
  union alignas(64) {
    u32 s[128];
    u64 s64[64];
  };
  u32* v = nullptr;      // [vgpr][64]
  u64* undef = nullptr;  // [vgpr] lanes that were never written, or computed from such
  u32 sundef[128];       // bits of the SGPRs, likewise
  bool scc = false, scc_undef = false;
  u32 mode = 0;
  u32 pc = 0;  // index of the instruction
  u64 wmask = 0;  // lanes that the instruction now running writes
  alignas(64) u32 lane_mask[kLanes];
  u64 lane_mask_of = 0;

  // Waits: a register holds the sequence number of the access that will write it.
  u64 vm_issued = 0, vm_done = 0, ds_issued = 0, ds_done = 0, smem_issued = 0, smem_done = 0;
  u64 flat_issued = 0, flat_done = 0, flat_vm = 0, flat_lgkm = 0;
  u64 tag[kRegisters];  // class << 62 | sequence; 0: none
  std::vector<DeferredStore> stores;
  std::vector<DeferredDma> dmas;
  std::vector<OutstandingDs> ds_open;
  std::vector<WriteBack> write_backs;

  Status status = Status::Ready;
  u32 id = 0;       // in the workgroup
  u32 priority = 0;
  u64 held = 0;     // until this quantum others go first
  u64 last_run = 0; // quantum
  u64 executed = 0, spun = 0, spin_run = 0;
  u64 order = 0;    // random, for the priority schedule
  u64 rank_key() const { return (u64)priority << 62 | order >> 2; }
  bool stop = false;  // leave the run loop
  bool unexecuted = false;  // a fault stopped the wave ahead of its instruction
  bool used_clock = false;
  u32 reported = 0;
  std::vector<u8> scratch;
  std::vector<u8> scratch_def;
  Workgroup* wg = nullptr;
  Launch* launch = nullptr;
  Machine* machine = nullptr;
  const Inst* code = nullptr;

  u64& exec() { return s64[kExecLo / 2]; }
  u64& vcc() { return s64[kVccLo / 2]; }
  u32* reg(int r) { return v + r * kLanes; }
  bool waiting() const {
    return vm_issued != vm_done || ds_issued != ds_done || smem_issued != smem_done ||
           flat_issued != flat_done;
  }
  const u32* mask_lanes(u64 mask);
};

// What happened to a granule of LDS since the last barrier: bits 0-9 the epoch that it speaks of,
// 10 written, 11 by an atomic, 12-15 by which wave, 16-31 the waves that read it.
using LdsShadow = u32;
constexpr u32 kEpochMask = 1023, kWritten = 1 << 10, kAtomic = 1 << 11;

struct Workgroup {
  std::vector<u8> lds;
  std::vector<u8> lds_def;  // 0 undefined, 1 defined, 2 LDS DMA pending
  std::vector<LdsShadow> shadow;
  int shadow_shift = 2;
  u32 epoch = 1;
  std::vector<std::unique_ptr<Wave>> waves;
  std::vector<u32> vgprs;
  std::vector<u64> undefs;
  u32 at_barrier = 0, done = 0;
  u32 id[3] = {0, 0, 0};
  u32 index = 0;  // in the launch
  u32 cu = 0;     // of the rank: xcd = cu % xcds
  Launch* launch = nullptr;
  u32 finding_guard = 0;
};

struct Code {
  std::vector<Inst> insts;
  std::vector<Handler> handlers;
  std::vector<u8> families;
  std::vector<u8> props;
  std::unordered_map<u64, u32> index_of_pc;
  std::unordered_map<u32, Handler> marked;  // what handlers[] held before a fault was put there
  u64 text_address = 0;  // where pc 0 is in memory
  bool sub_dword_lds = false;
};

struct LaunchDesc {  // mirrors run.py
  u64 kernarg, dispatch_packet;
  u32 code, rank, entry, lds_bytes, scratch_bytes, vgprs, sgprs, accum_offset;
  u32 grid[3], block[3];  // grid in workgroups
  u32 mode, preload_length, preload_offset, user_sgprs_used, workitem_dims;
  u32 user_sgpr_count, wg_id_mask, private_segment, priority, start_after;  // launch id + 1
  u32 user_enable;  // bits in the ABI's order
  u32 delay_rounds, pad;
};

struct Counters {
  u64 lds_read_bytes, lds_write_bytes, lds_accesses, lds_conflict_cycles, lds_cycles;
  u64 global_read_bytes, global_write_bytes, atomic_bytes, smem_bytes, dma_bytes;
  u64 read_lines, write_lines;  // unique 128-byte lines of the launch
  u64 read_lines_l2, write_lines_l2, read_lines_l1, write_lines_l1;  // of each XCD, of each CU
  u64 read_lines_instructions, write_lines_instructions;             // of each wave-instruction
  u64 waves, workgroups, barriers, spin, executed, max_resident_workgroups;
};

struct Traffic {  // by line of the machine's regions: the CUs that read it, those that stored to it
  u32 words = 0;  // a mask of CUs
  std::vector<std::unique_ptr<u64[]>> pages;
  u64* line(const Machine&, u64 n);
};

struct Launch {
  LaunchDesc d;
  u32 id = 0;
  Code* code = nullptr;
  u32 next_wg = 0, total_wg = 0, live_wg = 0, done_wg = 0, wg_per_cu = 0;
  std::vector<u64> counts;
  Counters c{};
  std::vector<DeferredStore> orphans;  // stores of waves that have ended
  Traffic traffic;
  bool lost = false;  // its rank was killed
  bool finished() const { return done_wg == total_wg; }
};

struct Region {
  u64 base, size;
  u32 perms;  // 1 read, 2 write
  u32 id;
  u64 line0;  // number of its first line
  u64 page0 = 0;  // first page in scope.cpp
};

struct Finding {  // mirrors report.py
  u32 kind, launch, rank, workgroup, wave, lane, pc_index, count;
  u64 addr, aux;
};

enum FindingKind : u32 {
  FK_WAIT_READ = 1,
  FK_WAIT_OVERWRITE,
  FK_LDS_RACE,
  FK_LDS_BOUNDS,
  FK_LDS_PENDING,
  FK_OOB_READ,
  FK_OOB_WRITE,
  FK_UNINIT_ADDRESS,
  FK_UNINIT_STORE,
  FK_UNINIT_BRANCH,
  FK_UNINIT_EXEC,
  FK_UNINIT_LDS,
  FK_MISALIGNED,
  FK_DEADLOCK,
  FK_BARRIER_DIVERGENCE,
  FK_RESIDENCY,
  FK_STALE,
  FK_TRAP,
  FK_UNSUPPORTED,
  FK_LIMIT,
  FK_DMA_PENDING,
  FK_GLOBAL_RACE,
};

enum FaultAction : u32 { FA_KILL, FA_DELAY };
enum FaultTrigger : u32 { FT_INSTRUCTIONS, FT_CYCLE, FT_LAUNCHES, FT_PLACE };
struct FaultDesc {  // mirrors run.py
  u32 action, rank, trigger, pad;
  u64 count;   // instructions, cycles, launches, arrivals
  u64 cycles;  // how long a delay is
};
struct Fault {
  FaultDesc d;
  bool fired = false, due = false;
  u64 seen = 0;  // arrivals
  u64 clock = 0, executed = 0, launches = 0;  // when it happened
};
struct Mark {  // a fault waits at this instruction
  u32 fault, code, index;
};

struct DeviceModel {  // mirrors settings.py
  u32 xcds, cus_per_xcd, lds_bytes, waves_per_simd, vgprs_per_simd, simds, max_workgroups;
  u32 sgprs;
};

struct ScheduleDesc {  // mirrors run.py
  u32 kind, starve_rank, starve_workgroup, starve_wave;
  u64 seed, quantum_min, quantum_max, max_instructions, spin_rounds;
  double outside_s;
};

struct Rng {  // splitmix64
  u64 x = 0;
  u64 next() {
    u64 z = (x += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  u64 below(u64 n) { return n ? next() % n : 0; }
};

struct Scopes;

struct Machine {
  std::shared_ptr<Scopes> scopes;
  DeviceModel device{};
  ScheduleDesc schedule{};
  u32 checks = 0;
  Rng rng;
  std::vector<Region> regions;
  u64 lines = 0;
  std::vector<std::unique_ptr<Code>> codes;
  std::vector<std::unique_ptr<Launch>> launches;
  std::vector<Fault> faults;
  std::vector<Mark> marks;
  std::vector<Finding> findings;
  std::unordered_map<u64, u32> finding_index;
  u64 clock = 0;     // virtual cycles at 2.4 GHz
  u64 executed = 0;  // wave-instructions
  u64 progress = 0;  // counts what a waiting wave might be waiting for
  u64 quantum = 0;
  bool fatal = false;
  const Region* last = nullptr;

  const Region* find(u64 addr, u64 size);
  void find_or_report(Wave&, u64 addr, u64 size, bool write, int lane);
};

// checks.cpp
void report(Wave&, FindingKind, int lane, u64 addr, u64 aux = 0);
void check_pending(Wave&, const Inst&);
u64 undef_sources(Wave&, const Inst&);
void spread_undef(Wave&, const Inst&, u64 undef);
bool sgpr_undef(Wave&, const Operand&);

// memory.cpp
u64 next_vm(Wave&);
void drain_vm(Wave&, u64 upto);
void drain_all(Wave&);
void drain_some(Machine&, std::vector<DeferredStore>&);
void drain_orphans(Machine&, Launch&);
void wait_counters(Wave&, u32 vm, u32 lgkm);
void set_tag(Wave&, int reg, int count, int cls, u64 seq);

// scope.cpp. Levels: 0 the CU, 1 the agent, 2 the system.
inline u32 scope_level(u32 flags) { return flags & F_SC1 ? (flags & F_SC0 ? 2 : 1) : 0; }
void scope_write(Machine&, const Writer&, const u64* addr, u64 lanes, u32 bytes);
void scope_read(Wave&, const u64* addr, u64 lanes, u32 bytes, u32 level);
void scope_scalar_read(Wave&, u64 addr, u32 bytes);
void scope_scalar_invalidate(Wave&);
u64 scope_now(Machine&);
void scope_write_back(Wave&, u32 level, u64 issued);
void scope_invalidate(Wave&, u32 flags);
void scope_launch(Machine&, u32 rank);

enum TagClass { TC_VM = 0, TC_DS = 1, TC_SMEM = 2, TC_FLAT = 3 };

// traffic.cpp
void touch_line(Wave&, u64 line, bool write);
void touch_lanes(Wave&, const Region*, const u64* addr, u64 lanes, u32 bytes, u64 lo, u64 hi,
                 bool write);
void count_traffic(const Machine&, Launch&);

// sched.cpp
int run_machine(Machine&);
void mark_instruction(Machine&, u32 fault, u32 code, u32 index);

}  // namespace emu
