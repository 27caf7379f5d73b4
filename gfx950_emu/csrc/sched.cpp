// The schedules, the virtual clock and the deadlock detector.
#include "sched.h"

#include <algorithm>
#include <cfenv>
#include <thread>

namespace emu {

// One wave for up to `n` instructions.
u64 Scheduler::run(Wave& w, u64 n) {
  const Inst* code = w.code;
  const Handler* handlers = w.launch->code->handlers.data();
  const u8* lane_wise = w.launch->code->props.data();
  u64* counts = w.launch->counts.data();
  const bool waits = m.checks & C_WAIT, undef = m.checks & C_UNINIT;
  u64 done = 0, spun = 0;
  w.stop = false;
  u32 mode = w.mode & 3;
  if (mode) fesetround(mode == 1 ? FE_UPWARD : mode == 2 ? FE_DOWNWARD : FE_TOWARDZERO);
  while (done < n) {
    u32 at = w.pc;
    const Inst& i = code[at];
    w.pc = at + 1;
    counts[at]++;
    done++;
    spun += (i.flags & F_SPIN) != 0;
    if (waits && w.waiting()) check_pending(w, i);
    w.wmask = w.exec();
    if (undef && lane_wise[at]) {
      u64 u = undef_sources(w, i);
      handlers[at](w, i);
      spread_undef(w, i, u);
    } else {
      handlers[at](w, i);
    }
    if (w.stop) break;
    if (__builtin_expect((w.mode & 3) != mode, 0)) break;
  }
  if (mode) fesetround(FE_TONEAREST);
  if (w.unexecuted) {
    w.unexecuted = false;
    done--, counts[w.pc]--, spun -= (code[w.pc].flags & F_SPIN) != 0;
  }
  w.executed += done, w.spun += spun;
  w.launch->c.spin += spun, w.launch->c.executed += done;
  if (spun < done) since_useful = 0, doublings = 0, idle = false;
  else since_useful += done;
  if (spun) m.clock += 64;
  return done;
}

bool Scheduler::starved(const Wave& w) const {
  const ScheduleDesc& s = m.schedule;
  if (s.kind != 3) return false;
  return (s.starve_rank == ~0u || w.launch->d.rank == s.starve_rank) &&
         (s.starve_workgroup == ~0u || w.wg->index == s.starve_workgroup) &&
         (s.starve_wave == ~0u || w.id == s.starve_wave);
}

size_t Scheduler::pick() {
  const ScheduleDesc& s = m.schedule;
  if (s.kind == 0) return next < ready.size() ? next : 0;
  if (s.kind == 2) {  // the highest priority; a wave that only polled was put down
    size_t best = 0;
    u64 most = 0;
    for (size_t k = 0; k < ready.size(); k++) {
      u64 key = held(*ready[k]) ? 0 : ready[k]->rank_key();
      if (key > most) most = key, best = k;
    }
    return best;
  }
  size_t k = m.rng.below(ready.size());
  if (held(*ready[k]) || (s.kind == 3 && starved(*ready[k]) && m.rng.below(4096))) {
    for (size_t n = 0; n < ready.size(); n++) {
      size_t q = (k + n) % ready.size();
      if (!starved(*ready[q]) && !held(*ready[q]) && ready[q]->spin_run < 4) return q;
    }
  }
  return k;
}

// A wave that has not run since the last progress may still make some: a deadlock is called
// only after it ran too.
size_t Scheduler::unheard() const {
  size_t k = 0;
  while (k < ready.size() && ready[k]->last_run > progressed) k++;
  return k;
}

u64 Scheduler::quantum() {
  const ScheduleDesc& s = m.schedule;
  if (s.quantum_max <= s.quantum_min) return std::max<u64>(1, s.quantum_min);
  double lo = std::log2((double)s.quantum_min + 1), hi = std::log2((double)s.quantum_max + 1);
  double f = (double)(m.rng.next() >> 11) / (double)(1ull << 53);
  return std::max<u64>(1, (u64)std::exp2(lo + f * (hi - lo)));
}

void Scheduler::stuck() {
  for (auto& g : resident)
    for (auto& w : g->waves)
      if (w->status != Status::Done)
        report(*w, FK_DEADLOCK, 0, (u64)w->status, w->executed);
  for (auto& l : m.launches)
    if (l->next_wg < l->total_wg && l->next_wg > 0 && !l->lost && !resident.empty()) {
      Wave& w = *resident[0]->waves[0];
      u32 pc = w.pc;
      m.findings.push_back({FK_RESIDENCY, l->id, l->d.rank, l->next_wg, 0, 0, pc, 1,
                            l->total_wg - l->next_wg, l->live_wg});
    }
}

// No wave can run: the end, or a launch that waits for its start; `status` when the run is over.
bool Scheduler::nothing_ready(int& status) {
  bool all = true;
  for (auto& l : m.launches) all &= l->finished() || l->lost;
  if (all) {
    status = 0;
    return true;
  }
  if (!frozen.empty()) {
    m.clock = std::max(m.clock, next_event());
    return false;
  }
  if (!resident.empty()) {
    stuck();
    status = 1;
    return true;
  }
  if (late_launches()) return false;
  for (auto& l : m.launches)
    if (!l->finished() && !l->lost)
      m.findings.push_back({FK_RESIDENCY, l->id, l->d.rank, 0, 0, 0, l->d.entry, 1,
                            l->total_wg - l->next_wg, 0});
  status = 2;
  return true;
}

// Starts launches whose delay is the only thing left to wait for.
bool Scheduler::late_launches() {
  u64 first = ~0ull;
  for (auto& l : m.launches)
    if (l->next_wg == 0 && !l->lost && l->d.delay_rounds > m.quantum)
      first = std::min<u64>(first, l->d.delay_rounds);
  if (first == ~0ull) return false;
  u64 before = m.progress;
  m.quantum = first;
  dispatch();
  return m.progress != before || late_launches();
}

// Bookkeeping when wave `k` has run `n` instructions.
void Scheduler::after(Wave& w, size_t k, u64 n, u64 spun_before, u64 progress_before) {
  m.executed += n;
  m.clock += 1 + 4 * n / std::min<size_t>(std::max<size_t>(ready.size(), 1), 1024);
  bool only_spun = w.spun - spun_before == n;
  w.spin_run = only_spun ? w.spin_run + 1 : 0;
  // Of waves that only polled, those that ran last come last, roughly.
  w.order = only_spun ? (1ull << 62) - 4 * (m.quantum + m.rng.below(16))
                      : m.rng.next() | 1ull << 63;
  if (m.progress != progress_before) since_useful = 0;
  if (!since_useful) progressed = m.quantum;
  if (!w.stores.empty()) drain_some(m, w.stores);
  for (auto& l : m.launches)
    if (!l->orphans.empty()) drain_some(m, l->orphans);
  if (w.status == Status::Ready) {
    next = k + 1;
    if (next >= ready.size()) next = 0;
    return;
  }
  if (m.schedule.kind == 0) ready.erase(ready.begin() + k);
  else ready[k] = ready.back(), ready.pop_back();
  next = k < ready.size() ? k : 0;
  Workgroup& g = *w.wg;
  if (w.status == Status::Done && ++g.done == g.waves.size()) retire(g);
  else release_barrier(g);
}

// Other processes write in real time: a little later, what is polled for may be there. False when
// they had long enough.
bool Scheduler::wait_outside() {
  constexpr u64 kLooks = 64;  // instructions a wave before it rests
  constexpr std::chrono::microseconds kRest{200};
  if (m.schedule.outside_s <= 0 || since_useful <= kLooks * ready.size()) return false;
  if (unheard() < ready.size()) return false;
  auto now = std::chrono::steady_clock::now();
  if (!idle) idle = true, idle_since = now;
  if (std::chrono::duration<double>(now - idle_since).count() >= m.schedule.outside_s) return false;
  std::this_thread::sleep_for(kRest);
  since_useful = 0;
  return true;
}

// All ready waves have only polled for long: the clock jumps ahead for those that read it,
// otherwise nothing will ever change.
bool Scheduler::only_polling(size_t& forced, int& status) {
  if (wait_outside()) return false;
  if (since_useful <= m.schedule.spin_rounds * std::max<size_t>(ready.size(), 1)) return false;
  forced = unheard();
  if (forced < ready.size()) return false;
  bool clocked = false;
  for (Wave* r : ready) clocked |= r->used_clock;
  u64 event = next_event();
  if (clocked && doublings < 44) {
    m.clock = std::min(m.clock + (fast_forward << std::min(doublings, 40)),
                       std::max(event, m.clock));
    doublings++;
    since_useful = 0;
    return false;
  }
  if (event != ~0ull || late_launches()) {
    if (event != ~0ull) m.clock = std::max(m.clock, event);
    since_useful = 0;
    return false;
  }
  stuck();
  status = 1;
  return true;
}

int Scheduler::loop() {
  size_t forced = ~size_t{0};  // a wave whose turn it is whatever the schedule says
  int status = 0;
  u64 next_start = 0;
  if (!m.faults.empty()) apply_faults();
  dispatch();
  for (auto& l : m.launches) next_start = std::max<u64>(next_start, l->d.delay_rounds);
  while (true) {
    if (!m.faults.empty()) apply_faults();
    if (m.quantum <= next_start) dispatch();
    if (ready.empty()) {
      if (nothing_ready(status)) return status;
      continue;
    }
    size_t k = forced < ready.size() ? forced : pick();
    forced = ~size_t{0};
    Wave& w = *ready[k];
    w.last_run = ++m.quantum;
    u64 progress = m.progress, spun = w.spun;
    u64 n = quantum();
    if (!m.faults.empty()) n = std::min(n, instructions_left(w.launch->d.rank));
    n = run(w, n);
    if (!m.faults.empty()) executed_by[w.launch->d.rank] += n;
    after(w, k, n, spun, progress);
    if (m.executed > m.schedule.max_instructions) {
      if (!ready.empty()) report(*ready[0], FK_LIMIT, 0, m.executed);
      return 3;
    }
    if (only_polling(forced, status)) return status;
  }
}

int run_machine(Machine& m) {
  m.rng.x = m.schedule.seed;
  int status = Scheduler(m).loop();
  for (auto& l : m.launches) count_traffic(m, *l);  // of those that did not end
  return status;
}

}  // namespace emu
