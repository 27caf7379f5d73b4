// Findings, the wait check, undefined values, and the LDS race detector.
#include "vmem.h"

namespace emu {

void report(Wave& w, FindingKind kind, int lane, u64 addr, u64 aux) {
  Machine& m = *w.machine;
  Workgroup& g = *w.wg;
  u32 index = w.pc ? w.pc - 1 : 0;
  u64 key = (u64)kind << 56 | (u64)w.launch->id << 40 | index;
  auto at = m.finding_index.find(key);
  if (at != m.finding_index.end()) {
    m.findings[at->second].count++;
    return;
  }
  m.finding_index[key] = (u32)m.findings.size();
  m.findings.push_back({kind, w.launch->id, w.launch->d.rank, g.index, w.id, (u32)lane, index, 1,
                        addr, aux});
}

bool sgpr_undef(Wave& w, const Operand& o) {
  if (o.kind != K_SGPR) return false;
  for (int k = 0; k < o.width; k++)
    if (w.sundef[o.reg + k]) return true;
  return false;
}

namespace {

bool pending(const Wave& w, int r) {
  u64 t = w.tag[r];
  if (!t) return false;
  u64 seq = t & ~(3ull << 62);
  switch (t >> 62) {
    case TC_VM: return seq > w.vm_done;
    case TC_DS: return seq > w.ds_done;
    case TC_SMEM: return seq > w.smem_done;
    default: return seq > w.flat_done;
  }
}

bool check_operand(Wave& w, const Operand& o, FindingKind kind, bool in_order) {
  int base = o.kind == K_SGPR ? 0 : kVgprBase;
  for (int k = 0; k < o.width; k++) {
    int r = base + o.reg + k;
    if (!pending(w, r)) continue;
    // Loads of one kind come back in order: a second one may take the same register.
    if (in_order && (w.tag[r] >> 62) != TC_SMEM && (w.tag[r] >> 62) != TC_FLAT) continue;
    report(w, kind, 0, (u64)(o.kind == K_SGPR ? 0 : 1) << 32 | (u32)(o.reg + k), w.tag[r] >> 62);
    w.tag[r] = 0;
    return true;
  }
  return false;
}

}  // namespace

void check_pending(Wave& w, const Inst& i) {
  for (const Operand& o : i.src)
    if (o.kind == K_VGPR || o.kind == K_SGPR) check_operand(w, o, FK_WAIT_READ, false);
  u8 family = w.launch->code->families[w.pc - 1];
  bool memory = family >= FAM_SMEM && family <= FAM_MUBUF;
  for (const Operand& o : i.dst)
    if (o.kind == K_VGPR || o.kind == K_SGPR)
      check_operand(w, o, i.flags & F_READS_DST && !memory ? FK_WAIT_READ : FK_WAIT_OVERWRITE, memory);
}

u64 undef_sources(Wave& w, const Inst& i) {
  u64 u = 0;
  for (const Operand& o : i.src) {
    if (o.kind == K_VGPR) {
      u64 mine = 0;
      for (int k = 0; k < o.width; k++) mine |= w.undef[o.reg + k];
      if (mine && (i.flags & F_DPP) && &o == i.src) mine = dpp_undef(w, i, mine);
      u |= mine;
    } else if (o.kind == K_SGPR) {
      u32 s = 0;
      for (int k = 0; k < o.width; k++) s |= w.sundef[o.reg + k];
      if (s) {
        u |= o.type == T_MASK ? join(w.sundef[o.reg], w.sundef[o.reg + 1]) : ~0ull;
      }
    }
  }
  if (i.flags & F_READS_DST)
    for (int k = 0; k < i.dst[0].width; k++) u |= w.undef[i.dst[0].reg + k];
  return u;
}

void spread_undef(Wave& w, const Inst& i, u64 undef) {
  u64 m = w.wmask;
  for (const Operand& o : i.dst) {
    if (o.kind == K_VGPR) {
      for (int k = 0; k < o.width; k++)
        w.undef[o.reg + k] = (w.undef[o.reg + k] & ~m) | (undef & m);
    } else if (o.kind == K_SGPR && o.type == T_MASK) {
      u64 u = undef & w.exec();
      w.sundef[o.reg] = (u32)u;
      w.sundef[o.reg + 1] = (u32)(u >> 32);
    }
  }
}

// Two accesses of different waves to one granule within an epoch (between two barriers) race when
// one of them writes. An access that no wait covered at a barrier counts in the next epoch too.
namespace {

struct Marker {
  u32 epoch, me, mine, id;
  bool atomic;

  // Bits that are set when the granule's state `e` races with this access.
  template <bool Write>
  u32 conflict(u32 e) const {
    u32 written = (e & kWritten) && (e >> 12 & 15) != id && !(atomic && (e & kAtomic));
    return Write ? written | (e >> 16 & ~(1u << id)) : written;
  }
  template <bool Write>
  u32 next(u32 e) const {
    return Write ? (e & ~0xfc00u) | mine : e | me;
  }
};

// Marks `n` granules (N of them, when it is known); returns whether one of them races.
template <bool Write, int N>
bool mark_run(LdsShadow* shadow, u32 n, const Marker& m) {
  u32 bad = 0;
  if (N) n = N;
  for (u32 k = 0; k < n; k++) {
    u32 e = shadow[k];
    e = (e & kEpochMask) == m.epoch ? e : m.epoch;
    bad |= m.conflict<Write>(e);
    shadow[k] = m.next<Write>(e);
  }
  return bad;
}
template <bool Write>
bool mark_run(LdsShadow* shadow, u32 n, const Marker& m) {
  switch (n) {
    case 1: return mark_run<Write, 1>(shadow, n, m);
    case 2: return mark_run<Write, 2>(shadow, n, m);
    case 4: return mark_run<Write, 4>(shadow, n, m);
    default: return mark_run<Write, 0>(shadow, n, m);
  }
}

// Who the access raced with, of the granules' states before it.
void report_race(Wave& w, const Marker& m, const LdsShadow* before, u32 n, bool write, int lane,
                 u32 addr) {
  for (u32 k = 0; k < n; k++) {
    u32 e = before[k];
    if ((e & kEpochMask) != m.epoch) continue;
    if (!(write ? m.conflict<true>(e) : m.conflict<false>(e))) continue;
    u32 readers = e >> 16 & ~(1u << m.id);
    bool by_writer = (e & kWritten) && (e >> 12 & 15) != m.id;
    u64 who = by_writer ? e >> 12 & 15 : (u64)__builtin_ctz(readers | 0x10000);
    report(w, FK_LDS_RACE, lane, addr, who << 1 | write);
  }
}

}  // namespace

void mark_lds(Wave& w, const u32* addr, u64 lanes, u32 bytes, bool write, u32 pc_index,
              u64 same) {
  if (!(w.machine->checks & C_LDS_RACE)) return;
  Workgroup& g = *w.wg;
  if (g.waves.size() < 2) return;
  const bool atomic = pc_index & kAtomicAccess;
  const Marker m{g.epoch & kEpochMask, 0x10000u << w.id,
                 kWritten | (atomic ? kAtomic : 0) | w.id << 12, w.id, atomic};
  const int sh = g.shadow_shift;
  LdsShadow before[64];  // an access is of 16 bytes at most
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u32 first = addr[l] >> sh, n = ((addr[l] + bytes - 1) >> sh) - first + 1;
    LdsShadow* shadow = g.shadow.data() + first;
    if (write && (same >> l & 1)) {  // changes nothing: no race, and no new writer
      for (u32 k = 0; k < n; k++) {
        u32 e = (shadow[k] & kEpochMask) == m.epoch ? shadow[k] : m.epoch;
        shadow[k] = e & kWritten ? e : e | m.mine;
      }
      continue;
    }
    memcpy(before, shadow, n * sizeof *before);
    if (__builtin_expect(write ? mark_run<true>(shadow, n, m) : mark_run<false>(shadow, n, m), 0))
      report_race(w, m, before, n, write, l, addr[l]);
  }
}

}  // namespace emu
