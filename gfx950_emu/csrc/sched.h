// The scheduler: what is resident, what is ready, what is frozen or lost.
#pragma once
#include <chrono>

#include "vmem.h"

namespace emu {

struct Cu {
  double waves = 0;  // share of the wave slots in use
  u32 lds = 0, wgs = 0;
};

struct Freeze {  // a delayed rank
  u64 until = 0;
  std::vector<Wave*> waves;
};

struct Scheduler {
  Machine& m;
  std::map<u32, Freeze> frozen;
  std::map<u32, u64> executed_by;  // instructions of a rank
  std::map<u32, std::vector<Cu>> cus;  // by rank
  std::vector<std::unique_ptr<Workgroup>> resident;
  std::vector<Wave*> ready;
  std::vector<std::unique_ptr<Workgroup>> spare;
  size_t next = 0;
  u64 since_useful = 0;  // instructions since anything but polling ran
  u64 progressed = 0;    // quantum of it
  u64 fast_forward = 24000;
  int doublings = 0;
  bool idle = false;  // since `idle_since` nothing but polling ran
  std::chrono::steady_clock::time_point idle_since;
  explicit Scheduler(Machine& machine) : m(machine) {}

  // dispatch.cpp
  double share(const Launch&) const;  // of a CU's wave slots that a workgroup takes
  bool startable(const Launch&) const;
  bool place(Launch&);
  void dispatch();
  void start(Launch&, u32 cu);
  void init_wave(Wave&, Workgroup&, Launch&, u32 k, u32* base);
  void release_barrier(Workgroup&);
  void retire(Workgroup&);

  // faults.cpp
  u64 instructions_left(u32 rank);
  u64 next_event() const;
  std::vector<Wave*> take_ready(u32 rank);
  void kill(u32 rank);
  void apply_faults();

  // sched.cpp
  bool late_launches();
  u64 run(Wave&, u64 n);
  bool starved(const Wave&) const;
  bool held(const Wave& w) const { return w.held > m.quantum; }
  size_t pick();
  size_t unheard() const;
  u64 quantum();
  void stuck();
  bool nothing_ready(int& status);
  void after(Wave&, size_t k, u64 n, u64 spun_before, u64 progress_before);
  bool wait_outside();
  bool only_polling(size_t& forced, int& status);
  int loop();
};

}  // namespace emu
