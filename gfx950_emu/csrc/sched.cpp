// Dispatch of workgroups to compute units, the schedules, and the deadlock detector.
#include <algorithm>
#include <cfenv>

#include "vmem.h"

namespace emu {
namespace {

struct Cu {
  double waves = 0;  // share of the wave slots in use
  u32 lds = 0, wgs = 0;
};

struct Scheduler {
  Machine& m;
  std::map<u32, std::vector<Cu>> cus;  // by rank
  std::vector<std::unique_ptr<Workgroup>> resident;
  std::vector<Wave*> ready;
  std::vector<std::unique_ptr<Workgroup>> spare;
  size_t next = 0;
  u64 since_useful = 0;  // instructions since anything but polling ran
  u64 progressed = 0;    // quantum of it
  u64 fast_forward = 24000;
  int doublings = 0;
  explicit Scheduler(Machine& machine) : m(machine) {}

  double share(const Launch& l) const {
    u32 regs = std::max(l.d.vgprs, 8u);
    u32 per_simd = std::min(m.device.waves_per_simd, m.device.vgprs_per_simd / regs);
    return (double)waves_of(l) / std::max(1u, per_simd * m.device.simds);
  }
  static u32 threads_of(const Launch& l) { return l.d.block[0] * l.d.block[1] * l.d.block[2]; }
  static u32 waves_of(const Launch& l) { return (threads_of(l) + kLanes - 1) / kLanes; }

  bool startable(const Launch& l) const {
    return l.next_wg < l.total_wg &&
           (!l.d.start_after || m.launches[l.d.start_after - 1]->finished()) &&
           m.quantum >= l.d.delay_rounds;
  }

  // Workgroup n goes to XCD n % xcds, there to the CU with the fewest workgroups that has room.
  bool place(Launch& l) {
    auto& list = cus[l.d.rank];
    if (list.empty()) list.resize(m.device.xcds * m.device.cus_per_xcd);
    u32 xcd = l.next_wg % m.device.xcds;
    double s = share(l);
    int best = -1;
    for (u32 k = xcd; k < list.size(); k += m.device.xcds) {
      Cu& c = list[k];
      if (c.waves + s > 1.0 + 1e-9 || c.lds + l.d.lds_bytes > m.device.lds_bytes) continue;
      if (c.wgs >= m.device.max_workgroups) continue;
      if (best < 0 || c.wgs < list[best].wgs) best = (int)k;
    }
    if (best < 0) return false;
    list[best].waves += s, list[best].lds += l.d.lds_bytes, list[best].wgs++;
    start(l, (u32)best);
    return true;
  }

  void dispatch() {
    for (auto& l : m.launches)
      while (startable(*l) && place(*l)) {
      }
  }

  void start(Launch& l, u32 cu) {
    std::unique_ptr<Workgroup> g;
    if (!spare.empty()) g = std::move(spare.back()), spare.pop_back();
    else g = std::make_unique<Workgroup>();
    const LaunchDesc& d = l.d;
    u32 n = l.next_wg++;
    if (n == 0) scope_launch(m, d.rank);
    g->index = n, g->cu = cu, g->launch = &l, g->epoch = 1, g->at_barrier = g->done = 0;
    g->id[0] = n % d.grid[0], g->id[1] = n / d.grid[0] % d.grid[1];
    g->id[2] = n / d.grid[0] / d.grid[1];
    g->lds.assign(d.lds_bytes, 0xa5);
    g->lds_def.assign(d.lds_bytes, 0);
    g->shadow_shift = l.code->sub_dword_lds ? 0 : 2;
    g->shadow.clear();
    if (m.checks & C_LDS_RACE)
      g->shadow.assign((d.lds_bytes >> g->shadow_shift) + 4, LdsShadow{0});
    u32 waves = waves_of(l);
    g->vgprs.assign((size_t)waves * d.vgprs * kLanes + 16, 0x7fc0dead);
    g->undefs.assign((size_t)waves * d.vgprs, ~0ull);
    u32* base = g->vgprs.data();
    while (reinterpret_cast<uintptr_t>(base) & 63) base++;
    while (g->waves.size() > waves) g->waves.pop_back();
    while (g->waves.size() < waves) g->waves.push_back(std::make_unique<Wave>());
    for (u32 k = 0; k < waves; k++) {
      *g->waves[k] = Wave{};
      init_wave(*g->waves[k], *g, l, k, base);
      ready.push_back(g->waves[k].get());
    }
    l.live_wg++, l.c.workgroups++, l.c.waves += waves;
    l.c.max_resident_workgroups = std::max<u64>(l.c.max_resident_workgroups, l.live_wg);
    resident.push_back(std::move(g));
    m.progress++;
  }

  void init_wave(Wave& w, Workgroup& g, Launch& l, u32 k, u32* base) {
    const LaunchDesc& d = l.d;
    w.wg = &g, w.launch = &l, w.machine = &m, w.id = k;
    w.code = l.code->insts.data();
    w.v = base + (size_t)k * d.vgprs * kLanes;
    w.undef = g.undefs.data() + (size_t)k * d.vgprs;
    memset(w.s, 0xa5, sizeof w.s);
    memset(w.sundef, 0xff, sizeof w.sundef);
    memset(w.tag, 0, sizeof w.tag);
    w.mode = d.mode, w.pc = d.entry, w.priority = d.priority;
    w.order = m.rng.next() | 1ull << 63;
    u32 threads = threads_of(l), first = k * kLanes;
    u32 live = std::min<u32>(kLanes, threads - first);
    write_scalar64(w, kExecLo, live == 64 ? ~0ull : (1ull << live) - 1);
    int s = 0;
    auto put32 = [&](u32 x) { write_scalar(w, s++, x); };
    auto put64 = [&](u64 x) { write_scalar64(w, s, x), s += 2; };
    if (d.user_enable & 1) put64(0), put64(0);
    if (d.user_enable & 2) put64(d.dispatch_packet);
    if (d.user_enable & 4) put64(0);
    if (d.user_enable & 8) put64(d.kernarg);
    if (d.user_enable & 16) put64(l.id);
    if (d.user_enable & 32) put64(0);
    if (d.user_enable & 64) put32(d.scratch_bytes);
    const u32* args = reinterpret_cast<const u32*>(d.kernarg);
    for (u32 n = 0; n < d.preload_length; n++) put32(args[d.preload_offset + n]);
    s = (int)std::max<u32>(s, d.user_sgpr_count);
    for (int axis = 0; axis < 3; axis++)
      if (d.wg_id_mask >> axis & 1) put32(g.id[axis]);
    if (d.wg_id_mask & 8) put32(0);
    if (d.private_segment) put32(0);
    for (int lane = 0; lane < kLanes; lane++) {
      u32 t = first + lane;
      u32 x = t % d.block[0], y = t / d.block[0] % d.block[1], z = t / d.block[0] / d.block[1];
      w.v[lane] = x | (d.workitem_dims > 1 ? y << 10 : 0) | (d.workitem_dims > 2 ? z << 20 : 0);
    }
    w.undef[0] = 0;
    if (d.scratch_bytes) {
      w.scratch.assign((size_t)d.scratch_bytes * kLanes, 0xa5);
      w.scratch_def.assign((size_t)d.scratch_bytes * kLanes, 0);
    }
  }

  // One wave for up to `n` instructions.
  u64 run(Wave& w, u64 n) {
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
    w.executed += done, w.spun += spun;
    w.launch->c.spin += spun, w.launch->c.executed += done;
    if (spun < done) since_useful = 0, doublings = 0;
    else since_useful += done;
    if (spun) m.clock += 64;
    return done;
  }

  void release_barrier(Workgroup& g) {
    u32 waiting = 0;
    for (auto& w : g.waves) waiting += w->status == Status::Barrier;
    u32 live = (u32)g.waves.size() - g.done;
    if (!live || waiting != live) return;
    if (g.done && (m.checks & C_BARRIER)) {
      for (auto& w : g.waves)
        if (w->status == Status::Barrier) {
          report(*w, FK_BARRIER_DIVERGENCE, 0, g.done, g.waves.size());
          break;
        }
    }
    if ((++g.epoch & kEpochMask) == 0) {  // the short epoch wraps: forget all
      g.epoch++;
      std::fill(g.shadow.begin(), g.shadow.end(), 0);
    }
    g.launch->c.barriers++;
    for (auto& w : g.waves)
      if (w->status == Status::Barrier) {
        w->status = Status::Ready;
        ready.push_back(w.get());
        // Accesses that no wait covers may still happen after the barrier.
        u32 pc = w->pc;
        for (auto& o : w->ds_open) mark_lds(*w, o.addr, o.lanes, o.bytes, o.write, o.pc_index);
        for (auto& d : w->dmas) mark_lds(*w, d.lds, d.lanes, d.bytes, true, d.pc_index);
        w->pc = pc;
      }
    m.progress++;
  }

  void retire(Workgroup& g) {
    Launch& l = *g.launch;
    Cu& c = cus[l.d.rank][g.cu];
    c.waves -= share(l), c.lds -= l.d.lds_bytes, c.wgs--;
    l.live_wg--, l.done_wg++;
    if (l.finished()) drain_orphans(m, l);
    m.progress++;
    for (auto& r : resident)
      if (r.get() == &g) {
        std::swap(r, resident.back());
        spare.push_back(std::move(resident.back()));
        resident.pop_back();
        break;
      }
    dispatch();
  }

  bool starved(const Wave& w) const {
    const ScheduleDesc& s = m.schedule;
    if (s.kind != 3) return false;
    return (s.starve_rank == ~0u || w.launch->d.rank == s.starve_rank) &&
           (s.starve_workgroup == ~0u || w.wg->index == s.starve_workgroup) &&
           (s.starve_wave == ~0u || w.id == s.starve_wave);
  }

  size_t pick() {
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
  bool held(const Wave& w) const { return w.held > m.quantum; }

  // A wave that has not run since the last progress may still make some: a deadlock is called
  // only after it ran too.
  size_t unheard() const {
    size_t k = 0;
    while (k < ready.size() && ready[k]->last_run > progressed) k++;
    return k;
  }

  u64 quantum() {
    const ScheduleDesc& s = m.schedule;
    if (s.quantum_max <= s.quantum_min) return std::max<u64>(1, s.quantum_min);
    double lo = std::log2((double)s.quantum_min + 1), hi = std::log2((double)s.quantum_max + 1);
    double f = (double)(m.rng.next() >> 11) / (double)(1ull << 53);
    return std::max<u64>(1, (u64)std::exp2(lo + f * (hi - lo)));
  }

  void stuck() {
    for (auto& g : resident)
      for (auto& w : g->waves)
        if (w->status != Status::Done)
          report(*w, FK_DEADLOCK, 0, (u64)w->status, w->executed);
    for (auto& l : m.launches)
      if (l->next_wg < l->total_wg && l->next_wg > 0 && !resident.empty()) {
        Wave& w = *resident[0]->waves[0];
        u32 pc = w.pc;
        m.findings.push_back({FK_RESIDENCY, l->id, l->d.rank, l->next_wg, 0, 0, pc, 1,
                              l->total_wg - l->next_wg, l->live_wg});
      }
  }

  int loop() {
    size_t forced = ~size_t{0};
    dispatch();
    while (true) {
      if (ready.empty()) {
        bool all = true;
        for (auto& l : m.launches) all &= l->finished();
        if (all) return 0;
        if (resident.empty()) {
          u64 before = m.progress;
          m.quantum++;
          dispatch();
          if (m.progress != before || m.quantum < 1u << 20) continue;
          for (auto& l : m.launches)
            if (!l->finished())
              m.findings.push_back({FK_RESIDENCY, l->id, l->d.rank, 0, 0, 0, l->d.entry, 1,
                                    l->total_wg - l->next_wg, 0});
          return 2;
        }
        stuck();
        return 1;
      }
      size_t k = forced < ready.size() ? forced : pick();
      forced = ~size_t{0};
      Wave& w = *ready[k];
      w.last_run = ++m.quantum;
      u64 before = m.progress, spun = w.spun;
      u64 n = run(w, quantum());
      m.executed += n;
      m.clock += 1 + 4 * n / std::min<size_t>(std::max<size_t>(ready.size(), 1), 1024);
      bool only_spun = w.spun - spun == n;
      w.spin_run = only_spun ? w.spin_run + 1 : 0;
      // Of waves that only polled, those that ran last come last, roughly.
      w.order = only_spun ? (1ull << 62) - 4 * (m.quantum + m.rng.below(16))
                          : m.rng.next() | 1ull << 63;
      if (m.progress != before) since_useful = 0;
      if (!since_useful) progressed = m.quantum;
      if (!w.stores.empty()) drain_some(m, w.stores);
      for (auto& l : m.launches)
        if (!l->orphans.empty()) drain_some(m, l->orphans);
      if (w.status == Status::Ready) {
        next = k + 1;
        if (next >= ready.size()) next = 0;
      } else {
        if (m.schedule.kind == 0) ready.erase(ready.begin() + k);
        else ready[k] = ready.back(), ready.pop_back();
        next = k < ready.size() ? k : 0;
        Workgroup& g = *w.wg;
        if (w.status == Status::Done) {
          g.done++;
          if (g.done == g.waves.size()) retire(g);
          else release_barrier(g);
        } else {
          release_barrier(g);
        }
      }
      if (m.executed > m.schedule.max_instructions) {
        if (!ready.empty()) report(*ready[0], FK_LIMIT, 0, m.executed);
        return 3;
      }
      if (since_useful > m.schedule.spin_rounds * std::max<size_t>(ready.size(), 1)) {
        forced = unheard();
        if (forced < ready.size()) continue;
        bool clocked = false;
        for (Wave* r : ready) clocked |= r->used_clock;
        if (clocked && doublings < 44) {
          m.clock += fast_forward << std::min(doublings, 40);
          doublings++;
          since_useful = 0;
          continue;
        }
        stuck();
        return 1;
      }
    }
  }
};

}  // namespace

int run_machine(Machine& m) {
  m.rng.x = m.schedule.seed;
  for (auto& l : m.launches) {
    l->lines_read.assign(m.lines / 64 + 2, 0);
    l->lines_written.assign(m.lines / 64 + 2, 0);
  }
  auto s = std::make_unique<Scheduler>(m);
  int status = s->loop();
  for (auto& l : m.launches) {
    for (u64 x : l->lines_read) l->c.read_lines += __builtin_popcountll(x);
    for (u64 x : l->lines_written) l->c.write_lines += __builtin_popcountll(x);
  }
  return status;
}

}  // namespace emu
