// Stale caches: which global stores a load is sure to see.
//
// Memory always holds the newest bytes; this file knows where they would still be hidden on the
// device. A store lies in its XCD's L2 until it was written through (sc1: agent, sc0 sc1: system),
// until a buffer_wbl2 of that XCD, or until its launch ends. A plain load may hit a line of its
// CU's L1 or XCD's L2 that was fetched before the store; loads with sc1 go past both within a
// rank, with sc0 sc1 everywhere. buffer_inv forgets: L1 always, L2 with sc1. Caches are direct
// mapped, of the device's sizes. A load that may miss another CU's store is a finding.
//
// With C_HELD every line counts as fetched when its cache was last emptied, and as kept since: what
// hardware may do that fetches ahead, or lines that nobody names. A plain load then needs a
// buffer_inv of its CU after each store of another CU that it reads, whatever was loaded before.
//
// Scalar loads go through a cache of their own in each CU to the XCD's L2. No store reaches it, the
// CU's own included; s_dcache_inv empties it.
#include "vmem.h"

namespace emu {
namespace {

constexpr u32 kL1Lines = 256, kL2Lines = 32768, kScalarLines = 256, kPageWords = 1024;

struct Line {
  u64 line = 0, time = 0;
};
struct Cache {
  u64 invalidated = 0;
  std::vector<Line> lines;
  // Time at which the line was fetched, 0 when it is absent. held: by then it was there.
  u64 fetched(u64 line, bool held) const {
    const Line& l = lines[line % lines.size()];
    return l.line == line && l.time > invalidated ? l.time : held ? invalidated : 0;
  }
  void fetch(u64 line, u64 now, bool anew) {
    Line& l = lines[line % lines.size()];
    if (!anew && l.line == line && l.time > invalidated) return;
    l.line = line, l.time = now;
  }
};
struct Written {  // the last store to four bytes
  u64 time = 0;
  u32 launch = 0;
  u16 cu = 0;
  u8 rank = 0, level = 0;  // written through to 1: the agent, 2: the system
};

}  // namespace

struct Scopes {
  u64 now = 1;
  std::vector<std::unique_ptr<Written[]>> pages;
  std::map<u32, std::vector<Cache>> l1, l2;  // by rank
  std::map<u32, std::vector<Cache>> scalar;  // by rank and CU, lines of 64 bytes
  std::map<u32, std::vector<u64>> back[3];   // by rank and XCD: time of the last write-back
};

namespace {

Scopes& scopes(Machine& m) {
  if (!m.scopes) {
    m.scopes = std::make_shared<Scopes>();
    u64 pages = 0;
    for (auto& r : m.regions) r.page0 = pages, pages += ((r.base + r.size) >> 12) - (r.base >> 12) + 1;
    m.scopes->pages.resize(pages);
  }
  return *m.scopes;
}
void need_rank(Machine& m, Scopes& s, u32 rank) {
  if (!s.l1[rank].empty()) return;
  s.l1[rank].resize(m.device.xcds * m.device.cus_per_xcd);
  s.scalar[rank].resize(m.device.xcds * m.device.cus_per_xcd);
  s.l2[rank].resize(m.device.xcds);
  for (auto& c : s.l2[rank]) c.lines.resize(kL2Lines);
  for (auto& b : s.back) b[rank].resize(m.device.xcds);
}

// The last store to the word at `a` >> 2, or null.
const Written* written(Scopes& s, const Region* r, u64 word) {
  auto& page = s.pages[r->page0 + (word >> 10) - (r->base >> 12)];
  return page ? &page[word & (kPageWords - 1)] : nullptr;
}
// How far a store by `e` must have got for a reader: 0 its L2, 1 the agent's memory, 2 the system's.
u32 needed_by(const Written& e, u32 rank, u32 xcd, u32 xcds) {
  return e.rank != rank ? 2 : e.cu % xcds != xcd ? 1 : 0;
}
bool published(Machine& m, Scopes& s, const Written& e, u32 needed) {
  bool out = !needed || e.level >= needed || m.launches[e.launch]->finished();
  for (u32 k = needed; !out && k < 3; k++) {
    auto& back = s.back[k][e.rank];
    out = !back.empty() && back[e.cu % m.device.xcds] >= e.time;
  }
  return out;
}

}  // namespace

void scope_write(Machine& m, const Writer& who, const u64* addr, u64 lanes, u32 bytes) {
  if (!(m.checks & C_SCOPE)) return;
  Scopes& s = scopes(m);
  u64 now = ++s.now;
  for (u64 x = lanes; x; x &= x - 1) {
    u64 a = addr[__builtin_ctzll(x)];
    const Region* r = m.find(a, bytes);
    if (!r) continue;
    for (u64 word = a >> 2; word <= (a + bytes - 1) >> 2; word++) {
      auto& page = s.pages[r->page0 + (word >> 10) - (r->base >> 12)];
      if (!page) page.reset(new Written[kPageWords]);
      page[word & (kPageWords - 1)] = {now, who.launch, (u16)who.cu, (u8)who.rank, (u8)who.level};
    }
  }
}

void scope_read(Wave& w, const u64* addr, u64 lanes, u32 bytes, u32 level) {
  Machine& m = *w.machine;
  if (!(m.checks & C_SCOPE) || !lanes) return;
  Scopes& s = scopes(m);
  u32 rank = w.launch->d.rank, cu = w.wg->cu, xcds = m.device.xcds, xcd = cu % xcds;
  need_rank(m, s, rank);
  Cache &l1 = s.l1[rank][cu], &l2 = s.l2[rank][xcd];
  bool held = m.checks & C_HELD;
  if (l1.lines.empty()) l1.lines.resize(kL1Lines);
  u64 now = ++s.now, previous = ~0ull;
  for (u64 x = lanes; x; x &= x - 1) {
    int lane = __builtin_ctzll(x);
    u64 a = addr[lane], line = a >> 7;
    const Region* r = m.find(a, bytes);
    if (!r) continue;
    for (u64 word = a >> 2; word <= (a + bytes - 1) >> 2; word++) {
      const Written* last = written(s, r, word);
      if (!last) {
        word |= kPageWords - 1;
        continue;
      }
      const Written& e = *last;
      if (!e.time || (e.rank == rank && e.cu == cu)) continue;
      u32 needed = needed_by(e, rank, xcd, xcds);
      if (!published(m, s, e, needed)) {
        report(w, FK_STALE, lane, a, 1);
        continue;
      }
      u64 kept = l1.fetched(line, held);
      if (level == 0 && kept && kept < e.time) report(w, FK_STALE, lane, a, 2);
      kept = l2.fetched(line, held);
      if (needed && level < needed && kept && kept < e.time) report(w, FK_STALE, lane, a, 3);
    }
    if (line != previous) {
      if (level == 0 && !held) l1.fetch(line, now, false);
      if (level > 0 || !held) l2.fetch(line, now, level > 0);
      previous = line;
    }
  }
}

void scope_scalar_read(Wave& w, u64 addr, u32 bytes) {
  Machine& m = *w.machine;
  if (!(m.checks & C_SCOPE)) return;
  Scopes& s = scopes(m);
  u32 rank = w.launch->d.rank, cu = w.wg->cu, xcds = m.device.xcds;
  need_rank(m, s, rank);
  Cache &near = s.scalar[rank][cu], &l2 = s.l2[rank][cu % xcds];
  bool held = m.checks & C_HELD;
  if (near.lines.empty()) near.lines.resize(kScalarLines);
  const Region* r = m.find(addr, bytes);
  if (!r) return;
  u64 now = ++s.now;
  for (u64 a = addr; a < addr + bytes; a += 4) {
    const Written* e = written(s, r, a >> 2);
    if (e && e->time) {
      u32 needed = needed_by(*e, rank, cu % xcds, xcds);
      u64 kept = near.fetched(a >> 6, held), below = l2.fetched(a >> 7, held);
      if (!published(m, s, *e, needed)) report(w, FK_STALE, 0, a, 1);
      else if (kept && kept < e->time) report(w, FK_STALE, 0, a, 4);
      else if (!kept && needed && below && below < e->time) report(w, FK_STALE, 0, a, 3);
    }
  }
  for (u64 line = addr >> 6; !held && line <= (addr + bytes - 1) >> 6; line++)
    near.fetch(line, now, false), l2.fetch(line >> 1, now, false);
}
void scope_scalar_invalidate(Wave& w) {
  Machine& m = *w.machine;
  if (!(m.checks & C_SCOPE)) return;
  Scopes& s = scopes(m);
  need_rank(m, s, w.launch->d.rank);
  s.scalar[w.launch->d.rank][w.wg->cu].invalidated = ++s.now;
}

// A write-back counts from its issue, but only once it was waited for (memory.cpp).
u64 scope_now(Machine& m) { return m.checks & C_SCOPE ? ++scopes(m).now : 0; }
void scope_write_back(Wave& w, u32 level, u64 issued) {
  Machine& m = *w.machine;
  if (!(m.checks & C_SCOPE)) return;
  Scopes& s = scopes(m);
  need_rank(m, s, w.launch->d.rank);
  u64& t = s.back[level][w.launch->d.rank][w.wg->cu % m.device.xcds];
  t = std::max(t, issued);
}
void scope_invalidate(Wave& w, u32 flags) {
  Machine& m = *w.machine;
  if (!(m.checks & C_SCOPE)) return;
  Scopes& s = scopes(m);
  need_rank(m, s, w.launch->d.rank);
  u64 now = ++s.now;
  s.l1[w.launch->d.rank][w.wg->cu].invalidated = now;
  if (flags & F_SC1) s.l2[w.launch->d.rank][w.wg->cu % m.device.xcds].invalidated = now;
}
// A launch begins with clean caches of its rank.
void scope_launch(Machine& m, u32 rank) {
  if (!(m.checks & C_SCOPE)) return;
  Scopes& s = scopes(m);
  need_rank(m, s, rank);
  u64 now = ++s.now;
  for (auto& c : s.l1[rank]) c.invalidated = now;
  for (auto& c : s.scalar[rank]) c.invalidated = now;
  for (auto& c : s.l2[rank]) c.invalidated = now;
}

}  // namespace emu
