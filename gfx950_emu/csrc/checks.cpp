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
void mark_lds(Wave& w, const u32* addr, u64 lanes, u32 bytes, bool write, u32 pc_index,
              u64 same) {
  if (!(w.machine->checks & C_LDS_RACE)) return;
  Workgroup& g = *w.wg;
  if (g.waves.size() < 2) return;
  const bool atomic = pc_index >> 31;
  const int sh = g.shadow_shift;
  const u32 epoch = g.epoch & kEpochMask, me = 0x10000u << w.id;
  const u32 mine = kWritten | (atomic ? kAtomic : 0) | w.id << 12;
  LdsShadow* shadow = g.shadow.data();
  for (u64 x = lanes; x; x &= x - 1) {
    int l = __builtin_ctzll(x);
    u32 first = addr[l] >> sh, last = (addr[l] + bytes - 1) >> sh;
    for (u32 n = first; n <= last; n++) {
      u32 e = shadow[n];
      if ((e & kEpochMask) != epoch) e = epoch;
      bool other = (e & kWritten) && (e >> 12 & 15) != w.id && !(atomic && (e & kAtomic));
      u32 readers = e >> 16 & ~(1u << w.id);
      if (!write) {
        shadow[n] = e | me;
      } else if (same >> l & 1) {  // changes nothing: no race, and no new writer
        shadow[n] = e & kWritten ? e : e | mine;
        continue;
      } else {
        other |= readers != 0;
        shadow[n] = (e & ~0xfc00u) | mine;
      }
      if (__builtin_expect(other, 0)) {
        bool by_writer = (e & kWritten) && (e >> 12 & 15) != w.id;
        u64 who = by_writer ? e >> 12 & 15 : (u64)__builtin_ctz(readers | 0x10000);
        report(w, FK_LDS_RACE, l, addr[l], who << 1 | write);
      }
    }
  }
}

}  // namespace emu
