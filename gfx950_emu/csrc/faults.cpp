// Fault injection: a rank is killed or delayed part-way.
//
// A killed rank executes nothing more; of its stores that memory has not seen, chance decides
// which ones it still sees. A delayed rank stands still until the virtual clock has gone on.
#include <algorithm>

#include "sched.h"

namespace emu {
namespace {

// Stands in for the handler of an instruction that a fault waits at: the wave does not execute it.
void h_marked(Wave& w, const Inst& i) {
  Machine& m = *w.machine;
  u32 at = w.pc - 1;
  for (const Mark& mark : m.marks) {
    Fault& f = m.faults[mark.fault];
    if (mark.code != w.launch->d.code || mark.index != at || f.fired || f.due) continue;
    if (f.d.rank != w.launch->d.rank || ++f.seen != f.d.count) continue;
    f.due = true;
    w.pc = at;
    w.stop = w.unexecuted = true;
    return;
  }
  w.launch->code->marked.at(at)(w, i);
}

}  // namespace

void mark_instruction(Machine& m, u32 fault, u32 code, u32 index) {
  m.marks.push_back({fault, code, index});
  Code& c = *m.codes[code];
  if (c.marked.emplace(index, c.handlers[index]).second) c.handlers[index] = h_marked;
}

u64 Scheduler::instructions_left(u32 rank) {
  u64 left = ~0ull;
  for (const Fault& f : m.faults)
    if (!f.fired && f.d.trigger == FT_INSTRUCTIONS && f.d.rank == rank)
      left = std::min(left, f.d.count - std::min(f.d.count, executed_by[rank]));
  return left;
}

// The next time at which something happens by itself; the clock does not jump past it.
u64 Scheduler::next_event() const {
  u64 at = ~0ull;
  for (auto& [rank, freeze] : frozen) at = std::min(at, freeze.until);
  for (const Fault& f : m.faults)
    if (!f.fired && f.d.trigger == FT_CYCLE) at = std::min(at, f.d.count);
  return at;
}

std::vector<Wave*> Scheduler::take_ready(u32 rank) {
  std::vector<Wave*> taken, rest;
  for (Wave* w : ready) (w->launch->d.rank == rank ? taken : rest).push_back(w);
  ready.swap(rest);
  if (next >= ready.size()) next = 0;
  return taken;
}

void Scheduler::kill(u32 rank) {
  take_ready(rank);
  frozen.erase(rank);
  for (size_t k = 0; k < resident.size();) {
    Workgroup& g = *resident[k];
    if (g.launch->d.rank != rank) {
      k++;
      continue;
    }
    for (auto& w : g.waves) drain_some(m, w->stores);
    spare.push_back(std::move(resident[k]));
    resident[k] = std::move(resident.back());
    resident.pop_back();
  }
  for (auto& l : m.launches)
    if (l->d.rank == rank && !l->finished()) {
      drain_some(m, l->orphans);
      l->orphans.clear();
      l->lost = true;
    }
}

void Scheduler::apply_faults() {
  for (Fault& f : m.faults) {
    if (f.fired) continue;
    u64 finished = 0;
    for (auto& l : m.launches) finished += l->d.rank == f.d.rank && l->finished();
    bool now = f.due;
    if (f.d.trigger == FT_INSTRUCTIONS) now = executed_by[f.d.rank] >= f.d.count;
    if (f.d.trigger == FT_CYCLE) now = m.clock >= f.d.count;
    if (f.d.trigger == FT_LAUNCHES) now = finished >= f.d.count;
    if (!now) continue;
    f.fired = true;
    f.clock = m.clock, f.executed = executed_by[f.d.rank], f.launches = finished;
    since_useful = 0, progressed = m.quantum;
    if (f.d.action == FA_KILL) {
      kill(f.d.rank);
    } else {
      Freeze& z = frozen[f.d.rank];
      z.until = std::max(z.until, m.clock + f.d.cycles);
      for (Wave* w : take_ready(f.d.rank)) z.waves.push_back(w);
    }
  }
  bool thawed = false;
  for (auto z = frozen.begin(); z != frozen.end();) {
    if (z->second.until > m.clock) {
      ++z;
      continue;
    }
    for (Wave* w : z->second.waves) ready.push_back(w);
    z = frozen.erase(z);
    thawed = true;
  }
  if (thawed) since_useful = 0, progressed = m.quantum, dispatch();
}

}  // namespace emu
