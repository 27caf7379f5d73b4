// Workgroups come to compute units and leave them; barriers.
#include <algorithm>

#include "sched.h"

namespace emu {
namespace {

u32 threads_of(const Launch& l) { return l.d.block[0] * l.d.block[1] * l.d.block[2]; }
u32 waves_of(const Launch& l) { return (threads_of(l) + kLanes - 1) / kLanes; }

}  // namespace

double Scheduler::share(const Launch& l) const {
  u32 regs = std::max(l.d.vgprs, 8u);
  u32 per_simd = std::min(m.device.waves_per_simd, m.device.vgprs_per_simd / regs);
  return (double)waves_of(l) / std::max(1u, per_simd * m.device.simds);
}

bool Scheduler::startable(const Launch& l) const {
  return l.next_wg < l.total_wg &&
         (!l.d.start_after || m.launches[l.d.start_after - 1]->finished()) &&
         m.quantum >= l.d.delay_rounds && !l.lost && !frozen.count(l.d.rank);
}

// Workgroup n goes to XCD n % xcds, there to the CU with the fewest workgroups that has room.
bool Scheduler::place(Launch& l) {
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

void Scheduler::dispatch() {
  for (auto& l : m.launches)
    while (startable(*l) && place(*l)) {
    }
}

void Scheduler::start(Launch& l, u32 cu) {
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

void Scheduler::init_wave(Wave& w, Workgroup& g, Launch& l, u32 k, u32* base) {
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

void Scheduler::release_barrier(Workgroup& g) {
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

void Scheduler::retire(Workgroup& g) {
  Launch& l = *g.launch;
  Cu& c = cus[l.d.rank][g.cu];
  c.waves -= share(l), c.lds -= l.d.lds_bytes, c.wgs--;
  l.live_wg--, l.done_wg++;
  if (l.finished()) drain_orphans(m, l), count_traffic(m, l);
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

}  // namespace emu
